"""Noise in shares: what clients send is bounded, the sum over all has the law that is billed, and
few bits are enough.

Statistical tests accept the truth and reject a missing and a doubled share; seeds are fixed, and
the false-alarm rate is 1e-4 each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from scipy.special import ive

from dpfy import accounting
from dpfy.accounting import calibrate
from dpfy.core import events as ev
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.federated.shares import (
    Client,
    MaskedSum,
    Shares,
    SharingScheme,
    TooFew,
    TrustedSum,
    choose,
)
from dpfy.federated.shares.scheme import Rotation, hadamard, length, rounded
from dpfy.mechanisms.discrete import skellam
from dpfy.mechanisms.exact import Bits
from dpfy.noise.shares import grown, padded

SECRET = Randomness.for_tests(7)
ZERO = Adjacency.ZERO_OUT
FIELDS = {
    "dimension": 700,
    "clip": 2.0,
    "clients": 20,
    "least": 20,
    "bits": 16,
    "step": 0.02,
    "share": 3.0,
    "law": "discrete-gaussian",
}


def made(**changes: object) -> SharingScheme:
    """A scheme with shares of this size, and steps of this length."""
    f = FIELDS | changes
    shares = Shares(
        f["dimension"], f["clients"], f["least"], f["bits"], f["clip"] / f["step"], f["law"], 0
    )
    more = 4 if f["law"] == "discrete-gaussian" else 0
    return SharingScheme(
        shares,
        f["clip"],
        math.sqrt(max(f["least"] * f["share"] ** 2 - more, 1e-3) / shares.squared),
    )


SMALL = made()


def summed(
    scheme: SharingScheme, vectors: np.ndarray, round: int = 0, secret: Randomness = SECRET
) -> np.ndarray:
    """The centred sum of the messages of all clients."""
    messages = {i: scheme.encode(v, secret, i, round) for i, v in enumerate(vectors)}
    total = TrustedSum().sum(messages, bits=scheme.bits, least=1, round=round).total
    return scheme.centred(total)


# --- rotation
# ----------------------------------------------------------------------------------------------------------------------------  # noqa: E501


@pytest.mark.parametrize("size", [1, 2, 8, 32, 64, 2048, 2**15])
def test_the_transform_is_its_own_inverse_and_keeps_lengths(size: int) -> None:
    x = np.random.default_rng(1).normal(size=(3, size))
    y = hadamard(x)
    assert np.allclose(hadamard(y), x, atol=1e-10)
    assert np.allclose(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
    if size <= 64:
        whole = np.array(
            [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
        ) / math.sqrt(size)
        assert np.allclose(y, x @ whole)


def test_rotations_spread_one_coordinate_over_all_and_differ_from_round_to_round() -> None:
    x = np.zeros(1000)
    x[3] = 1.0
    first, second = (Rotation(5, r, 1000) for r in (0, 1))
    assert np.allclose(np.abs(first.forward(x)), 1 / math.sqrt(1024))
    assert np.allclose(first.inverse(first.forward(x)), x)
    assert not np.allclose(first.forward(x + 1), second.forward(x + 1))
    assert padded(1000) == 1024
    assert padded(1024) == 1024
    assert padded(1) == 1


# --- rounding
# ----------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_rounded_vectors_keep_to_the_length_that_is_billed_whatever_they_hold() -> None:
    rng = np.random.default_rng(2)
    for k in range(200):
        size, most = int(2 ** rng.integers(0, 9)), float(np.exp(rng.uniform(-2, 5)))
        squared = grown(most, size)
        x = rng.normal(size=size) ** 3
        x *= most * rng.choice([0.0, 0.3, 1.0]) / max(np.linalg.norm(x), 1e-300)
        whole = rounded(x, squared, Bits(SECRET, "rounding", k))
        assert length(whole) <= squared
        assert np.abs(whole - x).max() < 1
    for bad in (np.nan, np.inf, 1e300):
        x[0] = bad
        assert not rounded(x, squared, Bits(SECRET, "rounding", 999)).any()


def test_rounding_is_unbiased_and_seldom_tries_again() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=512)
    x *= 40 / np.linalg.norm(x)
    many = np.array([rounded(x, grown(40.0, 512), Bits(SECRET, "bias", k)) for k in range(2000)])
    off = (many.mean(0) - x) / np.sqrt(np.maximum(many.var(0), 1e-3) / len(many))
    assert np.abs(off).max() < 5
    assert float(np.mean(off**2)) == pytest.approx(1, abs=0.3)


def test_a_bound_that_no_rounding_meets_falls_back_to_zero_growth() -> None:
    x = np.full(64, 0.5)
    whole = rounded(
        x, 16, Bits(SECRET, "fallback", 0)
    )  # its length is 4, every rounding up is longer than it may be
    assert length(whole) <= 16


# --- Skellam
# -----------------------------------------------------------------------------------------------------------------------------  # noqa: E501


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(9, 2), Fraction(60), Fraction(9001)])
def test_skellam_numbers_have_their_law(variance: Fraction) -> None:
    drawn = skellam(20_000, variance, Bits(SECRET, "skellam", int(variance * 6)))
    reach = math.ceil(9 * math.sqrt(variance)) + 6

    def fits(v: float) -> float:
        edges = (
            np.unique(
                np.round(np.sqrt(float(variance)) * stats.norm.ppf(np.linspace(0, 1, 22)[1:-1]))
            )
            + 0.5
        )
        cells = np.searchsorted(edges, drawn)
        law = ive(np.abs(np.arange(-reach, reach + 1)), v)
        chances = np.bincount(
            np.searchsorted(edges, np.arange(-reach, reach + 1)), law, len(edges) + 1
        )
        expected = np.maximum(chances / chances.sum() * len(drawn), 1e-9)
        return float(
            stats.chi2.sf(
                ((np.bincount(cells, minlength=len(expected)) - expected) ** 2 / expected).sum(),
                len(expected) - 1,
            )
        )

    assert fits(float(variance)) > 1e-4
    assert fits(float(variance) * 1.15) < 1e-6
    assert fits(float(variance) / 1.15) < 1e-6


# --- clients and server
# ------------------------------------------------------------------------------------------------------------------


def test_sums_come_back() -> None:
    rng = np.random.default_rng(4)
    vectors = rng.normal(size=(20, 700)) / 20
    fine = made(bits=40, step=1e-6, share=100)
    total = (
        TrustedSum()
        .sum(
            {i: fine.encode(v, SECRET, i, 3) for i, v in enumerate(vectors)},
            bits=40,
            least=20,
            round=3,
        )
        .total
    )
    assert np.abs(fine.decode(total, 3) - vectors.sum(0)).max() < 4e-3


def test_what_a_client_sends_is_bounded_and_noisy_whatever_it_has() -> None:
    rng = np.random.default_rng(5)
    spoilt = rng.normal(size=700)
    for k, vector in enumerate(
        (
            rng.normal(size=700) * 1e200,
            spoilt * 0,
            np.full(700, np.nan),
            np.full(700, np.inf),
            spoilt,
        )
    ):
        whole = SMALL.whole(vector, SECRET, k, 0)
        assert length(whole) <= SMALL.shares.squared
        message = SMALL.encode(vector, SECRET, k, 0)
        assert message.dtype == np.uint64
        assert int(message.max()) < 1 << 16
        noise = SMALL.centred((message - SMALL.wrapped(whole)) & np.uint64((1 << 16) - 1))
        assert 2.5 < float(noise.std()) < 3.5
    near, far = (SMALL.whole(k * spoilt, SECRET, 0, 0) for k in (2 / np.linalg.norm(spoilt), 1e9))
    assert np.abs(near - far).max() <= 1, "a long vector is clipped, not lost"
    assert length(far) > 0.9 * 100**2
    for wrong in (np.zeros(699), np.zeros(1024)):
        with pytest.raises(InvalidInput, match="must have 700"):
            SMALL.encode(wrong, SECRET, 0, 0)


def test_messages_are_functions_of_client_and_round() -> None:
    x = np.ones(700)
    again = [SMALL.encode(x, SECRET, 1, 2) for _ in range(2)]
    assert np.array_equal(*again)
    assert not np.array_equal(SMALL.drawn(SECRET, 1, 2), SMALL.drawn(SECRET, 1, 3)), (
        "two rounds share noise"
    )
    elsewhere = replace(SMALL, shares=replace(SMALL.shares, rotation=9))
    assert not np.array_equal(SMALL.drawn(SECRET, 1, 2), elsewhere.drawn(SECRET, 1, 2)), (
        "two plans share noise"
    )
    for other in (
        SMALL.encode(x, SECRET, 2, 2),
        SMALL.encode(x, SECRET, 1, 3),
        SMALL.encode(x, Randomness.for_tests(8), 1, 2),
    ):
        assert not np.array_equal(again[0], other)


# --- the law of the sum
# ------------------------------------------------------------------------------------------------------------------

LAW = made(dimension=2**12, clip=1.0, share=2.5)


def law_of(kind: str, shares: int) -> np.ndarray:
    """The law of the sum of so many shares of LAW, from -200 to 200."""
    x = np.arange(-200, 201)
    if kind == "skellam":
        return ive(np.abs(x), shares * LAW.share**2)
    one = np.exp(-(np.arange(-40, 41.0) ** 2) / (2 * LAW.share**2))
    one /= one.sum()
    total = one
    for _ in range(shares - 1):
        total = np.convolve(total, one)
    return total[len(total) // 2 - 200 : len(total) // 2 + 201]


def fit(drawn: np.ndarray, law: np.ndarray) -> float:
    """The p-value of centred sums against a law: by cells of the law, and by the variance, which
    decides between numbers of shares.
    """
    edges = np.arange(-28, 29, 4) + 0.5
    place = np.searchsorted(edges, np.arange(-200, 201))
    expected = np.bincount(place, law, len(edges) + 1) * drawn.size
    found = np.bincount(np.searchsorted(edges, drawn), minlength=len(edges) + 1)
    cells = float(stats.chi2.sf(((found - expected) ** 2 / expected).sum(), len(edges)))
    variance = float((law * np.arange(-200, 201) ** 2).sum())
    score = (float(np.mean(drawn.astype(float) ** 2)) / variance - 1) * math.sqrt(drawn.size / 2)
    return 2 * min(cells, 2 * float(stats.norm.sf(abs(score))))


@pytest.mark.parametrize("kind", ["discrete-gaussian", "skellam"])
def test_the_sum_has_the_law_that_is_billed_and_no_other(kind: str) -> None:
    scheme, blank = made(dimension=2**12, clip=1.0, share=2.5, law=kind), np.zeros((21, 2**12))
    drawn = np.concatenate([summed(scheme, blank[:20], r) for r in range(8)])
    assert fit(drawn, law_of(kind, 20)) > 1e-4
    assert fit(drawn, law_of(kind, 19)) < 1e-6, "a missing share would not be noticed"
    assert fit(drawn, law_of(kind, 21)) < 1e-6, "a doubled share would not be noticed"
    forgotten = np.concatenate([summed(scheme, blank[:19], r) for r in range(8)])
    doubled = np.concatenate([summed(scheme, blank[:21], r) for r in range(8)])
    for wrong in (forgotten, doubled):
        assert fit(wrong, law_of(kind, 20)) < 1e-6
    event = scheme.event
    assert (event.share, event.shares) == (pytest.approx(2.5), 20)


# --- bits and error
# ----------------------------------------------------------------------------------------------------------------------


def error_ratio(
    bits: int, epsilon: float, clients: int, dimension: int, seed: int
) -> tuple[float, SharingScheme]:
    """Measured mean squared error of the mean over that of central Gaussian noise at the same
    epsilon, by the tight accountant.
    """
    scheme = choose(
        dimension=dimension,
        clip=1.0,
        clients=clients,
        bits=bits,
        epsilon=epsilon,
        delta=1e-6,
        rotation=seed,
    )
    central = calibrate.noise(ev.Gaussian, epsilon, 1e-6)
    rng = np.random.default_rng(seed)
    common = rng.normal(size=dimension)
    common /= np.linalg.norm(common)
    total, truth = np.zeros(scheme.shares.coordinates, np.uint64), np.zeros(dimension)
    for client in range(clients):
        vector = common + 0.2 * rng.normal(size=dimension) / math.sqrt(dimension)
        vector /= np.linalg.norm(vector)
        total += scheme.encode(vector, SECRET, client, 0)
        truth += vector
    found = scheme.decode(total & np.uint64((1 << bits) - 1), 0)
    return float(np.mean((found - truth) ** 2)) / central**2, scheme


@pytest.mark.parametrize("epsilon", [1.0, pytest.param(8.0, marks=pytest.mark.slow)])
def test_sixteen_bits_cost_less_than_five_in_a_hundred(epsilon: float) -> None:
    """1,000 clients whose vectors nearly agree, the hardest case for the range; 2^14 coordinates:
    the measure is within 1.5%.
    """
    ratio, scheme = error_ratio(16, epsilon, 1000, 2**14, 11)
    assert ratio < 1.05
    spread = math.sqrt(2 / 2**14)
    assert (
        abs(ratio / (scheme.stddev / calibrate.noise(ev.Gaussian, epsilon, 1e-6)) ** 2 - 1)
        < 4 * spread
    )
    assert scheme.overflow <= 1e-6
    assert accounting.epsilon(scheme.event, 1e-6, adjacency=ZERO) <= epsilon


def test_error_falls_with_bits_and_bills_keep_to_the_target() -> None:
    about = {"dimension": 2**14, "clip": 0.7, "clients": 1000, "delta": 1e-6, "rotation": 3}
    for noise in ("discrete-gaussian", "skellam"):
        found = [
            choose(**about, bits=bits, epsilon=2.0, rounds=20, law=noise)
            for bits in (15, 16, 18, 20)
        ]
        assert all(a.stddev > b.stddev for a, b in itertools.pairwise(found))
        for scheme in found:
            assert (
                1.97
                < accounting.epsilon(ev.Repeated(scheme.event, 20), 1e-6, adjacency=ZERO)
                <= 2.0
            )
            assert scheme.overflow <= 1e-6
    with pytest.raises(Unsupported, match="use more bits"):
        choose(**about, bits=10, epsilon=0.1)


@pytest.mark.parametrize("multiplier", [0.5, 2.0, 6.0])
def test_the_least_survivors_make_the_gaussian_of_a_multiplier(multiplier: float) -> None:
    shares = Shares(dimension=5000, clients=300, least=200, bits=24, scaled=900.0)
    found = accounting.epsilon(shares.event(multiplier), 1e-6, adjacency=ZERO)
    assert found == pytest.approx(
        accounting.epsilon(ev.Gaussian(multiplier), 1e-6, adjacency=ZERO), rel=1e-4
    )


def test_fewer_survivors_need_larger_shares() -> None:
    about = {
        "dimension": 2**10,
        "clip": 1.0,
        "clients": 100,
        "bits": 20,
        "epsilon": 1.0,
        "delta": 1e-6,
        "rotation": 3,
    }
    all_of_them, some = choose(**about), choose(**about, least=70)
    assert some.share == pytest.approx(all_of_them.share * math.sqrt(100 / 70), rel=0.2)
    assert some.share > all_of_them.share
    for scheme in (all_of_them, some):
        assert accounting.epsilon(scheme.event, 1e-6, adjacency=ZERO) <= 1.0
        assert (
            accounting.epsilon(replace(scheme.event, shares=scheme.least - 1), 1e-6, adjacency=ZERO)
            > 1.0
        )
    with pytest.raises(InvalidInput, match="least"):
        choose(**about, least=101)


def test_wrap_around_is_as_seldom_as_stated() -> None:
    """Ranges so small that sums leave them now and then: no more often than the bound says; and far
    from it, never.
    """
    scheme = made(dimension=2**12, clip=1.0, bits=8, share=4.0, step=0.1)
    far = (
        np.concatenate(
            [np.abs(sum(scheme.drawn(SECRET, c, r) for c in range(20))) for r in range(4)]
        )
        > 127
    )
    wraps = float(far.reshape(4, -1).any(axis=1).mean())
    assert wraps <= scheme.overflow
    spread = (20 * 10.0) ** 2 / 4096 + 20 * scheme.share**2
    assert scheme.overflow == pytest.approx(
        2 * 4096 * math.exp(-((127 - 20) ** 2) / (2 * spread)), rel=1e-9
    )
    assert 1e-6 < scheme.overflow < 0.1
    bounds = [
        replace(scheme.shares, bits=bits).overflow(scheme.share) for bits in (4, *range(8, 14))
    ]
    assert bounds[0] == 1.0
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 1e-9


# --- secure sums
# -------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def messages(clients: int, bits: int = 16) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(6)
    return {i: rng.integers(0, 1 << bits, 64, dtype=np.uint64) for i in range(clients)}


def test_masks_cancel_and_hide() -> None:
    held, secure = messages(6), MaskedSum(range(6), SECRET)
    plain = TrustedSum().sum(held, bits=16, least=6, round=1)
    assert np.array_equal(secure.sum(held, bits=16, least=6, round=1).total, plain.total)
    for client, message in held.items():
        seen = secure.masked(client, message, 16, 1)
        assert not np.array_equal(seen, message)
        assert not np.array_equal(seen, secure.masked(client, message, 16, 2))


def test_clients_that_vanish_are_left_out_or_the_round_ends() -> None:
    held, secure = messages(9), MaskedSum(range(9), SECRET)
    left = {i: m for i, m in held.items() if i not in (2, 5)}
    found = secure.sum(left, bits=16, least=7, round=0)
    assert found.survivors == frozenset(left)
    assert np.array_equal(found.total, TrustedSum().sum(left, bits=16, least=1, round=0).total)
    for aggregator in (secure, TrustedSum()):
        with pytest.raises(TooFew, match="nothing of it was released"):
            aggregator.sum(left, bits=16, least=8, round=0)
        with pytest.raises(TooFew):
            aggregator.sum({}, bits=16, least=1, round=0)


def test_messages_that_are_none_are_refused() -> None:
    held = messages(3)
    with pytest.raises(InvalidInput, match="agreed on no masks"):
        MaskedSum(range(2), SECRET).unmasked(held, bits=16, least=2, round=0)
    for wrong in (
        held | {1: held[1][:5]},
        held | {1: held[1] + np.uint64(1 << 16)},
        held | {1: held[1].astype(np.int64)},
    ):
        with pytest.raises(InvalidInput):
            TrustedSum().sum(wrong, bits=16, least=2, round=0)


BAD = [
    ("bits", 3),
    ("bits", 60),
    ("least", 21),
    ("least", 0),
    ("scaled", 0.0),
    ("scaled", 1e12),
    ("law", "laplace"),
    ("dimension", 0),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_shares_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        replace(SMALL.shares, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("clip", 0.0), ("clip", math.nan), ("noise_multiplier", 0.0), ("noise_multiplier", -1.0)],
)
def test_bad_schemes_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        replace(SMALL, **{field: value})


def test_a_client_answers_a_round_once() -> None:
    """The same noise on two vectors would show their difference; a second noise on one vector would
    be a second release.
    """
    client, x = Client(SMALL, 3, SECRET), np.ones(700)
    first = client.message(x, 4)
    assert np.array_equal(client.message(-x, 4), first)
    assert not np.array_equal(client.message(x, 5), first)
    with pytest.raises(InvalidInput, match="round"):
        client.message(x, 4)
    fresh = Client(SMALL, 3)
    assert not np.array_equal(fresh.message(x, 4), first)
