"""The accountants by name: a fixed table, each imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable

from dpfy.accounting.stopping import Adaptive
from dpfy.core import check
from dpfy.core.guarantee import Accountant

DEFAULT = "tight"


def _tight() -> Accountant:
    from dpfy.accounting.tight.accountant import Tight

    return Tight()


def _rdp() -> Accountant:
    from dpfy.accounting.rdp import Rdp

    return Rdp()


def _pld() -> Accountant:
    from dpfy.accounting.dp_accounting_adapter import PeerPld

    return PeerPld()


def _zcdp() -> Accountant:
    from dpfy.accounting.rdp import ZcdpAccountant

    return ZcdpAccountant()


def _gdp() -> Accountant:
    from dpfy.accounting.gdp import Gdp

    return Gdp()


def _advanced() -> Accountant:
    from dpfy.accounting.composition import Advanced

    return Advanced()


def _basic() -> Accountant:
    from dpfy.accounting.composition import Basic

    return Basic()


def _monte_carlo() -> Accountant:
    from dpfy.accounting.bins import MonteCarlo

    return MonteCarlo()


TABLE: dict[str, Callable[[], Accountant]] = {
    "tight": _tight,
    "rdp": _rdp,
    "pld": _pld,
    "zcdp": _zcdp,
    "gdp": _gdp,
    "advanced": _advanced,
    "basic": _basic,
    "monte-carlo": _monte_carlo,
}


def accountant(name: str = DEFAULT) -> Accountant:
    """The accountant called `name`; an unknown name is an error that lists the known ones.

    Args:
        name: tight, rdp, pld, zcdp, gdp, advanced, basic or monte-carlo.

    Returns:
        The accountant: it has `curve` and `why_not`.

    Raises:
        InvalidInput: No accountant has this name.

    Example:
        >>> from dpfy import accounting
        >>> accounting.accountant("rdp").name
        'rdp'
    """
    return Adaptive(TABLE[check.one_of("accountant", name, TABLE)]())
