"""How batches are formed, and what may be claimed for it: the guide's Table 3 as data.

A pattern turns noise, rate and steps into an event and the assumptions under which the event
describes what was run. Where no amplification is proven, none is claimed. `Training` is a question,
in a calculator's words, about a run that need not exist; what is run is a `Recipe`. Both take the
event of sampled steps from `poisson`, so that they cannot give one run two charges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpfy.core import check
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event, poisson, without_replacement
from dpfy.core.unit import Adjacency

ORDERS = {
    "shuffled": "a random order",
    "buffer-shuffled": "an order shuffled in a buffer, which shows roughly when a unit comes",
    "fixed-order": "a fixed order",
}
"""Orders in which every unit takes part once a pass: where one noise serves a batch, none is
amplified.
"""
PATTERNS = (
    "poisson",
    "truncated-poisson",
    "without-replacement",
    "with-replacement",
    "random-allocation",
    *ORDERS,
)
LOCAL = ("shuffled", "check-ins", "buffer-shuffled", "fixed-order")
"""What may be done with reports that are private one by one."""


@dataclass(frozen=True)
class PatternClaim:
    """An event together with what it takes for granted."""

    event: Event
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class TrainingPattern:
    """Noisy steps on sampled batches: all that a pattern needs. `records` and `batch_size` matter
    for fixed-size patterns only.
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    steps: int = 1
    sampling: str = "poisson"
    records: int = 0
    batch_size: int = 0

    def __post_init__(self) -> None:
        check.one_of("sampling", self.sampling, PATTERNS)
        check.noise_multiplier("noise_multiplier", self.noise_multiplier)
        check.sampling_rate("sampling_rate", self.sampling_rate)
        check.integer("steps", self.steps, least=0, most=check.STEPS)
        check.integer("records", self.records, least=0, most=check.RECORDS)
        check.integer("batch_size", self.batch_size, least=0, most=check.RECORDS)

    def claim(self) -> PatternClaim:
        """The event of the whole training and its assumptions."""
        if self.noise_multiplier == 0:
            return PatternClaim(
                ev.NotPrivate() if self.steps and self.sampling_rate else ev.Nothing(),
                ("no noise is added",),
            )
        if self.sampling in ORDERS:
            return self._passes()
        if self.sampling == "poisson":
            return PatternClaim(
                poisson(self.noise_multiplier, self.sampling_rate, self.steps), self._assumptions()
            )
        if self.sampling == "random-allocation":
            return self._allocated()
        if self.sampling == "without-replacement":
            self._require_sizes()
            event = without_replacement(
                self.noise_multiplier, self.records, self.batch_size, self.steps
            )
            return PatternClaim(event, self._assumptions())
        return PatternClaim(ev.Repeated(self._step(), self.steps), self._assumptions())

    def _step(self) -> Event:
        """One step on a batch of a fixed size."""
        self._require_sizes()
        if self.sampling == "truncated-poisson":
            return ev.TruncatedPoissonGaussian(
                self.records, self.sampling_rate, self.batch_size, self.noise_multiplier
            )
        return ev.SampledWithReplacement(
            self.records, self.batch_size, ev.Gaussian(self.noise_multiplier)
        )

    def _require_sizes(self) -> None:
        if not self.records or not self.batch_size:
            raise InvalidInput(
                "records, batch-size",
                (self.records, self.batch_size),
                f"are needed for {self.sampling} sampling",
            )

    def _allocated(self) -> PatternClaim:
        """Epochs of about 1 / sampling rate steps. An epoch that was started counts whole."""
        if not self.steps or not self.sampling_rate:
            return PatternClaim(ev.Nothing(), ("nobody takes part",))
        # a batch holds at most the share of the sampling rate
        epoch = max(1, math.ceil(1 / self.sampling_rate * (1 - 1e-12)))
        epochs = -(-self.steps // epoch)
        return PatternClaim(
            ev.random_allocation(self.noise_multiplier, epoch, epochs),
            (
                f"in each of {epochs} epochs every unit takes part in exactly one of {epoch} steps, "
                f"chosen uniformly and in secret, again for each epoch",
            ),
        )

    def _passes(self) -> PatternClaim:
        """Each unit takes part once a pass: no amplification, the charge of its own steps. A pass
        that was started counts whole.
        """
        passes = math.ceil(
            self.steps * self.sampling_rate * (1 - 1e-12)
        )  # 30 steps at rate 0.1 are 3 passes, whatever rounding says
        how = ORDERS[self.sampling]
        return PatternClaim(
            ev.Repeated(ev.Gaussian(self.noise_multiplier), passes),
            (
                f"every unit takes part in at most {passes} of the {self.steps} steps ({how}, one "
                f"batch a pass)",
                "no amplification by sampling or shuffling is claimed",
            ),
        )

    def _assumptions(self) -> tuple[str, ...]:
        return {
            "poisson": (
                "at every step each unit is in the batch independently with the sampling rate",
            ),
            "truncated-poisson": (
                "batches are Poisson samples of which at most batch-size units are kept, uniformly "
                "chosen",
            ),
            "without-replacement": (
                "every batch is a fresh uniform subset of exactly batch-size units",
            ),
            "with-replacement": ("every batch is batch-size independent uniform draws",),
        }[self.sampling]


@dataclass(frozen=True)
class ReportPattern:
    """Rounds of reports, each made `epsilon0`-private where it is: one from each of `records`
    units, or from `slots` slots.
    """

    epsilon0: float
    sampling: str = "shuffled"
    records: int = 0
    slots: int = 0
    sampling_rate: float = 1.0
    steps: int = 1
    answers: int = 0

    def __post_init__(self) -> None:
        check.one_of("sampling", self.sampling, LOCAL)
        if self.answers and (
            check.integer("answers", self.answers, least=2) and self.sampling != "shuffled"
        ):
            raise InvalidInput("answers", self.answers, "goes with shuffled reports")
        check.positive("local_epsilon", self.epsilon0)
        check.integer("records", self.records, least=0, most=check.RECORDS)
        check.integer("slots", self.slots, least=0, most=check.RECORDS)
        check.sampling_rate("sampling_rate", self.sampling_rate)
        check.integer("steps", self.steps, least=0, most=check.STEPS)

    def claim(self) -> PatternClaim:
        """The event of all rounds and its assumptions. Only what no one sees the origin of is
        amplified.
        """
        own = f"every report is {self.epsilon0:g}-differentially private by itself"
        size = self.slots if self.sampling == "check-ins" else self.records
        name = "slots" if self.sampling == "check-ins" else "records"
        if self.sampling in ("shuffled", "check-ins") and not size:
            raise InvalidInput(name, size, f"is needed for {self.sampling} reports")
        if self.sampling == "shuffled":
            told = (
                "one report a unit and round, all of them shuffled, each round again, by somebody "
                "who tells nothing else"
            )
            how = (
                (f"every report is one of {self.answers:,} answers, by randomised response",)
                if self.answers
                else ()
            )
            return PatternClaim(
                ev.Repeated(ev.Shuffled(self.epsilon0, self.records, self.answers), self.steps),
                (own, *how, told),
            )
        if self.sampling == "check-ins":
            told = (
                "a unit takes part with the sampling rate, in a slot chosen uniformly and in "
                "secret, each round again"
            )
            return PatternClaim(
                ev.Repeated(
                    ev.RandomCheckIns(self.epsilon0, self.slots, self.sampling_rate), self.steps
                ),
                (own, told),
            )
        none = f"no amplification is claimed: reports come in {ORDERS[self.sampling]}"
        return PatternClaim(ev.Repeated(ev.EpsilonDelta(self.epsilon0), self.steps), (own, none))


@dataclass(frozen=True)
class ConvexConditions:
    """What amplification by iteration needs; anyone who constructs it declares each to hold."""

    losses_are_convex: bool
    losses_are_smooth: bool
    learning_rate_at_most_2_over_smoothness: bool
    only_the_last_model_is_released: bool

    def missing(self) -> list[str]:
        """The conditions that were not declared."""
        return [name.replace("_", " ") for name, value in vars(self).items() if not value]


def by_iteration(
    noise_multiplier: float, later_steps: int, adjacency: Adjacency, conditions: ConvexConditions
) -> Event:
    """The event of one step that is followed by `later_steps` noisy contractive steps, when only
    the last model is seen.

    Feldman, Mironov, Talwar & Thakurta 2018, Theorem 23: the Rényi divergence of the step is
    divided by later_steps + 1. A condition that is not declared raises `Unsupported`.
    """
    if missing := conditions.missing():
        raise Unsupported(
            f"amplification by iteration without: {', '.join(missing)}",
            "declare them, or charge the step in full",
        )
    move = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    full = (move / check.positive("noise_multiplier", noise_multiplier)) ** 2 / 2
    return ev.Zcdp(full / (check.integer("later_steps", later_steps, least=0) + 1))
