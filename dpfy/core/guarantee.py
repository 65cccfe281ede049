"""What any attacker can reach: the trade-off curve that a privacy curve implies. The one place
where it is computed.

An (epsilon, delta) that holds excludes every attacker with a false-negative rate below

    max(1 - delta - e^epsilon fpr,  e^-epsilon (1 - delta - fpr))

at the false-positive rate fpr (Wasserman & Zhou 2010; Kairouz, Oh & Viswanath 2015); a curve
excludes what any of its points excludes.

The guarantee: a privacy curve together with everything without which an epsilon means
nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from dpfy.core import check
from dpfy.core.errors import DpfyError
from dpfy.core.unit import EXAMPLE, Adjacency, Unit

GRID = (0.0, *(0.02 * 1.25**k for k in range(32)))
"""Epsilons at which a curve is read where the caller has no points of its own: 0 and 0.02 to 20,
beyond which a point excludes attackers with rates below 2e-9 only.
"""

Points = tuple[tuple[float, float], ...]
MOST_EXPONENT = 700.0


@dataclass(frozen=True)
class Tradeoff:
    """The trade-off curve of the (epsilon, delta) pairs in `points`.

    Guarantees: every rate is a bound on all attackers if every pair holds; fewer pairs make the
    attacker look stronger, never weaker. Without any pair nothing is excluded.
    """

    points: Points

    def miss_rate(self, false_positive_rate: float) -> float:
        """The least share of members that any attacker overlooks at this false-positive rate."""
        f = false_positive_rate
        return max(
            [0.0, *(max(1 - d - _grown(e) * f, (1 - d - f) / _grown(e)) for e, d in self.points)]
        )

    def hit_rate(self, false_positive_rate: float) -> float:
        """The largest share of members that any attacker recognises at this false-positive rate."""
        return 1 - self.miss_rate(false_positive_rate)

    def hit_rates(self, false_positive_rates: Iterable[float]) -> list[float]:
        """`hit_rate` at each of these."""
        return [self.hit_rate(f) for f in false_positive_rates]

    @property
    def lines(self) -> tuple[list[float], list[float]]:
        """The same as (heights, slopes): the miss rate at f is the largest height - slope f, for
        those who ask very often.
        """
        left = [(1 - d, _grown(e)) for e, d in self.points]
        return [h for h, _ in left] + [h / g for h, g in left] + [0.0], [g for _, g in left] + [
            1 / g for _, g in left
        ] + [0.0]


def of_curve(delta: Callable[[float], float], epsilons: Sequence[float] = GRID) -> Tradeoff:
    """The trade-off curve of a privacy curve, given as epsilon to delta, read at `epsilons`.

    From the first epsilon at which delta is zero on, no further one can exclude more. Delta never
    grows with epsilon: where it is the same at two epsilons it is not read between them.
    """
    read = lru_cache(maxsize=None)(lambda place: delta(epsilons[place]))
    deltas, ahead = [read(0)], 1
    while len(deltas) < len(epsilons) and deltas[-1] != 0:
        last = min(len(deltas) - 1 + ahead, len(epsilons) - 1)
        if read(last) == deltas[-1]:
            deltas += [deltas[-1]] * (last + 1 - len(deltas))
            ahead *= 2
        else:
            deltas.append(read(len(deltas)))
            ahead = 1
    return Tradeoff(tuple(zip(epsilons, deltas)))


def _grown(epsilon: float) -> float:
    return math.exp(min(epsilon, MOST_EXPONENT))


SHOWN = (1e-5, 1e-6, 1e-8)
"""Deltas at which a guarantee is printed."""


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

    Guarantees: `epsilon` is an upper bound for the given unit and adjacency under the given trust
    model, provided the caveats.
    """

    curve: Curve
    accountant: str
    adjacency: Adjacency
    unit: Unit = EXAMPLE
    trust: str = "central"
    caveats: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        told = [(delta, self.epsilon(delta)) for delta in SHOWN]
        finite = [f"{decimal_up(e)} at delta {d:g}" for d, e in told if math.isfinite(e)]
        with suppress(DpfyError):  # not every accountant has a pure bound
            if (pure := self.epsilon(0.0)) < math.inf:
                finite = [f"{decimal_up(pure)} at delta 0"]
        caveats = f" Provided that: {'; '.join(self.caveats)}." if self.caveats else ""
        cost = f"epsilon {', '.join(finite)}" if finite else "no finite epsilon"
        return (
            f"{cost}, for one {self.unit.name}, where {self.adjacency.meaning} "
            f"({self.adjacency.value}), by the {self.accountant} accountant.{caveats}"
        )

    def _repr_html_(self) -> str:
        shown = [(f"delta {delta:g}", self.epsilon(delta)) for delta in SHOWN]
        costs = [(at, decimal_up(epsilon)) for at, epsilon in shown if math.isfinite(epsilon)]
        return html_table(
            "Guarantee",
            [
                *(
                    (f"epsilon at {at}", epsilon)
                    for at, epsilon in costs or [("any delta", "none")]
                ),
                ("unit", f"one {self.unit.name}"),
                ("neighbours", f"{self.adjacency.meaning} ({self.adjacency.value})"),
                ("trust", self.trust),
                ("accountant", self.accountant),
                *(("provided that", caveat) for caveat in self.caveats),
            ],
        )

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
        self, false_positive_rates: Sequence[float], epsilons: Sequence[float] = GRID
    ) -> list[float]:
        """The smallest false-negative rate any attacker can reach at each false-positive rate, from
        the (epsilon, delta) curve.
        """
        curve = of_curve(self.curve.delta, epsilons)
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
            f"({decimal_up(epsilon)}, {delta:g})-differential privacy"
            if delta
            else f"pure {decimal_up(epsilon)}-differential privacy"
        )
        part = "" if self.unit.whole else f" ({self.unit.protects}s only)"
        if self.unit.protects == "content":
            part = " (what their records hold, not who owns which record)"
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


def default_delta(records: int) -> float:
    """The delta for so many records: the largest power of ten that is at most 1 / n^1.1, comfortably
    below one over their number; of few records 1e-5.

    Guarantees: computed in whole numbers, so that it is never larger.
    """
    count, power = max(2, records), 5
    while 10 ** (10 * power) < count**11:
        power += 1
    return float(f"1e-{power}")


def html_table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """A small table for notebooks; the first cell of each row is its head."""
    lines = (
        f"<tr><th>{html.escape(str(first))}</th>"
        + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f"<table><caption>{html.escape(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def decimal_up(value: float, digits: int = 3) -> str:
    """Decimal text never below the value."""
    from decimal import ROUND_CEILING, Decimal

    return str(
        Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    )
