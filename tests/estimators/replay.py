"""Two fits on neighbours with everything else alike: what each would have released, had the first
one's outputs been seen.

The second fit is given the outputs of the first one, so that both stand at the same place of an
adaptive sequence; what differs then is what one record, or one person, adds, and must be within the bound of the
round.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

from dpfy.estimators import fitting


def totals(
    estimator: Any, X: Any, y: Any, users: Any = None, *, seen: list[Any] | None = None
) -> list[tuple[str, float, Any, Any]]:
    """Round, bound, what went in and what came out of every release of a fit. `seen` are outputs to
    be given in place of fresh ones.
    """
    found: list[tuple[str, float, Any, Any]] = []
    release, choose = fitting.FitSession.release, fitting.FitSession.choose_each

    def released(self: Any, name: str, total: Any, bits: int = 0) -> Any:
        out = release(self, name, total, bits)
        out = out if seen is None else seen[len(found)]
        found.append((name, self.round(name).bound, np.array(total, np.float64), out))
        return out

    def chosen(self: Any, name: str, scores: Any, bits: int = 0, monotone: bool = False) -> Any:
        out = choose(self, name, scores, bits, monotone)
        out = out if seen is None else seen[len(found)]
        found.append((name, self.round(name).bound, np.array(scores, np.float64), out))
        return out

    with (
        mock.patch.object(fitting.FitSession, "release", released),
        mock.patch.object(fitting.FitSession, "choose_each", chosen),
    ):
        estimator.fit(X, y, users=users)
    return found


def distances(
    estimator: Any, one: tuple[Any, ...], other: tuple[Any, ...]
) -> list[tuple[str, float]]:
    """For each release the distance between neighbours, over the bound: at most 1 where a record (or
    a person) is added or removed.
    """
    first = totals(estimator, *one)
    second = totals(estimator, *other, seen=[out for *_, out in first])
    assert [name for name, *_ in first] == [name for name, *_ in second], (
        "neighbours are not asked the same"
    )
    choices = [isinstance(out, list) for *_, out in first]
    return [
        (name, float(np.abs(a - b).max() if choice else np.linalg.norm(a - b)) / bound)
        for (name, bound, a, _), (_, _, b, _), choice in zip(first, second, choices, strict=True)
    ]
