"""The estimator: exact without noise, the optimum with it, and what it promises about bands and
entropy.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import wrightomega

from dpfy.synthetic.estimate import FitSettings, Measurement, combined, fitted, omega, total_of
from dpfy.synthetic.inference import summed

EXACT = FitSettings(entropy=1e-6, band=0.0, sweeps=3000, tolerance=1e-13)


def measured(clique, values, deviation):
    return {clique: Measurement(clique, torch.as_tensor(values, dtype=torch.float64), deviation)}


def test_omega_against_scipy():
    for low, high in ((-40, 40), (-600, 10), (0, 1e5)):
        x = torch.linspace(low, high, 40_001, dtype=torch.float64)
        due = torch.from_numpy(wrightomega(x.numpy()))
        assert torch.allclose(omega(x), due, rtol=1e-12, atol=0)


def test_a_full_clique_without_noise_is_the_empirical_distribution():
    """To 1e-6 in every cell, zeros included, on random tables of up to 2,000 cells."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        sizes = [int(v) for v in rng.integers(2, 13, 3)]
        counts = rng.poisson(rng.lognormal(0, 2, sizes)).astype(float)
        counts.ravel()[0] += 1
        found = fitted(sizes, measured((0, 1, 2), counts, 1e-3), counts.sum(), how=EXACT)
        assert np.abs(found.marginal((0, 1, 2)).numpy() - counts / counts.sum()).max() < 1e-6


def test_consistent_marginals_without_noise_are_met():
    """Iterative proportional fitting: all pairs of five columns of a random table, to 1e-6."""
    rng = np.random.default_rng(1)
    sizes = [3, 4, 2, 3, 2]
    whole = rng.dirichlet(np.full(math.prod(sizes), 0.5)).reshape(sizes) * 1000
    everything = tuple(range(5))
    cliques = list(combinations(range(5), 2))
    held = {}
    for c in cliques:
        held |= measured(c, summed(torch.from_numpy(whole), everything, c), 1e-3)
    found = fitted(sizes, held, 1000.0, how=EXACT)
    for c in cliques:
        assert (found.marginal(c) - held[c].values / 1000).abs().max() < 1e-6


def objective(whole, sizes, held, total, how):
    """What is minimised, written down once more, for a joint distribution."""
    everything, value = tuple(range(len(sizes))), 0.0
    for c, m in held.items():
        shares = m.values / total
        shares = shares - (shares.sum() - 1) / shares.numel()
        deviation = m.deviation / total
        noise = math.sqrt(2 / math.pi) * deviation * shares.numel()
        band = min(1.0, how.band * noise) * deviation if len(c) > 1 else 0.0
        beyond = ((summed(whole, everything, c) - shares).abs() - band).clamp(min=0)
        value = value + (beyond**2).sum() / (2 * how.entropy * m.deviation * deviation)
    return value + (whole * torch.log(whole.clamp(min=1e-300))).sum()


@pytest.mark.parametrize(
    "how",
    [FitSettings(0.05, 0.0, 500, 1e-10), FitSettings(0.05, 5.0, 500, 1e-10)],
    ids=["no band", "band"],
)
def test_the_optimum_against_a_general_solver(how):
    rng = np.random.default_rng(2)
    sizes, total = [3, 4, 2], 200.0
    truth = rng.dirichlet(np.full(24, 0.7)).reshape(sizes) * total
    held = {}
    for c in ((0,), (0, 1), (1, 2), (0, 2)):
        exact = summed(torch.from_numpy(truth), (0, 1, 2), c).numpy()
        held |= measured(c, exact + rng.normal(0, 6.0, exact.shape), 6.0)
    found = fitted(sizes, held, total, how=how)
    whole = found.marginal((0, 1, 2))

    def value(x):
        logits = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        loss = objective(torch.softmax(logits, 0).reshape(sizes), sizes, held, total, how)
        loss.backward()
        return float(loss.detach()), logits.grad.numpy()

    start = np.log(whole.numpy().ravel() + 1e-12)
    best = min(
        minimize(value, x, jac=True, method="L-BFGS-B", options={"maxiter": 500}).fun
        for x in (start, np.zeros(24))
    )
    ours = float(objective(whole, sizes, held, total, how))
    assert ours <= best + 1e-4 * abs(best)


def test_a_band_leaves_cells_where_the_smaller_marginals_put_them():
    """A pair of independent columns under much noise: with the band nearly all potentials of the
    pair are 0.
    """
    rng = np.random.default_rng(3)
    sizes, total, deviation = [30, 30], 10_000.0, 40.0
    shares = [rng.dirichlet(np.full(30, 5.0)) for _ in sizes]
    held = measured((0,), shares[0] * total + rng.normal(0, 5, 30), 5.0) | measured(
        (1,), shares[1] * total + rng.normal(0, 5, 30), 5.0
    )
    held |= measured(
        (0, 1), np.outer(*shares) * total + rng.normal(0, deviation, (30, 30)), deviation
    )
    error = {}
    for band in (0.0, 1.0):
        found = fitted(sizes, held, total, how=FitSettings(band=band))
        error[band] = float(
            (found.marginal((0, 1)) - torch.from_numpy(np.outer(*shares))).abs().sum()
        )
        if band:
            assert float((found.potentials[0, 1] == 0).double().mean()) > 0.5
    assert error[1.0] < 0.7 * error[0.0]


def test_structural_zeros_stay_empty_and_a_start_changes_nothing_but_time():
    rng = np.random.default_rng(4)
    sizes = [4, 5, 3]
    held = measured((0, 1), rng.normal(50, 10, (4, 5)), 10.0) | measured(
        (1, 2), rng.normal(60, 10, (5, 3)), 10.0
    )
    mask = torch.zeros(4, 3, dtype=torch.float64)
    mask[1, 2] = mask[3, 0] = -math.inf
    how = FitSettings(entropy=0.05, sweeps=400, tolerance=1e-10)
    cold = fitted(sizes, held, 1000.0, fixed=[((0, 2), mask)], how=how)
    assert float(cold.marginal((0, 2))[1, 2]) == 0.0
    assert float(cold.marginal((0, 2))[3, 0]) == 0.0
    warm = fitted(sizes, held, 1000.0, fixed=[((0, 2), mask)], start=cold.potentials, how=how)
    assert warm.sweeps < cold.sweeps
    assert torch.allclose(cold.marginal((0, 1, 2)), warm.marginal((0, 1, 2)), atol=1e-8)


def test_measurements_of_one_marginal_are_weighted_by_their_precision():
    a, b = (
        Measurement((0,), torch.tensor([10.0, 20.0]), 1.0),
        Measurement((0,), torch.tensor([20.0, 40.0]), 2.0),
    )
    (one,) = combined([a, b]).values()
    assert one.values.tolist() == pytest.approx([12.0, 24.0])
    assert one.deviation == pytest.approx(math.sqrt(0.8))
    assert total_of([a, b]) == pytest.approx(36.0)
    assert total_of([]) == 1.0
    assert total_of([Measurement((0,), torch.tensor([-50.0, -9.0]), 1.0)]) == 1.0


def test_noise_of_any_size_gives_a_distribution():
    rng = np.random.default_rng(5)
    for deviation in (1e-6, 1.0, 1e3, 1e7):
        held = measured((0, 1), rng.normal(0, deviation, (6, 7)), deviation) | measured(
            (1,), rng.normal(5, deviation, 7), deviation
        )
        found = fitted([6, 7], held, 30.0).marginal((0, 1))
        assert torch.isfinite(found).all()
        assert float(found.sum()) == pytest.approx(1.0)
        assert float(found.min()) >= 0
