"""Mistakes of private vocabularies: merges of exact counts, units that count without bound, noise and
thresholds that are not those of the claim, and texts that are read before they are paid for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpfy_lab.checks.vocabulary import ALONE_STAYS, NOISE, ORDER, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

RUN = "dpfy.text.tokenizer"


def knowing(target: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """A replacement that is given the exact counts too: `change(real, counts, ...)`."""

    def apply(patch: Patch) -> None:
        exact: Counter[str] = Counter()

        def released(real: Any, counted: Any, *given: Any) -> Any:
            exact.clear()
            for words in counted:
                exact.update(words)
            return real(counted, *given)

        patch.around(f"{RUN}.released_words", released)
        patch.around(target, lambda real, *given: change(real, exact, *given))

    return apply


def exact_merges(real: Any, exact: Any, counts: Any, size: int) -> Any:
    """Byte pairs are merged on the exact counts of the words that were released."""
    return real({word: float(exact[word]) for word in counts}, size)


def all_words(real: Any, exact: Any, counts: Any, size: int) -> Any:
    """Byte pairs are merged on all words of the corpus."""
    return real({word: float(count) for word, count in exact.items()}, size)


mistake("vocabulary-exact-merges", "merges are learnt from exact counts of words", REPLAYED)(
    knowing(f"{RUN}.merged", exact_merges)
)
mistake("vocabulary-all-words", "merges are learnt from all words of the texts", REPLAYED)(
    knowing(f"{RUN}.merged", all_words)
)


def popular_first(real: Any, exact: Any, words: Any, known: Any, most: int, *given: Any) -> Any:
    """A unit counts those of its words that all units together use most."""
    left = [word for word in words if word not in known]
    return sorted(left, key=lambda word: (-exact[word], word))[:most]


mistake(
    "vocabulary-popular-first",
    "a unit counts those of its words that are frequent in the whole corpus",
    REPLAYED,
)(knowing(f"{RUN}.chosen_words", popular_first))


@mistake(
    "vocabulary-unbounded",
    "a unit counts in all of its words",
    REPLAYED,
    f"{RUN}.chosen_words",
)
def _(real: Any, words: Any, known: Any, most: int, *given: Any) -> Any:
    return [word for word in words if word not in known]


@mistake(
    "vocabulary-every-occurrence",
    "a word counts as often as a unit has it",
    REPLAYED,
    f"{RUN}.chosen_words",
)
def _(real: Any, words: Any, *given: Any) -> Any:
    return [word for word in real(words, *given) for _ in range(words[word])]


@mistake(
    "vocabulary-rounds-uncharged",
    "every round has the noise of a single one",
    NOISE,
    "dpfy.text.claim.VocabularyClaim.rounds",
)
def _(real: Any, self: Any) -> Any:
    return [
        replace(m, noise=replace(m.noise, noise_multiplier=self.noise_multiplier))
        for m in real(self)
    ]


@mistake(
    "vocabulary-no-threshold",
    "words are released whose noisy count is positive",
    ALONE_STAYS,
    "dpfy.mechanisms.histogram.StabilityHistogram.release",
)
def _(real: Any, self: Any, *given: Any) -> Any:
    return real(replace(self, threshold=1), *given)


@mistake(
    "vocabulary-read-first",
    "texts are read before the vocabulary is reserved",
    ORDER,
    f"{RUN}.learn",
)
def _(real: Any, place: Any, read: Any, *given: Any) -> Any:
    units = read()
    return real(place, lambda: units, *given)
