"""Two processes in one run folder, and a claim whose price changes: what is released once is billed
once, as it was reserved.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import pytest

from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events, storage
from dpfy.core.claim import register
from dpfy.core.errors import Busy, Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.queries import run as queries
from dpfy.queries.plan import QueryTerms
from dpfy.report.verify import verify
from dpfy.runs import mark
from dpfy.runs.folder import LEDGER, RunFolder
from dpfy.runs.mark import Mark
from dpfy.runs.run import Run
from dpfy.statistics.claim import FILE
from dpfy.statistics.statistic import SumStatistic
from dpfy.tables.columns import Number

sys.path.insert(0, str(Path(__file__).parent))
import count
from count import LaplaceCount

CLAIM = LaplaceCount(2.0, delta=1e-6)
BUDGET = RenyiFilter(3.0, 1e-5)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def during(monkeypatch, what: str, do) -> None:
    """Call `do` when a process has done `what` to its folder's mark, and goes on."""
    real = getattr(Mark, what)

    def then(self, *given):
        found = real(self, *given)
        monkeypatch.undo()
        do()
        return found

    monkeypatch.setattr(Mark, what, then)


def test_nobody_comes_in_while_a_run_ends(tmp_path, monkeypatch):
    """Between the erasure of the secrets and that of the mark."""
    run, tried = tmp_path / "run", []

    def second():
        with pytest.raises(Busy, match="another process"):
            count.run(Run(run, resume=True, seed=3), lambda: 38, CLAIM)
        tried.append(1)

    during(monkeypatch, "erase_secrets", second)
    count.run(Run(run, seed=3), lambda: 37, CLAIM)
    assert tried
    assert not (run / "checkpoint").exists()
    assert all(f.holds for f in verify(run))


def test_nobody_comes_in_while_a_run_is_undone(tmp_path, monkeypatch):
    """What was reserved by a second process would be taken from under it."""
    run, people, tried = tmp_path / "run", tmp_path / "people.jsonl", []
    place = Run(run, ledger=people, budget=BUDGET)

    def second():
        with pytest.raises(Busy, match="another process"):
            RunFolder(Run(run, resume=True, ledger=people, budget=BUDGET), CLAIM)
        tried.append(1)

    def refused():
        during(monkeypatch, "erase_secrets", second)
        raise InvalidInput("data", "none", "must be there")

    with pytest.raises(InvalidInput, match="must be there"):
        count.run(place, refused, CLAIM)
    assert tried
    assert not run.exists()
    assert Ledger.read(people).permits() == []


def test_who_comes_too_late_leaves_nothing_behind(tmp_path, monkeypatch):
    """The first process ends when the second has looked at the folder and not yet taken it."""
    run = tmp_path / "run"
    first = RunFolder(Run(run, seed=3), CLAIM)
    first.close()
    real, before = RunFolder._take, {}

    def late(self):
        monkeypatch.undo()
        count.run(Run(run, resume=True, seed=3), lambda: 37, CLAIM)
        before.update(tree(run))
        return real(self)

    monkeypatch.setattr(RunFolder, "_take", late)
    with pytest.raises(Busy, match="just ended"):
        count.run(Run(run, resume=True, seed=3), lambda: 38, CLAIM)
    assert tree(run) == before
    assert not (run / "checkpoint").exists()


@pytest.mark.parametrize("where", [".", "checkpoint"])
def test_what_another_process_takes_away_while_the_folder_is_looked_at_is_passed_over(
    tmp_path, monkeypatch, where
):
    """A file that is renamed between being listed and looked at ends nothing; a link beside it is
    still refused.
    """
    run = tmp_path / "run"
    RunFolder(Run(run, seed=3), CLAIM).close()
    real, gone = os.lstat, run / where / ".0123456789abcdef.part"

    def late(path, **options):
        if Path(path) == gone:  # it was listed, and the other process is done with it
            gone.unlink(missing_ok=True)
        return real(path, **options)

    link = run / where / "link"
    link.symlink_to(tmp_path)
    gone.write_text("half")
    with monkeypatch.context() as patch:
        patch.setattr(mark.os, "lstat", late)
        with pytest.raises(InvalidInput, match="a link, pipe or device"):
            mark.refuse_planted(run)
        link.unlink()
        gone.write_text("half")
        mark.refuse_planted(run)
        assert not gone.exists()
    count.run(Run(run, resume=True, seed=3), lambda: 37, CLAIM)
    assert all(f.holds for f in verify(run))


def test_a_mark_that_goes_while_it_is_looked_at_is_that_of_a_run_that_ended(tmp_path, monkeypatch):
    run = tmp_path / "run"
    RunFolder(Run(run, seed=3), CLAIM).close()
    real = os.lstat

    def late(path, **options):
        if mark.NAME.fullmatch(Path(path).name) and Path(path).exists():
            monkeypatch.undo()
            count.run(Run(run, resume=True, seed=3), lambda: 37, CLAIM)
        return real(path, **options)

    monkeypatch.setattr(mark.os, "lstat", late)
    with pytest.raises(InvalidInput, match="already holds a finished run"):
        count.run(Run(run, resume=True, seed=3), lambda: 38, CLAIM)
    assert all(f.holds for f in verify(run))


