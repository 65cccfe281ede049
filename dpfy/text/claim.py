"""The claim of a private vocabulary: what is counted, with how much noise, and what may come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from dpfy.accounting import calibrate
from dpfy.accounting.filters import noise_of, squares
from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency, Unit
from dpfy.mechanisms.additive import GaussianMechanism
from dpfy.mechanisms.histogram import StabilityHistogram

TOKENIZER, WORDS = "tokenizer.json", "words.json"
SHARES = (Fraction(3, 10), Fraction(7, 10))
"""The part of the Gaussian budget of each round. A unit counts in the second round words that the
first one did not find; 3 to 7 found most words of SST-2 among the splits that were tried.
"""
OF_THRESHOLDS = 0.1
"""The part of delta for words of a single unit that reach a threshold by chance."""
LEAST_SIZE = 257
"""The 256 bytes and the end of a text."""
MOST_WORDS = 1 << 16


@dataclass(frozen=True)
class CountingRound(StabilityHistogram):
    """One of several noisy counts that are charged together, as `whole`."""

    whole: events.Event = field(default_factory=events.Nothing)

    @property
    def event(self) -> events.Event:
        """All of them."""
        return self.whole


@register
@dataclass(frozen=True)
class VocabularyClaim(Claim):
    """Words of private text with noisy counts, and a vocabulary of at most `size` tokens made of
    them.

    In each round a unit counts once in at most `words` words. `noise_multiplier` is that of the one
    Gaussian release to which all rounds together amount; in each round a word is released whose
    noisy count reaches the threshold.
    """

    size: int
    words: int
    noise_multiplier: float
    thresholds: tuple[int, ...]

    kind: ClassVar[str] = "vocabulary"
    purpose: ClassVar[str] = "vocabulary"
    artefacts: ClassVar[tuple[str, ...]] = (TOKENIZER, WORDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("size", self.size, least=LEAST_SIZE, most=1 << 20)
        check.integer("words", self.words, most=MOST_WORDS)
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        if len(self.thresholds) != len(SHARES):
            raise InvalidInput("thresholds", len(self.thresholds), f"must be {len(SHARES)}")
        for threshold in self.thresholds:
            check.integer("thresholds", threshold, most=1 << 40)
        if self.adjacency is not Adjacency.ADD_OR_REMOVE_ONE:
            raise InvalidInput(
                "adjacency", str(self.adjacency), "must be that one unit is added or removed"
            )

    @property
    def releases(self) -> int:
        """One for each round."""
        return len(self.thresholds)

    def rounds(self) -> list[CountingRound]:
        """The mechanism of each round."""
        return [
            CountingRound(
                GaussianMechanism(noise_of(squares(self.noise_multiplier) * share)),
                threshold,
                self.words,
                1,
                self.event,
            )
            for share, threshold in zip(SHARES, self.thresholds, strict=True)
        ]

    @property
    def event(self) -> events.Event:
        """All rounds: one Gaussian release, and the words of one unit alone."""
        return _event(self.noise_multiplier, self.words, self.thresholds)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """What a unit may add, and what splits texts into words."""
        return [
            Assumption(
                "contribution",
                f"one {self.unit.name} adds at most 1 to the counts of at most {self.words} words "
                "in each round",
                "further words of it were left out, chosen by its own texts and a secret",
                YES,
            ),
            Assumption(
                "merges",
                "tokens are made of the released words and their noisy counts alone",
                "they were",
                YES,
            ),
            Assumption(
                "splitting",
                "the rule that splits texts into words is public",
                "that of byte-level tokenizers, fixed in the code",
                STATED,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        return {
            "title": "Vocabulary",
            "words": "Words of private texts were counted with noise; those whose count reached a "
            "threshold were released, and byte pairs were merged on them.",
            "size_at_most": self.size,
            "words_of_a_unit": self.words,
            "rounds": len(self.thresholds),
            "noise_multiplier": self.noise_multiplier,
            "thresholds": list(self.thresholds),
        }

    @classmethod
    def calibrated(
        cls, size: int, words: int, epsilon: float, delta: float, unit: Unit, **about: Any
    ) -> VocabularyClaim:
        """The claim with the least noise for (epsilon, delta)."""
        check.epsilon("epsilon", epsilon)
        check.integer("words", words, most=MOST_WORDS)
        failing = check.delta("delta", delta) * OF_THRESHOLDS

        def event(noise: float) -> events.Event:
            return events.Composed((events.Gaussian(noise), events.EpsilonDelta(0.0, failing)))

        noise = calibrate.noise(event, epsilon, delta)
        thresholds = tuple(
            StabilityHistogram.least_threshold(
                GaussianMechanism(noise_of(squares(noise) * share)),
                failing / len(SHARES) * (1 - 2.0**-40),
                words,
            )
            for share in SHARES
        )
        return cls(size, words, noise, thresholds, unit=unit, delta=delta, **about)


def _event(noise: float, words: int, thresholds: tuple[int, ...]) -> events.Event:
    """One Gaussian release, and the chance that a word of one unit alone is released."""
    chances = [
        StabilityHistogram(
            GaussianMechanism(noise_of(squares(noise) * share)), threshold, words
        ).delta
        for share, threshold in zip(SHARES, thresholds, strict=True)
    ]
    failing = min(1.0, sum(chances) * (1 + 2.0**-50))
    return events.Composed((events.Gaussian(noise), events.EpsilonDelta(0.0, failing)))
