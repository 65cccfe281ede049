"""A kind of release in a file of its own gets everything: reservation before reading, exact resume
after a crash at any moment, card, pages, verification of every byte, a budget across runs, and a
refusal when the budget is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events
from dpfy.core.claim import register
from dpfy.core.errors import BudgetExceeded, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify
from dpfy.runs.folder import RunFolder, complete, ended
from dpfy.runs.run import Run

sys.path.insert(0, str(Path(__file__).parent))
import count
from count import LaplaceCount


def wrong(place, **more):
    return [f for f in verify(place, **more) if not f.holds]


def made(path, people=37, **more):
    return count.run(Run(path, seed=3, **more), lambda: people, LaplaceCount(2.0, delta=1e-6))


def test_it_is_reserved_before_the_data_is_read(tmp_path):
    seen = []

    def read():
        seen.extend(p.name for p in Ledger.read(tmp_path / "run" / "ledger.jsonl").permits())
        return 37

    count.run(Run(tmp_path / "run"), read, LaplaceCount(2.0))
    assert seen == ["count: how many"]


def test_card_pages_and_verification(tmp_path):
    run = made(tmp_path / "run")
    assert wrong(run) == []
    assert wrong(run / "privacy.json") == []
    card = json.loads((run / "privacy.json").read_text())
    part = card["sections"][0]
    assert (part["kind"], part["purpose"], part["question"]) == (
        "laplace-count",
        "statistics",
        "how many",
    )
    assert part["count"] == json.loads((run / "count.json").read_text())["count"]
    assert card["guarantee"]["epsilon"] == pytest.approx(0.5, rel=1e-3)
    assert card["statement"].startswith("What was released (statistics) satisfies")
    assert "count.json" in card["files"]
    for page in ("report.html", "report.md"):
        text = (run / page).read_text()
        assert "A count" in text
        assert "how many" in text
    assert not (run / "checkpoint").exists()


@dataclass(frozen=True)
class Aggregated(LaplaceCount):
    """A count that clients and a protocol make together."""

    kind: ClassVar[str] = "aggregated-count"
    trust: ClassVar[str] = "distributed"

    @property
    def trusted(self) -> str:
        return (
            f"The secure sum and at least {self.noise_multiplier:g} honest clients must be trusted."
        )


def test_a_claim_says_who_must_be_trusted(tmp_path):
    """In one sentence of its own, on card and pages; and verification knows it."""
    register(Aggregated)
    run = count.run(Run(tmp_path / "run"), lambda: 37, Aggregated(2.0))
    assert wrong(run) == []
    card = json.loads((run / "privacy.json").read_text())
    assert (card["guarantee"]["trust"], card["setting"]["model"]) == ("distributed", "distributed")
    assert (
        card["setting"]["trusted"]
        == "The secure sum and at least 2 honest clients must be trusted."
    )
    assert "no single party trusted" in card["statement"]
    for page in ("report.html", "report.md"):
        assert card["setting"]["trusted"] in (run / page).read_text()
    with pytest.raises(InvalidInput, match="trust"):
        RunFolder(
            Run(tmp_path / "both"), Aggregated(2.0), LaplaceCount(3.0, question="other")
        ).__enter__()


def test_a_pure_guarantee_can_be_stated(tmp_path):
    claim = LaplaceCount(2.0, delta=0.0, accountant="basic")
    run = count.run(Run(tmp_path / "run"), lambda: 5, claim)
    assert wrong(run) == []
    card = json.loads((run / "privacy.json").read_text())
    assert (card["guarantee"]["epsilon"], card["guarantee"]["delta"]) == (
        pytest.approx(0.5, rel=1e-9),
        0,
    )
    assert "pure 0.5" in card["statement"]


def test_every_flipped_byte_is_found(tmp_path):
    run = made(tmp_path / "run")
    for file in sorted(run.iterdir()):
        whole = file.read_bytes()
        for place in sorted({*range(0, len(whole), max(1, len(whole) // 12)), len(whole) - 1}):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :])
            found = wrong(run)
            assert any(file.name.removesuffix(".head") in f.what + f.detail for f in found), (
                file.name,
                place,
                found,
            )
        file.write_bytes(whole)
    assert wrong(run) == []


def test_a_budget_across_runs_and_its_end(tmp_path):
    people, budget = tmp_path / "people.jsonl", RenyiFilter(1.6, 1e-5)
    runs = [made(tmp_path / f"run{n}", ledger=people, budget=budget) for n in range(2)]
    assert all(wrong(run, ledger=people) == [] for run in runs)
    read = []

    def spend():
        for n in range(2, 40):
            place = Run(tmp_path / f"run{n}", ledger=people, budget=budget)
            count.run(place, lambda: read.append(1) or 1, LaplaceCount(2.0, delta=1e-6))

    with pytest.raises(BudgetExceeded):
        spend()
    assert not (tmp_path / f"run{2 + len(read)}").exists()
    assert len(Ledger.read(people).permits()) == 2 + len(read)


def test_training_and_a_count_share_one_ledger(tmp_path):
    """The life of a data set: one ledger over releases of different kinds."""
    import torch

    people = tmp_path / "people.jsonl"
    made(tmp_path / "count", ledger=people)
    net, plan = torch.nn.Linear(4, 2), dpfy.dpsgd(100, 20, steps=3).with_noise(2.0, delta=1e-6)
    data = torch.randn(100, 4), torch.randint(0, 2, (100,))
    place = dpfy.Run(tmp_path / "run", ledger=people)
    dpfy.fit(net, data, plan=plan, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), run=place)
    assert wrong(tmp_path / "run", ledger=people) == []
    assert wrong(tmp_path / "count", ledger=people) == []
    assert [p.claim["kind"] for p in Ledger.read(people).permits()] == ["laplace-count", "training"]


def test_several_claims_are_one_folder_and_one_card(tmp_path):
    claims = [LaplaceCount(2.0, question=q, delta=1e-6) for q in ("how many", "how many more")]
    from dpfy.report import card as cards

    with RunFolder(Run(tmp_path / "run"), *claims) as folder:
        for claim in claims:
            found = count.release(3, 2.0, folder.randomness, folder.begin(claim.name))
            folder.tell(claim.name, count=found)
        folder.finish(
            cards.Facts({"dpfy": dpfy.__version__, "seed": cards.SECRET_SEED}, releases=2)
        )
    assert wrong(tmp_path / "run") == []
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["guarantee"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert [part["question"] for part in card["sections"]] == ["how many", "how many more"]
    assert len({part["count"] for part in card["sections"]}) == 2, "each claim has noise of its own"


def test_what_cannot_be_stated_together_is_refused(tmp_path):
    for other in (LaplaceCount(2.0, question="x", delta=1e-7), LaplaceCount(2.0, delta=1e-6)):
        with pytest.raises(InvalidInput, match=r"must be|different names"):
            RunFolder(Run(tmp_path / "run"), LaplaceCount(2.0, delta=1e-6), other)
    assert not (tmp_path / "run").exists()


def test_two_releases_of_a_folder_never_share_their_noise(tmp_path):
    """The stream of training's noise is refused to any other claim, and so is its name."""
    import torch

    from dpfy.core.values import Bound, Bounded
    from dpfy.noise.strategy import Identity
    from dpfy.noise.stream import NoiseStream
    from dpfy_lab.whitening.claim import MomentsClaim

    claim, total = MomentsClaim(2.0), Bounded({"w": torch.zeros(3)}, Bound(1.0))
    with RunFolder(Run(tmp_path / "run"), claim) as folder:
        permit = folder.begin(claim.name)
        with pytest.raises(InvalidInput, match="both would draw the same noise"):
            NoiseStream(Identity(), 2.0, folder.randomness).release(total, 0, {}, permit)
        NoiseStream(Identity(), 2.0, folder.randomness, claim.name).release(total, 0, {}, permit)

    class Noise(MomentsClaim):
        name = "noise"

    with pytest.raises(InvalidInput, match="must not be called"):
        RunFolder(Run(tmp_path / "other"), Noise(2.0))
    assert not (tmp_path / "other").exists()


