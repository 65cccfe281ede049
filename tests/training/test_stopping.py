"""Runs that end early: billed for what was released, closed for good, and never billed for less
after a crash.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.noise.sensitivity import dense
from dpfy.plan import ForeignBatches
from dpfy.plan.correlated import bandmf, blt, dpftrl
from dpfy.plan.recipe import Plan, with_stopping
from dpfy.report.verify import verify
from dpfy.runs.folder import RunFolder
from dpfy.training import Plateau, Result
from dpfy.training.run import TrainingClaims

sys.path.insert(0, str(Path(__file__).parent))
import small

STEPS, DELTA = 20, 1e-3


def plan(**change: object) -> Plan:
    return dpfy.dpsgd(
        small.RECORDS, 20, steps=STEPS, clip_norm=0.5, **{"stopping": 5} | change
    ).with_noise(2.0, delta=DELTA)


def train(
    path: Path, made: int, chosen: Plan | None = None, *, resume: bool = False, name: str = "run"
) -> dpfy.PrivateTraining:
    """Train until `made` steps are made and end the run there, on a shared ledger."""
    net = small.model()
    run = dpfy.Run(
        path / name,
        resume=resume,
        ledger=path / "people.jsonl",
        budget=None if resume else RenyiFilter(30.0, DELTA),
        seed=5,
    )
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), chosen or plan(), run
    ) as training:
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == made:
                break
        training.finish()
    return training


def card(path: Path) -> dict:
    return json.loads((path / "run" / "privacy.json").read_text())


def billed(path: Path) -> dict[str, tuple[int, int]]:
    return {name.split()[0]: settled for name, settled in Ledger.read(path).settlements.items()}


def wrong(path: Path) -> list[str]:
    checks = [
        *verify(path / "run", ledger=path / "people.jsonl"),
        *verify(path / "run" / "privacy.json"),
    ]
    return [f"{f.what}: {f.detail}" for f in checks if not f.holds]


@pytest.mark.parametrize(("made", "due"), [(8, 8), (9, 12), (1, 4), (17, 20), (20, 20)])
def test_a_run_is_billed_up_to_the_next_point(tmp_path, made, due):
    train(tmp_path, made)
    fixed = dpfy.dpsgd(small.RECORDS, 20, steps=due, clip_norm=0.5).with_noise(
        2.0, delta=DELTA / 5 * (1 - 1e-12)
    )
    found = card(tmp_path)
    assert found["guarantee"]["epsilon"] == pytest.approx(fixed.epsilon, rel=1e-9)
    assert found["guarantee"]["delta"] == DELTA
    section = found["sections"][0]
    assert section["steps_done"] == made
    assert section["ended"] == {
        "settled": due < STEPS,
        "made": made if due < STEPS else STEPS,
        "billed": due,
        "of": STEPS,
    }
    settled = {"training": (made, due)} if due < STEPS else {}
    assert billed(tmp_path / "run" / "ledger.jsonl") == billed(tmp_path / "people.jsonl") == settled
    assert wrong(tmp_path) == []
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert any("ex post" in line for line in found["warnings"])
    for page in ("report.md", "report.html"):
        assert "ex post" in (tmp_path / "run" / page).read_text()


def test_without_points_the_whole_plan_is_billed(tmp_path):
    chosen = plan(stopping=None)
    train(tmp_path, 8, chosen)
    assert card(tmp_path)["guarantee"]["epsilon"] == pytest.approx(chosen.epsilon)
    assert "stopping" not in json.dumps(chosen.to_json())
    assert wrong(tmp_path) == []


def test_what_was_not_used_is_there_for_the_next_run(tmp_path):
    first = plan()
    Ledger.open(tmp_path / "people.jsonl", budget=RenyiFilter(1.5 * first.epsilon, DELTA))
    net = small.model()
    for name in ("one", "two"):
        run = dpfy.Run(tmp_path / name, ledger=tmp_path / "people.jsonl")
        with dpfy.PrivateTraining(
            net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), first, run
        ) as training:
            for x, y in training.batches():
                training.step(functional.cross_entropy(net(x), y, reduction="none"))
                if training.steps_done:
                    break
            training.finish()
    assert [s for _, s in sorted(Ledger.read(tmp_path / "people.jsonl").settlements.items())] == [
        (1, 4),
        (1, 4),
    ]


def test_a_run_that_ended_cannot_go_on(tmp_path):
    training = train(tmp_path, 8)
    with pytest.raises((InvalidInput, Unsupported)):
        training.step(torch.zeros(3))
    with pytest.raises(InvalidInput, match="finished"):
        train(tmp_path, 12, resume=True)


def test_an_end_that_could_not_be_written_is_told_apart_from_a_run_that_goes_on(
    tmp_path, monkeypatch
):
    """A full disk, which the caller survives: nothing goes on, and the resumed run ends."""
    net = small.model()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    def leave() -> None:
        with dpfy.PrivateTraining(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            small.data(),
            plan(),
            dpfy.Run(tmp_path / "run", seed=5),
        ) as training:
            for x, y in training.batches():
                training.step(functional.cross_entropy(net(x), y, reduction="none"))
                if training.steps_done:
                    break
            with monkeypatch.context() as patch:
                patch.setattr(RunFolder, "finish", full)
                with pytest.raises(OSError, match="no space"):
                    training.finish()
            with pytest.raises(Unsupported, match="stopped"):
                next(training.batches())

    with pytest.warns(UserWarning, match="ended after 1 steps, but its report is not written"):
        leave()
    again = small.model()
    run = dpfy.Run(tmp_path / "run", resume=True, seed=5)
    with dpfy.PrivateTraining(
        again, torch.optim.SGD(again.parameters(), lr=0.1), small.data(), plan(), run
    ):
        pass
    assert card(tmp_path)["sections"][0]["ended"]["billed"] == 4


class Crash(BaseException):
    """The process dies."""


def crash(*_: object, **__: object) -> None:
    raise Crash


@pytest.mark.parametrize("moment", ["before the data set's ledger", "before the report"])
def test_a_crash_after_the_end_never_bills_less_and_the_resumed_run_ends_there(
    tmp_path, monkeypatch, moment
):
    with monkeypatch.context() as patch:
        if moment == "before the report":
            patch.setattr(RunFolder, "finish", crash)
        else:
            real = Ledger.settle
            patch.setattr(
                Ledger,
                "settle",
                lambda self, *a, **k: (
                    crash() if self.path.name == "people.jsonl" else real(self, *a, **k)
                ),
            )
        with pytest.raises(Crash):
            train(tmp_path, 9)
    assert billed(tmp_path / "run" / "ledger.jsonl") == {"training": (9, 12)}
    assert billed(tmp_path / "people.jsonl") == (
        {"training": (9, 12)} if moment == "before the report" else {}
    )
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    net, batches = small.model(), 0
    run = dpfy.Run(tmp_path / "run", resume=True, ledger=tmp_path / "people.jsonl", seed=5)
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), plan(), run
    ) as training:
        assert (training.steps_done, training.last_step, len(training.batches())) == (9, 9, 0)
        for _ in training.batches():
            batches += 1
    assert batches == 0
    assert billed(tmp_path / "people.jsonl") == {"training": (9, 12)}
    assert card(tmp_path)["sections"][0]["steps_done"] == 9
    assert wrong(tmp_path) == []


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_copy_made_before_the_end_does_not_go_on_after_it(tmp_path, monkeypatch):
    """Its own ledger knows nothing of the end, but the data set's does: also where files cannot be
    told from copies of them.
    """
    monkeypatch.setattr(storage, "identity", lambda handle: "alike")
    net = small.model()
    run = dpfy.Run(
        tmp_path / "run", ledger=tmp_path / "people.jsonl", budget=RenyiFilter(30.0, DELTA), seed=5
    )
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), plan(), run
    ) as training:
        for x, y in training.batches():
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
            if training.steps_done == 6:
                break
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    train(tmp_path, 7, resume=True)
    with pytest.raises(InvalidInput, match="ended after 7 releases"):
        train(tmp_path, 12, resume=True, name="copy")


def test_a_ledger_of_the_data_set_that_says_something_else_is_found(tmp_path):
    """The run's own ledger rewritten as if it had ended later, or the data set's as if earlier:
    verification says so.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
    import forge

    train(tmp_path, 9)

    def sooner(bodies: list[dict]) -> None:
        next(body for body in bodies if body["type"] == "settle").update(made=3, billed=4)

    forge.rechain(tmp_path / "people.jsonl", sooner)
    assert any("same steps" in line for line in wrong(tmp_path))

    def lower(bodies: list[dict]) -> None:
        next(body for body in bodies if body["type"] == "settle").update(made=9, billed=8)

    forge.rechain(tmp_path / "people.jsonl", lower)
    with pytest.raises(Corrupt, match="next of"):
        Ledger.read(tmp_path / "people.jsonl")


