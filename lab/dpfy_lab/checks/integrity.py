"""Checks of what protects a run: noise that is made for one sum, weights that the run alone changes,
examples that do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpfy.audit.observation import Discarded
from dpfy.core.errors import DpfyError
from dpfy.plan.recipe import dpsgd
from dpfy.training.loop import PrivateTraining
from dpfy_lab.checks.loop import CLIP, Array, attempt, dimension, network, plan_of
from dpfy_lab.checks.published import temporary
from dpfy_lab.selftest.mistake import Found, check

Released = list[tuple[int, Array]]
"""(step, noisy sum), in order."""


def _rows() -> Array:
    return 4 * np.eye(8, dimension())


def _after_an_error(folder: Path) -> Released:
    """Step 1 fails after its noise, and the loop goes on with other gradients."""
    plan = plan_of(8, rate=1.0, steps=6)
    with network() as model, attempt(model, _rows(), plan, folder) as made:
        with suppress(Discarded):
            made.run(fail=1)
        made.rows = -made.rows
        with suppress(DpfyError):
            made.run()
        raise Discarded
    return made.seen


def _after_a_crash(folder: Path) -> Released:
    """The process dies at step 3, and the run is resumed with other gradients."""
    plan = plan_of(8, rate=1.0, steps=6)
    with network() as model, attempt(model, _rows(), plan, folder) as made, suppress(Discarded):
        made.run(fail=3)
    with network() as model, suppress(DpfyError), attempt(model, -_rows(), plan, folder) as again:
        again.seen = made.seen
        again.run()
    return made.seen


@check("spent")
def SPENT() -> Found:
    """The noise of a step is for one sum: a step that is released again, after an error or a crash,
    is released with the same bits.
    """
    for what, run in (("an error", _after_an_error), ("a crash", _after_a_crash)):
        first: dict[int, Array] = {}
        with temporary() as folder:
            released = run(folder)
        for step, seen in released:
            if not np.array_equal(kept := first.setdefault(step, seen), seen):
                apart = float(np.linalg.norm(kept - seen))
                return (
                    f"after {what} step {step} is released again: the difference, {apart:.3f} clip "
                    f"norms, has no noise"
                )
    return None


def _step_without_noise(training: PrivateTraining) -> None:
    for p in training.model.parameters():
        p.grad = torch.ones_like(p)
    training.optimizer.step()


@torch.no_grad()
def _overwrite(training: PrivateTraining) -> None:
    next(training.model.parameters()).fill_(1.0)


WRITES: dict[str, Callable[[PrivateTraining], Any]] = {
    "an overwritten weight": _overwrite,
    "a step without noise": _step_without_noise,
    "a weight written through .data": lambda t: next(t.model.parameters()).data.fill_(1.0),
    "a weight decay set to a number": lambda t: t.optimizer.param_groups[0].update(
        weight_decay=0.5
    ),
}
"""What careless loops do between two private steps."""


@check("beside")
def BESIDE() -> Found:
    """What a run releases goes through the noise: a run whose weights, optimizer or buffers others
    write to ends before the next step.
    """
    for what, write in WRITES.items():
        with (
            temporary() as folder,
            network() as model,
            suppress(DpfyError),
            attempt(model, _rows(), plan_of(8, rate=1.0, steps=6), folder) as made,
        ):
            made.run(between=lambda t, write=write: write(t) if t.steps_done == 2 else None)  # type: ignore[misc]
        if (steps := made.training.steps_done - 2) > 0:
            return f"after {what} the run made {steps} more steps"
    return None


MIXTURES = {
    "a shape": "lambda losses, x, y: losses / (y > 0).nonzero().shape[0]",
    "a read value": "lambda losses, x, y: losses * torch.full((1,), x[:, 0].square().mean())",
}
"""Losses in which a record's part depends on the other records, as text: code of this package is
not watched, that of a user is.
"""


def _mixing() -> Iterator[tuple[str, int]]:
    """For each mixture, how many steps a run made with it."""
    x, y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
    plan = dpsgd(64, 32, steps=1, clip_norm=CLIP).with_noise(1.0, delta=1e-3)
    for what, text in MIXTURES.items():
        mix = eval(text, {"__name__": "loop", "torch": torch})
        model = nn.Linear(6, 3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            temporary() as folder,
            suppress(DpfyError),
            PrivateTraining(model, sgd, (x, y), plan, folder) as training,
        ):
            for features, labels in training.batches():
                losses = nn.functional.cross_entropy(model(features), labels, reduction="none")
                training.step(mix(losses, features, labels))
        yield what, training.steps_done


@check("isolation")
def ISOLATION() -> Found:
    """A loss through which examples reach each other ends the run before anything is released."""
    taken = [what for what, steps in _mixing() if steps]
    return f"a run takes losses that mix examples by {' and by '.join(taken)}" if taken else None


CHECKS = (SPENT, BESIDE, ISOLATION)
