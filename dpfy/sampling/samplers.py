"""The sampler protocol, and the splitting of a logical batch into physical ones.

Poisson sampling: every record tosses its own coin at every step.

Batches of a fixed size: every step takes a fresh uniform subset.

Samplers that give each record its places: fixed order, reshuffled epochs, random allocation, balls
in bins, cyclic Poisson, minimum separation.

Every record's places are drawn independently of all other records, from the run's own generator, so
that adding or removing a record moves no other one: what the participation pattern promises holds
under add-or-remove-one, not only for data of a fixed size. Nothing is counted while the run goes
on: the schedule of the whole run is a function of the generator, and a resumed run finds it again.

Devices that check in when they can: nobody draws them, and what is promised about them is
enforced as they come.

The samplers by name, for plans in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from dpfy.core import check
from dpfy.core.unit import Participation

if TYPE_CHECKING:
    import numpy as np
if TYPE_CHECKING:
    from numpy.typing import NDArray
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput

if TYPE_CHECKING:
    Indices = NDArray[np.int64]
from dpfy.core.errors import Unsupported


class Sampler(Protocol):
    """Picks the records of a step.

    Guarantees: `batch` is a pure function of (step, records, rng), with rng the generator at
    `address(step)`: the same step of a resumed run picks the same records, and what it picks has
    the distribution that `participation` promises to the accountant.
    """

    @property
    def participation(self) -> Participation:
        """The promise that accounting relies on."""

    def expected_batch(self, records: int) -> float:
        """The mean number of records in a batch: the divisor of the noisy sum."""

    def address(self, step: int) -> int:
        """Which of the run's generators the step draws from: its own, or one shared by the steps of
        a schedule.
        """

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices of the records that take part in `step`; may be empty."""


