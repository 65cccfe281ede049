"""Private evolution: one vote a record and round, samples of the generator alone, and a folder that
verifies.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import dpfy
from dpfy.accounting.filters import noise_of, squares
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.runs.run import Run
from dpfy.synthetic import evolution as runs
from dpfy.synthetic.evolution import FINE, Evolution, bounded
from dpfy_lab import replay

TERMS = {"epsilon": 2.0, "delta": 1e-5}
OPTIONS = {"classes": 2, "size": 30, "rounds": 4}


class Dots:
    """Points in a square; a variation is a small step."""

    def random(self, count, label, rng):
        return rng.uniform(-5, 5, (count, 2))

    def vary(self, samples, label, rng):
        return samples + rng.normal(0, 0.4, samples.shape)


def crowd(count=2000, seed=0):
    """Two classes around two places."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    return np.where(labels[:, None] == 0, [3.0, 3.0], [-3.0, 1.0]) + rng.normal(
        0, 0.3, (count, 2)
    ), labels


def rehearsed(claim, data, seed):
    records, labels = data
    secret = Randomness.for_tests(seed)
    population = runs.SamplePopulation.first(claim, Dots(), runs.flat, secret)
    permit = mock_permit(claim.event, claim.releases, claim.name, claim.adjacency)
    last, votes = runs.evolved(population, population.vectors(records), labels, permit, secret)
    return last.samples, votes


def test_bounded_vectors_are_short_and_exact():
    rng = np.random.default_rng(2)
    for size in (1, 7, 144):
        held = rng.standard_normal((200, size)) * 10.0 ** rng.integers(-8, 9, (200, 1))
        held[3, 0], held[4, 0], held[5, -1], held[6] = np.nan, np.inf, 1e308, 1e200
        found = bounded(held)
        longest = (1 + size**0.5 / (2 * FINE)) * (1 + 2.0**-40)
        assert (np.linalg.norm(found, axis=1) <= longest).all()
        assert (found[3] == 0).all()
        assert (found[4] == 0).all()
        assert (found * FINE == np.rint(found * FINE)).all()
        assert (bounded(held[7:8]) == found[7]).all()
        order = rng.permutation(200)
        assert (found[order].T @ found[order] == found.T @ found).all()
    short = np.array([[0.3, -0.4]])
    assert bounded(short) == pytest.approx(short, abs=1 / FINE)


def test_samples_move_to_the_records_and_the_folder_verifies(tmp_path):
    made = dpfy.evolve(crowd, Dots(), run=Run(tmp_path / "run", seed=1), **OPTIONS, **TERMS)
    x, y = made.arrays
    assert x.shape == (60, 2)
    for label, place in ((0, [3.0, 3.0]), (1, [-3.0, 1.0])):
        assert np.linalg.norm(np.median(x[y == label], axis=0) - place) < 0.8
    assert all(finding.holds for finding in dpfy.verify(made.run))
    assert 1.99 < made.report["guarantee"]["epsilon"] <= 2.0
    again = dpfy.evolve(
        crowd, Dots(), run=Run(tmp_path / "run", resume=True, seed=1), **OPTIONS, **TERMS
    )
    assert again.facts == made.facts


@pytest.mark.parametrize("trial", range(6))
def test_nothing_but_noisy_votes_tells_records_apart(trial):
    """Record and replay: one record more, far away, infinite, or of an empty class; and records
    that have nothing in common.
    """
    rng = np.random.default_rng(trial)
    claim = Evolution(
        2, int(rng.integers(2, 20)), int(rng.integers(1, 5)), float(rng.lognormal(0, 1))
    )
    records, labels = crowd(int(rng.integers(0, 30)), trial)
    odd = [[1e9, -1e9], [np.nan, 0.0], [np.inf, 0.0], [0.0, 0.0], [3.0, 3.0], [-3.0, 1.0]][trial]
    more = np.concatenate([records, [odd]]), np.append(labels, rng.integers(0, 2))

    def run(data):
        return rehearsed(claim, data, trial)

    assert replay.check(run, (records, labels), more) == []
    strangers = replay.check(run, more, crowd(11, 9))
    assert all(fault.kind == "distance" for fault in strangers)


