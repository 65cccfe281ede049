"""The tables of exact noise against an oracle in many digits: thresholds, ties, tails, and the
staircase of wide laws.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import mpmath
import numpy as np
import pytest

from dpfy.core.randomness import Randomness
from dpfy.mechanisms import Bits, gaussian, integers
from dpfy.mechanisms.exact import Uniform, exp_enclosure
from dpfy.mechanisms.integers import FIRST, Law, LawSteps, Narrow, Room, Wide, thresholds, weights

LAWS = [
    Law(rate, square, folded)
    for rate in (
        Fraction(1, 32),
        Fraction(2, 25),
        Fraction(1, 2),
        Fraction(2),
        Fraction(50),
    )  # sigma 4, 2.5, 1, 1/2, 1/10
    for square in (True, False)
    for folded in (True, False)
]


class Scripted(Bits):
    """Bits that begin with the words of a script."""

    def __init__(self, *script: int) -> None:
        super().__init__(Randomness.for_tests(7), "after the script", 0)
        self.script = list(script)

    def into(self, out: np.ndarray) -> None:
        begin = self.script[: len(out)]
        del self.script[: len(out)]
        out[: len(begin)] = begin
        if len(begin) < len(out):
            super().into(out[len(begin) :])


@pytest.fixture(autouse=True)
def many_digits():
    with mpmath.workdps(260):
        yield


def real(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def weight(law: Law, k: Fraction | int) -> mpmath.mpf:
    return mpmath.exp(-real(law.rate * Fraction(k) ** (2 if law.square else 1)))


def probabilities(law: Law) -> list[mpmath.mpf]:
    """P(k) for every k of the table; the sum of all weights by adding up all that 250 digits can
    see, or by its formula.
    """
    found, small = [weight(law, 0)], mpmath.mpf(10) ** -258
    while len(found) <= law.size or (law.square and found[-1] > small):
        found.append(weight(law, len(found)) * (2 if law.folded else 1))
    ratio = weight(law, 1)
    total = mpmath.fsum(found) if law.square else (1 + ratio * law.folded) / (1 - ratio)
    return [value / total for value in found]


def encloses(pair: tuple[int, int], precision: int, value: mpmath.mpf, wide: int = 4) -> bool:
    low, high = (mpmath.mpf(end) / mpmath.mpf(2) ** precision for end in pair)
    return low <= value <= high and high - low <= mpmath.mpf(wide) / mpmath.mpf(2) ** precision


@pytest.mark.parametrize(
    "gamma",
    [
        Fraction(1, 10**30),
        Fraction(1, 256),
        Fraction(3, 7),
        Fraction(1),
        Fraction(25, 2),
        Fraction(300),
        Fraction(10**9),
    ],
)
@pytest.mark.parametrize("precision", [1, 40, 95, 700])
def test_exponentials_are_enclosed_closely(gamma, precision):
    assert encloses(exp_enclosure(gamma, precision), precision, mpmath.exp(-real(gamma)))


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_thresholds_are_the_distribution(law):
    """The first 63 bits of the table are those of the exact distribution, the enclosures hold it to
    2^-600, and the rest is the tail.
    """
    chances = probabilities(law)
    sums = list(accumulate(chances[: law.size]))
    edges = integers.LawTable(law).steps.edges
    assert [int(edge) >> 1 for edge in edges] == [
        int(mpmath.floor(total * 2**63)) for total in sums
    ]
    for precision in (64, 200, 600):
        assert all(
            encloses(law.threshold(k, precision), precision, total) for k, total in enumerate(sums)
        )
    assert 1 - sums[-1] < mpmath.mpf(2) ** -40


@pytest.mark.parametrize("law", LAWS[:8], ids=str)
def test_the_law_of_the_table_adds_up_and_is_the_stated_one(law):
    """P(k) is the difference of two thresholds: enclosed, they hold the law; with the tail they add
    up to one.
    """
    before, one = (0, 0), 1 << FIRST
    for k, (chance, pair) in enumerate(
        zip(probabilities(law), thresholds(law, FIRST), strict=False)
    ):
        assert encloses((pair[0] - before[1], pair[1] - before[0]), FIRST, chance, 1 << 40), k
        before = pair
    assert 0 < one - before[1] < one >> 40


@pytest.mark.parametrize("square", [True, False])
def test_words_next_to_a_threshold_and_on_it(square):
    """One unit below a threshold, one above, and on it: then the next words decide, as the digits
    of the exact threshold say.
    """
    table = Narrow(Fraction(5, 2), square).table
    chances = probabilities(table.law)
    for k in range(table.law.size - 1):
        digits = int(mpmath.floor(mpmath.fsum(chances[: k + 1]) * mpmath.mpf(2) ** 191))
        first, second, third = digits >> 128, digits >> 64 & (1 << 64) - 1, digits & (1 << 64) - 1
        for sign in (0, 1):
            cases = {
                (first - 1, 5, 5): k,
                (first + 1, 5, 5): k + 1,
                (first, second - 1, 5): k,
                (first, second + 1, 5): k + 1,
                (first, second, third - 1): k,
                (first, second, third + 1): k + 1,
            }
            for words, value in cases.items():
                bits = Scripted(words[0] << 1 | sign, *words[1:])
                assert table.values(bits, Room(1)).tolist() == [value], (k, words)
                assert len(bits.script) == (
                    2 if words[0] != first else 1 if words[1] != second else 0
                )


def test_a_tie_asks_a_threshold_more_closely_than_it_was_computed():
    """A uniform number that agrees with a threshold for 447 bits, which is further than any table
    goes.
    """
    table = Narrow(Fraction(1), True).table
    digits = int(mpmath.floor(probabilities(table.law)[0] * mpmath.mpf(2) ** 447))
    words = [
        digits >> 384 << 1,
        *(digits >> shift & (1 << 64) - 1 for shift in range(320, -1, -64)),
    ]
    for last, value in ((-1, 0), (1, 1)):
        bits = Scripted(*words[:-1], words[-1] + last)
        assert table.values(bits, Room(1)).tolist() == [value]
        assert not bits.script


@pytest.mark.parametrize("square", [True, False])
def test_the_tail_is_drawn_by_itself(square):
    """All ones lie beyond the table. What is drawn there has the law's own ratios: no value is the
    last one.
    """
    law = Law(Fraction(1, 50), square, folded=True)
    table = integers.LawTable(law)
    word = (1 << 64) - 1
    beyond = table.values(Scripted(*[word] * 50), Room(50))
    assert beyond.min() == law.size
    assert beyond.max() > law.size
    bits = Scripted()
    draws = np.array([law.tail(bits) - law.size for _ in range(4000)])
    ratio = float(weight(law, law.size + 1) / weight(law, law.size))
    expected = [float(weight(law, law.size + k) / weight(law, law.size)) for k in range(200)]
    chance = 1 / sum(expected)
    assert draws.min() == 0
    for k, share in enumerate((chance, chance * ratio)):
        assert abs((draws == k).mean() - share) < 5 * (share / len(draws)) ** 0.5


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("low", [1, 3])
def test_the_staircase_gives_every_value_its_weight(square, low):
    """The law of a wide draw, put together from its tables as the code walks them: block, place,
    side; depth, block, place, kept or not.
    """
    wide = Wide(Fraction(9), square, low)
    law, fine = (
        wide.law,
        Law(Fraction(1, 2 * 81) if square else Fraction(1, 9), square, folded=False),
    )

    def threshold(k: int) -> mpmath.mpf:
        return (
            mpmath.mpf(law.threshold(k, 500)[0]) / mpmath.mpf(2) ** 500 if k >= 0 else mpmath.mpf(0)
        )

    def fallen(k: int) -> mpmath.mpf:
        return (
            mpmath.mpf(wide.falls.number(k)(500)[0]) / mpmath.mpf(2) ** 500
            if k >= 0
            else mpmath.mpf(0)
        )

    ratios = []
    for value in range(-40, 40):
        magnitude = value if value >= 0 else -1 - value
        block = magnitude >> low
        places = 2 ** (low + 1)
        sure = (threshold(block + 1) - threshold(block)) / places
        kept = (
            1
            - mpmath.mpf(wide.depth(Fraction(abs(value), 1 << low))(500)[0]) / mpmath.mpf(2) ** 500
            - (1 - fallen(block))
        )
        ratios.append((sure + threshold(0) * kept / places) / weight(fine, abs(value)))
    assert max(ratios) / min(ratios) - 1 < mpmath.mpf(10) ** -100


@pytest.mark.parametrize("square", [True, False])
def test_depths_on_a_step_and_beyond_the_last(square):
    """Points between two steps: their depth is compared with the steps as exactly as everything
    else.
    """
    wide = Wide(Fraction(100), square, 2)
    edges = wide.falls.edges
    digits = int(mpmath.floor((1 - weight(wide.law, 3)) * mpmath.mpf(2) ** 127))
    assert int(edges[2]) >> 1 == digits >> 64
    for last, block in ((-1, 2), (1, 3)):
        values = {
            wide.between(
                1, Scripted(digits >> 64 << 1, (digits & (1 << 64) - 1) + last, place << 62)
            )[0]
            >> 2
            for place in (0, 1)
        }
        assert block in values
    last = (
        mpmath.log(2) * 63 / real(wide.law.rate)
    )  # where the weight is 2^-63, which is just above the point
    last = int(mpmath.sqrt(last) if square else last)
    assert len(edges) < last
    assert wide.between(1, Scripted((1 << 64) - 2, *[0] * 20))[0] >> 2 == last


def test_steps_that_begin_alike_are_told_apart():
    """Thresholds with the same 63 bits, in a tail say: the search among them is exact."""
    numbers = [Fraction(1, 3) + Fraction(j, 1 << 100) for j in range(3)]

    def number(k: int):
        return lambda precision: (
            (numbers[k].numerator << precision) // numbers[k].denominator,
            -((-numbers[k].numerator << precision) // numbers[k].denominator),
        )

    steps = LawSteps([number(k)(FIRST) for k in range(3)], number)
    assert len(set(steps.edges.tolist())) == 1
    for j in range(4):
        between = Fraction(1, 3) + Fraction(2 * j - 1, 1 << 101)
        digits = (between.numerator << 127) // between.denominator
        assert steps.search(
            np.array([digits >> 64 << 1], np.uint64), Scripted(digits & (1 << 64) - 1)
        ).tolist() == [j]


def test_nothing_is_decided_inside_an_enclosure():
    """A number that is enclosed badly until it is asked for 300 digits: bits are drawn until then,
    and the answer is right.
    """
    third = (1 << 1000) // 3

    def number(precision: int) -> tuple[int, int]:
        return (
            (third >> 1000 - precision, (third >> 1000 - precision) + 1)
            if precision >= 300
            else (0, 1 << precision)
        )

    for off, answer in ((-1, True), (1, False)):
        digits = (third >> 1000 - 320) + off
        uniform = Uniform(
            Scripted(*(digits >> shift & (1 << 64) - 1 for shift in range(256, -1, -64)))
        )
        assert uniform.below(number) is answer
        assert uniform.length == 320


def test_an_enclosure_that_is_too_wide_is_asked_again():
    """A threshold whose rough enclosure straddles a unit of 2^-63 gets its bits from a closer
    one.
    """
    number = Fraction(5, 1 << 63) + Fraction(1, 1 << 150)
    rough = (5 << FIRST - 63, 6 << FIRST - 63)
    close = lambda precision: ((number.numerator << precision) // number.denominator,) * 2  # noqa: E731
    assert integers.first_bits(rough, lambda k: close, 0) == 5


def test_weights_fall_as_the_law_says():
    for law in LAWS[:4]:
        for k, pair in zip(range(8), weights(law, FIRST), strict=False):
            assert encloses(pair, FIRST, weight(law, k), 1 << 20)


def test_all_words_alike_give_values_of_the_table():
    """Zeros and ones, the ends of every table, for every width."""
    for scale in (Fraction(1, 1 << 20), Fraction(1), Fraction(1000), Fraction(1 << 45)):
        for word in (0, 1, (1 << 64) - 2, (1 << 64) - 1):
            assert abs(int(gaussian(1, scale, Scripted(*[word] * 3))[0])) <= 12 * scale + 2
