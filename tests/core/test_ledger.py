"""The ledger: durable, chained, locked, budgeted."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, Busy, Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import HashChain, Ledger, Permit, hold, mark_of
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency, Unit
from dpfy.mechanisms.exact import Bits

GAUSSIAN = events.Gaussian(2.0)
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
    assert [(p.name, p.event, p.uses) for p in again.permits()] == [
        (f"training {n}", STEP, 10 + n) for n in range(3)
    ]
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
    """A crash inside the write: the mark still says what was durable before."""
    path = tmp_path / "ledger.jsonl"
    filled(path, 2)
    whole, mark = path.read_bytes(), mark_of(path).read_bytes()
    Ledger.open(path).reserve("torn", STEP)
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[: kept if kept > 0 else len(line) // 2])
    mark_of(path).write_bytes(mark)
    ledger = Ledger.open(path)
    assert path.read_bytes() == whole
    assert [p.name for p in ledger.permits()] == ["training 0", "training 1"]


@pytest.mark.parametrize("lost", [2, 40, "line", "all"])
def test_a_durable_line_that_is_lost_is_missed(tmp_path, lost):
    """Its budget must not go to the next run."""
    path = tmp_path / "people.jsonl"
    filled(path, 2)
    whole = path.read_bytes()
    gone = {"line": len(whole.splitlines(keepends=True)[-1]), "all": len(whole)}.get(lost, lost)
    path.write_bytes(whole[:-gone])
    for use in (Ledger.open, Ledger.read):
        with pytest.raises(Corrupt, match=r"people\.jsonl.*(lost|cut short)"):
            use(path)
    assert path.read_bytes() == whole[:-gone]


@pytest.mark.parametrize("kept", ["all", "header", "torn"])
def test_without_its_mark_a_ledger_takes_nothing_until_its_head_is_stated(tmp_path, kept):
    """Lines at its end may have been removed with the mark: their budget must not come back."""
    path = tmp_path / "ledger.jsonl"
    head = filled(path, 2).head
    whole = path.read_bytes()
    left = {"all": whole, "header": whole.splitlines(keepends=True)[0], "torn": whole[:-2]}[kept]
    path.write_bytes(left)
    mark_of(path).unlink()
    if kept == "all":
        held = Ledger.read(path)  # looking is free
        assert len(held.permits()) == 2
        with pytest.raises(Corrupt, match=r"has lost ledger\.jsonl\.head"):
            held.reserve("another", STEP)
    with pytest.raises(Corrupt, match=r"has lost ledger\.jsonl\.head.*dpfy ledger recover"):
        Ledger.open(path)
    assert path.read_bytes() == left
    if kept == "all":
        with pytest.raises(InvalidInput, match="--head"):
            Ledger.recover(path, "0" * 64)
        assert not mark_of(path).exists()
        again = Ledger.recover(path, head)
        assert again.recovered == [len(again.bodies) - 1]
        assert len(Ledger.open(path).permits()) == 2
        with pytest.raises(InvalidInput, match="nothing to recover"):
            Ledger.recover(path, again.head)
    else:
        with pytest.raises((InvalidInput, Corrupt), match=r"lines are missing|cut short"):
            Ledger.recover(path, head)


def test_what_is_no_ledger_is_not_opened_for_writing_to_recover_it(tmp_path, monkeypatch):
    """Not even what the system shows as a file and is none, as the memory of a process."""
    other, flags, opened = tmp_path / "notes.txt", [], os.open
    other.write_text("my own notes")
    monkeypatch.setattr(
        os, "open", lambda path, how, *a, **k: flags.append(how) or opened(path, how, *a, **k)
    )
    with pytest.raises(Corrupt, match="line 1 is not a ledger entry"):
        Ledger.recover(other, "0" * 64)
    with pytest.raises(InvalidInput, match="ledger"):
        Ledger.recover(Path("/proc/self/mem"), "0" * 64)
    assert flags
    assert all(how & (os.O_WRONLY | os.O_RDWR) == 0 for how in flags)


def test_a_crash_at_any_point_of_making_a_ledger_leaves_one_that_can_be_opened(
    tmp_path, monkeypatch
):
    """The mark is there before the first line, so no crash makes a ledger look as if it had lost
    its mark.
    """
    from dpfy.core import ledger as chain

    real, path = chain._write_mark, tmp_path / "ledger.jsonl"
    for survives in (0, 1):
        left = [survives]

        def crash(*given, left=left):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            real(*given)

        monkeypatch.setattr(chain, "_write_mark", crash)
        with pytest.raises(KeyboardInterrupt):
            Ledger.open(path)
        monkeypatch.setattr(chain, "_write_mark", real)
        assert filled(path, 1).permits()
        path.unlink()
        mark_of(path).unlink()


def test_a_crash_between_line_and_mark_keeps_the_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = filled(path, 1)
    mark = mark_of(path).read_bytes()
    ledger.reserve("second", STEP)
    after = mark_of(path).read_bytes()
    mark_of(path).write_bytes(mark)
    assert len(Ledger.open(path).permits()) == 2
    assert mark_of(path).read_bytes() == after


def test_a_mark_of_another_ledger_or_a_damaged_one_is_refused(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    filled(one, 1)
    filled(two, 2)
    mark_of(two).write_bytes(mark_of(one).read_bytes())
    with pytest.raises(Corrupt, match="belong together"):
        Ledger.open(two)
    for damage in (
        b"",
        b"[]",
        b"{}",
        b'{"entries":1,"head":3,"length":true}',
        b"[" * 4000,
        b"x" * 5000,
    ):
        mark_of(one).write_bytes(damage)
        with pytest.raises(Corrupt, match=r"one\.jsonl\.head"):
            Ledger.open(one)


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
    permit = ledger.reserve("first", events.Gaussian(2.0), budget=budget, returnable=True)
    ledger.void(permit, "nothing was released")
    assert ledger.permits() == []
    ledger.reserve("second", events.Gaussian(2.0), budget=budget)
    with pytest.raises(InvalidInput, match="not an open reservation"):
        ledger.void(permit, "again")


def test_permit_covers_its_steps_only(tmp_path):
    permit = Ledger.open(tmp_path / "ledger.jsonl").reserve("training", STEP, uses=3)
    permit.check(0, permit.event)
    permit.check(2, permit.event)
    for step in (-1, 3):
        with pytest.raises(InvalidInput, match="covers 3 releases"):
            permit.check(step, permit.event)


def test_foreign_or_missing_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(Corrupt, match="missing"):
        Ledger.read(path)
    path.write_text(json.dumps({"not": "a ledger"}) + "\n")
    with pytest.raises(Corrupt, match="line 1 is not a ledger entry"):
        Ledger.read(path)


def test_a_file_that_is_no_ledger_is_never_opened_for_writing(tmp_path, monkeypatch):
    path = tmp_path / "notes.txt"
    path.write_text("somebody's notes\n")
    monkeypatch.setattr(
        "dpfy.core.ledger.locked", lambda *_, **__: pytest.fail("opened for writing")
    )
    with pytest.raises(Corrupt, match="line 1 is not a ledger entry"):
        Ledger.open(path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_only_a_ledger_makes_permits(tmp_path):
    permit = Ledger.open(tmp_path / "ledger.jsonl").reserve("training", STEP, uses=3)
    with pytest.raises(Unsupported, match="reserve the release"):
        Permit("training", STEP, 3, "0" * 16)
    with pytest.raises(Unsupported, match="reserve the release"):
        replace(permit, uses=10**6)
    with pytest.raises(InvalidInput, match="was given for"):
        permit.check(0, events.Gaussian(99.0))


def test_one_holder_at_a_time(tmp_path):
    with pytest.raises(Busy, match="just ended"), hold(tmp_path / "lock", "run x"):
        pass
    (tmp_path / "lock").touch()
    with (
        hold(tmp_path / "lock", "run x"),
        pytest.raises(Busy, match="run x"),
        hold(tmp_path / "lock", "run x"),
    ):
        pass
    with hold(tmp_path / "lock", "run x"):
        assert (tmp_path / "lock").exists()


def test_a_budget_is_asked_for_all_uses(tmp_path):
    """Not for one of them, with all reserved."""
    budget = RenyiFilter(3.0, 1e-5)
    ledger = Ledger.open(tmp_path / "people.jsonl", budget=budget)
    event = events.Gaussian(8.0)
    assert budget.why_not([], event, ledger.adjacency) is None
    with pytest.raises(BudgetExceeded):
        ledger.reserve("tuning", event, 1000, budget=budget)
    assert ledger.permits() == []


def test_a_budget_is_judged_from_the_file_as_it_is_now(tmp_path):
    """Two processes have the ledger open; the second to ask must see what the first one got."""
    path, budget, event = tmp_path / "people.jsonl", RenyiFilter(3.0, 1e-5), events.Gaussian(2.0)
    one, two = Ledger.open(path, budget=budget), Ledger.open(path, budget=budget)
    one.reserve("first", event, budget=budget)
    with pytest.raises(BudgetExceeded):
        two.reserve("second", event, budget=budget)
    assert [p.name for p in Ledger.read(path).permits()] == ["first"]


def test_what_has_begun_or_was_reserved_for_good_is_never_given_back(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    tuning = ledger.reserve("tuning: 3 candidates", STEP)
    training = ledger.begin(ledger.reserve("training", STEP, 5, returnable=True))
    with pytest.raises(InvalidInput, match="reserved permanently"):
        ledger.void(tuning, "never happened")
    with pytest.raises(InvalidInput, match="has started"):
        ledger.void(training, "never happened")
    ledger.finish(training, steps=5, card="0" * 64, files={})
    with pytest.raises(InvalidInput, match="may follow the end"):
        ledger.void(training, "never happened")
    assert [p.name for p in Ledger.read(ledger.path).permits()] == [
        "tuning: 3 candidates",
        "training",
    ]


def test_a_permit_allows_releases_from_its_beginning_to_the_end_of_the_run(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    permit = ledger.reserve("training", STEP, 2, returnable=True)
    with pytest.raises(InvalidInput, match="before the first release"):
        permit.check(0, permit.event)
    permit = ledger.begin(permit)
    permit.check(1, permit.event)
    assert ledger.begin(permit) == permit  # again, after a crash
    ledger.finish(permit, steps=2, card="0" * 64, files={})
    with pytest.raises(InvalidInput, match="finished"):
        ledger.begin(permit).check(0, permit.event)


def test_a_run_that_was_given_back_cannot_begin(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    permit = ledger.reserve("training", STEP, returnable=True)
    ledger.void(permit, "the input was refused")
    with pytest.raises(InvalidInput, match="not an open reservation"):
        ledger.begin(permit)


def test_there_is_one_end(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    permit = ledger.begin(ledger.reserve("training", STEP, returnable=True))
    ledger.finish(permit, steps=1, card="0" * 64, files={"model.safetensors": "1" * 64})
    before = ledger.path.read_bytes()
    ledger.finish(permit, steps=1, card="0" * 64, files={"model.safetensors": "1" * 64})
    assert ledger.path.read_bytes() == before
    with pytest.raises(InvalidInput, match="may follow the end"):
        ledger.finish(permit, steps=1, card="0" * 64, files={"model.safetensors": "2" * 64})
    for write in (
        lambda: ledger.reserve("more", STEP),
        lambda: ledger.note("more"),
        lambda: ledger.begin(permit).check(0, permit.event),
    ):
        with pytest.raises(InvalidInput):
            write()
    (tmp_path / "audit.json").write_text("{}")
    ledger.attach(["audit.json"])
    (tmp_path / "model.safetensors").write_text("another")
    with pytest.raises(InvalidInput, match="cannot be exchanged"):
        ledger.attach(["model.safetensors"])
    assert Ledger.read(ledger.path).book.attached.keys() == {"audit.json"}


def test_nothing_follows_from_a_note(tmp_path):
    """A note can neither take the place of another line nor change a bill."""
    ledger = filled(tmp_path / "ledger.jsonl", 1)
    before = ledger.event()
    for kind in ("sampling", "void", "finish", "begun", "shared-ledger"):
        ledger.note(kind, done="read in order", most=1, entry=ledger.permits()[0].entry)
    assert Ledger.read(ledger.path).event() == before
    with pytest.raises(InvalidInput, match="JSON"):
        ledger.note("odd", value=float("nan"))
    with pytest.raises(InvalidInput, match="printable"):
        ledger.note("odd\n", value=1)


def chained(path, *bodies):
    """A ledger of these lines, whatever they say, with hashes that fit."""
    chain = HashChain()
    text = b"".join(chain.add(b) for b in bodies)
    path.write_bytes(text)
    mark_of(path).write_text(
        json.dumps({"entries": len(bodies), "head": chain.head, "length": len(text)})
    )


def test_the_reader_judges_the_lines_whoever_wrote_them(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.open(path)
    permit = ledger.begin(ledger.reserve("training", STEP, returnable=True))
    tuning = ledger.reserve("tuning", STEP)
    whole = list(ledger.bodies)
    void = {"type": "void", "entry": permit.entry, "reason": "never happened"}
    end = {"type": "finish", "entry": permit.entry, "steps": 1, "card": "0" * 64, "files": {}}
    for wrong, rule in [
        ([void], "has started"),
        ([{**void, "entry": tuning.entry}], "reserved permanently"),
        ([{**void, "entry": "0" * 16}], "not an open reservation"),
        ([end, {**end, "card": "1" * 64}], "may follow the end"),
        ([end, void], "may follow the end"),
        ([{**end, "entry": "0" * 16}], "has started"),
        ([{**end, "files": {"../../etc/passwd": "0" * 64}}], "must match"),
        ([{"type": "attach", "files": {}}], "finished run only"),
        ([{"type": "sampling", "done": "once", "most": 1}], "must be one of"),
        ([whole[0]], "first line"),
        ([whole[1]], "was reserved before"),
        ([{**whole[1], "entry": "0" * 16, "uses": 10**18}], "at most"),
        (
            [
                {
                    **whole[1],
                    "entry": "0" * 16,
                    "event": {"kind": "poisson-sampled", "rate": 0.5, "event": "gaussian"},
                }
            ],
            "event",
        ),
    ]:
        chained(path, *whole, *wrong)
        for use in (Ledger.read, Ledger.open):
            with pytest.raises(Corrupt, match=rf"ledger\.jsonl: line \d+: .*{rule}"):
                use(path)


def test_a_ledger_of_another_version_is_refused_in_one_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    chained(
        path,
        {
            "type": "ledger",
            "version": 1,
            "ledger": "0" * 16,
            "unit": {},
            "adjacency": "",
            "budget": None,
        },
    )
    with pytest.raises(
        Corrupt, match="line 1: ledger version: got 1; must be 2: another version of dpfy"
    ):
        Ledger.open(path)


def test_locks_that_keep_nobody_out_are_refused(tmp_path, monkeypatch):
    """With such a file system 8 of 8 runs trained on a budget for 5."""
    import fcntl

    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: None)
    with pytest.raises(
        Unsupported, match=r"people\.jsonl on a file system whose locks keep nobody out"
    ):
        Ledger.open(tmp_path / "people.jsonl")
    (tmp_path / "lock").touch()
    with (
        pytest.raises(Unsupported, match="locks keep nobody out"),
        hold(tmp_path / "lock", "run x"),
    ):
        pass

    def none(handle, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(Unsupported, match="No locks available"):
        Ledger.open(tmp_path / "people.jsonl")


def test_what_is_no_file_is_no_ledger(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(InvalidInput, match=name):
            Ledger.open(tmp_path / name)
        with pytest.raises(Corrupt, match=name):
            Ledger.read(tmp_path / name)


def test_a_ledger_without_end_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    filled(path, 1)
    monkeypatch.setattr("dpfy.core.ledger.MOST", 100)
    for use in (Ledger.read, Ledger.open):
        with pytest.raises(Corrupt, match="more than 100 bytes"):
            use(path)


def test_a_full_disk_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    import os

    path = tmp_path / "ledger.jsonl"
    ledger = filled(path, 1)
    before, write = path.read_bytes(), os.write

    def full(handle, content):
        write(handle, bytes(content)[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        ledger.reserve("second", STEP)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert len(ledger.permits()) == len(Ledger.open(path).permits()) == 1


def test_the_head_covers_every_line_before_it():
    """A published head is that of one past only: the same last lines after another first one have
    another head.
    """
    bodies = [{"type": "note", "kind": "first", "facts": {"value": value}} for value in (1, 2)]
    last = {"type": "note", "kind": "last", "facts": {}}
    heads = set()
    for body in bodies:
        held = HashChain()
        held.add(body)
        held.add(last)
        heads.add(held.head)
    assert len(heads) == 2


def test_a_reservation_is_synced_before_it_is_granted(tmp_path, monkeypatch):
    """The whole line is in the file when that file itself is synced, and that comes before the
    permit.
    """
    path = tmp_path / "ledger.jsonl"
    ledger, synced, real = Ledger.open(path), [], os.fsync

    def fsync(handle):
        if os.path.samestat(os.fstat(handle), path.stat()):
            synced.append(path.read_bytes())
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    permit = ledger.reserve("training", STEP)
    assert any(permit.entry.encode() in content and content.endswith(b"\n") for content in synced)


def test_a_ledger_that_is_gone_is_not_begun_anew(tmp_path):
    """A link whose disk is missing, or a file that its mark outlived: an empty ledger would forget
    what was spent.
    """
    (tmp_path / "linked.jsonl").symlink_to(tmp_path / "disk" / "people.jsonl")
    with pytest.raises(InvalidInput, match="is a link to a file that is not there"):
        Ledger.open(tmp_path / "linked.jsonl")
    filled(tmp_path / "people.jsonl")
    (tmp_path / "people.jsonl").unlink()
    with pytest.raises(Corrupt, match="has 0 bytes where"):
        Ledger.open(tmp_path / "people.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["linked.jsonl", "people.jsonl.head"]


@pytest.mark.parametrize("place", ["/proc/self/mem", "/dev/full", "a pipe", "a folder"])
def test_what_is_no_file_is_not_opened_for_writing(tmp_path, monkeypatch, place):
    path = Path(place) if place.startswith("/") else tmp_path / place
    if place == "a pipe":
        os.mkfifo(path)
    if place == "a folder":
        path.mkdir()
    real = os.open

    def reading_only(name, flags, *rest, **options):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), name
        return real(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", reading_only)
    with pytest.raises(InvalidInput, match="ledger: got"):
        Ledger.open(path)


STOPS = {
    "releases": 30,
    "stops": [
        [10, events.CODEC.encode(events.Repeated(STEP, 10))],
        [20, events.CODEC.encode(events.Repeated(STEP, 20))],
    ],
}


def stoppable(path, budget=None):
    ledger = Ledger.open(path, budget=budget)
    return ledger, ledger.reserve(
        "training", events.Repeated(STEP, 30), claim=STOPS, returnable=True, budget=budget
    )


def test_a_reservation_that_ends_early_is_billed_at_the_next_of_its_stops(tmp_path):
    ledger, permit = stoppable(tmp_path / "l.jsonl")
    ledger.begin(permit)
    closed = ledger.settle(permit, made=13, billed=20)
    assert ledger.settle(permit, made=13, billed=20) == closed, "safe to repeat"
    again = Ledger.read(tmp_path / "l.jsonl")
    assert again.event() == events.Composed((events.Repeated(events.Repeated(STEP, 20), 1),))
    assert again.settlements == {"training": (13, 20)}
    assert again.first == events.Repeated(events.Repeated(STEP, 30), 1)
    with pytest.raises(InvalidInput, match="ended after 13 releases"):
        again.permits()[0].check(13, events.Repeated(STEP, 20))


@pytest.mark.parametrize(
    ("made", "billed"),
    [(13, 10), (10, 20), (3, 3), (21, 20), (21, 30), (-1, 10), (True, 10), (13, "20")],
)
def test_it_is_never_billed_for_less_than_was_made_or_for_what_was_not_named(
    tmp_path, made, billed
):
    ledger, permit = stoppable(tmp_path / "l.jsonl")
    ledger.begin(permit)
    with pytest.raises(InvalidInput):
        ledger.settle(permit, made=made, billed=billed)
    assert Ledger.read(tmp_path / "l.jsonl").settlements == {}


def test_it_is_settled_once_and_after_it_began(tmp_path):
    ledger, permit = stoppable(tmp_path / "l.jsonl")
    with pytest.raises(InvalidInput, match="has started"):
        ledger.settle(permit, made=3, billed=10)
    ledger.begin(permit)
    ledger.settle(permit, made=13, billed=20)
    for made, billed in ((3, 10), (14, 20)):
        with pytest.raises(InvalidInput, match="settled before"):
            ledger.settle(permit, made=made, billed=billed)
    plain = ledger.reserve("other", STEP)
    with pytest.raises(InvalidInput, match="billed"):
        ledger.settle(plain, made=0, billed=1)


def test_what_a_run_did_not_use_is_there_for_others_and_the_filter_keeps_its_order(tmp_path):
    """Its order is that of the first reservation as it was made; one given back while it was alone
    has left nothing behind.
    """
    budget = RenyiFilter(2.3, 1e-5)
    ledger, permit = stoppable(tmp_path / "l.jsonl", budget)
    other = ledger.reserve("other", events.Gaussian(9.0), budget=budget, returnable=True)
    big = events.Repeated(STEP, 55)
    with pytest.raises(BudgetExceeded):
        ledger.reserve("next", big, budget=budget)
    ledger.begin(permit)
    ledger.settle(permit, made=9, billed=10)
    ledger.reserve("next", big, budget=budget)
    assert ledger.first == events.Repeated(events.Repeated(STEP, 30), 1)
    alone = Ledger.open(tmp_path / "a.jsonl", budget=budget)
    first = alone.reserve("first", events.Gaussian(9.0), budget=budget, returnable=True)
    alone.void(first, "refused")
    assert alone.first is None
    second = alone.reserve("second", STEP, budget=budget, returnable=True)
    alone.reserve("third", events.Gaussian(9.0), budget=budget)
    alone.void(second, "refused")
    assert alone.first == events.Repeated(STEP, 1), "the third was admitted beside it"
    assert other.entry in ledger.book.returnable


def test_a_forked_process_makes_no_release_and_one_that_was_sent_the_permit_does(tmp_path):
    """A fork has the permit and the random bits of its parent: it would release what the parent
    releases, on other sums.
    """
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    permit = ledger.reserve("count", GAUSSIAN)
    bits = Bits(Randomness.for_tests(1), "count", 0)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: permit.check(0, GAUSSIAN),
            lambda: permit.spend(0, GAUSSIAN),
            lambda: bits.words(1),
        ):
            try:
                use()
            except Unsupported as error:
                refused += "forked process" in str(error)
        pickle.loads(pickle.dumps(permit)).check(0, GAUSSIAN)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    permit.spend(0, GAUSSIAN)
    assert len(bits.words(2)) == 2


def test_a_begun_reservation_keeps_its_place_and_a_run_ends_once(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    permit = ledger.reserve("count", GAUSSIAN, returnable=True)
    with pytest.raises(InvalidInput, match="has started"):
        ledger.end(permit.entry, "a" * 64)
    ledger.begin(permit, "1" * 32)
    ledger.begin(permit, "1" * 32)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(Unsupported, match="started in another folder"):
        ledger.begin(permit, "2" * 32)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    ledger.end(permit.entry, "a" * 64)
    ledger.end(permit.entry, "a" * 64)
    with pytest.raises(InvalidInput, match="completed once"):
        ledger.end(permit.entry, "b" * 64)
    held = Ledger.read(tmp_path / "ledger.jsonl")
    assert held.book.places == {permit.entry: "1" * 32}
    assert held.book.ended == {permit.entry: "a" * 64}
    assert held.spent() == [events.Repeated(GAUSSIAN, 1)]
    with pytest.raises(InvalidInput, match="its run ended"):
        held.permits()[0].check(0, GAUSSIAN)


@pytest.mark.parametrize(
    "body", [{"place": "1" * 31}, {"place": None}, {"place": "g" * 32}, {"places": "1" * 32}]
)
def test_a_place_that_is_none_is_refused(tmp_path, body):
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    permit = ledger.reserve("count", GAUSSIAN, returnable=True)
    with pytest.raises(InvalidInput):
        ledger._write({"type": "begun", "entry": permit.entry, **body})
