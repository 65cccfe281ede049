"""Faults of other libraries' accounting, as tests on dpfy: it is right, or it refuses in one clear
line.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

import dpfy
from dpfy import accounting
from dpfy.core import events as ev
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency
from dpfy.mechanisms import choice
from dpfy.runs.run import Run

REPLACE, ADD = Adjacency.REPLACE_ONE, Adjacency.ADD_OR_REMOVE_ONE


def gaussian_delta(distance: float, epsilon: float) -> float:
    """delta of telling N(0, 1) from N(distance, 1), exactly (Balle & Wang 2018)."""
    return float(
        norm.cdf(distance / 2 - epsilon / distance)
        - math.exp(epsilon + norm.logcdf(-distance / 2 - epsilon / distance))
    )


@pytest.mark.parametrize("accountant", ["tight", "rdp", "zcdp", "gdp", "advanced"])
@pytest.mark.parametrize("adjacency", [REPLACE, "replace-one"])
@pytest.mark.parametrize("sigma", [0.7, 2.0, 9.0])
@pytest.mark.parametrize("steps", [1, 40])
def test_a_replaced_unit_moves_the_sum_by_two_bounds(accountant, adjacency, sigma, steps):
    """dp-accounting #378: Rényi divergences under replace-one are a quarter of the truth, because
    the sensitivity is not doubled.

    The name of an adjacency means the same as the adjacency.
    """
    event = ev.Repeated(ev.Gaussian(sigma), steps)
    try:
        found = accounting.curve(event, adjacency=adjacency, accountant=accountant)
        epsilon = found.epsilon(1e-5)
    except DpfyError:
        assert accountant == "advanced"  # a single rough bound: it may refuse, never under-report
        return
    assert gaussian_delta(2 * math.sqrt(steps) / sigma, epsilon) <= 1e-5 * (1 + 1e-6)
    assert epsilon >= accounting.epsilon(event, 1e-5, adjacency=ADD, accountant=accountant)


# arXiv 2605.15648, opacus #819 and #571: the noisy sum is divided by the number of records, so the
# released mean tells it


def released(count: int, batch: float, seed: int = 4) -> torch.Tensor:
    """The first update of a model whose gradients are all zero: noise over the divisor, and nothing
    else of the data.
    """
    x = torch.zeros(count, 3)
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = dpfy.dpsgd(1000, batch, steps=1).with_noise(1.0, delta=1e-5)
    with tempfile.TemporaryDirectory() as place:
        run = Run(Path(place) / "run", seed=seed)
        with dpfy.PrivateTraining(model, optimizer, (x,), plan, run) as training:
            for (inputs,) in training.batches():
                training.step((model(inputs) * 0).sum(1))
            training.finish()
    return model.weight.detach().clone()


def test_the_divisor_does_not_follow_the_number_of_records():
    """The same noise over the public batch size, whatever the data holds: 991 records, 1,000 or
    1,009.
    """
    whole = released(1000, 200)
    assert float(whole.norm()) > 0
    assert torch.equal(whole, released(991, 200))
    assert torch.equal(whole, released(1009, 200))
    with pytest.raises(InvalidInput, match="the plan was made for"):
        released(1100, 200)


def test_the_divisor_does_not_follow_the_batch_that_was_drawn():
    """A record or so on average, or none: an empty batch is a step like any other."""
    sparse = released(1000, 1.0)
    assert all(torch.equal(sparse, released(count, 1.0)) for count in (995, 1005))
    torch.testing.assert_close(
        sparse / 200, released(1000, 200.0), rtol=1e-5, atol=0.0
    )  # noise 1 over 1 and over 200


# jax_privacy #234 and #288: steps are counted in micro-batches


@pytest.mark.parametrize("physical", [1, 7, 64, 500])
def test_pieces_of_a_batch_are_not_steps(physical):
    """However a batch is cut for memory, the ledger holds the plan's steps, and the run makes
    them.
    """
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(3, 2)
    plan = dpfy.dpsgd(300, 60, steps=4).with_noise(1.0, delta=1e-4)
    with tempfile.TemporaryDirectory() as place:
        found = dpfy.fit(
            model, (x, (x[:, 0] > 0).long()), plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            run=Run(Path(place) / "run", seed=1), runtime=dpfy.Runtime(max_physical_batch=physical),
        )  # fmt: skip
        assert found.steps == 4
        assert list(ev.flatten(Ledger.read(Path(place) / "run" / "ledger.jsonl").event())) == list(
            ev.flatten(plan.event)
        )
    assert found.epsilon == plan.epsilon
    assert plan.event == ev.Repeated(ev.PoissonSampled(0.2, ev.Gaussian(1.0)), 4)


# OpenDP #2911: permute-and-flip is billed as if its losses had a bounded range, and spends up to
# four times the zCDP


def flip_chances(scores: list[int], epsilon: float) -> list[float]:
    """The exact law of permute-and-flip for scores that one unit changes by one, by all orders of
    the candidates.
    """
    best = max(scores)
    heads = [math.exp(epsilon * (score - best) / 2) for score in scores]
    found = [0.0] * len(scores)
    for order in itertools.permutations(range(len(scores))):
        left = 1 / math.factorial(len(scores))
        for k in order:
            found[k] += left * heads[k]
            left *= 1 - heads[k]
    return found


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("mechanism", ["permute-and-flip", "laplace", "exponential noise"])
def test_permute_and_flip_and_noisy_max_are_not_billed_as_bounded_range(mechanism, epsilon):
    """Their losses reach epsilon on both sides. What is billed covers the exact law, once and many
    times over.
    """
    made = {
        "permute-and-flip": choice.PermuteAndFlip(epsilon),
        "laplace": choice.NoisyMax(epsilon, noise="laplace"),
        "exponential noise": choice.NoisyMax(epsilon),
    }[mechanism]
    assert made.event == ev.EpsilonDelta(epsilon)
    divergence = 0.0
    for scores, other in (
        ([0, 0, 0], [1, 0, 1]),
        ([3, 0], [2, 1]),
        ([2, 2, 2, 2], [3, 1, 1, 1]),
        ([0, 5], [1, 4]),
    ):
        p, q = (np.array(flip_chances(side, epsilon)) for side in (scores, other))
        assert np.abs(np.log(p / q)).max() <= epsilon * (1 + 1e-9)
        divergence = max(
            divergence, float((p * np.log(p / q)).sum()), float((q * np.log(q / p)).sum())
        )
        for times in (1, 4):
            curve = accounting.curve(ev.Repeated(made.event, times))
            for at in (0.0, 0.2 * epsilon, epsilon):
                assert exceeded(p, q, times, at) <= curve.delta(at) * (1 + 1e-6) + 1e-12
    rho = accounting.epsilon(ev.Repeated(made.event, 20), 1e-5, accountant="zcdp")
    assert rho >= accounting.epsilon(ev.Repeated(ev.Zcdp(divergence), 20), 1e-5, accountant="zcdp")


def exceeded(p: np.ndarray, q: np.ndarray, times: int, epsilon: float) -> float:
    """The exact hockey-stick divergence of so many independent choices, the worse direction."""
    a, b = p, q
    for _ in range(times - 1):
        a, b = np.outer(a, p).ravel(), np.outer(b, q).ravel()
    return max(
        np.maximum(a - math.exp(epsilon) * b, 0).sum(),
        np.maximum(b - math.exp(epsilon) * a, 0).sum(),
    )


def test_a_bounded_range_bill_is_smaller_and_is_the_exponential_mechanisms():
    """What the fault would have saved: gumbel noise and the exponential mechanism alone may be
    billed so.
    """
    assert (
        choice.Exponential(1.0).event
        == choice.NoisyMax(1.0, noise="gumbel").event
        == ev.BoundedRange(1.0)
    )
    small, large = (
        accounting.epsilon(ev.Repeated(one, 50), 1e-6)
        for one in (ev.BoundedRange(1.0), ev.EpsilonDelta(1.0))
    )
    assert small < 0.75 * large


@pytest.mark.parametrize("adjacency", Adjacency)
@pytest.mark.parametrize(
    "event",
    [
        ev.Repeated(ev.PoissonSampled(0.1, ev.Gaussian(1.0)), 5),
        ev.SampledWithoutReplacement(100, 10, ev.Gaussian(2.0)),
        ev.TruncatedPoissonGaussian(100, 0.1, 12, 2.0),
        ev.RandomizedResponse(0.5, 3),
        ev.Laplace(2.0),
    ],
)
def test_the_name_of_an_adjacency_means_the_adjacency(event, adjacency):
    """A program may say "replace-one": the same figure, or the same refusal, as with the value of
    that name.
    """

    def answer(given):
        try:
            found = accounting.guarantee(event, adjacency=given)
            return (
                found.epsilon(1e-5),
                found.adjacency,
                accounting.epsilon(event, 1e-5, adjacency=given),
            )
        except DpfyError as error:
            return str(error), accounting.why_not(event, 1e-5, adjacency=given)

    assert answer(adjacency.value) == answer(adjacency)
