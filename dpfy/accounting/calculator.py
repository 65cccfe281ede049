"""The answers that the command line prints, as plain dictionaries: no printing here, no computing
there.

Phases of a plan from a TOML file: noise schedules, tuning plus training, several runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfy.accounting import calibrate as search
from dpfy.accounting import planning, table
from dpfy.accounting.interpretation import AttackTarget
from dpfy.accounting.patterns import ReportPattern, TrainingPattern
from dpfy.accounting.rules import grouped
from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.events import Composed, Event
from dpfy.core.unit import Adjacency


def account(
    plan: Sequence[TrainingPattern | ReportPattern],
    delta: float,
    *,
    accountant: str = table.DEFAULT,
    adjacency: str = "add-or-remove-one",
    meaning: bool = False,
    group_size: int = 1,
) -> dict[str, Any]:
    """Epsilon of a plan at `delta`, with its lower bound where there is one, assumptions and (on
    request) meaning; of `group_size` units together, who all take part or none.

    Guarantees: a finite upper bound, or an error; never NaN and never a silent infinity.
    """
    relation = Adjacency.parse(adjacency)
    check.delta("delta", delta)
    claims = [phase.claim() for phase in plan]
    event = (
        claims[0].event if len(claims) == 1 else Composed(tuple(claim.event for claim in claims))
    )
    if check.integer("group_size", group_size) > 1:
        if relation is Adjacency.REPLACE_ONE:
            way = "ask for add-or-remove-one or zero-out"
            raise Unsupported("groups of units that are replaced", way)
        event = grouped(event, group_size)
    curve = table.accountant(accountant).curve(event, relation)
    epsilon = curve.epsilon(delta)
    if math.isinf(epsilon):
        raise InvalidInput(
            "noise_multiplier", 0, "gives no differential privacy at all: epsilon is infinite"
        )
    answer: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "accountant": accountant,
        "adjacency": relation.value,
    }
    lower = curve.epsilon_lower(delta)
    if lower is not None:
        answer["epsilon_lower"] = lower
    if len(plan) == 1:
        only = plan[0]
        told = {"sampling_rate": only.sampling_rate, "steps": only.steps, "sampling": only.sampling}
        noise = (
            {"local_epsilon": only.epsilon0}
            if isinstance(only, ReportPattern)
            else {"noise_multiplier": only.noise_multiplier}
        )
        answer |= noise | told
    else:
        answer["phases"] = len(plan)
    if group_size > 1:
        answer["group_size"] = group_size
    answer["assumptions"] = list(
        dict.fromkeys(line for claim in claims for line in claim.assumptions)
    )
    if meaning:
        from dpfy.accounting.interpretation import meaning as explain

        answer["meaning"] = explain(curve, delta).sentences()
    return answer


def calibrate(
    plan: TrainingPattern,
    epsilon: float,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
    adjacency: str = "add-or-remove-one",
) -> dict[str, Any]:
    """The least noise for a target, everything else of `plan` fixed. Guarantees: the epsilon
    reported is at most the target.
    """
    relation = Adjacency.parse(adjacency)

    def make(noise: float) -> Event:
        return replace(plan, noise_multiplier=noise).claim().event

    noise = search.noise(make, epsilon, delta, adjacency=relation, accountant=accountant)
    reached = account(
        [replace(plan, noise_multiplier=noise)], delta, accountant=accountant, adjacency=adjacency
    )
    return {"noise_multiplier": noise, "target_epsilon": epsilon} | {
        k: v for k, v in reached.items() if k != "noise_multiplier"
    }


def solve(
    unknown: str,
    plan: TrainingPattern,
    epsilon: float,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
    adjacency: str = "add-or-remove-one",
) -> dict[str, Any]:
    """The most steps, epochs or units in a batch, or the fewest records, within a target."""
    relation = Adjacency.parse(adjacency)
    check.delta("delta", delta)
    found = planning.solve(unknown, plan, epsilon, delta, accountant=accountant, adjacency=relation)
    return {
        unknown.replace("-", "_"): found,
        "target_epsilon": epsilon,
        "delta": delta,
        "noise_multiplier": plan.noise_multiplier,
        "sampling": plan.sampling,
        "accountant": accountant,
        "adjacency": relation.value,
    }


def clip_norm(
    plan: TrainingPattern,
    stddev: float,
    epsilon: float,
    delta: float,
    *,
    accountant: str = table.DEFAULT,
    adjacency: str = "add-or-remove-one",
) -> dict[str, Any]:
    """The largest clip norm for a target with noise of this standard deviation on the sum."""
    answer = calibrate(plan, epsilon, delta, accountant=accountant, adjacency=adjacency)
    norm = check.positive("stddev", stddev) / answer["noise_multiplier"] * (1 - 2**-52)
    return {"clip_norm": norm, "stddev": stddev} | answer


def calibrate_risk(
    plan: TrainingPattern,
    target: AttackTarget,
    delta: float | None = None,
    *,
    accountant: str = table.DEFAULT,
    adjacency: str = "add-or-remove-one",
) -> dict[str, Any]:
    """The least noise at which no attack exceeds a limit, everything else of `plan` fixed; with its
    epsilon where a delta is given. Guarantees: what is told to be reached is at most the limit.
    """
    relation = Adjacency.parse(adjacency)

    def make(noise: float) -> Event:
        return replace(plan, noise_multiplier=noise).claim().event

    noise = search.noise_for_risk(make, target, adjacency=relation, accountant=accountant)
    curve = table.accountant(accountant).curve(make(noise), relation)
    answer: dict[str, Any] = {
        "noise_multiplier": noise,
        "limit": target.success,
        "at_false_positive_rate": target.at,
        "reached": target.reached(curve) + (target.at or 0.0),
        "accountant": accountant,
        "adjacency": relation.value,
        "sampling_rate": plan.sampling_rate,
        "steps": plan.steps,
        "sampling": plan.sampling,
        "assumptions": list(plan.claim().assumptions),
    }
    if delta is not None:
        answer |= {"epsilon": curve.epsilon(check.delta("delta", delta)), "delta": delta}
    return answer


def bounds(
    plan: Sequence[TrainingPattern], delta: float, adjacency: str = "add-or-remove-one"
) -> list[dict[str, Any]]:
    """Every accountant's epsilon for a plan, tightest first; those that do not apply say why."""
    relation = Adjacency.parse(adjacency)
    check.delta("delta", delta)
    event = Composed(tuple(phase.claim().event for phase in plan))
    rows: list[dict[str, Any]] = []
    for name in table.TABLE:
        route = table.accountant(name)
        try:
            curve = route.curve(event, relation)
            row: dict[str, Any] = {
                "accountant": name,
                "epsilon": curve.epsilon(delta),
                "kind": "upper bound",
            }
        except Unsupported as error:
            row = {"accountant": name, "epsilon": None, "kind": "does not apply", "why": str(error)}
        else:
            if name == "tight" and (lower := curve.epsilon_lower(delta)) is not None:
                rows.append(
                    {"accountant": "tight (lower)", "epsilon": lower, "kind": "lower bound"}
                )
        rows.append(row)
    if (
        len(plan) == 1
        and plan[0].sampling == "poisson"
        and plan[0].noise_multiplier > 0.04
        and plan[0].sampling_rate > 0
    ):
        from dpfy.accounting import gaussian, gdp

        mu = gdp.clt_mu(plan[0].sampling_rate, plan[0].noise_multiplier, max(plan[0].steps, 1))
        rows.append(
            {
                "accountant": "central limit",
                "epsilon": gaussian.epsilon(mu, delta),
                "kind": "approximation, no guarantee",
            }
        )
    return sorted(rows, key=lambda row: math.inf if row["epsilon"] is None else row["epsilon"])


