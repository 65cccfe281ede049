"""Mistakes of a search for settings: each of them voids the theorem that makes it cheap."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from dpfy.audit.bench import Bug

CANARY, SCORES, PARTS, PROPOSALS = (
    "search canary",
    "search scores",
    "search parts",
    "search proposals",
)


def fixed(drawn: Any) -> Any:
    """As many trials as their mean, always."""
    return lambda claim, permit, randomness: int(claim.payment.trials)


def everything(shown: Any) -> Any:
    """The output of every trial leaves the search."""
    return lambda outputs, best: list(outputs)


def exactly(trial: Any) -> Any:
    """The count of right answers is the score, as it is."""

    def count(right: int) -> float:
        trial.counted = float(right)
        return trial.counted

    return SimpleNamespace(count=count)


def the_same(trial: Any) -> Any:
    """Trials are scored on the records that they were trained on."""
    return SimpleNamespace(train=trial.train, valid=trial.train)


@dataclass(frozen=True)
class Greedy:
    """Proposes the best settings so far again, and says that it looks at nothing."""

    engine: Any
    scores: list[float]
    asked: list[Any]
    adaptive: bool = False

    @property
    def name(self) -> str:
        """As the one whose place it takes."""
        return str(self.engine.name)

    def ask(self, number: int, rng: Any, begun: Any = None) -> Any:
        """What was best, once something was good."""
        drawn = self.engine.ask(number, rng, begun)
        if self.scores and max(self.scores) > 0.5:
            return self.asked[self.scores.index(max(self.scores))]
        self.asked.append(drawn)
        return drawn

    def tell(self, number: int, row: Any) -> None:
        """It has seen it."""

    def prune(self, number: int, score: float) -> bool:
        """Never."""
        return False


BUGS = (
    Bug(
        "search-fixed-number",
        "the number of trials is fixed, and billed as random",
        CANARY,
        trials=fixed,
    ),
    Bug(
        "search-all-released",
        "every trial leaves a search that is billed for the best one",
        CANARY,
        shown=everything,
    ),
    Bug(
        "search-score-exact",
        "the best trial is shown with its score on private records, without noise",
        SCORES,
        scored=exactly,
    ),
    Bug(
        "search-validates-on-training",
        "trials are scored on training records, billed as records held out",
        PARTS,
        held_out=the_same,
    ),
    Bug(
        "search-adaptive",
        "settings follow from earlier scores under a random number of trials",
        PROPOSALS,
        proposed=lambda engine, scores: Greedy(engine, scores, []),
    ),
)
