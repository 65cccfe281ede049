"""How good a synthetic table is, and how close it comes to the records: what people ask, side by
side.

What is computed here from private records has no noise: it is as private as they are. The same on
records that are public, a holdout that its owners gave away, may be published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import errors as packages
from dpfy.core.errors import InvalidInput
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.counts import MOST_CELLS, encoded
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.rows import table_of

NOT_PRIVATE = (
    "NOT PRIVATE: these figures were computed from the records without noise. Keep them as the "
    "records are kept, or evaluate on "
    "public records (--public)."
)
PUBLIC = "computed on records that were declared public"
WORST = 5
"""Marginals that are named."""
COMPARED = 2000
"""Rows whose closest records are looked for."""
SEED = 5
"""Of folds and learners: public."""
LEARNERS = ("logistic regression", "gradient boosting", "random forest")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class TableEvaluation:
    """Figures of a synthetic table against real rows; `private` says in words what may be done with
    them.
    """

    private: str
    rows: dict[str, int]
    marginals: dict[str, Any]
    correlations: dict[str, Any]
    learners: dict[str, Any]
    disclosure: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return dict(self.__dict__)


def evaluate(
    real: Any,
    synthetic: Any,
    *,
    schema: Domain | str,
    target: str | None = None,
    holdout: Any = None,
    public: bool = False,
    degree: int = 3,
    progress: Callable[[str], None] = lambda what: None,
) -> TableEvaluation:
    """Compare two tables of one schema.

    `target` is the column that learners predict, each trained on the synthetic rows and tested on
    real ones; `holdout` are real rows that the synthetic table was not made from, on which learners
    and attacks are tested.
    """
    domain = Domain.given(schema)
    progress("reading")
    mine, theirs = _rows(real, domain), _rows(synthetic, domain)
    other = None if holdout is None else _rows(holdout, domain)
    if min(len(mine), len(theirs), *(() if other is None else (len(other),))) == 0:
        raise InvalidInput(
            "data", "a table without rows", "must have at least one row to be evaluated"
        )
    progress("marginals")
    marginals = {
        str(k): marginal_errors(domain, mine, theirs, k)
        for k in range(1, min(degree, len(domain.columns)) + 1)
    }
    correlations = _correlations(domain, mine, theirs)
    progress("learners")
    learners = (
        {}
        if target is None
        else learned(domain, mine, theirs, other, domain.number("target", target))
    )
    progress("disclosure")
    found = disclosure(domain, mine, theirs, other)
    sizes = {"real": len(mine), "synthetic": len(theirs)} | (
        {} if other is None else {"holdout": len(other)}
    )
    return TableEvaluation(
        PUBLIC if public else NOT_PRIVATE, sizes, marginals, correlations, learners, found
    )


def _rows(data: Any, domain: Domain) -> Codes:
    """All rows of a table as cells [rows, columns]."""
    return np.concatenate(list(encoded(data, domain)), axis=1).T


def marginal_errors(domain: Domain, real: Codes, synthetic: Codes, degree: int) -> dict[str, Any]:
    """L1 distances between the shares of all marginals of so many columns: their mean, the largest,
    and which are worst.
    """
    errors: dict[Clique, float] = {}
    for clique in combinations(range(len(domain.columns)), degree):
        if domain.cells(clique) <= MOST_CELLS:
            shape = domain.shape(clique)
            a, b = (
                table_of(real, clique, shape) / len(real),
                table_of(synthetic, clique, shape) / len(synthetic),
            )
            errors[clique] = float(np.abs(a - b).sum())
    if not errors:
        return {"marginals": 0}
    worst = sorted(errors, key=lambda clique: -errors[clique])[:WORST]
    return {
        "marginals": len(errors),
        "mean_l1": float(np.mean(list(errors.values()))),
        "largest_l1": max(errors.values()),
        "worst": [
            {"columns": [domain.names[v] for v in clique], "l1": errors[clique]} for clique in worst
        ],
    }


def _correlations(domain: Domain, real: Codes, synthetic: Codes) -> dict[str, Any]:
    """Cramer's V of every pair: how far apart the two tables are."""
    apart = []
    for pair in combinations(range(len(domain.columns)), 2):
        if domain.cells(pair) <= MOST_CELLS:
            apart.append(abs(_cramer(domain, real, pair) - _cramer(domain, synthetic, pair)))
    return {
        "pairs": len(apart),
        "mean_difference": float(np.mean(apart)) if apart else 0.0,
        "largest": float(max(apart, default=0.0)),
    }