def test_rounds_together_are_within_the_claim_and_noise_is_as_stated(monkeypatch):
    """Noise of 6,000 counts of nobody: a deviation off by 8% has a chance of 1 in 10^17; 2/3 and
    3/2 of it are refused.
    """
    claim, seen = Evolution(2, 1000, 3, 2.0), []
    real = runs.PartOfGaussian.release

    def release(self, total, *rest):
        found = real(self, total, *rest)
        seen.append((self.noise_multiplier, total.bound.l2, np.asarray(found.value) - total.value))
        return found

    monkeypatch.setattr(runs.PartOfGaussian, "release", release)
    rehearsed(claim, crowd(50), 3)
    spent = sum((squares(noise) for noise, _, _ in seen), Fraction(0))
    assert len(seen) == 3
    assert 0.999 * squares(2.0) < spent <= squares(2.0)
    assert all(bound == 1.0 for _, bound, _ in seen)
    ratio = np.concatenate([rest for _, _, rest in seen]).std() / noise_of(squares(2.0) / 3)
    for factor, due in ((1.0, True), (2 / 3, False), (1.5, False)):
        assert (abs(ratio * factor - 1) < 0.08) == due


class Interrupted(BaseException):
    """As a kill."""


@pytest.mark.parametrize("number", [0, 2])
def test_stopped_and_resumed_to_the_same_samples(tmp_path, monkeypatch, number):
    whole = dpfy.evolve(crowd(200), Dots(), run=Run(tmp_path / "whole", seed=4), **OPTIONS, **TERMS)
    real = runs.SamplePopulation.next

    def stop(self, votes, randomness, step):
        if step == number:
            raise Interrupted
        return real(self, votes, randomness, step)

    with monkeypatch.context() as patch:
        patch.setattr(runs.SamplePopulation, "next", stop)
        with pytest.raises(Interrupted):
            dpfy.evolve(crowd(200), Dots(), run=Run(tmp_path / "run", seed=4), **OPTIONS, **TERMS)
    with pytest.raises(InvalidInput, match="must be what the run had"):
        dpfy.evolve(
            crowd(201),
            Dots(),
            run=Run(tmp_path / "run", seed=4, resume=True),
            **OPTIONS,
            **TERMS,
        )
    again = dpfy.evolve(
        crowd(200),
        Dots(),
        run=Run(tmp_path / "run", seed=4, resume=True),
        **OPTIONS,
        **TERMS,
    )
    assert (again.run / "samples.npz").read_bytes() == (whole.run / "samples.npz").read_bytes()


def test_places_are_drawn_in_proportion_to_votes():
    rng = np.random.default_rng(0)
    found = np.bincount(runs.resample(np.array([0.0, 3.0, 1.0, 0.0]), 400, rng), minlength=4)
    assert found == pytest.approx([0, 300, 100, 0], abs=1)
    assert set(runs.resample(np.zeros(4), 400, rng).tolist()) == {0, 1, 2, 3}


class Wrong(Dots):
    """Too few samples."""

    def random(self, count, label, rng):
        return rng.random((count - 1, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generator": Wrong()}, "30 samples"),
        ({"records": lambda: (np.zeros((3, 2)), np.array([0, 1, 2]))}, "from 0 to 1"),
        ({"records": lambda: (np.zeros((3, 2)), np.array([0, 1]))}, "for each record"),
        ({"records": lambda: 7}, "records, labels"),
        ({"embed": lambda held: np.asarray(held) - np.mean(held, axis=0)}, "by itself"),
        ({"embed": lambda held: np.zeros(3)}, "one vector"),
        ({"embed": lambda held: np.full((len(held), 2), np.inf)}, "finite"),
        ({"epsilon": 0.0}, "epsilon"),
    ],
)
def test_what_is_wrong_is_one_line_and_costs_nothing(tmp_path, change, words):
    asked = {"records": crowd, "generator": Dots()} | OPTIONS | TERMS | change
    ledger = tmp_path / "people.jsonl"
    with pytest.raises(DpfyError, match=words):
        dpfy.evolve(
            asked.pop("records"),
            asked.pop("generator"),
            run=Run(tmp_path / "run", ledger=ledger),
            **asked,
        )
    assert not (tmp_path / "run").exists()
    assert not ledger.exists() or Ledger.read(ledger).spent() == []


def test_bad_options_are_named():
    for bad in ({"size": 1}, {"rounds": 0}, {"classes": 0}):
        with pytest.raises(InvalidInput, match=next(iter(bad))):
            dpfy.evolve(crowd, Dots(), **TERMS, **bad)
