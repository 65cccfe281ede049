"""The methods: how marginals are selected, how the budget is split, and which estimator makes a
distribution of them.

| method | selection | split | estimator |
|---|---|---|---|
| aim | the worst approximated marginal, again and again, with less noise when it drowns what is gained | adaptive | graphical model |
| mwem | the same without weights and penalty, with noise that does not change | equal | graphical model |
| rap | as aim | adaptive | relaxed table: a mixture of products |
| mst | a forest of the strongest pairs, chosen at once | thirds | graphical model |
| privbayes | a network: columns one after the other, each with the columns it depends on | fixed | conditional tables |
| independent | nothing | all for single columns | graphical model |

A method sees the counts through the meter alone, so none can spend more than its claim. What it
decides from public facts and from what was released costs nothing.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from dpfy.accounting.filters import noise_of, squares
from dpfy.synthetic.conditionals import CONDITIONALS
from dpfy.synthetic.domain import Clique, Domain
from dpfy.synthetic.estimate import MEAN, FitSettings, Measurement
from dpfy.synthetic.graphical import GRAPHICAL
from dpfy.synthetic.relaxed import RELAXED
from dpfy.synthetic.task import FittedModel, MarginalEstimator, SynthesisTask

WEIGHT = 2 / 3
"""Of marginals that are measured together: squares in proportion to cells to this power make their
L1 errors together least.
"""
QUICK = FitSettings(sweeps=20, tolerance=1e-3)
"""How models are fitted between two choices."""


@dataclass(frozen=True)
class SynthesisMethod:
    """One row of the table. `rounds` is the number of choices, for each column; one is never chosen
    for the last column of a `tree`.

    `selection` is the share of the budget, in zCDP, that choices have; `first` the share of the sum
    of squares for single columns. Where noise begins to drown what is gained, it is made `quicken`
    times less; `aware` methods weigh marginals by the workload and take their noise into account.
    `least_degree` is the size of marginals that must be counted.
    """

    rule: Callable[[SynthesisTask, SynthesisMethod], FittedModel]
    estimator: MarginalEstimator
    words: str
    selection: float
    first: float
    rounds: int
    tree: bool = False
    quicken: float = 1.0
    aware: bool = True
    least_degree: int = 1

    def choices(self, columns: int) -> int:
        """How many marginals are chosen at most: from the number of columns alone."""
        return max(0, self.rounds * columns - self.tree)

    def measurements(self, columns: int) -> int:
        """How many marginals are measured at most: single columns, and what is chosen."""
        return columns + self.choices(columns)


def _by_cells(domain: Domain, cliques: Sequence[Clique]) -> list[float]:
    return [float(domain.cells(clique)) ** WEIGHT for clique in cliques]


def singles(task: SynthesisTask, method: SynthesisMethod) -> list[Measurement]:
    """Every column by itself, with the first part of the terms."""
    share = task.meter.whole * Fraction(method.first)
    return task.meter.measure_all(task.ones, share, _by_cells(task.domain, task.ones))


def independent(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Nothing but single columns."""
    return task.fit(method.estimator, singles(task, method))


