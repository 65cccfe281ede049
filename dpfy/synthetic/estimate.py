"""From noisy marginals to a distribution: of all that agree with them as well as the noise allows,
the one of largest entropy.

With N records, noisy marginals y_i of standard deviation s_i and weights c, b_i (below), the
distribution p minimises

    sum_i  (|N p_i - y_i| - b_i s_i)+^2 / (2 c s_i^2)  +  N KL(p | uniform),

squares of what lies beyond a band of b_i s_i, and the entropy. Its dual is over log potentials l_i,
one for each noisy number: p is proportional to exp(sum l_i), and l_i = (y_i - N p_i -+ b_i s_i) /
(c s_i^2), 0 within the band. One marginal after the other is solved for exactly, given all others;
that is coordinate ascent on the dual, and iterative proportional fitting where there is no noise.
Tables of the junction tree are visited from neighbour to neighbour, so that each is up to date when
it is its turn (Jirousek & Preucil 1995).

The entropy is what keeps small noisy numbers from being believed: with c = 0 and b = 0 this is the
least squares of McKenna, Sheldon & Miklau 2019. The band is for marginals with so many cells that
the noise adds up to more than the records: there most cells stay where the smaller marginals put
them, as in Dudík, Phillips & Schapire 2007.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfy.synthetic.domain import Clique
from dpfy.synthetic.graph import JunctionTree
from dpfy.synthetic.inference import CliqueVector, spread, summed

ENTROPY = 2e-3
"""c: how much the entropy counts."""
BAND, WIDEST = 1.0, 1.0
"""The band b of a marginal is BAND times its noise over the number of records, and at most
WIDEST.
"""
MEAN = math.sqrt(2 / math.pi)
"""The mean of the absolute value of a standard Gaussian."""
LEAST = 1e-250
"""Probabilities below this are nothing."""
RISE = 40.0
"""How much a potential may rise at a time where the probability has underflowed."""
REFRESH = 10
"""Sweeps after which tables are computed from the potentials again."""


@dataclass(frozen=True)
class Measurement:
    """A noisy marginal: counts with noise of standard deviation `deviation` in every cell."""

    clique: Clique
    values: Tensor
    deviation: float


def combined(measurements: Iterable[Measurement]) -> dict[Clique, Measurement]:
    """Measurements of the same marginal as one, weighted by their precision."""
    found: dict[Clique, Measurement] = {}
    for new in measurements:
        if (old := found.get(new.clique)) is not None:
            a, b = old.deviation**-2, new.deviation**-2
            new = Measurement(
                new.clique, (a * old.values + b * new.values) / (a + b), (a + b) ** -0.5
            )
        found[new.clique] = new
    return found


def total_of(measurements: Iterable[Measurement]) -> float:
    """The number of records, from all marginals: the mean of their sums, weighted by their
    precision. At least 1.
    """
    rows = [(float(m.values.sum()), m.deviation**2 * m.values.numel()) for m in measurements]
    weight = sum(1 / variance for _, variance in rows)
    return max(1.0, sum(value / variance for value, variance in rows) / weight) if rows else 1.0


@dataclass(frozen=True)
class FitSettings:
    """How a distribution is fitted: the weight of the entropy, the band, sweeps at most, and the
    change of marginals that ends them.
    """

    entropy: float = ENTROPY
    band: float = BAND
    sweeps: int = 60
    tolerance: float = 1e-4


WHOLE = FitSettings()
"""How a model is fitted from which rows are drawn."""


@dataclass
class GraphicalModel:
    """A distribution on a junction tree that was fitted to marginals, for `total` records.

    `potentials` are its logarithms, by marginal; a later fit may start from them.
    """

    beliefs: CliqueVector
    potentials: dict[Clique, Tensor]
    total: float
    sweeps: int = 0

    @property
    def cells(self) -> int:
        """Cells of the tables."""
        return self.beliefs.tree.cells

    def marginal(self, clique: Clique) -> Tensor:
        """The probabilities of a marginal."""
        return self.beliefs.marginal(clique)


def fitted(
    sizes: Sequence[int],
    measurements: Mapping[Clique, Measurement],
    total: float,
    *,
    fixed: Sequence[tuple[Clique, Tensor]] = (),
    start: Mapping[Clique, Tensor] | None = None,
    how: FitSettings = WHOLE,
) -> GraphicalModel:
    """The distribution of largest entropy that agrees with the measurements. A function of what was
    released: it costs nothing.

    `fixed` are potentials that stay as they are: minus infinity for what cannot be, or those of a
    public distribution, to which entropy is then relative.
    """
    tree = JunctionTree.of(sizes, [*measurements, *(clique for clique, _ in fixed)])
    blocks = [
        _Block(m, total, how, None if start is None else start.get(m.clique))
        for m in measurements.values()
    ]
    homes: list[list[_Block]] = [[] for _ in tree.cliques]
    for block in sorted(blocks, key=lambda b: len(b.clique)):
        home = tree.home(block.clique)
        assert home is not None
        homes[home].append(block)

    def calibrated() -> CliqueVector:
        return CliqueVector.calibrated(
            tree, [*((block.clique, block.potential) for block in blocks), *fixed]
        )

    beliefs, sweep = calibrated(), 0
    for sweep in range(1, how.sweeps + 1):
        moved = _visit(beliefs, homes, tree.order[0], -1)
        if moved < how.tolerance * max(1, len(blocks)):
            break
        if sweep % REFRESH == 0:
            beliefs = calibrated()
    return GraphicalModel(
        calibrated(), {block.clique: block.potential for block in blocks}, total, sweep
    )


def _visit(beliefs: CliqueVector, homes: Sequence[Sequence[_Block]], i: int, parent: int) -> float:
    """Solve for the marginals of a table and of all behind it; by how much they moved."""
    moved = sum(block.solve(beliefs, i) for block in homes[i])
    for j in beliefs.tree.neighbours[i]:
        if j != parent:
            beliefs.pass_on(i, j)
            moved += _visit(beliefs, homes, j, i)
            beliefs.pass_on(j, i)
    return moved


class _Block:
    """One marginal in the units of probabilities: noisy shares, the penalty `ridge` of its
    potentials, the half-width of the band.
    """

    def __init__(
        self, measurement: Measurement, total: float, how: FitSettings, start: Tensor | None
    ) -> None:
        self.clique, values = measurement.clique, measurement.values / total
        self.shares = values - (float(values.sum()) - 1) / values.numel()
        deviation = measurement.deviation / total
        self.ridge = max(how.entropy * measurement.deviation * deviation, 1e-14)
        noise = MEAN * deviation * values.numel()
        self.band = (min(WIDEST, how.band * noise) if len(self.clique) > 1 else 0.0) * deviation
        self.potential = torch.zeros_like(values) if start is None else start.clone()
        self.level = 0.0

    def solve(self, beliefs: CliqueVector, home: int) -> float:
        """Set the potentials of this marginal to the best there are, given all others; by how much
        the marginal moved, in L1.
        """
        table, columns = beliefs.tables[home], beliefs.tree.cliques[home]
        now = summed(table, columns, self.clique)
        there = now > LEAST
        base = torch.where(
            there, torch.log(now.clamp(min=LEAST)) - self.potential, torch.full_like(now, -1e6)
        )
        shares, self.level = _balanced(base, self)
        rest = self.shares - shares
        best = torch.sign(rest) * (rest.abs() - self.band).clamp(min=0) / self.ridge
        # The same by its logarithm, where there is one: what is left of shares that nearly agree
        # has no digits.
        best = torch.where(
            (shares > LEAST) & (best != 0),
            torch.log(shares.clamp(min=LEAST)) - base + self.level,
            best,
        )
        self.potential = torch.where(
            there | (best < 0), best, torch.minimum(best, self.potential + RISE)
        )
        change = torch.where(there, shares / now.clamp(min=LEAST), torch.zeros_like(now))
        beliefs.tables[home] = table * spread(change, self.clique, columns)
        return float((shares - now).abs().sum())


def _balanced(base: Tensor, block: _Block) -> tuple[Tensor, float]:
    """Shares p that sum to 1 with log p = base + potential - level, the potential being what p
    lacks beyond the band over the ridge.

    For a given level every cell is solved for by itself; their sum falls with the level, which is
    found by Newton's method in a bracket.
    """
    ridge, band, level = block.ridge, block.band, block.level
    offset = base - math.log(ridge)
    up, down = (block.shares - band) / ridge + offset, (block.shares + band) / ridge + offset
    low, high = -math.inf, math.inf
    shares = base
    for _ in range(100):
        if band:
            plain = torch.exp((base - level).clamp(max=700.0))
            below = plain < block.shares - band
            active = below | (plain > block.shares + band)
            solved = ridge * omega(torch.where(below, up, down) - level)
            shares = torch.where(active, solved, plain)
            slope = float(torch.where(active, solved * ridge / (ridge + solved), plain).sum())
        else:
            shares = ridge * omega(up - level)
            slope = float((shares * ridge / (ridge + shares)).sum())
        whole = float(shares.sum())
        if abs(whole - 1) < 1e-10:
            break
        low, high = (level, high) if whole > 1 else (low, level)
        step = math.log(whole) * whole / slope if whole > 0 and slope > 0 else -50.0
        level = _between(low, high, level + step, abs(step))
    return shares / shares.sum(), level


def _between(low: float, high: float, guess: float, step: float) -> float:
    """A guess inside the bracket, or a better one."""
    if low < guess < high:
        return guess
    if math.isinf(high):
        return low + 2 * step + 1
    return high - 2 * step - 1 if math.isinf(low) else (low + high) / 2


def omega(x: Tensor) -> Tensor:
    """The Wright omega function, the solution w of w + log w = x: Halley's method from a good
    start.
    """
    middle = torch.nn.functional.softplus(x) * 0.8
    w = torch.where(
        x < -2,
        torch.exp(x.clamp(max=0.0)),
        torch.where(x > 3, x - torch.log(x.clamp(min=1.0)), middle),
    )
    w = w.clamp(min=1e-300)
    for _ in range(3):
        rest = x - w - torch.log(w)
        one = 1 + w
        curve = one * (one + 2 / 3 * rest)
        w = (w * (1 + rest / one * (2 * curve - rest) / (2 * curve - 2 * rest))).clamp(min=1e-300)
    return torch.where(x < -30, torch.exp(x), w)
