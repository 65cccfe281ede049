"""Metric privacy of words: its ratio, its laws, its card, and that no epsilon is ever made of
it.
"""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

import dpfy
from dpfy import accounting
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.mechanisms.exact import Bits
from dpfy.runs.run import Run
from dpfy_lab.metric_text.embedding import Embedding
from dpfy_lab.metric_text.words import CHOICE, FINE, NOISE, MetricText, MetricWords, replaced

LINE = Embedding(("here", "near", "far"), np.array([[0.0], [1.0], [3.0]]), "a line")


def bits(step=0):
    return Bits(Randomness.for_tests(7), "words", step)


def test_noise_on_a_line_has_the_chances_of_laplace_noise():
    eta, count = 1.3, 40_000
    for place, word in enumerate(LINE.words):
        at = float(LINE.vectors[place, 0])
        edges = stats.laplace.cdf([-math.inf, 0.5, 2.0, math.inf], loc=at, scale=1 / eta)
        seen = MetricWords(eta, LINE).draw([word] * count, bits(place))
        counts = [seen.count(other) for other in LINE.words]
        assert stats.chisquare(counts, np.diff(edges) * count).pvalue > 1e-4
        wrong = (
            np.diff(stats.laplace.cdf([-math.inf, 0.5, 2.0, math.inf], loc=at, scale=1.5 / eta))
            * count
        )
        assert stats.chisquare(counts, wrong).pvalue < 1e-9  # it would be seen
    chances = [
        np.diff(stats.laplace.cdf([-math.inf, 0.5, 2.0, math.inf], loc=x, scale=1 / eta))
        for x in LINE.vectors[:, 0]
    ]
    for (i, p), (j, q) in itertools.permutations(enumerate(chances), 2):
        assert (np.log(p / q) <= eta * abs(LINE.vectors[i, 0] - LINE.vectors[j, 0]) + 1e-12).all()


@pytest.mark.parametrize("dimension", [2, 50])
def test_noise_has_its_length_and_any_direction(dimension):
    words = MetricWords(3.0, Embedding(("a", "b"), np.eye(2, dimension), "two"))
    found = words.noise(4000, bits())
    length = np.linalg.norm(found, axis=1)
    assert stats.kstest(3.0 * length, stats.gamma(dimension).cdf).pvalue > 1e-4
    assert stats.kstest(2.0 * length, stats.gamma(dimension).cdf).pvalue < 1e-9
    first = found[:, 0] / length  # a coordinate of a uniform direction
    side = (dimension - 1) / 2
    assert stats.kstest((1 + first) / 2, stats.beta(side, side).cdf).pvalue > 1e-4
    assert abs(np.corrcoef(length, first)[0, 1]) < 5 / math.sqrt(4000)


