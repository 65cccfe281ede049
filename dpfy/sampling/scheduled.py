"""Samplers that give each record a place once: fixed order, reshuffled epochs, balls in bins,
cyclic Poisson, minimum separation.

Every record's places are drawn independently of all other records, from the run's own generator, so
that adding or removing a record moves no other one: what the participation pattern promises holds
under add-or-remove-one, not only for data of a fixed size. Nothing is counted while the run goes
on: the schedule of the whole run is a function of the generator, and a resumed run finds it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dpfy.core import check, participation
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]


def _part(key: bytes, part: int) -> np.random.Generator:
    """Generator number `part` of a run: the counter's top word keeps the parts 2^192 draws
    apart.
    """
    import numpy as np

    words = np.frombuffer(key, dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words, counter=[0, 0, 0, part]))


def _key(rng: np.random.Generator) -> bytes:
    return rng.bytes(16)


@lru_cache(maxsize=8)
def _places(key: bytes, part: int, places: int, records: int) -> Indices:
    """For each record, one place out of `places`, independent and uniform. Cached: the same for
    many steps.
    """
    return _part(key, part).integers(places, size=records)


def _check_step(step: int, steps: int) -> None:
    if not 0 <= step < steps:
        raise InvalidInput(
            "step",
            step,
            f"must be below {steps}: a further step would break the participation pattern",
        )


@dataclass(frozen=True)
class _OnceAnEpoch:
    steps_per_epoch: int
    epochs: int

    def __post_init__(self) -> None:
        check.integer("sampling.steps_per_epoch", self.steps_per_epoch)
        check.integer("sampling.epochs", self.epochs)

    def expected_batch(self, records: int) -> float:
        """One epoch's share."""
        return records / self.steps_per_epoch

    def address(self, step: int) -> int:
        """One generator for the whole run."""
        return 0


@dataclass(frozen=True)
class FixedOrderSampler(_OnceAnEpoch):
    """Each record has one place in the epoch and keeps it: it takes part every `steps_per_epoch`
    steps, `epochs` times.

    Guarantees: :class:`dpfy.core.participation.FixedOrder`. No randomness is claimed for privacy;
    batch sizes vary as in Poisson sampling.
    """

    @property
    def participation(self) -> participation.FixedOrder:
        """At s, s + steps_per_epoch, ..."""
        return participation.FixedOrder(self.steps_per_epoch, self.epochs)

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records whose place comes up."""
        import numpy as np

        _check_step(step, self.steps_per_epoch * self.epochs)
        return np.flatnonzero(
            _places(_key(rng), 0, self.steps_per_epoch, records) == step % self.steps_per_epoch
        )


@dataclass(frozen=True)
class ReshuffledSampler(_OnceAnEpoch):
    """Each record takes part once in every epoch, at a place drawn anew for each epoch.

    Guarantees: :class:`dpfy.core.participation.Reshuffled`; no amplification is claimed.
    """

    @property
    def participation(self) -> participation.Reshuffled:
        """Once in each epoch."""
        return participation.Reshuffled(self.steps_per_epoch, self.epochs)

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records whose place in this epoch comes up."""
        import numpy as np

        _check_step(step, self.steps_per_epoch * self.epochs)
        epoch, place = divmod(step, self.steps_per_epoch)
        return np.flatnonzero(_places(_key(rng), epoch, self.steps_per_epoch, records) == place)


@dataclass(frozen=True)
class BallsInBinsSampler:
    """Each record falls into one of `bins` bins, uniformly and secretly; bin s is the batch of
    steps s, s + bins, ...

    Guarantees: :class:`dpfy.core.participation.SecretBins`. The places are as secret as the noise.
    """

    bins: int
    epochs: int

    def __post_init__(self) -> None:
        check.integer("sampling.bins", self.bins)
        check.integer("sampling.epochs", self.epochs)

    @property
    def participation(self) -> participation.SecretBins:
        """One secret bin a record."""
        return participation.SecretBins(self.bins, self.epochs)

    def expected_batch(self, records: int) -> float:
        """One bin's share."""
        return records / self.bins

    def address(self, step: int) -> int:
        """One generator for the whole run."""
        return 0

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records of the bin."""
        import numpy as np

        _check_step(step, self.bins * self.epochs)
        return np.flatnonzero(_places(_key(rng), 0, self.bins, records) == step % self.bins)


@dataclass(frozen=True)
class CyclicPoissonSampler:
    """Records live in `cycle` blocks; step t takes each record of block t mod `cycle` independently
    with probability `rate`.

    Guarantees: :class:`dpfy.core.participation.CyclicPoisson`: two participations of a record are
    at least `cycle` steps apart, and in each round its inclusion is independent of everything else.
    A cycle of one is Poisson sampling.
    """

    rate: float
    cycle: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("sampling.rate", self.rate))
        check.integer("sampling.cycle", self.cycle)

    @property
    def participation(self) -> participation.CyclicPoisson:
        """Inclusion at `rate` once a cycle."""
        return participation.CyclicPoisson(self.rate, self.cycle)

    def expected_batch(self, records: int) -> float:
        """rate times a block."""
        return self.rate * records / self.cycle

    def address(self, step: int) -> int:
        """One generator for the whole run: part 0 for the blocks, part t + 1 for the coins of step
        t.
        """
        return 0

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """A Poisson sample of the block whose turn it is."""
        import numpy as np

        key = _key(rng)
        block = np.flatnonzero(_places(key, 0, self.cycle, records) == step % self.cycle)
        return (
            block if self.rate == 1 else block[_part(key, step + 1).random(len(block)) < self.rate]
        )


@dataclass(frozen=True)
class SeparatedSampler:
    """Minimum separation: a record rests for `separation` - 1 steps after each participation, then
    joins each step with `rate`.

    At most `most` participations. Started as if it had run for ever, so that the expected batch is
    the same at every step (until records reach `most`).

    Guarantees: :class:`dpfy.core.participation.Separated`; no amplification is claimed.
    """

    rate: float
    separation: int
    most: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("sampling.rate", self.rate))
        check.integer("sampling.separation", self.separation)
        check.integer("sampling.most", self.most)

    @property
    def participation(self) -> participation.Separated:
        """At least `separation` apart, at most `most`."""
        return participation.Separated(self.separation, self.most)

    def expected_batch(self, records: int) -> float:
        """Records over the mean time between two participations."""
        return records / (self.separation - 1 + 1 / self.rate)

    def address(self, step: int) -> int:
        """One generator for the whole run."""
        return 0

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records with a participation at this step."""
        import numpy as np

        schedule = _schedule(_key(rng), self.rate, self.separation, self.most, records)
        return np.flatnonzero((schedule == step).any(axis=0))


@lru_cache(maxsize=2)
def _schedule(key: bytes, rate: float, separation: int, most: int, records: int) -> Indices:
    """Steps at which each record (column) takes part, in order (rows): a stationary renewal
    process.
    """
    import numpy as np

    rng = _part(key, 0)
    mean = separation - 1 + 1 / rate
    resting = rng.random(records) < separation / mean
    first = np.where(
        resting,
        rng.integers(separation, size=records),
        separation - 1 + rng.geometric(rate, size=records),
    )
    gaps = separation - 1 + rng.geometric(rate, size=(most - 1, records))
    return np.cumsum(np.vstack([first[None], gaps]), axis=0)
