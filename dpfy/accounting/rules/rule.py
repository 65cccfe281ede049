"""What accounting knows of one kind of event: a row of functions, each with a default that claims
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Profile
from dpfy.accounting.tight.losses import PrivacyLoss
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.events import CODEC, Event, inside
from dpfy.core.unit import Adjacency


@dataclass(frozen=True)
class DominatingPair:
    """One release as seen by a removed unit and by an added one.

    `attained` are losses that some neighbouring data sets really have, on which lower bounds rest:
    the same two where the pair is exact. `touched` is the chance that the release depends on the
    unit at all.
    """

    removed: PrivacyLoss
    added: PrivacyLoss
    attained: tuple[PrivacyLoss, PrivacyLoss] | None = None
    touched: float = 1.0

    @property
    def swapped(self) -> DominatingPair:
        """The same with removal and addition exchanged."""
        attained = None if self.attained is None else (self.attained[1], self.attained[0])
        return DominatingPair(self.added, self.removed, attained, self.touched)


DominatingPairs = tuple[tuple[DominatingPair, int], ...]
Divergences = tuple[Array, float]


@dataclass(frozen=True)
class Peer:
    """The dp-accounting event of the same meaning: its class, its arguments, and the way back.
    `translate` translates what is inside.
    """

    name: str
    arguments: Callable[[Any, Callable[[Event], Any]], tuple[Any, ...]]
    back: Callable[[Any, Callable[[Any], Event]], Event]


def same_fields(kind: type, **fields: str) -> Peer:
    """The peer whose name is ours and whose arguments are `fields` of ours, in this order; each is
    given with its own name there.
    """

    def arguments(event: Any, translate: Callable[[Event], Any]) -> tuple[Any, ...]:
        return tuple(
            translate(getattr(event, name)) if name == "event" else getattr(event, name)
            for name in fields
        )

    def back(event: Any, translate: Callable[[Any], Event]) -> Event:
        values = ((name, getattr(event, theirs)) for name, theirs in fields.items())
        ours: Event = kind(
            **{name: translate(value) if name == "event" else value for name, value in values}
        )
        return ours

    return Peer(f"{kind.__name__}DpEvent", arguments, back)


def no_pair(event: Event, adjacency: Adjacency) -> DominatingPair:
    """No dominating pair is known."""
    raise Unsupported(
        f"{type(event).__name__} by a dominating pair of its own", "use --accountant tight or rdp"
    )


def no_sampling(event: Event, rate: float, adjacency: Adjacency) -> DominatingPair:
    """No proof of what Poisson sampling does to it."""
    if adjacency is Adjacency.REPLACE_ONE:
        refuse_replaced(event)
    raise Unsupported(
        f"Poisson sampling of {type(event).__name__}",
        "sample a Gaussian or Laplace release, or use --accountant rdp",
    )


def no_rho(event: Event, adjacency: Adjacency) -> float:
    """No zCDP bound is known."""
    raise Unsupported(
        f"{type(event).__name__} by the zcdp accountant", "use --accountant tight or rdp"
    )


def not_pure(event: Event, adjacency: Adjacency) -> float:
    """There is no pure guarantee."""
    raise Unsupported(
        f"a pure guarantee (delta 0) of {type(event).__name__}", "state a delta above 0"
    )


def no_group(event: Event, size: int) -> Event:
    """No proof of what a group of units sees."""
    raise Unsupported(
        f"group privacy of {type(event).__name__} by its event", "use group.from_curve on its curve"
    )


def _named(event: Event) -> str:
    return f"a release of kind {CODEC.names[type(event)]}"


def _itself(event: Event) -> Event:
    return event


def _not_amplified(event: Event, most: int | None) -> Event:
    return event


@dataclass(frozen=True)
class EventRule:
    """All that is known of events of class `kind`. Adding an event to accounting is adding a row.

    Functions that raise `Unsupported` name the way out; no default claims anything.

    - `words`: the release in words, for the report
    - `pair`: the dominating pair; `repeats`: those of so many runs, where they are not simply that
      many pairs
    - `poisson`: the pair of the event on a Poisson sample
    - `divergences`: Rényi divergences at orders, and the chance of an infinite loss, where they are
      not those of the pair; `orders`: at which they are known best
    - `profile`: a bound on delta at every epsilon, for what is known by that
    - `gaussian`: the noise multiplier of the plain Gaussian that the event is, if it is one; `rho`:
      zCDP; `pure`: epsilon at delta 0
    - `group`: the event as a group of so many units sees it
    - `plain`: the event without trivial cases (rate 1 and the like)
    - `unsampled`: what it is to an attacker who knows who took part; `halve_noise`: with half the noise
    - `within`: refuses numbers that cannot be computed with
    - `peer`: the same event in dp-accounting
    - `can_be_sampled`: False where a unit that a sample leaves out is not the same as an absent one: the
      release shows it, or counts units
    - `replace_only`: what is known under replace-one says nothing of adding or removing a unit
    """

    kind: type
    words: Callable[[Any], str] = _named
    pair: Callable[[Any, Adjacency], DominatingPair] = no_pair
    repeats: Callable[[Any, int, Adjacency], DominatingPairs] | None = None
    poisson: Callable[[Any, float, Adjacency], DominatingPair] = no_sampling
    divergences: Callable[[Any, Adjacency, Array], Divergences] | None = None
    orders: Callable[[Any], tuple[float, ...]] = lambda event: ()
    profile: Callable[[Any, Adjacency], Profile] | None = None
    gaussian: Callable[[Any], float | None] = lambda event: None
    rho: Callable[[Any, Adjacency], float] = no_rho
    pure: Callable[[Any, Adjacency], float] = not_pure
    group: Callable[[Any, int], Event] = no_group
    plain: Callable[[Any], Event] = _itself
    unsampled: Callable[[Any, int | None], Event] = _not_amplified
    halve_noise: Callable[[Any], Event] = _itself
    within: Callable[[Any], None] = lambda event: None
    peer: Peer | None = None
    replace_only: bool = False
    can_be_sampled: bool = True


TABLE: dict[type, EventRule] = {}
"""Every row by the class of its events; `dpfy.accounting.rules` fills it."""


def rule_of(event: Event) -> EventRule:
    """The row of an event."""
    return TABLE[type(event)]


def releases(event: Event, count: int, adjacency: Adjacency) -> DominatingPairs:
    """The pairs of `event` run `count` times."""
    row = rule_of(event)
    return (
        ((row.pair(event, adjacency), count),)
        if row.repeats is None
        else row.repeats(event, count, adjacency)
    )


def words(event: Event) -> str:
    """The release in words."""
    return rule_of(event).words(event)


def unsampled(event: Event, most: int | None = None) -> Event:
    """The same releases if an attacker knew who took part: no amplification. `most` bounds the
    steps one unit takes part in.
    """
    return rule_of(event).unsampled(event, most)


def amplified(event: Event) -> bool:
    """Whether the accounting of `event` relies on who took part being secret."""
    return unsampled(event) != event


def halve_noise(event: Event) -> Event:
    """`event` with every noise multiplier halved: replace-one as two contributions, for accountants
    that know sensitivity 1 only.
    """
    return rule_of(event).halve_noise(event)


def grouped(event: Event, size: int) -> Event:
    """The event as a group of `size` members sees it: what a user pays who owns that many examples.

    Guarantees: exact for Gaussian releases (a group moves the sum `size` times as far; under
    Poisson sampling, by the number of its members that were drawn) under add-or-remove-one and
    zero-out of the whole group.
    """
    return event if check.integer("size", size) == 1 else rule_of(event).group(event, size)


def halve_noise_inside(event: Any) -> Event:
    """An event around another one, which is halved."""
    changed: Event = replace(event, event=halve_noise(event.event))
    return changed


def group_size_of(adjacency: Adjacency) -> int:
    """How many contribution bounds a change of one unit can move a sum by."""
    return 2 if Adjacency.parse(adjacency) is Adjacency.REPLACE_ONE else 1


def require_sampling(event: Event) -> Event:
    """`event`, if what is known of removing a unit is enough to know what Poisson sampling does;
    else `Unsupported`.
    """
    if not rule_of(event).can_be_sampled:
        raise Unsupported(
            f"Poisson sampling of {type(event).__name__}",
            "sample a release in which a unit can be absent",
        )
    for part in inside(event):
        require_sampling(part)
    return event


def refuse_replaced(event: Event) -> None:
    """Poisson sampling of `event` has no proven pair under replace-one."""
    raise Unsupported(
        f"Poisson sampling of {type(event).__name__} under replace-one",
        "use --adjacency add-or-remove-one or zero-out",
    )
