"""What every private estimator is: scikit-learn's interface around one claim, one run folder and
one report.

An estimator says what it will release (`_needs`: public facts alone), learns from records through
these releases (`_learn`), and restores the model from what was released (`_restore`). The rest is
here, once: terms, columns, ledger, folder, report, resume, pickles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import validate_data

from dpfy.core import check, plugins
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.unit import EXAMPLE, Person, single_owner
from dpfy.estimators import (
    bounding,
    columns,
    engine_records,
    fitting,
    given,
    persons,
    records,
    target,
    threads,
)
from dpfy.estimators.budget import FitTerms, ReleaseNeed, rounds
from dpfy.estimators.claim import FitClaim, ProofCondition
from dpfy.estimators.columns import FeatureColumns, TableForm
from dpfy.estimators.engine_records import EngineRecords, Records
from dpfy.estimators.fitting import FinishedFit, FitSession, FittedArrays
from dpfy.estimators.given import EngineTable, FileTable
from dpfy.estimators.parameters import documented
from dpfy.estimators.records import EncodedRecords
from dpfy.estimators.steps import allowed as allowed_steps
from dpfy.estimators.target import ClassTarget, NumberTarget, OpenTarget, Target
from dpfy.runs.dataset import Dataset, DeltaRule, delta_of
from dpfy.runs.run import Run
from dpfy.tables.schema import Schema

COMMON = (
    "epsilon",
    "delta",
    "accountant",
    "adjacency",
    "schema",
    "bounds",
    "records",
    "unit",
    "ledger",
    "run",
    "random_state",
)
JOBS = "n_jobs"
"""How many threads make the sums of a fit, where an estimator has it: no part of a claim, as
nothing released depends on it.
"""
ESTIMATORS: dict[str, type[PrivateEstimator]] = {}
"""Every estimator by its name: a file names one, and nothing is imported because of it."""


@dataclass(frozen=True)
class PublicFacts:
    """All that is known before a record is read: columns, target and terms."""

    form: TableForm
    columns: FeatureColumns
    target: Target | None
    terms: FitTerms
    person: Person | None = None
    steps: tuple[ProofCondition, ...] = ()

    @property
    def open(self) -> int:
        """How many ranges must be bought."""
        return len(self.columns.open) + isinstance(self.target, OpenTarget)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateEstimator(BaseEstimator):
    """What every private estimator is: a scikit-learn estimator whose fit is one release with a privacy
    report.

    Parameters
    ----------
    epsilon : float, default=1.0
        What a fit may cost.
    delta : float, default=None
        The delta of the guarantee. None derives it from the public number of records, and is 1e-6
        where there is none; 0 asks for a pure guarantee, where the estimator has one.
    accountant : str, default="tight"
        Which accountant computes the price. "tight" is exact here.
    adjacency : {"add-or-remove-one", "replace-one", "zero-out"}, default="add-or-remove-one"
        Which change of the data is hidden.
    schema : str, path, Schema or list of columns, default=None
        What is public about the columns: a TOML file, the name of a packaged schema, or columns
        (`dpfy.Number`, `dpfy.Category`, ...).
    bounds : (low, high) or mapping, default=None
        Instead of a schema, for numbers: two numbers, two lists with one for each column, or pairs by
        the name of a column. Ranges that nobody states are bought by private histograms, for a tenth of
        the budget.
    records : int, default=None
        The public number of records, if there is one.
    unit : dpfy.Person, default=None
        The person that is protected, `dpfy.Person("patient", at_most=5)`: the column that says whose a
        record is, and how many records of a person are used. None protects a record.
    ledger : str or path, default=None
        The ledger of the data set, which all releases on it share.
    run : str, path or dpfy.Run, default=None
        A new run folder. Without one the files are kept in `release_`.
    random_state : int, default=None
        Fixes all noise, for a test. Such a fit protects nothing, and its report says so.

    Attributes
    ----------
    report_ : dict
        The privacy report.
    guarantee_ : str
        The guarantee in one sentence.
    release_ : FinishedFit
        The files of the run folder. `release_.save(path)` writes them; `dpfy verify path` checks them.

    Examples
    --------
    >>> from dpfy.estimators import KMeans, PrivateEstimator
    >>> isinstance(KMeans(), PrivateEstimator)
    True
    """

    epsilon: float = 1.0
    delta: float | None = None
    accountant: str = "tight"
    adjacency: str = "add-or-remove-one"
    schema: Any = None
    bounds: Any = None
    records: int | None = None
    unit: Person | None = None
    ledger: Any = None
    run: Any = None
    random_state: int | None = None

    _budget: ClassVar[Any] = None
    """The budget of a Dataset, while a copy is fitted to it."""
    _rule: ClassVar[DeltaRule | None] = None
    """The delta of a Dataset, as well."""

    private: ClassVar[bool] = True
    """For pipelines: what this step learns is protected."""
    cell_of_missing: ClassVar[bool] = False
    """Whether a missing value without a fill has a cell of its own; otherwise it is refused."""

    in_engine: ClassVar[bool] = False
    """Whether a fit needs nothing but sums of whole numbers, which an engine makes."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        """Every estimator is known by its name; what several have in common (`abstract`) is
        none.
        """
        super().__init_subclass__(**kwargs)
        if not abstract:
            cls.__doc__ = documented(cls)
            ESTIMATORS[cls.__name__] = cls

    # What an estimator says for itself.

    def _needs(self, public: PublicFacts) -> Sequence[ReleaseNeed]:
        """What will be released, from public facts alone."""
        raise NotImplementedError(type(self).__name__)

    def _learn(self, data: Any, public: PublicFacts, fit: FitSession) -> Mapping[str, NDArray[Any]]:
        """Released arrays by name. Whatever is not made of `fit.release` and `fit.choose` alone
        must not be in them.
        """
        raise NotImplementedError(type(self).__name__)

    def _restore(self, model: Mapping[str, NDArray[Any]]) -> None:
        """Set the fitted attributes, from released arrays alone."""
        raise NotImplementedError(type(self).__name__)

    def _conditions(self, public: PublicFacts) -> Sequence[ProofCondition]:
        """What the proof needs beside bounded contributions, and how it is seen to."""
        return ()

    def _bits(self, public: PublicFacts) -> Mapping[str, int]:
        """Fractional bits of the sums of each round that are not whole numbers."""
        return {}

    def _target(self, X: Any, y: Any) -> Target | None:
        """What is public about the target."""
        return None

    def _target_name(self) -> str | None:
        """The column of the schema that y holds."""
        return getattr(self, "target", None)

    def _not_in_engine(self, target: str | None) -> str | None:
        """What a fit needs that an engine does not make; None where it makes all."""
        if not self.in_engine:
            return type(self).__name__
        held = Schema.of(self.schema)
        predicted = target if target is not None else self._target_name()
        features = tuple(c for c in held.features if c.name != predicted)
        return engine_records.refusal(FeatureColumns.of(features, held.missing))

    # What is the same for all.

    def fit(self, X: Any, y: Any = None, *, target: str | None = None, users: Any = None) -> Any:
        """Fit on private records.

        Args:
            X: The records: a `dpfy.Dataset`, an array, a pandas or an Arrow table.
            y: What is predicted, one value for each record.
            target: With a Dataset, the column that is predicted; without it the label of its
                schema.
            users: The name of each record's person, where `unit` is a `dpfy.Person` and X has no
                column of that name.

        Returns:
            The estimator.

        Raises:
            InvalidInput: A parameter, the form of X or the length of y or users is wrong.
            Unsupported: The fit would give no guarantee. The message names the way out.
            BudgetExceeded: The ledger has too little left.

        Guarantees: everything public is checked, the price computed and the claim reserved before a
        record is read. A fit that is refused spends nothing. What is kept of the records is what
        was released under the claim. With `unit`, at most `at_most` records of a person are used,
        and all that they add together is bounded.
        """
        return self._fit(X, y, target, users)

    def _fit(
        self, X: Any, y: Any, target: str | None, users: Any, sample_weight: Any = None
    ) -> Any:
        steps = allowed_steps(self)
        if isinstance(X, Dataset):
            return given.fitted_to(self, X, target, sample_weight)
        if target is not None:
            rule = "goes with a Dataset: fit(dataset, target=...); else give y"
            raise InvalidInput("target", target, rule)
        threads.checked(getattr(self, JOBS, None))
        public = replace(self._public(X, y), steps=steps)
        if sample_weight is not None:
            check.positive("max_weight", self.max_weight)  # type: ignore[attr-defined]
            public = replace(public, terms=replace(public.terms, weighted=True))
        self._check_users(X, users)
        claim = self._claim(public)
        shown = getattr(self, "_progress", None)
        release = fitting.run(
            self._place(),
            self._temporary_run(),
            claim,
            lambda fit: self._fitted(X, y, users, public, fit, sample_weight),
            shown,
            self._delta_rule().origin,
        )
        self._load(release)
        return self

    def _public(self, X: Any, y: Any) -> PublicFacts:
        person = self.unit
        if person is not None and not isinstance(person, Person):
            raise InvalidInput("unit", person, "must be dpfy.Person(column, at_most=k), or None")
        unit = EXAMPLE if person is None else person.unit
        terms = FitTerms(
            self.epsilon,
            self._delta_rule().value,
            self.adjacency,  # type: ignore[arg-type]
            self.accountant,
            self.records,
            unit,
        )
        form = TableForm.of(X)
        if person is not None:
            form = form.without(person.column)
        held = columns.public(
            form,
            self.schema,
            self.bounds,
            self._target_name(),
            None if person is None else person.column,
        )
        held = replace(held, cell_of_missing=self.cell_of_missing)
        return PublicFacts(form, held, self._target(X, y), terms, person)

    def _check_users(self, X: Any, users: Any) -> None:
        """Refuse names of persons that nobody asked for, and none where they are needed."""
        if self.unit is None:
            if users is not None:
                rule = "needs unit=dpfy.Person(column, at_most=k), which says how many are used"
                raise InvalidInput("users", "given", rule)
            return
        single_owner("a fit", self.unit.column)
        names, column = TableForm.of(X).names, self.unit.column
        there = names is not None and column in names
        if users is None and not there:
            rule = "must be a column of X, or be given beside it: fit(X, y, users=ids)"
            raise InvalidInput("unit", column, rule)
        if users is not None and there:
            rule = f"must be left out: X has the column {column!r}"
            raise InvalidInput("users", "given", rule)

    def _claim(self, public: PublicFacts) -> FitClaim:
        own = list(self._needs(public))
        bought = bounding.needs(public.open, public.terms, sum(need.share for need in own))
        made = rounds([*bought, *own], public.terms)
        parts = [*public.columns.columns, *([] if public.target is None else [public.target])]
        claim = FitClaim(
            type(self).__name__,
            columns.described(parts),
            self._settings(),
            made,
            (
                *_domain(public),
                *_persons(public),
                *_weights(public),
                *public.steps,
                *self._conditions(public),
            ),
            unit=public.terms.unit,
            adjacency=public.terms.adjacency,
            delta=public.terms.delta,
            accountant=public.terms.accountant,
            records=public.terms.records,
        )
        fitting.check_drawable(claim, self._bits(public))
        return claim

    def _settings(self) -> tuple[tuple[str, str], ...]:
        """Its own parameters, in words."""
        own = {k: v for k, v in self.get_params(deep=False).items() if k not in (*COMMON, JOBS)}
        return tuple((k, _printable(v)) for k, v in sorted(own.items()))

    def _place(self) -> Run | None:
        """The folder that the caller named."""
        seed = (
            None
            if self.random_state is None
            else check.integer("random_state", self.random_state, least=0)
        )
        if self.run is None:
            return None
        return Run.of(self.run, ledger=self.ledger, budget=self._budget, seed=seed)

    def _temporary_run(self) -> dict[str, Any]:
        """Arguments of the run in a temporary folder, where the caller named none."""
        return {"ledger": self.ledger, "budget": self._budget, "seed": self.random_state}

    def _delta_rule(self) -> DeltaRule:
        """The delta of a fit, and where it came from."""
        if self._rule is not None:
            return self._rule
        return delta_of(self.delta, self.records)

    def _fitted(
        self,
        X: Any,
        y: Any,
        users: Any,
        public: PublicFacts,
        fit: FitSession,
        sample_weight: Any = None,
    ) -> FittedArrays:
        if isinstance(X, EngineTable):
            return self._fitted_in_engine(X, public, fit, sample_weight)
        data = self._read(X, y, public)
        if public.terms.replaced and public.person is None:  # the number of records is public
            data = replace(data, left_out=None)
        if sample_weight is not None:
            most = float(self.max_weight)  # type: ignore[attr-defined]
            weights = records.weights_of(sample_weight, most, data.size)
            data = replace(data, weights=weights)
        if (person := public.person) is not None:
            cells = records.column(X, person.column) if users is None else users
            data = persons.bounded(data, cells, person.at_most, fit.key("records of persons"))
        elif data.left_out is not None and data.left_out.any():
            data = data.rows(np.flatnonzero(~data.left_out))
        if public.open:
            data = _bounded(data, fit)
        with threads.threads(getattr(self, JOBS, 1)):
            return FittedArrays(self._learn(data, public, fit), self._facts(X, data, public.form))

    def _fitted_in_engine(
        self, X: EngineTable, public: PublicFacts, fit: FitSession, sample_weight: Any
    ) -> FittedArrays:
        """Learn from a table that stays in its engine."""
        if sample_weight is not None:
            raise engine_records.unsupported("sample_weight")
        name = None if public.target is None else self._target_name()
        person = None if public.person is None else (public.person.column, public.person.at_most)
        key = fit.key("records of persons")
        found = EngineRecords.of(X, public.columns, public.target, name, person, key)
        with closing(found) as data:
            return FittedArrays(self._learn(data, public, fit), self._facts(X, data, public.form))

    def _facts(self, X: Any, data: Records, form: TableForm) -> dict[str, Any]:
        """What a file says about the estimator beside its arrays: public, or bought."""
        facts: dict[str, Any] = {
            "estimator": type(self).__name__,
            "columns": data.columns.to_json(),
            "target": _told(data.aim),
        }
        if self.unit is not None:
            facts["person"] = self.unit.column
        width = len(data.columns.sources) if isinstance(X, FileTable) else form.width
        facts |= {"width": width, "names": list(form.names) if form.names and form.named else None}
        return facts | {"settings": dict(self._settings())}

    def _read(self, X: Any, y: Any, public: PublicFacts) -> EncodedRecords:
        """The private records, every cell by its public column."""
        held, aim = records.read(X, public.columns), public.target
        if not held.size:
            rule = (
                f"Found array with 0 sample(s) (shape=(0, {len(public.columns.columns)})) while a "
                f"minimum of 1 is required."
            )
            raise InvalidInput("X", "no records", rule)
        if aim is None:
            return held
        values, there = _target_values(aim, y, public.columns.missing)
        if len(values) != held.size:
            rule = (
                f"must be one for each of the {held.size} records of X: inconsistent numbers of "
                f"samples"
            )
            raise InvalidInput("y", f"{len(values)} values", rule)
        if public.columns.strict and not there.all():
            row = int(np.flatnonzero(~there)[0]) + 1
            raise InvalidInput(f"y, row {row}", "a value that does not fit", f"must be of {aim}")
        left_out = ~there if held.left_out is None else held.left_out | ~there
        return replace(held, target=values, aim=aim, left_out=left_out)

    def _load(self, release: FinishedFit) -> None:
        """Be what was released."""
        model = release.model
        if model.facts.get("estimator") != type(self).__name__:
            raise Corrupt(
                fitting.FILE, f"holds {model.facts.get('estimator')}, not {type(self).__name__}"
            )
        self._load_public(release, model.facts)
        self._restore(dict(model.arrays))

    def _load_public(self, release: FinishedFit, facts: Mapping[str, Any]) -> None:
        """Take the report, and what a file says about columns and target."""
        self.release_, self.report_ = release, release.report
        self._columns = FeatureColumns.from_json(facts["columns"])
        self._person = facts.get("person")
        self._aim = _aim(facts["target"])
        self.n_features_in_ = int(facts["width"])
        self.__dict__.pop("feature_names_in_", None)
        if facts["names"] is not None:
            self.feature_names_in_ = np.array(facts["names"], object)
        if isinstance(self._aim, ClassTarget):
            self.classes_ = self._aim.array

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "release_")

    def _given(self, X: Any) -> EncodedRecords:
        """Rows to predict on, by the columns of the fit."""
        if not self.__sklearn_is_fitted__():
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet: call fit first"
            )
        TableForm.of(X)
        if not isinstance(X, FileTable):  # whose columns are found by their names alone
            validate_data(self, X=_framed(X, self._person), reset=False, skip_check_array=True)
        return records.read(X, self._columns)

    @property
    def guarantee_(self) -> str:
        """The guarantee in one sentence."""
        return str(self.report_["statement"])


class _Supervised:
    """The fit of what is predicted from records: classes or numbers."""

    _fit: Any

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        target: str | None = None,
        users: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        """Fit on private records.

        Args:
            X: The records: a `dpfy.Dataset`, an array, a pandas or an Arrow table.
            y: What is predicted, one value for each record.
            target: With a Dataset, the column that is predicted; without it the label of its
                schema.
            users: The name of each record's person, where `unit` is a `dpfy.Person` and X has no
                column of that name.
            sample_weight: How much each record counts, from 0 to the public `max_weight`. Others
                are moved there. Noise is made for records of the largest weight.

        Returns:
            The estimator.

        Raises:
            InvalidInput: A parameter, the form of X or the length of y or users is wrong.
            Unsupported: The fit would give no guarantee. The message names the way out.
            BudgetExceeded: The ledger has too little left.

        Guarantees: those of `PrivateEstimator.fit`. Weights are as private as records.
        """
        return self._fit(X, y, target, users, sample_weight)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(_Supervised, ClassifierMixin, PrivateEstimator, abstract=True):
    """A private estimator of classes.

    Parameters
    ----------
    classes : list or "public", default=None
        The public list of labels. "public" states that the labels that occur in y are public
        knowledge. A schema with a label says it, too.
    target : str, default=None
        The column of the schema that y holds. None for its label.
    max_weight : float, default=1.0
        The public maximum of `sample_weight`. What a record adds is multiplied by its weight over
        this maximum, so that noise which is made for the largest weight hides it.

    Attributes
    ----------
    classes_ : ndarray
        The labels, in the order of probabilities.

    Examples
    --------
    >>> from dpfy.estimators import NaiveBayes, PrivateClassifier
    >>> isinstance(NaiveBayes(), PrivateClassifier)
    True
    """

    classes: Any = None
    target: str | None = None
    max_weight: float = 1.0

    def _target(self, X: Any, y: Any) -> Target | None:
        target.require_target(y)
        return target.classes(self.classes, columns.label_of(self.schema, self.target), y)

    def _target_name(self) -> str | None:
        said = columns.label_of(self.schema, self.target)
        return None if said is None else said.name

    def _log_joint(self, given: EncodedRecords) -> NDArray[np.float64]:
        """A score of each class for each row, of which the softmax is the probability."""
        raise NotImplementedError(type(self).__name__)

    def predict_log_proba(self, X: Any) -> NDArray[np.float64]:
        """Logarithms of the probabilities of the classes."""
        scores = self._log_joint(self._given(X))
        scores = scores - scores.max(axis=1, keepdims=True)
        return np.asarray(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Probabilities of the classes, in the order of `classes_`."""
        return np.asarray(np.exp(self.predict_log_proba(X)))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most likely class of each row."""
        best = self._log_joint(self._given(X)).argmax(axis=1)
        return np.asarray(self.classes_[best])


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(_Supervised, RegressorMixin, PrivateEstimator, abstract=True):
    """A private estimator of numbers.

    Parameters
    ----------
    target_bounds : (low, high), default=None
        The public range of y. A schema says it, too; without one it is bought.
    target : str, default=None
        The column of the schema that y holds.
    max_weight : float, default=1.0
        The public maximum of `sample_weight`. What a record adds is multiplied by its weight over
        this maximum, so that noise which is made for the largest weight hides it.

    Examples
    --------
    >>> from dpfy.estimators import PrivateRegressor, Ridge
    >>> isinstance(Ridge(), PrivateRegressor)
    True
    """

    target_bounds: Any = None
    target: str | None = None
    max_weight: float = 1.0

    def _target(self, X: Any, y: Any) -> Target | None:
        target.require_target(y)
        return target.number(
            self.target_bounds, columns.label_of(self.schema, self.target) if self.target else None
        )


def load(run: str | Path) -> Any:
    """The fitted estimator of a finished run folder: it predicts as the one that was fitted.

    Args:
        run: The run folder of a fit.

    Returns:
        The estimator.

    Raises:
        InvalidInput: There is no finished fit in the folder.
        Corrupt: A file is not the one that report and ledger name.

    Example:
        >>> import numpy as np
        >>> from dpfy import estimators
        >>> X = np.random.default_rng(0).uniform(-1, 1, (500, 2))
        >>> model = estimators.KMeans(n_clusters=2, bounds=(-1, 1), run="runs/groups").fit(X)
        >>> bool((estimators.load("runs/groups").predict(X) == model.predict(X)).all())
        True
    """
    release = FinishedFit.of(Path(run))
    name = str(release.model.facts.get("estimator"))
    kind = ESTIMATORS.get(name) or plugins.find(plugins.ESTIMATORS, name)
    if kind is None:
        raise Corrupt(fitting.FILE, f"holds an estimator that is not known: {name!r}")
    made = kind()
    made._load(release)
    return made


def every() -> dict[str, type[PrivateEstimator]]:
    """Every estimator by its name, those of plug-ins too."""
    for name in plugins.installed(plugins.ESTIMATORS):
        plugins.find(plugins.ESTIMATORS, name)
    return ESTIMATORS


def _framed(X: Any, person: str | None) -> Any:
    """A table in a form whose names scikit-learn reads, less the column of persons."""
    if hasattr(X, "column_names"):
        X = X.slice(0, 0).to_pandas()
    elif not hasattr(X, "columns"):
        return columns.as_array(X)
    return X.drop(columns=[person]) if person in list(X.columns) else X


def _bounded(data: EncodedRecords, fit: FitSession) -> EncodedRecords:
    """Buy the ranges that nobody given."""
    values, opened = records.open_values(data)
    names = [c.name for c in opened]
    if isinstance(data.aim, OpenTarget) and data.target is not None:
        values, names = (
            np.concatenate([values, data.target[:, None]], axis=1),
            [*names, target.NAME],
        )
    found = dict(zip(names, bounding.bought(values, names, fit), strict=True))
    if isinstance(data.aim, OpenTarget) and data.target is not None:
        low, high = found.pop(target.NAME).range
        data = replace(data, target=np.clip(data.target, low, high), aim=NumberTarget(low, high))
    closed = tuple(
        found.get(c.name, c) if isinstance(c, columns.OpenColumn) else c
        for c in data.columns.columns
    )
    known = replace(data.columns, columns=closed, sources=closed)
    return replace(data, columns=known, given=records.filled(data.given, known))


def _target_values(
    aim: Target, y: Any, missing: Sequence[str] = ()
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The target of each record in its range, and which records have one. The others have the
    public fill, else the first class or the middle of the range.
    """
    if isinstance(aim, ClassTarget):
        codes = aim.read(y)
        there = codes >= 0
        other = 0 if aim.fill is None else aim.labels.index(aim.fill)
        return np.where(there, codes, other), there | (aim.fill is not None)
    values = target.numbers_of(y, missing)
    there, fill = ~np.isnan(values), None
    low, high = -records.FARTHEST, records.FARTHEST
    if isinstance(aim, NumberTarget):
        low, high, fill = aim.low, aim.high, aim.fill
    values = np.where(there, np.clip(values, low, high), (low + high) / 2 if fill is None else fill)
    return values, there | (fill is not None)


