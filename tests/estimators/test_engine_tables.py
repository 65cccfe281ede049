"""A fit on a table that stays in its engine is the fit of the same rows in memory: equal sums before
noise, so with one seed the same model, to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dpfy
from dpfy import estimators
from dpfy.core.errors import Unsupported
from dpfy.estimators.given import EngineTable

SCHEMA = [
    dpfy.Number("age", 0, 100),
    dpfy.Number("pay", -7, 80.5, fill=3),
    dpfy.Number("need", 0, 1, drop=True, scale="unit"),
    dpfy.Category("job", ["nurse", "clerk", "cook"]),
    dpfy.Category("sex", ["f", "m"], fill="m"),
    dpfy.Date("seen", "2020-01-01", "2021-12-31", parts=("year", "month")),
    dpfy.Date("born", "1900-01-01", "2020-12-31"),
    dpfy.Number("cost", 0, 90),
    dpfy.Label("sick", ["no", "yes", "well"], fill="no"),
]


def _people(seed: int, rows: int = 400) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    odd = [np.nan, np.inf, -np.inf, 1e300, -0.0, 5e-324]

    def numbers(low: float, high: float) -> Any:
        found = rng.uniform(low - 5, high + 5, rows)
        return np.where(rng.random(rows) < 0.15, rng.choice(odd, rows), found)

    def words(*listed: str) -> Any:
        return rng.choice(np.array([*listed, "?", "", " x", "ü"], object), rows)

    days = pd.Timestamp("2019-06-01") + pd.to_timedelta(rng.integers(0, 1200, rows), "D")
    return pd.DataFrame(
        {
            "age": numbers(0, 100),
            "pay": numbers(-7, 80),
            "need": numbers(0, 1),
            "job": words("nurse", "clerk", "cook"),
            "sex": words("f", "m"),
            "seen": days,
            "born": days.strftime("%Y-%m-%d"),
            "cost": numbers(0, 90),
            "sick": words("no", "yes", "well"),
            "who": rng.integers(0, 120, rows),
        }
    )


def _fits() -> list[tuple[str, Any, str]]:
    common = {"epsilon": 2.0, "delta": 1e-6, "random_state": 1}
    return [
        ("bayes", estimators.NaiveBayes(bins=5, **common), "sick"),
        ("ridge", estimators.Ridge(solver="statistics", **common), "cost"),
        ("linear", estimators.LinearRegression(solver="statistics", norm=9.0, **common), "cost"),
        ("short", estimators.Ridge(solver="statistics", norm=1.0, **common), "cost"),
        ("descent", estimators.LinearRegression(rounds=3, **common), "cost"),
        ("classes", estimators.AdditiveBoostingClassifier(rounds=3, **common), "sick"),
        ("numbers", estimators.AdditiveBoostingRegressor(rounds=3, cyclic=True, **common), "cost"),
        ("two", estimators.AdditiveBoostingClassifier(rounds=3, **common), "sex"),
        ("margin", estimators.LinearSVC(rounds=3, **common), "sex"),
    ]


def _fitted(made: Any, data: Any, target: str, unit: Any) -> dict[str, np.ndarray]:
    schema = [c for c in SCHEMA if c.name == target or not isinstance(c, dpfy.Label)]
    people = dpfy.Dataset(data, schema, unit=unit)
    return dict(made.fit(people, target=target).release_.model.arrays)


QUICK = [("bayes", True), ("short", False)]
CASES = [
    pytest.param(name, owned, marks=() if (name, owned) in QUICK else pytest.mark.slow)
    for name, _, _ in _fits()
    for owned in (False, True)
    if not owned or name not in ("descent", "margin")  # gradients of persons are made in memory
]


@pytest.mark.parametrize(("name", "owned"), CASES)
def test_a_fit_in_the_engine_is_the_fit_in_memory(name: str, owned: bool, tmp_path: Path) -> None:
    made, target = next((made, target) for n, made, target in _fits() if n == name)
    frame = _people(3)
    unit = dpfy.Person("who", at_most=2) if owned else None
    expected = _fitted(made, frame, target, unit)
    order = np.random.default_rng(0).permutation(len(frame))
    for k, part in enumerate(np.array_split(order, 3)):
        frame.iloc[part].to_parquet(tmp_path / f"{k}.parquet", index=False)
    found = _fitted(made, str(tmp_path), target, unit)
    assert expected.keys() == found.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key)


def test_what_an_engine_does_not_make_is_refused_before_anything_is_reserved(
    tmp_path: Path,
) -> None:
    frame = _people(1, 40)
    for k in range(2):
        frame.to_parquet(tmp_path / f"{k}.parquet", index=False)
    ledger = tmp_path / "ledger.jsonl"
    people = dpfy.Dataset(str(tmp_path), SCHEMA[:-1], ledger=ledger)
    made = estimators.RandomForestRegressor(epsilon=1.0, delta=1e-6)
    with pytest.raises(Unsupported, match="stays in its engine"):
        made.fit(people, target="cost")
    assert not ledger.exists()
    with pytest.raises(Unsupported, match="stays in its engine"):
        EngineTable(str(tmp_path)).column("age")
