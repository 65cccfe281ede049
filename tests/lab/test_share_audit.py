"""The audit of noise in shares, from outside: it counts shares, and misses no forgotten one."""

from __future__ import annotations

import numpy as np
import pytest

from dpfy.core.errors import InvalidInput
from dpfy_lab.share_audit import shares_seen


def drawn(shares: int, seed: int, size: tuple[int, int] = (20, 2000)) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return sum(np.rint(rng.normal(0, 3.0, size)) for _ in range(shares))


def test_it_counts_shares_and_finds_one_that_is_missing() -> None:
    share = float(drawn(1, 0, (200, 2000)).std())
    for seed in range(5):
        seen = shares_seen(drawn(20, seed), share)
        assert seen.low < 20 < seen.high
        assert seen.high - seen.low < 2
        assert seen.why_not(20) is None
        assert shares_seen(drawn(19, seed), share).why_not(20) is not None
        assert shares_seen(drawn(21, seed), share).low > 20


@pytest.mark.parametrize("noise", [np.zeros((1, 10)), np.full((10, 100), np.nan)])
def test_what_shows_nothing_is_refused(noise: np.ndarray) -> None:
    with pytest.raises(InvalidInput, match="noise"):
        shares_seen(noise, 1.0)
