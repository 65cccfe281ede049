"""What leaves a search: the files of the selected run, what the report tells of it, its charge beside
that of the run alone. Nothing else.
"""

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
from dpfy.core import events
from dpfy.core.codec import number
from dpfy.core.ledger import Ledger
from dpfy.core.unit import EXAMPLE
from dpfy.plan.claim import TrainingClaim
from dpfy.plan.recipe import Plan
from dpfy.report import card, figures
from dpfy.report.words import absent
from dpfy.runs.folder import LEDGER, RunFolder
from dpfy.training import metrics
from dpfy.tuning.claim import TRIALS, TUNING, Tuning
from dpfy.tuning.routes import COMPOSITION, HELD_OUT, NOISY_MAX, SUBSET
from dpfy.tuning.sealed import TrialReport, TrialResult
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.terms import TrialSplit

MODEL = "model.safetensors"
MOST_SHOWN = 200
"""Trials that are repeated in the report; all that may be shown are in trials.jsonl."""
NONE_MADE = (
    "the number of trials that was drawn is 0, as it may be: no model was trained, and the "
    "released file holds no weights"
)
NOT_SHOWN = "the exponential mechanism released which trial it chose, not its score"


@dataclass(frozen=True)
class SelectedTrial:
    """What was selected: its number and what it was made with, and where the released run lies
    among the secrets.
    """

    number: int
    row: TrialResult
    settings: Settings
    place: Path

    @property
    def told(self) -> TrialReport:
        """What the released run tells."""
        return TrialReport.read(self.place)


Files = Callable[[Settings, Plan], Mapping[str, bytes]]
"""The files of the selected run beside its model."""


def publish(
    folder: RunFolder,
    claim: Tuning,
    found: SelectedTrial | None,
    rows: Mapping[int, TrialResult],
    files: Files,
    split: TrialSplit,
) -> None:
    """Write the selected run into the folder, then its report, and erase everything else.

    Guarantees: nothing of another trial is written but what its payment lets be shown; the times of
    all files are that of the reservation, so that nothing tells how long the search took.
    """
    every = _rows(claim, found, rows)
    if found is None:
        folder.write(MODEL, save({}, metadata={"format": "pt"}))
        folder.tell(TUNING, settings=absent(NONE_MADE), trials=[])
        facts = card.Facts(_about(folder), 0)
    else:
        told = found.told
        for name, content in {
            **files(found.settings, told.plan),
            MODEL: (found.place / MODEL).read_bytes(),
        }.items():
            folder.write(name, content)
        if noted := _metrics(found.place):
            folder.write(metrics.FILE, noted)
        section = _told(claim, found, told) | counted(claim, split)
        folder.tell(TUNING, **section, trials=_few(every))
        facts = card.Facts({**told.provenance, **_about(folder)}, told.steps)
    if not claim.payment.random:
        folder.write(TRIALS, "".join(json.dumps(row) + "\n" for row in every).encode())
    folder.finish(facts)
    same_times(folder.path)


def same_times(path: Path) -> None:
    """Give every file of a run folder the time at which the run was reserved."""
    began = next(
        body["time"] for body in Ledger.read(path / LEDGER).bodies if body["type"] == "reserve"
    )
    for file in (*path.iterdir(), path):
        os.utime(file, (began, began), follow_symlinks=False)


def _metrics(place: Path) -> bytes:
    """The rows of the selected run without the epsilon of its steps alone, which is not what they
    cost here.
    """
    rows = [{k: v for k, v in row.items() if k != "epsilon"} for row in metrics.rows(place)]
    return "".join(json.dumps(row) + "\n" for row in rows if len(row) > 1).encode()


def _about(folder: RunFolder) -> dict[str, str]:
    seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
    return {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}


def _told(claim: Tuning, found: SelectedTrial, told: TrialReport) -> dict[str, Any]:
    """What the section tells: the selected settings, how the run was trained, and what it all
    cost.
    """
    trained = {
        key: value for key, value in TrainingClaim(told.plan).describe().items() if key != "title"
    }
    score = absent(NOT_SHOWN) if claim.payment.route == NOISY_MAX else number(found.row.score)
    own = {
        "settings": dict(found.settings),
        "score": score,
        "selected_kind": found.row.kind,
        "bill": bill(claim, told.plan),
    }
    return {
        **told.section,
        **trained,
        **own,
        **({"notes": dict(found.row.notes)} if found.row.notes else {}),
    }


def counted(claim: Tuning, split: TrialSplit) -> dict[str, Any]:
    """What a noisy score counts: its standard error, and of how many, as far as that is public."""
    score = claim.paid.score
    if not isinstance(score, events.DiscreteGaussian):
        return {}
    held, unit = claim.payment.score == HELD_OUT, claim.unit
    part = split.sampled if claim.payment.route == SUBSET else split.training
    what = "records" if unit == EXAMPLE else f"{unit.name}s"
    each = ", each with the share of their records" if unit.most_records > 1 else ""
    told = {
        "standard_error": score.sigma / score.sensitivity,
        "expected": split.validation if held else part,
        "counts": f"{what} {'held out' if held else 'trained on'} that are answered right{each}",
    }
    return {"scored": told}


def bill(claim: Tuning, plan: Plan) -> dict[str, Any]:
    """The charge of the search beside that of the run, and what the same budget would have bought
    without a search.
    """
    whole = figures.Bill(claim.event, claim.adjacency, claim.accountant, claim.delta)
    total, alone = figures.epsilon(whole), figures.epsilon(whole.of(plan.event))
    untuned = plan.recipe.calibrate(
        total, claim.delta, accountant=claim.accountant, allow_large_delta=True
    ).noise_multiplier
    ratio = plan.noise_multiplier / untuned
    return {
        "training_alone": number(alone),
        "with_the_search": number(total),
        "noise_multiplier": plan.noise_multiplier,
        "noise_without_search": untuned,
        "noise_ratio": ratio,
        "words": f"Without a search the same budget would have bought this run with noise "
        f"{untuned:.4g} instead of "
        f"{plan.noise_multiplier:.4g}, {ratio:.3g} times less: about what {ratio:.3g} times as "
        f"many records would have bought.",
    }


def _few(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials that are repeated in the report: at most `MOST_SHOWN`, the selected one first."""
    return sorted(every, key=lambda row: not row["selected"])[:MOST_SHOWN]


def _rows(
    claim: Tuning, found: SelectedTrial | None, rows: Mapping[int, TrialResult]
) -> list[dict[str, Any]]:
    """Every trial that may be published: all of a search that is charged trial by trial, else the
    selected one alone.
    """
    if claim.payment.random:
        return (
            []
            if found is None
            else [_row(claim, found.settings, {"score": number(found.row.score)}, True)]
        )
    made = []
    for place, row in rows.items():
        steps = (
            {}
            if row.steps >= claim.paid.plans[row.kind].recipe.steps
            else {"pruned_after": row.steps}
        )
        score = (
            {"score": row.score if math.isfinite(row.score) else None}
            if claim.payment.route == COMPOSITION
            else {}
        )
        made.append(
            _row(claim, row.settings, score | steps, found is not None and place == found.number)
        )
    return made


def _row(
    claim: Tuning, settings: Settings, told: Mapping[str, Any], selected: bool
) -> dict[str, Any]:
    """A trial as it is published, with its place in the space, where there is one, for the
    picture.
    """
    at = {"at": Space.read(claim.space).at(settings)} if set(claim.space) == set(settings) else {}
    return {"settings": dict(settings), **told, "selected": selected, **at}
