"""Metric privacy for text: every word is replaced by one near it in a public embedding.

d_chi privacy (Chatzikokolakis et al. 2013): where a word is replaced by another one at distance d,
the chance of every output changes by a factor of at most exp(eta d). Near words hide each other;
far ones do not, so that this is no differential privacy and has no epsilon. A text of several words
has it for the sum of the distances of its words. That a text is there, and its length, is seen.

Two mechanisms: noise of density proportional to exp(-eta |z|) on the word's vector, then the
nearest word (Feyisetan, Balle, Drake & Diethe 2020; for tokens Qu et al. 2021); and a choice among
all words with weights exp(-eta d / 2), drawn exactly. Both output words, so that the last bits of
floating point cannot be seen; the noise has the tails of 64 random bits in each of its parts.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import dpfy
from dpfy.core import check, events, storage
from dpfy.core.claim import NEARLY, STATED, YES, Assumption, register
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Unit
from dpfy.local.claim import DeviceClaim
from dpfy.local.means import fractions
from dpfy.mechanisms.choice import choose
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.mechanism import source
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.run import Run
from dpfy_lab.metric_text.embedding import Embedding

FILE = "words.json"
NOISE, CHOICE = "noise", "choice"
MECHANISMS = {
    NOISE: "noise of density exp(-eta |z|) on the vector of each word, then the nearest word",
    CHOICE: "a choice among all words with weights exp(-eta d / 2), drawn exactly",
}
FINE = 1 << 24
"""Steps in an exponent of 1, for exact choices."""
AT_ONCE = 4096
"""Words whose nearest neighbours are searched at a time."""


@dataclass(frozen=True)
class MetricWords:
    """Words replaced by near ones, `eta` to the unit of distance. A word that the embedding does
    not know lies at its mean.

    Guarantees: each word is replaced by itself, and what it becomes is d_chi private; no word is
    left as it is because it is rare.
    """

    eta: float
    embedding: Embedding
    mechanism: str = NOISE

    def __post_init__(self) -> None:
        if not 1e-6 <= check.positive("eta", self.eta) <= 1e6:
            raise InvalidInput("eta", self.eta, "must lie between 1e-6 and 1e6")
        check.one_of("mechanism", self.mechanism, MECHANISMS)

    @property
    def event(self) -> events.Event:
        """What it costs: nothing that an epsilon could say."""
        return events.MetricPrivacy(self.eta, self.embedding.metric)

    def draw(self, words: Sequence[str], bits: Bits) -> list[str]:
        """What each word becomes."""
        places = self.embedding.places(words)
        found = (
            self._chosen(places, bits) if self.mechanism == CHOICE else self._nearest(places, bits)
        )
        return [self.embedding.words[i] for i in found]

    def noise(self, count: int, bits: Bits) -> NDArray[np.float64]:
        """Vectors of density proportional to exp(-eta |z|): a length that is a sum of exponential
        numbers, in a uniform direction.
        """
        from scipy.special import ndtri

        size = self.embedding.vectors.shape[1]
        parts = (bits.words(count * size).astype(np.float64) + 0.5) / 2.0**64
        length = -np.log(parts.reshape(count, size)).sum(axis=1) / self.eta
        normal = ndtri(fractions(count * size, bits)).reshape(count, size)
        return np.asarray(normal / np.linalg.norm(normal, axis=1, keepdims=True) * length[:, None])

    def _nearest(self, places: NDArray[np.int64], bits: Bits) -> list[int]:
        vectors, found = self.embedding.vectors, []
        sizes = (vectors**2).sum(axis=1) / 2
        for start in range(0, len(places), AT_ONCE):
            part = places[start : start + AT_ONCE]
            moved = self.embedding.at(part) + self.noise(len(part), bits)
            found += np.argmax(moved @ vectors.T - sizes, axis=1).tolist()
        return found

    def _chosen(self, places: NDArray[np.int64], bits: Bits) -> list[int]:
        known = {place: self.exponents(place) for place in set(places.tolist())}
        return [choose(known[place], bits, FINE) for place in places.tolist()]

    def exponents(self, place: int) -> list[int]:
        """Minus the logarithms of the weights of all words, in whole steps of 1 / FINE.

        Rounding moves two of them apart by a step at most: at the least distance of two words that
        is what eta is smaller by.
        """
        rate = self.eta / 2 - 1 / (FINE * self.embedding.least)
        if rate <= 0:
            raise InvalidInput(
                "eta",
                self.eta,
                f"must be above {2 / (FINE * self.embedding.least):.3g} for words so close to each "
                f"other",
            )
        steps = np.rint(
            np.minimum(self.embedding.distances(place) * (rate * FINE * (1 - 1e-12)), 2.0**60)
        )
        return [int(step) for step in steps]

    def habits(
        self, words: Sequence[str], trials: int, bits: Bits
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """For each word how often it stays itself in so many trials (N_w), and how many different
        words it becomes (S_w).
        """
        rows = np.array([self.draw(words, bits) for _ in range(check.integer("trials", trials))])
        return (rows == np.array(words)).mean(axis=0), np.array(
            [len(set(column)) for column in rows.T], float
        )


@register
@dataclass(frozen=True)
class MetricText(DeviceClaim):
    """The claim of a text whose words are replaced. `fingerprint` is that of the embedding, which
    must be public.
    """

    eta: float
    metric: str
    fingerprint: str
    vocabulary: int
    dimension: int
    mechanism: str = NOISE
    on_device: bool = False
    unit: Unit = field(default=Unit("word"), kw_only=True)

    kind: ClassVar[str] = "metric-text"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (FILE,)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.event
        check.one_line("fingerprint", self.fingerprint)
        check.integer("vocabulary", self.vocabulary, least=2)
        check.integer("dimension", self.dimension)
        check.one_of("mechanism", self.mechanism, MECHANISMS)

    @classmethod
    def of(cls, words: MetricWords, on_device: bool = False) -> MetricText:
        """The claim of a mechanism; `on_device` where the words never leave their author
        unchanged.
        """
        known, size = words.embedding.vectors.shape
        return cls(
            words.eta,
            words.embedding.metric,
            words.embedding.fingerprint,
            known,
            size,
            words.mechanism,
            on_device,
        )

    @property
    def event(self) -> events.Event:
        """No epsilon."""
        return events.MetricPrivacy(self.eta, self.metric)

    @property
    def trust(self) -> str:
        """Who replaces the words."""
        return "local" if self.on_device else "central"

    @property
    def instead(self) -> str:
        """The promise that there is."""
        return (
            f"it is metric privacy (d_chi), NOT epsilon-differential privacy: where one word is "
            f"replaced by another at distance d in "
            f"{self.metric}, the chance of every output changes by a factor of at most "
            f"exp({self.eta:g} d), so that words far apart can be "
            "distinguished; lengths are not hidden"
        )

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """The embedding is public, the law is drawn."""
        exact = self.mechanism == CHOICE
        done = (
            "drawn exactly, from exponents rounded to whole steps"
            if exact
            else "drawn in floating point; only words are released"
        )
        return [
            Assumption("embedding", "the embedding is public", "as its maker says", STATED),
            Assumption(
                "law",
                "words are drawn from the law of the mechanism",
                done,
                YES if exact else NEARLY,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the card."""
        held: dict[str, Any] = {
            "title": "Text with metric privacy",
            "privacy": "metric privacy (d_chi), not epsilon-differential privacy",
        }
        held |= {"metric": self.metric, "eta": self.eta, "replaced_by": MECHANISMS[self.mechanism]}
        return held | {
            "vocabulary": self.vocabulary,
            "dimension": self.dimension,
            "embedding_sha256": self.fingerprint,
        }


def replaced(
    text: Sequence[str], words: MetricWords, run: Run | str | Path, *, on_device: bool = False
) -> list[str]:
    """A text word by word, each replaced, in a run folder whose card says what this is and what it
    is not.

    Guarantees: no ledger of epsilons takes it: there is nothing that it could add up.
    """
    place, claim = Run.of(run), MetricText.of(words, on_device)
    if place.ledger is not None:
        raise Unsupported(
            "metric privacy in a ledger of epsilons",
            "give it a run folder of its own, without a ledger: it has no epsilon",
        )
    if not complete(place, claim):
        with RunFolder(place, claim) as folder:
            folder.bind(claim.name, hashlib.sha256(json.dumps(list(text)).encode()).digest())
            bits = source(claim.event, folder.begin(claim.name), folder.randomness, 0)
            folder.write(FILE, json.dumps(words.draw(text, bits)).encode())
            folder.tell(claim.name, words_replaced=len(text))
            seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
            folder.finish(
                card.Facts(
                    {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed},
                    releases=1,
                )
            )
    found: list[str] = storage.parsed_json(FILE, storage.content(FILE, Path(place.path) / FILE))
    return found
