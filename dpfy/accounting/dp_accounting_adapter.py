"""dp-accounting's accountants behind our protocol: the field's reference, kept for comparison and
cross-checks.

Our events and dp-accounting's, translated both ways. dp-accounting is imported only when one of
these functions is called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpfy.accounting.flatten import leaves
from dpfy.accounting.rdp import approximate, to_epsilon
from dpfy.accounting.rules import TABLE, halve_noise, rule_of
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event, RandomizedResponse
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

PLD_LEAST_DELTA = 1e-9
"""Below this, round-off of the plain FFT power in dp-accounting 0.6.0 makes its PLD report too
small an epsilon.
"""

PLD_LEAST_RATE = 1e-12
PLD_MOST_EACH, PLD_MOST_EPSILON = 60.0, 200.0
"""Of one release and of all: its grid of 1e-4 takes seconds to fill beyond."""
PLD_MOST_STEPS = 10**6
"""dp-accounting 0.6.0 computes the size of a loss distribution to the power of the steps, as a
whole number with all its digits.
"""
_FEW_ORDERS = (1.2, 1.5, 2.0, 3.0, 5.0, 9.0, 20.0, 60.0)
NUMERIC = (ArithmeticError, ValueError, MemoryError)
"""What dp-accounting raises on numbers it cannot handle."""


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of dp-accounting while it composes.

    Its RDP leaves out an order whose series does not converge, which only loosens the bound, and
    says so for every such order. The level of its logger is what it was once the block is left.
    Conversions to epsilon and delta stay outside: what they warn of matters.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _PeerCurve:
    """A curve read off a composed dp-accounting accountant."""

    def __init__(self, accountant: Any, least_delta: float) -> None:
        self._accountant, self._least = accountant, least_delta

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`; a delta the library cannot certify raises
        `Unsupported`.
        """
        if check.inside_unit("delta", delta) < self._least:
            raise Unsupported(
                f"delta {delta:g} with this accountant (least {self._least:g})",
                "use --accountant tight",
            )
        return float(self._accountant.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        value = float(self._accountant.get_delta(check.nonnegative("epsilon", epsilon)))
        return min(1.0, max(value, self._least))

    def epsilon_lower(self, delta: float) -> float | None:
        """The library has no lower bound."""
        return None


class _Peer:
    """One accountant of dp-accounting, rebuilt for every curve so that nothing is kept between
    calls.
    """

    name: str
    least_delta = 0.0

    def _new(self, adjacency: Adjacency) -> Any:
        raise NotImplementedError

    def _event(self, event: Event, adjacency: Adjacency) -> Event:
        return event

    def _refused(self, event: Event, adjacency: Adjacency) -> str | None:
        return None

    def why_not(self, event: Any, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else why not and which route would."""
        leaves(event)
        if reason := self._refused(event, adjacency):
            return reason
        try:
            problem = self._new(adjacency)._maybe_compose(
                to_peer(self._event(event, adjacency)), 1, False
            )
        except Unsupported as error:
            return str(error)
        except NUMERIC as error:
            return (
                f"this event by the {self.name} accountant of dp-accounting ({error}) is not "
                f"supported; use --accountant tight"
            )
        if problem is None:
            return None
        found = (
            type(from_peer(problem.invalid_event)).__name__
            if problem.invalid_event is not None
            else "the event"
        )
        return (
            f"the {self.name} accountant has no bound for {found} under {adjacency.value}; use "
            f"--accountant tight or rdp"
        )

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`. Guarantees: as dp-accounting's; what `why_not` names raises
        `Unsupported`.
        """
        if reason := self.why_not(event, adjacency):
            what, _, way_out = reason.partition("; ")
            raise Unsupported(what.removesuffix(" is not supported"), way_out)
        accountant = self._new(adjacency)
        try:
            with _quiet():
                accountant.compose(to_peer(self._event(event, adjacency)))
        except NUMERIC as error:
            raise Unsupported(
                f"this event by dp-accounting ({error})", "use --accountant tight"
            ) from None
        return _PeerCurve(accountant, self.least_delta)


class PeerRdp(_Peer):
    """dp-accounting's RDP accountant at its default orders (replace-one: two contributions, so half
    the noise).
    """

    name = "rdp"

    def _new(self, adjacency: Adjacency) -> Any:
        from dp_accounting import rdp

        return rdp.RdpAccountant(neighboring_relation=relation(adjacency))

    def _event(self, event: Event, adjacency: Adjacency) -> Event:
        return halve_noise(event) if adjacency is Adjacency.REPLACE_ONE else event


class PeerPld(_Peer):
    """dp-accounting's PLD accountant at its default grid of 1e-4."""

    name = "pld"
    least_delta = PLD_LEAST_DELTA

    def _new(self, adjacency: Adjacency) -> Any:
        from dp_accounting import pld

        return pld.PLDAccountant(neighboring_relation=relation(adjacency))

    def _refused(self, event: Event, adjacency: Adjacency) -> str | None:
        for leaf, count in leaves(event):
            if isinstance(leaf, RandomizedResponse) and count > 1:
                return (
                    "repeated RandomizedResponse by dp-accounting's PLD (it ignores the count) is "
                    "not supported; use --accountant tight"
                )
            if count > PLD_MOST_STEPS:
                return (
                    f"{count} steps by dp-accounting's PLD (at most {PLD_MOST_STEPS}) is not "
                    f"supported; use --accountant tight"
                )
            if (rate := getattr(leaf, "rate", 1.0)) < PLD_LEAST_RATE:
                return (
                    f"a sampling rate of {rate:g} by dp-accounting's PLD is not supported; use "
                    f"--accountant tight"
                )
            if reason := _too_long(leaf, adjacency, PLD_MOST_EACH):
                return reason
        return _too_long(event, adjacency, PLD_MOST_EPSILON)


def _too_long(event: Event, adjacency: Adjacency, most: float) -> str | None:
    """Why the losses of `event` are too many for a grid of 1e-4, judged by a quick bound on
    epsilon; None where they are not.
    """
    try:
        values, _ = approximate(event, adjacency, _FEW_ORDERS)
    except Unsupported:
        return None
    size = to_epsilon(np.asarray(_FEW_ORDERS), values, 1e-12)
    if size <= most:
        return None
    return (
        f"an epsilon of about {size:.3g} by dp-accounting's PLD (its grid of 1e-4 is too long) is "
        f"not supported; use --accountant tight"
    )


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise Unsupported(
            "the dp-accounting library, which is not installed here,",
            "install dp-accounting or use --accountant tight",
        ) from None
    return dp_accounting


def relation(adjacency: Adjacency) -> Any:
    """dp-accounting's name for `adjacency`."""
    relations = _library().NeighboringRelation
    return {
        Adjacency.ADD_OR_REMOVE_ONE: relations.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: relations.REPLACE_ONE,
        Adjacency.ZERO_OUT: relations.REPLACE_SPECIAL,
    }[adjacency]


def to_peer(event: Event) -> Any:
    """The dp-accounting event of the same meaning.

    Guarantees: field by field the same mechanism; an event that dp-accounting has no word for
    raises `Unsupported`.
    """
    peer = rule_of(event).peer
    if peer is None:
        raise Unsupported(
            f"{type(event).__name__} in dp-accounting", "use --accountant tight or rdp"
        )
    return getattr(_library().dp_event, peer.name)(*peer.arguments(event, to_peer))


def from_peer(event: Any) -> Event:
    """Our event of the same meaning as the dp-accounting event `event`; an unknown one raises
    `Unsupported`.
    """
    for row in TABLE.values():
        if row.peer is not None and type(event) is getattr(_library().dp_event, row.peer.name):
            return row.peer.back(event, from_peer)
    raise Unsupported(
        f"the dp-accounting event {type(event).__name__}",
        "describe it with the events of dpfy.core.events",
    )
