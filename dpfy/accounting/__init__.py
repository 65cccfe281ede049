"""From events to guarantees: accountants, privacy curves, calibration, filters. Imports no torch
and, until asked, no SciPy.
"""

from __future__ import annotations

from math import isinf

from dpfy.accounting import calibrate
from dpfy.accounting.filters import GaussianFilter, RenyiFilter, RenyiOdometer
from dpfy.accounting.table import DEFAULT, TABLE, accountant
from dpfy.core import check
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.events import Event
from dpfy.core.guarantee import Curve, Guarantee
from dpfy.core.unit import EXAMPLE, Adjacency, Unit

__all__ = [
    "DEFAULT",
    "TABLE",
    "GaussianFilter",
    "RenyiFilter",
    "RenyiOdometer",
    "accountant",
    "calibrate",
    "curve",
    "epsilon",
    "guarantee",
    "why_not",
]

PURE = ("basic", "advanced")
"""Accountants that can state a guarantee at delta 0."""

FAR = 1e6
"""An epsilon so large that only what has no protection at all has a delta of 1 there."""

_accountant = accountant


def curve(
    event: Event, *, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE, accountant: str = DEFAULT
) -> Curve:
    """The privacy curve of `event`.

    Guarantees: ``epsilon`` and ``delta`` of the curve are upper bounds under `adjacency`; an event
    that the accountant has no bound for raises `Unsupported` and names a route that has one.

    Args:
        event: What is released; see :mod:`dpfy.core.events`.
        adjacency: Which change of the data set is hidden.
        accountant: The name of an accountant: tight, rdp, pld, zcdp, gdp, advanced, basic.

    Returns:
        Epsilon for each delta, and delta for each epsilon.

    Raises:
        Unsupported: The accountant has no bound for this event.

    Example:
        >>> from dpfy import accounting
        >>> from dpfy.core import events
        >>> found = accounting.curve(events.poisson(1.0, 0.01, steps=100))
        >>> round(found.epsilon(1e-5), 2)
        0.72
        >>> found.delta(2.0) < 1e-9
        True
    """
    return _accountant(accountant).curve(event, adjacency)


def epsilon(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    accountant: str = DEFAULT,
) -> float:
    """An upper bound on the epsilon of `event` at `delta`; at delta 0 the pure guarantee, by
    ``accountant="basic"``.

    Args:
        event: What is released.
        delta: The delta of (epsilon, delta).
        adjacency: Which change of the data set is hidden.
        accountant: The name of an accountant.

    Returns:
        An upper bound.

    Raises:
        InvalidInput: Delta is not in [0, 1), or is 0 with an accountant that has no pure guarantee.
        Unsupported: The accountant has no bound for this event.

    Example:
        >>> from dpfy import accounting
        >>> from dpfy.core import events
        >>> round(accounting.epsilon(events.Gaussian(2.0), 1e-6), 2)
        2.25
        >>> accounting.epsilon(events.Laplace(2.0), 0.0, accountant="basic")
        0.5
    """
    if check.below_one("delta", delta) == 0 and accountant not in PURE:
        raise InvalidInput(
            "delta",
            delta,
            f"must lie strictly between 0 and 1; a pure guarantee takes --accountant {PURE[0]}",
        )
    return curve(event, adjacency=adjacency, accountant=accountant).epsilon(delta)


def why_not(
    event: Event,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    accountant: str = DEFAULT,
) -> str | None:
    """None if the guarantee of `event`, a whole charge, can be given at `delta`; else one line that
    says why not.

    For anyone who is about to make the releases: it makes the computation that the report will make,
    both bounds included, so that what is reserved has a guarantee when it ends. What nobody could
    compute anyway (an unknown mixture, a wrong adjacency) is refused at once.

    Guarantees: after None, `curve` of the same event and accountant answers at `delta`, with a
    finite epsilon unless a release has no protection at all.

    Args:
        event: The whole that would be charged.
        delta: The delta of the guarantee.
        adjacency: Which change of the data set is hidden.
        accountant: The name of an accountant.

    Returns:
        None, or the reason.

    Raises:
        Unsupported: The adjacency, or a mixture inside of the event, is known to no accountant.

    Example:
        >>> from dpfy import accounting
        >>> from dpfy.core import events
        >>> accounting.why_not(events.Gaussian(2.0), 1e-6) is None
        True
        >>> "delta" in accounting.why_not(events.Gaussian(2.0), 0.0)
        True
    """
    try:
        found = curve(event, adjacency=adjacency, accountant=accountant)
        upper = (
            epsilon(event, delta, adjacency=adjacency, accountant=accountant)
            if delta == 0
            else found.epsilon(delta)
        )
        if delta > 0:
            found.epsilon_lower(delta)
    except DpfyError as error:
        return str(error)
    if isinf(upper) and found.delta(FAR) < 1:
        return (
            f"epsilon is infinite at delta {delta:g}: something released fails with a chance as "
            f"large; state a larger delta"
        )
    return None


def guarantee(
    event: Event,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
    unit: Unit = EXAMPLE,
    accountant: str = DEFAULT,
    caveats: tuple[str, ...] = (),
) -> Guarantee:
    """The curve of `event` together with unit, adjacency, accountant and caveats.

    Args:
        event: What is released.
        adjacency: Which change of the data set is hidden.
        unit: Whose data is protected.
        accountant: The name of an accountant.
        caveats: Sentences that the guarantee carries.

    Returns:
        The guarantee, which states itself in a sentence.

    Raises:
        Unsupported: The accountant has no bound for this event.

    Example:
        >>> from dpfy import accounting
        >>> from dpfy.core import events
        >>> found = accounting.guarantee(events.Gaussian(2.0))
        >>> found.sentence(1e-6).startswith("Training satisfies (2.255, 1e-06)")
        True
    """
    adjacency = Adjacency.parse(adjacency)
    return Guarantee(
        curve(event, adjacency=adjacency, accountant=accountant),
        accountant,
        adjacency,
        unit,
        caveats=caveats,
    )
