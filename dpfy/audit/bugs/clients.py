"""Mistakes of a server of clients: what it divides by, how it clips, and what it lets a client
send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

ONE, FEW = "one client", "few answers"


def summing(change: Callable[[Any, Any, Any], dict[str, Any]]) -> Callable[[Any], Any]:
    """A cohort whose sum is another: a function of the cohort, the clip rule and the right sums."""

    def cohort(real: Any) -> Any:
        class Changed(real):  # type: ignore[misc]
            def bounded(self, clip: Any, unit: Any) -> Any:
                total, tally = super().bounded(clip, unit)
                return replace(total, value=change(self, clip, total.value)), tally

        return Changed

    return cohort


def realised(cohort: Any, clip: Any, total: dict[str, Any]) -> dict[str, Any]:
    """The mean over the clients that answered."""
    answered = max(1, len(cohort._rows))
    return {name: value * (len(cohort.clients) / answered) for name, value in total.items()}


def each_layer(cohort: Any, clip: Any, total: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of an update is clipped to the whole clip norm."""
    made = {name: value * 0 for name, value in total.items()}
    for rows in cohort._rows.values():
        for name, row in zip(made, rows, strict=True):
            if row.isfinite().all():
                made[name] = made[name] + row / max(1.0, float(row.norm()) / clip.bound.l2)
    return made


def together(cohort: Any, clip: Any, total: dict[str, Any]) -> dict[str, Any]:
    """Updates are added up first, and the sum is clipped to what so many clients may add."""
    made = {name: value * 0 for name, value in total.items()}
    for rows in cohort._rows.values():
        if all(row.isfinite().all() for row in rows):
            made = {
                name: value + row for (name, value), row in zip(made.items(), rows, strict=True)
            }
    length = sum(float(value.square().sum()) for value in made.values()) ** 0.5
    most = clip.bound.l2 * len(cohort.clients)
    return {name: value / max(1.0, length / most) for name, value in made.items()}


def poisoned(cohort: Any, clip: Any, total: dict[str, Any]) -> dict[str, Any]:
    """What is not finite is added like everything else."""
    bad = [rows for rows in cohort._rows.values() if not all(row.isfinite().all() for row in rows)]
    for rows in bad:
        total = {name: value + row for (name, value), row in zip(total.items(), rows, strict=True)}
    return total


def again(real: Any) -> Any:
    """A client that sends twice is another client the second time."""

    class Changed(real):  # type: ignore[misc]
        def _admitted(self, client: Any) -> int:
            return int(client) if int(client) not in self._rows else 1000 + int(client)

        def bounded(self, clip: Any, unit: Any) -> Any:
            self.__dict__["clients"] = np.array(sorted(self._rows))
            return super().bounded(clip, unit)

    return Changed


BUGS = (
    Bug(
        "realised-weight",
        "updates are averaged over the clients that answered",
        FEW,
        cohort=summing(realised),
    ),
    Bug(
        "clip-each-layer",
        "each tensor of an update is clipped by itself, without a bound on all",
        ONE,
        cohort=summing(each_layer),
    ),
    Bug(
        "clip-the-sum",
        "updates are added first and clipped afterwards",
        ONE,
        cohort=summing(together),
    ),
    Bug(
        "poison-in-the-sum", "an update that is not finite is added", ONE, cohort=summing(poisoned)
    ),
    Bug(
        "client-twice", "a second update of a client counts as another client's", ONE, cohort=again
    ),
)
