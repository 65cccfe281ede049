"""DP-GAN pairs records with generated rows by their places: what the coupling argument of
`dpfy_lab.gans.gan` needs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from dpfy.core.randomness import Randomness
from dpfy_lab.gans.tables import (
    Discriminator,
    GeneratorTrainer,
    TableGenerator,
    one_hot,
    seeded,
)

SIZES = (4, 3, 6)


class Given:
    """A generator of random numbers that gives back numbers drawn before, so that rows can be moved
    about.
    """

    def __init__(self, normal: np.ndarray, exponential: np.ndarray) -> None:
        self.normal, self.exponential = normal, exponential

    def standard_normal(self, shape, dtype):
        assert self.normal.shape == shape
        return self.normal.astype(dtype)

    def standard_exponential(self, shape, dtype):
        assert self.exponential.shape == shape
        return self.exponential.astype(dtype)


def drawn(rng: np.random.Generator, count: int) -> Given:
    from dpfy_lab.gans.tables import LATENT

    return Given(
        rng.standard_normal((count, LATENT)), rng.standard_exponential((count, sum(SIZES)))
    )


@pytest.mark.parametrize("seed", range(10))
@torch.no_grad()
def test_a_generated_row_depends_on_its_own_numbers_alone(seed):
    """Others may be moved, changed or left out."""
    rng = np.random.default_rng(seed)
    with seeded(Randomness.for_tests(seed), "generator"):
        generator = TableGenerator(SIZES)
    whole = drawn(rng, 9)
    rows = generator(whole, 9)
    order = rng.permutation(9)[: int(rng.integers(1, 9))]
    some = generator(Given(whole.normal[order], whole.exponential[order]), len(order))
    torch.testing.assert_close(some, rows[order], rtol=1e-4, atol=1e-5)
    other = drawn(rng, 9)
    other.normal[3], other.exponential[3] = whole.normal[3], whole.exponential[3]
    torch.testing.assert_close(generator(other, 9)[3], rows[3], rtol=1e-4, atol=1e-5)


def clipped_sum(
    critic: Discriminator, records: torch.Tensor, fakes: torch.Tensor, clip: float
) -> torch.Tensor:
    """The sum of clipped gradients of the pairs."""
    total = torch.zeros(sum(p.numel() for p in critic.parameters()))
    for real, fake in zip(records, fakes, strict=True):
        scores = critic(torch.stack([real, fake])[None])
        loss = (functional.softplus(-scores[:, 0]) + functional.softplus(scores[:, 1])).sum()
        own = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(critic.parameters()))])
        total += own * min(1.0, clip / float(own.norm()))
    return total


@pytest.mark.parametrize("seed", range(6))
def test_coupled_worlds_differ_by_one_clipped_gradient_wherever_the_record_lies(seed):
    rng, clip = np.random.default_rng(seed), 0.3
    torch.manual_seed(seed)
    critic = Discriminator(sum(SIZES))
    maker = GeneratorTrainer.fresh(SIZES, Randomness.for_tests(seed))
    codes = torch.from_numpy(np.stack([rng.integers(0, size, 7) for size in SIZES], axis=1))
    records, fakes = one_hot(codes, SIZES), maker.fakes("critic 0", seed, 7)
    place = int(rng.integers(0, 7))
    others = [k for k in range(7) if k != place]
    more, fewer = (
        clipped_sum(critic, records[at], fakes[at], clip) for at in (list(range(7)), others)
    )
    assert float((more - fewer).norm()) <= clip * (
        1 + 1e-5
    )  # the record that is in one world only, with its own partner


def test_partners_are_drawn_anew_at_every_step_and_are_nobodys_but_the_runs():
    maker = GeneratorTrainer.fresh(SIZES, Randomness.for_tests(1))
    one, again, later = (maker.fakes("critic 0", step, 5) for step in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, later)
    assert not torch.equal(one, maker.fakes("critic 1", 0, 5))
    assert not torch.equal(
        one, GeneratorTrainer.fresh(SIZES, Randomness.for_tests(2)).fakes("critic 0", 0, 5)
    )
