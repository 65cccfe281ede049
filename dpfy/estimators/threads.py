"""Work on blocks of records on several threads. Sums are made without rounding, so that no release
depends on how many there are.

How many is said once, around a fit: a setting of the machine, which no function that computes
something has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from joblib import effective_n_jobs
from threadpoolctl import threadpool_limits

from dpfy.core import check
from dpfy.core.errors import InvalidInput

T = TypeVar("T")
R = TypeVar("R")

MOST = 1024
_COUNT: ContextVar[int] = ContextVar("threads of a fit", default=1)


def checked(n_jobs: int | None) -> int:
    """How many threads `n_jobs` means, as scikit-learn reads it: -1 for one on each core, None for
    one unless joblib was told otherwise.
    """
    if n_jobs is None:
        return int(effective_n_jobs(None))
    if check.integer("n_jobs", n_jobs, least=-MOST, most=MOST) == 0:
        raise InvalidInput("n_jobs", n_jobs, "must be at least 1, or -1 for one on each core")
    return int(effective_n_jobs(n_jobs))


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """What `each` is given inside runs on so many threads, and libraries of linear algebra on one
    for each of them.
    """
    count = checked(n_jobs)
    before = _COUNT.set(count)
    try:
        if count == 1:
            yield
        else:
            with threadpool_limits(1, "blas"):
                yield
    finally:
        _COUNT.reset(before)


def each(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of every item, in their order. After an error, or an interruption, nothing
    more is started.
    """
    count = _COUNT.get()
    if count == 1:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(count)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
