"""One program for each way in which the check finds that examples mix; the corpora have many
more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.isolation.cases import CLASSES, WIDTH, ce, net, plain, vectors
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.core.errors import Unsupported
from dpfy.isolation import monitored_steps
from dpfy.isolation.monitor import Followed

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _every_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps here are so short that the monitor would see some of them only."""
    monkeypatch.setattr(monitored_steps, "FREE", 60.0)


def train(
    path: Path,
    losses: Callable[..., Tensor],
    *,
    steps: int = 14,
    batch: float = 12,
    seed: int = 1,
    after: Any = None,
    records: int = 96,
    saw: Callable[[dpfy.PrivateTraining], None] = lambda training: None,
) -> int:
    """Steps that a loop of one's own makes before it is refused; all of them if it is not. `after`
    is called between steps.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    model, data = net(), tuple(t[:records] for t in vectors())
    recipe = dpfy.dpsgd(records, batch, steps=steps)
    run = dpfy.Run(path / f"run{seed}", seed=seed)
    training = dpfy.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        data,
        recipe.with_noise(1.0, delta=1e-3),
        run,
    )
    said = ""
    try:
        with training:
            saw(training)
            for x, y in training.batches():
                found = losses(model, x, y, training.steps_done)
                training.step(found)
                if after is not None:
                    after(found, x, y, training.steps_done)
    except Unsupported as refusal:
        said = str(refusal)
    assert bool(said) != (path / f"run{seed}" / "privacy.json").exists()
    assert not said or any(word in said for word in WORDS), said
    return training.steps_done if said else steps


WORDS = (
    "mix examples",
    "Python reads",
    "shapes depend",
    "earlier step",
    "number of records",
    "constants that change",
)


def refusal_of(path: Path, losses: Callable[..., Tensor], seed: int) -> str:
    """What a refusal says."""
    torch.manual_seed(seed)
    model, data = net(), vectors()
    plan = dpfy.dpsgd(len(data[0]), 12, steps=3).with_noise(1.0, delta=1e-3)
    run = dpfy.Run(path / f"told{seed}", seed=seed)
    try:
        with dpfy.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), lr=0.05), data, plan, run
        ) as training:
            for x, y in training.batches():
                training.step(losses(model, x, y, 0))
    except Unsupported as refusal:
        return str(refusal)
    return "not refused"


AT_ONCE: dict[str, Callable[..., Tensor]] = {
    "a count taken from a shape": lambda m, x, y, _: (
        plain(m, x, y) / (1 + (y > 0).nonzero().shape[0])
    ),
    "the kinds of labels": lambda m, x, y, _: plain(m, x, y) / len(torch.unique(y)),
    "the largest label, read by a slice": lambda m, x, y, _: ce(
        m(x) + x[:, : 1 + y.max()].sum(1, keepdim=True), y
    ),
    "a statistic as a setting": lambda m, x, y, _: ce(m(F.layer_norm(x, (WIDTH,), eps=x.var())), y),
    "a tensor of statistics": lambda m, x, y, _: ce(m(x - torch.tensor([x.mean(), x.std()])[0]), y),
    "a text of statistics": lambda m, x, y, _: (
        plain(m, x, y) * (1 + abs(float(repr(x.mean())[7:-1])))
    ),
    "a switch that is off": lambda m, x, y, _: ce(m(x - 0.0 * x.mean(0)), y),
    "a coin of torch's that rarely falls": lambda m, x, y, _: ce(
        m(torch.where(torch.rand(()) < 0.3, x - x.mean(0), x)), y
    ),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_nothing_is_released(name: str, tmp_path: Path) -> None:
    assert train(tmp_path, AT_ONCE[name]) <= (1 if "coin" in name else 0)


@pytest.mark.parametrize(
    "name",
    ["a count taken from a shape", "a switch that is off", "the largest label, read by a slice"],
)
def test_a_refusal_tells_no_number_of_records(name: str, tmp_path: Path) -> None:
    """Batches of other sizes, with other labels in them, end in the same words."""
    said = {refusal_of(tmp_path, AT_ONCE[name], seed) for seed in (1, 2, 3)}
    assert len(said) == 1, said
    assert said != {"not refused"}


def test_batches_above_the_rows_of_a_first_piece(tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return ce(m((x - x.mean(0)) if len(x) >= 32 else x), y)

    assert train(tmp_path, losses, batch=60) == 0


@pytest.mark.parametrize("records", [20, 4])
def test_the_number_of_records_where_it_never_changes(records: int, tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return plain(m, x, y) * 12 / len(x)

    assert train(tmp_path, losses, batch=records, records=records) <= 1


@pytest.mark.parametrize("start", [0.25, 0.5, 0.9])
def test_mixing_that_begins_late(start: float, tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return ce(m(x - x.mean(0)), y) if step >= start * 120 else plain(m, x, y)

    for seed in (1, 2, 3):
        assert train(tmp_path, losses, steps=120, seed=seed) <= start * 120 + 4


def test_mixing_now_and_then(tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return (
            ce(m(x.lerp(x[torch.randperm(len(x))], 0.3)), y)
            if random.random() < 0.25
            else plain(m, x, y)
        )

    assert all(train(tmp_path, losses, steps=100, seed=seed) < 100 for seed in (1, 2, 3))


@pytest.mark.parametrize("start", [0, 30])
def test_hooks_that_mix(start: int, tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m[0](x)  # type: ignore[index]
        h.register_hook(lambda g: g / g.norm() if step >= start else g * 2)
        return ce(m[2](torch.tanh(h)), y)  # type: ignore[index]

    for seed in (1, 2, 3):
        assert train(tmp_path, losses, steps=60, seed=seed) <= start + 4


def test_new_code_at_a_step_of_which_the_losses_alone_were_to_be_checked(tmp_path: Path) -> None:
    steps: list[int] = []

    def saw(training: dpfy.PrivateTraining) -> None:
        assert training.isolation is not None
        steps.append(min(training.isolation.schedule.due - training.isolation.schedule.cut - {0}))

    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m[0](x)  # type: ignore[index]
        if step >= steps[0]:
            h.register_hook(lambda g: g / g.norm())
        return ce(m[2](torch.tanh(h)), y)  # type: ignore[index]

    assert train(tmp_path, losses, steps=60, saw=saw) == steps[0]


def test_hooks_that_read_now_and_then(tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = m[0](x)  # type: ignore[index]
        h.register_hook(lambda g: g / float(g.abs().max()))
        return ce(m[2](torch.tanh(h)), y)  # type: ignore[index]

    assert train(tmp_path, losses) == 0


class Kept:
    """What a loop keeps of a batch for the next loss."""

    def __init__(self, keep: Callable[..., Any], start: int = 0) -> None:
        self.value: Any = None
        self._keep, self._start = keep, start

    def __call__(self, losses: Tensor, x: Tensor, y: Tensor, step: int) -> None:
        if step >= self._start:
            self.value = self._keep(self.value, losses, x, y)


KEPT: dict[str, Callable[..., Any]] = {
    "a queue": lambda old, losses, x, y: torch.cat([x[:2] if old is None else old, x[:1]])[-4:],
    "a running mean": lambda old, losses, x, y: (
        x.mean(0) if old is None else 0.9 * old + 0.1 * x.mean(0)
    ),
    "weights of classes": lambda old, losses, x, y: torch.bincount(y, minlength=CLASSES).float(),
    "a number that is followed": lambda old, losses, x, y: (
        0.9 * (old or 1.0) + 0.1 * losses.mean().item()
    ),
    "a number that is not": lambda old, losses, x, y: (
        0.9 * (old or 1.0) + 0.1 * float(losses.mean())
    ),
    "an array": lambda old, losses, x, y: x.numpy().mean(),
}


@pytest.mark.parametrize("start", [0, 40])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_after_a_step(name: str, start: int, tmp_path: Path) -> None:
    kept = Kept(KEPT[name], start)

    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        if kept.value is None:
            return plain(m, x, y)
        held = kept.value.mean() if isinstance(kept.value, Tensor) else kept.value
        return plain(m, x, y) * (1 + held)

    assert train(tmp_path, losses, steps=80, after=kept) < 80


PLAIN: dict[str, Callable[..., Any]] = {
    "root": lambda old, losses, x, y: math.sqrt(losses.mean().item()),
    "numpy": lambda old, losses, x, y: float(np.mean([one.item() for one in losses])),
    "count": lambda old, losses, x, y: sum(one > 1 for one in losses.tolist()),
    "table": lambda old, losses, x, y: [1, 2, 3][y[0].item()],
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_python_makes_plain(name: str, tmp_path: Path) -> None:
    kept = Kept(PLAIN[name])

    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return plain(m, x, y) * (2 if kept.value is None else kept.value)

    assert train(tmp_path, losses, after=kept) < 6


def test_what_was_read_for_long_and_is_used_late(tmp_path: Path) -> None:
    kept = Kept(PLAIN["root"])

    def losses(m: nn.Module, x: Tensor, y: Tensor, step: int) -> Tensor:
        return plain(m, x, y) * (kept.value if step >= 60 else 2.0)

    assert 60 <= train(tmp_path, losses, steps=120, after=kept) < 120


def test_constants_of_a_table_made_before_the_run_may_change(tmp_path: Path) -> None:
    table, shown = torch.linspace(1, 2, 40), Kept(PLAIN["root"])
    steps = train(
        tmp_path, lambda m, x, y, step: plain(m, x, y) * table[step], steps=40, after=shown
    )
    assert steps == 40


def test_numbers_are_followed_through_arithmetic_and_are_numbers(tmp_path: Path) -> None:
    seen: list[Any] = []
    train(
        tmp_path,
        lambda m, x, y, _: plain(m, x, y),
        steps=4,
        after=lambda losses, *_: seen.append(losses.mean().item()),
    )
    assert any(isinstance(value, Followed) for value in seen)
    mean = sum(seen) / len(seen)
    assert isinstance(mean, Followed)
    assert isinstance(max(seen) * 2 - 1, Followed)
    assert mean == sum(map(float, seen)) / len(seen)
    assert type(float(mean)) is float
    import pickle

    assert type(pickle.loads(pickle.dumps(mean))) is float
