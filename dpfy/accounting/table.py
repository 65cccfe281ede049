"""The accountants by name: a fixed table, each imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable

from dpfy.core import check
from dpfy.core.guarantee import Accountant

DEFAULT = "pld"


def _rdp() -> Accountant:
    from dpfy.accounting.reference import PeerRdp

    return PeerRdp()


def _pld() -> Accountant:
    from dpfy.accounting.reference import PeerPld

    return PeerPld()


def _monte_carlo() -> Accountant:
    from dpfy.accounting.bins import MonteCarlo

    return MonteCarlo()


def _tight() -> Accountant:
    from dpfy.accounting.tight import Tight

    return Tight()


TABLE: dict[str, Callable[[], Accountant]] = {"tight": _tight, "rdp": _rdp, "pld": _pld, "monte-carlo": _monte_carlo}


def accountant(name: str = DEFAULT) -> Accountant:
    """The accountant called `name`; an unknown name is an error that lists the known ones."""
    return TABLE[check.one_of("accountant", name, TABLE)]()
