"""The benchmarks of the step and of the noise run: figures that nobody can measure again are worth nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.mark.parametrize("kind", ["plain", "dpfy", "dpfy without noise"])
def test_the_step_of_the_benchmark(kind: str) -> None:
    import step

    case = step.Case(lambda: step.perceptron(4, 4), step.images(4, 4, kinds=4), step.classes)
    model, batch = step.fresh(case, "cpu", torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    step.STEPS[kind](model, case)(*batch)
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_noise_of_the_benchmark() -> None:
    import noise

    total = {"a": torch.zeros(10)}
    noise.shipped(noise.STRATEGIES["independent"], total)(0)
    assert total["a"].all()


def test_the_exact_noise_of_the_benchmark() -> None:
    from fractions import Fraction

    import exact_noise

    row = exact_noise.measure("gaussian", Fraction(3), 100, 10)
    assert row["million_a_second"] > 0
