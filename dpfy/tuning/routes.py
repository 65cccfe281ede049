"""How a search on private data is paid for: from what one trial does to the one event that covers
all of it.

random       the best of a random number of trials (Papernot & Steinke 2022): settings drawn
independently, the number never shown composition  every trial is charged: settings may follow from
the scores of earlier ones, and all trials may be shown noisy-max    the trials are charged, and the
winner is drawn by the exponential mechanism on private validation records, charged once subset
a random search on a Poisson sample of the records, then one run on all of them with the settings
that it found, scaled
             (Koskela & Kulkarni 2023)

Scores are of public records, or of private ones: *held out* of training by coins of their own, so
that a person is in one part or the other (`Parallel`, docs/tuning.md has the proof), or of the
training records themselves, which pay for both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dpfy import accounting
from dpfy.accounting import calibrate
from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.unit import Adjacency, Unit
from dpfy.mechanisms.candidates import PrivateSelection
from dpfy.plan.recipe import RECORD, Plan, Recipe

RANDOM, COMPOSITION, NOISY_MAX, SUBSET = PRIVATE = ("random", "composition", "noisy-max", "subset")
PUBLIC_DATA = "public"
ROUTES = (PUBLIC_DATA, *PRIVATE)
LAWS = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""The shape of the number of trials (eta of the truncated negative binomial law; infinity is
Poisson's).
"""
PUBLIC, HELD_OUT, TRAINED_ON = SCORES = ("public", "held-out", "training")
"""Whose records the score of a trial is measured on."""
TRAINING, VALIDATION = "training records", "validation records"
"""The disjoint parts of the data where a score is of records held out."""
SHARE = 0.1
"""The part of epsilon for scores, where those who pay for them pay for training too."""
MOST_TRIALS, MOST_KINDS, MOST_STEPS = 100_000, 64, 10_000_000
POINTS = 100
"""How finely the score of a user with several records is laid: the share of them that is right, in
hundredths.
"""
ROUGH = 1e-3
"""How closely the noise of each of several kinds is found before all of them get the same factor
more.
"""


@dataclass(frozen=True)
class SearchRoute:
    """One way to pay. `trials` is their number, or its mean where it is random; `shape` the law of
    a random number.

    `adaptive` is for composition: settings may follow from earlier scores. `pruned`: a trial may be
    ended early by what it has released, and is charged for that; then a Rényi filter holds the sum
    below that of `trials` whole ones. `sample` is the rate of a subset.
    """

    route: str
    trials: float
    shape: float = 0.0
    score: str = PUBLIC
    adaptive: bool = False
    pruned: bool = False
    sample: float = 0.1
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        check.one_of("route", self.route, PRIVATE)
        check.one_of("score", self.score, SCORES)
        if check.positive("trials", self.trials) > MOST_TRIALS:
            raise InvalidInput("trials", self.trials, f"must be at most {MOST_TRIALS}")
        if self.random:
            PrivateSelection(events.Nothing(), self.trials, self.shape)
        elif self.trials != int(self.trials):
            raise InvalidInput("trials", self.trials, "must be a whole number")
        if (self.adaptive or self.pruned) and self.route != COMPOSITION:
            raise Unsupported(
                f"a search that looks at earlier scores under the route {self.route!r}, whose "
                f"theorem is about independent settings,",
                "search at random, or pay by composition (route composition)",
            )
        if self.pruned and self.trials < 2:
            raise InvalidInput(
                "trials", self.trials, "must be at least 2 where trials may be pruned"
            )
        if self.pruned and self.score != PUBLIC:
            way_out = "prune by scores of public records, or let every trial run to its end"
            raise Unsupported(
                "pruning trials by private losses, each look at which would be a release,", way_out
            )
        if self.route == NOISY_MAX and self.score != HELD_OUT:
            way_out = (
                "hold records out for it (score held-out), or choose random or composition, where "
                "scores are free or charged"
            )
            raise Unsupported(f"noisy max over scores of {self.score} records", way_out)
        if self.route == SUBSET:
            check.inside_unit("sample", self.sample)

    @property
    def random(self) -> bool:
        """Whether the number of trials is drawn."""
        return self.route in (RANDOM, SUBSET)

    @property
    def shows(self) -> str:
        """What may be told of trials that were not selected."""
        if self.random:
            return "nothing, not even their number"
        return (
            "all of it: settings, scores and models are billed"
            if self.route == COMPOSITION
            else "their settings"
        )

    def score_event(self, noise: float, points: int = 1) -> Event | None:
        """What the score of one trial releases, or the choice among all of them; None where scores
        are of public records.

        A unit adds at most one to a score, of which it is laid in so many `points`.
        """
        if self.score == PUBLIC:
            return None
        return (
            events.BoundedRange(1 / noise)
            if self.route == NOISY_MAX
            else events.DiscreteGaussian(noise * points, points)
        )

    def event(
        self,
        runs: Sequence[Event],
        score: Event | None,
        finals: Sequence[Event] = (),
        counts: Sequence[int] = (),
    ) -> Event:
        """All that the search releases, and the run that is kept with it.

        `runs` are what trials may do, one event for each kind; `finals` what the run on all records
        may do after a search on a subset; `counts` how many trials of each kind are made, where
        that is known in advance.
        """
        within = score if self.score == TRAINED_ON else None
        training = self._training(
            [r if within is None else events.Composed((r, within)) for r in runs], counts
        )
        if finals:
            training = events.Composed(
                (
                    events.PoissonSampled(self.sample, training),
                    events.Repeated(events.one_of(finals), 1),
                )
            )
        if self.score != HELD_OUT or score is None:
            return training
        return events.Parallel(((TRAINING, training), (VALIDATION, self._scores(score))))

    def _training(self, runs: Sequence[Event], counts: Sequence[int]) -> Event:
        """What trials release; `OneOf` is known by its Rényi divergences alone, as a filter needs
        it.

        Under a filter trials, and steps of trials, are chosen and ended with sight of earlier
        outputs. At each order their divergences add up (Feldman & Zrnic 2021), and a trial is started
        only if all of it keeps the sum at or below that of `trials` whole ones.
        """
        if self.random:
            return events.RepeatAndSelect(events.one_of(runs), self.trials, self.shape)
        if self.pruned:
            return events.Repeated(events.OneOf(tuple(dict.fromkeys(runs))), int(self.trials))
        if self.adaptive or not counts:
            return events.Repeated(events.one_of(runs), int(self.trials))
        return events.Composed(
            tuple(events.Repeated(run, n) for run, n in zip(runs, counts, strict=True) if n)
        )

    def _scores(self, score: Event) -> Event:
        """What is released of the validation records."""
        if self.random:
            return events.RepeatAndSelect(score, self.trials, self.shape)
        return events.Repeated(score, 1 if self.route == NOISY_MAX else int(self.trials))


