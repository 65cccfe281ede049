"""Released means become gradients: rounded once, to the nearest, in the parameter's type and place in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpfy.core.values import Private
from dpfy.training.update import hand_over


def handed(parameters: dict[str, nn.Parameter], means: dict[str, Tensor]) -> dict[str, Tensor]:
    hand_over(Private(means), parameters)
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert list(found) == list(means)
    return found


def test_a_mean_of_the_parameters_type_is_handed_on_as_it_is() -> None:
    means = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    found = handed({name: nn.Parameter(torch.zeros_like(m)) for name, m in means.items()}, means)
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
        assert torch.equal(found[name], mean.to(dtype))
        assert torch.equal(mean, kept[name])


def test_types_may_differ_and_the_order_in_memory_is_kept() -> None:
    torch.manual_seed(0)
    filters = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    parameters = {"a": nn.Parameter(filters.bfloat16()), "b": nn.Parameter(torch.zeros(4)), "rest": nn.Parameter(torch.zeros(1))}
    means = {"a": torch.randn(4, 3, 2, 2), "b": torch.randn(4)}
    found = handed(parameters, means)
    assert found["a"].stride() == parameters["a"].stride()
    assert torch.equal(found["a"], means["a"].bfloat16())
    assert torch.equal(found["b"], means["b"])


def test_what_was_handed_over_before_is_not_overwritten() -> None:
    parameters = {"a": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))}
    first = handed(parameters, {"a": torch.ones(3)})["a"]
    second = handed(parameters, {"a": torch.full((3,), 2.0)})["a"]
    assert torch.equal(first, torch.ones_like(first))
    assert torch.equal(second, torch.full_like(second, 2.0))
