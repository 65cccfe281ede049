"""For all tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Processes that tests start find `tests` wherever they begin; at the end, so that a copy of dpfy in
# front is the one that is tested.
sys.path.append(str(Path(__file__).parents[1]))


LONG = (
    "training/integrity/test_faults.py",
    "accounting/test_laws.py",
    "estimators/test_estimator.py",
    "docs/test_blocks.py",
    "tuning/test_resume.py",
    "training/parallel/test_ranks.py",
    "fuzz/test_fuzz.py",
    "training/parallel/test_tensor_parallel.py",
    "training/parallel/test_rank_deaths.py",
)
"""Files of few tests that take long: begun first, so that no process is left alone with one at the
end.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next(
            (n for n, name in enumerate(LONG) if item.path.as_posix().endswith(f"/tests/{name}")),
            len(LONG),
        )

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    """The watch looks whether anything was compiled in its process: what one test compiles must not
    reach the next.
    """
    yield
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and len(frames.cached_backends) > 1:
        import torch

        torch._dynamo.reset()


@pytest.fixture
def fineness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Choose how fine the lattice of noise is. What was computed for another fineness is forgotten,
    before and after.
    """
    from dpfy.noise import lattice

    def forget() -> None:
        lattice._place.cache_clear()
        lattice.with_rounding.cache_clear()

    def choose(value: int) -> None:
        monkeypatch.setattr(lattice, "FINENESS", value)
        forget()

    yield choose
    forget()
