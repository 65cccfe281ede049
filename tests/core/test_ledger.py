"""The ledger: durable, chained, locked, budgeted."""

from __future__ import annotations

import json

import pytest

from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, Busy, Corrupt, InvalidInput
from dpfy.core.ledger import Ledger, hold
from dpfy.core.unit import Adjacency, Unit

STEP = events.PoissonSampled(0.1, events.Gaussian(2.0))


def filled(path, count=3):
    ledger = Ledger.open(path)
    for n in range(count):
        ledger.reserve(f"training {n}", STEP, uses=10 + n)
    return ledger


def test_what_was_reserved_is_read_back(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = filled(path)
    again = Ledger.read(path)
    assert [(p.name, p.event, p.uses) for p in again.permits()] == [(f"training {n}", STEP, 10 + n) for n in range(3)]
    assert again.head == ledger.head
    assert events.flatten(again.event()) == [(STEP, 33)]


def test_any_flipped_byte_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path, 2)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        for bit in (0x01, 0x20):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            with pytest.raises(Corrupt, match=r"ledger\.jsonl"):
                Ledger.read(path)


def test_a_removed_line_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(Corrupt, match="line 3"):
        Ledger.read(path)


@pytest.mark.parametrize("kept", [1, 30, -1])
def test_a_torn_last_line_was_never_durable_and_is_dropped(tmp_path, kept):
    path = tmp_path / "ledger.jsonl"
    filled(path, 2)
    whole = path.read_bytes()
    Ledger.open(path).reserve("torn", STEP)
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[: kept if kept > 0 else len(line) // 2])
    ledger = Ledger.open(path)
    assert path.read_bytes() == whole
    assert [p.name for p in ledger.permits()] == ["training 0", "training 1"]


def test_a_whole_last_line_without_its_end_still_counts(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert len(Ledger.open(path).permits()) == 2
    assert len(Ledger.read(path).permits()) == 2


def test_header_fixes_unit_and_adjacency(tmp_path):
    path = tmp_path / "ledger.jsonl"
    filled(path)
    with pytest.raises(InvalidInput, match="adjacency"):
        Ledger.open(path, adjacency=Adjacency.REPLACE_ONE)
    with pytest.raises(InvalidInput, match="unit"):
        Ledger.open(path, unit=Unit("user", 5))


def test_budget_refuses_and_writes_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    budget = RenyiFilter(3.0, 1e-5)
    ledger = Ledger.open(path, budget=budget)
    ledger.reserve("first", events.Gaussian(2.0), budget=budget)
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match="budget is epsilon 3"):
        ledger.reserve("second", events.Gaussian(2.0), budget=budget)
    assert path.read_bytes() == before


def test_a_budget_cannot_be_left_out_or_raised(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger.open(path, budget=RenyiFilter(3.0, 1e-5))
    with pytest.raises(InvalidInput, match="budget"):
        Ledger.open(path).reserve("sneaky", STEP)
    with pytest.raises(InvalidInput, match="budget"):
        Ledger.open(path).reserve("sneaky", STEP, budget=RenyiFilter(30.0, 1e-5))
    with pytest.raises(InvalidInput, match="budget"):
        Ledger.open(path, budget=RenyiFilter(30.0, 1e-5))


def test_void_gives_back_only_an_open_reservation(tmp_path):
    path = tmp_path / "ledger.jsonl"
    budget = RenyiFilter(3.0, 1e-5)
    ledger = Ledger.open(path, budget=budget)
    permit = ledger.reserve("first", events.Gaussian(2.0), budget=budget)
    ledger.void(permit, "nothing was released")
    assert ledger.permits() == []
    ledger.reserve("second", events.Gaussian(2.0), budget=budget)
    with pytest.raises(InvalidInput, match="not an open reservation"):
        ledger.void(permit, "again")


def test_permit_covers_its_steps_only(tmp_path):
    permit = Ledger.open(tmp_path / "ledger.jsonl").reserve("training", STEP, uses=3)
    permit.check(0)
    permit.check(2)
    for step in (-1, 3):
        with pytest.raises(InvalidInput, match="covers 3 releases"):
            permit.check(step)


def test_foreign_or_missing_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(Corrupt, match="missing"):
        Ledger.read(path)
    path.write_text(json.dumps({"not": "a ledger"}) + "\n")
    with pytest.raises(Corrupt, match="line 1 is not a ledger entry"):
        Ledger.read(path)


def test_one_holder_at_a_time(tmp_path):
    with hold(tmp_path / "lock", "run x"), pytest.raises(Busy, match="run x"), hold(tmp_path / "lock", "run x"):
        pass
    with hold(tmp_path / "lock", "run x"):
        assert (tmp_path / "lock").exists()
