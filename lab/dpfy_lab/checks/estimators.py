"""Checks of classical estimators: what two neighbours tell apart, the noise of every release, and
whether minima were reached.

A fit is recorded on some records and repeated on their neighbours with the same noisy values. Then
all that differs is what one record adds, or one person, and must be within the bound of its round;
the number of releases, their shapes and the model must be the same. Nothing is estimated there. The noise is
tested for its scale, with a false-alarm rate below 1e-6, and for values that have none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core.unit import Adjacency, Person
from dpfy.estimators.claim import ReleaseRound
from dpfy.estimators.estimator import every
from dpfy.tables.columns import Category, Label, Number
from dpfy_lab.selftest.mistake import Check, Found
from dpfy_lab.selftest.patch import patching

FIT = "dpfy.estimators.fitting.FitSession"

SCHEMA = (
    Number("age", 17.0, 90.0),
    Category("job", ("clerk", "nurse", "smith"), fill="other"),
    Number("gain", 0.0, 1000.0, scale="unit", transform="log1p"),
    Label("rich", ("no", "yes")),
)
RECORDS, EXTREME = 60, 7
AT_MOST, MANY = 3, 50
"""Records of a person that are used, and of a person who has more."""
SIGMAS = 6.0
MINIMISE = "dpfy_lab.estimators.minima.minimise"
Row = tuple[str, str, float, float]


@dataclass(frozen=True)
class Case:
    """An estimator by its name, with settings. `table`: people (columns of the schema), or points
    (numbers within -1 and 1).

    `hidden` are rounds whose values may be far apart on neighbours: the proof is about the density
    of what is released, not a distance. `persons`: whether persons can be protected.
    """

    estimator: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    table: str = "people"
    hidden: tuple[str, ...] = ()
    adjacencies: tuple[str, ...] = (Adjacency.ADD_OR_REMOVE_ONE.value, Adjacency.REPLACE_ONE.value)
    persons: bool = True


CASES: dict[str, Case] = {
    **{
        f"linear, {solver}": Case("LogisticRegression", {"solver": solver})
        for solver in ("gradient", "newton", "functional")
    },
    "linear, output": Case("LogisticRegression", {"solver": "output"}, persons=False),
    "linear, objective": Case(
        "LogisticRegression", {"solver": "objective"}, hidden=("minimum",), persons=False
    ),
    "linear, bolt-on": Case(
        "LogisticRegression",
        {"solver": "bolt-on"},
        adjacencies=(Adjacency.REPLACE_ONE.value,),
        persons=False,
    ),
    "linear, statistics": Case(
        "LinearRegression",
        {"solver": "statistics", "norm": 1.2, "target_bounds": (-1, 1)},
        "points",
    ),
    "linear, ranges bought": Case("LinearRegression", {"bounds": None}, "points"),
    "naive bayes": Case("NaiveBayes"),
    "scaler": Case("PrivateScaler", {}, "points"),
    "components": Case("PCA", {"norm": 1.2}, "points"),
    "components, norm bought": Case("PCA", {}, "points"),
    "additive boosting": Case("AdditiveBoostingClassifier", {"rounds": 3}),
    "additive boosting, numbers": Case(
        "AdditiveBoostingRegressor",
        {"rounds": 3, "target_bounds": (-1, 1), "cyclic": True},
        "points",
    ),
    "boosted trees": Case("GradientBoostingClassifier", {"n_estimators": 5}),
    "boosted trees, numbers": Case(
        "GradientBoostingRegressor", {"n_estimators": 5, "target_bounds": (-1, 1)}, "points"
    ),
    "forest": Case("RandomForestClassifier", {"n_estimators": 30}),
    "forest, numbers": Case(
        "RandomForestRegressor", {"n_estimators": 30, "target_bounds": (-1, 1)}, "points"
    ),
    "top-down tree": Case("DecisionTreeClassifier", {"max_depth": 2}),
    "top-down tree, numbers": Case(
        "DecisionTreeRegressor", {"max_depth": 2, "target_bounds": (-1, 1)}, "points"
    ),
    "soft trees": Case("SoftTreeClassifier", {"rounds": 3, "epsilon": 30.0}),
    "soft trees, numbers": Case(
        "SoftTreeRegressor", {"rounds": 3, "epsilon": 30.0, "target_bounds": (-1, 1)}, "points"
    ),
    **{
        f"k-means, {method}": Case(
            "KMeans", {"method": method, "n_clusters": 2, "epsilon": 30.0}, "points"
        )
        for method in ("coreset", "lloyd", "synopsis", "hybrid", "aggregate")
    },
    "mixture": Case("GaussianMixture", {}, "points"),
    "mixture, full": Case("GaussianMixture", {"covariance_type": "full", "rounds": 2}, "points"),
}
"""Every family of estimators has some."""


def people(changed: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Records with a word and two amounts. One has the only word of its kind and lies at the ends
    of the ranges, or, if it is changed, at the other ends.
    """
    rng = np.random.default_rng(5)
    table = np.empty((RECORDS, 3), object)
    table[:, 0], table[:, 2] = rng.uniform(20, 80, RECORDS), rng.uniform(1, 400, RECORDS)
    table[:, 1] = rng.choice(np.array(["clerk", "nurse"], object), RECORDS)
    labels = np.where(table[:, 0] + rng.normal(0, 9, RECORDS) > 50, "yes", "no").astype(object)
    table[EXTREME] = (17.0, "clerk", 0.0) if changed else (90.0, "smith", 1e9)
    labels[EXTREME] = "yes" if changed else "no"
    return table, labels