def test_a_noise_multiplier_typed_twice_cannot_differ(tmp_path):
    claim = LaplaceCount(2.0)
    with (
        RunFolder(Run(tmp_path / "run"), claim) as folder,
        pytest.raises(InvalidInput, match="was given for"),
    ):
        count.release(3, 1.9, folder.randomness, folder.begin(claim.name))


def test_before_it_begins_nothing_is_released_and_everything_is_given_back(tmp_path):
    people = tmp_path / "people.jsonl"

    def fails():
        raise InvalidInput("people", None, "the file is not there")

    claim = LaplaceCount(2.0)
    with pytest.raises(InvalidInput, match="not there"):
        count.run(Run(tmp_path / "run", ledger=people), fails, claim)
    assert not (tmp_path / "run").exists()
    assert Ledger.read(people).permits() == []
    with (
        RunFolder(Run(tmp_path / "run"), claim) as folder,
        pytest.raises(InvalidInput, match="beginning must be written"),
    ):
        count.release(3, 2.0, folder.randomness, folder.stage(claim.name).permit)


def test_a_file_that_no_claim_names_is_not_written(tmp_path):
    with (
        RunFolder(Run(tmp_path / "run"), LaplaceCount(2.0)) as folder,
        pytest.raises(InvalidInput, match="named by a claim"),
    ):
        folder.write("notes.txt", b"")