def _domain(public: PublicFacts) -> list[ProofCondition]:
    """Where ranges and classes come from."""
    needed = "ranges, categories and classes are public"
    if isinstance(public.target, ClassTarget) and public.target.stated:
        return [
            ProofCondition(
                "domain",
                needed,
                "the caller declared that the labels that occur in y are public",
                stated=True,
            )
        ]
    if public.open:
        return [
            ProofCondition(
                "domain",
                needed,
                f"{public.open} ranges that nobody gave were bought with a share of the budget",
            )
        ]
    return [
        ProofCondition(
            "domain",
            needed,
            "they were taken from the schema or the caller, never from the records",
        )
    ]


def _persons(public: PublicFacts) -> list[ProofCondition]:
    """Where persons are protected: how their records were bounded."""
    return [] if public.person is None else [persons.condition(public.person)]


def _weights(public: PublicFacts) -> list[ProofCondition]:
    """Where records have weights: how they were bounded."""
    if not public.terms.weighted:
        return []
    return [
        ProofCondition(
            "weights",
            "the largest weight of a record is public",
            "weights were moved into the range from 0 to max_weight, and divided by it",
        )
    ]


def _told(aim: Target | None) -> dict[str, Any] | None:
    if isinstance(aim, ClassTarget):
        return {"classes": list(aim.labels)}
    return {"range": [aim.low, aim.high]} if isinstance(aim, NumberTarget) else None


def _aim(told: Any) -> Target | None:
    if told is None:
        return None
    return (
        ClassTarget(tuple(told["classes"])) if "classes" in told else NumberTarget(*told["range"])
    )


def _printable(value: Any) -> str:
    text = "".join(c if c.isprintable() else "?" for c in repr(value)).strip()
    return text[:1997] + "..." if len(text) > 2000 else text or "none"


def softened(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities that add up to one, none of them zero."""
    floor = np.maximum(probabilities, math.ulp(1.0))
    return np.asarray(floor / floor.sum(axis=-1, keepdims=True))
