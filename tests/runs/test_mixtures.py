"""One ledger over releases of many kinds: its guarantee is stated, two-sided, and computed again by
verification.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import dpfy
from dpfy import accounting
from dpfy.core import events
from dpfy.core.claim import Claim, register
from dpfy.core.ledger import Ledger
from dpfy.report import card as cards
from dpfy.report.verify import verify
from dpfy.runs.folder import RunFolder
from dpfy.runs.run import Run

DELTA = 1e-5


@register
@dataclass(frozen=True)
class Anything(Claim):
    """A claim about any event, for tests."""

    title: str
    what: str

    kind: ClassVar[str] = "anything"
    purpose: ClassVar[str] = "statistics"

    @property
    def name(self) -> str:
        return self.title

    @property
    def event(self) -> events.Event:
        return events.decode(json.loads(self.what))

    def describe(self) -> dict[str, Any]:
        return {"title": self.title}


def claim(title: str, event: events.Event) -> Anything:
    return Anything(title, json.dumps(events.CODEC.encode(event)), delta=DELTA)


SEVEN: dict[str, events.Event] = {
    "count": events.Laplace(8.0),
    "choice": events.BoundedRange(0.1),
    "tuning": events.RepeatAndSelect(
        events.Repeated(events.PoissonSampled(0.01, events.Gaussian(4.0)), 50), 5.0, 1.0
    ),
    "training": events.Repeated(events.PoissonSampled(0.02, events.Gaussian(1.5)), 300),
    "banded": events.BallsInBins(6.0, ((1.0, 0.3), (0.3, 1.0))),
    "black box": events.EpsilonDelta(0.1, 1e-8),
    "curve": events.RenyiCurve((2.0, 4.0, 8.0, 16.0, 32.0), (0.01, 0.02, 0.04, 0.08, 0.16)),
}


def test_a_ledger_of_seven_kinds_has_a_guarantee_that_verifies(tmp_path):
    """At most what splitting delta evenly gives, at least each one's own lower bound; and
    verified.
    """
    claims = [claim(name, event) for name, event in SEVEN.items()]
    with RunFolder(Run(tmp_path / "run", seed=1), *claims) as folder:
        for name in SEVEN:
            folder.begin(name)
        folder.finish(
            cards.Facts({"dpfy": dpfy.__version__, "seed": cards.FIXED_SEED}, releases=len(SEVEN))
        )
    assert [f for f in verify(tmp_path / "run") if not f.holds] == []
    assert [f for f in verify(tmp_path / "run" / "privacy.json") if not f.holds] == []
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    stated = card["guarantee"]["epsilon"]
    whole = accounting.epsilon(Ledger.read(tmp_path / "run" / "ledger.jsonl").event(), DELTA)
    assert stated == pytest.approx(whole, rel=1e-6)
    split, least = 0.0, 0.0
    for event in SEVEN.values():
        split += min(best(event, DELTA / len(SEVEN), name) for name in accounting.TABLE)
        lower = accounting.curve(event).epsilon_lower(DELTA)
        least = max(least, lower or 0.0)
    assert least <= stated <= split
    assert len(card["accesses"]["covered"]) == 7


def best(event: events.Event, delta: float, accountant: str) -> float:
    try:
        return accounting.epsilon(event, delta, accountant=accountant)
    except dpfy.DpfyError:
        return math.inf


def test_a_budget_takes_all_seven(tmp_path):
    from dpfy.accounting.filters import RenyiFilter

    budget = (
        RenyiFilter(20.0, DELTA, 1e-6)
        if len(RenyiFilter.__dataclass_fields__) > 2
        else RenyiFilter(20.0, DELTA)
    )
    people = tmp_path / "people.jsonl"
    taken = []
    for name, event in SEVEN.items():
        with RunFolder(
            Run(tmp_path / name.replace(" ", "-"), ledger=people, budget=budget),
            claim(name, event),
        ) as folder:
            folder.begin(name)
            taken.append(name)
    assert taken == list(SEVEN)
    assert len(Ledger.read(people).permits()) == 7
