"""Recipe and plan: two states, two types. Only a plan can train, and everything it claims is
derived from what will run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

from dpfy import accounting
from dpfy.accounting import calibrate as calibration
from dpfy.accounting.user_level import of_group
from dpfy.core import check, events
from dpfy.core.codec import Codec, digest
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.guarantee import Guarantee, decimal_up, default_delta, html_table
from dpfy.core.unit import (
    EXAMPLE,
    Adjacency,
    CyclicPoisson,
    Unit,
    WithoutReplacement,
    check_content,
)
from dpfy.gradients.clip import CLIPS, Clip, FlatClip, MicrobatchClip, QuantileClip
from dpfy.noise import schedule
from dpfy.noise.schedule import Schedule
from dpfy.noise.strategy import Identity, Strategy
from dpfy.plan import pairs
from dpfy.plan.pairs import STRATEGIES
from dpfy.plan.stopping import Stopping, first_steps, stopping
from dpfy.sampling.samplers import SAMPLERS, CheckInSampler, Sampler

FLOAT, EXACT = NOISES = ("float", "exact")
"""How noise is added: in floating point, or so that every released value is where real numbers
would put it.
"""

UNIT, RECORD = DRAWS = ("unit", "record")
"""What is drawn and clipped: whole units, or single records, of which a unit owns some."""


@dataclass(frozen=True)
class Recipe:
    """What is done to the data, before the noise is known. `dpfy.dpsgd` and its like make one.

    A unit of several records is sampled as one and its contribution is bounded as one
    (:func:`dpfy.by_user`, :func:`dpfy.per_user`). Training refuses data that is not arranged so.

    Args:
        records: The public number of units in the data set; of records, if `draw` is "record".
        sampler: How batches are drawn.
        steps: The number of steps.
        clip: How the contribution of a unit is bounded.
        strategy: How the noise of different steps is correlated.
        unit: What is protected.
        adjacency: Which change of the data set is hidden.
        noise: "float", or "exact" for noise whose law is exact to the last bit
            (:mod:`dpfy.noise.exact`), for the strategies that it knows.
        stopping: Where a run may end early. It is charged for what it released.
        draw: "unit", or "record" to sample and clip single records. The charge is then that of
            `unit.most_records` records together (ELS: Charles et al. 2024; Chua et al. 2024).

    Raises:
        InvalidInput: A value does not fit its rule.

    Example:
        >>> import dpfy
        >>> recipe = dpfy.dpsgd(records=1000, batch_size=50, steps=100)
        >>> recipe.expected_batch
        50.0
        >>> recipe.calibrate(epsilon=3.0, delta=1e-5).noise_multiplier > 0.5
        True
    """

    records: int
    sampler: Sampler
    steps: int
    clip: Clip
    strategy: Strategy = Identity()  # noqa: RUF009  (frozen and stateless)
    unit: Unit = EXAMPLE
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE
    noise: str = FLOAT
    stopping: Stopping | None = None
    draw: str = UNIT

    LATER: ClassVar[tuple[str, ...]] = ("noise", "stopping", "draw")

    def __post_init__(self) -> None:
        check.integer("records", self.records, most=check.RECORDS)
        check.integer("steps", self.steps, most=check.STEPS)
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        pairs.find(self.sampler.participation, self.strategy)
        self._check_fixed_size()
        if check.one_of("noise", self.noise, NOISES) == EXACT:
            schedule.require(self.strategy)
        if isinstance(self.strategy, Schedule) and self.strategy.steps != self.steps:
            raise InvalidInput(
                "steps",
                self.steps,
                f"must be the steps of the noise schedule ({self.strategy.steps})",
            )
        if isinstance(self.clip, MicrobatchClip):
            way_out = (
                "one record more would move all groups: use FlatClip, or clip fixed groups at "
                "level 3"
            )
            raise Unsupported("clipping microbatches of a random batch", way_out)
        if isinstance(self.clip, QuantileClip) and not isinstance(
            self.strategy, Identity | Schedule
        ):
            raise Unsupported(
                "adaptive clipping with correlated noise",
                "use a fixed clip norm, or independent noise",
            )
        if self.stopping is not None and self.stopping.points[-1] != self.steps:
            raise InvalidInput(
                "stopping",
                self.stopping.points,
                f"must end with the steps of the run ({self.steps})",
            )
        if self.stopping is not None:
            self.event(1.0, self.stopping.points[0])
        check_content(self.unit, self.adjacency)
        if self.unit.protects == "content" and self.draw != RECORD:
            raise InvalidInput(
                "draw", self.draw, "must be record where a record has several owners"
            )
        if check.one_of("draw", self.draw, DRAWS) == RECORD:
            self._check_single()

    def _check_single(self) -> None:
        """Records drawn one by one: what is known of several together is about adding them, and
        about a fixed clip norm.
        """
        if self.adjacency is Adjacency.REPLACE_ONE:
            raise Unsupported(
                "records of a unit drawn one by one under replace-one",
                "state add-or-remove-one, or draw whole units",
            )
        self.check_group(2)
        if isinstance(self.clip, QuantileClip):
            raise Unsupported(
                "adaptive clipping of records of a unit drawn one by one",
                "use a fixed clip norm, or draw whole units",
            )
        self.event(1.0)

    def _check_fixed_size(self) -> None:
        """Batches of a fixed size are a matter of how many records there are: adding or removing
        one has no proof.

        Nor has it where units come by themselves: who else comes may depend on it.
        """
        if isinstance(self.sampler, CheckInSampler) and self.adjacency is not Adjacency.ZERO_OUT:
            raise Unsupported(
                f"units that check in by themselves under {self.adjacency.value}", "state zero-out"
            )
        if not isinstance(pattern := self.sampler.participation, WithoutReplacement):
            return
        if pattern.records != self.records:
            raise InvalidInput(
                "records", self.records, f"must be those of the sampler ({pattern.records})"
            )
        if self.adjacency is not Adjacency.REPLACE_ONE:
            raise Unsupported(
                f"batches of a fixed size under {self.adjacency.value}",
                "state replace-one, which their accounting is for, or draw Poisson batches",
            )

    def check_group(self, size: int) -> None:
        """Members of a group may lie in different blocks of a cycle, where correlated noise hides
        each alone and nobody has a proof.
        """
        if size > 1 and isinstance(self.sampler.participation, CyclicPoisson):
            raise Unsupported(
                "several records or units together, drawn in cycles,",
                "draw Poisson batches or a fixed order",
            )

    @cached_property
    def expected_batch(self) -> float:
        """The divisor of every noisy sum: the mean batch size, never the realised one."""
        return self.sampler.expected_batch(self.records)

    def event(self, noise_multiplier: float, ended: int | None = None) -> events.Event:
        """What a run with this noise releases; where it may end early, if it `ended` at that
        point.
        """
        pattern = self.sampler.participation
        if self.stopping is None:
            return self.of_unit(pairs.event(noise_multiplier, pattern, self.strategy, self.steps))
        made = self.steps if ended is None else ended
        released = first_steps(noise_multiplier, pattern, self.strategy, made, self.steps)
        return events.Stopped(self.of_unit(released), self.stopping.share)

    def of_unit(self, released: events.Event) -> events.Event:
        """What is released about what is drawn, as a whole unit sees it."""
        return of_group(released, self.unit.most_records) if self.draw == RECORD else released

    def calibrate(
        self,
        epsilon: float,
        delta: float,
        *,
        accountant: str = accounting.DEFAULT,
        allow_large_delta: bool = False,
        beside: events.Event = events.Nothing(),  # noqa: B008  (frozen)
        group: int = 1,
    ) -> Plan:
        """The plan with the least noise that satisfies (epsilon, delta), with `beside` paid for
        from the same guarantee.

        With `group` it satisfies them for any so many units together; the plan itself speaks of one
        unit, which has less epsilon.

        Guarantees: the epsilon of the plan and `beside` together at `delta`, by the same
        accountant, is at most `epsilon`, for every group of `group` units; the search rounds the
        noise up.
        """
        check.epsilon("epsilon", epsilon)
        self.check_delta(delta, allow_large_delta)
        self.check_unit()
        self.check_group(group)

        def whole(noise: float) -> events.Event:
            both = (
                self.event(noise)
                if isinstance(beside, events.Nothing)
                else events.Composed((self.event(noise), beside))
            )
            return of_group(both, group)

        noise = calibration.noise(
            whole, epsilon, delta, adjacency=self.adjacency, accountant=accountant
        )
        return Plan(self, noise, delta, accountant)

    def with_noise(
        self,
        noise_multiplier: float,
        *,
        delta: float | None = None,
        accountant: str = accounting.DEFAULT,
        allow_large_delta: bool = False,
    ) -> Plan:
        """The plan with this noise multiplier. Noise 0 trains without privacy and says so. Default
        delta: see `default_delta`.
        """
        chosen = default_delta(self.records) if delta is None else delta
        self.check_delta(chosen, allow_large_delta)
        self.check_unit()
        return Plan(
            self, check.noise_multiplier("noise_multiplier", noise_multiplier), chosen, accountant
        )

    def check_unit(self) -> None:
        """Clipping bounds all that a unit adds to a gradient: such a plan protects records, and
        must not be called anything else.
        """
        if not self.unit.whole or self.unit.name.strip().lower().rstrip("s") in (
            "label",
            "prediction",
        ):
            said = self.unit.name if self.unit.whole else self.unit.protects
            way_out = (
                "call the unit an example: its label is protected with it, at the same price; for "
                "labels alone: dpfy.labels.fit"
            )
            raise Unsupported(f"a plan of noisy gradients that protects a {said} alone", way_out)

    def check_delta(self, delta: float, allow_large: bool = False) -> None:
        """delta must lie in (0, 1) and below 1/records, unless the caller takes the
        responsibility.
        """
        check.delta("delta", delta)
        if delta >= 1 / self.records and not allow_large:
            rule = (
                f"must be below 1/records = {1 / self.records:.3g}: at that size it allows "
                f"publishing a random record in full"
            )
            raise InvalidInput("delta", delta, rule + " (allow_large_delta overrides)")


@dataclass(frozen=True)
class Plan:
    """A recipe with its noise fixed. Event, scale and guarantee are derived from it, never given.

    Args:
        recipe: What is done to the data.
        noise_multiplier: The standard deviation of the noise over the clipping norm.
        delta: The delta of the guarantee.
        accountant: Which accountant computes it.

    Raises:
        InvalidInput: A value does not fit its rule.

    Guarantees: `event` describes what a run of this plan does, because sampler, clip, strategy and
    steps of the run are read from the same fields.

    Example:
        >>> import dpfy
        >>> plan = dpfy.dpsgd(records=1000, batch_size=50, steps=100).calibrate(3.0, 1e-5)
        >>> plan.epsilon <= 3.0
        True
    """

    recipe: Recipe
    noise_multiplier: float
    delta: float
    accountant: str = accounting.DEFAULT

    def __post_init__(self) -> None:
        check.noise_multiplier("noise_multiplier", self.noise_multiplier)
        check.delta("delta", self.delta)
        accounting.accountant(self.accountant)
        # names alone are checked where plans are made: those of the first version are still read
        if not self.recipe.unit.whole:
            self.recipe.check_unit()
        if math.isinf(self.recipe.clip.bound.l2) and self.noise_multiplier > 0:
            raise InvalidInput(
                "clip_norm",
                math.inf,
                "must be finite when there is noise: noise cannot protect an unbounded sum",
            )

    def __str__(self) -> str:
        recipe = self.recipe
        who = f"one {recipe.unit.name}, {recipe.adjacency.value}, {self.accountant} accountant"
        cost = (
            f"epsilon {decimal_up(self.epsilon)} at delta {self.delta:g}"
            if math.isfinite(self.epsilon)
            else "no guarantee"
        )
        drawn = "record" if recipe.draw == RECORD or recipe.unit == EXAMPLE else recipe.unit.name
        ends = "" if recipe.stopping is None else ", which may end earlier"
        return (
            f"{recipe.steps:,} steps on {recipe.records:,} {drawn}s, "
            f"{recipe.expected_batch:g} in a batch "
            f"({recipe.steps * recipe.expected_batch / recipe.records:.4g} epochs{ends}), "
            f"clip norm {recipe.clip.bound.l2:g}, noise multiplier {self.noise_multiplier:.4g}: "
            f"{cost} ({who})"
        )

    def _repr_html_(self) -> str:
        recipe = self.recipe
        finite = math.isfinite(self.epsilon)
        return html_table(
            "Plan",
            [
                ("epsilon", decimal_up(self.epsilon) if finite else "no guarantee"),
                ("delta", f"{self.delta:g}"),
                ("noise multiplier", f"{self.noise_multiplier:.4g}"),
                ("clipping norm", f"{recipe.clip.bound.l2:g}"),
                ("steps", f"{recipe.steps:,}"),
                ("expected batch", f"{recipe.expected_batch:g} of {recipe.records:,}"),
                ("unit", f"one {recipe.unit.name} ({recipe.adjacency.value})"),
                ("accountant", self.accountant),
            ],
        )

    @property
    def event(self) -> events.Event:
        """What the whole run releases."""
        return self.recipe.event(self.noise_multiplier)

    @property
    def scale(self) -> float:
        """Standard deviation of the strategy's input noise, in units of the clip's bound."""
        return self.noise_multiplier * self.recipe.strategy.sensitivity(
            self.recipe.sampler.participation, self.recipe.steps
        )

    @property
    def stddev(self) -> float:
        """Standard deviation of the strategy's input noise on the summed gradient."""
        return self.scale * self.recipe.clip.bound.l2 if self.scale else 0.0

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole run at `delta`."""
        return self.guarantee().epsilon(self.delta)

    def guarantee(self, accountant: str | None = None, caveats: tuple[str, ...] = ()) -> Guarantee:
        """The guarantee of the whole run."""
        recipe = self.recipe
        return accounting.guarantee(
            self.event,
            adjacency=recipe.adjacency,
            unit=recipe.unit,
            accountant=accountant or self.accountant,
            caveats=caveats,
        )

    def epsilon_after(self, steps: int) -> float:
        """Epsilon at `delta` if the run stopped after `steps` (fixed in advance, or one that may
        end early): for bars and curves.
        """
        if steps <= 0:
            return 0.0
        recipe, made = self.recipe, min(steps, self.recipe.steps)
        if recipe.stopping is not None:
            event = recipe.event(self.noise_multiplier, recipe.stopping.next(made))
        else:
            event = recipe.of_unit(
                pairs.event(
                    self.noise_multiplier, recipe.sampler.participation, recipe.strategy, made
                )
            )
        return _epsilon(event, self.delta, recipe.adjacency, self.accountant)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON; `Plan.from_json` gives an equal plan."""
        encoded: dict[str, Any] = CODEC.encode(self)
        return encoded

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """The plan written by `to_json`. Unknown kinds and fields are errors; nothing is imported
        by name.
        """
        plan = CODEC.decode(data)
        if not isinstance(plan, Plan):
            raise InvalidInput("plan.kind", data.get("kind"), "must be a plan")
        return plan

    def fingerprint(self) -> str:
        """SHA-256 of the JSON form."""
        return digest(self.to_json())


