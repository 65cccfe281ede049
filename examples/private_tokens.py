"""Words from private language models that never leave: 60 small models of 60 parts of the letters,
and a public one, write a sentence.

    python examples/private_tokens.py --run runs/tokens --epsilon 4 --words 12

Each member knows the letters of its own people alone. For every next word its chances are mixed
with those of the public model until no ratio is too large; a word is drawn from the mean of all
(dpfy_lab.vote_rules.mixing has the proof). All words are billed before the first, and a context that
came up before is answered alike, for nothing. The models count pairs of words, so that the example
runs in seconds. Members of any other kind need only give a row of chances: the rest stays as it is.
The letters are made up.
"""

from __future__ import annotations

import argparse
import hashlib

import numpy as np
from numpy.typing import NDArray

import dpfy
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Unit
from dpfy.core.values import Bound, Bounded
from dpfy.prediction import AnswersClaim, PrivatePredictor, shards
from dpfy.prediction.rules import Ask
from dpfy.runs.run import Run

WORDS = [
    "<end>",
    "the",
    "a",
    "doctor",
    "nurse",
    "letter",
    "house",
    "garden",
    "says",
    "writes",
    "sees",
    "loves",
    "and",
    "today",
    "again",
    "slowly",
]
PUBLIC = [
    "the doctor writes a letter today",
    "the nurse sees the doctor and the doctor sees the nurse",
    "a nurse loves the garden",
    "the house and the garden",
    "the doctor says the letter again slowly",
]
PRIVATE = [
    "the nurse writes the letter",
    "the nurse loves the house",
    "the doctor loves the garden and the house again",
]
MEMBERS, PEOPLE, LETTERS = 60, 400, 1200


def chances(
    sentences: list[str], prior: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    """Of the next word after each word, from counted pairs; `prior` counts as `strength` pairs."""
    counts = strength * prior
    for sentence in sentences:
        words = [WORDS.index(word) for word in f"<end> {sentence} <end>".split()]
        np.add.at(counts, (words[:-1], words[1:]), 1.0)
    return counts / counts.sum(axis=1, keepdims=True)


class Members:
    """Models of pairs of words. A question is the last word; what is asked for is the public
    chances, then those of each member.
    """

    count, classes, features = MEMBERS, len(WORDS), 1

    def __init__(self, letters: list[str], people: list[int]) -> None:
        self.public = chances(PUBLIC, np.full((len(WORDS), len(WORDS)), 1 / len(WORDS)), 1.0)
        places = shards(len(letters), MEMBERS, Randomness.from_os(), people)
        own = [
            [letter for letter, place in zip(letters, places, strict=True) if place == k]
            for k in range(MEMBERS)
        ]
        self.rows = np.stack(
            [self.public, *(chances(sentences, self.public, 2.0) for sentences in own)]
        )

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """Rows of chances after the last word. One person changes one row."""

        def of(word: int) -> Ask:
            return lambda bits: Bounded(self.rows[:, word], Bound(linf=1.0))

        return [of(int(row[0]) % len(WORDS)) for row in questions]

    def fingerprint(self) -> bytes:
        """What makes them the same members again after a restart."""
        return hashlib.blake2b(self.rows.tobytes()).digest()


def main() -> None:
    """Write one sentence, end the service, verify its folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="runs/tokens")
    parser.add_argument(
        "--epsilon", type=float, default=4.0, help="pure epsilon of all words together"
    )
    parser.add_argument("--words", type=int, default=12)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    people = rng.integers(0, PEOPLE, LETTERS)
    letters = [PRIVATE[k] for k in rng.integers(0, len(PRIVATE), LETTERS)]
    each = given.epsilon / given.words
    claim = AnswersClaim(
        "mixed",
        len(WORDS),
        MEMBERS,
        given.words,
        given.words,
        epsilon=each,
        delta=1e-9,
        unit=Unit("person", LETTERS, "user"),
    )
    with PrivatePredictor(Run(given.run), claim, Members(letters, people.tolist())) as predictor:
        print(f"{claim.tool.words}; epsilon {each:.3g} a word")
        said, word = [], 0
        for _ in range(given.words):
            label = predictor.answer([word]).label
            if label is None or (word := label) == 0:
                break
            said.append(WORDS[word])
        print(" ".join(said))
        folder = predictor.finish()
    print(f"verified: {all(finding.holds for finding in dpfy.verify(folder))}")


if __name__ == "__main__":
    main()
