"""Values that carry their privacy state: bounded before noise, private after it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from dpfy.core import check, events
from dpfy.core.claim import releases_of
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import require_same_process
from dpfy.core.unit import EXAMPLE, Adjacency, Unit

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """The largest L2, L1 and L-infinity norm of what one unit adds. Infinity means unbounded: no
    noise that needs it can protect it.

    What follows from the norms that are given is filled in: no L2 norm is above the L1 norm, or
    above the root of the product of the L1 and the L-infinity norm, and no L-infinity norm is above
    the L2 norm.
    """

    l2: float = math.inf
    l1: float = math.inf
    linf: float = math.inf

    def __post_init__(self) -> None:
        norms = (self.l2, self.l1, self.linf)
        try:
            self.__dict__.update(_norms(*norms))
        except TypeError:  # what cannot be looked up is no number, and is refused by name
            self.__dict__.update(_norms.__wrapped__(*norms))

    @classmethod
    def scalar(cls, most: float) -> Bound:
        """Of one number, whose norms are all the same."""
        return cls(most, most, most)

    def finite(self, norm: str, what: str) -> float:
        """The norm called `norm`, which `what` cannot do without."""
        if math.isinf(value := float(getattr(self, norm))):
            way_out = (
                f"bound what one unit adds: clip to Bound({norm}=...), or use a mechanism for a "
                f"norm that is bounded"
            )
            raise Unsupported(f"{what} on a value without a bound on its {norm} norm", way_out)
        return value


@lru_cache(maxsize=256, typed=True)
def _norms(l2: float, l1: float, linf: float) -> dict[str, float]:
    """The norms, checked, and what follows from them. A step of training makes bounds of the same
    norms as the one before it.
    """
    l2, l1, linf = (
        check.positive_or_infinite(f"bound.{n}", v)
        for n, v in (("l2", l2), ("l1", l1), ("linf", linf))
    )
    l2 = min(l2, l1, math.sqrt(l1) * math.sqrt(linf) * (1 + 2.0**-50))
    return {"l2": l2, "l1": l1, "linf": min(linf, l2)}


@dataclass(frozen=True)
class Bounded(Generic[T]):
    """A sum over units that is still sensitive: each unit adds at most `bound` to `value`.

    Guarantees: anyone who constructs it has clipped. Only :class:`dpfy.noise.stream.NoiseStream` and
    the mechanisms of
    :mod:`dpfy.mechanisms` turn it into a :class:`Private`.
    """

    value: T
    bound: Bound
    unit: Unit = EXAMPLE


@dataclass(frozen=True)
class Private(Generic[T]):
    """A released value: noise is in it, its charge is in the ledger, and any post-processing is
    free.
    """

    value: T


@dataclass(frozen=True, init=False)
class Permit:
    """The right to make `releases` releases that together are `uses` times `event`, written in the
    ledger as `entry` with its `claim`.

    `closed` says why no release may be made (yet, or any more); it is empty where releases are
    allowed. `adjacency` is the ledger's.

    Guarantees: only a ledger makes one, so anyone who holds one has its charge on disk. A mechanism
    compares what it is about to do with `event` (:meth:`check`), so what was typed twice cannot
    differ.
    """

    name: str
    event: events.Event
    uses: int
    entry: str
    releases: int
    claim: dict[str, Any] = field(compare=False)
    closed: str
    adjacency: Adjacency

    def __init__(self, *_: object, **__: object) -> None:
        raise Unsupported(
            "a permit that no ledger made",
            "reserve the release: Ledger.reserve, or a run folder with its claim",
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A permit that is sent to another process is one of that process. A forked process has
        nothing that was sent to it.
        """
        self.__dict__.update(state, _process=os.getpid())

    def check(self, step: int, event: events.Event) -> None:
        """Refuse a release beyond what was reserved, outside of its time, or of something else:
        `event` is all that the mechanism does.
        """
        if self.closed:
            raise InvalidInput("permit", self.name, self.closed)
        require_same_process(self.__dict__["_process"], f"the permit {self.name!r}")
        if event is not self.__dict__.get(
            "_agreed"
        ):  # events of whole runs can be large, and are compared once
            if event != self.event:
                raise InvalidInput(
                    "event",
                    event,
                    f"is not what the permit {self.name!r} was given for: {self.event}",
                )
            self.__dict__["_agreed"] = event
        if not 0 <= step < self.releases:
            rule = (
                f"the permit {self.name!r} covers {self.releases} releases, steps 0 to "
                f"{self.releases - 1}"
            )
            raise InvalidInput("step", step, rule)

    def spend(self, step: int, event: events.Event) -> None:
        """:meth:`check`, once for a step: through one permit nothing is released twice, with the
        same noise or with other noise.
        """
        self.check(step, event)
        spent = self.__dict__.setdefault("_spent", set())
        if step in spent:
            rule = (
                f"was released before under the permit {self.name!r}: reserve every release, or "
                f"take another step"
            )
            raise InvalidInput("step", step, rule)
        spent.add(step)

    def inner(self, event: events.Event, run: int, releases: int = 1) -> Permit:
        """The permit of one of the runs among which the best is released, where this permit was
        given for that.

        `event` is what the run does: what may be repeated, or one of several that may, or a part of
        either that it does by itself.
        """
        if self.closed or event not in repeatable(self.event):
            raise InvalidInput(
                "event", event, f"is not what the permit {self.name!r} may run several times"
            )
        made = _permit(f"{self.name}, run {run}", event, 1, self.entry, {}, self.adjacency)
        made.__dict__["releases"] = releases
        return made


def repeatable(event: events.Event) -> set[events.Event]:
    """What the runs of an event with several runs do, each as a whole, and the parts of a run that
    are one after the other.
    """
    if isinstance(event, events.RepeatAndSelect | events.Repeated):
        return _runs(event.event)
    if isinstance(event, events.PoissonSampled):
        return repeatable(event.event) if isinstance(event.event, events.RepeatAndSelect) else set()
    if isinstance(event, events.OneOf):
        return _runs(event)
    if isinstance(event, events.Composed | events.Parallel):
        return set().union(*map(repeatable, events.inside(event)))
    return set()


def _runs(event: events.Event) -> set[events.Event]:
    """A run as a whole, or any one of several; and what it does one after the other."""
    parts = events.inside(event) if isinstance(event, events.Composed | events.OneOf) else ()
    return {event}.union(*map(_runs, parts))


def _permit(
    name: str,
    event: events.Event,
    uses: int,
    entry: str,
    claim: dict[str, Any],
    adjacency: Adjacency,
    closed: str = "",
) -> Permit:
    made = object.__new__(Permit)
    made.__dict__.update(
        name=name,
        event=event,
        uses=uses,
        entry=entry,
        claim=claim,
        adjacency=adjacency,
        closed=closed,
    )
    made.__dict__["releases"] = releases_of(uses, claim)
    made.__dict__["_process"] = os.getpid()
    return made


def _changed(held: Permit, closed: str = "") -> Permit:
    """The same permit, closed for another reason or opened."""
    return _permit(held.name, held.event, held.uses, held.entry, held.claim, held.adjacency, closed)


def mock_permit(
    event: events.Event,
    releases: int,
    name: str = "mock",
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> Permit:
    """A permit for noise on made-up data, in benchmarks, audits and tests. No ledger holds it, so
    nothing real may be released under it.
    """
    return _permit(name, event, releases, "0" * 16, {}, adjacency)
