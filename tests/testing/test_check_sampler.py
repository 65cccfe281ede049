"""The contract suite of samplers catches wrong ones, and all of ours pass it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dpfy.core import unit as patterns
from dpfy.sampling import samplers
from dpfy.sampling.samplers import SAMPLERS, CyclicPoissonSampler, PoissonSampler, ReshuffledSampler
from dpfy.testing import ContractBroken, check_sampler

OURS = {
    "poisson": [PoissonSampler(rate) for rate in (1e-6, 0.01, 0.1, 0.999, 1.0)],
    "without-replacement": [
        samplers.WithoutReplacementSampler(size, records)
        for size, records in ((1, 1), (7, 50), (49, 50), (50, 50), (3, 6), (360, 400))
    ],
    "fixed-order": [samplers.FixedOrderSampler(10, 4), samplers.FixedOrderSampler(1, 1)],
    "reshuffled": [ReshuffledSampler(10, 4), ReshuffledSampler(1, 3)],
    "balls-in-bins": [samplers.BallsInBinsSampler(10, 4), samplers.BallsInBinsSampler(100, 1)],
    "random-allocation": [
        samplers.RandomAllocationSampler(10, 4),
        samplers.RandomAllocationSampler(1, 3),
        samplers.RandomAllocationSampler(7, 6, 3),
        samplers.RandomAllocationSampler(5, 2, 5),
    ],
    "cyclic-poisson": [CyclicPoissonSampler(0.3, 5), CyclicPoissonSampler(1.0, 8)],
    "separated": [
        samplers.SeparatedSampler(rate, separation, most)
        for rate, separation, most in ((0.2, 6, 5), (1.0, 4, 10), (0.05, 1, 100), (0.5, 3, 2))
    ],
    "check-in": [samplers.CheckInSampler(10.0, 3, 4)],
}
DRAW_NOBODY = {"check-in"}


def test_every_sampler_of_ours_has_settings():
    assert set(OURS) == set(SAMPLERS)
    assert all(type(s) is SAMPLERS[name] for name, held in OURS.items() for s in held)


@pytest.mark.parametrize("name", SAMPLERS)
def test_ours_keep_the_contract(name):
    for sampler in OURS[name]:
        check_sampler(sampler, draws=name not in DRAW_NOBODY)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - DRAW_NOBODY))
def test_ours_keep_the_contract_thoroughly(name):
    for sampler in OURS[name]:
        check_sampler(sampler, seed=3, thorough=True)


@dataclass(frozen=True)
class Coins(PoissonSampler):
    """Poisson sampling in the obvious way, for the wrong ones to inherit from."""

    def batch(self, step, *, records, rng):
        return np.flatnonzero(self.chosen(step, records, rng))

    def chosen(self, step, records, rng):
        return rng.random(records) < self.rate


class Repeats(Coins):
    """A record is in the batch twice."""

    def batch(self, step, *, records, rng):
        found = super().batch(step, records=records, rng=rng)
        return np.sort(np.append(found, found[:1]))


class OutOfRange(Coins):
    def batch(self, step, *, records, rng):
        return super().batch(step, records=records, rng=rng) + 1


class RateOff(Coins):
    """Five percent more records take part."""

    def chosen(self, step, records, rng):
        return rng.random(records) < self.rate * 1.05


class FavouriteRecord(Coins):
    """The last record takes part in every step."""

    def chosen(self, step, records, rng):
        found = rng.random(records) < self.rate
        found[-1] = True
        return found


class FirstStepFull(Coins):
    """The first batch is the whole data set."""

    def chosen(self, step, records, rng):
        return rng.random(records) < (1.0 if step == 0 else self.rate)


class FixedSize(Coins):
    """As many records as Poisson sampling takes on average, at every step."""

    def chosen(self, step, records, rng):
        return np.isin(np.arange(records), rng.permutation(records)[: round(self.rate * records)])


class Pairs(Coins):
    """Neighbouring records take part together."""

    def chosen(self, step, records, rng):
        return np.repeat(rng.random(-(-records // 2)) < self.rate, 2)[:records]


class Sticky(Coins):
    """Two steps in a row have the same batch."""

    def address(self, step):
        return step // 2


class Epochs(Coins):
    """Shuffled epochs that are billed as Poisson sampling."""

    def address(self, step):
        return 0

    def batch(self, step, *, records, rng):
        return ReshuffledSampler(round(1 / self.rate), 10**6).batch(step, records=records, rng=rng)


class ByTheData(Coins):
    """The rate follows from the number of records, which the accounting does not know."""

    def chosen(self, step, records, rng):
        return rng.random(records) < self.rate * 300 / records


class InOrder(Coins):
    """A batch depends on the batches that were drawn before."""

    drawn = 0

    def chosen(self, step, records, rng):
        InOrder.drawn += 1
        return np.roll(super().chosen(step, records, rng), InOrder.drawn)


class GlobalGenerator(Coins):
    def chosen(self, step, records, rng):
        return np.random.random(records) < self.rate


class NoSecret(Coins):
    """Every run has the same batches."""

    def chosen(self, step, records, rng):
        return np.random.default_rng(step).random(records) < self.rate


class Expects(Coins):
    def expected_batch(self, records):
        return self.rate * records * 1.1


class TwiceAnEpoch(ReshuffledSampler):
    """One record takes part in two steps of each epoch."""

    def batch(self, step, *, records, rng):
        found = super().batch(step, records=records, rng=rng)
        return np.union1d(found, [0]) if step % self.steps_per_epoch < 2 else found


class NeverEnds(ReshuffledSampler):
    """Goes on after the epochs that are billed."""

    def batch(self, step, *, records, rng):
        longer = ReshuffledSampler(self.steps_per_epoch, 10 * self.epochs)
        return longer.batch(step, records=records, rng=rng)


class Wanders(CyclicPoissonSampler):
    """Records change their block between cycles."""

    def batch(self, step, *, records, rng):
        found = super().batch(step, records=records, rng=rng)
        return np.sort((found + step // self.cycle) % records)


class TooNear(samplers.SeparatedSampler):
    @property
    def participation(self):
        return patterns.Separated(self.separation + 1, self.most)


class KnownBins(samplers.BallsInBinsSampler):
    """The bin of a record is its number: no secret."""

    def batch(self, step, *, records, rng):
        return np.flatnonzero(np.arange(records) % self.bins == step % self.bins)


class AnySize(samplers.WithoutReplacementSampler):
    """Data of another size than the billed one is taken."""

    def batch(self, step, *, records, rng):
        return np.sort(rng.choice(records, self.batch_size, replace=False)).astype(np.int64)


class Halves(samplers.WithoutReplacementSampler):
    """Always one half of the data or the other."""

    def batch(self, step, *, records, rng):
        super().batch(step, records=records, rng=rng)
        start = int(rng.integers(2)) * self.batch_size
        return np.arange(start, start + self.batch_size)


WRONG = [
    (Repeats(0.1), "different indices"),
    (OutOfRange(0.1), "different indices"),
    (RateOff(0.1), "promised rate"),
    (FavouriteRecord(0.1), "promised rate"),
    (FirstStepFull(0.1), "promised rate"),
    (FixedSize(0.1), "different records are independent"),
    (Pairs(0.1), "different records are independent"),
    (Sticky(0.1), "different steps are independent"),
    (Epochs(0.1), "different steps are independent"),
    (ByTheData(0.1), "promised rate"),
    (InOrder(0.1), "pure function"),
    (GlobalGenerator(0.1), "pure function"),
    (NoSecret(0.1), "secret"),
    (Expects(0.1), "mean size"),
    (TwiceAnEpoch(10, 4), "pattern"),
    (NeverEnds(10, 4), "beyond"),
    (Wanders(0.3, 5), "pattern"),
    (TooNear(1.0, 4, 10), "pattern"),
    (KnownBins(10, 4), "secret"),
    (AnySize(7, 50), "other numbers are refused"),
    (Halves(20, 40), "different records are independent"),
]


@pytest.mark.parametrize(("sampler", "property"), WRONG, ids=[type(s).__name__ for s, _ in WRONG])
def test_wrong_samplers_are_caught(sampler, property):
    with pytest.raises(ContractBroken, match=property) as caught:
        check_sampler(sampler)
    assert type(sampler).__name__ in caught.value.setting or "records" in caught.value.setting


def test_the_obvious_sampler_passes():
    check_sampler(Coins(0.1))


def test_a_sampler_that_draws_nobody_must_refuse():
    with pytest.raises(ContractBroken, match="refuses every batch"):
        check_sampler(PoissonSampler(0.5), draws=False)


@dataclass(frozen=True)
class SameEveryEpoch(samplers.RandomAllocationSampler):
    """Places drawn once for the whole run: balls in bins, which cost more."""

    def batch(self, step, *, records, rng):
        return super().batch(step % self.steps_per_epoch, records=records, rng=rng)


@dataclass(frozen=True)
class ABlockOfPlaces(samplers.RandomAllocationSampler):
    """Several places in a row, the first of them uniform."""

    def batch(self, step, *, records, rng):
        epoch, place = divmod(step, self.steps_per_epoch)
        start = np.random.default_rng([rng.integers(2**32), epoch]).integers(
            self.steps_per_epoch, size=records
        )
        return np.flatnonzero((place - start) % self.steps_per_epoch < self.times)


@dataclass(frozen=True)
class EqualBatches(samplers.RandomAllocationSampler):
    """A permutation: batches of one size, so that a record's place depends on the others."""

    def batch(self, step, *, records, rng):
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([rng.integers(2**32), epoch]).permutation(records)
        return np.sort(order[place :: self.steps_per_epoch])


@pytest.mark.parametrize(
    "wrong",
    [SameEveryEpoch(6, 8), ABlockOfPlaces(6, 8, 3), EqualBatches(2, 40)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_wrong_random_allocation_is_caught(wrong):
    with pytest.raises(ContractBroken):
        check_sampler(wrong, records=(24,))
