"""Record and replay: what a private computation does on one data set, and on its neighbour when the
noisy values are the same.

A computation is private because of the noise that its mechanisms add, and for no other reason. So
it is run twice:

    record   on the data; every value that a mechanism is given is written down, with its declared
    bound, and what it answered replay   on the neighbour; each mechanism answers what it answered
    before

If all that leaves goes through mechanisms, the second run makes the same calls with the same public
parameters, and its result is the same, bit for bit. What differs has gone around the noise: a count
that is divided by, a category that is read off, a case that is skipped. And the values that a
mechanism was given differ by at most what their bound says. Nothing is estimated: one pair of
neighbours that shows a difference is a proof. That none shows one is evidence for the pairs that
were tried: choose records that lie at the ends of their range, alone in their group, missing.
(Cebere et al. 2026 found 13 violations in 12 libraries by recording and replaying.)

Not seen here: the law of the noise (a threshold off by one, a seed of one byte), which has tests of
its own.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from dpfy.core import events
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bounded, Permit

HOMES = ("dpfy.mechanisms", "dpfy_lab.mechanisms")
RELEASES = ("release", "release_within", "ask")
SLACK = 1 + 1e-9
AROUND = (
    "the results differ although every noisy value was the same: something went around the noise"
)
D = TypeVar("D")


@dataclass(frozen=True)
class MechanismCall:
    """One use of a mechanism: what is public about it (`mechanism`, `shape`, `bound`), the value it
    was given, what it answered.
    """

    mechanism: str
    shape: tuple[int, ...]
    bound: tuple[float, float, float]
    event: events.Event
    value: Any = field(repr=False)
    answer: Any = field(default=None, repr=False)

    @property
    def public(self) -> tuple[object, ...]:
        """All that must be the same on neighbours."""
        return self.mechanism, self.shape, self.bound


@dataclass(frozen=True)
class Fault:
    """What differs between neighbours that must not: `kind` is flow, distance, result or cost."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass
class _Tape:
    """The calls of one run; with `before`, those whose answers are given again."""

    before: list[MechanismCall] | None = None
    calls: list[MechanismCall] = field(default_factory=list)
    inside: bool = False

    def take(
        self, real: Callable[..., Any], mechanism: Any, value: Any, *rest: Any, **named: Any
    ) -> Any:
        """In place of a mechanism's release. One that uses another one is one call; one that
        selects among runs is made of their calls.
        """
        if self.inside or (callable(value) and (not rest or isinstance(rest[0], Permit))):
            return real(mechanism, value, *rest, **named)
        call, place = _call(mechanism, value), len(self.calls)
        self.calls.append(call)
        self.inside = True
        try:
            answer = real(mechanism, value, *rest, **named)
        finally:
            self.inside = False
        if (
            self.before is not None
            and place < len(self.before)
            and self.before[place].public == call.public
        ):
            answer = self.before[place].answer
        self.calls[place] = replace(call, answer=answer)
        return answer


