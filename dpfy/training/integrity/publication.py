"""What may be published: numbers that the caller declares public, unless they are seen to come from
the batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from numbers import Real

import torch
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.isolation.monitor import Followed
from dpfy.training.integrity.copies import is_constant

CLOSE, NEAR = 1e-5, 1e-6
"""Relative distance at which a number is taken for the mean or sum of the last losses, and for
another statistic of recent ones.
"""
STEPS = 4
"""Steps of which losses are kept to compare with."""
QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
FEW, ANSWERS, PARTS = 1 << 12, 1 << 16, 32
"""Values of a batch that are compared one by one; scores that are kept to count right answers; and
the least denominator of a share of right answers that tells of the batch: simple fractions
recur.
"""

SOURCES = ("public", "released")
DECLARE = (
    'say source="public" (measured on public data) or source="released" (computed from released '
    "weights, the plan or the clock)"
)
READ = (
    "read by item() or tolist() from tensors of a batch, or computed from such numbers: publish "
    "figures of public data, which are read "
    "under torch.no_grad(), or keep it out of the run's files"
)
RULE = "which is private: evaluate on public data, or keep it out of the run's files"


def declared(source: str | None) -> str:
    """The source of numbers that are to be published: anyone who publishes them must say where they
    are from.
    """
    if source is None:
        raise InvalidInput("record source", None, DECLARE)
    return check.one_of("record source", source, SOURCES)


def require_unread(name: str, value: object) -> None:
    """Refuse a number that is known to be read from a batch."""
    if isinstance(value, Followed):
        raise InvalidInput(name, "a value computed from the data", f"is {READ}")


class Seen:
    """The last batches and their losses, to recognise numbers that were computed from them."""

    def __init__(self) -> None:
        self._steps: deque[list[Tensor]] = deque(maxlen=STEPS)
        self._answers: tuple[Tensor, Tensor] | None = None
        self.batch: tuple[Tensor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, losses: Tensor, new: bool) -> None:
        """Keep these losses, of a `new` step or of one more physical batch of the last."""
        if new or not self._steps:
            self._steps.append([])
        self._steps[-1].append(losses.detach())
        self._answers = _answers(losses)

    def check(self, name: str, value: object) -> None:
        """Refuse what is not a plain number, and one that is recognised as computed from a recent
        batch.

        Guarantees: mean, sum, extremes, quantiles, deviation and variance of the losses of the last
        `STEPS` steps are refused, also with an error of rounding; a single loss or real value of
        the last batch, as it is; and the share of right answers in it, where the loss is torch's
        cross entropy. So are numbers that the loop read by `item()` or `tolist()` after a step that
        was monitored, and what Python's arithmetic makes of them. A number that was computed from
        the data in another way cannot be distinguished from a public one.
        """
        if not name.rpartition(" ")[2].isidentifier():
            raise InvalidInput(
                "record", name, "names of values are words of letters, digits and underscores"
            )
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InvalidInput(
                name,
                type(value).__name__,
                "must be a plain number that may be published, not a tensor or a text",
            )
        number = float(value)
        if self._steps and math.isfinite(number) and number != 0:
            self._recognise(name, number)
        require_unread(name, value)

    def _recognise(self, name: str, number: float) -> None:
        """Refuse a number that is equal to a figure of a recent batch."""
        last = self._steps[-1][-1].double()
        tells = len(last) == 1 or (
            len(last) > 1 and bool(last.amin() != last.amax())
        )  # weights of zero give all records one loss
        if tells and any(
            math.isclose(number, float(m), rel_tol=CLOSE) for m in (last.mean(), last.sum())
        ):
            raise InvalidInput(
                name, "a value computed from the data", f"is the loss of the last batch, {RULE}"
            )
        if is_constant(number) and self._share(number) is None:
            return
        if self._share(number):
            raise InvalidInput(
                name,
                "a value computed from the data",
                f"is the share of right answers in the last batch, {RULE}",
            )
        if any(
            math.isclose(number, v, rel_tol=NEAR) for step in self._steps for v in _statistics(step)
        ):
            raise InvalidInput(
                name, "a value computed from the data", f"is a statistic of recent losses, {RULE}"
            )
        if any(_holds(t, number) for t in (*self._steps[-1], *self.batch)):
            raise InvalidInput(
                name, "a value computed from the data", f"is a value of the last batch, {RULE}"
            )

    def _share(self, number: float) -> bool | None:
        """Whether a number is the share of right answers, or of wrong ones, in the last batch; None
        where that is not known.
        """
        if self._answers is None:
            return None
        scores, target = self._answers
        right, count = int((scores.argmax(1) == target).sum()), len(target)
        if count // math.gcd(right, count) < PARTS:
            return None
        return any(
            math.isclose(number, whole * part / count, rel_tol=1e-7)
            for part in (right, count - right)
            for whole in (1, 100)
        )


def _answers(losses: Tensor) -> tuple[Tensor, Tensor] | None:
    """The scores and targets that torch's cross entropy keeps for its gradient."""
    node = losses.grad_fn
    if node is None or node.name() != "NllLossBackward0":
        return None
    scores, target = node._saved_self, node._saved_target  # type: ignore[attr-defined]
    return (scores, target) if scores.dim() == 2 and scores.numel() <= ANSWERS else None


def _statistics(pieces: list[Tensor]) -> Iterator[float]:
    """Figures of the losses of a step, and of each of its physical batches."""
    for part in [*pieces, torch.cat(pieces)] if len(pieces) > 1 else pieces:
        t = part.double()
        if len(t) == 0 or not bool(t.isfinite().all()):
            continue
        yield from (float(v) for v in (t.mean(), t.sum(), t.amin(), t.amax()))
        yield from (
            t.quantile(torch.tensor(QUANTILES, dtype=t.dtype, device=t.device)).tolist()
            if len(t) < 1 << 20
            else ()
        )
        yield float(t.median())
        for unbiased in (False, True) if len(t) > 1 else ():
            yield float(t.var(unbiased=unbiased))
            yield float(t.std(unbiased=unbiased))


def _holds(t: Tensor, number: float) -> bool:
    """Whether a number is among the values, to the last bit. Of many numbers in float32 each would
    be one by chance.
    """
    if not t.is_floating_point():
        return False
    flat = t.reshape(-1) if t.dtype == torch.float64 else t.reshape(-1)[:FEW]
    return bool((flat.double() == number).any())
