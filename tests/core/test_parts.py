"""Releases on named, disjoint parts of the data in one ledger: added up part by part, within a
budget, in every accountant.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfy import accounting
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events as ev
from dpfy.core.errors import BudgetExceeded, InvalidInput
from dpfy.core.events import on_part
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency
from dpfy.report import spending

REGIONS = ("north", "south", "west")
COUNT = ev.Gaussian(4.0)


def total(ledger: Ledger, accountant: str = "tight") -> float:
    return ledger.guarantee(accounting.accountant(accountant)).epsilon(1e-6)


def alone(
    event: ev.Event, accountant: str = "tight", adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
) -> float:
    return accounting.epsilon(event, 1e-6, adjacency=adjacency, accountant=accountant)


@pytest.mark.parametrize("accountant", ["tight", "rdp", "zcdp"])
def test_releases_on_different_parts_cost_what_the_costliest_part_does(
    tmp_path: Path, accountant: str
) -> None:
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    for region in REGIONS:
        ledger.reserve(f"a count in the {region}", on_part(region, REGIONS, COUNT))
    assert total(ledger, accountant) == pytest.approx(alone(COUNT, accountant), rel=1e-9)
    ledger.reserve("another in the south", on_part("south", REGIONS, ev.Laplace(9.0)), 2)
    south = ev.Composed((COUNT, ev.Repeated(ev.Laplace(9.0), 2)))
    assert total(ledger, accountant) == pytest.approx(alone(south, accountant), rel=1e-9)
    everybody = ev.Repeated(ev.PoissonSampled(0.05, ev.Gaussian(2.0)), 50)
    if accountant == "zcdp":
        everybody = ev.Gaussian(8.0)
    ledger.reserve("training on everybody", everybody)
    assert total(ledger, accountant) == pytest.approx(
        alone(ev.Composed((south, everybody)), accountant), rel=1e-9
    )
    again = Ledger.read(tmp_path / "ledger.jsonl")
    assert again.event() == ledger.event(), "names and parts survive the file"
    assert spending.of(again, 1e-6).to_json()["epsilon"] == pytest.approx(total(ledger), rel=1e-9)


def test_other_names_are_other_parts(tmp_path: Path) -> None:
    """A unit of the north may be young: two ways to part the data are composed."""
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    ledger.reserve("north", on_part("north", REGIONS, COUNT))
    ledger.reserve("young", on_part("young", ("young", "old"), COUNT))
    assert total(ledger) == pytest.approx(alone(ev.Repeated(COUNT, 2)), rel=1e-9)
    ledger.reserve("north, of four regions", on_part("north", (*REGIONS, "east"), COUNT))
    assert total(ledger) == pytest.approx(alone(ev.Repeated(COUNT, 3)), rel=1e-9)


def test_a_replaced_unit_may_move(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.jsonl", adjacency=Adjacency.REPLACE_ONE)
    for region in REGIONS:
        ledger.reserve(region, on_part(region, REGIONS, COUNT))
    moved, stays = alone(ev.Repeated(COUNT, 2)), alone(COUNT, adjacency=Adjacency.REPLACE_ONE)
    assert total(ledger) == pytest.approx(max(moved, stays), rel=1e-3)


def test_a_budget_holds_for_every_part_by_itself(tmp_path: Path) -> None:
    budget = RenyiFilter(1.6, 1e-6)
    ledger = Ledger.open(tmp_path / "ledger.jsonl", budget=budget)
    for region in REGIONS:
        ledger.reserve(region, on_part(region, REGIONS, COUNT), budget=budget)
    with pytest.raises(BudgetExceeded, match="epsilon"):
        ledger.reserve("once more in the north", on_part("north", REGIONS, COUNT), budget=budget)
    with pytest.raises(BudgetExceeded):
        ledger.reserve(
            "the north by another name", on_part("North", ("North", "rest"), COUNT), budget=budget
        )
    with pytest.raises(BudgetExceeded):
        ledger.reserve("everybody", COUNT, budget=budget)
    assert len(ledger.permits()) == 3


def test_a_part_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'north'"):
        on_part("nroth", REGIONS, COUNT)
    for parts in ((), ("north", "north")):
        with pytest.raises(InvalidInput):
            on_part("north", parts, COUNT)
