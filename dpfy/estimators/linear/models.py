"""Linear models: logistic regression, linear support vectors, linear, ridge and Poisson
regression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, plugins
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.engines.expressions import Expression
from dpfy.estimators.budget import FitTerms, ReleaseNeed
from dpfy.estimators.claim import ProofCondition
from dpfy.estimators.columns import FeatureColumns
from dpfy.estimators.engine_records import EngineRecords, Records
from dpfy.estimators.estimator import (
    PrivateClassifier,
    PrivateEstimator,
    PrivateRegressor,
    PublicFacts,
)
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import FitSession, fixed
from dpfy.estimators.linear.descent import GradientDescentSolver
from dpfy.estimators.linear.design import RowLayout
from dpfy.estimators.linear.solver import (
    WAY_OUT,
    FunctionalSolver,
    HuberHingeLoss,
    HuberLoss,
    LinearTask,
    LogisticLoss,
    PoissonLoss,
    ScoreLoss,
    SecondMomentSolver,
    SoftmaxLoss,
    Solver,
    norm_needs,
    problem_of,
)
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.target import ClassTarget, NumberTarget, Target

Floats = NDArray[np.float64]

SOLVERS: dict[str, Solver] = {
    "gradient": GradientDescentSolver(),
    "functional": FunctionalSolver(),
    "statistics": SecondMomentSolver(),
}
"""The solvers of dpfy by their names: the values of `solver`."""
TARGET = 30
"""Fractional bits of the target of a regression, on the scale [-1, 1]."""
LAB = ("newton", "objective", "approximate-minima", "output", "bolt-on")
"""Those of the distribution dpfy-lab."""


@dataclass(kw_only=True, eq=False, repr=False)
class LinearModel(PrivateEstimator, abstract=True):
    """What linear models have in common.

    Parameters
    ----------
    solver : str, default="gradient"
        How the weights are found: "gradient" by noisy gradients, "statistics" by noisy second moments
        (squared loss), "functional" by a quadratic expansion (squared or logistic loss). dpfy-lab has
        more: the table of docs/estimators.md.
    alpha : float, default=None
        The weight of alpha/2 |w|^2 beside the sum of losses, on all weights. None for the rule of the
        solver.
    fit_intercept : bool, default=True
        Whether there is a constant term.
    norm : float, default=None
        A public bound on the norm of a row of scaled features, to which longer ones are shortened. None
        buys the median.
    clip : float, default=None
        The norm to which slopes of the loss are cut. None for a rule: the less noise the farther.
    rounds : int, default=None
        How many gradients are released, or passes made. None for the rule of the solver.

    Attributes
    ----------
    coef_ : ndarray
        Weights for features on their scales ([-1, 1] or [0, 1]; one-hot categories).
    intercept_ : ndarray or float
        The constant term.
    feature_names_out_ : ndarray of str
        The name of each weight.
    """

    solver: str = "gradient"
    alpha: float | None = None
    fit_intercept: bool = True
    norm: float | None = None
    clip: float | None = None
    rounds: int | None = None

    in_engine: ClassVar[bool] = True

    def _loss(self, outputs: int) -> ScoreLoss:
        raise NotImplementedError(type(self).__name__)

    def _aims(self, data: Any) -> Any:
        """The target of each record as the loss wants it [records, outputs]."""
        raise NotImplementedError(type(self).__name__)

    def _solver(self) -> Solver:
        found: Solver = plugins.choose(plugins.SOLVERS, "solver", self.solver, SOLVERS, LAB)
        return found

    def _task(self, columns: FeatureColumns, target: Target | None, terms: FitTerms) -> LinearTask:
        """What is to be solved: public."""
        if self.rounds is not None:
            check.integer("rounds", self.rounds, most=100_000)
        for name in ("clip", "norm"):
            if getattr(self, name) is not None:
                check.positive(name, getattr(self, name))
        if self.alpha is not None:
            check.nonnegative("alpha", self.alpha)
        outputs = (
            len(target.labels) if isinstance(target, ClassTarget) and len(target.labels) > 2 else 1
        )
        layout = RowLayout(columns, self.fit_intercept)
        norm = layout.largest if self.norm is None and not self._solver().buys_norm else self.norm
        return LinearTask(
            self._loss(outputs), layout, terms, outputs, self.alpha, norm, self.clip, self.rounds
        )

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        task = self._task(public.columns, public.target, public.terms)
        self._solver().refuse(task)
        if public.terms.weighted and not self._solver().weighs:
            raise Unsupported(f"sample_weight with solver={self.solver!r}", WAY_OUT)
        return [*norm_needs(task.norm, public.terms), *self._solver().needs(task)]

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        return self._solver().bits(self._task(public.columns, public.target, public.terms))

    def _not_in_engine(self, target: str | None) -> str | None:
        loss, solver = self._loss(1), self.solver
        quadratic = isinstance(loss, HuberLoss)
        exact = solver == "gradient" and (quadratic or isinstance(loss, HuberHingeLoss))
        exact &= self.unit is None or self.unit.at_most == 1
        if not (exact or (solver in ("statistics", "functional") and quadratic)):
            return f"{type(self).__name__} with solver={solver!r}"
        return super()._not_in_engine(target)

    def _conditions(self, public: PublicFacts) -> Sequence[ProofCondition]:
        return self._solver().conditions(self._task(public.columns, public.target, public.terms))

    def _learn(
        self, data: Records, public: PublicFacts, fit: FitSession
    ) -> Mapping[str, NDArray[Any]]:
        task = self._task(data.columns, data.aim, public.terms)
        problem = problem_of(task, data, self._aims(data), fit, self._solver().keeps_rows)
        found = self._solver().solve(problem, fit)
        return {
            "weights": found.weights,
            "norm": np.array([problem.norm]),
            "noise": np.atleast_1d(found.noise),
        }

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        self._weights, self._norm = model["weights"], float(model["norm"][0])
        layout, noise = self._layout, np.broadcast_to(model["noise"], self._weights.shape)
        self._noise = noise[layout.constant :].T
        self.feature_names_out_ = np.array(layout.names, object)
        self.coef_ = self._weights[layout.constant :].T
        self.intercept_ = self._weights[0] if layout.constant else np.zeros(self._weights.shape[1])

    @property
    def _layout(self) -> RowLayout:
        """Of the fit, whatever the parameter says now."""
        bare = RowLayout(self._columns, constant=False)
        return RowLayout(self._columns, constant=len(self._weights) > bare.width)

    def _scores(self, given: EncodedRecords) -> Floats:
        return np.asarray(self._layout.rows(given, self._norm) @ self._weights)

    def explain(self) -> Explanation:
        """The coefficients, largest first, and about the standard deviation that noise gives each
        of them.
        """
        rows = [
            (f"{name}{tag}", float(w), float(n))
            for (tag, row), noise in zip(self._tagged(), np.atleast_2d(self._noise), strict=True)
            for name, w, n in zip(self.feature_names_out_, row, noise, strict=True)
        ]
        rows.sort(key=lambda row: -abs(row[1]))
        note = (
            "noise: about the standard deviation that noise gives a coefficient, by what was "
            "released"
        )
        return Explanation(("feature", "coefficient", "noise"), tuple(rows), note)

    def _tagged(self) -> list[tuple[str, Floats]]:
        return [("", row) for row in np.atleast_2d(self.coef_)]


@dataclass(kw_only=True, eq=False, repr=False)
class LogisticRegression(PrivateClassifier, LinearModel):
    """Logistic regression, of two classes or, by softmax, of more.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import LogisticRegression
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = LogisticRegression(
    ...     bounds=(-1, 1), classes=("no", "yes"), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    def _loss(self, outputs: int) -> ScoreLoss:
        return LogisticLoss() if outputs == 1 else SoftmaxLoss()

    def _aims(self, data: Any) -> Any:
        if isinstance(data, EngineRecords):
            return data.label
        if data.classes == 2:
            return data.labels[:, None].astype(np.float64)
        return np.eye(data.classes)[data.labels]

    def decision_function(self, X: Any) -> Floats:
        """The score of the second class, or one for each class."""
        scores = self._scores(self._given(X))
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def _log_joint(self, given: EncodedRecords) -> Floats:
        scores = self._scores(given)
        return (
            np.concatenate([np.zeros_like(scores), scores], axis=1)
            if scores.shape[1] == 1
            else scores
        )

    def _tagged(self) -> list[tuple[str, Floats]]:
        names = [""] if len(self.coef_) == 1 else [f" ({label})" for label in self.classes_]
        return list(zip(names, self.coef_, strict=True))


@dataclass(kw_only=True, eq=False, repr=False)
class LinearSVC(PrivateClassifier, LinearModel):
    """Linear support vectors of two classes, with the hinge rounded off at its corner (Huber's).

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import LinearSVC
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> model = LinearSVC(bounds=(-1, 1), classes=("no", "yes"), random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    def _target(self, X: Any, y: Any) -> Any:
        found = super()._target(X, y)
        if isinstance(found, ClassTarget) and len(found.labels) > 2:
            rule = (
                "Only binary classification is supported. Use LogisticRegression, which has a "
                "softmax for more"
            )
            raise InvalidInput("classes", f"{len(found.labels)} classes", rule)
        return found

    def _loss(self, outputs: int) -> ScoreLoss:
        return HuberHingeLoss()

    def _aims(self, data: Any) -> Any:
        if isinstance(data, EngineRecords):
            return data.label
        return data.labels[:, None].astype(np.float64)

    def decision_function(self, X: Any) -> Floats:
        """The score of the second class."""
        return self._scores(self._given(X))[:, 0]

    def _log_joint(self, given: EncodedRecords) -> Floats:
        scores = self._scores(given)
        return np.concatenate([np.zeros_like(scores), scores], axis=1)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


@dataclass(kw_only=True, eq=False, repr=False)
class LinearRegression(PrivateRegressor, LinearModel):
    """Linear regression. Slopes of the squared loss are cut, which makes it Huber's.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import LinearRegression
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = LinearRegression(
    ...     bounds=(-1, 1), target_bounds=(-2, 2), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    def _loss(self, outputs: int) -> ScoreLoss:
        return HuberLoss()

    def _aims(self, data: Any) -> Any:
        aim, values = data.numeric
        scaled = (values - aim.middle) / aim.half
        if isinstance(scaled, Expression):
            return (scaled * 2.0**TARGET).whole() * 2.0**-TARGET
        return fixed(scaled, TARGET)[:, None]

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        super()._restore(model)
        assert isinstance(self._aim, NumberTarget)
        self.coef_, self._noise = self.coef_[0] * self._aim.half, self._noise * self._aim.half
        self.intercept_ = float(self.intercept_[0] * self._aim.half + self._aim.middle)

    def predict(self, X: Any) -> Floats:
        """The expected value of each row, within the public range of the target."""
        given = self._given(X)
        assert isinstance(self._aim, NumberTarget)
        return np.clip(
            self._scores(given)[:, 0] * self._aim.half + self._aim.middle,
            self._aim.low,
            self._aim.high,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class Ridge(LinearRegression):
    """Linear regression with alpha/2 |w|^2 beside the sum of losses, which are halves of squares of the
    target on the scale [-1, 1].

    Parameters
    ----------
    alpha : float, default=1.0
        The weight of alpha/2 |w|^2, on all weights.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import Ridge
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = X[:, 0] - X[:, 1]
    >>> model = Ridge(bounds=(-1, 1), target_bounds=(-2, 2), random_state=0).fit(X, y)
    >>> bool(model.score(X, y) > 0.9)
    True
    """

    alpha: float | None = 1.0


@dataclass(kw_only=True, eq=False, repr=False)
class PoissonRegressor(PrivateRegressor, LinearModel):
    """Poisson regression of counts or rates, log-linear in the features. Targets below zero count as zero.

    Examples
    --------
    >>> import numpy as np
    >>> from dpfy.estimators import PoissonRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 2))
    >>> y = rng.poisson(np.exp(X[:, 0] + 1))
    >>> model = PoissonRegressor(
    ...     bounds=(-1, 1), target_bounds=(0, 20), random_state=0
    ... ).fit(X, y)
    >>> bool(model.score(X, y) > 0.1)
    True
    """

    def _loss(self, outputs: int) -> ScoreLoss:
        return PoissonLoss()

    def _aims(self, data: EncodedRecords) -> Floats:
        aim, values = data.numeric
        return (np.maximum(values, 0.0) / aim.high)[:, None]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def predict(self, X: Any) -> Floats:
        """The expected value of each row."""
        given = self._given(X)
        assert isinstance(self._aim, NumberTarget)
        return np.exp(np.minimum(self._scores(given)[:, 0], 0.0)) * self._aim.high