def resumed(run: Path, people: Path, ages: list[int], go: int) -> int:
    """A process that resumes a query when `go` can be read: 0 if it answers, 1 if it is refused."""
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        os.read(go, 1)
        code = 0
        query(run, people, ages, resume=True)
    except DpfyError:
        code = 1
    except BaseException:
        code = 2
        traceback.print_exc()
    finally:
        os._exit(code)


def query(run: Path, people: Path, ages: list[int], resume: bool = False) -> queries.QueryResult:
    place = Run(run, resume=resume, ledger=people, budget=BUDGET)
    return queries.answered(
        {"age": ages},
        "count(), mean(age)",
        schema={"age": Number("age", 0, 100)},
        terms=QueryTerms(0.5),
        run=place,
    )


def answers(run: Path, people: Path, ages: list[int]) -> bytes:
    """What a resumed query answers, alone and elsewhere; nothing if it is refused."""
    with TemporaryDirectory() as elsewhere:
        copy = shutil.copytree(run, Path(elsewhere) / "run")
        for file in people.parent.glob("people*"):
            shutil.copy(file, elsewhere)
        try:
            query(copy, Path(elsewhere) / people.name, ages, resume=True)
        except InvalidInput:
            return b""
        return (copy / FILE).read_bytes()


@pytest.mark.parametrize("stop", ["read", "released"])
@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_two_resumes_at_once_release_one_set_of_answers(tmp_path, monkeypatch, stop, rounds):
    """With other data in each: noise meets the data of one of them, which is billed once, and the
    folder verifies.
    """
    monkeypatch.setattr(
        storage, "identity", lambda handle: "alike"
    )  # so that copies tell what the run itself would answer
    real, one, other = SumStatistic.release, [40] * 30, [60] * 33

    def stopped(self, table, spend):
        if table.rows() and "mean" in spend.claim.question:
            raise KeyboardInterrupt
        return real(self, table, spend)

    def unread(data, made):
        raise KeyboardInterrupt

    answered = 0
    for number in range(rounds):
        run, people = tmp_path / str(number) / "run", tmp_path / str(number) / "people.jsonl"
        with monkeypatch.context() as patch:
            patch.setattr(
                *(
                    (queries, "table_of", unread)
                    if stop == "read"
                    else (SumStatistic, "release", stopped)
                )
            )
            with pytest.raises(KeyboardInterrupt):
                query(run, people, one)
        due = {answers(run, people, ages) for ages in (one, other)} - {b""}
        assert len(due) == (2 if stop == "read" else 1)
        ready, go = os.pipe()
        pids = [resumed(run, people, ages, ready) for ages in (one, other)]
        os.write(go, b"go")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        for end in (ready, go):
            os.close(end)
        assert set(codes) <= {0, 1}
        if 0 in codes:  # the second is told what the first was, if that was quicker
            answered += 1
            assert (run / FILE).read_bytes() in due
            assert all(f.holds for f in verify(run, ledger=people))
            assert not (run / "checkpoint").exists()
        bills = [[p.event for p in Ledger.read(book).permits()] for book in (run / LEDGER, people)]
        assert bills[0] == bills[1]
        assert len(bills[0]) == 2
    assert answered


@register
@dataclass(frozen=True)
class Changing(LaplaceCount):
    """A count whose price is another at one call."""

    kind: ClassVar[str] = "changing-count"
    calls: ClassVar[list[int]] = []
    odd: ClassVar[int] = 0

    @property
    def event(self) -> events.Event:
        self.calls.append(1)
        return events.Laplace(self.noise_multiplier * (10 if len(self.calls) == self.odd else 1))


def test_a_price_that_changes_between_calls_is_not_billed_twice_over(tmp_path, monkeypatch):
    """Either refused with nothing left, or all books hold the price at which the release was
    allowed.
    """
    claim, refusals = Changing(2.0, delta=1e-6), 0
    for odd in range(1, 40):
        Changing.calls.clear()
        monkeypatch.setattr(Changing, "odd", odd)
        run, people = tmp_path / f"run{odd}", tmp_path / f"people{odd}.jsonl"
        try:
            count.run(Run(run, ledger=people, budget=BUDGET, seed=3), lambda: 37, claim)
        except (InvalidInput, Corrupt):
            refusals += 1
            begun = Ledger.read(people).book.begun if people.exists() else set()
            assert not (run / "count.json").exists() or begun
            assert bool(begun) or not run.exists()
        else:
            monkeypatch.setattr(Changing, "odd", 0)
            assert all(f.holds for f in verify(run, ledger=people))
        if run.exists():
            for book in (people, run / LEDGER):
                assert [p.event for p in Ledger.read(book).permits()] == [events.Laplace(2.0)]
        if len(Changing.calls) < odd:
            break
    assert refusals > 1
    assert odd < 39
