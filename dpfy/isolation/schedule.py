"""Which steps of a run are checked, and how thoroughly: a part of the plan of the checks that the
run's secret decides, before any record is read.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from enum import IntEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dpfy.core.randomness import Randomness
from dpfy.sampling.samplers import physical

PARTS = 9
"""Into how many parts of equal length a run is cut; in each of them one step is checked."""

LIMIT = 0.016
"""Part of a run's time that may go to checks, to the monitor and to what is asked at every step, all
together. Only what is due in any case may take more.
"""

QUIET = 2.5e-6
"""What is asked at a step takes so many seconds where nothing is done."""

SHARE, CHANCE = 0.005, 16
"""Further steps are checked while checks take less than this share of the run's time: one step in
so many, drawn at random.
"""

ROWS = 16
"""A checked step begins with a physical batch of this many records: enough to show mixing, and
cheap.
"""

LAST = 2
"""The last physical batch of the first step has so many records, where no more rows are asked for:
so what follows the number of records is seen before anything is released.
"""

MEMORY = 4
"""A check holds a few times the tensors of a step: it has at most one part in so many of a full
physical batch.
"""

NEVER = 1 << 62
"""A step that no run reaches."""


class CheckLevel(IntEnum):
    """What is done at a step: nothing, recording alone, a check of the losses, of gradients too, or
    in other circumstances as well.
    """

    NOTHING = 0
    RECORD = 1
    LIGHT = 2
    CHECK = 3
    THOROUGH = 4


class CheckSchedule:
    """The steps of a run that are due for a check (`due`), and those of them whose gradients are
    checked (`cut`: their batch is cut so that the first part is small).

    Guarantees: a function of the run's secret and its number of steps alone; of 10 steps or more
    eight are due beside the first two.
    """

    def __init__(self, steps: int, randomness: Randomness, varies: bool) -> None:
        """`varies` says whether batches have random sizes."""
        self.steps = steps
        rng = randomness.generator("checks", 0)
        edges = np.linspace(2, steps, PARTS + 1)
        picks = [int(a + rng.random() * (b - a)) for a, b in pairwise(edges)]
        self.due = {0, 1, *[step for step in picks if 2 <= step < steps]}
        self.cut = {1, *[step for step in picks[4::8] if 2 <= step < steps]}
        self._varies = varies
        self._looked_at = sorted(self.due | {step - 1 for step in self.cut})
        self._coin = random.Random(randomness.key("further checks", 0))
        self._further = 0
        self._draw_further(2)

    def clear(self) -> None:
        """Make no step due."""
        self.due, self.cut, self._looked_at, self._further = set(), set(), [], NEVER

    def next_look(self, step: int) -> int:
        """The first step from `step` on that is due, comes before one whose gradients are checked,
        or was drawn for a further check.
        """
        place = bisect_left(self._looked_at, step)
        due = self._looked_at[place] if place < len(self._looked_at) else NEVER
        return min(due, max(step, self._further))

    def due_from(self, step: int) -> int:
        """How many steps from `step` on are recorded in any case."""
        return len(self._looked_at) - bisect_left(self._looked_at, step)

    def further(self, step: int, budget: CheckBudget) -> bool:
        """Whether to check a step that is not due: a drawn one, as long as checks take less than
        their share of the time, and something is left of the budget for all.
        """
        if step < self._further:
            return False
        self._draw_further(step + 1)
        return budget.checks <= SHARE * budget.elapsed and budget.left(step) > 0

    def _draw_further(self, start: int) -> None:
        self._further = start
        while self._coin.randrange(CHANCE):
            self._further += 1

    def pieces(
        self, step: int, indices: NDArray[np.int64], most: int, row_multiple: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """The physical batches of a step. One that is due for a check has two rows at least; the
        first step ends with few records; one whose gradients are checked begins with few: with half
        of them where there are few anyway and as many at every step, so that two sizes are seen.

        Guarantees: a function of the run's secret and the arguments alone, so that a resumed run
        cuts as before, and steps can be cut ahead.
        """
        if step not in self.due or row_multiple >= most > 1:
            return list(physical(indices, most, row_multiple=row_multiple))
        first = most
        if step == 0 and len(indices) >= 3 * LAST and row_multiple == 1:
            first = len(indices) - LAST
        if step in self.cut:
            few = row_multiple * -(-min(ROWS, max(2, most // MEMORY)) // row_multiple)
            half = row_multiple * -(-max(2, -(-len(indices) // 2)) // row_multiple)
            first = few if len(indices) > 2 * few else len(indices) if self._varies else half
        first = max(2, min(first, len(indices), most))
        least = max(2, row_multiple) if len(indices[:first]) == 1 else row_multiple
        return [
            *physical(indices[:first], max(2, most), row_multiple=least),
            *physical(indices[first:], most, row_multiple=row_multiple),
        ]


class CheckBudget:
    """What the checks of this process have taken, in seconds (`checks`, `monitor`), and what is left
    for more of them.
    """

    def __init__(self, schedule: CheckSchedule) -> None:
        self.checks = self.monitor = 0.0
        self._schedule, self._first = schedule, -1
        self._cheapest = math.inf
        self._time = Stopwatch()

    @property
    def elapsed(self) -> float:
        """The seconds of the run so far."""
        return self._time.seconds

    def add_check(self, seconds: float) -> None:
        """A step was recorded, or checked."""
        self.checks += seconds
        self._cheapest = min(self._cheapest, seconds)

    def whole(self, step: int) -> float:
        """What all steps of this process take without checks, as far as those before `step` say."""
        self._first = step if self._first < 0 else self._first
        begun = step - self._first + 1
        return max(0.0, self.elapsed - self.checks - self.monitor) / begun * self._span

    def left(self, step: int) -> float:
        """Seconds of the limit that neither the checks and the monitor so far, nor the calls at all
        steps, nor the checks that are still due from `step` on need.
        """
        due = self._schedule.due_from(step)
        planned = due * self._cheapest if due else 0.0
        limit = LIMIT * self.whole(step) - QUIET * self._span
        return limit - self.checks - self.monitor - planned

    @property
    def _span(self) -> int:
        return self._schedule.steps - self._first


class Stopwatch:
    """The time of a run, for budgets: the wall clock or the processor's, whichever says less, so
    that a busy machine gives no budget that the run itself does not pay for.
    """

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return min(time.perf_counter() - self._wall, time.process_time() - self._cpu)