def points(changed: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same for numbers, with a numeric target."""
    rng = np.random.default_rng(6)
    table = rng.uniform(-0.5, 0.5, (RECORDS, 4))
    target = np.clip(table[:, 0] - table[:, 1] + rng.normal(0, 0.2, RECORDS), -1, 1)
    table[EXTREME] = -1.0 if changed else 1.0
    target[EXTREME] = 1.0 if changed else -1.0
    return table, target


@dataclass
class FitTape:
    """What the releases of a fit were given and what they answered; with `before`, those whose
    answers are given again.
    """

    before: list[tuple[ReleaseRound, Any, Any]] | None = None
    calls: list[tuple[ReleaseRound, Any, Any]] = field(default_factory=list)

    def take(self, held: ReleaseRound, given: Any, answer: Any) -> Any:
        """Note a release; the answer that its user gets."""
        if self.before is not None and len(self.calls) < len(self.before):
            then = self.before[len(self.calls)][2]
            if np.shape(then) == np.shape(answer):
                answer = then
        self.calls.append((held, given, answer))
        return answer


@contextlib.contextmanager
def _recorded(tape: FitTape) -> Iterator[None]:
    """Every release of a fit goes through the tape."""

    def released(real: Any, self: Any, name: str, total: Any, bits: int = 0) -> Any:
        given = np.array(total, np.float64)
        return tape.take(self.round(name), given, real(self, name, total, bits))

    def chosen(
        real: Any, self: Any, name: str, scores: Any, bits: int = 0, monotone: bool = False
    ) -> Any:
        given = np.array(scores, np.float64)
        return tape.take(self.round(name), given, real(self, name, scores, bits, monotone))

    def drawn(real: Any, self: Any, name: str, count: int, content: Any) -> Any:
        return tape.take(self.round(name), np.zeros(count), real(self, name, count, content))

    with patching() as patch:
        patch.around(f"{FIT}.release", released)
        patch.around(f"{FIT}.choose_each", chosen)
        patch.around(f"{FIT}.draw", drawn)
        yield


def _fitted(case: Case, adjacency: str, changed: bool | None, tape: FitTape) -> Any:
    """A fit on the records, on those with one changed, or (None) on those without it."""
    X, y = (people if case.table == "people" else points)(bool(changed))
    if changed is None:
        kept = np.arange(RECORDS) != EXTREME
        X, y = X[kept], y[kept]
    public: dict[str, Any] = {"schema": SCHEMA} if case.table == "people" else {"bounds": (-1, 1)}
    made = every()[case.estimator](
        **{**public, "adjacency": adjacency, "random_state": 3, **case.settings}
    )
    with _recorded(tape):
        return made.fit(X, y)


def _person_fitted(case: Case, adjacency: str, rows: int, changed: bool, tape: FitTape) -> Any:
    """A fit on records of persons who have five each, and so many of one more, who is at one end of
    the ranges or, changed, at the other. Half of that person's records have the other label, but
    for exactly as many as are used: those say the same, so that they add up. The table begins with
    them.
    """
    X, y = (people if case.table == "people" else points)(changed)
    owners = np.arange(RECORDS) // 5 * 5
    kept = owners != owners[EXTREME]
    again, answers = np.repeat(X[[EXTREME]], rows, axis=0), np.repeat(y[[EXTREME]], rows)
    if rows != AT_MOST:
        answers[::2] = y[y != y[EXTREME]][0]
    X, y = np.concatenate([again, X[kept]]), np.concatenate([answers, y[kept]])
    public: dict[str, Any] = {"schema": SCHEMA} if case.table == "people" else {"bounds": (-1, 1)}
    public |= {"adjacency": adjacency, "random_state": 3, "unit": Person("person", AT_MOST)}
    made = every()[case.estimator](**{**public, **case.settings})
    with _recorded(tape):
        return made.fit(X, y, users=np.concatenate([np.full(rows, EXTREME), owners[kept]]))


def _neighbours(name: str, case: Case, adjacency: str) -> Iterator[Row]:
    """The same releases, within their bounds, and the same model."""
    moves = 2 if adjacency == Adjacency.REPLACE_ONE.value else 1

    def fitted(neighbour: bool, tape: FitTape) -> Any:
        changed = (True if moves == 2 else None) if neighbour else False
        return _fitted(case, adjacency, changed, tape)

    yield from _apart(name, case, fitted, moves)


def _persons(name: str, case: Case, adjacency: str) -> Iterator[Row]:
    """The same for a person with one record, with as many as are used, and with many more."""
    moves = 2 if adjacency == Adjacency.REPLACE_ONE.value else 1
    for rows in (1, AT_MOST, MANY) if case.persons else ():

        def fitted(neighbour: bool, tape: FitTape, rows: int = rows) -> Any:
            other = MANY + 1 - rows if moves == 2 else 0
            many = other if neighbour else rows
            return _person_fitted(case, adjacency, many, neighbour and moves == 2, tape)

        yield from _apart(f"{name}, a person with {rows} records", case, fitted, moves)


def _apart(
    name: str, case: Case, fitted: Callable[[bool, FitTape], Any], moves: int
) -> Iterator[Row]:
    """What a fit and the same on a neighbour tell apart."""
    first = FitTape()
    made = fitted(False, first)
    second = FitTape(first.calls)
    other = fitted(True, second)
    yield name, "releases more or fewer", abs(len(first.calls) - len(second.calls)), 0
    for (held, one, answer), (_, another, again) in zip(first.calls, second.calls, strict=False):
        yield name, f"other shapes of {held.name}", float(np.shape(one) != np.shape(another)), 0
        if held.name not in case.hidden and answer is again:
            choice = isinstance(answer, list)
            apart = np.abs(one - another).max() if choice else np.linalg.norm(one - another)
            yield (
                name,
                f"one unit moves {held.name}, in bounds",
                float(apart) / held.bound,
                moves * (1 + 1e-12),
            )
    yield (
        name,
        "models differ although all noisy values were the same",
        float(not _same(made, other)),
        0,
    )


def _same(one: Any, other: Any) -> bool:
    held, again = one.release_.model, other.release_.model
    return (
        held.facts == again.facts
        and held.arrays.keys() == again.arrays.keys()
        and all(held.arrays[k].tobytes() == again.arrays[k].tobytes() for k in held.arrays)
    )


def _noise(name: str, case: Case, adjacency: str) -> Iterator[Row]:
    """Noise of the scale of its round, on every value, in all releases of a round together."""
    tape, found = FitTape(), dict[str, list[Any]]()
    _fitted(case, adjacency, False, tape)
    for held, given, answer in tape.calls:
        if not isinstance(answer, list):
            scale = 1.0 if held.name == "linear term" else held.deviation
            found.setdefault(held.name, []).append((np.asarray(answer) - given).ravel() / scale)
    for round_name, parts in found.items():
        values = np.concatenate(parts)
        yield name, f"values of {round_name} without noise", float((values == 0).sum()), 1
        off = (float(np.mean(values**2)) - 1) * math.sqrt(len(values) / 2)
        yield (
            name,
            f"deviations by which the noise of {round_name} is off its scale",
            abs(off),
            SIGMAS,
        )


def _minima(name: str, case: Case, adjacency: str) -> Iterator[Row]:
    """The gradient at what was taken for a minimum, over the tolerance."""
    if case.settings.get("solver") not in ("objective", "output"):
        return
    seen: list[float] = []

    def minimise(real: Any, objective: Any, tolerance: float) -> Any:
        found = real(objective, tolerance)
        seen.append(float(np.linalg.norm(objective.gradient(found))) / tolerance)
        return found

    with patching() as patch:
        patch.around(MINIMISE, minimise)
        _fitted(case, adjacency, False, FitTape())
    for size in seen:
        yield name, "the gradient at the minimum, in tolerances", size, 1


def _kept(look: Callable[[str, Case, str], Iterator[Row]]) -> Callable[[str], Found]:
    """A check of what `look` finds, in the cases whose names begin with a prefix."""

    def find(prefix: str = "") -> Found:
        for name, case in CASES.items():
            for adjacency in case.adjacencies if name.startswith(prefix) else ():
                for place, what, found, allowed in look(f"{name}, {adjacency}", case, adjacency):
                    if not found <= allowed:
                        return f"{place}: {what}: {found:.6g}, at most {allowed:.6g} is allowed"
        return None

    return find


NEIGHBOURS = Check("neighbours of a fit", _kept(_neighbours))
PERSONS = Check("persons of a fit", _kept(_persons))
NOISE = Check("noise of a fit", _kept(_noise))
MINIMA = Check("minimum of a fit", _kept(_minima))
CHECKS = (NEIGHBOURS, PERSONS, NOISE, MINIMA)
