"""A fit of a file from the command line: names of estimators, settings as text, what is measured on
public rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.unit import Person
from dpfy.estimators import columns, records, target
from dpfy.estimators.estimator import (
    COMMON,
    ESTIMATORS,
    PrivateClassifier,
    PrivateEstimator,
    PrivateRegressor,
    every,
    load,
)
from dpfy.estimators.given import FileTable, table_for
from dpfy.report.verify import verify
from dpfy.runs.run import Progress, Run
from dpfy.tables.columns import Column, Number

SHORT = {
    "logistic": "LogisticRegression",
    "svm": "LinearSVC",
    "linear": "LinearRegression",
    "ridge": "Ridge",
    "poisson": "PoissonRegressor",
    "naive-bayes": "NaiveBayes",
    "boosting": "AdditiveBoostingClassifier",
    "boosted-trees": "GradientBoostingClassifier",
    "forest": "RandomForestClassifier",
    "tree": "DecisionTreeClassifier",
    "soft-trees": "SoftTreeClassifier",
    "mixture": "GaussianMixture",
}
"""Names on the command line; every estimator is known by its own name in small letters with dashes,
too. Where the target is a number, a family of classifiers stands for its regressors.
"""


def names() -> dict[str, type[PrivateEstimator]]:
    """Every estimator by its names on the command line, short ones first."""
    import dpfy.estimators  # all of them

    assert dpfy.estimators
    known = every()
    found = {short: known[name] for short, name in SHORT.items() if name in known}
    return found | {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower(): kind
        for name, kind in sorted(known.items())
    }


def kind_for(name: str, schema: str, target: str | None) -> type[PrivateEstimator]:
    """The estimator of that name; of a family in `SHORT`, the one that predicts what the schema
    says the target is.
    """
    kind = names()[check.one_of("--estimator", name, names())]
    if (
        name in SHORT
        and issubclass(kind, PrivateClassifier)
        and isinstance(columns.label_of(schema, target), Number)
    ):
        return ESTIMATORS.get(kind.__name__.replace("Classifier", "Regressor"), kind)
    return kind


def settings(kind: type[PrivateEstimator], given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of an estimator by their names; unknown ones are refused."""
    known = [name for name in kind().get_params(deep=False) if name not in COMMON]
    for key in given:
        check.one_of("--set", key, known)
    return dict(given)


def person(user: str | None, most_records: int | None) -> Person | None:
    """The person that is protected, None for a record."""
    if user is None and most_records is None:
        return None
    if user is None or most_records is None:
        name, rule = (
            ("--person", "must be given: the column with the person that a row belongs to")
            if user is None
            else ("--at-most", "must be given: how many rows of one person are used")
        )
        raise InvalidInput(name, None, rule)
    return Person(user, most_records)


@dataclass(frozen=True)
class FitRequest:
    """A fit as it was asked for: `data` and `schema` are files, `given` the parameters of the
    estimator.
    """

    estimator: str
    data: str
    schema: str
    target: str | None
    given: Mapping[str, Any]
    test: str | None = None

    def run(self, place: Run, progress: Progress | None = None) -> tuple[Any, dict[str, float]]:
        """The fitted estimator, and figures of the public test rows."""
        kind = kind_for(self.estimator, self.schema, self.target)
        made = kind(**self.given, schema=self.schema, run=place)
        made._progress = progress  # type: ignore[attr-defined]
        table = table_for(made, self.data, (), self.target)
        if not issubclass(kind, PrivateClassifier | PrivateRegressor):
            if self.target is not None:
                raise InvalidInput(
                    "--target", self.target, f"is not for {self.estimator}, which predicts nothing"
                )
            return made.fit(table), {}
        said = columns.label_of(self.schema, self.target)
        if said is None:
            raise InvalidInput("--target", None, "must be given: the schema has no label")
        made.target = said.name  # type: ignore[attr-defined]
        held = None if self.test is None else self._test(kind, said)
        made.fit(table, table.target(said.name))
        return made, {} if held is None else figures(made, held, held.target(said.name))

    def _test(self, kind: type[Any], said: Column) -> FileTable:
        """The public test rows, read whole: what is wrong with them is said before the fit."""
        held = FileTable(str(self.test))
        truth = held.target(said.name)
        if issubclass(kind, PrivateRegressor):
            there = ~np.isnan(target.numbers_of(truth))
        else:
            there = target.classes(self.given.get("classes"), said, truth).read(truth) >= 0
        unit = self.given.get("unit")
        person = None if unit is None else unit.column
        form = columns.TableForm.of(held)
        form = form if person is None else form.without(person)
        features = columns.public(form, self.schema, None, said.name, person)
        if not records.read(held, features).size:
            raise InvalidInput("--test", self.test, "must hold at least one row")
        if not there.any():
            raise InvalidInput("--test", self.test, f"must hold a row with a value of {said.name}")
        return held