def test_leaving_a_run_that_may_end_says_how(tmp_path):
    net = small.model()

    def leave() -> None:
        with dpfy.PrivateTraining(
            net, torch.optim.SGD(net.parameters(), lr=0.1), small.data(), plan(), tmp_path / "run"
        ) as training:
            for x, y in training.batches():
                training.step(functional.cross_entropy(net(x), y, reduction="none"))
                if training.steps_done == 5:
                    break

    with pytest.warns(
        UserWarning,
        match=r"5 of 20 steps made, all 20 charged;.*end it here with finish\(\), charged for 8 "
        r"steps",
    ):
        leave()


@pytest.mark.parametrize("kind", ["cyclic", "fixed", "blt"])
def test_correlated_noise_is_billed_for_its_beginning(tmp_path, kind):
    recipe = {
        "cyclic": lambda: bandmf(small.RECORDS, 20, bands=4, steps=STEPS),
        "fixed": lambda: bandmf(small.RECORDS, 20, bands=4, steps=STEPS, sampling="fixed-order"),
        "blt": lambda: blt(small.RECORDS, 20, steps=STEPS),
    }[kind]()
    chosen = with_stopping(recipe, 5).with_noise(2.0, delta=DELTA)
    train(tmp_path, 11, chosen)
    assert card(tmp_path)["guarantee"]["epsilon"] == pytest.approx(chosen.epsilon_after(12))
    assert chosen.epsilon_after(12) < chosen.epsilon
    assert wrong(tmp_path) == []
    if kind != "cyclic":  # the beginning of the matrix, by the dense route
        strategy, pattern = recipe.strategy, recipe.sampler.participation
        whole, start = (
            dense(strategy.encoder(STEPS), pattern),
            dense(strategy.encoder(STEPS)[:12, :12], pattern),
        )
        event = chosen.recipe.event(2.0, 12).event
        assert event.noise_multiplier <= 2.0 * whole / start * (1 + 1e-9)
        assert event.noise_multiplier == pytest.approx(2.0 * whole / start, rel=1e-6)


