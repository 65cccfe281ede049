"""Junction trees: from the marginals of a model to the tables that exact inference needs. Structure
alone, all of it public.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dpfy.synthetic.domain import Clique


def members(mask: int) -> list[int]:
    """The columns in a set of them, given as bits."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def bits(clique: Iterable[int]) -> int:
    """A set of columns as bits."""
    mask = 0
    for number in clique:
        mask |= 1 << number
    return mask


def triangulated(sizes: Sequence[int], cliques: Iterable[Clique]) -> list[Clique]:
    """Maximal cliques of a triangulated graph in which every one of `cliques` is complete.

    Columns are eliminated one after the other, each time the one whose neighbourhood has the fewest
    cells.
    """
    logs, neighbours = [math.log(size) for size in sizes], [0] * len(sizes)
    for clique in cliques:
        whole = bits(clique)
        for number in clique:
            neighbours[number] |= whole & ~(1 << number)
    weights = [logs[v] + sum(logs[u] for u in members(neighbours[v])) for v in range(len(sizes))]
    left, found = set(range(len(sizes))), []
    while left:
        v = min(left, key=lambda u: (weights[u], u))
        around = neighbours[v]
        found.append(around | 1 << v)
        left.remove(v)
        for u in (near := members(around)):
            neighbours[u] = (neighbours[u] | around) & ~(1 << u | 1 << v)
        for u in near:
            weights[u] = logs[u] + sum(logs[w] for w in members(neighbours[u]))
    maximal: list[int] = []
    for mask in found:
        if not any(mask & ~other == 0 for other in maximal):
            maximal.append(mask)
    return [tuple(members(mask)) for mask in maximal]


def model_cells(sizes: Sequence[int], cliques: Iterable[Clique]) -> int:
    """The cells of all tables of the junction tree of these marginals."""
    return sum(math.prod(sizes[v] for v in clique) for clique in triangulated(sizes, cliques))


@dataclass(frozen=True)
class JunctionTree:
    """Tables and the tree that joins them: `parent[i]` is a table's parent (-1 at the root),
    `separators[i]` what it shares with it.

    Guarantees: every one of the marginals that it was made for lies in a table; a column that two
    tables share is in every table on the way between them.
    """

    sizes: tuple[int, ...]
    cliques: tuple[Clique, ...]
    parent: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], cliques: Iterable[Clique]) -> JunctionTree:
        """The tree of these marginals and of every column by itself: tables joined where they share
        most (Prim's algorithm).
        """
        tables = triangulated(sizes, [*cliques, *((v,) for v in range(len(sizes)))])
        masks = [bits(table) for table in tables]
        parent, order = [-1] * len(tables), [0]
        best = {i: (_shared(sizes, masks[i] & masks[0]), 0) for i in range(1, len(tables))}
        while best:
            i = max(best, key=lambda k: (best[k][0], -k))
            parent[i] = best.pop(i)[1]
            order.append(i)
            for k in best:
                if (shared := _shared(sizes, masks[k] & masks[i])) > best[k][0]:
                    best[k] = (shared, i)
        return cls(tuple(sizes), tuple(tables), tuple(parent), tuple(order))

    @cached_property
    def separators(self) -> tuple[Clique, ...]:
        """What each table shares with its parent."""
        both = zip(self.cliques, self.parent, strict=True)
        return tuple(
            tuple(v for v in clique if p >= 0 and v in self.cliques[p]) for clique, p in both
        )

    @cached_property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """The tables that each is joined to."""
        found: list[list[int]] = [[] for _ in self.cliques]
        for i, p in enumerate(self.parent):
            if p >= 0:
                found[i].append(p)
                found[p].append(i)
        return tuple(tuple(near) for near in found)

    @property
    def cells(self) -> int:
        """Cells of all tables."""
        return sum(math.prod(self.shape(clique)) for clique in self.cliques)

    def shape(self, clique: Clique) -> tuple[int, ...]:
        """The cells of each column of a table."""
        return tuple(self.sizes[v] for v in clique)

    def home(self, clique: Clique) -> int | None:
        """The smallest table that holds a marginal, None where it lies in none."""
        wanted = set(clique)
        fitting = [i for i, table in enumerate(self.cliques) if wanted <= set(table)]
        return min(fitting, key=lambda i: math.prod(self.shape(self.cliques[i])), default=None)

    def spanned(self, clique: Clique) -> frozenset[int]:
        """The smallest connected set of tables whose columns hold a marginal: leaves that bring
        nothing of their own are cut off.
        """
        wanted, alive = set(clique), set(range(len(self.cliques)))
        near = [set(found) for found in self.neighbours]
        leaves = [i for i in alive if len(near[i]) <= 1]
        while leaves:
            i = leaves.pop()
            if i not in alive or len(alive) == 1:
                continue
            (j,) = near[i]
            if wanted & set(self.cliques[i]) <= set(self.cliques[j]):
                alive.remove(i)
                near[j].discard(i)
                if len(near[j]) == 1:
                    leaves.append(j)
        return frozenset(alive)


def _shared(sizes: Sequence[int], mask: int) -> tuple[int, float]:
    """How much two tables share: columns first, then few cells."""
    shared = members(mask)
    return len(shared), -math.prod(sizes[v] for v in shared) if shared else 0.0
