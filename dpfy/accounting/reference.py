"""dp-accounting's accountants behind our protocol: the field's reference, kept for comparison and cross-checks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpfy.accounting import peer
from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event, RandomizedResponse, flatten
from dpfy.core.guarantee import Curve
from dpfy.core.unit import Adjacency

PLD_LEAST_DELTA = 1e-9
"""Below this, round-off of the plain FFT power in dp-accounting 0.6.0 makes its PLD report too small an epsilon."""


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of dp-accounting while it composes.

    Its RDP leaves out an order whose series does not converge, which only loosens the bound, and says so for every such order. The
    level of its logger is what it was once the block is left. Conversions to epsilon and delta stay outside: what they warn of matters.
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
        """Upper bound on epsilon at `delta`; a delta the library cannot certify raises `Unsupported`."""
        if check.inside_unit("delta", delta) < self._least:
            raise Unsupported(f"delta {delta:g} with this accountant (least {self._least:g})", "use --accountant tight")
        return float(self._accountant.get_epsilon(delta))

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        value = float(self._accountant.get_delta(check.nonnegative("epsilon", epsilon)))
        return min(1.0, max(value, self._least))

    def epsilon_lower(self, delta: float) -> float | None:
        """The library has no lower bound."""
        return None


class _Peer:
    """One accountant of dp-accounting, rebuilt for every curve so that nothing is kept between calls."""

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
        if reason := self._refused(event, adjacency):
            return reason
        try:
            problem = self._new(adjacency)._maybe_compose(peer.to_peer(self._event(event, adjacency)), 1, False)
        except Unsupported as error:
            return str(error)
        if problem is None:
            return None
        found = type(peer.from_peer(problem.invalid_event)).__name__ if problem.invalid_event is not None else "the event"
        return f"the {self.name} accountant has no bound for {found} under {adjacency.value}; use --accountant tight or rdp"

    def curve(self, event: Any, adjacency: Adjacency) -> Curve:
        """The curve of `event`. Guarantees: as dp-accounting's; what `why_not` names raises `Unsupported`."""
        if reason := self.why_not(event, adjacency):
            what, _, way_out = reason.partition("; ")
            raise Unsupported(what.removesuffix(" is not supported"), way_out)
        accountant = self._new(adjacency)
        with _quiet():
            accountant.compose(peer.to_peer(self._event(event, adjacency)))
        return _PeerCurve(accountant, self.least_delta)


class PeerRdp(_Peer):
    """dp-accounting's RDP accountant at its default orders (replace-one: two contributions, so half the noise)."""

    name = "rdp"

    def _new(self, adjacency: Adjacency) -> Any:
        from dp_accounting import rdp

        return rdp.RdpAccountant(neighboring_relation=peer.relation(adjacency))

    def _event(self, event: Event, adjacency: Adjacency) -> Event:
        return peer.halve_noise(event) if adjacency is Adjacency.REPLACE_ONE else event


class PeerPld(_Peer):
    """dp-accounting's PLD accountant at its default grid of 1e-4."""

    name = "pld"
    least_delta = PLD_LEAST_DELTA

    def _new(self, adjacency: Adjacency) -> Any:
        from dp_accounting import pld

        return pld.PLDAccountant(neighboring_relation=peer.relation(adjacency))

    def _refused(self, event: Event, adjacency: Adjacency) -> str | None:
        for leaf, count in flatten(event):
            if isinstance(leaf, RandomizedResponse) and count > 1:
                return "repeated RandomizedResponse by dp-accounting's PLD (it ignores the count) is not supported; use --accountant tight"
        return None