def test_what_has_no_proof_is_refused_with_a_way_out():
    with pytest.raises(Unsupported, match=r"Tree.*use banded or BLT"):
        with_stopping(dpftrl(small.RECORDS, 20, steps=STEPS), 5)
    with pytest.raises(InvalidInput, match=r"batches\.done"):
        TrainingClaims(ForeignBatches("shuffled elsewhere")).of(plan())


@pytest.mark.parametrize(
    "points", [0, -1, True, 1.5, "5", [0], [21], [0.5, "x"], [2.5], [float("nan")], 21]
)
def test_bad_points(points):
    with pytest.raises(InvalidInput, match="stopping"):
        plan(stopping=points)


def test_points_are_steps_or_parts_of_the_run():
    assert plan(stopping=[0.6, 0.85]).recipe.stopping.points == (12, 17, 20)
    assert plan(stopping=[12, 20]).recipe.stopping.points == (12, 20)
    assert plan(stopping=3).recipe.stopping.points == (7, 14, 20)
    shares = plan(stopping=7).recipe.stopping
    assert shares.share * len(shares.points) <= 1
    assert Plan.from_json(plan().to_json()) == plan()
    with pytest.raises(InvalidInput, match="share"):
        type(shares)(shares.points, 1.01 / len(shares.points))


def fitted(path: Path, stop: object, **change: object) -> Result:
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {
        "plan": plan(),
        "evaluation": dpfy.PublicTest(small.held_out()),
        "run": dpfy.Run(path / "run", seed=5),
    } | change
    return dpfy.fit(net, small.data(), optimizer=optimizer, stop=stop, **given)