FIELDS = ("noise_multiplier", "sampling_rate", "steps", "sampling", "records", "batch_size")


def read(path: Path) -> list[TrainingPattern]:
    """The phases of a file of ``[[phase]]`` tables, in order. Unknown keys, wrong types and an
    empty list are errors.
    """
    return parse(storage.toml("--phases", path))


def parse(data: dict[str, Any]) -> list[TrainingPattern]:
    """The phases of a parsed file."""
    check.known_keys("", data, ("phase",))
    tables = data.get("phase", [])
    if (
        not isinstance(tables, list)
        or not tables
        or not all(isinstance(table, dict) for table in tables)
    ):
        raise InvalidInput("phase", type(tables).__name__, "must be one or more [[phase]] tables")
    return [_phase(k, table) for k, table in enumerate(tables)]


def _phase(k: int, table: dict[str, Any]) -> TrainingPattern:
    check.known_keys(f"phase[{k}]", table, FIELDS)
    if "noise_multiplier" not in table:
        raise InvalidInput(f"phase[{k}].noise_multiplier", None, "is needed")
    for name in ("noise_multiplier", "sampling_rate"):
        if name in table:
            check.nonnegative(f"phase[{k}].{name}", table[name])
    return TrainingPattern(
        noise_multiplier=float(table["noise_multiplier"]),
        sampling_rate=float(table.get("sampling_rate", 1.0)),
        steps=check.integer(f"phase[{k}].steps", table.get("steps", 1), least=0),
        sampling=check.one_of(
            f"phase[{k}].sampling", table.get("sampling", "poisson"), _patterns()
        ),
        records=check.integer(f"phase[{k}].records", table.get("records", 0), least=0),
        batch_size=check.integer(f"phase[{k}].batch_size", table.get("batch_size", 0), least=0),
    )


def _patterns() -> tuple[str, ...]:
    from dpfy.accounting.patterns import PATTERNS

    return PATTERNS
