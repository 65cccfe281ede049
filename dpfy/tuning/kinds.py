"""From settings to plans: which settings change what a trial costs, and the noise of each kind of trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Event
from dpfy.plan.recipe import Plan, Recipe
from dpfy.tuning.payment import MOST_KINDS, Paid
from dpfy.tuning.space import Range, Settings, Space, Whole

Bill = tuple[Event, ...]
RecipeOf = Callable[[Settings], Recipe]
"""What a trial with these settings does to the data: a public function, of the settings alone."""
MANY = 4096
"""Combinations of listed values that are all tried before anything is reserved."""


@dataclass(frozen=True)
class Kinds:
    """Settings sorted by what they cost. `recipes` holds one of each kind; `finals` that of the run on all records after it, if any."""

    trial: RecipeOf
    final: RecipeOf | None
    costly: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    finals: tuple[Recipe, ...]
    _places: dict[Bill, int] = field(repr=False, compare=False, hash=False)

    @classmethod
    def of(cls, space: Space, trial: RecipeOf, final: RecipeOf | None = None) -> Kinds:
        """The kinds of a space.

        Guarantees: every listed value is tried, in all combinations where they are few, and every range at its ends and between; what
        could not be trained or billed is refused here. A range that changes the bill is refused: its values must be listed, so that
        each has its own noise.
        """
        costly = _costly(space, lambda settings: _bill(settings, trial, final))
        for name in costly:
            if isinstance(space.dimensions[name], Range):
                rule = "it changes what a trial costs: list its values, as in [256, 512, 1024], and each gets noise of its own"
                raise InvalidInput(f"search.{name}", space.dimensions[name].words, rule)
        listed = [name for name, d in space.dimensions.items() if not isinstance(d, Range)]
        combined = listed if _many(space, listed) <= MANY else costly
        found: dict[Bill, Settings] = {}
        for settings in (*space.corners(combined), *space.one_by_one()):
            found.setdefault(_bill(settings, trial, final), settings)
        if len(found) > MOST_KINDS:
            rule = f"{', '.join(costly)} may be combined in at most {MOST_KINDS} ways"
            raise InvalidInput("search", f"{len(found)} kinds of trials", rule)
        recipes, finals = ([] if of is None else [of(settings) for settings in found.values()] for of in (trial, final))
        places = {bill: place for place, bill in enumerate(found)}
        return cls(trial, final, tuple(costly), tuple(recipes), tuple(finals), places)

    def place(self, settings: Settings) -> int:
        """The kind of these settings."""
        place = self._places.get(_bill(settings, self.trial, self.final))
        if place is None:
            raise Unsupported(
                "a combination of settings with a bill that nothing was reserved for",
                "list the values of all settings that change it",
            )
        return place

    def plan(self, settings: Settings, paid: Paid, *, final: bool = False) -> Plan:
        """The plan of a trial with these settings, or of the run on all records: its own clip norm, and the noise of its kind."""
        of, plans = (self.final, paid.finals) if final and self.final is not None else (self.trial, paid.plans)
        kind = plans[self.place(settings)]
        return Plan(of(settings), kind.noise_multiplier, kind.delta, kind.accountant)

    def counts(self, settings: Sequence[Settings]) -> tuple[int, ...]:
        """How many of these are of each kind."""
        places = [self.place(each) for each in settings]
        return tuple(places.count(k) for k in range(len(self.recipes)))


def _bill(settings: Settings, *recipes: RecipeOf | None) -> Bill:
    return tuple(of(settings).event(1.0) for of in recipes if of is not None)


def _many(space: Space, names: Sequence[str]) -> int:
    return math.prod(len(space.dimensions[name].ends()) for name in names)


def _costly(space: Space, bill: Callable[[Settings], Bill]) -> list[str]:
    """The names whose values change the bill, all others at their first or all at their last."""
    firsts, lasts = ({name: d.ends()[k] for name, d in space.dimensions.items()} for k in (0, -1))
    found: list[str] = []
    for (name, d), others in product(space.dimensions.items(), (firsts, lasts)):
        if name in found or len({bill(others | {name: value}) for value in d.ends()}) == 1:
            continue
        if isinstance(d, Whole) and d.high - d.low >= len(d.ends()):
            raise InvalidInput(f"search.{name}", d.words, "it changes what a trial costs: list its values")
        found.append(name)
    return found
