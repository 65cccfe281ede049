"""Estimators side by side over epsilon and number of records, on public or made-up data: nothing
here is charged.

Made-up data has the columns of a schema: numbers uniform in their transformed range, words of
categories with unequal shares, and a target that follows from all columns, by curves and by words,
with noise. It tells how families scale, not how they do on real records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.estimators import columns, target
from dpfy.estimators.estimator import PrivateClassifier, PrivateEstimator, PrivateRegressor
from dpfy.estimators.given import FileTable
from dpfy.estimators.job import names
from dpfy.tables.columns import Category, Label, Number
from dpfy.tables.schema import Schema

Objects = NDArray[Any]
MOST_RECORDS, LEAST_TEST = 1_000_000, 100
TEST = 4000
"""Rows that made-up models are measured on."""
AUROC, ACCURACY, R2 = "AUROC", "accuracy", "R2"


@dataclass(frozen=True, repr=False)
class ComparisonData:
    """Public records: features in the order of the schema, and the target."""

    schema: Any
    aim: Label | Number
    rows: Objects
    values: Objects

    @property
    def classes(self) -> bool:
        """Whether classes are predicted, not numbers."""
        return isinstance(self.aim, Label)

    @property
    def measure(self) -> str:
        """What is measured."""
        if not isinstance(self.aim, Label):
            return R2
        return AUROC if len(self.aim.classes) == 2 else ACCURACY


def described(schema: Any, named: str | None) -> tuple[list[Any], Label | Number]:
    """The features and the target of a schema."""
    held = Schema.of(schema).features
    aim = columns.label_of(schema, named)
    if aim is None:
        raise InvalidInput("--target", None, "must be given: the schema has no label")
    if not isinstance(aim, Label | Number):
        raise Unsupported(
            f"the target {aim.name!r}, which is no label and no number with a range,",
            "choose another column",
        )
    return [c for c in held if c.name != aim.name], aim


def made_up(schema: Any, named: str | None, records: int, seed: int = 0) -> ComparisonData:
    """Made-up records with the columns of a schema."""
    features, aim = described(schema, named)
    rng = np.random.default_rng(seed)
    rows, score = np.empty((records, len(features)), object), np.zeros(records)
    for k, column in enumerate(features):
        if isinstance(column, Category):
            shares = rng.dirichlet(np.ones(len(column.categories)))
            places = rng.choice(len(shares), records, p=shares)
            rows[:, k] = np.array(column.categories, object)[places]
            score += rng.normal(size=len(shares))[places]
        elif isinstance(column, Number):
            share = rng.random(records)
            low, high = (column.transformed(end) for end in column.range)
            value = low + share * (high - low)
            rows[:, k] = np.clip(
                np.expm1(value) if column.transform == "log1p" else value, *column.range
            )
            score += rng.normal() * 2 * (share - 0.5) + rng.normal() * np.sin(2 * math.pi * share)
        else:
            raise Unsupported(
                f"made-up data for {column.name!r}, whose range is not known", "state its range"
            )
    score = (score - score.mean()) / max(float(score.std()), 1e-9) + 0.7 * rng.normal(size=records)
    if isinstance(aim, Label):
        ends = np.quantile(score, np.arange(1, len(aim.classes)) / len(aim.classes))
        return ComparisonData(
            schema, aim, rows, np.array(aim.classes, object)[np.searchsorted(ends, score)]
        )
    low, high = aim.range
    return ComparisonData(
        schema, aim, rows, np.clip(low + (high - low) * (0.5 + score / 6), low, high)
    )


def public(file: str, schema: Any, named: str | None) -> ComparisonData:
    """The rows of a public file, in a public order."""
    features, aim = described(schema, named)
    table = FileTable(file)
    rows = np.stack([table.column(c.name) for c in features], axis=1)
    order = np.random.default_rng(0).permutation(len(rows))
    values = np.asarray(table.target(aim.name).to_numpy())
    return ComparisonData(schema, aim, rows[order], values[order])


def candidates(asked: Sequence[str], classes: bool) -> dict[str, type[PrivateEstimator]]:
    """Estimators by name; without names, all that predict what is asked."""
    wanted: type = PrivateClassifier if classes else PrivateRegressor
    known = {name: kind for name, kind in names().items() if issubclass(kind, wanted)}
    if asked:
        return {name: known[check.one_of("--estimator", name, known)] for name in asked}
    first: dict[type, str] = {}
    for name, kind in known.items():
        first.setdefault(kind, name)
    return {name: kind for kind, name in first.items()}


def compare(
    data: ComparisonData,
    kinds: Mapping[str, type[PrivateEstimator]],
    sizes: Sequence[int],
    epsilons: Sequence[float],
    delta: float,
    show: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """A row for each number of records, epsilon and estimator, best first. What an estimator
    refuses has no score, and says why.
    """
    held = max(sizes)
    if (left := len(data.rows) - held) < LEAST_TEST:
        most = len(data.rows) - LEAST_TEST
        raise InvalidInput(
            "--records",
            held,
            f"must leave {LEAST_TEST} rows of {len(data.rows)} to measure on: at most {most}",
        )
    test = slice(held, held + min(left, max(TEST, LEAST_TEST)))
    found: list[dict[str, Any]] = []
    for size in sizes:
        for epsilon in epsilons:
            rows = []
            for name, kind in kinds.items():
                show(f"{name}, {size} records, epsilon {epsilon:g}")
                made = kind(schema=data.schema, epsilon=epsilon, delta=delta, target=data.aim.name)  # type: ignore[call-arg]
                rows.append(
                    {
                        "records": size,
                        "epsilon": epsilon,
                        "estimator": name,
                        **_score(made, data, slice(0, size), test),
                    }
                )
            found += sorted(
                rows, key=lambda row: math.inf if row["score"] is None else -row["score"]
            )
    return found


def _score(made: Any, data: ComparisonData, train: slice, test: slice) -> dict[str, Any]:
    """What a fit scores on rows that it has not seen, and its processor seconds."""
    started = time.process_time()
    try:
        made.fit(data.rows[train], data.values[train])
    except DpfyError as problem:
        return {"score": None, "cpu_seconds": 0.0, "refused": str(problem)}
    spent = time.process_time() - started
    return {"score": _measured(made, data, test), "cpu_seconds": spent, "refused": None}


def _measured(made: Any, data: ComparisonData, test: slice) -> float:
    given, truth = data.rows[test], data.values[test]
    if not data.classes:
        values = target.numbers_of(truth)
        return 1 - float(np.mean((values - made.predict(given)) ** 2)) / max(
            float(values.var()), 1e-300
        )
    places, chances = (
        target.ClassTarget(tuple(made.classes_.tolist())).read(truth),
        made.predict_proba(given),
    )
    if data.measure == AUROC and 0 < places.mean() < 1:
        from sklearn.metrics import roc_auc_score

        return float(roc_auc_score(places, chances[:, 1]))
    return float((chances.argmax(axis=1) == places).mean())