@lru_cache(maxsize=256)
def _epsilon(event: events.Event, delta: float, adjacency: Adjacency, accountant: str) -> float:
    """Accountants are stateless: an answer is kept."""
    return accounting.epsilon(event, delta, adjacency=adjacency, accountant=accountant)


CODEC = Codec(
    "plan",
    {
        "plan": Plan,
        "recipe": Recipe,
        "unit": Unit,
        "stopping": Stopping,
        **SAMPLERS,
        **CLIPS,
        **STRATEGIES,
    },
)


SAMPLINGS = ("poisson", "without-replacement", "random-allocation")
"""How DP-SGD draws its batches."""
ROUNDING = 1e-12
"""Three epochs of 10 steps are 30 steps, whatever the rounding of their product says."""


def sampling_rate(records: int, batch_size: float) -> float:
    """The share of the records in a mean batch; a batch that is larger than the data, or hardly
    ever holds a record, is refused.
    """
    check.integer("records", records, most=check.RECORDS)
    if check.positive("batch_size", batch_size) > records:
        raise InvalidInput(
            "batch_size", batch_size, f"must be at most the number of records ({records})"
        )
    if batch_size / records < check.RATE:
        raise InvalidInput(
            "batch_size",
            batch_size,
            f"must be at least {check.RATE:g} of the number of records ({records})",
        )
    return batch_size / records


