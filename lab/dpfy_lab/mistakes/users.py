"""Mistakes about whose records are: a user in two places, a bound that is kept for something else
than the user, records protected where a user was promised to be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.users import EVALUATION, NOISE, SENSITIVITY, SHARED, SINGLE, WHOLE
from dpfy_lab.mistakes.noise import RELEASE, scaled
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

GROUPED = "dpfy.data.owners.Owned.grouped"
PER_USER = "dpfy.gradients.engine.per_user"


def grouping(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Another grouping of the records by user than the real one."""
    return lambda real, self, base: change(real(self, base))


@mistake("user-in-two-rows", "a user is two rows, each clipped for itself", WHOLE, GROUPED)
@grouping
def _(source: Any) -> Any:
    # Under two names, or with two clients.
    if not hasattr(source, "counts") or source.counts.max() < 4 * source.most:
        return source
    user = int(source.counts.argmax())
    half = int(source.counts[user]) // 2
    first = np.append(source.first, source.first[user] + half)
    counts = np.append(source.counts, source.counts[user] - half)
    counts[user] = half
    return replace(source, first=first, counts=counts)


@mistake(
    "bound-per-batch",
    "the most records of a user are counted in each batch, not in the data",
    SINGLE,
    GROUPED,
)
@grouping
def _(source: Any) -> Any:
    return replace(source, rows=np.arange(len(source.base)))


@mistake(
    "kept-by-place",
    "which records of a user are kept depends on everybody else's",
    SINGLE,
    GROUPED,
)
@grouping
def _(source: Any) -> Any:
    # One user more, and others are taken for everybody.
    size = len(source.base)
    order = np.random.default_rng(size).permutation(size)
    return replace(source, rows=np.sort(order[: len(source.rows)]))


@mistake(
    "second-owner-forgotten",
    "the limit of a person counts the records of which they are the first owner",
    SHARED,
    "dpfy.tables.shared.within_limit",
)
def _(real: Any, owners: Any, *more: Any) -> Any:
    return real(owners[:, :1], *more)


@mistake(
    "room-of-any-owner",
    "a record with several owners is used while one of them has room",
    SHARED,
    "dpfy.tables.shared.within_limit",
)
def _(real: Any, owners: Any, *more: Any) -> Any:
    return np.any([real(owners[:, k : k + 1], *more) for k in range(owners.shape[1])], axis=0)


@mistake("user-clip-records", "a user's gradients are clipped record by record", SENSITIVITY)
def _(patch: Patch) -> None:
    records: list[Any] = []

    def per_user(real: Any, losses: Any, given: Any, **named: Any) -> Any:
        records[:] = [losses.reshape(-1), given.reshape(-1)]
        return real(losses, given, **named)

    def bounded_sum(real: Any, self: Any, losses: Any, clip: Any, mask: Any = None) -> Any:
        kept = (
            records[1]
            if mask is None
            else records[1] & mask.repeat_interleave(len(records[1]) // len(mask))
        )
        return real(self, records[0], clip, kept)

    patch.around(PER_USER, per_user)
    patch.around("dpfy.gradients.engines.loop.BatchedEngine.bounded_sum", bounded_sum)


@mistake(
    "user-records-apart",
    "a user's records are summed as units of their own",
    SENSITIVITY,
    PER_USER,
)
def _(real: Any, losses: Any, given: Any, **named: Any) -> Any:
    return losses


mistake("user-noise-of-record", "noise for one record of a user's four", NOISE, RELEASE)(
    scaled(1 / 4)
)


@mistake(
    "user-evaluation-of-records",
    "every held-out record of a user counts, the noise is for one of them",
    EVALUATION,
    "dpfy.training.fit.by_unit",
)
def _(real: Any, test: Any, recipe: Any) -> Any:
    return test.data
