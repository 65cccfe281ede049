"""What the bits of floating-point noise give away, as attacks that succeed, and exact noise, on
which the same attacks find nothing.

The attacker knows the mechanism and one output, and has to say whether the true answer was 0 or 1
(a count on neighbouring data). Noise of scale 1 leaves much doubt about that; an output that only
one of the two answers can have leaves none.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpfy.core.randomness import Randomness
from dpfy.mechanisms import Bits, gaussian, laplace

DRAWS = 20_000
GRID = 20
"""Exact noise is drawn in units of 2^-20."""


def float_laplace(answer: float, count: int, seed: int, scale: float = 1.0) -> np.ndarray:
    """The textbook's draw: answer - scale sign(u) ln(1 - 2 |u|), u uniform with 53 bits."""
    u = np.random.default_rng(seed).random(count) - 0.5
    u = u[np.abs(u) < 0.5]
    return answer - scale * np.sign(u) * np.log(1 - 2 * np.abs(u))


def exact(draw, answer: int, count: int, seed: int) -> np.ndarray:
    """The same release on a lattice: an integer draw of scale 2^20, added to the answer in units of
    2^-20.
    """
    bits = Bits(Randomness.for_tests(seed), "attack", answer)
    return (draw(count, 1 << GRID, bits) + (answer << GRID)) / 2.0**GRID


def reachable(outputs: np.ndarray, answer: float, scale: float = 1.0) -> np.ndarray:
    """Mironov (2012): which outputs the textbook's draw can have from an answer. 1 - 2 |u| is a
    multiple of 2^-52: try those nearby.
    """
    distance = outputs - answer
    nearest = np.rint(np.exp(-np.abs(distance) / scale) * 2.0**52)
    tries = np.clip(nearest[:, None] + np.arange(-8, 9), 1, 2.0**52) * 2.0**-52
    return (answer - scale * np.sign(distance)[:, None] * np.log(tries) == outputs[:, None]).any(1)


def precise(outputs: np.ndarray, unit: int = 53) -> np.ndarray:
    """Haney et al. (2022): which outputs are finer than 2^-53. Between -1/2 and 1/2 a sum of 1 and
    a float cannot be.
    """
    scaled = outputs * 2.0**unit
    return (np.abs(outputs) < 0.5) & (scaled != np.rint(scaled))


def test_the_set_of_outputs_betrays_floating_laplace_noise():
    """Every output can come from its own answer; half of them cannot come from the neighbour's:
    those are told with certainty.
    """
    for answer in (0.0, 1.0):
        outputs = float_laplace(answer, DRAWS, 1)
        assert reachable(outputs, answer).all()
        assert (~reachable(outputs, 1 - answer)).mean() > 0.25


def test_the_precision_of_outputs_betrays_floating_noise():
    """An output below 1/2 with a bit below 2^-53 had the answer 0: certain, for a good share of the
    outputs, and never wrong.
    """
    normal = np.random.default_rng(2).standard_normal
    for zero, one in (
        (float_laplace(0, DRAWS, 3), float_laplace(1, DRAWS, 4)),
        (normal(DRAWS), 1 + normal(DRAWS)),
    ):
        assert precise(zero).mean() > 0.2
        assert not precise(one).any()


@pytest.mark.parametrize("draw", [laplace, gaussian])
def test_exact_noise_has_the_same_outputs_for_both_answers(draw):
    """Every output lies on the lattice, and so at a whole number of units from either answer; every
    whole number has a weight above zero.

    So no output is impossible for one of them, and none has a finer bit than another.
    """
    for answer in (0, 1):
        outputs = exact(draw, answer, DRAWS, 5)
        for guess in (0, 1):
            units = (outputs - guess) * 2.0**GRID
            assert np.array_equal(units, np.rint(units))
            assert np.abs(units).max() < 40 << GRID  # exp(-800) at the least: none is impossible
        assert not precise(outputs, GRID).any()


def low_bits(outputs: np.ndarray, unit: int) -> np.ndarray:
    """How often each value of the last six bits occurs, among outputs between 0 and 1/2."""
    inside = outputs[(outputs > 0) & (outputs < 0.5)]
    return np.bincount((inside * 2.0**unit).astype(np.int64) % 64, minlength=64)


@pytest.mark.parametrize("draw", [laplace, gaussian])
def test_the_last_bits_of_exact_noise_do_not_depend_on_the_answer(draw):
    """A test that tells the last bits of floating noise apart at once, at the same number of
    outputs, cannot tell those of exact noise.
    """
    drawn = [low_bits(exact(draw, answer, 10 * DRAWS, 6), GRID) for answer in (0, 1)]
    assert stats.chi2_contingency(drawn).pvalue > 1e-4
    floating = [low_bits(float_laplace(answer, 10 * DRAWS, 7), 56) for answer in (0.0, 1.0)]
    floating = [counts + 1 for counts in floating]
    assert stats.chi2_contingency(floating).pvalue < 1e-30


def snapping(
    answer: float, count: int, seed: int, scale: float = 1.0, bound: float = 64.0
) -> np.ndarray:
    """Mironov's (2012) repair of the floating draw: round to a power of two of at least the scale,
    and clamp. For comparison only.
    """
    step = 2.0 ** math.ceil(math.log2(scale))
    noisy = float_laplace(np.clip(answer, -bound, bound), count, seed, scale)
    return np.clip(step * np.rint(noisy / step), -bound, bound)


def test_snapping_withstands_too_but_costs_more():
    """Snapped outputs are multiples of the step for both answers. The price at a scale just above a
    power of two: a fourth more variance (and, for its proof, a larger scale); a lattice of 2^-20
    costs nothing that can be measured.
    """
    scale = 1.01
    for answer in (0.0, 1.0):
        outputs = snapping(answer, DRAWS, 8, scale)
        assert not precise(outputs, 0).any()
    plain = np.mean((float_laplace(0.3, 10 * DRAWS, 9, scale) - 0.3) ** 2)
    assert np.mean((snapping(0.3, 10 * DRAWS, 9, scale) - 0.3) ** 2) > 1.1 * plain
    assert abs(np.mean(exact(laplace, 0, 10 * DRAWS, 9) ** 2) / 2 - 1) < 0.03
