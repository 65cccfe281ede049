"""From events to guarantees: accountants, privacy curves, calibration, filters. Imports no torch and, until asked, no SciPy."""

from __future__ import annotations

from dpfy.accounting import calibrate
from dpfy.accounting.filters import RenyiFilter, RenyiOdometer
from dpfy.accounting.table import DEFAULT, TABLE, accountant
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve, Guarantee
from dpfy.core.unit import EXAMPLE, Adjacency, Unit

__all__ = ["DEFAULT", "TABLE", "RenyiFilter", "RenyiOdometer", "accountant", "calibrate", "curve", "epsilon", "guarantee"]

PURE = ("basic", "advanced")
"""Accountants that can state a guarantee at delta 0."""

_accountant = accountant


def curve(event: Event, *, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE, accountant: str = DEFAULT) -> Curve:
    """The privacy curve of `event`.

    Guarantees: ``epsilon`` and ``delta`` of the curve are upper bounds under `adjacency`; an event that the accountant has no
    bound for raises `Unsupported` and names a route that has one.
    """
    return _accountant(accountant).curve(event, adjacency)


def epsilon(
    event: Event, delta: float, *, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE, accountant: str = DEFAULT
) -> float:
    """An upper bound on the epsilon of `event` at `delta`; at delta 0 the pure guarantee, by ``accountant="basic"``."""
    if check.below_one("delta", delta) == 0 and accountant not in PURE:
        raise InvalidInput("delta", delta, f"must lie strictly between 0 and 1; a pure guarantee takes --accountant {PURE[0]}")
    return curve(event, adjacency=adjacency, accountant=accountant).epsilon(delta)


def guarantee(
    event: Event,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    unit: Unit = EXAMPLE,
    accountant: str = DEFAULT,
    caveats: tuple[str, ...] = (),
) -> Guarantee:
    """The curve of `event` together with unit, adjacency, accountant and caveats."""
    return Guarantee(curve(event, adjacency=adjacency, accountant=accountant), accountant, adjacency, unit, caveats=caveats)
