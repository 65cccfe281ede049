"""Public embeddings of words: given by the user, or made of public text."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import InvalidInput

Reals = NDArray[np.float64]
WINDOW = 4
"""Words on either side that count as neighbours, the near ones more."""


@dataclass(frozen=True, eq=False)
class Embedding:
    """A vector for each of `words`; all of it public, and so is `name`, which the card shows."""

    words: tuple[str, ...]
    vectors: Reals
    name: str

    def __post_init__(self) -> None:
        vectors = np.array(self.vectors, dtype=np.float64)
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "vectors", vectors)
        check.one_line("embedding.name", self.name, 100)
        if (
            vectors.ndim != 2
            or len(vectors) != len(self.words)
            or len(vectors) < 2
            or not vectors.shape[1]
        ):
            raise InvalidInput(
                "embedding.vectors",
                vectors.shape,
                f"must be one row for each of the {len(self.words)} words, at least 2",
            )
        if not np.isfinite(vectors).all() or np.abs(vectors).max() > 1e6:
            raise InvalidInput(
                "embedding.vectors",
                "a number that is not finite, or above 1e6",
                "must be finite and of ordinary size",
            )
        if len(set(self.words)) < len(self.words) or not all(
            isinstance(word, str) for word in self.words
        ):
            raise InvalidInput(
                "embedding.words", f"{len(self.words)} words", "must be different texts"
            )
        if not self.least:
            raise InvalidInput(
                "embedding.vectors",
                "the same vector everywhere",
                "must tell at least two words apart",
            )

    @classmethod
    def of_public_text(
        cls, sentences: Sequence[Sequence[str]], name: str, *, size: int = 2000, dimension: int = 50
    ) -> Embedding:
        """The most frequent words of public text, by the leading singular vectors of their weighted
        co-occurrences, of length 1.

        Positive pointwise mutual information, with counts of contexts to the power 0.75. The same
        text gives the same embedding.
        """
        from scipy.sparse import coo_matrix
        from scipy.sparse.linalg import svds

        counts = Counter(word for sentence in sentences for word in sentence)
        words = tuple(
            sorted(counts, key=lambda word: (-counts[word], word))[
                : check.integer("size", size, least=3)
            ]
        )
        check.integer("dimension", dimension, most=max(1, len(words) - 1))
        numbers = {word: i for i, word in enumerate(words)}
        pairs: Counter[tuple[int, int]] = Counter()
        for sentence in sentences:
            places = [numbers.get(word, -1) for word in sentence]
            for gap in range(1, WINDOW + 1):
                for one, other in zip(places, places[gap:], strict=False):
                    if one >= 0 and other >= 0:
                        pairs[one, other] += WINDOW + 1 - gap
                        pairs[other, one] += WINDOW + 1 - gap
        row, column = np.array(sorted(pairs)).reshape(-1, 2).T
        held = np.array(
            [pairs[pair] for pair in zip(row.tolist(), column.tolist(), strict=True)], float
        )
        sums = np.bincount(row, held, minlength=len(words))
        contexts = np.maximum(sums, 1e-12) ** 0.75
        information = np.maximum(
            0.0, np.log(held * contexts.sum() / (sums[row] * contexts[column]))
        )
        left, values, _ = svds(
            coo_matrix((information, (row, column)), (len(words),) * 2).tocsr(),
            dimension,
            v0=np.ones(len(words)),
        )
        vectors = left * np.sqrt(values)
        return cls(
            words, vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9), name
        )

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}

    @property
    def metric(self) -> str:
        """The metric, in words for the card."""
        return f"the Euclidean distance of the embedding {self.name}"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of words and vectors."""
        whole = hashlib.sha256("\n".join(self.words).encode("utf-8", "surrogatepass"))
        whole.update(self.vectors.astype("<f8").tobytes())
        return whole.hexdigest()

    def places(self, words: Sequence[str]) -> NDArray[np.int64]:
        """The number of each word; one more than the last for words that are not known."""
        return np.array([self._numbers.get(word, len(self.words)) for word in words], np.int64)

    def at(self, places: NDArray[np.int64]) -> Reals:
        """Vectors at places; words that are not known lie at the mean of all."""
        return self._all[places]

    @cached_property
    def _all(self) -> Reals:
        return np.vstack([self.vectors, self.vectors.mean(axis=0)])

    def distances(self, place: int) -> Reals:
        """From one place to every word."""
        return np.asarray(np.sqrt(((self.vectors - self._all[place]) ** 2).sum(axis=1)))

    @cached_property
    def least(self) -> float:
        """The least distance of two places that are apart."""
        return min(
            (
                float(d.min())
                for i in range(len(self._all))
                if (d := _positive(self.distances(i))).size
            ),
            default=0.0,
        )

    @cached_property
    def diameter(self) -> float:
        """The largest distance of two words."""
        return max(float(self.distances(i).max()) for i in range(len(self._all)))

    def to_json(self) -> dict[str, Any]:
        """What a page says about it."""
        return {
            "name": self.name,
            "words": len(self.words),
            "dimension": self.vectors.shape[1],
            "sha256": self.fingerprint,
        }


def _positive(values: Reals) -> Reals:
    return values[values > 0]