def points(unit: Unit) -> int:
    """In how many points the score of one unit is laid: a record is right or wrong, of a user's
    records a share is right.
    """
    return 1 if unit.most_records == 1 else POINTS


@dataclass(frozen=True)
class PrivacyTarget:
    """What everything together may cost."""

    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    accountant: str = accounting.DEFAULT

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta", self.delta)
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))

    def reached(self, event: Event) -> float:
        """The epsilon of an event at this delta."""
        return accounting.epsilon(
            event, self.delta, adjacency=self.adjacency, accountant=self.accountant
        )

    def least(
        self,
        make: Callable[[float], Event],
        *,
        start: float = 1.0,
        tolerance: float = calibrate.TOLERANCE,
    ) -> float:
        """The least noise with which an event costs no more, to a relative tolerance; looked for
        from `start` on.
        """
        return calibrate.least(
            lambda noise: self.reached(make(noise)), self.epsilon, start=start, tolerance=tolerance
        )


@dataclass(frozen=True)
class CalibratedSearch:
    """A payment with its noise fixed: the plans of trials, one for each kind, of final runs, and
    the event that covers everything.

    Guarantees: `event` costs at most the epsilon asked for; every trial of a kind, and every score,
    is one of the events in it.
    """

    payment: SearchRoute
    plans: tuple[Plan, ...]
    finals: tuple[Plan, ...]
    score: Event | None
    counts: tuple[int, ...] = ()

    @property
    def event(self) -> Event:
        """All that is released."""
        runs, finals = [plan.event for plan in self.plans], [plan.event for plan in self.finals]
        return self.payment.event(runs, self.score, finals, self.counts)

    @property
    def alone(self) -> tuple[Plan, ...]:
        """Plans of the run that is released, by the kind of its settings."""
        return self.finals or self.plans


def calibrate_search(
    payment: SearchRoute,
    target: PrivacyTarget,
    recipes: Sequence[Recipe],
    finals: Sequence[Recipe] = (),
    counts: Sequence[int] = (),
) -> CalibratedSearch:
    """The least noise of every kind of trial with which the whole search costs what was asked for.

    `recipes` are the kinds of trials: settings that cost alike are one kind. Each kind is
    calibrated as if it were the only one, so that each has all of the budget; then all get a little
    more noise, by one factor, until the worst of them at every order costs no more.

    Guarantees: the accountant's epsilon of the whole event, at the noise returned, is at most the
    target's.
    """
    return _calibrated(payment, target, tuple(recipes), tuple(finals), tuple(counts))


