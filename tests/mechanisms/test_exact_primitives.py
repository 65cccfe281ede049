"""Exact coins and choices against their probabilities, by every string of bits of a small
length.
"""

from __future__ import annotations

import ast
import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import dpfy.mechanisms
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.mechanisms import (
    Bits,
    below,
    bernoulli,
    bernoulli_exp,
    choose,
    coins,
    geometric,
    permutation,
    permute_and_flip,
    uniform,
)


class Exhausted(Exception):
    """The string has no more bits."""


class Listed(Bits):
    """Bits from a string. A word has `top` of them and then zeros: what looks at no more of a word
    cannot tell.
    """

    def __init__(self, string: str, grain: int, top: int) -> None:
        self.string, self.grain, self.top = string, grain, top

    def take(self, count: int) -> int:
        if count > len(self.string):
            raise Exhausted
        begin, self.string = self.string[:count], self.string[count:]
        return int(begin or "0", 2)

    def words(self, count: int) -> np.ndarray:
        return np.array([self.take(self.top) << (64 - self.top) for _ in range(count)], np.uint64)


def distribution(
    draw: Callable[[Bits], object], length: int, grain: int = 1, top: int = 2
) -> tuple[dict[object, Fraction], Fraction]:
    """What each string of at most `length` bits leads to, and the probability of those that are too
    short.
    """
    found: dict[object, Fraction] = defaultdict(Fraction)
    open_, waiting = Fraction(0), [""]
    while waiting:
        string = waiting.pop()
        bits = Listed(string, grain, top)
        try:
            result = draw(bits)
        except Exhausted:
            if len(string) == length:
                open_ += Fraction(1, 2**length)
            else:
                waiting += [string + "0", string + "1"]
            continue
        assert not bits.string
        found[result] += Fraction(1, 2 ** len(string))
    return found, open_


def check(
    draw: Callable[[Bits], object],
    truth: dict[object, float],
    length: int,
    most_open: float = 0.1,
    **how: int,
) -> None:
    found, open_ = distribution(draw, length, **how)
    assert sum(found.values()) + open_ == 1
    assert open_ <= most_open
    for result, chance in found.items():
        assert float(chance) - 1e-12 <= truth[result] <= float(chance + open_) + 1e-12, result


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_below(n):
    check(lambda bits: below(n, bits), dict.fromkeys(range(n), 1 / n), 12)


@pytest.mark.parametrize("p", [Fraction(0), Fraction(1, 3), Fraction(3, 4), Fraction(1)])
@pytest.mark.parametrize("grain", [1, 3])
def test_bernoulli(p, grain):
    check(lambda bits: bernoulli(p, bits), {True: float(p), False: 1 - float(p)}, 12, grain=grain)


@pytest.mark.parametrize(
    "gamma",
    [Fraction(0), Fraction(1, 100), Fraction(2, 3), Fraction(1), Fraction(7, 2), Fraction(40)],
)
@pytest.mark.parametrize("grain", [1, 4])
def test_bernoulli_exp(gamma, grain):
    p = math.exp(-gamma)
    check(lambda bits: bernoulli_exp(gamma, bits), {True: p, False: 1 - p}, 12, 0.01, grain=grain)


@pytest.mark.parametrize("gamma", [Fraction(1, 2), Fraction(2, 3), Fraction(2)])
def test_geometric(gamma):
    truth = {k: math.exp(-gamma * k) * (1 - math.exp(-gamma)) for k in range(100)}
    check(lambda bits: geometric(gamma, bits), truth, 15, 0.12)


@pytest.mark.parametrize(
    "exponents", [[0], [0, 1], [3, 3, 4], [Fraction(1, 2), 0, Fraction(4, 3)]], ids=str
)
def test_choose(exponents):
    least = min(exponents)
    weights = [math.exp(least - e) for e in exponents]
    check(
        lambda bits: choose(exponents, bits),
        {i: w / sum(weights) for i, w in enumerate(weights)},
        14,
        0.15,
    )


def flipped(weights: list[float]) -> dict[int, float]:
    """Permute-and-flip by its definition: over all orders."""
    from itertools import permutations

    found = dict.fromkeys(range(len(weights)), 0.0)
    for order in permutations(range(len(weights))):
        chance = 1 / math.factorial(len(weights))
        for i in order:
            found[i] += chance * weights[i]
            chance *= 1 - weights[i]
    return found


@pytest.mark.parametrize("exponents", [[0], [0, 0], [0, 1], [2, 0]], ids=str)
def test_permute_and_flip(exponents):
    truth = flipped([math.exp(-e) for e in exponents])
    check(lambda bits: permute_and_flip(exponents, bits), truth, 14, 0.3)


def test_permutation_is_uniform_also_where_keys_are_equal():
    check(
        lambda bits: tuple(permutation(3, bits).tolist()),
        defaultdict(lambda: 1 / 6),
        14,
        0.1,
        top=1,
    )


def test_uniform_integers():
    check(lambda bits: tuple(uniform(2, 3, bits).tolist()), defaultdict(lambda: 1 / 9), 14, 0.05)


