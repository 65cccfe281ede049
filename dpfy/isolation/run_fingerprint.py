"""The fingerprint of a run: each recorded step is compared with the steps before it, also with those
of the process that was resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.isolation.comparison import APART
from dpfy.isolation.fingerprint import (
    changed_constants,
    comparable,
    difference,
    joined,
    new_constant,
    scaled_by_length,
    scaled_by_size,
)
from dpfy.isolation.monitor import CallSite

EQUAL = 3
"""After so many pairs of steps with equal constants a place that reads values is looked at again
only after steps that are checked, and where new code runs.
"""

UNTRACEABLE = (
    "losses with constants that change from step to step, in a loop that reads values of batches"
)
TRACEABLE = (
    "do not read values of batches between steps; or make what changes from step to step before "
    "the run begins, as a tensor for all steps, and take table[training.steps_done]"
)
AS_STARTED = (
    "must be what the run was started with: the same noise must not meet another computation"
)


class RunFingerprint:
    """What the recorded steps of a run compute, all of them together."""

    def __init__(self, expected: str | None) -> None:
        """`expected` is the fingerprint of the process that was resumed, None for a new run."""
        self.value: str | None = None
        self.expected = expected
        self._last: tuple[int, str] | None = None
        self._equal: Counter[CallSite] = Counter()

    @staticmethod
    def require_readable(text: str) -> None:
        """Raise what reading a damaged fingerprint raises."""
        joined(text, text)
        scaled_by_size(text, text)
        scaled_by_length(text, text)

    def unsettle(self) -> None:
        """Look at all places again that read values."""
        self._equal.clear()

    def settled(self, copied: Collection[CallSite]) -> set[CallSite]:
        """Those places of `copied` after which constants were equal often enough."""
        return {site for site in copied if self._equal[site] >= EQUAL}

    def compare(self, step: int, mark: str, copied: Collection[CallSite]) -> bool:
        """Compare the fingerprint of a step with those before it. Whether the run's changed.

        `copied` are the places where the loop read values of the step before.

        Raises:
            InvalidInput: If a resumed run computes something else than before.
            Unsupported: If constants of the losses change, appear or disappear after such reads,
                or follow the number of records or the lengths of other sequences.
        """
        if self.expected is not None:
            if (what := difference(self.expected, mark)) is not None:
                raise InvalidInput("resume losses", what, AS_STARTED)
            self.value, self.expected = self.expected, None
            return False
        last, self._last = self._last, (step, mark)
        if copied and last is not None and step - last[0] <= 1:
            same = comparable(last[1], mark)
            of = changed_constants if same else new_constant
            if (name := of(last[1], mark)) is not None:
                raise Unsupported(f"{UNTRACEABLE} (in {name})", TRACEABLE)
            if same:
                self._equal.update(copied)
        if self.value is not None:
            if (name := scaled_by_size(self.value, mark)) is not None:
                raise Unsupported(
                    f"losses that depend on the number of records in the batch (in {name})", APART
                )
            if (name := scaled_by_length(self.value, mark)) is not None:
                raise Unsupported(
                    f"losses that depend on the lengths of other sequences of the batch (in "
                    f"{name})",
                    APART,
                )
            mark = joined(self.value, mark)
        changed = mark != self.value
        self.value = mark
        return changed
