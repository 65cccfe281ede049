"""When the isolation check looks, what it keeps, and that a resumed run must compute what the run before it
did.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import WIDTH, Apply, ce, net, plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import dpfy
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.isolation import monitored_steps
from dpfy.isolation.check import IsolationCheck
from dpfy.isolation.monitored_steps import MonitoredSteps
from dpfy.isolation.schedule import (
    LIMIT,
    PARTS,
    QUIET,
    CheckBudget,
    CheckLevel,
    CheckSchedule,
    Stopwatch,
)
from dpfy.isolation.summary import CheckSummary


def training(
    path: Path, model: nn.Module, *, steps: int = 40, resume: bool = False, seed: int = 1
) -> dpfy.PrivateTraining:
    plan = dpfy.dpsgd(small_runs.RECORDS, 12, steps=steps).with_noise(1.0, delta=1e-3)
    run = dpfy.Run(path / "run", seed=seed, resume=resume)
    return dpfy.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.05), small_runs.vectors(), plan, run
    )


def some_steps(
    path: Path, model: nn.Module, losses: small_runs.Losses, count: int, resume: bool = False
) -> dpfy.PrivateTraining:
    with training(path, model, resume=resume) as made:
        for x, y in made.batches():
            made.step(losses(model, x, y))
            if made.steps_done == count:
                break
    return made


OTHER: dict[str, small_runs.Losses] = {
    "twice": lambda m, x, y: 2 * plain(m, x, y),
    "smoothed": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1, reduction="none"),
    "shifted": lambda m, x, y: ce(m(x + 1), y),
    "squared": lambda m, x, y: m(x).square().sum(1),
}


@pytest.mark.filterwarnings("ignore:run .* unfinished")
@pytest.mark.parametrize("name", OTHER)
def test_a_resumed_run_with_another_loss_is_refused_before_it_releases(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    some_steps(tmp_path, net(), plain, 5)
    torch.manual_seed(0)
    model = net()
    with pytest.raises(InvalidInput, match="resume losses"):
        some_steps(tmp_path, model, OTHER[name], 8, resume=True)
    assert (tmp_path / "run" / "checkpoint").exists()
    torch.manual_seed(0)
    some_steps(tmp_path, net(), plain, 8, resume=True)  # the right one goes on


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_resumed_run_with_another_function_in_its_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    some_steps(tmp_path, Apply(torch.tanh), plain, 5)
    torch.manual_seed(0)
    with pytest.raises(InvalidInput, match="resume"):
        some_steps(tmp_path, Apply(torch.relu), plain, 8, resume=True)


class Skipping(nn.Module):
    """One of two layers, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = torch.tanh(self.a(x)) if random.random() < 0.5 else torch.relu(self.b(x))
        out: Tensor = self.head(layer)
        return out


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_run_that_varies_by_itself_can_be_resumed(tmp_path: Path) -> None:
    for first in range(8):
        random.seed(first)
        if [random.random() < 0.5 for _ in range(2)] == [True, False]:
            break
    random.seed(first)
    torch.manual_seed(0)
    some_steps(tmp_path, Skipping(), plain, 5)
    torch.manual_seed(0)
    some_steps(tmp_path, Skipping(), plain, 8, resume=True)


def test_the_fingerprint_is_durable_before_the_first_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpfy.noise.stream import NoiseStream

    def release(*args: Any, **options: Any) -> None:
        held = json.loads((tmp_path / "run" / "checkpoint" / "watch.json").read_text())
        assert held["fingerprint"]
        raise KeyboardInterrupt

    monkeypatch.setattr(NoiseStream, "release", release)
    with pytest.raises(KeyboardInterrupt):
        some_steps(tmp_path, net(), plain, 5)


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_damaged_record_of_the_watch_is_one_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    some_steps(tmp_path, net(), plain, 5)
    (tmp_path / "run" / "checkpoint" / "watch.json").write_text("{")
    with pytest.raises(Corrupt, match=r"checkpoint/watch\.json"):
        some_steps(tmp_path, net(), plain, 8, resume=True)


