"""Composing in layers rounds the way it says, against direct convolution on the finest grid."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfy.accounting.tight.convolution import log_peak
from dpfy.accounting.tight.gaussian_losses import GaussianPair
from dpfy.accounting.tight.lattice import (
    FACTOR,
    Coarsen,
    Layers,
    LossLattice,
    coarsen_down,
    coarsen_layers,
    coarsen_up,
    compose_layers,
    contract,
    flat,
    spread,
)
from dpfy.accounting.tight.losses import LossGrid

ROUNDINGS = [pytest.param(coarsen_up, 1, id="up"), pytest.param(coarsen_down, -1, id="down")]


def _layers(seed: int, tilt: float) -> Layers:
    """A smooth core and two rarer, wider layers."""
    rng = np.random.default_rng(seed)
    result = []
    for k, (mass, half) in enumerate(((0.95, 12), (0.045, 9), (0.005, 7))):
        shape = np.exp(-0.5 * (np.arange(-half, half + 1) / half * 2) ** 2) * rng.uniform(
            0.8, 1.2, 2 * half + 1
        )
        weights = mass * shape / shape.sum()
        result.append(
            LossLattice(
                0.003, 0.01 * FACTOR**k, int(rng.integers(-1, 2)) - half, weights, tilt, 0.1, 0.0
            )
        )
    return tuple(result)


def _stick(lattice: LossLattice, epsilons: np.ndarray) -> np.ndarray:
    """The hockey-stick curve of the measure."""
    x = lattice.positions()
    mass = lattice.weights * np.exp(lattice.log_scale - lattice.tilt * x)
    return np.array([float(np.sum(mass * np.maximum(0.0, -np.expm1(e - x)))) for e in epsilons])


def _direct(one: LossLattice, other: LossLattice) -> LossLattice:
    weights = np.convolve(one.weights, other.weights)
    start, offset, scale = (
        one.start + other.start,
        one.offset + other.offset,
        one.log_scale + other.log_scale,
    )
    return LossLattice(offset, one.spacing, start, weights, one.tilt, scale, 0.0)


@pytest.mark.parametrize("tilt", [0.5, 8.0])
@pytest.mark.parametrize(("coarsen", "sign"), ROUNDINGS)
def test_layered_composition_rounds_one_way_everywhere(
    coarsen: Coarsen, sign: int, tilt: float
) -> None:
    block, rest = _layers(1, tilt), _layers(2, tilt)
    exact = flat(rest)
    for _ in range(3):
        exact = _direct(exact, flat(block))
    epsilons = np.linspace(exact.positions()[0] - 0.1, exact.positions()[-1], 200)
    truth = _stick(exact, epsilons)
    once = compose_layers([(block, 3), (rest, 1)], coarsen, 1e-14, 0.0)
    assert [layer.spacing for layer in once] == pytest.approx([0.01, 0.05, 0.25])
    for layers in (once, coarsen_layers(once, coarsen)):
        lattice = flat(layers)
        doubt = lattice.error * np.exp(lattice.log_scale - tilt * epsilons + log_peak(tilt))
        assert (sign * (_stick(lattice, epsilons) - truth) >= -doubt - 1e-15).all()
        assert lattice.error < 1e-10
        weight = truth * np.exp(tilt * epsilons)
        middle = weight > 0.2 * weight.max()
        assert np.abs(_stick(lattice, epsilons)[middle] / truth[middle] - 1).max() < 0.15


def test_without_rare_layers_it_is_plain_composition() -> None:
    block = _layers(3, 2.0)[:1]
    twice = compose_layers([(block, 2)], coarsen_up, 1e-14, 0.0)
    exact = _direct(block[0], block[0])
    assert len(twice) == 1
    epsilons = np.linspace(-0.2, 0.2, 50)
    assert _stick(twice[0], epsilons) == pytest.approx(_stick(exact, epsilons), abs=1e-12)


@pytest.mark.parametrize(("release", "sign"), [(spread, 1), (contract, -1)])
def test_a_release_in_layers_keeps_its_mass_on_the_right_side(release: object, sign: int) -> None:
    """The layers of a subsampled Gaussian on a tiered grid, against its closed form."""
    from scipy.special import ndtr

    rate, noise = 0.01, 0.8
    loss = GaussianPair(noise, ((1 - rate, 0.0), (rate, 1.0)), ((1.0, 0.0),))
    scale, mean, *_ = loss.log_mgf(1.0)
    grid = LossGrid(mean, 1e-4, 1.0, scale, ((-0.02, 0.05, 5), (-0.05, 0.3, 25), (-0.1, 1.0, 125)))
    layers = release(loss.halves(grid, 1e-14), grid)  # type: ignore[operator]
    assert [layer.spacing for layer in layers] == pytest.approx(
        [1e-4 * FACTOR**k for k in range(len(layers))]
    )
    assert len(layers) == 4
    epsilons = np.linspace(0.0, 2.0, 40)
    cut = noise**2 * np.log((np.expm1(epsilons) + rate) / rate) + 0.5
    truth = (1 - rate - np.exp(epsilons)) * ndtr(-cut / noise) + rate * ndtr(-(cut - 1) / noise)
    found = _stick(flat(layers), epsilons)
    assert (sign * (found - truth) >= -1e-12).all()
    assert math.isclose(float(found[0]), float(truth[0]), rel_tol=1e-3)
