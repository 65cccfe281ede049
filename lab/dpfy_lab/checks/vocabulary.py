"""Checks of private vocabularies, by record and replay: nothing but noisy counts of words tells two
corpora apart, and words of one person alone stay out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from dpfy.accounting.filters import squares
from dpfy.core.unit import Unit
from dpfy.runs.folder import LEDGER
from dpfy.runs.run import Run
from dpfy.text import tokenizer
from dpfy.text.claim import VocabularyClaim
from dpfy_lab.checks.published import in_folder, temporary
from dpfy_lab.checks.replayed import faults
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.selftest.patch import patching

Units = Sequence[Sequence[str]]
DOCUMENT, SEED = Unit("document"), 31
CLAIM = VocabularyClaim(300, 3, 0.3, (8, 6), unit=DOCUMENT, delta=1e-3)
RARE = VocabularyClaim(300, 1, 1.0, (4, 3), unit=DOCUMENT, delta=0.3)
ALONE = 3000


def learnt(units: Units, claim: VocabularyClaim = CLAIM) -> dict[str, bytes]:
    """All that is published of a vocabulary of these texts."""

    def make(place: Run) -> object:
        return tokenizer.learn(place, lambda: units, claim)

    return in_folder(make, SEED)


def _corpus(count: int) -> list[list[str]]:
    words = ["ward", "night", "pain", "sleep", "nurse"]
    return [
        [f"{words[k % 5]} {words[(k // 5) % 5]} of case{'abcdefgh'[k % 8]}"] for k in range(count)
    ]


def pairs() -> Iterator[tuple[str, Units, Units, bool]]:
    """Two corpora each: with one unit more, who repeats one word or has many; and other texts."""
    some = _corpus(40)
    yield "one who repeats a word", some, [*some, ["night " * 400]], False
    many = " ".join(f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst")
    yield "one with many words", some, [["ward night sleep pain nurse " + many], *some], False
    yield "other texts", some, [[f"tea{'xyz'[k % 3]} and milk"] for k in range(29)], True


@check("vocabularies")
def REPLAYED() -> Found:
    """With the same noisy counts the same tokenizer is published, whatever the texts are, and one
    unit moves the counts by no more than is charged.
    """
    return faults(learnt, pairs())


@check("vocabulary noise")
def NOISE() -> Found:
    """All rounds together are within the claim, by the noise that each of them had."""
    spent = []

    def release(real: object, self: object, *given: object) -> object:
        spent.append(squares(self.noise.noise_multiplier))  # type: ignore[attr-defined]
        return real(self, *given)  # type: ignore[operator]

    with patching() as patch:
        patch.around("dpfy.mechanisms.histogram.StabilityHistogram.release", release)
        learnt(_corpus(40))
    share = float(sum(spent) / squares(CLAIM.noise_multiplier))
    return None if share <= 1 else f"rounds take {share:.2f} times what is claimed"


@check("vocabulary thresholds")
def ALONE_STAYS() -> Found:
    """Of words that one unit has alone no more are released than the chance that is charged allows,
    with an alarm that is false in 1 of 10^6.
    """
    units = [[f"zz{''.join('abcdefghij'[int(d)] for d in str(k))}"] for k in range(ALONE)]
    made = learnt(units, RARE)
    chance = sum(mechanism.delta for mechanism in RARE.rounds())
    found, mean = len(json.loads(made["words.json"])), ALONE * chance
    most = mean + 5.0 * math.sqrt(mean) + 3
    if found <= most:
        return None
    return f"{found} words of one unit each were released, where {mean:.0f} are expected at most"


@check("vocabulary order")
def ORDER() -> Found:
    """The vocabulary is reserved in the ledger before the texts are read."""
    said: list[bool] = []
    with temporary() as folder:

        def read() -> Units:
            lines = (folder / LEDGER).read_text().splitlines() if folder.exists() else []
            said.append(any(json.loads(line)["body"]["type"] == "reserve" for line in lines))
            return _corpus(40)

        tokenizer.learn(Run(folder, seed=SEED), read, CLAIM)
    return None if said and all(said) else "texts were read before the vocabulary was reserved"


CHECKS = (REPLAYED, NOISE, ALONE_STAYS, ORDER)
