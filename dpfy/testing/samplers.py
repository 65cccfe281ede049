"""The contract of a sampler: the batches have the distribution that its participation promises."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import unit as patterns
from dpfy.core.errors import DpfyError, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.sampling.samplers import Sampler
from dpfy.testing.contract import (
    DEVIATIONS,
    check_frozen_data,
    refused,
    require,
    require_rate,
    typed_refusals,
)

Table = NDArray[np.bool_]
"""[steps, records]: who took part in which step."""

VALID = "A batch holds different indices of records, as int64."
PURE = "A batch is a pure function of step, number of records and generator."
SECRET = "Who takes part depends on the secret of the run."
PATTERN = "Participations keep the pattern that the sampler promises."
RATE = "Records take part at exactly the promised rate, each of them and at every step."
SIZE = "expected_batch is the mean size of a batch."
BETWEEN_STEPS = "Participations of a record in different steps are independent."
BETWEEN_RECORDS = "Participations of different records are independent."
OTHER_DATA = "The promise holds for every number of records, or other numbers are refused."
BEYOND = "A step beyond the pattern is refused, or keeps the pattern."
CELLS, BATCHES, MOST_STEPS = 400_000, 6000, 4000
"""About how many pairs of a step and a record are looked at, and how many batches are drawn; and
the most steps of one run.
"""


def check_sampler(
    sampler: Sampler,
    *,
    records: Sequence[int] = (300, 41),
    draws: bool = True,
    seed: int = 0,
    thorough: bool = False,
) -> None:
    """Check that a sampler keeps its contract (:class:`dpfy.sampling.samplers.Sampler`).

    Args:
        sampler: The sampler to check.
        records: Numbers of records to draw from. A sampler for a fixed number of records is also
            checked with that number, and must refuse all others.
        draws: False for a sampler that draws nobody because units come by themselves; it must then
            refuse every `batch` with `Unsupported`.
        seed: Fixes all randomness of the check.
        thorough: Look at ten times as many participations.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        A sampler that passes keeps, in the settings tried:

        - a batch holds different indices of records, as int64, at every step;
        - the same step, records and generator give the same batch, in any order of the steps, from
          a copy of the sampler and whatever NumPy's global generator holds;
        - another secret gives other batches, where the pattern claims any randomness;
        - the participation pattern: rates of all records and steps, spacing, and how often a record
          takes part;
        - independence of records and of steps, as far as the pattern claims it;
        - `expected_batch` is the mean size of the batches;
        - a step beyond the pattern is refused or keeps the pattern.

        A rate that is wrong by 5% is found where about 3% of the records or more take part. The
        chance that a right sampler fails is below 1e-6.

    Example:
        >>> from dpfy.sampling.samplers import ReshuffledSampler
        >>> from dpfy.testing import check_sampler
        >>> check_sampler(ReshuffledSampler(steps_per_epoch=10, epochs=3))
    """
    check_frozen_data(sampler, "sampler")
    pattern = sampler.participation
    with typed_refusals("`participation` is one of the patterns of dpfy.", repr(sampler)):
        require(
            type(pattern) in _PATTERNS,
            "`participation` is one of the patterns of dpfy.core.unit.",
            repr(sampler),
            repr(pattern),
        )
    if not draws:
        _check_refuses(sampler, records)
        return
    fixed = pattern.records if isinstance(pattern, patterns.WithoutReplacement) else None
    sizes = [fixed] if fixed is not None else list(dict.fromkeys(records))
    _check_size(sampler, sizes, records)
    for number, size in enumerate(sizes):
        cells = CELLS * (10 if thorough else 1) // (1 if number == 0 else 4)
        held = _Setting(sampler, pattern, size, seed + number, cells)
        held.check_pure()
        held.check_secret()
        runs = held.runs()
        held.check_pattern(runs)
        held.check_beyond()
        held.check_expected(runs)


def _check_refuses(sampler: Sampler, records: Sequence[int]) -> None:
    """A sampler of units that come by themselves draws nobody."""
    property = "A sampler that draws nobody refuses every batch with `Unsupported`."
    for size in records:
        for step in (0, 1, 1000):
            try:
                drawn: Any = sampler.batch(step, records=size, rng=np.random.default_rng(step))
            except Unsupported:
                continue
            require(False, property, f"step {step}, {size} records", f"it drew {drawn!r}")


def _check_size(sampler: Sampler, sizes: Sequence[int], asked: Sequence[int]) -> None:
    for size in sizes:
        mean = sampler.expected_batch(size)
        require(
            isinstance(mean, float | int) and math.isfinite(mean) and mean > 0,
            "expected_batch is a positive number.",
            f"{size} records",
            repr(mean),
        )
    for size in (sizes[0] - 1, sizes[0] + 1, *asked):
        if isinstance(sampler.participation, patterns.WithoutReplacement) and size not in sizes:
            rng = np.random.default_rng(0)
            said = refused(partial(sampler.batch, 0, records=size, rng=rng))
            require(said is not None, OTHER_DATA, f"{size} records", "a batch was drawn")


@dataclass(frozen=True)
class _Setting:
    """One sampler on one number of records."""

    sampler: Sampler
    pattern: patterns.Participation
    records: int
    seed: int
    cells: int

    def __str__(self) -> str:
        return f"{self.sampler!r}, {self.records} records, seed {self.seed}"

    @property
    def length(self) -> int | None:
        """The steps after which the pattern ends; None where it goes on."""
        return _length(self.pattern)

    @property
    def steps(self) -> int:
        """How many steps of a run are looked at."""
        if self.length is not None:
            return min(self.length, MOST_STEPS)
        if isinstance(self.pattern, patterns.Separated):
            return min(MOST_STEPS, 4 * self.pattern.separation * min(self.pattern.most, 10))
        if isinstance(self.pattern, patterns.CyclicPoisson):
            return min(MOST_STEPS, max(4 * self.pattern.cycle, 60))
        return max(4, min(MOST_STEPS, self.cells // self.records))

    def batch(self, step: int, secret: int, sampler: Sampler | None = None) -> NDArray[np.int64]:
        """One batch, checked to be one."""
        drawn = sampler or self.sampler
        where = f"{self}, step {step}"
        with typed_refusals(VALID, where):
            address = drawn.address(step)
            rng = Randomness.for_tests(secret).generator("sampling", address)
            found = drawn.batch(step, records=self.records, rng=rng)
        good = isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype == np.int64
        require(good, VALID, where, f"a {type(found).__name__} {getattr(found, 'dtype', '')}")
        inside = not len(found) or (int(found.min()) >= 0 and int(found.max()) < self.records)
        require(inside, VALID, where, "an index is outside of the data")
        repeated = len(found) - len(np.unique(found))
        require(repeated == 0, VALID, where, f"{repeated} records are in the batch twice")
        return found

    def table(self, secret: int, steps: int | None = None) -> Table:
        """One run."""
        taken = np.zeros((steps or self.steps, self.records), dtype=bool)
        for step in range(len(taken)):
            taken[step, self.batch(step, secret)] = True
        return taken

    def runs(self) -> list[Table]:
        """Runs with different secrets, enough of them for the statistics."""
        batches = BATCHES * max(1, self.cells // CELLS) // self.steps
        count = max(1, min(batches, self.cells // (self.steps * self.records)))
        return [self.table(self.seed + 1000 * number) for number in range(count)]

    def check_pure(self) -> None:
        """Later steps first, a copy of the sampler, and another state of NumPy's generator."""
        steps = range(min(self.steps, 12))
        before = [self.batch(step, self.seed) for step in steps]
        held = np.random.get_state()
        try:
            np.random.seed(self.seed + 1)
            marked = np.random.get_state()[1].copy()  # type: ignore[union-attr, call-overload, index]
            other = copy.deepcopy(self.sampler)
            for step in reversed(steps):
                for what, sampler in (("again", None), ("by a copy", other)):
                    after = self.batch(step, self.seed, sampler)
                    require(
                        np.array_equal(before[step], after),
                        PURE,
                        f"{self}, step {step}",
                        f"drawn {what}, in another order of steps, the batch differs",
                    )
            same = np.array_equal(marked, np.random.get_state()[1])  # type: ignore[index, call-overload]
            require(same, PURE, str(self), "NumPy's global generator was used")
        finally:
            np.random.set_state(held)
        for step in steps:
            first, again = self.sampler.address(step), self.sampler.address(step)
            require(
                first == again and isinstance(first, int) and first >= 0,
                "The address of a step is one whole number, at least 0.",
                f"{self}, step {step}",
                f"{first!r}, then {again!r}",
            )

    def check_secret(self) -> None:
        """Two runs differ, unless the pattern leaves no room."""
        steps = min(self.steps, 400)
        seen = steps * self.sampler.expected_batch(self.records)
        if not _random(self.pattern) or not 30 < seen < steps * self.records - 30:
            return
        alike = np.array_equal(self.table(self.seed, steps), self.table(self.seed + 7, steps))
        require(not alike, SECRET, str(self), "two runs with different secrets are the same")

    def check_pattern(self, runs: Sequence[Table]) -> None:
        """What the pattern of this sampler says."""
        for number, taken in enumerate(runs):
            _PATTERNS[type(self.pattern)](self, taken, number == 0)
        _check_pooled(self, runs)

    def check_beyond(self) -> None:
        """Steps after the last one of the pattern."""
        if self.length is None or self.length > MOST_STEPS:
            return
        taken = np.zeros((2 * self.length, self.records), dtype=bool)
        for step in range(2 * self.length):
            rng = Randomness.for_tests(self.seed).generator("sampling", self.sampler.address(step))
            try:
                taken[step, self.sampler.batch(step, records=self.records, rng=rng)] = True
            except DpfyError:
                continue
        most = _most(self.pattern)
        worst = int(taken.sum(0).max())
        require(
            most is None or worst <= most,
            BEYOND,
            f"{self}, steps up to {2 * self.length}",
            f"a record takes part {worst} times, where {most} are allowed",
        )

    def check_expected(self, runs: Sequence[Table]) -> None:
        """The mean over all runs; over the first steps, where records may use up their share."""
        sizes = np.array([taken.sum(1) for taken in runs], dtype=float)
        if isinstance(self.pattern, patterns.Separated):
            sizes = sizes[:, : self.pattern.separation]
        mean, expected = float(sizes.mean()), float(self.sampler.expected_batch(self.records))
        # A batch is at most as random as independent coins would make it.
        spread = math.sqrt(max(expected, 1e-12) / sizes.size)
        if isinstance(self.pattern, patterns.WithoutReplacement):
            spread = 0.0
        require(
            abs(mean - expected) <= DEVIATIONS * spread + 1 / sizes.size + 1e-9 * expected,
            SIZE,
            str(self),
            f"{mean:.6g} on average, and expected_batch says {expected:.6g}",
        )