def test_exact_choices_keep_the_metric():
    """Over all pairs of words, one that is not known too, and all outputs: at most eta times the
    distance; for some pair nearly that.
    """
    rng = np.random.default_rng(0)
    embedding = Embedding(tuple(f"w{i}" for i in range(12)), rng.standard_normal((12, 3)), "random")
    for eta in (0.01, 1.0, 30.0):
        words = MetricWords(eta, embedding, CHOICE)
        logs = -np.array([words.exponents(place) for place in range(13)]) / FINE
        logs -= np.log(
            np.exp(logs - logs.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
        ) + logs.max(axis=1, keepdims=True)
        shares = []
        for one, other in itertools.permutations(range(13), 2):
            distance = float(
                np.linalg.norm(
                    embedding.at(np.array([one]))[0] - embedding.at(np.array([other]))[0]
                )
            )
            cost = float((logs[one] - logs[other]).max())
            assert cost <= eta * distance * (1 + 1e-9)
            shares.append(cost / (eta * distance))
        assert max(shares) > (0.5 if eta < 10 else 0.4)
    seen = MetricWords(1.0, LINE, CHOICE).draw(["near"] * 20_000, bits())
    weights = np.exp(-np.array([1.0, 0.0, 2.0]) / 2)
    counts = [seen.count(word) for word in LINE.words]
    assert stats.chisquare(counts, weights / weights.sum() * 20_000).pvalue > 1e-4


def test_no_word_passes_because_it_is_rare():
    """A word that is not known becomes a known one, by the same law; its spelling is never seen."""
    for mechanism in (NOISE, CHOICE):
        seen = MetricWords(0.5, LINE, mechanism).draw(["Rumpelstiltskin"] * 300, bits())
        assert set(seen) == set(LINE.words)


def test_an_empty_text_stays_empty():
    assert (
        MetricWords(1.0, LINE).draw([], bits())
        == MetricWords(1.0, LINE, CHOICE).draw([], bits())
        == []
    )


def test_more_eta_changes_less():
    shares = []
    for eta in (0.1, 1.0, 5.0, 50.0):
        stays, kinds = MetricWords(eta, LINE).habits(list(LINE.words), 400, bits())
        shares.append((float(stays.mean()), -float(kinds.mean())))
    assert shares == sorted(shares)
    assert shares[-1] == (1.0, -1.0)


def test_an_embedding_of_public_text_is_reproducible_and_near_words_are_alike():
    rng = np.random.default_rng(1)
    animals, things = ["cat", "dog"], ["car", "bus"]
    sentences = [
        [str(rng.choice(group)), *(["eats", "meat"] if group is animals else ["drives", "fast"])]
        for group in (animals, things) * 300
    ]
    one, two = (Embedding.of_public_text(sentences, "toy", size=8, dimension=3) for _ in range(2))
    assert one.fingerprint == two.fingerprint
    numbers = one.places(["cat", "dog", "car", "nobody"])
    assert numbers[-1] == len(one.words)
    assert one.distances(int(numbers[0]))[numbers[1]] < one.distances(int(numbers[0]))[numbers[2]]
    assert 0 < one.least < one.diameter


def test_the_card_says_that_it_is_not_epsilon_dp(tmp_path):
    words = MetricWords(2.0, LINE)
    text = ["near", "far", "unknown", "here"] * 20
    found = replaced(text, words, tmp_path / "run", on_device=True)
    assert len(found) == len(text)
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["guarantee"]["epsilon"] == "infinity"
    assert (
        "NO differential privacy guarantee: it is metric privacy (d_chi), NOT epsilon-differential "
        "privacy" in card["statement"]
    )
    assert "the Euclidean distance of the embedding a line" in card["statement"]
    assert "exp(2 d)" in card["statement"]
    assert card["guarantee"]["trust"] == "local"
    section = card["sections"][0]
    assert section["metric"] == "the Euclidean distance of the embedding a line"
    assert section["privacy"] == "metric privacy (d_chi), not epsilon-differential privacy"
    assert section["embedding_sha256"] == LINE.fingerprint
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    page = (tmp_path / "run" / "report.md").read_text()
    assert "metric privacy" in page
    assert replaced(text, words, Run(tmp_path / "run", resume=True), on_device=True) == found


def test_it_is_never_composed_as_an_epsilon(tmp_path):
    place = Run(
        tmp_path / "run",
        ledger=tmp_path / "people.jsonl",
        budget=RenyiFilter(epsilon=50.0, delta=1e-6),
    )
    with pytest.raises(Unsupported, match="metric privacy in a ledger of epsilons"):
        replaced(["here"], MetricWords(0.001, LINE), place)
    assert not (tmp_path / "run").exists()
    budget = RenyiFilter(epsilon=1e6, delta=1e-6)
    ledger = Ledger.open(tmp_path / "other.jsonl", adjacency=Adjacency.REPLACE_ONE, budget=budget)
    with pytest.raises(BudgetExceeded):
        ledger.reserve("words", MetricWords(0.001, LINE).event, budget=budget)
    event = events.Composed(
        (events.EpsilonDelta(0.1), MetricText.of(MetricWords(1e-6, LINE)).event)
    )
    for accountant in ("tight", "rdp", "basic", "zcdp"):
        assert math.isinf(
            accounting.curve(event, adjacency=Adjacency.REPLACE_ONE, accountant=accountant).epsilon(
                1e-6
            )
        )


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: MetricWords(0.0, LINE), "eta"),
        (lambda: MetricWords(math.nan, LINE), "eta"),
        (lambda: MetricWords(1.0, LINE, "magic"), "mechanism"),
        (lambda: Embedding(("a", "a"), np.eye(2), "twice"), "different"),
        (lambda: Embedding(("a", "b"), np.ones((2, 2)), "same"), "apart"),
        (lambda: Embedding(("a", "b"), np.array([[1.0], [math.inf]]), "far"), "finite"),
        (lambda: Embedding(("a", "b"), np.eye(3), "three"), "one row"),
        (
            lambda: MetricWords(
                1e-6, Embedding(("a", "b"), np.array([[0.0], [1e-9]]), "close"), CHOICE
            ).draw(["a"], bits()),
            "eta",
        ),
    ],
)
def test_bad_input_is_one_line(make, field):
    with pytest.raises(InvalidInput, match=field):
        make()
