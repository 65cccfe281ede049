"""Released means become gradients: rounded once, to the nearest, in the parameter's type and place
in memory.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.noise.strategy import Identity, Strategy
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import Banded
from dpfy.training.step import hand_over, rounded

RANDOMNESS = Randomness.for_tests(3)


def handed(
    parameters: dict[str, nn.Parameter], means: dict[str, Tensor], in_place: bool = False
) -> dict[str, Tensor]:
    """What the parameters receive of sums without noise."""
    stream = NoiseStream(Identity(), 0.0, RANDOMNESS, in_place=in_place)
    total = Bounded(means, Bound(math.inf))
    released, _ = stream.release(
        total, 0, {}, mock_permit(stream.event, 10), rounded(means, parameters)
    )
    hand_over(released, parameters)
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert list(found) == list(means)
    return found


def test_a_mean_of_the_parameters_type_is_handed_on_as_it_is() -> None:
    means = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    found = handed(
        {name: nn.Parameter(torch.zeros_like(m)) for name, m in means.items()}, means, in_place=True
    )
    assert all(found[name].data_ptr() == mean.data_ptr() for name, mean in means.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_mean_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    means = {"a": torch.randn(3, 2), "b": torch.randn(5), "c": torch.randn(())}
    parameters = {name: nn.Parameter(torch.zeros_like(m, dtype=dtype)) for name, m in means.items()}
    kept = {name: m.clone() for name, m in means.items()}
    found = handed(parameters, means)
    for name, mean in means.items():
        assert found[name].dtype == dtype
        assert not found[name].requires_grad
        assert torch.equal(found[name], mean.to(dtype))
        assert torch.equal(mean, kept[name])


def test_types_may_differ_and_the_order_in_memory_is_kept() -> None:
    torch.manual_seed(0)
    filters = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    parameters = {
        "a": nn.Parameter(filters.bfloat16()),
        "b": nn.Parameter(torch.zeros(4)),
        "rest": nn.Parameter(torch.zeros(1)),
    }
    means = {"a": torch.randn(4, 3, 2, 2), "b": torch.randn(4)}
    found = handed(parameters, means)
    assert found["a"].stride() == parameters["a"].stride()
    assert torch.equal(found["a"], means["a"].bfloat16())
    assert torch.equal(found["b"], means["b"])


def test_noise_of_a_wider_type_than_some_parameters_is_rounded_for_them() -> None:
    """One float64 parameter makes all noise float64."""
    parameters = {
        "a": nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        "b": nn.Parameter(torch.zeros(4)),
    }
    means = {"a": torch.randn(3, dtype=torch.float64), "b": torch.randn(4)}
    found = handed(parameters, means)
    assert torch.equal(found["a"], means["a"])
    assert torch.equal(found["b"], means["b"])


def test_what_was_handed_over_before_is_not_overwritten() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))}
    first = handed(parameters, {"a": torch.ones(3)})["a"]
    second = handed(parameters, {"a": torch.full((3,), 2.0)})["a"]
    assert torch.equal(first, torch.ones_like(first))
    assert torch.equal(second, torch.full_like(second, 2.0))


@pytest.mark.parametrize(
    "strategy", [Identity(), Banded((1.0, 0.7))], ids=["independent", "banded"]
)
def test_noise_is_added_before_rounding(strategy: Strategy) -> None:
    """Sums far below the last digit of what is handed over still count: the wide noisy mean is what
    is rounded, once.
    """
    torch.manual_seed(0)
    stream = NoiseStream(strategy, 1.0, RANDOMNESS, divisor=7.0)
    parameters = {
        "a": nn.Parameter(torch.zeros(40, 50, dtype=torch.bfloat16)),
        "b": nn.Parameter(torch.zeros(9, dtype=torch.bfloat16)),
    }
    state = again = stream.init({name: torch.zeros(p.shape) for name, p in parameters.items()})
    for step in range(3):
        total = Bounded({name: torch.randn(p.shape) for name, p in parameters.items()}, Bound(1.0))
        wide, state = stream.release(
            total, step, {n: t.clone() for n, t in state.items()}, mock_permit(stream.event, 10)
        )
        narrow, again = stream.release(
            total,
            step,
            {n: t.clone() for n, t in again.items()},
            mock_permit(stream.event, 10),
            rounded(total.value, parameters),
        )
        assert all(narrow.value[name].dtype is torch.bfloat16 for name in parameters)
        assert all(
            torch.equal(narrow.value[name], wide.value[name].bfloat16()) for name in parameters
        )


@pytest.mark.parametrize(
    "into",
    [
        {"a": (3,)},
        {"a": (3,), "b": (5,)},
        {"a": (3,), "b": (4,), "c": (1,)},
        {"a": (3,), "b": (2, 2)},
    ],
    ids=str,
)
def test_places_of_other_names_or_shapes_are_refused_before_anything_is_changed(
    into: dict[str, tuple[int, ...]],
) -> None:
    sums = {"a": torch.ones(3), "b": torch.ones(4)}
    places = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in into.items()}
    stream = NoiseStream(Identity(), 1.0, RANDOMNESS, in_place=True)
    with pytest.raises(InvalidInput, match=r"^into: got"):
        stream.release(Bounded(sums, Bound(1.0)), 0, {}, mock_permit(stream.event, 10), places)
    assert all(bool((t == 1).all()) for t in sums.values())
    assert not any(t.any() for t in places.values())
