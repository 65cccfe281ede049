"""Intervals and p-values of the t-test cover sampling and noise: coverage by simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.statistics.answer import NoiseLaw
from dpfy.statistics.groups import GroupBy
from dpfy.statistics.moments import CURVE, PIN
from dpfy.statistics.t_test import MeanTest
from dpfy.tables import Number

COLUMN = Number("x", 0, 10)


def _released(t: np.ndarray, norm: str, spread: NoiseLaw, rng: np.random.Generator) -> np.ndarray:
    """The sums of one sample, with noise: what `MomentStatistic.rows` says a record adds."""
    if norm == "l1":
        up, down = (1 + t) / 2, (1 - t) / 2
        sums = [(down * down).sum(), (2 * up * down).sum(), (up * up).sum()]
        return np.array(sums) + rng.laplace(0, spread.scale, 3)
    sums = [t.sum(), (CURVE * (t * t - 0.5)).sum(), PIN * len(t)]
    return np.array(sums) + rng.normal(0, spread.scale, 3)


def _coverage(records: int, family: str, scale: float, draws: int) -> tuple[float, float]:
    """How often the interval holds the true mean, and p-values below 0.05 when it is asked."""
    rng = np.random.default_rng([records, len(family), int(scale * 100)])
    norm, spread = ("l1" if family == "laplace" else "l2"), NoiseLaw(family, scale)
    held = rejected = 0
    for _ in range(draws):
        x = rng.beta(2, 5, records) * 10  # of mean 20 / 7
        test = MeanTest("ttest", GroupBy.__new__(GroupBy), None, COLUMN, 2, mean=20 / 7)
        mean, p = test.group_answers(_released(x / 5 - 1, norm, spread, rng)[None, :], spread, norm)
        held += mean.interval[0] <= 20 / 7 <= mean.interval[1]
        rejected += p.value <= 0.05
    return held / draws, rejected / draws


SETTINGS = [
    (n, f, s) for n in (50, 1000) for f in ("laplace", "gaussian") for s in (0.5, 4.0, 30.0)
]


@pytest.mark.slow
@pytest.mark.parametrize(("records", "family", "scale"), SETTINGS)
def test_intervals_hold_the_true_mean_as_often_as_they_say(
    records: int, family: str, scale: float
) -> None:
    held, rejected = _coverage(records, family, scale, 5000)
    slack = 3 * np.sqrt(0.05 * 0.95 / 5000)  # three deviations of 5,000 draws
    assert held >= 0.95 - slack
    assert rejected <= 0.05 + slack


@pytest.mark.parametrize(("family", "scale"), [("laplace", 0.5), ("gaussian", 100.0)])
def test_coverage_in_brief(family: str, scale: float) -> None:
    """Once sampling is nearly all of the error, once noise is."""
    held, rejected = _coverage(20_000, family, scale, 150)
    assert held >= 0.85
    assert rejected <= 0.15


def test_a_query_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    people = dpfy.Dataset({"x": rng.normal(4, 1, 4000)}, [COLUMN])
    run = dpfy.Run("runs/ttest", seed=3)
    mean, p = dpfy.query(people, "ttest(x, 6)", epsilon=1.0, delta=0, run=run)
    assert mean.interval[0] < 4 < mean.interval[1] < 5
    assert p.value < 0.001
    with pytest.raises(InvalidInput, match="range"):
        dpfy.query(people, "ttest(x, 11)", epsilon=1.0, delta=0)
    cells = {"x": [1.0, 2.0], "who": ["a", "a"]}
    owned = dpfy.Dataset(cells, [COLUMN], unit=dpfy.Person("who", at_most=2))
    with pytest.raises(Unsupported, match="not independent"):
        dpfy.query(owned, "ttest(x, 6)", epsilon=1.0, delta=0)
