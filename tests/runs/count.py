"""A kind of release that dpfy does not know: a Laplace count, in a file of its own. Run as a
script, it makes one release.

    python count.py FOLDER [--ledger FILE] [--resume] [--noise 2.0] [--people 37] [--kill N]

With --kill the process kills itself at its N-th call that touches the disk: a crash at any moment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import check, events
from dpfy.core.claim import YES, Assumption, Claim, register
from dpfy.core.randomness import Randomness
from dpfy.core.values import Permit
from dpfy.report import card
from dpfy.runs.folder import RunFolder
from dpfy.runs.run import Run


@register
@dataclass(frozen=True)
class LaplaceCount(Claim):
    """How many people there are, with Laplace noise: the claim."""

    noise_multiplier: float
    question: str = "how many"

    kind: ClassVar[str] = "laplace-count"
    purpose: ClassVar[str] = "statistics"
    artefacts: ClassVar[tuple[str, ...]] = ("count.json",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.positive("noise_multiplier", self.noise_multiplier)

    @property
    def name(self) -> str:
        return f"count: {self.question}"

    @property
    def event(self) -> events.Event:
        return events.Laplace(self.noise_multiplier)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        return [
            Assumption(
                "count",
                "one unit changes the count by at most 1",
                "units were counted, each once",
                YES,
            )
        ]

    def describe(self) -> dict[str, Any]:
        return {"title": "A count", "question": self.question, "noise": self.noise_multiplier}


def release(count: int, noise_multiplier: float, randomness: Randomness, permit: Permit) -> float:
    """The mechanism: compares its own event with the permit's before it adds noise."""
    permit.check(0, events.Laplace(noise_multiplier))
    u = (int.from_bytes(randomness.key(permit.name, 0, 8), "little") + 0.5) / 2**64 - 0.5
    return count - noise_multiplier * math.copysign(math.log(1 - 2 * abs(u)), u)


def run(place: Run, read: Callable[[], int], claim: LaplaceCount) -> Path:
    """Reserve, read, release, write, finish."""
    with RunFolder(place, claim) as folder:
        count = read()
        folder.bind("count", str(count).encode())
        found = release(count, claim.noise_multiplier, folder.randomness, folder.begin(claim.name))
        folder.write("count.json", json.dumps({"count": found}).encode())
        folder.tell(claim.name, count=found)
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        facts = card.Facts(
            {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed},
            releases=1,
        )
        return folder.finish(facts)


def killed_at(call: int) -> None:
    """Kill this process at its `call`-th call that changes the disk."""
    seen = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*a: Any, **k: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*a, **k)

        return counted

    for name in (
        "open",
        "write",
        "fsync",
        "replace",
        "unlink",
        "mkdir",
        "rmdir",
        "ftruncate",
        "link",
        "rename",
    ):
        setattr(os, name, counting(getattr(os, name)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ledger", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--noise", type=float, default=2.0)
    parser.add_argument("--people", type=int, default=37)
    parser.add_argument("--kill", type=int, default=0)
    options = parser.parse_args()
    claim = LaplaceCount(options.noise, delta=1e-6)
    budget = None if options.ledger is None else RenyiFilter(3.0, 1e-5)
    place = Run(options.folder, resume=options.resume, ledger=options.ledger, budget=budget, seed=3)
    if options.kill:
        killed_at(options.kill)
    run(place, lambda: options.people, claim)


if __name__ == "__main__":
    main()