def test_fit_ends_where_a_rule_over_public_figures_says(tmp_path):
    seen: list[list[int]] = []

    def rule(rows) -> bool:
        seen.append([row["step"] for row in rows])
        assert all({"test_loss", "test_accuracy", "epsilon"} <= row.keys() for row in rows)
        return len(rows) == 3

    result = fitted(tmp_path, rule)
    assert seen == [[4], [4, 8], [4, 8, 12]]
    assert result.steps == 12
    assert result.epsilon == plan().epsilon_after(12) == card(tmp_path)["guarantee"]["epsilon"]
    assert result.guarantee.epsilon(DELTA) == result.epsilon
    assert all(f.holds for f in verify(tmp_path / "run"))
    again = fitted(tmp_path, rule, run=dpfy.Run(tmp_path / "run", resume=True, seed=5))
    assert (again.steps, again.epsilon) == (12, result.epsilon)


def test_fit_that_dies_after_its_end_ends_there(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", crash)
        with pytest.raises(Crash):
            fitted(tmp_path, lambda rows: True)
    result = fitted(
        tmp_path, crash, run=dpfy.Run(tmp_path / "run", resume=True, seed=5)
    )  # the rule is not asked again
    assert result.steps == 4
    assert all(f.holds for f in verify(tmp_path / "run"))


def test_rules_that_cannot_be_followed_are_refused_before_anything_is_reserved(tmp_path):
    with pytest.raises(InvalidInput, match=r"stop: .*stopping=5"):
        fitted(tmp_path, lambda rows: True, plan=plan(stopping=None))
    with pytest.raises(InvalidInput, match="stop: "):
        fitted(tmp_path, "soon")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidInput, match=r"plateau\.metric"):
        Plateau("test_loss")([{"step": 4, "epsilon": 1.0}])


def test_a_plateau():
    rows = lambda *values: [  # noqa: E731
        {"step": k, "test_loss": v, "test_accuracy": -v} for k, v in enumerate(values)
    ]
    assert not Plateau()(rows(1.0))
    assert not Plateau()(rows(1.0, 0.9))
    assert Plateau()(rows(1.0, 1.0))
    assert Plateau("test_accuracy")(rows(1.0, 1.1))
    assert not Plateau(patience=2)(rows(1.0, 1.1))
    assert Plateau(patience=2)(rows(1.0, 1.1, 1.2))
    assert not Plateau(patience=2)(rows(1.0, 1.1, 0.9))
    assert Plateau(least=0.2)(rows(1.0, 0.9))
    assert Plateau()([*rows(1.0), {"step": 9, "test_loss": "infinity"}])


def test_a_job_ends_early(tmp_path):
    from dpfy.training import config, job

    flags = {
        "data.kind": "digits", "data.test": "public", "model.name": "linear", "privacy.delta": 1e-4, "training.steps": 10,  # noqa: E501
        "training.stopping": 5, "training.patience": 1, "training.learning_rate": 1e-9, "privacy.epsilon": 2.0,
        "training.batch_size": 100.0,
    }  # fmt: skip
    outcome = job.run(config.make({}, flags), tmp_path / "run", seed=3)
    told = outcome.card["sections"][0]
    assert told["ended"]["billed"] == told["steps_done"] < 10
    assert outcome.card["guarantee"]["epsilon"] < 1.9
    assert all(f.holds for f in verify(tmp_path / "run"))
    with pytest.raises(InvalidInput, match=r"training\.patience.*public"):
        config.make({}, flags | {"data.test": "withheld"})
    with pytest.raises(InvalidInput, match=r"training\.patience.*training\.stopping"):
        config.make({}, flags | {"training.stopping": None})


@pytest.mark.parametrize(
    "every", [pytest.param(14, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
def test_killed_around_its_end_it_ends_there_and_is_never_billed_for_less(tmp_path, every):
    import early

    answer = early.started(multiprocessing.get_context("forkserver"), tmp_path, every)
    assert answer["wrong"] == []
    assert answer["killed"] == answer["deaths"] >= 5


def test_the_sentence_beside_the_epsilon_says_that_it_is_ex_post():
    """Early or at its last point: a run that may end early is not (epsilon, delta)-private at what
    is printed; a plain run is.
    """
    recipe = dpfy.dpsgd(400, 50, steps=20)
    early = with_stopping(recipe, 4)
    plain, stopped = (
        each.with_noise(1.0, delta=1e-4).guarantee().sentence(1e-4) for each in (recipe, early)
    )
    assert "it is not (epsilon, delta)-differential privacy" in stopped
    assert "ex post" not in plain
