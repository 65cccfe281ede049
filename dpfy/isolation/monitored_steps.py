"""Which batches the monitor sees, and what its findings mean: code that no check has seen, and values
that the loop kept from earlier batches.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dpfy.core.randomness import Randomness
from dpfy.isolation.monitor import CallSite, Monitor
from dpfy.isolation.schedule import NEVER, CheckBudget

SHARE, FREE = 0.003, 0.0035
"""The monitor sees as many batches as take these seconds, so that it sees much of a short run, and
this share of the run's time more, where the budget of all checks has so much left.
"""

CALL, BATCH = 9e-6, 1.5e-5
"""What the monitor takes for a call and for a batch beside its calls, in seconds: measured between
steps that fill the processor's caches with other things.
"""

EXTRA = 18
"""Steps recorded for what no check has seen, and one more for each hundred steps of the run."""


class MonitoredSteps:
    """Lets the monitor see batches at random, two in a row, and keeps what it found.

    `unseen` are places in the code that ran, or kept values, and that no checked step had. `active`
    says whether the monitor sees the batch that is out.

    Guarantees: how often it sees a batch follows from the time that it takes, spread evenly over
    the run, and no gap is longer than three times the shortest; which batches these are is drawn
    by the run's secret.
    """

    def __init__(self, steps: int, randomness: Randomness, budget: CheckBudget) -> None:
        self.monitor = Monitor()
        self.unseen: set[CallSite] = set()
        self.active = False
        self._steps, self._first = steps, -1
        self._budget = budget
        self._behind: set[CallSite] = set()
        self._cleared: set[CallSite] = set()
        self._recorded = 0
        self._coin = random.Random(randomness.key("monitor", 0))
        self._second = self._stopped = False
        self._batches = self._next = self._seen = 0

    def due(self) -> bool:
        """Whether the batch that goes out now is to be looked at: a drawn one, the one after it,
        or one of a step in which something unseen is to be recorded.
        """
        self._batches += 1
        return self.active or self._batches >= self._next or bool(self.unseen and not self._stopped)

    def suspects(self, step: int) -> bool:
        """Whether code ran that no check has seen, and there is room for recording it."""
        return bool(self.unseen) and self._recorded < EXTRA + step // 100

    def begin(self, step: int, batch: Sequence[Tensor], recorded: bool) -> None:
        """A batch goes out: see it, if it is one that was drawn, or the one after, or `recorded`."""
        self._first = step if self._first < 0 else self._first
        monitor = self.monitor
        if self.active and not (late := monitor.backward) <= monitor.checked:
            self._behind |= late - monitor.checked
            self.unseen |= self._behind
        if self.active and not self._second:
            self._second = True  # what the batch before this one left behind is used now
        else:
            drawn = self._batches >= self._next
            self.active, self._second = recorded or drawn, False
            if drawn:
                self._draw(step)
        if self.active:
            monitor.forward(batch, recorded)

    def _draw(self, step: int) -> None:
        """Draw the next batch to see, so that what is left of the time lasts to the end."""
        batches = self._batches / (step - self._first + 1) * (self._steps - step)
        spent, budget = self._budget.monitor, self._budget
        share = min(SHARE * budget.whole(step), budget.left(step) + spent - FREE)
        left = FREE + max(0.0, share) - spent
        each = spent / self._seen if self._seen else BATCH
        pairs = left / (2 * each)
        gap = batches / pairs - 2 if pairs > 1 else batches
        self._next = self._batches + 2 + max(0, round(gap * (0.5 + self._coin.random())))

    def end(self, recorded: bool) -> None:
        """The losses of the batch are there: note what the monitor found."""
        monitor = self.monitor
        monitor.leave()
        if not recorded:
            self._seen += 1
            self._budget.monitor += BATCH + CALL * monitor.calls
        if not (
            monitor.now <= monitor.checked
            and monitor.reused <= self._cleared
            and monitor.copied <= self._cleared
        ):
            kept = (monitor.reused | monitor.copied) - self._cleared
            self.unseen |= monitor.new | kept

    def found(self) -> bool:
        """Whether the recorded step ran something unseen."""
        return bool(self._behind or self.unseen & self.monitor.now)

    def recorded(self, checked: bool, settled: set[CallSite]) -> None:
        """The step was recorded, and `checked`; `settled` are places whose reads do no harm."""
        monitor = self.monitor
        if checked:
            monitor.checked |= monitor.now | monitor.backward
        self._cleared |= monitor.reused | settled
        self.unseen -= self._cleared | monitor.checked
        self._behind -= monitor.checked

    def reopen(self) -> None:
        """Look again at places whose reads did no harm."""
        self._cleared.clear()

    def charge(self) -> None:
        """A step is recorded for what is unseen."""
        self._recorded += bool(self.unseen)

    def kept(self, known: Collection[int]) -> dict[int, StorageWeakRef]:
        """By address, the storages of tensors that the loop made of earlier batches; never those at
        the addresses `known`, of the weights and this batch.
        """
        tensors = self.monitor.kept()
        storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
        return {s._cdata: StorageWeakRef(s) for s in storages if s._cdata not in known}

    def stop(self) -> None:
        """See no batch any more."""
        self.monitor.leave()
        self.active, self._stopped, self._next = False, True, NEVER