def _length(pattern: patterns.Participation) -> int | None:
    if isinstance(pattern, patterns.FixedOrder | patterns.Reshuffled | patterns.RandomAllocation):
        return pattern.steps_per_epoch * pattern.epochs
    if isinstance(pattern, patterns.SecretBins):
        return pattern.bins * pattern.epochs
    return None


def _most(pattern: patterns.Participation) -> int | None:
    """The most participations of one record in a run of any length."""
    if isinstance(pattern, patterns.RandomAllocation):
        return pattern.epochs * pattern.times
    if isinstance(pattern, patterns.FixedOrder | patterns.Reshuffled | patterns.SecretBins):
        return pattern.epochs
    if isinstance(pattern, patterns.Separated):
        return pattern.most
    return 1 if isinstance(pattern, patterns.SinglePass) else None


def _random(pattern: patterns.Participation) -> bool:
    """Whether the accounting uses that an attacker does not know who takes part."""
    if isinstance(pattern, patterns.Poisson | patterns.CyclicPoisson):
        return pattern.rate < 1
    if isinstance(pattern, patterns.WithoutReplacement):
        return pattern.batch_size < pattern.records
    if isinstance(pattern, patterns.RandomAllocation):
        return pattern.times < pattern.steps_per_epoch
    return isinstance(pattern, patterns.SecretBins) and pattern.bins > 1


