"""Exact inference on a junction tree: from log potentials to calibrated tables, and from these to
any marginal.

Calibration is done with logarithms, so that potentials of any size that cancel out do no harm. What
is kept are probabilities: the joint distribution is the product of the tables over the product of
their separators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.synthetic.domain import Clique
from dpfy.synthetic.graph import JunctionTree

MOST_CELLS = 1 << 27
"""Cells of a table on the way to a marginal: a gigabyte."""


def axes_but(table: Clique, kept: Clique) -> list[int]:
    """The axes of a table that are summed over to keep some of its columns."""
    return [axis for axis, v in enumerate(table) if v not in kept]


def summed(values: Tensor, table: Clique, kept: Clique) -> Tensor:
    """The sum of a table over all columns but some of its own."""
    axes = axes_but(table, kept)
    return values.sum(axes) if axes else values


def spread(values: Tensor, part: Clique, table: Clique) -> Tensor:
    """A table over some columns as one that can be multiplied with a larger table."""
    lengths = iter(values.shape)
    return values.reshape([next(lengths) if v in part else 1 for v in table])


def log_summed(logs: Tensor, table: Clique, kept: Clique) -> Tensor:
    """The logarithm of the sum over all columns but some."""
    axes = axes_but(table, kept)
    return torch.logsumexp(logs, axes) if axes else logs


def ratio(above: Tensor, below: Tensor) -> Tensor:
    """A quotient of probabilities, 0 where there is nothing."""
    return torch.where(
        below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), torch.zeros_like(above)
    )


class CliqueVector:
    """Calibrated tables of a junction tree. `tables[i]` sums to 1; `separators[i]` is what table i
    has in common with its parent.
    """

    def __init__(
        self, tree: JunctionTree, tables: list[Tensor], separators: list[Tensor | None]
    ) -> None:
        self.tree, self.tables, self.separators = tree, tables, separators

    @classmethod
    def calibrated(
        cls, tree: JunctionTree, potentials: Iterable[tuple[Clique, Tensor]]
    ) -> CliqueVector:
        """The distribution proportional to the exponential of the sum of all potentials; minus
        infinity is what cannot be.

        Every potential lies in a table of the tree. Two passes: from the leaves to the root, and
        back.
        """
        logs = _gathered(tree, potentials)
        sent: list[Tensor | None] = [None] * len(logs)
        for i in reversed(tree.order[1:]):
            p = tree.parent[i]
            message = log_summed(logs[i], tree.cliques[i], tree.separators[i])
            message = message - message.max()
            sent[i] = message
            logs[p] = logs[p] + spread(message, tree.separators[i], tree.cliques[p])
        tables: list[Tensor] = [torch.empty(0)] * len(logs)
        separators: list[Tensor | None] = [None] * len(logs)
        for i in tree.order:
            if (p := tree.parent[i]) >= 0:
                shared, told = tree.separators[i], sent[i]
                assert told is not None
                whole = log_summed(logs[p], tree.cliques[p], shared)
                back = torch.where(torch.isinf(told), told, whole - told)
                logs[i] = logs[i] + spread(back, shared, tree.cliques[i])
            top = logs[i].max()
            if not bool(torch.isfinite(top)):
                raise InvalidInput(
                    "constraints", "all together", "must leave at least one combination of values"
                )
            logs[i] = logs[i] - top
            table = torch.exp(logs[i])
            tables[i] = table / table.sum()
            separators[i] = (
                summed(tables[i], tree.cliques[i], tree.separators[i])
                if tree.parent[i] >= 0
                else None
            )
        return cls(tree, tables, separators)

    def pass_on(self, source: int, target: int) -> None:
        """Let a neighbour know how a table has changed (Lauritzen & Spiegelhalter 1988)."""
        tree = self.tree
        child = source if tree.parent[source] == target else target
        shared, old = tree.separators[child], self.separators[child]
        assert old is not None
        new = summed(self.tables[source], tree.cliques[source], shared)
        self.separators[child] = new
        self.tables[target] = self.tables[target] * spread(
            ratio(new, old), shared, tree.cliques[target]
        )

    def marginal(self, clique: Clique) -> Tensor:
        """The probabilities of any marginal, also of columns that no table holds together."""
        home = self.tree.home(clique)
        if home is not None:
            return summed(self.tables[home], self.tree.cliques[home], clique)
        alive = self.tree.spanned(clique)
        root = max(alive, key=lambda i: self.tables[i].numel())
        values, columns = self._collected(root, -1, alive, set(clique))
        return summed(values, columns, clique)

    def _collected(
        self, i: int, parent: int, alive: frozenset[int], wanted: set[int]
    ) -> tuple[Tensor, Clique]:
        """What a table and those behind it know of the wanted columns, given what it shares with
        its parent.
        """
        tree, columns, values = self.tree, self.tree.cliques[i], self.tables[i]
        shared = set(columns) & set(tree.cliques[parent]) if parent >= 0 else set()
        behind = [
            self._collected(j, i, alive, wanted)
            for j in tree.neighbours[i]
            if j != parent and j in alive
        ]
        later = [
            set().union(*(set(other) for _, other in behind[k:])) for k in range(len(behind) + 1)
        ]
        if shared:
            kept = tuple(v for v in columns if v in shared)
            whole = summed(values, columns, kept)
            values = values * spread(ratio(torch.ones_like(whole), whole), kept, columns)
        kept = tuple(v for v in columns if v in wanted | shared | later[0])
        values, columns = summed(values, columns, kept), kept
        for k, (other, theirs) in enumerate(behind):
            values, columns = _joined(
                values, columns, other, theirs, wanted | shared | later[k + 1]
            )
        return values, columns


def _gathered(tree: JunctionTree, potentials: Iterable[tuple[Clique, Tensor]]) -> list[Tensor]:
    """The sum of the potentials of every table."""
    held = list(potentials)
    some = held[0][1] if held else torch.zeros(1, dtype=torch.float64)
    logs = [some.new_zeros(tree.shape(clique)) for clique in tree.cliques]
    for clique, values in held:
        home = tree.home(clique)
        assert home is not None
        logs[home] += spread(values, clique, tree.cliques[home])
    return logs


def _joined(
    a: Tensor, mine: Clique, b: Tensor, theirs: Clique, kept: set[int]
) -> tuple[Tensor, Clique]:
    """The product of two tables, summed over what is not kept."""
    everything = tuple(sorted({*mine, *theirs}))
    columns = tuple(v for v in everything if v in kept)
    sizes = dict(zip(mine, a.shape, strict=True)) | dict(zip(theirs, b.shape, strict=True))
    if math.prod(sizes[v] for v in columns) > MOST_CELLS:
        raise Unsupported(
            f"a marginal that needs a table of {math.prod(sizes[v] for v in columns):.1e} cells",
            "ask for a smaller one",
        )
    place = {v: k for k, v in enumerate(everything)}
    found = torch.einsum(
        a, [place[v] for v in mine], b, [place[v] for v in theirs], [place[v] for v in columns]
    )
    return found, columns
