"""What a search may cost, and how it is paid for: all that is public about it beside what is
searched. Then who takes part in what, and which kinds of trials there are.

Every unit tosses coins of its own for what is held out for scores and for the sample of a search on
a subset. The coins are drawn once for the whole search, from its secret. Given the coins of all
others, adding or removing a unit changes nothing for them, so each part is what the accounting of
disjoint parts, and of Poisson samples, is about. A permutation of the rows, or a fixed share of
them, would not do: with one unit more, others would move from one part to the other. A user with
several records tosses one coin: with one for each record, the user would be in both parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dpfy import accounting
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.core.randomness import Randomness
from dpfy.data.owners import Owned
from dpfy.data.records import Records
from dpfy.data.split import first_of, kept, kept_users, units
from dpfy.plan.recipe import Recipe
from dpfy.tuning.routes import (
    HELD_OUT,
    LAWS,
    MOST_KINDS,
    PUBLIC,
    RANDOM,
    SUBSET,
    TRAINING,
    VALIDATION,
    PrivacyTarget,
    SearchRoute,
)
from dpfy.tuning.space import FloatRange, IntegerRange, Settings, Space

AUTO = "auto"


@dataclass(frozen=True)
class SearchSettings:
    """What a search may cost, and how it is paid for. All of it is public.

    `trials` is their number, or its mean where it is random (`law`: logarithmic, geometric,
    poisson, or auto). `score` says whose records trials are scored on; `held_out` is the share of
    the records that is kept for that, `sample` the share that a search on a subset sees.
    """

    epsilon: float
    delta: float
    records: int
    trials: float = 20
    route: str = RANDOM
    law: str = AUTO
    score: str = PUBLIC
    held_out: float = 0.1
    sample: float = 0.1
    prune: bool = False
    accountant: str = accounting.DEFAULT
    adjacency: str = "add-or-remove-one"

    def __post_init__(self) -> None:
        check.one_of("law", self.law, (AUTO, *LAWS))
        check.inside_unit("held_out", self.held_out)
        check.integer("records", self.records, most=check.RECORDS)
        PrivacyTarget(self.epsilon, self.delta)
        for shape in self.shapes:
            self.payment(shape, adaptive=self.prune)

    @property
    def shapes(self) -> tuple[float, ...]:
        """The laws that come into question, the one to prefer first."""
        return (LAWS["poisson"], LAWS["geometric"]) if self.law == AUTO else (LAWS[self.law],)

    def payment(self, shape: float, *, adaptive: bool) -> SearchRoute:
        """The payment with this law of the number of trials."""
        return SearchRoute(
            self.route,
            self.trials,
            shape,
            self.score,
            adaptive,
            self.prune,
            self.sample,
            self.adjacency,  # type: ignore[arg-type]
        )

    @property
    def parts(self) -> TrialSplit:
        """Who takes part in what."""
        return TrialSplit(
            self.records,
            self.held_out if self.score == HELD_OUT else 0.0,
            self.sample if self.route == SUBSET else 1.0,
        )

    @property
    def target(self) -> PrivacyTarget:
        """What everything may cost."""
        return PrivacyTarget(self.epsilon, self.delta, self.adjacency, self.accountant)  # type: ignore[arg-type]


SAMPLED = "sampled training records"


@dataclass(frozen=True)
class TrialSplit:
    """What share of `records` (their public number) is held out for scores, and which share of the
    rest a search on a subset sees.
    """

    records: int
    held_out: float = 0.0
    sample: float = 1.0

    def __post_init__(self) -> None:
        check.integer("records", self.records)
        check.below_one("held_out", self.held_out)
        check.rate("sample", self.sample)

    @property
    def training(self) -> int:
        """How many records there are to train on, on average."""
        return round(self.records * (1 - self.held_out))

    @property
    def sampled(self) -> int:
        """How many of them a search on a subset sees, on average."""
        return round(self.records * (1 - self.held_out) * self.sample)

    @property
    def validation(self) -> int:
        """How many records are held out, on average."""
        return round(self.records * self.held_out)

    def part(self, *, final: bool = False) -> str | None:
        """The part that a trial must train on, or the run on all records; None where that is all of
        the data.
        """
        if self.sample < 1 and not final:
            return SAMPLED
        return TRAINING if self.held_out > 0 else None

    def train(self, data: Records | Owned, search: Randomness, *, final: bool) -> Records | Owned:
        """The records that a trial trains on: with `final`, those of the run on all of them."""
        count = units(data)
        coins = ~self._out(count, search)
        if self.sample < 1 and not final:
            coins &= tossed("subset", count, self.sample, search)
        elif self.held_out == 0:
            return data
        expected = self.training if final or self.sample == 1 else self.sampled
        part = self.part(final=final) or ""
        if isinstance(data, Owned):
            return kept_users(data, coins, expected, part)
        return kept(data, coins, expected, part)

    def valid(self, data: Records | Owned, search: Randomness) -> Records:
        """The records held out; of users one row each, of their first records."""
        coins = self._out(units(data), search)
        if isinstance(data, Owned):
            return first_of(kept_users(data, coins, self.validation, VALIDATION))
        return kept(data, coins, self.validation, VALIDATION)

    def _out(self, count: int, search: Randomness) -> NDArray[np.bool_]:
        return tossed("held out", count, self.held_out, search)


def tossed(what: str, count: int, share: float, search: Randomness) -> NDArray[np.bool_]:
    return np.asarray(search.generator(what, 0).random(count) < share)


TrialEvents = tuple[Event, ...]
RecipeOf = Callable[[Settings], Recipe]
"""What a trial with these settings does to the data: a public function, of the settings alone."""
MANY = 4096
"""Combinations of listed values that are all tried before anything is reserved."""


@dataclass(frozen=True)
class TrialKinds:
    """Settings sorted by what they cost. `recipes` holds one of each kind; `finals` that of the run
    on all records after it, if any.

    Without `trial` the settings of a trial are found while it runs, and it says itself which kind
    it is.
    """

    trial: RecipeOf | None
    final: RecipeOf | None
    costly: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    finals: tuple[Recipe, ...]
    _places: dict[TrialEvents, int] = field(repr=False, compare=False, hash=False)

    @classmethod
    def of(cls, space: Space, trial: RecipeOf, final: RecipeOf | None = None) -> TrialKinds:
        """The kinds of a space.

        Guarantees: every listed value is tried, in all combinations where they are few, and every
        range at its ends and between; what could not be trained or charged is refused here. A range
        that changes the charge is refused: its values must be listed, so that each has its own noise.
        """
        costly = _costly(space, lambda settings: _bill(settings, trial, final))
        for name in costly:
            if isinstance(space.dimensions[name], FloatRange):
                rule = (
                    "it changes what a trial costs: list its values, as in [256, 512, 1024], and "
                    "each gets noise of its own"
                )
                raise InvalidInput(f"search.{name}", space.dimensions[name].words, rule)
        listed = [name for name, d in space.dimensions.items() if not isinstance(d, FloatRange)]
        combined = listed if _many(space, listed) <= MANY else costly
        found: dict[TrialEvents, Settings] = {}
        for settings in (*space.corners(combined), *space.one_by_one()):
            found.setdefault(_bill(settings, trial, final), settings)
        if len(found) > MOST_KINDS:
            rule = f"{', '.join(costly)} may be combined in at most {MOST_KINDS} ways"
            raise InvalidInput("search", f"{len(found)} kinds of trials", rule)
        recipes, finals = (
            [] if of is None else [of(settings) for settings in found.values()]
            for of in (trial, final)
        )
        places = {bill: place for place, bill in enumerate(found)}
        return cls(trial, final, tuple(costly), tuple(recipes), tuple(finals), places)

    @classmethod
    def listed(cls, recipes: Sequence[Recipe]) -> TrialKinds:
        """Kinds of trials that find their settings while they run."""
        found = {recipe.event(1.0): recipe for recipe in recipes}
        if not 1 <= len(found) <= MOST_KINDS:
            raise InvalidInput(
                "recipes", f"{len(found)} kinds of trials", f"must be 1 to {MOST_KINDS}"
            )
        return cls(None, None, (), tuple(found.values()), (), {})

    def recipe(self, settings: Settings, *, final: bool = False) -> Recipe | None:
        """What a trial with these settings does, or the run on all records; None where it says so
        itself.

        Guarantees: its charge is that of one of the kinds.
        """
        if (self.final if final else self.trial) is None:
            return None
        made = _recipes(settings, self.trial, self.final)
        self._of(made)
        return made[-1] if final else made[0]

    def place(self, settings: Settings) -> int:
        """The kind of these settings."""
        return self._of(_recipes(settings, self.trial, self.final))

    def _of(self, recipes: Sequence[Recipe]) -> int:
        place = self._places.get(tuple(recipe.event(1.0) for recipe in recipes))
        if place is None:
            raise Unsupported(
                "a combination of settings with a charge that nothing was reserved for",
                "list the values of all settings that change it",
            )
        return place

    def counts(self, settings: Sequence[Settings]) -> tuple[int, ...]:
        """How many of these are of each kind."""
        places = [self.place(each) for each in settings]
        return tuple(places.count(k) for k in range(len(self.recipes)))


def _recipes(settings: Settings, *recipes: RecipeOf | None) -> tuple[Recipe, ...]:
    return tuple(of(settings) for of in recipes if of is not None)


def _bill(settings: Settings, *recipes: RecipeOf | None) -> TrialEvents:
    return tuple(recipe.event(1.0) for recipe in _recipes(settings, *recipes))


def _many(space: Space, names: Sequence[str]) -> int:
    return math.prod(len(space.dimensions[name].ends()) for name in names)


def _costly(space: Space, bill: Callable[[Settings], TrialEvents]) -> list[str]:
    """The names whose values change the charge, all others at their first or all at their last."""
    firsts, lasts = ({name: d.ends()[k] for name, d in space.dimensions.items()} for k in (0, -1))
    found: list[str] = []
    for (name, d), others in product(space.dimensions.items(), (firsts, lasts)):
        if name in found or len({bill(others | {name: value}) for value in d.ends()}) == 1:
            continue
        if isinstance(d, IntegerRange) and d.high - d.low >= len(d.ends()):
            raise InvalidInput(
                f"search.{name}", d.words, "it changes what a trial costs: list its values"
            )
        found.append(name)
    return found
