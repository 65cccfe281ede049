"""Choosing a mechanism: every proven pair for a data pattern, calibrated to the same guarantee, the
one with the least error first.

The figure of merit is the root mean squared error of the prefix sums of the *mean* clipped gradient
at clip norm one: what the noise does to the path of plain gradient descent. It is computed from the
recipe alone; no data is looked at, so choosing costs no privacy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dpfy import accounting
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.guarantee import html_table
from dpfy.core.unit import Adjacency, FixedOrder
from dpfy.gradients.clip import FlatClip
from dpfy.noise.strategy import Identity, Strategy
from dpfy.noise.toeplitz import Banded, SquareRoot
from dpfy.plan.correlated import MOST_STEPS, bandmf, blt, dpftrl, fixed_order, with_strategy
from dpfy.plan.recipe import Plan, Recipe, dpsgd, sampling_rate, step_count, steps_per_epoch

SAMPLINGS = ("any", "poisson", "fixed-order")
MECHANISMS = ("dp-sgd", "band-mf", "blt", "tree", "sqrt", "dense", "auto")
DENSE_STEPS = 512
"""The longest run for which a dense optimum is worth its minutes."""
FULL_BANDS = 2048
FEW_WIDTHS = 4
"""As many numbers of bands are compared by the target's accountant alone."""
ALLOCATED = ("tight", "rdp")
"""Accountants that know random allocation."""
COMPARED_STEPS = 20_000
"""The longest run for which mechanisms are compared."""


@dataclass(frozen=True)
class MechanismCandidate:
    """One mechanism, calibrated, with its errors."""

    mechanism: str
    sampling: str
    plan: Plan
    rmse: float
    max_error: float
    buffers: int

    def to_json(self) -> dict[str, Any]:
        """One row of the comparison. `noise_std` is that of the strategy's input noise at clip norm
        one.
        """
        recipe = self.plan.recipe
        sensitivity = recipe.strategy.sensitivity(recipe.sampler.participation, recipe.steps)
        return {
            "mechanism": self.mechanism,
            "sampling": self.sampling,
            "noise_multiplier": self.plan.noise_multiplier,
            "noise_std": self.plan.noise_multiplier * sensitivity,
            "sensitivity": sensitivity,
            "rmse": self.rmse,
            "max_error": self.max_error,
            "buffers": self.buffers,
        }


@dataclass(frozen=True)
class MechanismChoice:
    """The plan chosen, all candidates (best first), and the reason in words."""

    plan: Plan
    candidates: tuple[MechanismCandidate, ...]
    reason: str

    def _rows(self) -> list[tuple[str, ...]]:
        """The head, and a row for each candidate, best first."""
        return [
            ("mechanism", "sampling", "error (rmse)", "noise multiplier"),
            *(
                (c.mechanism, c.sampling, f"{c.rmse:.4g}", f"{c.plan.noise_multiplier:.4g}")
                for c in self.candidates
            ),
        ]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join([*table, self.reason, str(self.plan)])

    def _repr_html_(self) -> str:
        return html_table(self.reason, self._rows()) + self.plan._repr_html_()


@dataclass(frozen=True)
class CalibrationTarget:
    """What every candidate is calibrated to."""

    epsilon: float
    delta: float
    accountant: str = accounting.DEFAULT
    allow_large_delta: bool = False

    def plan(self, recipe: Recipe) -> Plan:
        """The least noise for this recipe."""
        return recipe.calibrate(
            self.epsilon,
            self.delta,
            accountant=self.accountant,
            allow_large_delta=self.allow_large_delta,
        )


def auto(
    records: int,
    batch_size: float,
    *,
    epsilon: float,
    delta: float,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: str = "any",
    clip_norm: float = 1.0,
) -> MechanismChoice:
    """The mechanism with the least error for this data pattern at (epsilon, delta).

    The errors of the candidates do not depend on data, so the choice is free.

    Args:
        records: The public number of records.
        batch_size: The expected number of records of a batch.
        epsilon, delta: The guarantee of every candidate.
        epochs, steps: How long to train; give one of them.
        sampling: "poisson" if records can be sampled at random, "fixed-order" if they come in an
            order that cannot be changed, "any" if both can be done.
        clip_norm: The clipping norm.

    Returns:
        The plan of the best, all candidates, and the reason in words.

    Raises:
        InvalidInput: A value does not fit its rule.

    Example:
        >>> import dpfy
        >>> choice = dpfy.auto(1000, 100, epsilon=3.0, delta=1e-5, steps=10)
        >>> choice.candidates[0].rmse <= choice.candidates[-1].rmse
        True
    """
    count = step_count(records, batch_size, epochs, steps, most=MOST_STEPS)
    found = compare(
        records,
        batch_size,
        count,
        CalibrationTarget(epsilon, delta),
        sampling=check.one_of("sampling", sampling, SAMPLINGS),
    )
    best = found[0]
    recipe = replace(best.plan.recipe, clip=FlatClip(clip_norm))
    return MechanismChoice(replace(best.plan, recipe=recipe), found, _reason(found, sampling))


