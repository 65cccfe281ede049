"""What leaves a search: the files of the selected run, what the card tells of it, its bill beside that of the run alone. Nothing else."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

import dpfy
from dpfy.core.codec import number
from dpfy.core.ledger import Ledger
from dpfy.plan.claim import Training
from dpfy.plan.recipe import Plan
from dpfy.report import card, figures
from dpfy.report.words import absent
from dpfy.runs.folder import LEDGER, RunFolder
from dpfy.training import metrics
from dpfy.tuning.claim import TRIALS, TUNING, Tuning
from dpfy.tuning.kinds import Kinds
from dpfy.tuning.payment import COMPOSITION, NOISY_MAX
from dpfy.tuning.sealed import TOLD
from dpfy.tuning.search import Row
from dpfy.tuning.space import Settings, Space

MODEL = "model.safetensors"
MOST_SHOWN = 200
"""Trials that are repeated on the card; all that may be shown are in trials.jsonl."""
NONE_MADE = "the number of trials that was drawn is 0, as it may be: no model was trained, and the released file holds no weights"
NOT_SHOWN = "the exponential mechanism released which trial it chose, not its score"


@dataclass(frozen=True)
class Selected:
    """What was selected: its settings, where it lies among the secrets, and its score; nothing where no trial was made."""

    claim: Tuning
    kinds: Kinds
    settings: Settings | None
    place: Path | None
    number: int | None = None
    score: float | None = None

    @property
    def kind(self) -> int:
        """The kind of the selected run."""
        return 0 if self.settings is None else self.kinds.place(self.settings)

    @property
    def plan(self) -> Plan:
        """Its plan, with its own clip norm."""
        assert self.settings is not None
        return self.kinds.plan(self.settings, self.claim.paid, final=True)


def publish(
    folder: RunFolder, found: Selected, rows: Mapping[int, Row], files: Callable[[Settings, Plan], Mapping[str, bytes]]
) -> None:
    """Write the selected run into the folder, then its card, and erase everything else.

    Guarantees: nothing of another trial is written but what its payment lets be shown; the times of all files are that of the
    reservation, so that nothing tells how long the search took.
    """
    shown = _shown(found, rows)
    if found.place is None or found.settings is None:
        folder.write(MODEL, save({}, metadata={"format": "pt"}))
        folder.tell(TUNING, settings=absent(NONE_MADE), trials=shown)
        facts = card.Facts(_about(folder), 0)
    else:
        held = _held(found)
        for name, content in {**files(found.settings, found.plan), MODEL: (found.place / MODEL).read_bytes()}.items():
            folder.write(name, content)
        if noted := _metrics(found.place):
            folder.write(metrics.FILE, noted)
        folder.tell(TUNING, **_told(found, held["told"]), trials=shown)
        facts = card.Facts(held["provenance"] | _about(folder), held["releases"])
    if not found.claim.payment.random:
        folder.write(TRIALS, "".join(json.dumps(row) + "\n" for row in _rows(found, rows)).encode())
    folder.finish(facts)
    same_times(folder.path)


def same_times(path: Path) -> None:
    """Give every file of a run folder the time at which the run was reserved."""
    began = next(body["time"] for body in Ledger.read(path / LEDGER).bodies if body["type"] == "reserve")
    for file in (*path.iterdir(), path):
        os.utime(file, (began, began), follow_symlinks=False)


def _held(found: Selected) -> dict[str, Any]:
    assert found.place is not None
    read = json.loads((found.place / TOLD).read_bytes())
    return {"told": read["told"], "provenance": read["provenance"], "releases": int(read["releases"])}


def _metrics(place: Path) -> bytes:
    """The rows of the selected run without the epsilon of its steps alone, which is not what they cost here."""
    rows = [{k: v for k, v in row.items() if k != "epsilon"} for row in metrics.rows(place)]
    return "".join(json.dumps(row) + "\n" for row in rows if len(row) > 1).encode()


def _about(folder: RunFolder) -> dict[str, str]:
    seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
    return {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}


def _told(found: Selected, told: Mapping[str, Any]) -> dict[str, Any]:
    """What the section tells: the selected settings, how the run was trained, and what it all cost."""
    trained = {key: value for key, value in Training(found.plan).describe().items() if key != "title"}
    score = absent(NOT_SHOWN) if found.claim.payment.route == NOISY_MAX else number(found.score)
    return (
        dict(told)
        | trained
        | {"settings": dict(found.settings or {}), "score": score, "selected_kind": found.kind, "bill": bill(found)}
    )


def bill(found: Selected) -> dict[str, Any]:
    """The bill of the search beside that of the run, and what the same budget would have bought without a search."""
    claim, plan = found.claim, found.plan
    whole = figures.Bill(claim.event, claim.adjacency, claim.accountant, claim.delta)
    total, alone = figures.epsilon(whole), figures.epsilon(whole.of(plan.event))
    untuned = plan.recipe.calibrate(total, claim.delta, accountant=claim.accountant, allow_large_delta=True).noise_multiplier
    ratio = plan.noise_multiplier / untuned
    return {
        "training_alone": number(alone),
        "with_the_search": number(total),
        "noise_multiplier": plan.noise_multiplier,
        "noise_without_search": untuned,
        "noise_ratio": ratio,
        "words": f"Without a search the same budget would have bought this run with noise {untuned:.4g} in place of "
        f"{plan.noise_multiplier:.4g}, {ratio:.3g} times less: about what {ratio:.3g} times as many records would have bought.",
    }


def _shown(found: Selected, rows: Mapping[int, Row]) -> list[dict[str, Any]]:
    """The trials that may be published, for the card: at most `MOST_SHOWN`, the selected one among them."""
    every = _rows(found, rows)
    mine = [row for row in every if row.get("selected")]
    return mine + [row for row in every if not row.get("selected")][: MOST_SHOWN - len(mine)]


def _rows(found: Selected, rows: Mapping[int, Row]) -> list[dict[str, Any]]:
    """Every trial that may be published: all of a search that is billed trial by trial, else the selected one alone."""
    payment = found.claim.payment
    if payment.random:
        return [] if found.settings is None else [_row(found, found.settings, {"score": number(found.score)}, True)]
    made = []
    for place, row in rows.items():
        score = {"score": row.score if math.isfinite(row.score) else None} if payment.route == COMPOSITION else {}
        steps = {} if row.steps >= found.kinds.plan(row.settings, found.claim.paid).recipe.steps else {"pruned_after": row.steps}
        made.append(_row(found, row.settings, score | steps, place == found.number))
    return made


def _row(found: Selected, settings: Settings, told: Mapping[str, Any], selected: bool) -> dict[str, Any]:
    """A trial as it is published, with its place in the space, for the picture."""
    return {"settings": dict(settings), **told, "selected": selected, "at": Space.read(found.claim.space).at(settings)}
