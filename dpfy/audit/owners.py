"""Users, from outside: what one user with many records adds, drawn whole or record by record, and
what happens to all others meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpfy.audit.bench import Bench, Bug

MOST = 4
"""Records of one user that may be used."""
UNEQUAL = (1, 2, 40, MOST, 3, MOST + 1)
NEARLY_EQUAL = (MOST, MOST, MOST + 1, MOST, MOST, MOST)
"""How many records each user has. The third has more than may be used: far more, or one."""
LARGE = 2


def drawn_whole(bench: Bench, bug: Bug) -> str | None:
    """Without noise, all users in one step: leaving one out, with all of their records, changes the
    sum by at most one clip norm.
    """
    return _left_out(bench, bug, UNEQUAL, False, 1.0)


def drawn_singly(bench: Bench, bug: Bug) -> str | None:
    """Records drawn one by one: leaving a user out changes the sum by as many clip norms as records
    of one may be used.
    """
    return _left_out(bench, bug, NEARLY_EQUAL, True, float(MOST))


def _left_out(
    bench: Bench, bug: Bug, counts: tuple[int, ...], single: bool, most: float
) -> str | None:
    owners = np.repeat(np.arange(len(counts)), counts)
    whole, without = (
        bench.of_users(part, MOST, bug, single=single) for part in (owners, owners[owners != LARGE])
    )
    change = float(np.linalg.norm(whole - without))
    if change <= most + 1e-3:
        return None
    return (
        f"leaving out a user of {counts[LARGE]} records changes the sum by {change:.3f} clip "
        f"norms, not {most:g}"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "users drawn whole": drawn_whole,
    "records of users": drawn_singly,
}
