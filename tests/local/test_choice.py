"""Which protocol is best, and what a shuffler that is declared is worth."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from dpfy import accounting
from dpfy.cli.app import app
from dpfy.core import events
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency
from dpfy.local import choice
from dpfy.local.frequencies import HadamardResponse, KaryResponse, LocalHashing, UnaryEncoding

REPLACE = Adjacency.REPLACE_ONE


def rare(protocol) -> float:
    return float(protocol.variances(np.append(np.zeros(protocol.buckets - 1), 1.0))[0])


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0, 4.0])
def test_variances_of_the_papers(epsilon):
    """Of a value that nobody has (Wang et al. 2017, table 1; Acharya et al. 2019, in one block)."""
    e, half, buckets = math.exp(epsilon), math.exp(epsilon / 2), 50
    assert rare(KaryResponse(epsilon, buckets)) == pytest.approx(
        (e + buckets - 2) / (e - 1) ** 2, rel=1e-9
    )
    assert rare(UnaryEncoding(epsilon, buckets, False)) == pytest.approx(
        half / (half - 1) ** 2, rel=1e-9
    )
    assert rare(UnaryEncoding(epsilon, buckets)) == pytest.approx(4 * e / (e - 1) ** 2, rel=1e-9)
    assert rare(LocalHashing(epsilon, buckets)) == pytest.approx(4 * e / (e - 1) ** 2, rel=0.03)
    assert rare(LocalHashing(epsilon, buckets, 2)) == pytest.approx(
        (e + 1) ** 2 / (e - 1) ** 2, rel=1e-9
    )
    one_block = HadamardResponse(epsilon, buckets)._variances(
        (1, 64), np.append(np.zeros(buckets - 1), 1.0)
    )[0]
    assert one_block == pytest.approx((e + 1) ** 2 / (e - 1) ** 2, rel=1e-9)


def test_few_values_are_best_served_by_k_ary_response():
    """The crossing with optimised unary encoding is at 3 exp(epsilon) + 2 values (Wang et al.
    2017).
    """
    for epsilon in (0.5, 1.0, 2.0):
        edge = 3 * math.exp(epsilon) + 2
        for buckets in range(2, 60):
            pair = (KaryResponse(epsilon, buckets), UnaryEncoding(epsilon, buckets))
            assert (rare(pair[0]) < rare(pair[1])) == (buckets < edge)
    assert isinstance(choice.best(1.0, 4), KaryResponse)
    assert isinstance(choice.best(1.0, 100), UnaryEncoding | LocalHashing)


def test_best_is_an_exhaustive_search():
    rng = np.random.default_rng(0)
    for _ in range(15):
        epsilon, buckets = math.exp(rng.uniform(-2, 2)), int(rng.integers(2, 200))
        even = np.full(buckets, 1 / buckets)
        errors = [
            float(make(epsilon, buckets).variances(even).mean()) for make in choice.MAKERS.values()
        ]
        found = choice.compare(epsilon, buckets, 100)
        assert found[0].even == pytest.approx(math.sqrt(min(errors) / 100), rel=1e-9)
        assert all(a.even <= b.even * (1 + 1e-12) for a, b in itertools.pairwise(found))


def clones_2021(epsilon0: float, records: int, delta: float) -> float:
    """The numerical bound of Feldman, McMillan & Talwar 2021, Theorem 3.1 and appendix E, summed up
    here by its definition.

    C of n - 1 others are clones, each with chance exp(-epsilon0), and show a fair coin; the unit's
    own report shows one side with odds exp(epsilon0).
    """
    from scipy.stats import binom

    e = math.exp(epsilon0)
    clones = np.arange(
        int(binom.ppf(1e-12, records - 1, 1 / e)),
        int(binom.ppf(1 - 1e-12, records - 1, 1 / e)) + 1,
        7,
    )
    weights = np.diff(np.append(binom.cdf(clones - 1, records - 1, 1 / e), 1.0))

    def left(epsilon: float) -> float:
        total = 0.0
        for count, weight in zip(clones.tolist(), weights.tolist(), strict=True):
            a = np.arange(count + 2)
            mass, before = binom.pmf(a, count, 0.5), binom.pmf(a - 1, count, 0.5)
            p, q = (e * before + mass) / (e + 1), (before + e * mass) / (e + 1)
            total += weight * float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())
        return total

    low, high = 0.0, epsilon0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if left(middle) <= delta else (middle, high)
    return high


def test_shuffling_has_the_published_numbers():
    """100,000 reports of 4-private randomisers at delta 1e-6: between 0.1675 and 0.1728 by the
    numerical bound, 0.5378 by the formula.
    """
    published = clones_2021(4.0, 100_000, 1e-6)
    assert 0.1675385 <= published <= 0.1727906
    ours = accounting.curve(events.Shuffled(4.0, 100_000), adjacency=REPLACE).epsilon(1e-6)
    assert ours == pytest.approx(
        0.1182, rel=1e-3
    )  # with the clones of 2023, of which there are twice as many
    assert ours < published


def test_without_a_shuffler_nothing_is_amplified():
    assert [row.protocol.epsilon for row in choice.compare(1.0, 10, 10**6)] == [1.0] * 5
    found = choice.compare_shuffled(1.0, 1e-6, 10, 10_000)
    for row in found[:2]:
        answers = 10 if isinstance(row.protocol, KaryResponse) else 0
        left = accounting.curve(
            events.Shuffled(row.protocol.epsilon, 10_000, answers), adjacency=REPLACE
        ).epsilon(1e-6)
        assert 0.995 < left <= 1.0
        assert row.protocol.epsilon > 4
    assert choice.local_epsilon(1.0, 1e-6, 1) == pytest.approx(1.0, rel=1e-3)


def test_command():
    answer = CliRunner().invoke(
        app, ["plan", "compare", "local", "--epsilon", "1", "--values", "20", "--json"]
    )
    said = json.loads(answer.stdout)
    assert said["best"] == said["protocols"][0]["protocol"] == "optimised unary encoding"
    assert said["trusted"] == "nobody but one's own device"
    shuffled = [
        "plan",
        "compare",
        "local",
        "--epsilon",
        "1",
        "--values",
        "4",
        "--reports",
        "500",
        "--delta",
        "1e-6",
    ]
    said = json.loads(
        CliRunner().invoke(app, [*shuffled, "--shuffler", "the mix net", "--json"]).stdout
    )
    assert "the mix net" in said["trusted"]
    assert said["protocols"][0]["epsilon"] > 1
    with pytest.raises(InvalidInput, match="only with it"):
        CliRunner().invoke(app, shuffled, catch_exceptions=False)