def test_nothing_of_the_watch_is_left(tmp_path: Path) -> None:
    model = net()
    some_steps(tmp_path, model, plain, 40)
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert not _get_current_dispatch_mode_stack()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_loop_that_breaks_off_leaves_no_mode(tmp_path: Path) -> None:
    def broken(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        some_steps(tmp_path, net(), broken, 5)
    assert not _get_current_dispatch_mode_stack()


def opened(path: Path, model: nn.Module, **options: Any) -> IsolationCheck:
    """The isolation check of a training that is entered and left."""
    made = training(path, model, **options)
    with pytest.raises(ZeroDivisionError), made:
        raise ZeroDivisionError
    assert made.isolation is not None
    return made.isolation


def test_checks_lie_in_every_part_of_the_run_and_follow_the_secret(tmp_path: Path) -> None:
    due = [
        sorted(opened(tmp_path / str(k), net(), steps=1000, seed=seed).schedule.due)
        for k, seed in enumerate((1, 1, 2))
    ]
    assert due[0] == due[1] != due[2]
    assert due[0][:2] == [0, 1]
    assert [(step - 2) * PARTS // 998 for step in due[0][2:]] == list(range(PARTS))


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_resumed_run_is_checked_where_it_was_to_be_checked_when_it_began(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = some_steps(tmp_path, net(), plain, 5)
    assert made.isolation is not None
    found = opened(tmp_path, net(), resume=True)
    assert (found.schedule.due, found.schedule.cut) == (
        made.isolation.schedule.due,
        made.isolation.schedule.cut,
    )
    kept = tmp_path / "run" / "checkpoint" / "watch.json"
    content = json.loads(kept.read_bytes())
    for damaged in (0.5, "4", None, True):
        kept.write_text(json.dumps(content | {"checks": content["checks"] | {"rows": damaged}}))
        with pytest.raises(Corrupt, match=r"checkpoint/watch\.json"):
            some_steps(tmp_path, net(), plain, 8, resume=True)


@pytest.mark.parametrize(("seconds", "share"), [(0.001, 0.0), (0.004, monitored_steps.SHARE)])
def test_the_monitor_sees_what_the_budget_of_all_checks_allows(
    seconds: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of short steps the checks that are due take all of it: only what is free is left."""
    elapsed, steps = 0.0, 1000
    monkeypatch.setattr(Stopwatch, "seconds", property(lambda watch: elapsed))
    monkeypatch.setattr(monitored_steps, "BATCH", 1e-4)
    secret = Randomness(bytes(range(32)))
    schedule = CheckSchedule(steps, secret, varies=True)
    budget = CheckBudget(schedule)
    monitored, seen = MonitoredSteps(steps, secret, budget), []
    for step in range(steps):
        elapsed += seconds
        if step in schedule.due:
            budget.add_check(0.0015)
            elapsed += 0.0015
        if monitored.due():
            monitored.begin(step, (), recorded=False)
        if monitored.active:
            monitored.end(recorded=False)
            seen.append(step)
    due = monitored_steps.FREE + share * steps * seconds
    assert budget.monitor == pytest.approx(1e-4 * len(seen))
    assert 0.85 * due <= budget.monitor <= due + 3e-4
    assert max(b - a for a, b in pairwise(seen)) <= 4 * steps / len(seen)
    if share:
        assert budget.checks + budget.monitor < LIMIT * steps * seconds


def test_further_checks_are_made_while_something_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed = 0.0
    monkeypatch.setattr(Stopwatch, "seconds", property(lambda watch: elapsed))
    schedule = CheckSchedule(1000, Randomness(bytes(32)), varies=True)
    budget = CheckBudget(schedule)
    assert budget.left(0) < 0  # no check was made: nobody knows what those that are due take
    elapsed = 0.105
    budget.add_check(0.004)
    budget.add_check(0.001)
    planned = schedule.due_from(99)
    assert planned in (len(schedule.due) - 2, len(schedule.due) - 1)
    assert budget.left(99) == pytest.approx(LIMIT - 1000 * QUIET - 0.005 - 0.001 * planned)
    assert not schedule.further(500, budget)  # checks took more than their share of 0.105 s
    elapsed = 2.0
    assert schedule.further(600, budget)
    budget.monitor = 0.1
    assert not schedule.further(700, budget)


def test_the_step_before_a_check_is_recorded_too(tmp_path: Path) -> None:
    """What it leaves behind is then known when it is used."""
    isolation = opened(tmp_path, net(), steps=200)
    assert len(isolation.schedule.due) == 2 + PARTS
    assert isolation.level_of(0) is CheckLevel.THOROUGH
    isolation._done, isolation.summary.replayed, isolation.alone = 2, 1, False
    for step in sorted(isolation.schedule.due)[1:]:
        assert isolation.level_of(step) is (
            CheckLevel.CHECK if step in isolation.schedule.cut else CheckLevel.LIGHT
        )
        assert isolation.level_of(step - 1) >= (
            CheckLevel.RECORD if step in isolation.schedule.cut else CheckLevel.NOTHING
        )
    assert (
        sum(isolation.level_of(step) is CheckLevel.NOTHING for step in range(200))
        >= 200 - PARTS - 4
    )
    assert len(isolation.schedule.cut) == 2


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_backward_pass_that_mixes_after_the_first_step_is_refused_at_the_second(
    tmp_path: Path,
) -> None:
    """By the same code: a tensor is 0 at the first step, so that nothing new shows."""
    share = torch.zeros(())

    class Leaning(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.mean())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * (1 + share * ctx.saved_tensors[0])

    torch.manual_seed(0)
    made = training(tmp_path, Apply(Leaning.apply))

    def train() -> None:
        with made:
            for x, y in made.batches():
                share.fill_(float(made.steps_done > 0))
                made.step(plain(made.model, x, y))

    with pytest.raises(Unsupported, match="mix examples"):
        train()
    assert made.steps_done == 1


def unseen(mixing: bool) -> small_runs.Losses:
    """A model whose operations torch's dispatcher does not show: they run in another thread."""
    from concurrent.futures import ThreadPoolExecutor

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(plain, m, x, y).result()

    return losses


@pytest.mark.parametrize("engine", ["bookkeeping", "loop"])
def test_what_cannot_be_recorded_is_looked_at_through_the_model(
    engine: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    made = small_runs.train(tmp_path, net(), unseen(False), engine=engine)
    assert made.isolation is not None
    assert made.isolation.summary.through_model
    assert not made.isolation.summary.replayed
    assert "the model was run on changed inputs" in (tmp_path / "run" / "privacy.json").read_text()


@pytest.mark.parametrize("change", [lambda h: h - h.detach().mean(0), lambda h: h - h.mean(0)])
def test_and_is_refused_where_it_mixes(change: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="mix"):
        small_runs.train(tmp_path, Apply(change), unseen(True))


def test_the_card_says_what_was_not_checked() -> None:
    assert "not checked" in CheckSummary().words
    assert "no other example's part changed" in CheckSummary(recorded=3, replayed=2).words
    assert "gradients alone" in CheckSummary(recorded=3, through_model=2, why="x").words


def test_real_numbers_that_are_places_in_a_table(tmp_path: Path) -> None:
    """Records far from the data would point outside of the table."""
    x = torch.randint(0, 5, (small_runs.RECORDS, 4), generator=small_runs.seeded()).float()
    model = nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(32, 3))
    made = small_runs.train(
        tmp_path, model, lambda m, x, y: ce(m(x.long()), y), (x, small_runs.vectors()[1])
    )
    assert made.isolation is not None
    assert made.isolation.summary.replayed