def _cramer(domain: Domain, rows: Codes, pair: Clique) -> float:
    table = table_of(rows, pair, domain.shape(pair)).astype(np.float64)
    table = table[table.sum(1) > 0][:, table.sum(0) > 0]
    least = min(table.shape) - 1
    if least < 1:
        return 0.0
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(np.sqrt(((table - expected) ** 2 / expected).sum() / table.sum() / least))


def learned(
    domain: Domain, real: Codes, synthetic: Codes, holdout: Codes | None, target: int
) -> dict[str, Any]:
    """Learners trained on synthetic rows and on real ones, tested on real ones: accuracy and area
    under the ROC curve.

    Without a holdout, learners of real rows are tested by cross-validation in three folds.
    """
    test = real if holdout is None else holdout
    if len(np.unique(test[:, target])) < 2:
        raise InvalidInput(
            "target", domain.names[target], "must have at least two values among the real rows"
        )
    found: dict[str, Any] = {
        "target": domain.names[target],
        "majority": float(np.bincount(test[:, target]).max() / len(test)),
    }
    for name in LEARNERS:
        found[name] = {
            "trained_on_synthetic": _score(domain, name, synthetic, test, target),
            "trained_on_real": _folds(domain, name, real, target)
            if holdout is None
            else _score(domain, name, real, holdout, target),
        }
    return found


def _score(domain: Domain, name: str, train: Codes, test: Codes, target: int) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, roc_auc_score

    inputs = [v for v in range(len(domain.columns)) if v != target]
    labels = test[:, target]
    if len(np.unique(train[:, target])) < 2:
        return {"accuracy": float((labels == train[0, target]).mean()), "auroc": 0.5}
    learner = _learner(name)
    features = [_features(domain, rows, inputs, name) for rows in (train, test)]
    learner.fit(features[0], train[:, target])
    chances = learner.predict_proba(features[1])
    known = list(learner.classes_)
    positive = max(np.unique(labels))
    share = chances[:, known.index(positive)] if positive in known else np.zeros(len(test))
    return {
        "accuracy": float(accuracy_score(labels, learner.classes_[chances.argmax(1)])),
        "auroc": float(roc_auc_score(labels == positive, share)),
    }


def learner_scores(
    domain: Domain, name: str, train: Codes | None, test: Codes, target: int
) -> dict[str, float]:
    """Accuracy and area of one learner; without rows to train on, of one trained on the test's own,
    in three folds.
    """
    return (
        _folds(domain, name, test, target)
        if train is None
        else _score(domain, name, train, test, target)
    )


def _folds(domain: Domain, name: str, rows: Codes, target: int, folds: int = 3) -> dict[str, float]:
    place = np.random.default_rng(SEED).permutation(len(rows)) % folds
    scores = [
        _score(domain, name, rows[place != k], rows[place == k], target) for k in range(folds)
    ]
    return {key: float(np.mean([score[key] for score in scores])) for key in scores[0]}


def _learner(name: str) -> Any:
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise packages.missing("learners", "sklearn") from None
    if name == "logistic regression":
        return LogisticRegression(max_iter=300)
    if name == "random forest":
        return RandomForestClassifier(100, min_samples_leaf=5, random_state=SEED)
    return HistGradientBoostingClassifier(random_state=SEED)