def compare(
    records: int,
    batch_size: float,
    steps: int,
    target: CalibrationTarget,
    *,
    sampling: str = "any",
    dense: bool | None = None,
) -> tuple[MechanismCandidate, ...]:
    """All mechanisms for this data pattern at one guarantee, least error first."""
    sampling_rate(records, batch_size)
    check.integer("steps", steps, most=COMPARED_STEPS)
    with_dense = steps <= DENSE_STEPS if dense is None else dense
    rows: list[MechanismCandidate] = []
    if sampling != "fixed-order":
        rows += amplified(records, batch_size, steps, target)
    if sampling != "poisson":
        rows += [
            measure(name, "fixed-order", target.plan(recipe))
            for name, recipe in unsampled(records, batch_size, steps, with_dense)
        ]
    return tuple(sorted(rows, key=_rank))


def _rank(row: MechanismCandidate) -> tuple[float, int, str]:
    """Least error first; among errors equal to five digits the fewest buffers."""
    return float(f"{row.rmse:.5g}"), row.buffers, row.mechanism


def measure(mechanism: str, sampling: str, plan: Plan) -> MechanismCandidate:
    """A calibrated plan with its errors on the prefix sums of the mean gradient at clip norm
    one.
    """
    from dpfy.noise.workload import buffers, errors

    recipe = plan.recipe
    found = errors(recipe.strategy, recipe.sampler.participation, recipe.steps)
    scale = plan.noise_multiplier / recipe.expected_batch
    return MechanismCandidate(
        mechanism,
        sampling,
        plan,
        found.rmse * scale,
        found.max_error * scale,
        buffers(recipe.strategy, recipe.steps),
    )


def amplified(
    records: int, batch_size: float, steps: int, target: CalibrationTarget
) -> list[MechanismCandidate]:
    """DP-SGD with Poisson samples and, where its accounting is known, with random allocation; banded
    noise with cyclic Poisson sampling for the best number of bands.
    """
    samplings = ["poisson"]
    if target.accountant in ALLOCATED and steps_per_epoch(records, batch_size) > 1:
        samplings.append("random-allocation")
    rows = [
        measure("dp-sgd", name, target.plan(dpsgd(records, batch_size, steps=steps, sampling=name)))
        for name in samplings
    ]
    if best := best_bands(records, batch_size, steps, target):
        rows.append(best)
    return rows


def best_bands(
    records: int, batch_size: float, steps: int, target: CalibrationTarget
) -> MechanismCandidate | None:
    """The number of bands with the least error: where there are many, by a rough scan (Rényi)
    before the fine one.

    Divisors of the steps cut no round short; powers of two are there for runs whose length has few
    divisors.
    """
    check.integer("steps", steps, most=COMPARED_STEPS)
    divisors = {b for b in range(2, steps + 1) if steps % b == 0}
    powers = {2**k for k in range(1, steps.bit_length()) if 2**k <= steps}
    widths = sorted(b for b in divisors | powers if b * batch_size / records <= 1)
    if not widths:
        return None

    def at(width: int, goal: CalibrationTarget) -> MechanismCandidate:
        return measure(
            "band-mf",
            "cyclic-poisson",
            goal.plan(bandmf(records, batch_size, bands=width, steps=steps)),
        )

    if len(widths) > FEW_WIDTHS:
        rough = replace(target, accountant="rdp")
        widths = [
            width for _, width in sorted((at(width, rough).rmse, width) for width in widths)[:3]
        ]
    return min((at(width, target) for width in widths), key=lambda row: row.rmse)