def _poisson(held: _Setting, taken: Table, first: bool) -> None:
    """Rates are pooled over runs; here is nothing that one run could break."""


def _without_replacement(held: _Setting, taken: Table, first: bool) -> None:
    assert isinstance(held.pattern, patterns.WithoutReplacement)
    sizes = np.unique(taken.sum(1))
    require(
        sizes.tolist() == [held.pattern.batch_size],
        PATTERN,
        str(held),
        f"batches of {sizes[:5].tolist()} records instead of {held.pattern.batch_size}",
    )


def _single_pass(held: _Setting, taken: Table, first: bool) -> None:
    _at_most(held, taken, 1)


def _at_most(held: _Setting, taken: Table, most: int) -> None:
    worst = int(taken.sum(0).max(initial=0))
    require(
        worst <= most,
        PATTERN,
        str(held),
        f"a record takes part {worst} times, where {most} are allowed",
    )


def _spaced(held: _Setting, taken: Table, separation: int) -> None:
    for shift in range(1, min(separation, len(taken))):
        near = int((taken[shift:] & taken[:-shift]).sum())
        require(
            near == 0,
            PATTERN,
            str(held),
            f"{near} participations of a record lie {shift} steps apart, less than {separation}",
        )


def _periodic(held: _Setting, taken: Table, period: int, epochs: int) -> None:
    """One place in the period, kept in all epochs."""
    _at_most(held, taken, epochs)
    whole = taken[: len(taken) // period * period].reshape(-1, period, held.records)
    moved = int((whole != whole[:1]).any(axis=(0, 1)).sum())
    require(moved == 0, PATTERN, str(held), f"{moved} records change their place between epochs")
    counts = whole.sum(1)
    require(
        bool((counts == 1).all()),
        PATTERN,
        str(held),
        f"a record takes part {counts.min()} to {counts.max()} times in an epoch",
    )


def _fixed_order(held: _Setting, taken: Table, first: bool) -> None:
    assert isinstance(held.pattern, patterns.FixedOrder)
    _periodic(held, taken, held.pattern.steps_per_epoch, held.pattern.epochs)


def _secret_bins(held: _Setting, taken: Table, first: bool) -> None:
    assert isinstance(held.pattern, patterns.SecretBins)
    _periodic(held, taken, held.pattern.bins, held.pattern.epochs)


def _reshuffled(held: _Setting, taken: Table, first: bool) -> None:
    assert isinstance(held.pattern, patterns.Reshuffled | patterns.RandomAllocation)
    times = getattr(held.pattern, "times", 1)
    _at_most(held, taken, held.pattern.epochs * times)
    period = held.pattern.steps_per_epoch
    counts = taken[: len(taken) // period * period].reshape(-1, period, held.records).sum(1)
    require(
        bool((counts == times).all()),
        PATTERN,
        str(held),
        f"a record takes part {counts.min()} to {counts.max()} times in an epoch",
    )


def _separated(held: _Setting, taken: Table, first: bool) -> None:
    assert isinstance(held.pattern, patterns.Separated)
    _at_most(held, taken, held.pattern.most)
    _spaced(held, taken, held.pattern.separation)


def _cyclic_poisson(held: _Setting, taken: Table, first: bool) -> None:
    assert isinstance(held.pattern, patterns.CyclicPoisson)
    cycle = held.pattern.cycle
    whole = taken[: len(taken) // cycle * cycle].reshape(-1, cycle, held.records)
    blocks = whole.any(0).sum(0)
    require(
        int(blocks.max(initial=0)) <= 1,
        PATTERN,
        str(held),
        f"a record takes part in the turns of {blocks.max(initial=0)} blocks",
    )


_PATTERNS: dict[type, Callable[[_Setting, Table, bool], None]] = {
    patterns.Poisson: _poisson,
    patterns.WithoutReplacement: _without_replacement,
    patterns.SinglePass: _single_pass,
    patterns.FixedOrder: _fixed_order,
    patterns.Reshuffled: _reshuffled,
    patterns.RandomAllocation: _reshuffled,
    patterns.Separated: _separated,
    patterns.CyclicPoisson: _cyclic_poisson,
    patterns.SecretBins: _secret_bins,
}


def _check_pooled(held: _Setting, runs: Sequence[Table]) -> None:
    """The statistics of the patterns that claim randomness."""
    pattern = held.pattern
    if isinstance(pattern, patterns.Poisson):
        _check_rates(held, np.concatenate(runs), pattern.rate)
        _check_independent(held, np.concatenate(runs), pattern.rate, pattern.rate**2)
    elif isinstance(pattern, patterns.WithoutReplacement):
        rate = pattern.batch_size / pattern.records
        both = rate * (pattern.batch_size - 1) / max(pattern.records - 1, 1)
        _check_rates(held, np.concatenate(runs), rate)
        _check_independent(held, np.concatenate(runs), rate, both)
    elif isinstance(pattern, patterns.CyclicPoisson):
        _check_cyclic(held, runs, pattern)
    elif isinstance(pattern, patterns.SecretBins):
        first = np.concatenate([taken[: pattern.bins] for taken in runs])
        _check_rates(held, first, 1 / pattern.bins, by_record=False)
        _check_bins(held, runs, pattern.bins)
    elif isinstance(pattern, patterns.RandomAllocation):
        rate = pattern.times / pattern.steps_per_epoch
        _check_rates(held, np.concatenate(runs), rate, by_record=False)
        _check_allocation(held, runs, pattern)


def _check_allocation(
    held: _Setting, runs: Sequence[Table], pattern: patterns.RandomAllocation
) -> None:
    """Pairs of steps of one epoch, of neighbouring epochs, and pairs of records: as often as
    independent uniform choices make them.
    """
    period, times = pattern.steps_per_epoch, pattern.times
    rate, both = times / period, times * (times - 1) / max(period * (period - 1), 1)
    epochs = [run.reshape(-1, period, held.records) for run in runs if len(run) % period == 0]
    whole = np.concatenate(epochs) if epochs else np.zeros((0, period, held.records), dtype=bool)
    for first, second in {(0, 1), (0, period - 1), (period // 2, period - 1)}:
        if first < second < period and len(whole):
            seen = (whole[:, first] & whole[:, second]).sum()
            require_rate(seen, both, len(whole) * held.records, RATE, f"{held}, one epoch")
    if period == 1:
        return
    for run in epochs:
        if len(run) > 1:
            for shift in (0, 1):  # the same place, and the one before
                moved = np.roll(run[1::2], shift, axis=1)
                seen = (moved & run[: len(run) // 2 * 2 : 2]).sum()
                require_rate(seen, rate**2, moved.size, BETWEEN_STEPS, f"{held}, two epochs")
    pairs = held.records // 2
    if pairs and len(whole):
        seen = (whole[:, 0, :pairs] & whole[:, 0, pairs : 2 * pairs]).sum()
        require_rate(seen, rate**2, len(whole) * pairs, BETWEEN_RECORDS, str(held))


def _check_rates(held: _Setting, taken: Table, rate: float, by_record: bool = True) -> None:
    steps, records = taken.shape
    require_rate(taken.sum(), rate, taken.size, RATE, str(held))
    if by_record:
        counts = taken.sum(0)
        for record in {0, records - 1}:
            require_rate(counts[record], rate, steps, RATE, f"{held}, record {record}")
        for record in {int(counts.argmin()), int(counts.argmax())}:
            require_rate(counts[record], rate, steps, RATE, f"{held}, record {record}", records)
    sizes = taken.sum(1)
    require_rate(sizes[0], rate, records, RATE, f"{held}, step 0")
    for step in {int(sizes.argmin()), int(sizes.argmax())}:
        require_rate(sizes[step], rate, records, RATE, f"{held}, step {step}", steps)


def _check_independent(held: _Setting, taken: Table, rate: float, both: float) -> None:
    """`both` is the chance that two records are in one batch."""
    steps, records = taken.shape
    for shift in (1, 2, 3, 7):
        if shift < steps:
            pairs = int((taken[shift:] & taken[:-shift]).sum())
            trials = (steps - shift) * records
            where = f"{held}, steps {shift} apart"
            _require_pairs(pairs, rate**2, rate, trials, BETWEEN_STEPS, where)
    for shift in (1, 2, records // 2):
        if 0 < shift < records:
            pairs = int((taken[:, shift:] & taken[:, :-shift]).sum())
            where = f"{held}, records {shift} apart"
            trials = steps * (records - shift)
            _require_pairs(pairs, both, rate, trials, BETWEEN_RECORDS, where)
    # How batch sizes and counts of records vary shows dependence of any range.
    variance = rate * (1 - rate)
    if isinstance(held.pattern, patterns.Poisson) and variance:
        spread = float(((taken.sum(1) - rate * records) ** 2).mean()) / (variance * records)
        _require_spread(spread, steps, records, variance, BETWEEN_RECORDS, held, "batch sizes")
    if variance:
        counts = taken.sum(0)
        spread = float(((counts - rate * steps) ** 2).mean()) / (variance * steps)
        _require_spread(spread, records, steps, variance, BETWEEN_STEPS, held, "records' counts")


def _require_pairs(
    found: int, expected: float, rate: float, trials: int, property: str, where: str
) -> None:
    """Pairs overlap, so a record's own rate moves many of them at once: twice the spread."""
    spread = math.sqrt(trials * expected * (1 - expected)) + 2 * rate * math.sqrt(
        trials * rate * (1 - rate)
    )
    require(
        abs(found - trials * expected) <= DEVIATIONS * spread + 2,
        property,
        where,
        f"{found} pairs of participations, where {trials * expected:.1f} are expected",
    )


def _require_spread(
    spread: float,
    count: int,
    trials: int,
    variance: float,
    property: str,
    held: _Setting,
    what: str,
) -> None:
    """A sample variance over the one of independent coins, from `count` counts of `trials`."""
    kurtosis = 2 + (1 - 6 * variance) / (variance * trials)
    limit = DEVIATIONS * math.sqrt(max(kurtosis, 0.0) / count) + 40 / (count * variance * trials)
    require(
        abs(spread - 1) <= limit,
        property,
        str(held),
        f"{what} vary {spread:.3f} times as much as independent coins do",
    )


def _check_cyclic(held: _Setting, runs: Sequence[Table], pattern: patterns.CyclicPoisson) -> None:
    """In its turn each record tosses a coin; blocks are of one expected size."""
    rounds = []
    for taken in runs:
        whole = taken[: len(taken) // pattern.cycle * pattern.cycle]
        rounds.append(whole.reshape(-1, pattern.cycle, held.records).any(1))
    by_round = np.concatenate(rounds)
    _check_rates(held, by_round, pattern.rate)
    if pattern.rate < 1:
        _check_independent(
            _Setting(held.sampler, patterns.Poisson(pattern.rate), held.records, held.seed, 0),
            by_round,
            pattern.rate,
            pattern.rate**2,
        )


def _check_bins(held: _Setting, runs: Sequence[Table], bins: int) -> None:
    """Two records fall into one bin with a chance of one in `bins`, near or far apart."""
    if bins == 1:
        return
    places = np.stack([taken[:bins].argmax(0) for taken in runs])
    for shift in (1, 2, held.records // 2):
        if 0 < shift < held.records:
            same = places[:, shift:] == places[:, :-shift]
            require_rate(
                same.sum(), 1 / bins, same.size, BETWEEN_RECORDS, f"{held}, records {shift} apart"
            )
    if len(places) > 1:
        same = places[1:] == places[:-1]
        require_rate(same.sum(), 1 / bins, same.size, SECRET, f"{held}, bins of two runs")
