"""Our events and dp-accounting's, translated both ways. dp-accounting is imported only when one of
these functions is called.
"""

from __future__ import annotations

from typing import Any

from dpfy.accounting.rows import TABLE, row_of
from dpfy.core.errors import Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency


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
    peer = row_of(event).peer
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