def unsampled(
    records: int, batch_size: float, steps: int, dense: bool
) -> Iterator[tuple[str, Recipe]]:
    """Recipes that need no random sampling: each record keeps its place in the epoch."""
    from dpfy.noise.optimise import inverse_banded, normalised_banded

    base = Recipe(
        records, fixed_order(records, batch_size, steps), steps, FlatClip(1.0), Banded((1.0,))
    )
    pattern = base.sampler.participation
    width = min(steps_per_epoch(records, batch_size), steps, FULL_BANDS)
    yield "dp-sgd", base
    yield "band-mf", bandmf(records, batch_size, bands=width, steps=steps, sampling="fixed-order")
    if steps <= FULL_BANDS:
        yield "band-mf-normalised", with_strategy(base, normalised_banded(width, steps))
    yield "blt", blt(records, batch_size, steps=steps, buffers=3)
    yield "inverse", with_strategy(base, inverse_banded(16, steps, pattern))
    yield "sqrt", with_strategy(base, SquareRoot())
    yield "tree", dpftrl(records, batch_size, steps=steps)
    if dense:
        yield "dense", with_strategy(base, dense_for(base))


def dense_for(recipe: Recipe) -> Strategy:
    """The optimised dense strategy for the fixed order of a recipe."""
    from dpfy.noise.optimise_dense import dense_for_epochs

    pattern = recipe.sampler.participation
    assert isinstance(pattern, FixedOrder)
    return dense_for_epochs(recipe.steps, pattern)


@dataclass(frozen=True)
class RunSetting:
    """What is fixed before a mechanism is chosen."""

    records: int
    batch_size: float
    steps: int
    clip_norm: float = 1.0
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE_ONE
    sampling: str = "poisson"


def recipe_for(
    mechanism: str,
    setting: RunSetting,
    target: CalibrationTarget | None = None,
    bands: int | None = None,
) -> Recipe:
    """The recipe of a mechanism by name, as `dpfy train --mechanism` takes it.

    "auto" and, without `bands`, "band-mf" choose by the errors at `target`; without a target
    band-mf has one band for each step of an epoch and a fixed order. "blt", "tree", "sqrt" and
    "dense" keep the records in a fixed order.
    """
    records, batch, steps = setting.records, setting.batch_size, setting.steps
    recipe = _by_name(check.one_of("mechanism", mechanism, MECHANISMS), setting, target, bands)
    if recipe is None:
        step_count(
            records, batch, None, steps, most=DENSE_STEPS if mechanism == "dense" else MOST_STEPS
        )
        base = Recipe(
            records, fixed_order(records, batch, steps), steps, FlatClip(1.0), SquareRoot()
        )
        recipe = base if mechanism == "sqrt" else with_strategy(base, dense_for(base))
    return replace(
        recipe, clip=FlatClip(setting.clip_norm), adjacency=Adjacency.parse(setting.adjacency)
    )


def _by_name(
    mechanism: str, setting: RunSetting, target: CalibrationTarget | None, bands: int | None
) -> Recipe | None:
    records, batch, steps = setting.records, setting.batch_size, setting.steps
    if mechanism == "dp-sgd":
        return dpsgd(
            records, batch, steps=steps, sampling=setting.sampling, adjacency=setting.adjacency
        )
    if setting.sampling != "poisson":
        raise InvalidInput("sampling", setting.sampling, "goes with the mechanism dp-sgd")
    if mechanism == "blt":
        return blt(records, batch, steps=steps)
    if mechanism == "tree":
        return dpftrl(records, batch, steps=steps)
    if mechanism == "auto":
        if target is None:
            raise InvalidInput(
                "mechanism", mechanism, "needs epsilon: mechanisms are compared at one guarantee"
            )
        return compare(records, batch, steps, target)[0].plan.recipe
    if mechanism == "band-mf":
        if bands is not None:
            return bandmf(records, batch, bands=bands, steps=steps)
        if target is not None and (best := best_bands(records, batch, steps, target)) is not None:
            return best.plan.recipe
        return bandmf(
            records,
            batch,
            bands=steps_per_epoch(records, batch),
            steps=steps,
            sampling="fixed-order",
        )
    return None


def _reason(found: tuple[MechanismCandidate, ...], sampling: str) -> str:
    best = found[0]
    words = [
        f"{best.mechanism} with {best.sampling} sampling has the least error ({best.rmse:.4g}) of "
        f"{len(found)} proven pairs"
    ]
    rivals = {(row.mechanism, row.sampling): row for row in reversed(found[1:])}
    words += [
        f"{name} with {kind}: {row.rmse / best.rmse:.2f} times"
        for (name, kind), row in reversed(rivals.items())
    ][:3]
    if isinstance(best.plan.recipe.strategy, Identity):
        words.append(
            "independent noise wins because sampling amplifies it more than correlation would save"
        )
    return "; ".join(words)
