"""Mistakes of a server of clients: what it divides by, how it clips, and what it lets a client
send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.rounds import FEW, ONE
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

COHORT = "dpfy.federated.cohort.Cohort"
BOUNDED = f"{COHORT}.bounded"
Sums = dict[str, Any]


def summing(change: Callable[[Any, Any, Sums], Sums]) -> Callable[..., Any]:
    """A cohort whose sum is another: a function of the cohort, the clip rule and the right sums."""

    def bounded(real: Any, self: Any, clip: Any, unit: Any) -> Any:
        total, tally = real(self, clip, unit)
        return replace(total, value=change(self, clip, total.value)), tally

    return bounded


@summing
def over_answers(cohort: Any, clip: Any, total: Sums) -> Sums:
    """The mean over the clients that answered."""
    answered = max(1, len(cohort._rows))
    return {name: value * (len(cohort.clients) / answered) for name, value in total.items()}


@summing
def each_layer(cohort: Any, clip: Any, total: Sums) -> Sums:
    """Every tensor of an update is clipped to the whole clipping norm."""
    made = {name: value * 0 for name, value in total.items()}
    for rows in cohort._rows.values():
        for name, row in zip(made, rows, strict=True):
            if row.isfinite().all():
                made[name] = made[name] + row / max(1.0, float(row.norm()) / clip.bound.l2)
    return made


@summing
def sum_clipped(cohort: Any, clip: Any, total: Sums) -> Sums:
    """The sum of all updates is clipped to what so many clients may add."""
    made = {name: value * 0 for name, value in total.items()}
    for rows in cohort._rows.values():
        if all(row.isfinite().all() for row in rows):
            pairs = zip(made.items(), rows, strict=True)
            made = {name: value + row for (name, value), row in pairs}
    length = sum(float(value.square().sum()) for value in made.values()) ** 0.5
    most = clip.bound.l2 * len(cohort.clients)
    return {name: value / max(1.0, length / most) for name, value in made.items()}


@summing
def poisoned(cohort: Any, clip: Any, total: Sums) -> Sums:
    """What is not finite is added like everything else."""
    for rows in cohort._rows.values():
        if not all(row.isfinite().all() for row in rows):
            pairs = zip(total.items(), rows, strict=True)
            total = {name: value + row for (name, value), row in pairs}
    return total


for name, words, check, function in (
    ("realised-weight", "updates are averaged over the clients that answered", FEW, over_answers),
    (
        "clip-each-layer",
        "each tensor of an update is clipped by itself, without a bound on all",
        ONE,
        each_layer,
    ),
    ("clip-the-sum", "updates are added first and clipped afterwards", ONE, sum_clipped),
    ("poison-in-the-sum", "an update that is not finite is added", ONE, poisoned),
):
    mistake(name, words, check, BOUNDED)(function)


@mistake("client-twice", "a second update of a client counts as another client's", ONE)
def _(patch: Patch) -> None:
    def admitted(real: Any, self: Any, client: Any) -> int:
        return int(client) if int(client) not in self._rows else 1000 + int(client)

    def bounded(real: Any, self: Any, clip: Any, unit: Any) -> Any:
        self.clients = np.array(sorted(self._rows))
        return real(self, clip, unit)

    patch.around(f"{COHORT}._admitted", admitted)
    patch.around(BOUNDED, bounded)