def adaptive(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Choose the marginal that the model approximates worst, measure it, fit, and again until
    nothing is left.

    A marginal whose noise would be larger than what it could tell is no candidate; nor is one that
    makes the model too large. Where a measurement moves the model by no more than its noise, the
    noise is too large: from then on it is `quicken` times less.
    """
    meter = task.meter
    measured = singles(task, method)
    model = task.fit(method.estimator, measured, None, QUICK)
    cost = meter.left / max(1, meter.choices)
    last = False
    while not last:
        last = meter.left < 2 * cost or meter.choices <= 1
        noise = noise_of(meter.left if last else cost)
        clique = _worst(
            task,
            method,
            model,
            measured,
            meter.deviation(noise),
            float((meter.whole - meter.left + squares(noise)) / meter.whole),
        )
        before = model.marginal(clique) * model.total
        measured.append(meter.measure(clique, noise))
        model = task.fit(method.estimator, measured, model, QUICK)
        moved = float((model.marginal(clique) * model.total - before).abs().sum())
        if moved <= MEAN * meter.deviation(noise) * task.domain.cells(clique):
            cost = min(cost * Fraction(method.quicken**2), meter.left) if meter.left else cost
        task.progress(task.domain.words(clique), float(1 - meter.left / meter.whole))
    return task.fit(method.estimator, measured, model)


def _worst(
    task: SynthesisTask,
    method: SynthesisMethod,
    model: FittedModel,
    measured: Sequence[Measurement],
    deviation: float,
    share: float,
) -> Clique:
    """The marginal to be measured next, with noise of this deviation: chosen by how far it is from
    the model, less its noise.
    """
    held = list(dict.fromkeys(m.clique for m in measured))
    noise = {
        c: MEAN * deviation * task.domain.cells(c) if method.aware else 0.0 for c in task.weights
    }
    candidates = [
        c
        for c in task.weights
        if noise[c] <= model.total and method.estimator.fits(task, held, c, share)
    ]
    candidates = candidates or task.ones
    weights = {c: task.weights[c] if method.aware else 1.0 for c in candidates}
    top = max(weights.values())
    scores = [weights[c] / top * (task.distance(c, model) - noise[c]) for c in candidates]
    return candidates[task.meter.choose(scores)]


def forest(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Pairs that depend most on each other, none of which close a circle; all are chosen before one
    of them is measured.
    """
    meter, domain = task.meter, task.domain
    measured = singles(task, method)
    model = task.fit(method.estimator, measured, None, QUICK)
    columns = range(len(domain.columns))
    deviation = meter.deviation(noise_of(meter.left / max(1, len(columns) - 1)))
    noise = {pair: MEAN * deviation * domain.cells(pair) for pair in combinations(columns, 2)}
    scores = {
        pair: task.distance(pair, model) - noise[pair]
        for pair in noise
        if noise[pair] <= model.total
    }
    group, edges = list(columns), []
    for _ in range(len(columns) - 1):
        open_pairs = [pair for pair in scores if group[pair[0]] != group[pair[1]]]
        if not open_pairs:
            break
        a, b = open_pairs[meter.choose([scores[pair] for pair in open_pairs])]
        edges.append((a, b))
        group = [group[a] if held == group[b] else held for held in group]
    if edges:
        measured += meter.measure_all(edges, meter.left, _by_cells(domain, edges))
    return task.fit(method.estimator, measured, model)


def network(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Columns one after the other, each with up to two columns before it on which it depends most
    (Zhang et al. 2017).

    The score is how far the counts are from independence, the column's own shares being those that
    were released: a record adds 1 to the counts and 1 to what is expected of them, so half of the
    distance changes by at most 1.
    """
    meter, domain = task.meter, task.domain
    measured = singles(task, method)
    shares = [np.maximum(m.values.numpy(), 0.0) for m in measured]
    shares = [
        held / held.sum() if held.sum() else np.full(len(held), 1 / len(held)) for held in shares
    ]
    tables = meter.marginals.tables
    total, parts = task.total(measured), max(1, len(domain.columns) - 1)
    deviation = meter.deviation(noise_of(meter.left / parts))
    known, joints = [_largest(domain)], []
    while len(known) < len(domain.columns):
        options = [
            (v, tuple(sorted((v, *parents))))
            for v in range(len(domain.columns))
            if v not in known
            for size in (1, 2)
            for parents in combinations(sorted(known), size)
        ]
        useful = [
            (v, c)
            for v, c in options
            if c in tables and MEAN * deviation * domain.cells(c) <= total / 2
        ]
        useful = useful or [(v, (v,)) for v in range(len(domain.columns)) if v not in known]
        v, clique = useful[meter.choose([_dependence(tables, shares[v], v, c) for v, c in useful])]
        known.append(v)
        joints.append((v, clique))
    wanted = [clique for _, clique in joints if len(clique) > 1]
    if wanted:
        measured += meter.measure_all(
            list(dict.fromkeys(wanted)), meter.left, _by_cells(domain, list(dict.fromkeys(wanted)))
        )
    return CONDITIONALS.network(task, measured, [(known[0], (known[0],)), *joints])


def _largest(domain: Domain) -> int:
    """The column with the most cells: none should depend on others less than it."""
    return max(range(len(domain.columns)), key=lambda v: domain.columns[v].cells)


def _dependence(tables: Any, shares: np.ndarray, v: int, clique: Clique) -> float:
    """Half the L1 distance between the counts of a marginal and what they would be if column v did
    not depend on the others.
    """
    if len(clique) == 1:
        return 0.0
    counts = tables[clique]
    axis = clique.index(v)
    shape = [-1 if a == axis else 1 for a in range(counts.ndim)]
    return (
        float(np.abs(counts - counts.sum(axis=axis, keepdims=True) * shares.reshape(shape)).sum())
        / 2
    )


METHODS = {
    "aim": SynthesisMethod(
        adaptive,
        GRAPHICAL,
        "adaptive and iterative, with a graphical model (AIM)",
        0.1,
        0.3,
        rounds=2,
        quicken=2.0,
    ),
    "mst": SynthesisMethod(
        forest,
        GRAPHICAL,
        "a forest of pairs, with a graphical model (MST)",
        0.2,
        0.35,
        rounds=1,
        tree=True,
        least_degree=2,
    ),
    "mwem": SynthesisMethod(
        adaptive,
        GRAPHICAL,
        "multiplicative weights with a graphical model (MWEM+PGM)",
        0.5,
        0.05,
        rounds=1,
        aware=False,
    ),
    "privbayes": SynthesisMethod(
        network,
        CONDITIONALS,
        "a Bayesian network (PrivBayes)",
        0.3,
        0.2,
        rounds=1,
        tree=True,
        least_degree=3,
    ),
    "independent": SynthesisMethod(
        independent, GRAPHICAL, "independent columns", 0.0, 1.0, rounds=0
    ),
    "rap": SynthesisMethod(
        adaptive,
        RELAXED,
        "a relaxed table, fitted to adaptively chosen marginals (RAP)",
        0.1,
        0.3,
        rounds=2,
        quicken=2.0,
    ),
}