def test_an_unknown_kind_is_refused_with_the_way_out(tmp_path, monkeypatch):
    from dpfy.core import claim

    run = made(tmp_path / "run")
    monkeypatch.delitem(claim._KINDS, "laplace-count")
    assert any("import what defines it" in f.detail for f in wrong(run))
    with pytest.raises(Unsupported, match="import what defines it"):
        claim.kind_of("laplace-count")


def crash(folder: Path, people: Path, at: int, *more: str) -> bool:
    """Run the script until its `at`-th call; False if it ended before."""
    pid = os.fork()
    if pid == 0:
        try:
            sys.argv = ["count.py", str(folder), "--ledger", str(people), "--kill", str(at), *more]
            count.main()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_call_and_resumed_exactly(tmp_path, stride):
    """kill -9 at calls that touch the disk (every ninth; all in the slow form): the resumed run
    releases the same bits, is billed once, and verifies.
    """
    whole, people = tmp_path / "whole", tmp_path / "whole.jsonl"
    assert not crash(whole, people, 10**9)
    due = (whole / "count.json").read_bytes()
    at, steps = 1, 0
    while True:
        run, people = tmp_path / "run", tmp_path / "people.jsonl"
        if not crash(run, people, at):
            break
        place = Run(run, resume=True, ledger=people, budget=RenyiFilter(3.0, 1e-5), seed=3)
        if ended(run):
            assert complete(place, LaplaceCount(2.0, delta=1e-6))
        else:
            count.run(place, lambda: 37, LaplaceCount(2.0, delta=1e-6))
        assert (run / "count.json").read_bytes() == due, at
        assert wrong(run, ledger=people) == [], at
        begun = [
            p for p in Ledger.read(people).permits() if p.entry in Ledger.read(people).book.begun
        ]
        assert len(begun) == 1, at
        shutil.rmtree(run)
        for file in tmp_path.glob("people*"):
            file.unlink()
        at, steps = at + stride, steps + 1
    assert steps * stride > 60


def test_other_data_after_a_crash_is_refused(tmp_path):
    """The same noise must not meet another count: their difference would have none."""
    run, people, at = tmp_path / "run", tmp_path / "people.jsonl", 1
    bound = run / "checkpoint" / "bound.json"
    while crash(run, people, at) and not (bound.exists() and '"count"' in bound.read_text()):
        shutil.rmtree(run, ignore_errors=True)
        for file in tmp_path.glob("people*"):
            file.unlink()
        at += 6
    with pytest.raises(InvalidInput, match="resume count"):
        count.run(
            Run(run, resume=True, ledger=people, budget=RenyiFilter(3.0, 1e-5), seed=3),
            lambda: 38,
            LaplaceCount(2.0, delta=1e-6),
        )


def test_a_resumed_run_asks_for_the_same_claim(tmp_path):
    run, people, at = tmp_path / "run", tmp_path / "people.jsonl", 1
    while crash(run, people, at) and not (run / "count.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        for file in tmp_path.glob("people*"):
            file.unlink()
        at += 6
    place = Run(run, resume=True, ledger=people, budget=RenyiFilter(3.0, 1e-5), seed=3)
    with pytest.raises(InvalidInput, match="noise_multiplier"):
        count.run(place, lambda: 37, LaplaceCount(4.0, delta=1e-6))
    assert Ledger.read(people).spent() == [events.Repeated(events.Laplace(2.0), 1)]
