"""From what is asked to a claim: the public side of a synthesis, calibrated before any record is
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dpfy.accounting.filters import least_noise
from dpfy.core import check, plugins
from dpfy.core.errors import InvalidInput, missing
from dpfy.core.unit import EXAMPLE, Adjacency, Unit, single_owner
from dpfy.synthetic.claim import Synthesis
from dpfy.synthetic.counts import RecordOwners, closure
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.methods import METHODS, SynthesisMethod

WIDE = 20
"""Tables with more columns than this have pairs as their workload, others triples."""
MOST_CELLS = 1 << 17
"""Cells of a marginal that may be chosen."""
MOST_COUNTED = 1 << 25
"""Cells of all marginals that may be chosen, the small ones first."""
MODEL_CELLS = 1 << 20
"""Cells of a model, where nothing else is said."""
MOST_ROWS = 1 << 27
TARGET = 4.0
"""How much more a marginal with the target matters."""

LAB = ("mwem", "privbayes", "rap", "independent", "dp-gan", "pate-gan")
"""Methods of the distribution dpfy-lab, for comparison."""

Workload = int | Sequence[Sequence[str]] | Mapping[tuple[str, ...], float] | None


@dataclass(frozen=True)
class SynthesisTerms:
    """What a synthesis may cost, and whose data it protects. All of it is public.

    `user` names the column that says whose a record is: all records of a user are then protected
    together, of which the first `most_records` are used. `records` is the public number of records;
    the guarantee is then for replacing one (of dp-gan, as of any training, for adding or removing
    one).
    """

    epsilon: float
    delta: float = 1e-9
    user: str | None = None
    most_records: int | None = None
    records: int | None = None

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta", self.delta)
        if (self.user is None) != (self.most_records is None):
            raise InvalidInput(
                "most_records",
                self.most_records,
                "goes with user, the column that says whose a record is",
            )
        single_owner("a synthesis", self.user)
        _ = self.owners
        if self.records is not None:
            check.integer("records", self.records, least=2, most=check.RECORDS)
            if self.user is not None:
                raise InvalidInput(
                    "records",
                    self.records,
                    "is for records that are their own unit: leave out user",
                )

    @property
    def owners(self) -> RecordOwners | None:
        """Whose records are."""
        return (
            None
            if self.user is None or self.most_records is None
            else RecordOwners(self.user, self.most_records)
        )

    @property
    def adjacency(self) -> Adjacency:
        """A public number of records does not change: one is replaced."""
        return Adjacency.ADD_OR_REMOVE_ONE if self.records is None else Adjacency.REPLACE_ONE

    @property
    def about(self) -> dict[str, Any]:
        """What the claim says of it."""
        unit = EXAMPLE if self.user is None else Unit("user", self.most_records or 1)
        return {
            "unit": unit,
            "adjacency": self.adjacency,
            "delta": self.delta,
            "records": self.records,
        }


@dataclass(frozen=True)
class SynthesisOptions:
    """How a table is made; none of it changes what it costs.

    `workload` are the marginals that matter: a number k for all of k columns, lists of names, or
    names with weights; those with the column `target` matter more. `rows` is how many rows to make,
    by default as many as there seem to be. `most_cells` limits the tables of a model, whose
    arithmetic is done on `device`.
    """

    method: str = "aim"
    workload: Workload = None
    target: str | None = None
    rows: int | None = None
    most_cells: int = MODEL_CELLS
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            _check_plugin(self.method)
        if self.rows is not None:
            check.integer("rows", self.rows, most=MOST_ROWS)
        check.integer("most_cells", self.most_cells, most=1 << 31)
        check.one_of("device", self.device.partition(":")[0], ("cpu", "cuda"))


def _check_plugin(method: str) -> None:
    """Refuse a method that neither dpfy has nor a plug-in adds."""
    added = plugins.installed(plugins.SYNTHESIZERS)
    if method in LAB and method not in added:
        raise missing(f"the method {method}", "dpfy_lab")
    check.one_of("method", method, (*METHODS, *added))


DEFAULTS = SynthesisOptions()


@dataclass(frozen=True)
class SynthesisPlan:
    """A synthesis before any record is read: domain, method, claim, the marginals that may be
    measured, and the options.
    """

    domain: Domain
    method: SynthesisMethod
    claim: Synthesis
    terms: SynthesisTerms
    weights: Mapping[Clique, float]
    options: SynthesisOptions


def plan(
    domain: Domain, terms: SynthesisTerms, options: SynthesisOptions = DEFAULTS
) -> SynthesisPlan:
    """The claim of a synthesis.

    Guarantees: the claim's event is within (epsilon, delta) by the accountant that the report will
    name. Nothing depends on the records.
    """
    row = METHODS.get(options.method) or plugins.find(plugins.SYNTHESIZERS, options.method)
    if not isinstance(row, SynthesisMethod):
        raise InvalidInput("method", options.method, "must be one that measures marginals")
    if terms.user is not None and terms.user not in domain.ignored | set(domain.names):
        raise InvalidInput(
            "user",
            terms.user,
            "must be a column of the schema, with ignore = true unless it is to be synthesized",
        )
    matters, words = _workload(domain, options.workload, options.target)
    counted = _counted(domain, row, matters)
    columns = len(domain.columns)
    choices, adjacency = row.choices(columns), terms.adjacency
    alone = least_noise(terms.epsilon, terms.delta, 0, 0.0, adjacency)
    moves = 2 if adjacency is Adjacency.REPLACE_ONE else 1
    width = math.sqrt(8 * row.selection * (moves / alone) ** 2 / 2 / choices) if choices else 0.0
    noise = least_noise(terms.epsilon, terms.delta, choices, width, adjacency) if choices else alone
    claim = Synthesis(
        row.words,
        str(domain),
        words,
        noise,
        max(1, row.measurements(columns)),
        choices,
        width,
        **terms.about,
    )
    return SynthesisPlan(domain, row, claim, terms, workload_weights(matters, counted), options)


def workload_weights(
    workload: Mapping[Clique, float], candidates: Iterable[Clique]
) -> dict[Clique, float]:
    """How much a marginal matters for a workload: the sum over its marginals of their weight times
    the columns they share.

    McKenna, Mullins, Sheldon & Miklau 2022.
    """
    sets = [(frozenset(clique), weight) for clique, weight in workload.items()]
    return {c: sum(weight * len(held.intersection(c)) for held, weight in sets) for c in candidates}


def _workload(
    domain: Domain, workload: Workload, target: str | None
) -> tuple[dict[Clique, float], str]:
    """Marginals with their weights, and in words."""
    columns = range(len(domain.columns))
    if workload is None or isinstance(workload, int):
        degree = workload if workload is not None else 3 if len(columns) <= WIDE else 2
        degree = min(check.integer("workload", degree, most=4), len(columns))
        found = dict.fromkeys(combinations(columns, degree), 1.0)
        words = f"all marginals of {degree} columns"
    else:
        given = (
            workload.items()
            if isinstance(workload, Mapping)
            else [(tuple(names), 1.0) for names in workload]
        )
        found = {
            domain.clique("workload", names): check.positive("workload weight", weight)
            for names, weight in given
        }
        if not found:
            raise InvalidInput("workload", [], "must name at least one marginal")
        for clique in found:
            if (cells := domain.cells(clique)) > MOST_CELLS:
                raise InvalidInput(
                    "workload",
                    domain.words(clique),
                    f"has {cells:.3g} cells; at most {MOST_CELLS} can be measured",
                )
        words = f"{len(found)} marginals: " + "; ".join(
            domain.words(clique) for clique in list(found)[:20]
        )
    if target is not None:
        number = domain.number("target", target)
        found = {
            clique: weight * (TARGET if number in clique else 1.0)
            for clique, weight in found.items()
        }
        words += f"; those with {target} count {TARGET:g} times"
    return found, "".join(c if c.isprintable() else "?" for c in words)[:1500]


def _counted(
    domain: Domain, method: SynthesisMethod, workload: Mapping[Clique, float]
) -> list[Clique]:
    """The marginals that are counted: all that are part of the workload and those that the method
    needs, as long as they are small.
    """
    columns = range(len(domain.columns))
    needed: list[Clique] = [(number,) for number in columns]
    if (single := max(domain.sizes)) > MOST_CELLS:
        raise InvalidInput(
            "cells",
            single,
            f"must be at most {MOST_CELLS} in one column: use fewer bins or categories",
        )
    degree = min(method.least_degree, len(columns))
    wanted = (
        closure([*workload, *combinations(columns, degree)]) if method.choices(len(columns)) else []
    )
    total = sum(domain.cells(clique) for clique in needed)
    for clique in sorted((c for c in wanted if len(c) > 1), key=domain.cells):
        total += domain.cells(clique)
        if domain.cells(clique) > MOST_CELLS or total > MOST_COUNTED:
            break
        needed.append(clique)
    return needed