@functools.lru_cache(maxsize=64)
def _calibrated(
    payment: SearchRoute,
    target: PrivacyTarget,
    recipes: tuple[Recipe, ...],
    finals: tuple[Recipe, ...],
    counts: tuple[int, ...],
) -> CalibratedSearch:
    """A charge takes long to compute: the same search is calibrated once a process."""
    if not 1 <= len(recipes) <= MOST_KINDS:
        raise InvalidInput(
            "search",
            f"{len(recipes)} kinds of trials",
            f"settings that change the charge may be combined in at most {MOST_KINDS} ways",
        )
    for recipe in (*recipes, *finals):
        check.integer("steps", recipe.steps, most=MOST_STEPS)
        if recipe.stopping is not None:
            raise Unsupported(
                "trials that may end early at points of their own",
                "leave out training.stopping, or prune (route composition)",
            )
        recipe.check_delta(target.delta, allow_large=True)
        recipe.check_unit()
        if recipe.draw == RECORD and (payment.score == HELD_OUT or payment.route == SUBSET):
            raise Unsupported(
                "a part of the users where their records are drawn one by one",
                "draw whole users (draw='unit' and dpfy.by_user), or score on public or training "
                "records by another route",
            )
    laid = points(recipes[0].unit)
    score = score_noise(payment, target, laid)
    # Those who are held out for scores pay nothing for training: two parts, each of which may cost
    # all of epsilon.
    beside = None if score is None or _apart(payment, target) else payment.score_event(score, laid)

    def trials(noises: Sequence[float], kinds: Sequence[int], numbers: Sequence[int]) -> Event:
        runs = [recipes[k].event(noise) for k, noise in zip(kinds, noises, strict=True)]
        last = (
            [finals[k].event(noise) for k, noise in zip(kinds, noises, strict=True)]
            if finals
            else []
        )
        return payment.event(runs, beside, last, numbers)

    def paid(factor: float) -> CalibratedSearch:
        plans, last = (
            tuple(
                Plan(r, factor * s, target.delta, target.accountant)
                for r, s in zip(rs, noises, strict=False)
            )
            for rs in (recipes, finals)
        )
        return CalibratedSearch(
            payment,
            plans,
            last,
            None if score is None else payment.score_event(factor * score, laid),
            counts,
        )

    every, close = range(len(recipes)), calibrate.TOLERANCE if len(recipes) == 1 else ROUGH
    noises = _each(
        lambda s, k: trials([s], [k], [sum(counts)] if counts else []),
        target,
        len(recipes),
        close,
        payment,
    )
    if len(recipes) > 1:
        factor = target.least(lambda t: trials([t * s for s in noises], every, counts), start=1.0)
        noises = [factor * s for s in noises]
    if (
        target.reached((found := paid(1.0)).event) > target.epsilon
    ):  # parts that an accountant knows less well together than each alone
        found = paid(target.least(lambda t: paid(t).event, start=1.01))
    return found


def _each(
    whole: Callable[[float, int], Event],
    target: PrivacyTarget,
    kinds: int,
    close: float,
    payment: SearchRoute,
) -> list[float]:
    """The noise of each kind by itself. One is sought where the one before it was found, or, where
    a charge takes long to compute, near that of a law that is quick.
    """
    found: list[float] = []
    for kind in range(kinds):
        start = found[-1] if found else 1.0
        geometric = payment.trials > 1  # there is none of a smaller mean
        if not found and payment.random and math.isinf(payment.shape) and geometric:
            start = target.least(lambda s: _geometric(whole(s, kind)), tolerance=ROUGH)  # noqa: B023
        found.append(target.least(lambda s: whole(s, kind), start=start, tolerance=close))  # noqa: B023
    return found


def _geometric(event: Event) -> Event:
    """The same search with a geometric number of trials."""
    if isinstance(event, events.RepeatAndSelect):
        return replace(event, shape=1.0)
    if isinstance(event, events.Composed):
        return events.Composed(tuple(map(_geometric, event.events)))
    if isinstance(event, events.Parallel):
        return events.Parallel(tuple((name, _geometric(part)) for name, part in event.parts))
    return (
        replace(event, event=_geometric(event.event))
        if isinstance(event, events.PoissonSampled)
        else event
    )


def _apart(payment: SearchRoute, target: PrivacyTarget) -> bool:
    """Whether nobody pays for both training and scores: a replaced person may be in one part before
    and in the other after.
    """
    return payment.score == HELD_OUT and target.adjacency is not Adjacency.REPLACE_ONE


def score_noise(payment: SearchRoute, target: PrivacyTarget, laid: int) -> float | None:
    """The noise of scores: as little as the target allows those who are held out for them; else a
    tenth of it. None without scores.
    """
    if payment.score == PUBLIC:
        return None
    alone = replace(payment, score=HELD_OUT)

    def made(noise: float) -> Event:
        score = alone.score_event(noise, laid)
        assert score is not None
        return alone._scores(score)

    part = target if _apart(payment, target) else replace(target, epsilon=SHARE * target.epsilon)
    return part.least(made)