def check(
    run: Callable[[D], Any],
    data: D,
    neighbour: D,
    *,
    claimed: events.Event | None = None,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> list[Fault]:
    """What two neighbours tell apart in `run`, other than by the noise. Nothing, where all is well.

    `run` makes its releases with a fixed secret. `claimed` is the event that is billed for all of
    them.
    """
    first, second = _Tape(), None
    with _watched(first):
        result, error = _outcome(run, data)
    second = _Tape(first.calls)
    with _watched(second):
        again, other = _outcome(run, neighbour)
    faults = list(_flow(first.calls, second.calls))
    if error != other:
        faults.append(Fault("flow", f"one of them raises {error or other}"))
    if faults:
        return faults
    moves = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    for number, (a, b) in enumerate(zip(first.calls, second.calls, strict=True)):
        faults += _distance(number, a, b, moves)
    if not _same(result, again):
        faults.append(Fault("result", AROUND))
    if claimed is not None:
        faults += _cost(first.calls, second.calls, moves, claimed)
    return faults


def _outcome(run: Callable[[D], Any], data: D) -> tuple[Any, str]:
    try:
        return run(data), ""
    except Exception as problem:
        return None, type(problem).__name__


def _flow(first: list[MechanismCall], second: list[MechanismCall]) -> Iterator[Fault]:
    if len(first) != len(second):
        yield Fault("flow", f"{len(first)} releases on one, {len(second)} on the other")
    for number, (a, b) in enumerate(zip(first, second, strict=False)):
        if a.public != b.public:
            yield Fault(
                "flow",
                f"release {number}: {a.mechanism} of {a.shape} on one, {b.mechanism} of {b.shape} "
                f"on the other",
            )


def _apart(a: MechanismCall, b: MechanismCall) -> tuple[float, float, float]:
    """The L2, L1 and L-infinity distance of the values of two calls."""
    if isinstance(a.value, dict):
        keys = sorted(a.value.keys() | b.value.keys(), key=repr)
        one, other = ([c.value.get(key, 0) for key in keys] for c in (a, b))
    else:
        one, other = (np.asarray(c.value, dtype=object).ravel().tolist() for c in (a, b))
    apart = np.array([abs(float(x - y)) for x, y in zip(one, other, strict=True)])
    return math.sqrt(float((apart**2).sum())), float(apart.sum()), float(apart.max(initial=0.0))


def _distance(number: int, a: MechanismCall, b: MechanismCall, moves: int) -> Iterator[Fault]:
    for name, found, bound in zip(("L2", "L1", "L-infinity"), _apart(a, b), a.bound, strict=True):
        if found > bound * moves * SLACK:
            words = (
                f"release {number} ({a.mechanism}): the {name} distance is {found:.6g}, declared "
                f"{bound * moves:.6g}"
            )
            yield Fault("distance", words)


def _cost(
    first: list[MechanismCall], second: list[MechanismCall], moves: int, claimed: events.Event
) -> Iterator[Fault]:
    """Whether these neighbours pay more than what is claimed: in pure epsilon where the claim has
    one, else in zCDP.

    A release costs the part of its bill that the distance is of its bound. Those of a group or a
    level that neighbours share cost nothing.
    """
    for measure, name, power in ((_pure, "epsilon", 1), (_rho, "zCDP", 2)):
        due = measure(claimed)
        if math.isfinite(due):
            spent = math.fsum(
                measure(_once(a.event)) * _part(a, b, moves) ** power
                for a, b in zip(first, second, strict=True)
            )
            if spent > due * SLACK:
                yield Fault("cost", f"the releases cost {name} {spent:.6g}, claimed {due:.6g}")
            return


def _once(event: events.Event) -> events.Event:
    """The bill of one of the releases that a permit covers."""
    return event.event if isinstance(event, events.Repeated) else event


def _part(a: MechanismCall, b: MechanismCall, moves: int) -> float:
    """Which part of the declared bound the distance is, in the norm that is billed."""
    norm = (
        0 if isinstance(_once(a.event), events.Gaussian) else 1 if math.isfinite(a.bound[1]) else 2
    )
    return _apart(a, b)[norm] / (a.bound[norm] * moves)


def _leaves(event: events.Event) -> list[tuple[events.Event, int]]:
    return events.flatten(event)


def _pure(event: events.Event) -> float:
    return math.fsum(count * _pure_leaf(leaf) for leaf, count in _leaves(event))


def _pure_leaf(leaf: events.Event) -> float:
    if isinstance(leaf, events.Laplace):
        return 1 / leaf.noise_multiplier
    if isinstance(leaf, events.DiscreteLaplace):
        return leaf.noise_parameter * leaf.sensitivity
    if isinstance(leaf, events.BoundedRange):
        return leaf.epsilon
    return leaf.epsilon if isinstance(leaf, events.EpsilonDelta) and not leaf.delta else math.inf


def _rho(event: events.Event) -> float:
    return math.fsum(count * _rho_leaf(leaf) for leaf, count in _leaves(event))


def _rho_leaf(leaf: events.Event) -> float:
    if isinstance(leaf, events.Gaussian):
        return 0.5 / leaf.noise_multiplier**2
    if isinstance(leaf, events.DiscreteGaussian):
        return 0.5 * (leaf.sensitivity / leaf.sigma) ** 2
    return (
        leaf.epsilon**2 / 8 if isinstance(leaf, events.BoundedRange) else _pure_leaf(leaf) ** 2 / 2
    )


def _call(mechanism: Any, given: Any) -> MechanismCall:
    """What is written down of a release. Values on a grid are taken in the units of the data;
    records that a mechanism bounds itself are not looked at, and neither are keys that are not
    public, nor how many there are.
    """
    tool = getattr(mechanism, "mechanism", mechanism)  # a stream of questions asks for one
    if not isinstance(given, Bounded):
        return MechanismCall(repr(tool), (), (math.inf,) * 3, tool.event, ())
    scale = 1
    value: Any = getattr(given.value, "distance", given.value)
    if hasattr(value, "grid"):
        value, scale = value.counts, value.grid.step
    if isinstance(value, dict):
        return MechanismCall(repr(tool), (), _norms(given), tool.event, dict(value))
    exact = np.asarray(value, dtype=object) * scale if scale != 1 else np.asarray(value)
    return MechanismCall(repr(tool), tuple(np.shape(value)), _norms(given), tool.event, exact)


def _norms(given: Bounded[Any]) -> tuple[float, float, float]:
    return given.bound.l2, given.bound.l1, given.bound.linf


@contextmanager
def _watched(tape: _Tape) -> Iterator[None]:
    """Inside the block every release of a mechanism goes through the tape."""
    held = [
        (cls, name, vars(cls)[name])
        for cls in mechanisms()
        for name in RELEASES
        if name in vars(cls)
    ]
    for cls, name, real in held:
        setattr(cls, name, _through(tape, real))
    try:
        yield
    finally:
        for cls, name, real in held:
            setattr(cls, name, real)


def _through(tape: _Tape, real: Callable[..., Any]) -> Callable[..., Any]:
    def release(self: Any, value: Any, *rest: Any, **named: Any) -> Any:
        return tape.take(real, self, value, *rest, **named)

    return release


def mechanisms() -> list[type]:
    """Every class of dpfy and of the lab that defines a release."""
    found = []
    for home in HOMES:
        for module in pkgutil.iter_modules(importlib.import_module(home).__path__, f"{home}."):
            held = vars(importlib.import_module(module.name)).values()
            own = [c for c in held if isinstance(c, type) and c.__module__ == module.name]
            found += [c for c in own if any(name in vars(c) for name in RELEASES)]
    return found


def _same(one: Any, other: Any) -> bool:
    """Equal down to the last bit, whatever they are made of."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        a, b = np.asarray(one), np.asarray(other)
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)
