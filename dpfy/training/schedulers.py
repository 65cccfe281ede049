"""Torch's learning rate schedulers in a private run: stepped at the logical boundary, kept in the
checkpoint, named in the report.

What a scheduler does with the learning rates is post-processing. What has to hold is that a resumed
run repeats it: the run steps the scheduler itself, stores its state, and refuses another scheduler,
another setting or another function than it was started with.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from dpfy.core import check
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.training.integrity import computation
from dpfy.training.integrity.settings import GIVE, settings

KIND = "dpfy kind"
"""The key under which an encoded value names what JSON has no word for."""

OWN = ("optimizer", "last_epoch", "base_lrs", "verbose")
"""Fields of a scheduler that are no setting of it."""


@dataclass(frozen=True)
class Every:
    """A scheduler that is stepped after every `steps` steps of the run: once an epoch, say."""

    scheduler: LRScheduler
    steps: int

    def __post_init__(self) -> None:
        check.integer("every", self.steps)


class Schedules:
    """The schedulers of a run's optimizer; none is the identity: rates stay as they are.

    Each is stepped after every step of the run, or as `Every` says; ReduceLROnPlateau where the
    caller gives it a public metric.

    Guarantees: with the same plan, secret and metrics a resumed run has the rates of an
    uninterrupted one. While a run lasts nobody but the run steps a scheduler or changes a setting
    of the optimizer that it drives.
    """

    def __init__(
        self, given: object, optimizer: torch.optim.Optimizer, steps: int, *, ruled: bool = False
    ) -> None:
        parts: list[Any] = (
            [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
        )
        self.all: list[LRScheduler] = [
            part.scheduler if isinstance(part, Every) else part for part in parts
        ]
        self.every = [part.steps if isinstance(part, Every) else 1 for part in parts]
        self._optimizer, self._steps = optimizer, steps
        self.metric: str | None = None
        for scheduler, every in zip(self.all, self.every, strict=True):
            _check(scheduler, optimizer, steps // every)
        if self.all and ruled:
            raise InvalidInput(
                "scheduler",
                "beside Update(schedule=...)",
                "two rules of one learning rate: give one of them",
            )
        self._given: list[tuple[Any, list[float | None]]] = [
            (one, _factors(one, steps))
            for s in self.all
            for one in _within(s)
            if hasattr(one, "lr_lambdas")
        ]
        self._steady = True
        self.waits = [waits(scheduler) for scheduler in self.all]
        often = ["" if every == 1 else f" after every {every} steps" for every in self.every]
        self._words = ", and ".join(
            described(one) + words for one, words in zip(self.all, often, strict=True)
        )
        self._left = self._marks()

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def waiting(self) -> bool:
        """Whether one of them waits for a metric."""
        return any(self.waits)

    @property
    def words(self) -> str:
        """Names and settings, for the report."""
        return self._words + (
            f" on {self.metric}, public as declared by the caller"
            if self.waiting and self.metric
            else ""
        )

    def check(self) -> None:
        """Refuse to go on if the caller's loop stepped a scheduler of the run, or set what it
        sets.
        """
        if self.all and self._marks() != self._left:
            rule = (
                "the run steps it at each logical boundary: take scheduler.step() and changes of "
                "the optimizer's groups out of the loop"
            )
            raise InvalidInput(
                "scheduler",
                "stepped, or its optimizer's settings changed, outside of the run",
                rule,
            )
        if not self._steady:
            rule = (
                "its functions must depend on the step alone; give a metric of public data to "
                "ReduceLROnPlateau"
            )
            raise InvalidInput(
                "scheduler", "a function that gives another rate than when the run began", rule
            )

    def advance(self, step: int) -> None:
        """Step them, after `step` of the run."""
        for scheduler, every, metric in zip(self.all, self.every, self.waits, strict=True):
            if not metric and (step + 1) % every == 0:
                scheduler.step()
        self._left, self._steady = self._marks(), self._by_the_step()

    def _by_the_step(self) -> bool:
        """Whether functions give what they gave for this step when the run began: else a loss
        behind a lambda would reach the weights.
        """
        return not any(
            1 <= (step := scheduler.last_epoch) <= (each := len(given) // len(scheduler.lr_lambdas))
            and any(
                _factor(f, step) != given[n * each + step - 1]
                for n, f in enumerate(scheduler.lr_lambdas)
            )
            for scheduler, given in self._given
        )

    def measured(self, name: str, value: float) -> None:
        """Give a public metric to those that wait for one; its name must stay the same."""
        if not self.waiting:
            raise InvalidInput(
                "schedule",
                name,
                "no scheduler of this run waits for a metric: record(...) publishes a value",
            )
        if self.metric not in (None, name):
            raise InvalidInput(
                "schedule", name, f"must be the metric that the scheduler got before: {self.metric}"
            )
        self.check()
        self.metric = name
        for scheduler, metric in zip(self.all, self.waits, strict=True):
            if metric:
                scheduler.step(value)  # type: ignore[arg-type]
        self._left = self._marks()

    def fingerprint(self) -> str:
        """Kind, settings and functions of each, as it was given, as text."""
        return "\n".join(
            f"{every} {_identity(one, self._steps)}"
            for one, every in zip(self.all, self.every, strict=True)
        )

    def facts(self) -> dict[str, Any]:
        """Their state, in JSON."""
        return {"metric": self.metric, "states": [_encoded(scheduler) for scheduler in self.all]}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Set them to a state that `facts` gave."""
        try:
            for scheduler, state in zip(self.all, facts["states"], strict=True):
                scheduler.load_state_dict(decode(state))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise Corrupt(
                "checkpoint/state.safetensors", f"does not fit this scheduler ({problem})"
            ) from None
        self.metric = facts["metric"]
        self._left = self._marks()

    def _marks(self) -> tuple[Any, ...]:
        moved = [
            getattr(one, "last_epoch", None) for scheduler in self.all for one in _within(scheduler)
        ]
        return moved, settings(self._optimizer.param_groups)


