"""What a search may cost, and how it is paid for: all that is public about it beside what is
searched.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpfy import accounting
from dpfy.core import check
from dpfy.tuning.routes import HELD_OUT, LAWS, PUBLIC, RANDOM, SUBSET, PrivacyTarget, SearchRoute
from dpfy.tuning.trial_split import TrialSplit

AUTO = "auto"


@dataclass(frozen=True)
class SearchTerms:
    """What a search may cost, and how it is paid for. All of it is public.

    `trials` is their number, or its mean where it is random (`law`: logarithmic, geometric,
    poisson, or auto). `score` says whose records trials are scored on; `held_out` is the share of
    the records that is kept for that, `sample` the share that a search on a subset sees.
    """

    epsilon: float
    delta: float
    records: int
    trials: float = 20
    route: str = RANDOM
    law: str = AUTO
    score: str = PUBLIC
    held_out: float = 0.1
    sample: float = 0.1
    prune: bool = False
    accountant: str = accounting.DEFAULT
    adjacency: str = "add-or-remove-one"

    def __post_init__(self) -> None:
        check.one_of("law", self.law, (AUTO, *LAWS))
        check.inside_unit("held_out", self.held_out)
        check.integer("records", self.records, most=check.RECORDS)
        PrivacyTarget(self.epsilon, self.delta)
        for shape in self.shapes:
            self.payment(shape, adaptive=self.prune)

    @property
    def shapes(self) -> tuple[float, ...]:
        """The laws that come into question, the one to prefer first."""
        return (LAWS["poisson"], LAWS["geometric"]) if self.law == AUTO else (LAWS[self.law],)

    def payment(self, shape: float, *, adaptive: bool) -> SearchRoute:
        """The payment with this law of the number of trials."""
        return SearchRoute(
            self.route,
            self.trials,
            shape,
            self.score,
            adaptive,
            self.prune,
            self.sample,
            self.adjacency,  # type: ignore[arg-type]
        )

    @property
    def parts(self) -> TrialSplit:
        """Who takes part in what."""
        return TrialSplit(
            self.records,
            self.held_out if self.score == HELD_OUT else 0.0,
            self.sample if self.route == SUBSET else 1.0,
        )

    @property
    def target(self) -> PrivacyTarget:
        """What everything may cost."""
        return PrivacyTarget(self.epsilon, self.delta, self.adjacency, self.accountant)  # type: ignore[arg-type]
