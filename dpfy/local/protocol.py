"""What local protocols have in common: a device reports, a server estimates.

The value is randomised before it leaves the device; anyone who collects the reports is trusted with
nothing. A report carries the protocol that made it, and with it what it costs. The guarantee is for
replacing the value by any other one: that somebody reports is seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Permit
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.mechanism import agree, source

Rows = NDArray[Any]
"""One report in each row: numbers or bits, as the protocol says."""
Reals = NDArray[np.float64]

LEAST_EPSILON, MOST_EPSILON = 1e-4, 30.0
"""Below, nothing can be learnt from reports; beyond, a report is the value itself but for one in
1e13.
"""
ALONE = "local report"


@dataclass(frozen=True)
class DeviceReport:
    """What leaves a device: one row of `protocol`, made private there."""

    protocol: Protocol
    answer: Rows

    @property
    def event(self) -> events.Event:
        """What it costs the person who sent it."""
        return self.protocol.event


@dataclass(frozen=True)
class LocalEstimate:
    """What a server learns from `reports` reports: unbiased values, their standard errors and
    intervals at `confidence`.

    The error is that of the randomisation alone: it is about the people who reported, not about
    those whom they stand for. `refused` reports had a form that the protocol never gives, and were
    left out.
    """

    value: Reals
    standard_error: Reals
    low: Reals
    high: Reals
    confidence: float
    reports: int
    refused: int

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        lists = {
            name: np.atleast_1d(getattr(self, name)).tolist()
            for name in ("value", "standard_error", "low", "high")
        }
        return lists | {
            "confidence": self.confidence,
            "reports": self.reports,
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Protocol(ABC):
    """A randomiser of one value, `epsilon`-differentially private by itself, and the estimator that
    goes with it.
    """

    epsilon: float

    def __post_init__(self) -> None:
        if not LEAST_EPSILON <= check.epsilon("epsilon", self.epsilon) <= MOST_EPSILON:
            raise InvalidInput(
                "epsilon",
                self.epsilon,
                f"must lie between {LEAST_EPSILON:g} and {MOST_EPSILON:g} for reports",
            )

    @property
    def event(self) -> events.Event:
        """What one report costs: pure epsilon, for replacing the value."""
        return events.EpsilonDelta(self.epsilon)

    @abstractmethod
    def given(self, values: Any) -> Rows:
        """Values, one a person, moved into the public range."""

    @abstractmethod
    def draw(self, given: Rows, bits: Bits) -> Rows:
        """A report for each of the values, which lie in the public range."""

    @abstractmethod
    def proper(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows have a form that a device can have sent."""

    @abstractmethod
    def shape(self) -> tuple[tuple[int, ...], str]:
        """The shape of one row, and the kind of its numbers (that of numpy)."""

    @abstractmethod
    def summary(self, rows: Rows) -> tuple[Reals, Reals]:
        """Unbiased estimates from proper reports, at least one, and the variances of their
        errors.
        """

    def report(
        self,
        value: Any,
        permit: Permit | None = None,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> DeviceReport:
        """The report of one person. Without a permit nothing is written down: `Device` keeps the
        person's own ledger.

        Guarantees: the report depends on the value through `draw` alone, which is `epsilon`-private
        for any two values. A value outside of the public range counts as one inside. Nothing is
        raised because of the value's size.
        """
        given = self.given([value])
        return DeviceReport(self, self.draw(given, self._bits(permit, randomness, step))[0])

    def reports(
        self,
        values: Any,
        permit: Permit | None = None,
        randomness: Randomness | None = None,
        step: int = 0,
    ) -> NDArray[Any]:
        """The reports of many people, one a row: a simulation in one process, where each would draw
        on a device of their own.
        """
        return self.draw(self.given(values), self._bits(permit, randomness, step))

    def _bits(self, permit: Permit | None, randomness: Randomness | None, step: int) -> Bits:
        if permit is None:
            return Bits(Randomness.from_os() if randomness is None else randomness, ALONE, step)
        agree(Adjacency.REPLACE_ONE, permit)
        return source(self.event, permit, randomness, step)

    def estimate(
        self, reports: Sequence[DeviceReport] | Rows, confidence: float = 0.95
    ) -> LocalEstimate:
        """What the reports say about the people who sent them.

        Guarantees: reports of another protocol are an error; rows that no device can have sent are
        left out and counted. Post-processing: it costs nothing, and no report can make it fail.
        """
        rows, refused = self._rows(reports)
        if not len(rows):
            raise InvalidInput("reports", 0, "must be at least one")
        value, variance = self.summary(rows)
        error = np.sqrt(np.maximum(variance, 0.0))
        width = _quantile(check.inside_unit("confidence", confidence)) * error
        return LocalEstimate(
            value, error, value - width, value + width, confidence, len(rows), refused
        )

    def _rows(self, reports: Sequence[DeviceReport] | Rows) -> tuple[Rows, int]:
        shape, kind = self.shape()
        if isinstance(reports, np.ndarray):
            rows = reports
        else:
            for report in reports:
                if not isinstance(report, DeviceReport) or report.protocol != self:
                    raise InvalidInput(
                        "reports", getattr(report, "protocol", report), f"must be reports of {self}"
                    )
            good = [
                r.answer
                for r in reports
                if np.shape(r.answer) == shape and np.asarray(r.answer).dtype.kind == kind
            ]
            rows = (
                np.array(good)
                if good
                else np.empty((0, *shape), dtype={"b": bool, "i": np.int64}.get(kind, np.float64))
            )
        if rows.shape[1:] != shape or rows.dtype.kind != kind:
            raise InvalidInput(
                "reports",
                f"{rows.dtype} {rows.shape}",
                f"must be rows of shape {shape}, as the protocol makes them",
            )
        kept = rows[self.proper(rows)]
        return kept, len(reports) - len(kept)


def _quantile(confidence: float) -> float:
    from scipy.special import ndtri

    return float(ndtri((1 + confidence) / 2))