def test_coins_are_settled_where_a_word_agrees_with_the_probability():
    class Ties(Bits):
        def __init__(self, rest: int) -> None:
            self.rest = rest

        def words(self, count: int) -> np.ndarray:
            return np.array([(1 << 64) // 3 + j for j in (-1, 0, 1)], np.uint64)

        def take(self, count: int) -> int:
            return self.rest

    third = Fraction(1, 3)
    assert coins(3, third, Ties((1 << 64) // 3 - 1)).tolist() == [True, True, False]
    assert coins(3, third, Ties((1 << 64) // 3 + 1)).tolist() == [True, False, False]
    assert coins(3, 1, Ties(0)).all()
    assert not coins(3, 0, Ties(0)).any()


def fresh(step: int = 0) -> Bits:
    return Bits(Randomness.for_tests(5), "primitives", step)


def test_many_candidates():
    """Of 10^5 candidates the far ones are never chosen, the near ones as often as they should be;
    both routes to integers agree.
    """
    exponents = np.full(10**5, 10**12)
    exponents[[17, 99_999]] = [5, 6]
    bits = fresh()
    share = np.mean([choose(exponents, bits) == 17 for _ in range(300)])
    assert abs(share - 1 / (1 + math.exp(-1))) < 0.13
    assert {permute_and_flip(exponents, bits) for _ in range(30)} == {17, 99_999}
    plain, wide = (
        [choose(list(e), fresh(step), 7) for step in range(40)]
        for e in ((3, 9, 1), (3 + 2**70, 9 + 2**70, 1 + 2**70))
    )
    assert plain == wide


def test_words_come_in_order_however_they_are_taken():
    whole = fresh().words(1000)
    parts = fresh()
    sizes = [0, 1, 3, 127, 0, 130, 200, 1, 538]
    assert np.array_equal(np.concatenate([parts.words(size) for size in sizes]), whole)
    one = fresh()
    assert [one.take(64) for _ in range(300)] == whole[:300].tolist()
    assert len(set(whole.tolist())) == 1000
    assert not np.array_equal(fresh(1).words(1000), whole)
    assert fresh().take(0) == 0
    assert fresh().take(70) == (int(whole[0]) << 64 | int(whole[1])) >> 58


def test_bits_are_not_copied():
    for again in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(Unsupported):
            again(fresh())


WRONG = [0.5, float("nan"), "1/2", None, True, np.float64(0.5), 1j, [1]]


@pytest.mark.parametrize(
    "wrong",
    [*WRONG, -1, Fraction(-1, 3), 1 << 5000, Fraction(1, 1 << 5000)],
    ids=lambda w: repr(w)[:20],
)
def test_what_is_no_fraction_is_refused(wrong):
    for call in (bernoulli, bernoulli_exp, geometric):
        with pytest.raises(InvalidInput):
            call(wrong, fresh())
    with pytest.raises(InvalidInput):
        coins(3, wrong, fresh())


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [[1, 2]],
        [0.5, 1],
        ["a"],
        [None, 1],
        [True, False],
        np.array([1.0]),
        3,
        [1, 2**5000],
        [Fraction(1, 3), 0.1],
    ],
    ids=lambda w: repr(w)[:20],
)
def test_exponents_that_are_refused_are_not_shown(wrong):
    for call in (choose, permute_and_flip):
        with pytest.raises(InvalidInput) as error:
            call(wrong, fresh())
        assert "0.5" not in str(error.value)


def test_other_bad_input():
    tests = Randomness.for_tests(1)
    calls = [
        lambda: below(0, fresh()),
        lambda: below(2.0, fresh()),
        lambda: geometric(0, fresh()),
        lambda: bernoulli(2, fresh()),
        lambda: choose([1], fresh(), 0),
        lambda: uniform(2, 0, fresh()),
        lambda: uniform(-1, 2, fresh()),
        lambda: fresh().words(-1),
        lambda: permutation(-1, fresh()),
        lambda: Bits(tests, "", 0),
        lambda: Bits(tests, "a", -1),
    ]
    for call in calls:
        with pytest.raises(InvalidInput):
            call()


def test_no_float_in_any_decision():
    """The exact files, and what chooses among candidates, hold no float, no true division of floats
    and no function of them.
    """
    folder = Path(dpfy.mechanisms.__file__).parent
    whole = {n: ast.parse((folder / f"{n}.py").read_text()) for n in ("exact", "integers")}
    deciding = {"choose", "permute_and_flip", "permutation", "Weights", "_common"}
    choice = ast.parse((folder / "choice.py").read_text())
    parts = [node for node in choice.body if getattr(node, "name", "") in deciding]
    assert len(parts) == len(deciding)
    for name, tree in [*whole.items(), *(("choice", part) for part in parts)]:
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), (
                name,
                node.lineno,
            )
            word = (
                node.attr
                if isinstance(node, ast.Attribute)
                else node.id
                if isinstance(node, ast.Name)
                else ""
            )
            assert word not in {
                "float",
                "float64",
                "float32",
                "log",
                "sqrt",
                "random",
                "log2",
                "random_sample",
                "default_rng",
            }, (
                name,
                word,
            )
