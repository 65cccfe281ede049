"""The guarantee: a privacy curve together with everything without which an epsilon means
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dpfy.core import check, tradeoff
from dpfy.core.unit import EXAMPLE, Adjacency, Unit


class Curve(Protocol):
    """The privacy curve of an event under one adjacency, by one accountant: upper bounds unless the
    name says otherwise.
    """

    def epsilon(self, delta: float) -> float:
        """An upper bound on epsilon at `delta`; infinity where nothing can be certified."""

    def delta(self, epsilon: float) -> float:
        """An upper bound on delta at `epsilon`, at most 1."""

    def epsilon_lower(self, delta: float) -> float | None:
        """A lower bound on the true epsilon at `delta`, or None where the accountant has none."""


class Accountant(Protocol):
    """Turns events into curves. Stateless: the same event always has the same curve."""

    name: str

    def why_not(self, event: object, adjacency: Adjacency) -> str | None:
        """None if `curve` would answer, else one line that says why not and which route would."""

    def curve(self, event: object, adjacency: Adjacency) -> Curve:
        """The curve of `event`.

        Guarantees: every bound errs to the private side; an event outside `why_not` raises
        `Unsupported`.
        """


@dataclass(frozen=True)
class Guarantee:
    """What was promised, to whom, against which neighbour, computed how.

    Guarantees: `epsilon` is an upper bound for the stated unit and adjacency under the stated trust
    model, provided the caveats.
    """

    curve: Curve
    accountant: str
    adjacency: Adjacency
    unit: Unit = EXAMPLE
    trust: str = "central"
    caveats: tuple[str, ...] = field(default=())

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at `delta`."""
        return self.curve.epsilon(check.below_one("delta", delta))

    @property
    def note(self) -> str:
        """What the epsilon is if it is not that of (epsilon, delta)-differential privacy; empty
        where it is.
        """
        return str(getattr(self.curve, "note", ""))

    def epsilon_lower(self, delta: float) -> float | None:
        """Lower bound on the exact epsilon of the same event, where the accountant has one."""
        return self.curve.epsilon_lower(check.below_one("delta", delta))

    def delta(self, epsilon: float) -> float:
        """Upper bound on delta at `epsilon`."""
        return self.curve.delta(check.nonnegative("epsilon", epsilon))

    def tradeoff(
        self, false_positive_rates: Sequence[float], epsilons: Sequence[float] = tradeoff.GRID
    ) -> list[float]:
        """The smallest false-negative rate any attacker can reach at each false-positive rate, from
        the (epsilon, delta) curve.
        """
        curve = tradeoff.of_curve(self.curve.delta, epsilons)
        return [curve.miss_rate(f) for f in false_positive_rates]

    def sentence(
        self,
        delta: float,
        what: str = "Training",
        covering: str = "every training step",
        who: str = "trainer",
        instead: str = "",
    ) -> str:
        """The guarantee in one honest sentence; `instead` says what is promised where it is
        none.
        """
        epsilon = self.epsilon(delta)
        if epsilon == float("inf"):
            thing = "This model" if what.startswith("Training") else what
            why = instead or f"no noise protects the {'training ' if who == 'trainer' else ''}data"
            return f"{thing} has NO differential privacy guarantee: {why}."
        caveats = f" Provided that: {'; '.join(self.caveats)}." if self.caveats else ""
        note = f" {self.note}" if self.note else ""
        stated = (
            f"({_up(epsilon)}, {delta:g})-differential privacy"
            if delta
            else f"pure {_up(epsilon)}-differential privacy"
        )
        part = "" if self.unit.whole else f" ({self.unit.protects}s only)"
        return (
            f"{what} satisfies {stated} for one {self.unit.name}{part}, where "
            f"{self.adjacency.meaning} ({self.adjacency.value}), "
            f"{TRUSTED[self.trust].format(who)}; "
            f"computed by the {self.accountant} accountant from the ledger and covering "
            f"{covering}.{note}{caveats}"
        )


TRUSTED = {
    "central": "with a trusted central {}",
    "local": "with nobody trusted but the owner of the data",
    "distributed": "with no single party trusted",
    "shuffled": "with nobody trusted but the owner of the data and a shuffler",
}


def _up(value: float, digits: int = 3) -> str:
    """Decimal text never below the value."""
    from decimal import ROUND_CEILING, Decimal

    return str(
        Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    )