def physical(
    indices: NDArray[np.int64], most: int, *, row_multiple: int = 1
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Split a logical batch into pieces of at most `most` records, each with a mask of the rows
    that count.

    The rows of a piece are filled up to a multiple of `row_multiple`, or to `most`: work prepared
    for a shape then serves again, and with a multiple of `most` there is one shape only. Added rows
    repeat record 0 and are masked out, so they contribute exactly zero. An empty logical batch has
    no pieces: the step still happens, noise alone.
    """
    import numpy as np

    check.integer("max_physical_batch", most)
    check.integer("row_multiple", row_multiple)
    for start in range(0, len(indices), most):
        piece = indices[start : start + most]
        mask = np.ones(len(piece), dtype=bool)
        missing = min(most, -row_multiple * (-len(piece) // row_multiple)) - len(piece)
        if missing:
            piece = np.concatenate([piece, np.zeros(missing, dtype=piece.dtype)])
            mask = np.concatenate([mask, np.zeros(missing, dtype=bool)])
        yield piece, mask


@dataclass(frozen=True)
class PoissonSampler:
    """Each record is in each batch independently with probability `rate`. Rate 1 is full batch.

    Guarantees: inclusion is independent across records and steps with probability exactly `rate`
    (up to double precision), which is what :class:`dpfy.core.patterns.Poisson` promises.
    """

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("sampling_rate", self.rate))

    @property
    def participation(self) -> patterns.Poisson:
        """Independent inclusion at `rate`."""
        return patterns.Poisson(self.rate)

    def expected_batch(self, records: int) -> float:
        """rate times records."""
        return self.rate * records

    def address(self, step: int) -> int:
        """A generator for each step."""
        return step

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices in increasing order, found by geometric gaps: the cost grows with the batch, not
        with the data set.
        """
        import numpy as np

        if self.rate == 1:
            return np.arange(records, dtype=np.int64)
        pieces: list[NDArray[np.int64]] = []
        last = -1
        while last < records:
            left = max(1.0, (records - last) * self.rate)
            gaps = rng.geometric(self.rate, size=int(left + 4 * left**0.5) + 8)
            # A gap longer than the data ends the batch; cutting it keeps the running sum far from
            # overflow.
            places = last + np.cumsum(np.minimum(gaps, records + 1))
            pieces.append(places)
            last = int(places[-1])
        found = np.concatenate(pieces)
        return found[found < records].astype(np.int64)


@dataclass(frozen=True)
class WithoutReplacementSampler:
    """Each batch is a uniform subset of exactly `batch_size` of `records` records, independent of
    all others.

    Whether one record is drawn depends on how many others there are: `records` is part of what is
    promised, and data of another size is refused.

    Guarantees: :class:`dpfy.core.patterns.WithoutReplacement`.
    """

    batch_size: int
    records: int

    def __post_init__(self) -> None:
        check.integer("records", self.records, most=check.RECORDS)
        if check.integer("batch_size", self.batch_size) > self.records:
            raise InvalidInput(
                "batch_size",
                self.batch_size,
                f"must be at most the number of records ({self.records})",
            )

    @property
    def participation(self) -> patterns.WithoutReplacement:
        """A fresh subset at every step."""
        return patterns.WithoutReplacement(self.batch_size, self.records)

    def expected_batch(self, records: int) -> float:
        """The size of every batch."""
        return float(self.batch_size)

    def address(self, step: int) -> int:
        """A generator for each step."""
        return step

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Indices in increasing order. A small batch costs its own size, a large one that of the
        data set.
        """
        import numpy as np

        if records != self.records:
            raise InvalidInput(
                "records",
                records,
                f"must be {self.records}, the number that batches of a fixed size are charged for",
            )
        return np.sort(rng.choice(records, self.batch_size, replace=False, shuffle=False)).astype(
            np.int64
        )


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

    Guarantees: :class:`dpfy.core.patterns.FixedOrder`. No randomness is claimed for privacy;
    batch sizes vary as in Poisson sampling.
    """

    @property
    def participation(self) -> patterns.FixedOrder:
        """At s, s + steps_per_epoch, ..."""
        return patterns.FixedOrder(self.steps_per_epoch, self.epochs)

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records whose place comes up."""
        import numpy as np

        _check_step(step, self.steps_per_epoch * self.epochs)
        return np.flatnonzero(
            _places(_key(rng), 0, self.steps_per_epoch, records) == step % self.steps_per_epoch
        )


@dataclass(frozen=True)
class ReshuffledSampler(_OnceAnEpoch):
    """Each record takes part once in every epoch, at a place drawn again for each epoch.

    Guarantees: :class:`dpfy.core.patterns.Reshuffled`; no amplification is claimed.
    """

    @property
    def participation(self) -> patterns.Reshuffled:
        """Once in each epoch."""
        return patterns.Reshuffled(self.steps_per_epoch, self.epochs)

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records whose place in this epoch comes up."""
        import numpy as np

        _check_step(step, self.steps_per_epoch * self.epochs)
        epoch, place = divmod(step, self.steps_per_epoch)
        return np.flatnonzero(_places(_key(rng), epoch, self.steps_per_epoch, records) == place)


@dataclass(frozen=True)
class RandomAllocationSampler(_OnceAnEpoch):
    """In every epoch each record takes part in exactly `times` steps, chosen uniformly and in
    secret, independently of all other records and epochs.

    No record is left out of an epoch, and none takes part more often than another.

    Guarantees: :class:`dpfy.core.unit.RandomAllocation`. The places are as secret as the noise.
    """

    times: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("sampling.times", self.times, most=self.steps_per_epoch)

    @property
    def participation(self) -> patterns.RandomAllocation:
        """So many secret steps in each epoch."""
        return patterns.RandomAllocation(self.steps_per_epoch, self.epochs, self.times)

    def expected_batch(self, records: int) -> float:
        """One step's share."""
        return records * self.times / self.steps_per_epoch

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> Indices:
        """The records one of whose places in this epoch comes up."""
        import numpy as np

        _check_step(step, self.steps_per_epoch * self.epochs)
        epoch, place = divmod(step, self.steps_per_epoch)
        places = _subsets(_key(rng), epoch, self.times, self.steps_per_epoch, records)
        return np.flatnonzero((places == place).any(axis=0))


@lru_cache(maxsize=8)
def _subsets(key: bytes, part: int, times: int, places: int, records: int) -> Indices:
    """For each record (column) a uniform set of `times` of the places, by Floyd's method: the number
    drawn, or the largest one allowed where that is taken.
    """
    import numpy as np

    rng = _part(key, part)
    found = np.empty((times, records), dtype=np.int64)
    for k in range(times):
        largest = places - times + k
        drawn = rng.integers(largest + 1, size=records)
        found[k] = np.where((found[:k] == drawn).any(axis=0), largest, drawn)
    return found


@dataclass(frozen=True)
class BallsInBinsSampler:
    """Each record falls into one of `bins` bins, uniformly and secretly; bin s is the batch of
    steps s, s + bins, ...

    Guarantees: :class:`dpfy.core.patterns.SecretBins`. The places are as secret as the noise.
    """

    bins: int
    epochs: int

    def __post_init__(self) -> None:
        check.integer("sampling.bins", self.bins)
        check.integer("sampling.epochs", self.epochs)

    @property
    def participation(self) -> patterns.SecretBins:
        """One secret bin a record."""
        return patterns.SecretBins(self.bins, self.epochs)

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

    Guarantees: :class:`dpfy.core.patterns.CyclicPoisson`: two participations of a record are
    at least `cycle` steps apart, and in each round its inclusion is independent of everything else.
    A cycle of one is Poisson sampling.
    """

    rate: float
    cycle: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("sampling.rate", self.rate))
        check.integer("sampling.cycle", self.cycle)

    @property
    def participation(self) -> patterns.CyclicPoisson:
        """Inclusion at `rate` once a cycle."""
        return patterns.CyclicPoisson(self.rate, self.cycle)

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

    Guarantees: :class:`dpfy.core.patterns.Separated`; no amplification is claimed.
    """

    rate: float
    separation: int
    most: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", check.rate("sampling.rate", self.rate))
        check.integer("sampling.separation", self.separation)
        check.integer("sampling.most", self.most)

    @property
    def participation(self) -> patterns.Separated:
        """At least `separation` apart, at most `most`."""
        return patterns.Separated(self.separation, self.most)

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


@dataclass(frozen=True)
class CheckInSampler:
    """Units come by themselves, in any order, `cohort` of them a step on average: each rests for
    `separation` - 1 steps after it took part, and takes part at most `most` times.

    Guarantees: :class:`dpfy.core.patterns.Separated`, as long as anyone who admits units keeps to
    it (:class:`dpfy.federated.PrivateRounds` does). No randomness is claimed, and who comes may
    depend on who else does: the guarantee is for the contribution of one unit (zero-out).
    """

    cohort: float
    separation: int
    most: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "cohort", check.positive("sampling.cohort", self.cohort))
        check.integer("sampling.separation", self.separation)
        check.integer("sampling.most", self.most)

    @property
    def participation(self) -> patterns.Separated:
        """At least `separation` apart, at most `most`."""
        return patterns.Separated(self.separation, self.most)

    def expected_batch(self, records: int) -> float:
        """The given cohort: a public number, however many come."""
        return self.cohort

    def address(self, step: int) -> int:
        """None is used."""
        return 0

    def batch(self, step: int, *, records: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Refused: there is nothing to draw."""
        raise Unsupported(
            "drawing units that check in by themselves",
            "use dpfy.federated.PrivateRounds, and tell it who is there",
        )


SAMPLERS: dict[str, type] = {
    "poisson": PoissonSampler,
    "without-replacement": WithoutReplacementSampler,
    "fixed-order": FixedOrderSampler,
    "reshuffled": ReshuffledSampler,
    "random-allocation": RandomAllocationSampler,
    "balls-in-bins": BallsInBinsSampler,
    "cyclic-poisson": CyclicPoissonSampler,
    "separated": SeparatedSampler,
    "check-in": CheckInSampler,
}