def require_known(training: Any) -> None:
    """Refuse, in a run that goes on, a torch scheduler of its optimizer that the run was not given:
    it begins again, and nobody knows.
    """
    if not training.schedules and training.rates.factors is None and _strangers(training.optimizer):
        raise InvalidInput(
            "resume scheduler", "one that the run was not given and cannot repeat", GIVE
        )


def waits(scheduler: LRScheduler) -> bool:
    """Whether a scheduler is stepped with a metric, as ReduceLROnPlateau is."""
    given = list(inspect.signature(scheduler.step).parameters.values())
    return bool(given) and given[0].default is inspect.Parameter.empty


def described(scheduler: object) -> str:
    """Name and settings of a scheduler in words, as they stand."""
    held = {k: v for k, v in vars(scheduler).items() if k not in OWN}
    inner = [described(part) for part in _parts(scheduler)]
    functions = [
        _name(f)
        for f in _functions(held)
        if not isinstance(getattr(f, "__self__", None), LRScheduler)
    ]
    plain = [f"{k.lstrip('_')}={_short(v)}" for k, v in held.items() if _telling(k, v)]
    return f"{type(scheduler).__name__}({', '.join([*inner, *dict.fromkeys(functions), *plain])})"


def encode(value: Any) -> Any:
    """A value of a scheduler's state, or of `kept`, in JSON, such that `decode` gives it back,
    equal and of its type.
    """
    if (
        value is None
        or isinstance(value, bool | int | str)
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    if isinstance(value, float):
        return {KIND: "float", "value": repr(value)}
    if isinstance(value, Tensor):
        return {
            KIND: "tensor",
            "value": value.tolist(),
            "dtype": str(value.dtype).removeprefix("torch."),
        }
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {KIND: kind, "value": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, tuple):
        return {KIND: "tuple", "value": [encode(v) for v in value]}
    raise Unsupported(
        f"a {type(value).__name__} in what a checkpoint keeps",
        "keep numbers, words, lists and dictionaries",
    )


def decode(data: Any) -> Any:
    """The value that `encode` gave `data` for."""
    if isinstance(data, list):
        return [decode(v) for v in data]
    if not isinstance(data, dict):
        return data
    value = data["value"]
    match data[KIND]:
        case "float":
            return float(value)
        case "tensor":
            return torch.tensor(value, dtype=getattr(torch, data["dtype"]))
        case "tuple":
            return tuple(decode(v) for v in value)
        case kind:
            pairs = {decode(k): decode(v) for k, v in value}
            return Counter(pairs) if kind == "counter" else pairs


def _check(scheduler: object, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Refuse what is no scheduler of `optimizer`, or one that ends before the run."""
    if not isinstance(scheduler, LRScheduler):
        raise InvalidInput(
            "scheduler", type(scheduler).__name__, "must be a scheduler of torch.optim.lr_scheduler"
        )
    for one in _within(scheduler):
        if getattr(one, "optimizer", optimizer) is not optimizer:
            raise InvalidInput(
                "scheduler",
                f"{type(one).__name__} of another optimizer",
                "must be made with the run's own optimizer",
            )
    most = getattr(scheduler, "total_steps", None)
    if isinstance(most, int) and most < steps:
        rule = f"the run steps it {steps} times: make it with total_steps={steps}"
        raise InvalidInput("scheduler", f"{type(scheduler).__name__} of {most} steps", rule)
    if None in (given := _factors(scheduler, steps)):
        raise InvalidInput(
            "scheduler",
            f"a function without a value at {given.index(None) + 1}",
            f"it is asked for 0 to {steps}",
        )
    _encoded(scheduler)


def _parts(scheduler: object) -> list[LRScheduler]:
    """The schedulers inside of a scheduler."""
    held = chain.from_iterable(v for v in vars(scheduler).values() if isinstance(v, list | tuple))
    return [part for part in held if isinstance(part, LRScheduler)]


def _within(scheduler: LRScheduler) -> list[LRScheduler]:
    """A scheduler and all that are inside of it."""
    return [scheduler, *(one for part in _parts(scheduler) for one in _within(part))]


def _functions(held: Mapping[str, Any]) -> list[Any]:
    """The functions among the values of a scheduler."""
    flat = chain.from_iterable(v if isinstance(v, list | tuple) else [v] for v in held.values())
    return [v for v in flat if callable(v) and not isinstance(v, LRScheduler | type)]


def _identity(scheduler: LRScheduler, steps: int) -> str:
    """Kind, settings, the code of all functions and what those of the step give, as text; state
    that moves as it stands.
    """
    kind = type(scheduler)
    codes = (
        []
        if kind.__module__.startswith("torch.")
        else [computation.of_function(getattr(kind, n), kind) for n in ("get_lr", "step")]
    )
    codes += [
        computation.of_function(f)
        for f in _functions(vars(scheduler))
        if getattr(f, "__self__", None) is not scheduler
    ]
    inside = [_identity(part, steps) for part in _parts(scheduler)]
    return (
        f"{kind.__qualname__} {_encoded(scheduler)} {codes} {_factors(scheduler, steps)} {inside}"
    )


def _factors(scheduler: LRScheduler, steps: int) -> list[float | None]:
    """What the functions of the step give, at every step; None where they give nothing."""
    return [
        _factor(f, step)
        for f in getattr(scheduler, "lr_lambdas", ())
        for step in range(1, steps + 1)
    ]


def _factor(function: Any, step: int) -> float | None:
    try:
        return float(function(step))
    except (LookupError, ArithmeticError, ValueError):
        return None


def _encoded(scheduler: LRScheduler) -> Any:
    """The state of a scheduler in JSON, without its functions: these are fingerprinted."""
    state = {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
    return encode(state)


def _strangers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some torch scheduler holds `optimizer`."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return True
    holders = gc.get_referrers(optimizer)
    holders += [
        h
        for d in holders
        if isinstance(d, dict)
        for h in gc.get_referrers(d)
        if isinstance(h, LRScheduler)
    ]
    return any(isinstance(holder, LRScheduler) for holder in holders)


def _telling(name: str, value: object) -> bool:
    """Whether a field is a setting to be told: a plain value, or milestones and the like."""
    if name.startswith("_") and name != "_milestones":
        return False
    plain = isinstance(value, bool | int | float | str) or (
        isinstance(value, list | tuple | Counter) and len(value) <= 8
    )
    return plain and not (
        isinstance(value, list | tuple)
        and any(isinstance(v, LRScheduler) or callable(v) for v in value)
    )


def _short(value: Any) -> str:
    if isinstance(value, Counter):
        return _short(sorted(value.elements()))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(function: Any) -> str:
    if isinstance(function, partial):
        given = [
            *map(_short, function.args),
            *(f"{k}={_short(v)}" for k, v in function.keywords.items()),
        ]
        return f"{_name(function.func)}({', '.join(given)})"
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")
