"""From settings to plans: which settings change what a trial costs, and the noise of each kind of
trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.plan.recipe import Recipe
from dpfy.tuning.routes import MOST_KINDS
from dpfy.tuning.space import FloatRange, IntegerRange, Settings, Space

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
        range at its ends and between; what could not be trained or billed is refused here. A range
        that changes the bill is refused: its values must be listed, so that each has its own noise.
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

        Guarantees: its bill is that of one of the kinds.
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
                "a combination of settings with a bill that nothing was reserved for",
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
    """The names whose values change the bill, all others at their first or all at their last."""
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
