"""A collection of local reports, from the claim to the run folder: reserve, receive (or simulate),
estimate, report.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dpfy
from dpfy.core import storage
from dpfy.core.errors import InvalidInput
from dpfy.local.claim import FILE, LocalClaim, ShuffledClaim
from dpfy.local.protocol import DeviceReport, LocalEstimate, Rows
from dpfy.mechanisms.choice import permutation
from dpfy.mechanisms.mechanism import source
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Run


@dataclass(frozen=True, repr=False)
class CollectionResult(Released):
    """What a collection leaves: a finished run with its estimate."""

    estimate: dict[str, Any]

    def _told(self) -> dict[str, Any]:
        return {"estimate": self.estimate}


def collect(
    claim: LocalClaim,
    reports: Sequence[DeviceReport] | Rows,
    run: Run | str | Path | None,
    confidence: float = 0.95,
) -> CollectionResult:
    """The server's side: an estimate from reports that came from devices, in a run folder that
    anyone can verify.

    Guarantees: behind a shuffler, fewer reports than the claim was made for are refused: fewer hide
    less.
    """
    if claim.simulated:
        raise InvalidInput(
            "simulated", True, "must be false for reports of real devices; use simulate"
        )
    return _run(claim, run, confidence, lambda folder: reports)


def simulate(
    claim: LocalClaim, values: Any, run: Run | str | Path | None, confidence: float = 0.95
) -> CollectionResult:
    """Both sides in one process that holds all values, one a person: charged per person; the report
    says that it was a simulation.

    Guarantees: what is released is made of reports alone, each drawn by the protocol, in a random
    order behind a shuffler.
    """
    if not claim.simulated:
        raise InvalidInput(
            "simulated",
            False,
            "must be true where one process holds all values: its report must not say that nobody "
            "did",
        )

    def made(folder: RunFolder) -> Rows:
        given = claim.protocol.given(values() if callable(values) else values)
        folder.bind(claim.name, np.ascontiguousarray(given).tobytes())
        bits = source(claim.event, folder.begin(claim.name), folder.randomness, 0)
        rows = claim.protocol.draw(given, bits)
        return rows[permutation(len(rows), bits)] if isinstance(claim, ShuffledClaim) else rows

    return _run(claim, run, confidence, made)


def _run(
    claim: LocalClaim,
    run: Run | str | Path | None,
    confidence: float,
    reports: Callable[[RunFolder], Sequence[DeviceReport] | Rows],
) -> CollectionResult:
    place = Run.of(run)
    if not complete(place, claim):
        with RunFolder(place, claim) as folder:
            received = reports(folder)
            if isinstance(claim, ShuffledClaim) and len(received) < claim.records:
                raise InvalidInput(
                    "reports",
                    len(received),
                    f"must be at least {claim.records}, which the claim says hide each other",
                )
            found = claim.protocol.estimate(received, confidence)
            folder.begin(claim.name)
            folder.write(FILE, json.dumps(found.to_json(), indent=1).encode())
            folder.tell(claim.name, **_figures(found))
            seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
            about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
            folder.finish(card.Facts(about, releases=1))
    path = Path(place.path)
    return CollectionResult(path, storage.parsed_json(FILE, storage.content(FILE, path / FILE)))


def _figures(found: LocalEstimate) -> dict[str, Any]:
    """What the report repeats."""
    worst = float(np.max(found.standard_error))
    return {
        "reports": found.reports,
        "reports_left_out": found.refused,
        "largest_standard_error": worst,
        "estimates": FILE,
    }
