"""A `dpfy.Dataset` as training reads it: how many units it has, the plan that is made of it, and its
records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfy.core import check
from dpfy.core.errors import BudgetExceeded, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency, WithoutReplacement
from dpfy.data.config import FIRST
from dpfy.data.given import rows_of
from dpfy.data.owners import Owned, Users
from dpfy.data.records import Records, as_records
from dpfy.data.split import SplitOwned, kept, uncounted
from dpfy.data.table import encode
from dpfy.data.users import UserRecords, by_user
from dpfy.plan.recipe import RECORD, UNIT, Plan, dpsgd
from dpfy.queries.run import query
from dpfy.runs.dataset import Dataset
from dpfy.runs.run import Run
from dpfy.tables.columns import Number
from dpfy.tables.schema import Schema, training_schema
from dpfy.tables.shared import numbered, within_limit
from dpfy.tables.sources import cells_of
from dpfy.tables.table import owner_names
from dpfy.training.run import load_plan

COUNT_SHARE = 0.05
"""The part of epsilon that counts the units, where their number is not public."""
FEW_AND_MANY = (1, 1000)
"""Numbers of units, in batches, that a plan is tried for before they are counted."""
COUNT = "-count"
"""What the folder of the count is called, behind that of the training."""
PLAN = "plan.json"


@dataclass(frozen=True)
class PlanTerms:
    """What a caller of `dpfy.fit` says instead of a plan."""

    epsilon: float | None
    delta: float | None
    epochs: float | None
    steps: int | None
    batch_size: float | None
    clip_norm: float

    def refuse(self) -> None:
        """An error where a plan says all this."""
        default = PlanTerms(None, None, None, None, None, 1.0)
        if self != default:
            rule = "must be left out with plan=, which says it"
            raise InvalidInput(
                "epsilon, delta, epochs, steps, batch_size, clip_norm", "given", rule
            )

    def check(self) -> None:
        """An error where something is missing."""
        if self.epsilon is None:
            rule = "must be given (or plan=): fit(net, people, optimizer=..., epsilon=3.0, ...)"
            raise InvalidInput("epsilon", None, rule)
        check.epsilon("epsilon", self.epsilon)
        if self.batch_size is None:
            raise InvalidInput("batch_size", None, "must be given with epsilon, or plan=")
        if (self.epochs is None) == (self.steps is None):
            raise InvalidInput("epochs", self.epochs, "must be given, or steps, and not both")


def planned(data: Dataset, terms: PlanTerms, run: Run) -> tuple[Plan, dict[str, Any]]:
    """The plan of a training on `data`, and where its figures came from.

    Where the number of units is not public it is counted first, in a run of its own, with a small
    part of epsilon: what is left is for the training, so that both together cost epsilon.

    Guarantees: the count is pure, and reserved before the data is read; its epsilon and that of the
    plan add up to the epsilon that was asked for.
    """
    terms.check()
    assert terms.epsilon is not None
    assert terms.batch_size is not None
    chosen = data.rule(terms.delta)
    told: dict[str, Any] = {"delta_from": chosen.origin}
    if run.resume and (Path(run.path) / PLAN).is_file():
        return load_plan(Path(run.path)), told
    epsilon, records = terms.epsilon, data.records if data.unit is None else None
    if records is None:
        share = COUNT_SHARE * epsilon
        _require_budget(data, terms, epsilon - share, chosen.value)
        records = counted(data, share, run)
        epsilon -= share
        told["records_from"] = (
            f"a private count in a run of its own ({Path(run.path).name}{COUNT}), which took a "
            f"twentieth of what was asked for"
        )
    return _calibrated(data, terms, records, epsilon, chosen.value), told


def _calibrated(
    data: Dataset, terms: PlanTerms, records: int, epsilon: float, delta: float
) -> Plan:
    """The plan for so many units."""
    assert terms.batch_size is not None
    shared = data.unit is not None and len(data.unit.columns) > 1
    recipe = dpsgd(
        records,
        min(terms.batch_size, records),
        epochs=terms.epochs,
        steps=terms.steps,
        clip_norm=terms.clip_norm,
        unit=data.privacy_unit,
        adjacency=Adjacency.ZERO_OUT if shared else Adjacency.ADD_OR_REMOVE_ONE,
        draw=RECORD if shared else UNIT,
    )
    return recipe.calibrate(epsilon, delta)


def _require_budget(data: Dataset, terms: PlanTerms, epsilon: float, delta: float) -> None:
    """Refuse, before the units are counted, what the budget would refuse after it.

    What a plan takes from a budget hardly depends on the number of units: one for few and one for
    many are asked.
    """
    if data.budget is None or data.ledger is None or terms.batch_size is None:
        return
    held = Ledger.read(data.ledger) if data.ledger.is_file() else None
    spent, first = ([], None) if held is None else (held.spent(), held.first)
    refusals = []
    for times in FEW_AND_MANY:
        units = min(math.ceil(times * terms.batch_size), max(1, int(0.9 / delta)))
        plan = _calibrated(data, terms, units, epsilon, delta)
        refusals.append(data.budget.why_not(spent, plan.event, plan.recipe.adjacency, first))
    if refusals[0] and refusals[1]:
        raise BudgetExceeded(f"{data.ledger.name}: {refusals[0]}")


def counted(data: Dataset, epsilon: float, run: Run) -> int:
    """How many units there are, counted with noise."""
    place = replace(
        run, path=f"{run.path}{COUNT}", ledger=None, budget=None, config=None, public_data=()
    )
    source, schema, most = data.source, data.described, None
    if not schema:
        found = rows_of(source)
        if found is None:
            rule = "must be given for data that is read when it is drawn: Dataset(..., records=)"
            raise InvalidInput("records", None, rule)
        source = {"row": np.zeros(found)}
    if data.unit is not None and len(data.unit.columns) == 1:
        most = max(2, data.unit.at_most)
    asked = Dataset(
        source,
        data.schema if schema else [Number("row", 0, 1)],
        unit=data.unit,
        ledger=data.ledger,
        budget=data.budget,
    )
    answers = query(asked, "count()", epsilon=epsilon, delta=0, contributions=most, run=place)
    value = answers[0].value
    return max(1, round(value)) if isinstance(value, int | float) else 1


def records_of(data: Dataset, plan: Plan) -> Records | SplitOwned:
    """The private records of a data set, for `plan`.

    Guarantees: those of `read`; how many records there are raises no error and is told to nobody.
    """
    if isinstance(plan.recipe.sampler.participation, WithoutReplacement):
        rule = 'plan with sampling="poisson", or give the records themselves'
        raise Unsupported("batches of a fixed size from a Dataset", rule)
    found, names = read(data)
    if data.unit is not None and len(data.unit.columns) > 1:
        owned = Owned(found, Users(names, FIRST), data.unit.at_most, single=True)
        return uncounted(owned, plan.recipe.records)
    if names is not None and data.unit is not None:
        _, owners = np.unique(names, return_inverse=True)
        grouped = by_user(found, owners, data.unit.at_most)
        assert isinstance(grouped, UserRecords)
        found = grouped
    return kept(found, np.ones(len(found), bool), plan.recipe.records)


def read(data: Dataset) -> tuple[Records, Any]:
    """The private records of a data set, and the name of each one's person; of records with several
    owners those within the limit of each, with a number for each owner.

    Guarantees: each row is encoded, or left out, by itself from public rules.
    """
    if not data.described:
        return as_records(data.source), None
    schema = training_schema(data.schema)
    cells = dict(cells_of(data.source, [column.name for column in schema.columns]))
    columns = [] if data.unit is None else [_column(cells, name) for name in data.unit.columns]
    names: Any = owner_names(columns[0]) if len(columns) == 1 else None
    known = {name: held for name, held in cells.items() if name in schema.names}
    encoded = encode(known, schema, "the data set", every_row=False)
    if names is not None:
        encoded = encoded.without(names == "")
    elif data.unit is not None:
        names = numbered(columns)
        encoded = encoded.without(~within_limit(names, data.unit.at_most))
    rows = np.flatnonzero(encoded.kept)
    if not len(rows):
        raise InvalidInput("data", "no usable row", "must hold rows with one of the classes")
    whole = (
        encoded.records
        if len(rows) == len(encoded.records)
        else Records(tuple(tensor[torch.from_numpy(rows)] for tensor in encoded.records.tensors))
    )
    return whole, None if names is None else names[rows]


def published(data: Dataset) -> Schema | None:
    """The public schema that goes into the run folder, for `dpfy.predict`."""
    return training_schema(data.schema) if data.described else None


def _column(cells: dict[str, Any], name: str) -> Any:
    if name not in cells:
        raise InvalidInput("unit", name, "must be a column of the data")
    return cells[name]
