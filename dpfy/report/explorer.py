"""The figures of the explorer: what a run would cost, before any data is touched. Pure functions of
the wishes, quick enough to be live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dpfy import accounting
from dpfy.accounting import calibrate, planning, user_level
from dpfy.core import check, events
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.events import poisson
from dpfy.core.guarantee import Tradeoff
from dpfy.core.unit import Adjacency, Unit
from dpfy.plan.recipe import step_count
from dpfy.report import charts, figures
from dpfy.report.charts import Axis, Series
from dpfy.report.html_page import figure
from dpfy.report.words import up

ADD = Adjacency.ADD_OR_REMOVE_ONE
MOST_STEPS = 10_000_000
CORRELATED_STEPS = 20_000
"""Beyond this many steps correlated strategies are not worked out here."""
DOTS = 7
EMBEDDED = 4_000
"""Records that `dpfy train` trains on when it is given no data."""


@dataclass(frozen=True)
class Wish:
    """What a person moves the sliders to. A user owns at most `owns` examples; an example is a user
    who owns one.
    """

    records: int
    batch: float
    epochs: float
    epsilon: float
    delta: float
    owns: int = 1

    def __post_init__(self) -> None:
        check.integer("records", self.records, most=check.RECORDS)
        if check.positive("batch", self.batch) > self.records:
            raise InvalidInput(
                "batch", self.batch, f"must be at most the number of records ({self.records})"
            )
        if self.rate < check.RATE:
            raise InvalidInput(
                "batch",
                self.batch,
                f"must be at least {check.RATE:g} of the number of records ({self.records})",
            )
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta", self.delta)
        if check.integer("owns", self.owns) > 64:
            raise InvalidInput("owns", self.owns, "must be at most 64 here")
        if check.positive("epochs", self.epochs) / self.rate > MOST_STEPS:
            raise InvalidInput(
                "epochs",
                self.epochs,
                f"asks for {self.epochs / self.rate:.3g} steps; at most {MOST_STEPS} here",
            )

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Wish:
        """From the fields of an address; an unknown, missing or malformed one is an error that
        names it.
        """
        kinds: dict[str, Callable[[str], Any]] = {
            "records": int, "batch": float, "epochs": float, "epsilon": float, "delta": float, "owns": int,
        }  # fmt: skip
        check.known_keys("", fields, set(kinds))
        read = {}
        for name, kind in kinds.items():
            try:
                read[name] = kind(fields[name])
            except KeyError:
                raise InvalidInput(name, None, "is missing") from None
            except ValueError:
                raise InvalidInput(name, fields[name], "must be a number") from None
        return cls(**read)

    @property
    def rate(self) -> float:
        """The sampling rate."""
        return self.batch / self.records

    @property
    def steps(self) -> int:
        """As every recipe counts them."""
        return step_count(self.records, self.batch, self.epochs, None)

    @property
    def unit(self) -> Unit:
        """Whose data is protected."""
        return Unit() if self.owns == 1 else Unit("user", self.owns)

    def event(self, noise: float) -> events.Event:
        """What the run would release, as seen by one unit."""
        return user_level.of_group(poisson(noise, self.rate, self.steps), self.owns)


START = Wish(60_000, 4096.0, 40.0, 3.0, 1e-5)
"""Where the page begins."""


def guess(wish: Wish) -> float:
    """The noise by the central limit theorem: where to begin the search, never an answer."""
    mu = figures.gaussian_equal(wish.epsilon, wish.delta)
    reach = (wish.owns * wish.rate) ** 2 * wish.steps
    return 1 / math.sqrt(math.log1p(mu * mu / reach))


@dataclass
class _Memory:
    """What the last answer taught: the next slider position is close to it."""

    ratio: float = 1.0
    slope: float = -1.2


_memory = _Memory()


@lru_cache(maxsize=256)
def solve(wish: Wish) -> tuple[float, float]:
    """The least noise multiplier for the wish, and the epsilon that it reaches.

    Guarantees: as `dpfy plan calibrate`, by the same accountant and to the same tolerance, from another
    starting point.
    """
    tried: dict[float, float] = {}

    def reached(multiplier: float) -> float:
        if multiplier not in tried:
            tried[multiplier] = accounting.epsilon(
                wish.event(multiplier), wish.delta, adjacency=ADD
            )
        return tried[multiplier]

    first = guess(wish)
    found = _quick(reached, wish.epsilon, first * _memory.ratio) or calibrate.least(
        reached, wish.epsilon, start=first * _memory.ratio
    )
    _memory.ratio = min(3.0, max(0.9, found / first))
    return found, tried[found]


def _quick(reached: Callable[[float], float], target: float, start: float) -> float | None:
    """A few secant steps in logarithms, started with the last slope; None where they do not end just
    below the target.
    """
    x, slope = math.log(start), _memory.slope
    before: tuple[float, float] | None = None
    for _ in range(5):
        value = reached(math.exp(x))
        if not 0 < value < math.inf:
            return None
        gap = math.log(value / target)
        if before is not None and x != before[0] and gap != before[1]:
            slope = min(-0.2, max(-20.0, (gap - before[1]) / (x - before[0])))
        if -calibrate.TOLERANCE <= gap <= 0:
            _memory.slope = slope
            return math.exp(x)
        before = (x, gap)
        x -= min(0.7, max(-0.7, (gap + calibrate.TOLERANCE / 2) / slope))
    return None


def noise(wish: Wish) -> float:
    """The least noise multiplier for the wish."""
    return solve(wish)[0]


def answer(wish: Wish) -> dict[str, Any]:
    """Noise, tier, command line: what must be there at once."""
    found, epsilon = solve(wish)
    tier = figures.tier(epsilon, wish.unit, ADD)
    knee = planning.knee(wish.records, wish.steps, wish.epsilon)
    return {
        "noise_multiplier": found,
        "epsilon": epsilon,
        "steps": wish.steps,
        "sampling_rate": wish.rate,
        "noise_on_average": found / wish.batch,
        "knee": min(knee, wish.records),
        "tier": tier,
        "text": {
            "noise": f"{found:.4g}",
            "reached": up(epsilon, 4),
            "steps": figure(wish.steps),
            "rate": figure(wish.rate),
            "average": figure(found / wish.batch),
            "tier": f"Tier {tier['tier']}: {tier['name']}",
            "why": tier["why"],
            "knee": figure(round(min(knee, wish.records))),
        },
        "warnings": warnings(wish, epsilon),
        "commands": commands(wish),
        "batches": batch_picture(wish, found, []),
    }


def warnings(wish: Wish, epsilon: float) -> list[str]:
    """What speaks against the plan."""
    found = []
    if wish.delta * wish.records >= 1:
        found.append(
            f"Delta must be below 1/records = {1 / wish.records:.3g}: at this size a random record "
            f"may be published in full."
        )
    if epsilon > 10:
        found.append("Epsilon above 10 is no evidence of anonymity by itself.")
    if wish.owns > 1:
        found.append(
            f"Training bounds each record: this noise protects a user if none owns more than "
            f"{wish.owns}; the report speaks of one."
        )
    return found


def commands(wish: Wish) -> list[str]:
    """The command lines that do what the page shows: on the embedded images where it is that many
    records, else on the user's own.
    """
    embedded = wish.records == EMBEDDED
    train = (
        f"dpfy train {'' if embedded else 'data.job.toml '}--records {wish.records} --batch-size "
        f"{wish.batch:.12g} "
        f"--epochs {wish.epochs:.12g} --epsilon {wish.epsilon:.12g} --delta {wish.delta:.12g}"
        f"{'' if embedded else '   # dpfy init data.csv makes data.job.toml'}"
    )
    check_it = (
        f"dpfy plan calibrate --epsilon {wish.epsilon:.12g} --delta {wish.delta:.12g} --sampling-rate "
        f"{wish.rate!r} --steps {wish.steps}"
    )
    return (
        [train, check_it]
        if wish.owns == 1
        else [check_it + "   # for one example; the page protects a user"]
    )


def attacker(wish: Wish) -> dict[str, Any]:
    """What an attacker could do with everything such a run releases: sentences and picture."""
    pairs = figures.points(
        figures.Bill(wish.event(noise(wish)), ADD, accounting.DEFAULT, wish.delta)
    )
    rates = [k / 100 for k in range(101)]
    reached = [(0.0, 0.0), *zip(rates, Tradeoff(pairs).hit_rates(rates), strict=True)]
    series = [Series(reached, "area"), Series([(0, 0), (1, 1)], "line", "quiet"), Series(reached)]
    across, upward = (
        Axis("wrongly accused (false positives)", 0, 1, True),
        Axis("recognised (true positives)", 0, 1, True),
    )
    picture = charts.chart("The most that any attacker can reach", series, across, upward)
    return {"sentences": figures.attacker(pairs, wish.unit)["sentences"], "picture": picture}


def batches(wish: Wish) -> dict[str, Any]:
    """The batch-size curve with exact points on it."""
    low, high = math.log10(max(1.0, wish.records / 3000)), math.log10(wish.records)
    exact = []
    for k in range(DOTS):
        size = min(float(round(10 ** (low + (high - low) * k / (DOTS - 1)))), float(wish.records))
        other = Wish(
            wish.records,
            size,
            wish.steps * size / wish.records,
            wish.epsilon,
            wish.delta,
            wish.owns,
        )
        exact.append((size, noise(other) / size))
    return {"picture": batch_picture(wish, noise(wish), exact), "points": exact}


def batch_picture(wish: Wish, found: float, exact: list[tuple[float, float]]) -> str:
    """Noise on the average gradient over the batch size, both as powers of ten, steps and epsilon
    fixed; the knee is where it levels.
    """
    low, high = math.log10(max(1.0, wish.records / 3000)), math.log10(wish.records)
    line = []
    for k in range(61):
        size = min(10 ** (low + (high - low) * k / 60), float(wish.records))
        rough = guess(
            Wish(
                wish.records,
                size,
                wish.steps * size / wish.records,
                wish.epsilon,
                wish.delta,
                wish.owns,
            )
        )
        line.append((math.log10(size), math.log10(rough / size)))
    here = (math.log10(wish.batch), math.log10(found / wish.batch))
    dots = [(math.log10(size), math.log10(value)) for size, value in exact]
    values = [v for _, v in [*line, *dots, here]]
    floor, top = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2
    knee = math.log10(min(planning.knee(wish.records, wish.steps, wish.epsilon), wish.records))
    series = [Series(line, "line", "quiet"), Series(dots, "dots", "a"), Series([here], "dots", "b")]
    if low < knee < high:
        series.insert(0, Series([(knee, floor), (knee, top)], "line", "b"))
    title = "Noise on the average gradient against batch size, at fixed epsilon and steps"
    across, upward = (
        Axis("batch size", low, high, power=True),
        Axis("noise on the average", floor, top, power=True),
    )
    return charts.chart(title, series, across, upward)


def mechanisms(wish: Wish, *, optimised: bool) -> dict[str, Any]:
    """Mechanisms side by side at the same guarantee for one example: the error they leave in the
    sum of all updates.

    With `optimised`, also those whose strategy must be computed first (seconds).
    """
    from dpfy.plan import auto

    if wish.owns > 1:
        return {"rows": [], "note": "shown for one example; choose that unit"}
    setting = auto.RunSetting(wish.records, wish.batch, wish.steps)
    target = auto.CalibrationTarget(wish.epsilon, wish.delta, allow_large_delta=True)
    rows = [_row(auto.measure("DP-SGD", "Poisson sampling", setting_plan(wish)))]
    long = wish.steps > CORRELATED_STEPS
    names = () if long else (("sqrt", "square root"), ("tree", "tree (DP-FTRL)"))
    if optimised and not long:
        names = (("blt", "BLT, 3 buffers"), *names)
    failed = []
    for name, words in names:
        try:
            rows.append(
                _row(
                    auto.measure(words, "fixed order", target.plan(auto.recipe_for(name, setting)))
                )
            )
        except DpfyError as problem:
            failed.append(f"{words}: {problem}")
    note = (
        f"more than {CORRELATED_STEPS} steps: correlated noise is not worked out here"
        if long
        else "; ".join(failed)
    )
    return {"rows": sorted(rows, key=lambda row: row["error"]), "note": note}


def setting_plan(wish: Wish) -> Any:
    """The DP-SGD plan of the wish, with the noise already found."""
    from dpfy.plan.recipe import dpsgd

    recipe = dpsgd(wish.records, wish.batch, steps=wish.steps)
    return recipe.with_noise(noise(wish), delta=wish.delta, allow_large_delta=True)


def _row(candidate: Any) -> dict[str, Any]:
    return {
        "mechanism": candidate.mechanism,
        "sampling": candidate.sampling,
        "noise": figure(candidate.plan.noise_multiplier),
        "error": candidate.rmse,
        "error_text": figure(candidate.rmse),
        "buffers": candidate.buffers,
    }