def step_count(
    records: int,
    batch_size: float,
    epochs: float | None,
    steps: int | None,
    *,
    most: int = check.STEPS,
) -> int:
    """The steps of a run that is given in epochs or in steps, whatever its mechanism.

    `epochs` are expected passes over the data with batches of `batch_size`, rounded up to a whole
    step.
    """
    rate = sampling_rate(records, batch_size)
    if (epochs is None) == (steps is None):
        raise InvalidInput("epochs", epochs, "give exactly one of epochs and steps")
    if steps is not None:
        return check.integer("steps", steps, most=most)
    count = check.positive("epochs", epochs) / rate
    if count > most:
        raise InvalidInput("epochs", epochs, f"asks for {count:.3g} steps; at most {most}")
    return max(1, math.ceil(count * (1 - ROUNDING)))


def steps_per_epoch(records: int, batch_size: float) -> int:
    """Batches in an epoch that meets every record once, of `batch_size` or a little less.

    Guarantees: in `step_count` steps of a whole number of epochs no record takes part more often
    than there are epochs.
    """
    return max(1, math.ceil(records / batch_size * (1 - ROUNDING)))


def dpsgd(
    records: int,
    batch_size: float,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: str = "poisson",
    clip_norm: float = 1.0,
    unit: Unit = EXAMPLE,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE,
    noise: str = FLOAT,
    stopping: int | Sequence[float] | None = None,
    draw: str = UNIT,
) -> Recipe:
    """DP-SGD: random batches, flat clipping, fresh Gaussian noise.

    It works with every optimizer: DP-Adam is this recipe with Adam.

    Args:
        records: The public number of units in the data set.
        batch_size: The expected number of records of a batch.
        epochs, steps: How long to train; give one of them. `epochs` counts expected passes.
        sampling: "poisson" batches have `batch_size` records on average. "without-replacement"
            ones have exactly that many, and hide that a record is replaced (replace-one).
            "random-allocation" puts every record into exactly one batch of each epoch, drawn again
            for each epoch; it needs less noise than "poisson".
        clip_norm: The bound on the norm of what a unit contributes to a step.
        unit: What is protected.
        adjacency: Which change of the data set is hidden.
        noise: "exact" gives every released value the bits that real numbers would give it.
        stopping: A number of points, or a list of them, at which a run may end early. It is
            charged for what it released (:func:`with_stopping`).
        draw: "record" draws and clips records one by one, and charges as many together as a unit
            owns.

    Returns:
        The recipe. `calibrate(epsilon, delta)` or `with_noise(...)` makes a plan of it.

    Raises:
        InvalidInput: A value does not fit its rule, or both `epochs` and `steps` are given.

    Example:
        >>> import dpfy
        >>> recipe = dpfy.dpsgd(records=60_000, batch_size=600, epochs=10)
        >>> recipe.steps
        1000
    """
    count = step_count(records, batch_size, epochs, steps)
    sampler = sampler_of(sampling, records, batch_size, count)
    recipe = Recipe(
        records,
        sampler,
        count,
        FlatClip(clip_norm),
        Identity(),
        unit,
        Adjacency.parse(adjacency),
        noise,
        draw=draw,
    )
    return with_stopping(recipe, stopping)


def with_stopping(recipe: Recipe, points: int | Sequence[float] | None) -> Recipe:
    """The same recipe for runs that may end early, at so many equally spaced points, or at those
    given (steps, or parts below 1).

    Guarantees: whatever rule ends a run, looking at what was released alone, the epsilon given
    then is an ex-post guarantee at delta.
    """
    return replace(recipe, stopping=stopping(points, recipe.steps))


def sampler_of(sampling: str, records: int, batch_size: float, steps: int) -> Sampler:
    """The sampler with a name of `SAMPLINGS`, for a run of so many steps."""
    from dpfy.sampling.samplers import (
        PoissonSampler,
        RandomAllocationSampler,
        WithoutReplacementSampler,
    )

    if check.one_of("sampling", sampling, SAMPLINGS) == "poisson":
        return PoissonSampler(batch_size / records)
    if sampling == "random-allocation":
        epoch = steps_per_epoch(records, batch_size)
        return RandomAllocationSampler(epoch, -(-steps // epoch))
    if batch_size != int(batch_size):
        raise InvalidInput(
            "batch_size",
            batch_size,
            "must be a whole number: every batch has exactly that many records",
        )
    return WithoutReplacementSampler(int(batch_size), records)
