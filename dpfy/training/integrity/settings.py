"""The optimizer's settings at each step: known when the run begins, so that none can follow the
data.

A learning rate, momentum, weight decay or epsilon that is computed from a batch moves the weights
past the noise. So the settings of every step are written down before the first batch is read, by
stepping a copy of the schedulers through the whole plan.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    from dpfy.training.schedulers import Schedules

GIVE = "give the scheduler to the run: PrivateTraining(..., scheduler=scheduler); the run steps it"

RULE = (
    f"settings follow a schedule that is known when the run begins, never the data: {GIVE}, or use "
    f"Update(schedule=...)"
)

PLAIN = frozenset({float, int, bool, str, type(None)})
"""Types of settings that are compared as they are."""

Groups = list[dict[str, Any]]


def settings(
    groups: Iterable[Mapping[str, Any]], skip: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The settings of parameter groups, as plain values."""
    left = {"params", *skip}
    return [
        {k: v if type(v) in PLAIN else _number(v) for k, v in group.items() if k not in left}
        for group in groups
    ]


def numbers(groups: Iterable[Mapping[str, Any]]) -> list[float]:
    """The real numbers among the settings of parameter groups."""
    held = [
        v
        for group in settings(groups)
        for value in group.values()
        for v in (value if isinstance(value, list) else [value])
    ]
    return sorted({v for v in held if isinstance(v, float)})


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return list(value) if isinstance(value, tuple) else value


class Settings:
    """What each setting of the optimizer must be at each step.

    Without a scheduler all settings stay as they are (`Update(schedule=...)` sets the learning rate
    at each step). With schedulers of the step, they are what these give to the plan's steps. A
    scheduler that waits for a metric is repeated by a copy that gets the same public metrics. A
    class of optimizer that is not torch's may change its settings in its own step, which sees
    released gradients.

    Guarantees: `check(step)` returns only if every setting of every group is, bit for bit, what it
    must be at that step; `move` uses those that it finds, whatever hooks the optimizer has.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedules: Schedules, steps: int, *, ruled: bool
    ) -> None:
        """`ruled`: the learning rate is set by `Update(schedule=...)`, whatever it was before the
        step.
        """
        self._optimizer, self._schedules = optimizer, schedules
        self._skip = ("lr", "initial_lr") if ruled else ("initial_lr",)
        self._foreign = not type(optimizer).__module__.startswith("torch.optim")
        self._copy, self._shell = _copied(schedules, optimizer)
        self._wanted = self._of(optimizer)
        self._planned: list[Groups] = []
        if schedules and not schedules.waiting:
            self._planned = [self._of(self._shell)]
            for step in range(steps):
                self._advance(step)
                now = self._of(self._shell)
                self._planned.append(self._planned[-1] if now == self._planned[-1] else now)

    def start(self, step: int) -> None:
        """The run stands before `step`: at its beginning, or with the settings that its checkpoint
        held.
        """
        self._copy, self._shell = _copied(self._schedules, self._optimizer)
        self._wanted = self._planned[step] if self._planned else self._of(self._optimizer)
        self.check(step)

    def check(self, step: int) -> None:
        """Refuse settings that differ from the schedule's at `step`."""
        self._require(
            step, self._wanted, self._of(self._optimizer), "changed outside of the schedule"
        )

    def move(self, step: int) -> None:
        """Let the optimizer make its step with the settings that it has now: hooks, and torch's own
        steps, must leave them alone.
        """
        wanted = settings(self._optimizer.param_groups)
        asked: list[int] = []

        def first(*given: object) -> None:
            if not asked:  # a step that calls the step of its base class asks twice
                asked.append(step)
                self._require(
                    step, wanted, settings(self._optimizer.param_groups), "changed by a hook"
                )

        if self._foreign and not hasattr(type(self._optimizer).step, "hooked"):
            asked.append(
                step
                # torch calls hooks around the step of its base class only, after it made changes of
                # its own
            )
        last = self._optimizer.register_step_pre_hook(first)
        try:
            self._optimizer.step()
        finally:
            last.remove()
        if not self._foreign:
            self._require(
                step,
                wanted,
                settings(self._optimizer.param_groups),
                "changed by the optimizer itself",
            )
        elif not self._planned:
            self._wanted = self._of(self._optimizer)

    def advanced(self, step: int) -> None:
        """The schedulers were stepped after `step`."""
        if self._planned:
            self._wanted = self._planned[step + 1]
        elif self._schedules:
            self._advance(step)
            self._wanted = self._of(self._shell)

    def measured(self, name: str, value: float) -> None:
        """Give a public metric to the schedulers that wait for one."""
        self._schedules.measured(name, value)
        for scheduler, waits in zip(self._copy, self._schedules.waits, strict=True):
            if waits:
                _quietly(partial(scheduler.step, value))
        self._wanted = self._of(self._shell)

    def _advance(self, step: int) -> None:
        for scheduler, every, waits in zip(
            self._copy, self._schedules.every, self._schedules.waits, strict=True
        ):
            if not waits and (step + 1) % every == 0:
                _quietly(scheduler.step)

    @staticmethod
    def _require(step: int, wanted: Groups, now: Groups, how: str) -> None:
        if now == wanted:
            return
        names = {
            k
            for a, b in zip(now, wanted, strict=False)
            for k in a.keys() | b.keys()
            if a.get(k) != b.get(k)
        }
        raise InvalidInput(
            f"optimizer.{min(names, default='param_groups')}",
            f"a value at step {step} that was {how}",
            RULE,
        )

    def _of(self, optimizer: torch.optim.Optimizer) -> Groups:
        return settings(optimizer.param_groups, self._skip)


def _copied(
    schedules: Schedules, optimizer: torch.optim.Optimizer
) -> tuple[list[Any], torch.optim.Optimizer]:
    """The schedulers again, around an optimizer that has the same settings and no parameters."""
    shell = object.__new__(type(optimizer))
    vars(shell).update(vars(optimizer))
    shell.param_groups = [
        {k: copy.deepcopy(v) for k, v in g.items() if k != "params"} | {"params": []}
        for g in optimizer.param_groups
    ]
    made: dict[int, Any] = {id(optimizer): shell}
    return [_again(scheduler, made) for scheduler in schedules.all], shell


def _again(value: Any, made: dict[int, Any]) -> Any:
    """A copy of a scheduler's field. Functions are shared: they must depend on the step alone, and
    were asked for all steps before.
    """
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, LRScheduler):
        again = made[id(value)] = object.__new__(type(value))
        vars(again).update({k: _again(v, made) for k, v in vars(value).items()})
        return again
    if isinstance(value, MethodType):
        return (
            MethodType(value.__func__, _again(value.__self__, made))
            if isinstance(value.__self__, LRScheduler)
            else value
        )
    if isinstance(value, partial):
        return partial(
            _again(value.func, made), *_again(value.args, made), **_again(value.keywords, made)
        )
    if type(value) in (list, tuple):
        return type(value)(_again(v, made) for v in value)
    if type(value) is dict:
        return {k: _again(v, made) for k, v in value.items()}
    if isinstance(value, torch.optim.Optimizer | torch.nn.Module) or callable(value):
        return value
    return (
        copy.deepcopy(value)
        if isinstance(value, torch.Tensor | Sequence | Mapping)
        else copy.copy(value)
    )


def _quietly(step: Any) -> None:
    """Torch warns where the optimizer has not moved before its scheduler; the copy's optimizer
    never moves.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step()