def figures(made: Any, held: FileTable, truth: Any) -> dict[str, float]:
    """How well public rows are predicted."""
    if isinstance(made, PrivateRegressor):
        values = target.numbers_of(truth)
        there = ~np.isnan(values)
        values = values[there]
        error = float(np.mean((values - made.predict(held)[there]) ** 2))
        return {"test_rmse": error**0.5, "test_r2": 1 - error / max(float(values.var()), 1e-300)}
    places = target.ClassTarget(tuple(made.classes_.tolist())).read(truth)
    there = places >= 0  # rows without a label are not counted
    places, chances = places[there], made.predict_proba(held)[there]
    found = {"test_accuracy": float((chances.argmax(axis=1) == places).mean())}
    if len(made.classes_) == 2 and 0 < places.mean() < 1:
        from sklearn.metrics import roc_auc_score

        found["test_auroc"] = float(roc_auc_score(places, chances[:, 1]))
    return found


@dataclass(frozen=True)
class RowPredictions:
    """What a released estimator says about public rows."""

    told: dict[str, Any]
    lines: tuple[str, ...]

    def predicted(self) -> list[Any]:
        """The prediction for each row."""
        return list(self.told["predictions"])

    @property
    def probabilities(self) -> NDArray[np.float64] | None:
        """The probability of each class for each row; None where numbers are predicted."""
        return np.array(self.told["probabilities"]) if "probabilities" in self.told else None

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return self.told

    def to_csv(self) -> str:
        """As CSV."""
        return "\n".join(self.lines) + "\n"


def predicted(run: Path | str, data: Any) -> RowPredictions:
    """What a released estimator says about the rows of a file or a table. The folder is verified
    first.
    """
    run = Path(run)
    wrong = [finding for finding in verify(run) if not finding.holds]
    if wrong:
        raise Corrupt(run.name, f"does not verify: {wrong[0].what}: {wrong[0].detail}")
    made = load(run)
    if not hasattr(made, "predict"):
        raise InvalidInput(
            "run", str(run), f"holds a {type(made).__name__}, which predicts nothing"
        )
    rows = FileTable(data) if isinstance(data, str | Path) else data
    found = made.predict(rows)
    told: dict[str, Any] = {"predictions": found.tolist()}
    lines = ["prediction", *(str(value) for value in found.tolist())]
    if hasattr(made, "predict_proba"):
        chances = made.predict_proba(rows)
        names = [
            str(label) for label in getattr(made, "classes_", np.arange(chances.shape[1])).tolist()
        ]
        told |= {"classes": names, "probabilities": chances.tolist()}
        lines[0] = ",".join(["prediction", *(f"P({name})" for name in names)])
        lines[1:] = [
            ",".join([a, *(f"{p:.6g}" for p in row)])
            for a, row in zip(lines[1:], chances.tolist(), strict=True)
        ]
    return RowPredictions(told, tuple(lines))