def _features(domain: Domain, rows: Codes, inputs: list[int], learner: str) -> Floats:
    """Cells as numbers for trees; for a linear model numbers in [0, 1], and a feature for each word
    of a list.
    """
    if learner != "logistic regression":
        return rows[:, inputs].astype(np.float64)
    blocks = []
    for v in inputs:
        column = domain.columns[v]
        if column.ordered:
            blocks.append((rows[:, v] / max(1, column.cells - 1))[:, None])
        if not column.ordered or column.cells <= 16:
            blocks.append(np.eye(column.cells)[rows[:, v]])
    return np.concatenate(blocks, axis=1)


def disclosure(
    domain: Domain, real: Codes, synthetic: Codes, holdout: Codes | None
) -> dict[str, Any]:
    """How close synthetic rows are to records: copies, the number of columns in which the closest
    record differs, and a membership attack.

    A row that equals a record is no leak by itself where there are few combinations. With a
    holdout, copies and distances are set beside those of records that the table was not made from,
    and an attacker who takes a close synthetic row for a sign of membership is scored: an area of
    0.5 is chance.
    """
    rng = np.random.default_rng(SEED)
    some = synthetic[rng.permutation(len(synthetic))[:COMPARED]]
    near = closest(some, real)
    found: dict[str, Any] = {
        "copies": float((near == 0).mean()),
        "mean_distance": float(near.mean()),
    }
    if holdout is None:
        return found
    size = min(len(real), len(holdout))
    known, unknown = (
        real[rng.permutation(len(real))[:size]],
        holdout[rng.permutation(len(holdout))[:size]],
    )
    here, there = closest(some, known), closest(some, unknown)
    in_it, out = closest(known[:COMPARED], synthetic), closest(unknown[:COMPARED], synthetic)
    return found | {
        "copies_of_holdout": float((there == 0).mean()),
        "closer_to_real": float((here < there).mean() + (here == there).mean() / 2),
        "membership_auroc": _area(-in_it, -out),
    }


def closest(rows: Codes, others: Codes, block: int = 256) -> NDArray[np.int64]:
    """In how many columns the closest of `others` differs from each row."""
    best = np.full(len(rows), rows.shape[1], np.int64)
    narrow = [column.astype(np.int32) for column in others.T]
    for start in range(0, len(rows), block):
        part = rows[start : start + block].astype(np.int32)
        same = np.zeros((len(part), len(others)), np.int16)
        for v, column in enumerate(narrow):
            same += part[:, v, None] == column
        best[start : start + block] = rows.shape[1] - same.max(axis=1)
    return best


def _area(positive: NDArray[Any], negative: NDArray[Any]) -> float:
    """The area under the ROC curve: the chance that a positive scores above a negative, ties by
    half.
    """
    order = np.sort(negative)
    below, upto = (
        np.searchsorted(order, positive, "left"),
        np.searchsorted(order, positive, "right"),
    )
    return float((below + upto).mean() / (2 * len(negative)))


def lines(found: Mapping[str, Any]) -> list[str]:
    """An evaluation as text."""
    said = [found["private"], ""]
    for degree, held in found["marginals"].items():
        if held["marginals"]:
            worst = ", ".join(held["worst"][0]["columns"])
            said.append(
                f"marginals of {degree}: mean L1 {held['mean_l1']:.4f}, largest "
                f"{held['largest_l1']:.4f} ({worst})"
            )
    said.append(
        f"correlations: mean difference of Cramer's V "
        f"{found['correlations']['mean_difference']:.4f}"
    )
    for name in LEARNERS if found["learners"] else ():
        a, b = (found["learners"][name][key] for key in ("trained_on_synthetic", "trained_on_real"))
        said.append(
            f"{name}: accuracy {a['accuracy']:.4f} and AUROC {a['auroc']:.4f} trained on synthetic "
            f"rows; "
            f"{b['accuracy']:.4f} and {b['auroc']:.4f} trained on real ones"
        )
    near = found["disclosure"]
    said.append(
        f"rows that equal a record: {near['copies']:.2%}; columns in which the closest record "
        f"differs: {near['mean_distance']:.2f}"
    )
    if "membership_auroc" in near:
        said.append(f"closer to the records than to the holdout: {near['closer_to_real']:.2%}")
        said.append(f"membership attack: AUROC {near['membership_auroc']:.4f}")
    return said
