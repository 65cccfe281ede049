"""For all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Processes that tests start find `tests` wherever they begin; at the end, so that a copy of dpfy in front is the one that is tested.
sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    """The watch looks whether anything was compiled in its process: what one test compiles must not reach the next."""
    yield
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and len(frames.cached_backends) > 1:
        import torch

        torch._dynamo.reset()
