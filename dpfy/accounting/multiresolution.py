"""Composition of measures in layers: a fine grid where most of the mass lies, coarser ones for what
is rare.

Write S for a layered measure up to some layer, M for the next layer and C for rounding onto its
grid. The n-fold composition of S + M is that of S, plus every term in which M takes part: (C(S) +
M)^n - C(S)^n, on the coarser grid. The difference is a sum of products of measures, each rounded
the same way (up or down), so the whole is; and what is rounded onto the coarser grid counts only as
often as M occurs. The arrays stay short although the losses of a step may reach a million times as
far as they usually lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dpfy.accounting.lattice import FACTOR, Lattice, Layers, compose_without, largest_mass
from dpfy.accounting.losses import MOST_POINTS, TooFine
from dpfy.accounting.moments import ROUNDING

Coarsen = Callable[[Lattice, int], Lattice]
NOISE = 0.02
"""The part of the error up to which rounding an inner sum may drop negative masses."""


def compose_layers(
    parts: Sequence[tuple[Layers, int]], coarsen: Coarsen, tail: float, weight: float
) -> Layers:
    """The sum of independent losses, each `count` times, in layers on the same grids; see
    `lattice.compose`.

    Guarantees: rounded the way `coarsen` rounds; the error of the result covers the errors of the
    parts and everything cut, wrapped around or rounded off on the way.
    """
    parts = [(layers, count) for layers, count in parts if count > 0]
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    depth = max(len(layers) for layers, _ in parts)
    sums = [_sums(layers, depth, coarsen) for layers, _ in parts]
    result, error = [], 0.0
    for k in range(depth):
        whole = [(rows[k][0], count) for rows, (_, count) in zip(sums, parts, strict=True)]
        inner = (
            [(rows[k][1], count) for rows, (_, count) in zip(sums, parts, strict=True)] if k else []
        )
        layer = compose_without(whole, inner, tail, weight)
        mass = largest_mass(whole)
        error += layer.error + 1.05 * mass * sum(
            count * rows[k][2] for rows, (_, count) in zip(sums, parts, strict=True)
        )
        result.append(replace(layer, error=0.0, relative=0.0))
    error += 1.05 * mass * sum(count * layers[0].error for layers, count in parts)
    relative = 2 * ROUNDING + sum(count * layers[0].relative for layers, count in parts)
    return (replace(result[0], error=error, relative=relative), *result[1:])


def _sums(layers: Layers, depth: int, coarsen: Coarsen) -> list[tuple[Lattice, Lattice, float]]:
    """For every layer: all layers up to it on its grid, those before it on its grid, and the error
    made in rounding them.

    The errors of the layers themselves are the caller's to count, once for all.
    """
    first = replace(layers[0], error=0.0, relative=0.0)
    rows = [(first, first, 0.0)]
    noise = NOISE * layers[0].error
    for k in range(1, depth):
        before = replace(rows[-1][0], error=noise)
        grown = noise * math.exp(before.tilt * before.spacing * FACTOR)
        coarse = coarsen(before, FACTOR)
        dropped = max(0.0, coarse.error - grown * (1 - 1e-12))
        coarse = replace(coarse, error=0.0)
        rows.append((plus(coarse, layers[k]) if k < len(layers) else coarse, coarse, dropped))
    return rows


def plus(one: Lattice, other: Lattice) -> Lattice:
    """The sum of two measures on one grid."""
    start = min(one.start, other.start)
    stop = max(one.start + len(one.weights), other.start + len(other.weights))
    if stop - start > MOST_POINTS:
        raise TooFine
    weights = np.zeros(stop - start)
    for part in (one, other):
        weights[part.start - start : part.start - start + len(part.weights)] += part.weights
    return replace(
        one,
        start=start,
        weights=weights,
        error=one.error + other.error,
        relative=max(one.relative, other.relative),
    )


def coarsen_layers(layers: Layers, coarsen: Coarsen) -> Layers:
    """The finest layer rounded onto the grid of the next one."""
    first = coarsen(layers[0], FACTOR)
    return (plus(first, layers[1]), *layers[2:]) if len(layers) > 1 else (first,)


def flat(layers: Layers) -> Lattice:
    """All layers on the finest grid."""
    result = layers[0]
    for k, layer in enumerate(layers[1:], 1):
        stride = FACTOR**k
        if stride * len(layer.weights) > MOST_POINTS:
            raise TooFine
        dense = np.zeros(stride * (len(layer.weights) - 1) + 1)
        dense[::stride] = layer.weights
        result = plus(
            result,
            replace(layer, spacing=result.spacing, start=stride * layer.start, weights=dense),
        )
    return result
