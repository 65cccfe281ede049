"""A search over the settings of an estimator: fit one per trial, score it, release the best.

The trials are fits of `dpfy.estimators`, made under one reservation for the whole search. Scores are
of private records that a coin of each record, or of each person, has held out, or of public ones.
Nothing of a trial is written anywhere but the model, the settings and the score that are released.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

import dpfy
from dpfy.core import check, events
from dpfy.core.claim import Assumption, Claim, register
from dpfy.core.codec import number
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.estimators import given, persons
from dpfy.estimators import records as tables
from dpfy.estimators.claim import FILE, FitClaim
from dpfy.estimators.estimator import COMMON, JOBS, PrivateEstimator, PublicFacts
from dpfy.estimators.fitting import FinishedFit, FitSession, FittedArrays
from dpfy.estimators.given import FileColumn, FileTable, HeldTable
from dpfy.estimators.target import ClassTarget, NumberTarget, numbers_of
from dpfy.mechanisms.discrete import DiscreteGaussianMechanism
from dpfy.report import card
from dpfy.report.words import absent
from dpfy.runs.dataset import Dataset, delta_of
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Run
from dpfy.tuning.claim import PAYMENT, SEARCH, assumed, told_words
from dpfy.tuning.outcome import NONE_MADE, same_times
from dpfy.tuning.routes import (
    COMPOSITION,
    HELD_OUT,
    LAWS,
    MOST_KINDS,
    MOST_TRIALS,
    POINTS,
    PUBLIC,
    RANDOM,
    PrivacyTarget,
    SearchRoute,
    score_noise,
)
from dpfy.tuning.run import LARGER_NOISE, drawn
from dpfy.tuning.sealed import secret_of
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.terms import AUTO, tossed
from dpfy.tuning.trial import TrialFailed, as_score

FIT_TUNING = "fit-tuning"
FIXED = frozenset({*COMMON, JOBS, "classes", "target", "target_bounds"})
"""Parameters of an estimator that are no settings: what is public, and what the search decides."""
Mask = NDArray[np.bool_]


@register
@dataclass(frozen=True)
class FitTuning(Claim):
    """The claim of a search over fits, and of the fit that it releases: one event for both.

    `fits` holds one claim for each kind of trial (settings that cost alike are one kind).
    """

    payment: SearchRoute
    fits: tuple[FitClaim, ...]
    score: events.Event | None
    space: Mapping[str, str] = field(hash=False)

    kind: ClassVar[str] = FIT_TUNING
    purpose: ClassVar[str] = "tuning"
    artefacts: ClassVar[tuple[str, ...]] = (FILE, SEARCH)

    def __post_init__(self) -> None:
        super().__post_init__()
        for fit in self.fits:
            if (fit.unit, fit.adjacency) != (self.unit, self.adjacency):
                raise InvalidInput("search unit", fit.unit, "must be the same in all trials")

    @classmethod
    def of(
        cls,
        payment: SearchRoute,
        fits: Sequence[FitClaim],
        score: events.Event | None,
        space: Space,
    ) -> Self:
        """The claim of a search whose trials are of these kinds."""
        one = fits[0]
        return cls(
            payment, tuple(fits), score, space.words(), unit=one.unit, adjacency=one.adjacency,
            delta=one.delta, accountant=one.accountant, records=one.records,
        )  # fmt: skip

    @property
    def event(self) -> events.Event:
        """All that fits and scores release."""
        return self.payment.event([fit.event for fit in self.fits], self.score)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Those of a fit."""
        return self.fits[0].caveats

    def files(self) -> Mapping[str, bytes]:
        """The search, to be read without the ledger."""
        return {SEARCH: (json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n").encode()}

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """What the charge assumes of the search, then of the fit that is released."""
        return [*assumed(self.payment, self.unit), *self.fits[0].assumptions(facts)]

    def describe(self) -> dict[str, Any]:
        """What was searched, and what each fit releases."""
        fit = self.fits[0].describe()
        return {
            "title": f"A search over settings of {self.fits[0].estimator}",
            "words": told_words(self.payment),
            "estimator": self.fits[0].estimator,
            "space": dict(self.space),
            "shown": self.payment.shows,
            "domain": fit["domain"],
            "rounds": fit["rounds"],
        }

    def to_json(self) -> dict[str, Any]:
        """Every field; `from_json` gives an equal claim."""
        return {
            "payment": PAYMENT.encode(self.payment),
            "fits": [fit.to_json() for fit in self.fits],
            "score": None if self.score is None else events.CODEC.encode(self.score),
            "space": dict(self.space),
        }

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The claim that `to_json` wrote."""
        check.known_keys("claim", data, ("payment", "fits", "score", "space"))
        fits = [FitClaim.from_json(one) for one in data["fits"]]
        payment = PAYMENT.decode(data["payment"])
        if not fits or not isinstance(payment, SearchRoute):
            raise InvalidInput(
                "claim.fits", data["fits"], "must hold a payment and at least one fit"
            )
        score = None if data["score"] is None else events.decode(data["score"])
        space = {
            check.one_line("claim.space", str(k)): check.one_line("claim.space", v, 4000)
            for k, v in dict(data["space"]).items()
        }
        return cls.of(payment, fits, score, Space.read(space))


@dataclass(frozen=True, repr=False)
class TunedEstimator(Released):
    """What a search over an estimator leaves: a finished run, and the fitted estimator with the
    settings that were selected; None where the number of trials that was drawn is 0.
    """

    estimator: Any
    settings: Settings | None

    @property
    def _part(self) -> dict[str, Any]:
        return card.section(self.report, FIT_TUNING)

    @property
    def score(self) -> float | None:
        """How many held-out records (or people, each with a share) are answered right, with noise;
        of public records the estimator's own score, exact.
        """
        found = self._part.get("score")
        return float(found) if isinstance(found, int | float) else None

    @property
    def standard_error(self) -> float | None:
        """The standard error of a noisy score; None of a score of public records."""
        return self._part.get("standard_error")

    @property
    def expected(self) -> int | None:
        """How many are held out on average; None where that is not public."""
        return self._part.get("expected")

    @property
    def accuracy(self) -> float | None:
        """The score as a share, from 0 to 1; None where it is not known of how many it is."""
        if self.score is None or self.expected is None:
            return None
        return min(max(self.score / self.expected, 0.0), 1.0)

    def _told(self) -> dict[str, Any]:
        known: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("settings", "score", "standard_error", "expected", "accuracy")
        }
        return {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True)
class PrivateRows:
    """Private records of a search: what they are, what is predicted, and whose each is."""

    X: Any = field(repr=False)
    y: Any = field(repr=False)
    users: Any = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """How many records there are: read after the reservation alone."""
        return len(_read(self.y))

    def at(self, rows: Mask) -> PrivateRows:
        """The records of a mask."""
        return PrivateRows(*(_at(part, rows) for part in (self.X, self.y, self.users)))

    def owners(self, public: PublicFacts) -> NDArray[np.int64]:
        """The number of the person of each record: of a record of nobody, a negative one."""
        if public.person is None:
            return np.arange(self.count)
        cells = tables.column(self.X, public.person.column) if self.users is None else self.users
        return persons.owners_of(persons.cells_of(cells))[0]


def tune(
    estimator: PrivateEstimator | Callable[[Any], float],
    space: Mapping[str, Any],
    data: Dataset | tuple[Any, Any],
    *,
    epsilon: float,
    delta: float | None = None,
    target: str | None = None,
    trials: float = 20,
    route: str = RANDOM,
    law: str = AUTO,
    held_out: float = 0.2,
    public: tuple[Any, Any] | None = None,
    users: Any = None,
    records: int | None = None,
    ledger: Any = None,
    run: Run | Path | str | None = None,
    recipe: Any = None,
) -> Any:
    """Search for the settings of a private estimator, and release the best fit.

        found = dpfy.tune(LogisticRegression(bounds=(-3, 3), classes=[0, 1]),
                          {"l2": "1e-4..1 log"}, (X, y), epsilon=3.0)
        found.estimator.predict(rows), found.settings, found.statement

    Args:
        estimator: An estimator of `dpfy.estimators`. Its epsilon, delta, run and ledger are those of
            the search. Its `unit` says whether a person is protected. Or an objective: a function
            that trains on `trial.data` by `trial.plan` in `trial.run` (`dpfy.fit` takes all three)
            and returns a score of `trial.held_out` (`trial.count(right)`).
        space: Where to search: names of its parameters, with a range ("0.05..5 log", "1..8 whole")
            or a list.
        data: The private records: a `dpfy.Dataset`, or (X, y).
        epsilon: What everything may cost: all fits, all scores, and the choice.
        delta: The delta of the guarantee; without it that of the data set, or derived from
            `records`.
        target: Of a Dataset the column that is predicted; without it the label of its schema.
        trials: The mean number of trials where it is random, else their number.
        route: "random": a random number of independent trials, of which the best is released
            (Papernot & Steinke 2022). "composition": every trial is charged.
        law: The law of the random number: "poisson", "geometric", "logarithmic", or "auto".
        held_out: The share of the records, or of the people, that trials are scored on.
        public: Public records (X, y) to score on instead; then nothing is held out.
        users: The name of each record's person, where X has no such column.
        records: The public number of records, or of people, if there is one: scores are then told
            as a share.
        ledger: The ledger of the data set.
        run: The run folder; by default a new one under runs/.
        recipe: For an objective, what a trial does: a function of the settings and the number of
            records. By default DP-SGD with the settings batch_size, epochs and clip_norm.

    Returns:
        The fitted estimator with its settings, its score and the guarantee of everything.

    Raises:
        InvalidInput: A setting is none of the estimator's, or a range changes what a fit costs.
        Unsupported: No theorem covers what is asked for. The message names the way out.
        BudgetExceeded: The ledger has too little left.

    Guarantees: everything is reserved before a record is read. A record, or a person with all of
    their records, is trained on or scored on, never both, by a coin of their own. A person moves a
    score by at most one, whatever number of records they have. The number of trials and everything
    about those that were not selected is not released.

    Example:
        >>> import numpy as np
        >>> import dpfy
        >>> from dpfy.estimators import NaiveBayes
        >>> X = np.random.default_rng(0).uniform(-1, 1, (400, 2))
        >>> y = (X[:, 0] > 0).astype(int)
        >>> model = NaiveBayes(bounds=(-1, 1), classes=[0, 1])
        >>> found = dpfy.tune(
        ...     model, {"bins": [4, 16]}, (X, y), epsilon=3.0, delta=1e-5, trials=2,
        ...     route="composition",
        ... )
        >>> found.settings["bins"] in (4, 16)
        True
    """
    if not isinstance(estimator, PrivateEstimator):
        if not callable(estimator):
            said = "must be an estimator of dpfy.estimators, or an objective: a function of a trial"
            raise InvalidInput("objective", type(estimator).__name__, said)
        from dpfy.tuning.objective import tune_training

        others = {"public": public, "users": users, "records": records, "target": target}
        for name, value in (others | {"ledger": ledger}).items():
            if value is not None:
                said = "must be left out with an objective, which trains on a Dataset"
                raise InvalidInput(name, "given", said)
        terms = {"trials": trials, "route": route, "law": law, "held_out": held_out}
        return tune_training(
            estimator, space, data, epsilon=epsilon, delta=delta, run=run, recipe=recipe, **terms
        )
    if isinstance(data, Dataset):
        for name, value in (("users", users), ("ledger", ledger)):
            if value is not None:
                raise InvalidInput(name, "given", "must be left out with a Dataset, which says it")
        rule = data.rule(delta)
        estimator, X, y = given.taken(estimator, data, target)
        place = data.run(run, seed=estimator.random_state)
        records = data.records if records is None and data.unit is None else records
    else:
        X, y = _pair("data", data)
        rule = delta_of(delta, records)
        place = Run.of(run, ledger=ledger, seed=estimator.random_state)
    rows = PrivateRows(X, y, users)
    goal = PrivacyTarget(epsilon, rule.value, estimator.adjacency, estimator.accountant)  # type: ignore[arg-type]
    scores = None if public is None else _pair("public", public)
    search = _FitSearch(estimator, Space.read(space), rows, scores, held_out, records, goal)
    claim = search.claim(route, law, trials)
    if place.resume and not complete(place, claim):
        raise Unsupported(
            "going on with a search over an estimator", "start it again in a new folder"
        )
    if not place.resume:
        with RunFolder(place, claim) as folder:
            search.run(folder, claim)
    return search.finished(Path(place.path))


@dataclass(frozen=True)
class _Unreleased:
    """A fit of a trial, which is no release: it has no report."""

    model: FittedArrays
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _TrialFolder:
    """What a fit asks of its folder, for one trial: its right and its secret. It writes nothing."""

    permit: Permit
    randomness: Randomness

    def begin(self, name: str) -> Permit:
        """The right to make this fit."""
        return self.permit

    def tell(self, name: str, **facts: Any) -> None:
        """Nothing is told of a trial."""


@dataclass(frozen=True)
class _FitTrial:
    score: float
    settings: Settings
    model: FittedArrays
    releases: int


@dataclass
class _FitSearch:
    estimator: PrivateEstimator
    space: Space
    rows: PrivateRows
    scored: tuple[Any, Any] | None
    held_out: float
    records: int | None
    target: PrivacyTarget
    noise: float = 1.0

    def __post_init__(self) -> None:
        check.inside_unit("held_out", self.held_out)
        if self.records is not None:
            check.integer("records", self.records, most=check.RECORDS)
        own = set(self.estimator.get_params(deep=False)) - FIXED
        for name in self.space.dimensions:
            check.one_of("space", name, sorted(own))
        self.estimator._check_users(self.rows.X, self.rows.users)
        self.facts = self.estimator._public(self.rows.X, self.rows.y)
        if not isinstance(self.facts.target, ClassTarget | NumberTarget):
            raise Unsupported(
                f"scores of {type(self.estimator).__name__} that are bounded for one record",
                "tune a classifier, or a regressor with target_bounds",
            )
        self.exact = isinstance(self.facts.target, ClassTarget) and self.facts.person is None
        self.points = 1 if self.exact else POINTS

    def claim(self, route: str, law: str, trials: float) -> FitTuning:
        """The search with the least noise that costs what was asked for."""
        check.one_of("route", route, (RANDOM, COMPOSITION))
        check.one_of("law", law, (AUTO, *LAWS))
        score = HELD_OUT if self.scored is None else PUBLIC
        adjacency = self.target.adjacency
        if score == HELD_OUT and adjacency is not Adjacency.ADD_OR_REMOVE_ONE:
            raise Unsupported(
                f"held-out records under {adjacency.value}, where the number of records in a part "
                f"is not public,",
                "use add-or-remove-one, or score on public records",
            )
        shapes = [LAWS[law]] if law != AUTO else [LAWS["poisson"], LAWS["geometric"]]
        found = []
        for shape in shapes if route == RANDOM else shapes[:1]:
            payment = SearchRoute(route, trials, shape, score, adjacency=adjacency)
            found.append(self._calibrated(payment))
        chosen = -1 if found[0][0] > LARGER_NOISE * found[-1][0] else 0
        self.noise = found[chosen][0]
        return found[chosen][1]

    def _calibrated(self, payment: SearchRoute) -> tuple[float, FitTuning]:
        """(noise, claim): a fit has its own epsilon, of the whole one over this noise."""
        noise = score_noise(payment, self.target, self.points)
        score = None if noise is None else payment.score_event(noise, self.points)
        tried = (*self.space.corners(), *self.space.one_by_one())
        kinds = list({self._of(each, 1.0)[2].event: each for each in tried}.values())
        if len(kinds) > MOST_KINDS:
            rule = (
                f"settings that change what a fit costs may be combined in {MOST_KINDS} ways: list "
                f"fewer values"
            )
            raise InvalidInput("space", f"{len(kinds)} kinds of fits", rule)

        def claimed(t: float) -> FitTuning:
            fits = [self._of(each, t)[2] for each in kinds]
            return FitTuning.of(payment, fits, score, self.space)

        least = self.target.least(lambda t: claimed(t).event, start=2.0)
        return least, claimed(least)

    def _of(
        self, settings: Settings, noise: float
    ) -> tuple[PrivateEstimator, PublicFacts, FitClaim]:
        """An estimator with these settings, for a part of the budget, and what it would release."""
        from sklearn.base import clone

        made: PrivateEstimator = clone(self.estimator)
        made.set_params(**settings, epsilon=self.target.epsilon / noise, delta=self.target.delta)
        made.set_params(run=None, ledger=None)
        if made.records is not None and self.scored is None:
            made.set_params(records=max(1, round(made.records * (1 - self.held_out))))
        public = made._public(self.rows.X, self.rows.y)
        return made, public, made._claim(public)

    def run(self, folder: RunFolder, claim: FitTuning) -> None:
        """Make the trials, select, and publish.

        Guarantees: each fit and each score is made under a permit for one of the events that were
        reserved, with noise of its own.
        """
        permit, randomness = folder.begin(claim.name), folder.randomness
        random = claim.payment.random
        count = drawn(claim, permit, randomness) if random else int(claim.payment.trials)
        train, apart = self._parts(randomness)
        best: _FitTrial | None = None
        for place in range(count):
            settings = self.space.draw(randomness.generator("settings", place))
            made = self._tried(settings, claim, train, apart, permit, randomness, place)
            best = made if best is None or made.score > best.score else best
        self._publish(folder, claim, best)

    def _parts(self, randomness: Randomness) -> tuple[PrivateRows, PrivateRows | None]:
        """(records to train on, records held out): by a coin of each record or person."""
        owners = self.rows.owners(self.facts)
        if len(owners) != self.rows.count:
            raise InvalidInput("users", f"{len(owners)} names", "must be one for each record of X")
        if self.scored is not None:
            return self.rows, None
        held = _by_coin(owners, self.held_out, randomness)
        return self.rows.at(~held), self.rows.at(held)

    def _tried(
        self,
        settings: Settings,
        claim: FitTuning,
        train: PrivateRows,
        apart: PrivateRows | None,
        permit: Permit,
        randomness: Randomness,
        place: int,
    ) -> _FitTrial:
        estimator, public, own = self._of(settings, self.noise)
        if own.event not in {fit.event for fit in claim.fits}:
            raise Unsupported(
                "a combination of settings with a cost that nothing was reserved for",
                "list the values of all settings that change what a fit costs",
            )
        inner = permit.inner(own.event, place, own.releases)
        folder: Any = _TrialFolder(inner, secret_of(randomness, place))
        fit = FitSession(folder, own, resumable=False)
        try:
            model = estimator._fitted(train.X, train.y, train.users, public, fit)
            estimator._load(_Unreleased(model))  # type: ignore[arg-type]
            if apart is None:
                assert self.scored is not None
                score = as_score(estimator.score(*self.scored))
            else:
                score = self._counted(estimator, public, apart, claim, permit, randomness, place)
        except Exception as problem:  # its text may hold anything
            raise TrialFailed(
                f"a trial failed ({type(problem).__name__}); fit the estimator by itself, on "
                f"made-up data, to see where"
            ) from None
        return _FitTrial(score, settings, model, fit.released)

    def _counted(
        self,
        estimator: PrivateEstimator,
        public: PublicFacts,
        apart: PrivateRows,
        claim: FitTuning,
        permit: Permit,
        randomness: Randomness,
        place: int,
    ) -> float:
        """The noisy score of a trial on the held-out records."""
        score = claim.score
        assert isinstance(score, events.DiscreteGaussian)
        owners = apart.owners(public)
        total = scored(public, estimator.predict(apart.X), apart.y, owners, self.points)
        # A number and a secret that no fit has: a score shares no bits with the noise of its fit.
        number = place + MOST_TRIALS
        noisy = DiscreteGaussianMechanism(score.sigma, self.points).release(
            Bounded(total, Bound.scalar(self.points), claim.unit),
            permit.inner(score, number, 1),
            secret_of(randomness, number),
        )
        return as_score(float(noisy.value) / self.points)

    def _publish(self, folder: RunFolder, claim: FitTuning, best: _FitTrial | None) -> None:
        """Write the selected fit and its report; everything else is forgotten."""
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        if best is None:
            folder.tell(claim.name, settings=absent(NONE_MADE))
        else:
            folder.write(FILE, best.model.to_bytes())
            told: dict[str, Any] = {"settings": dict(best.settings), "score": number(best.score)}
            if isinstance(claim.score, events.DiscreteGaussian):
                told["standard_error"] = claim.score.sigma / claim.score.sensitivity
                told |= {} if self.records is None else {"expected": self._expected}
            folder.tell(claim.name, **told)
        folder.finish(card.Facts(about, 0 if best is None else best.releases))
        same_times(folder.path)

    @property
    def _expected(self) -> int:
        assert self.records is not None
        return max(1, round(self.records * self.held_out))

    def finished(self, path: Path) -> TunedEstimator:
        """The result of a search that is finished."""
        found = TunedEstimator(path, None, None)
        settings = found._part["settings"]
        if "absent" in settings:
            return found
        from sklearn.base import clone

        fitted = clone(self.estimator).set_params(
            **settings, epsilon=self.target.epsilon, delta=self.target.delta
        )
        fitted._load(FinishedFit.of(path))
        return TunedEstimator(path, fitted, dict(settings))


def _by_coin(owners: NDArray[np.int64], share: float, randomness: Randomness) -> Mask:
    """Which records are held out: those of people whose own coin says so. Records of nobody are in
    no part that is scored.
    """
    coins = tossed("held out", int(owners.max(initial=-1)) + 1, share, randomness)
    held = np.zeros(len(owners), bool)
    held[owners >= 0] = coins[owners[owners >= 0]]
    return held


def scored(
    public: PublicFacts, answers: Any, y: Any, owners: NDArray[np.int64], points: int
) -> int:
    """The score of answers on private records, in points.

    Args:
        public: What is known of the target.
        answers: What a model answers for each record.
        y: What is right.
        owners: The number of each record's person.
        points: In how many points the share of one person is laid.

    Returns:
        The sum over people of the mean over their records, each laid in points.

    Guarantees: one person adds between 0 and `points`, whatever number of records they have and
        whatever is answered.
    """
    aim = public.target
    if isinstance(aim, ClassTarget):
        right = (aim.read(answers) == aim.read(y)).astype(np.float64)
    else:
        assert isinstance(aim, NumberTarget)
        due, told = (np.clip(numbers_of(part), aim.low, aim.high) for part in (y, answers))
        right = 1 - np.abs(told - due) / (aim.high - aim.low)
    right = np.clip(np.nan_to_num(right, nan=0.0), 0, 1)
    if not len(owners):
        return 0
    sums, counts = np.bincount(owners, right), np.bincount(owners)
    means = sums / np.maximum(counts, 1)
    return int(np.clip(np.rint(points * means), 0, points).sum())


def _read(y: Any) -> Any:
    return y.to_numpy() if isinstance(y, FileColumn) else y


def _pair(name: str, given: Any) -> tuple[Any, Any]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidInput(name, type(given).__name__, "must be a Dataset, or a pair: (X, y)")
    return given[0], given[1]


def _at(part: Any, rows: Mask) -> Any:
    """Some rows of an array, a pandas or an Arrow table, or a list."""
    if part is None:
        return None
    if isinstance(part, FileTable):
        return HeldTable.at(part, np.flatnonzero(rows))
    if isinstance(part, FileColumn):
        return part.to_numpy()[rows]
    if hasattr(part, "column_names") or hasattr(part, "to_pylist"):
        return part.take(np.flatnonzero(rows))
    if hasattr(part, "iloc"):
        return part.iloc[np.flatnonzero(rows)]
    return np.asarray(part)[rows]
