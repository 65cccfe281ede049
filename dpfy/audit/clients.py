"""Rounds of clients, from outside: what one client can do to a round, whatever it sends, and who
else comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dpfy.audit.bench import Bench, Bug

    Sent = dict[int, list[NDArray[np.float64]]]

CLIENTS, SIZE, BAD = 6, 12, 2
"""Clients that are expected, numbers in an update (in two tensors), and the client that tries."""


def others() -> Sent:
    """What everybody but the client that tries sends, in clip norms: short updates, and one that is
    long.
    """
    rng = np.random.default_rng(5)
    return {
        c: [rng.normal(size=SIZE) * (9.0 if c == 4 else 0.1)] for c in range(CLIENTS) if c != BAD
    }


def tries() -> dict[str, list[NDArray[np.float64]]]:
    """What the client that tries may send: long updates, two of them, what is no number,
    nothing.
    """
    long = np.full(SIZE, 50.0)
    bad = np.where(np.arange(SIZE) == 3, np.nan, long)
    return {
        "a long update": [long],
        "two updates": [long, long],
        "not a number": [bad],
        "infinity": [long * np.inf],
        "nothing": [],
    }


def one_client(bench: Bench, bug: Bug) -> str | None:
    """Without noise: whatever one client sends moves the sum of a round by at most one clip norm,
    against its not being there.
    """
    without = bench.of_round(others(), bug)
    for what, sent in tries().items():
        change = float(np.linalg.norm(bench.of_round({**others(), BAD: sent}, bug) - without))
        if not change <= 1.0 + 1e-3:
            return f"a client that sends {what} moves the round by {change:.3f} clip norms, not 1"
    return None


def few_answers(bench: Bench, bug: Bug) -> str | None:
    """One client answers, of all that are expected: the round is its update over the expected
    number, no more.
    """
    long = float(np.linalg.norm(bench.of_round({BAD: [np.full(SIZE, 50.0)]}, bug)))
    if abs(long - 1.0) <= 1e-3:
        return None
    return (
        f"the only answer of a round counts as {long:.3f} clip norms over the expected cohort, not "
        f"1"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "one client": one_client,
    "few answers": few_answers,
}
