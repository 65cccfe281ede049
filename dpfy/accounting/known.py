"""What is known of one release, in three languages: an exact pair, Rényi divergences, a privacy profile. None where nothing is.

For an accountant that composes a mixture: what has a pair goes by its pair; the rest is composed in its own language first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpfy.accounting.moments import Array
from dpfy.accounting.rows import Release, row_of
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency

Moments = Callable[[Sequence[float]], tuple[Array, float]]
"""Orders to upper bounds on Rényi divergences of what is finite, the worse of both directions, and the chance of an infinite loss."""
Profile = Callable[[float], float]
"""Epsilon (at least 0) to an upper bound on delta, the worse of both directions. The exact curve is convex in e^epsilon, so that the
largest convex function below these bounds is an upper bound too."""


def pair(leaf: Event, adjacency: Adjacency) -> Release | None:
    """The exact dominating pair of one release that is not trivial (`Row.plain`), or None."""
    try:
        return row_of(leaf).pair(leaf, adjacency)
    except Unsupported:
        return None


def moments(event: Event, adjacency: Adjacency) -> Moments | None:
    """Rényi divergences of `event`, which may be a whole composition, or None."""
    from dpfy.accounting.rdp import approximate

    try:
        approximate(event, adjacency, (2.0,))
    except Unsupported:
        return None
    return lambda orders: approximate(event, adjacency, orders)


def profile(leaf: Event, adjacency: Adjacency) -> Profile | None:
    """The privacy profile of one release: its own, or what its Rényi divergences imply; None where neither is known."""
    from dpfy.accounting.rdp import Rdp

    own = row_of(leaf).profile
    try:
        return own(leaf, adjacency) if own is not None else Rdp().curve(leaf, adjacency).delta
    except Unsupported:
        return None
