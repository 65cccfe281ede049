"""Data to measure on must not be the training data: whoever declares it public would publish what
is measured on private records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset


def share(train: Any, other: Any) -> bool:
    """Whether two data sets, or loaders of them, have a record in common, as far as that is seen:
    one data set, or parts of one.
    """
    (mine, of_mine), (theirs, of_theirs) = _origin(train), _origin(other)
    if mine is None or mine is not theirs:
        return False
    return of_mine is None or of_theirs is None or not set(of_mine).isdisjoint(of_theirs)


def _origin(data: Any) -> tuple[Any, Sequence[int] | None]:
    """The data set that records come from, and their numbers there; None for all of them."""
    data, indices = getattr(data, "dataset", data) if not isinstance(data, Subset) else data, None
    while isinstance(data, Subset):
        indices = [data.indices[i] for i in indices] if indices is not None else list(data.indices)
        data = data.dataset
    return data, indices
