"""Uses of rows of a parameter: joined, they are what the written-out gradients are, and never
longer than their norms say.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.embedding import EmbeddingGradient
from dpfy.gradients.per_example.outer import Direct, Outer
from dpfy.gradients.per_example.shared import (
    MeasuredContribution,
    Sliced,
    combine_uses,
    overlapping,
    rows_of,
)

B, ROWS, COLUMNS = 3, 6, 4
RANGES = [(0, 6), (0, 2), (2, 6), (2, 4), (4, 6), (1, 5)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def use(r: random.Random, parameter: Tensor, start: int, stop: int) -> Contribution:
    """A use of some rows, of one kind or another, measured already or not."""
    count, dtype = stop - start, parameter.dtype
    part: Contribution = Direct(torch.randn(B, count, COLUMNS, dtype=dtype))
    if r.random() < 0.6:
        positions = r.randint(1, 5)
        part = Outer(
            torch.randn(B, positions, count, dtype=dtype),
            torch.randn(B, positions, COLUMNS, dtype=dtype),
        )
    elif count == ROWS and r.random() < 0.5:
        part = EmbeddingGradient(
            torch.randint(0, ROWS, (B, 3)), torch.randn(B, 3, COLUMNS, dtype=dtype), ROWS
        )
    placed = rows_of(part, parameter, start)
    return MeasuredContribution.of(placed) if r.random() < 0.3 else placed


@pytest.mark.parametrize("seed", range(40))
def test_joined_uses_are_what_they_are_written_out(seed: int) -> None:
    r = random.Random(seed)
    torch.manual_seed(seed)
    parameter = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    uses = [use(r, parameter, *r.choice(RANGES)) for _ in range(r.randint(1, 4))]
    written = sum(
        (each.per_example(slice(0, B)).reshape(B, ROWS, COLUMNS) for each in uses),
        start=torch.zeros(()).double(),
    )
    whole, weights = combine_uses(uses), torch.rand(B, dtype=torch.float64)
    norms, rest = whole.measured()
    assert torch.allclose(norms.sum(0), written.square().sum((1, 2)), rtol=1e-9)
    assert bool((norms.sum(0) >= written.square().sum((1, 2)) * (1 - 1e-12)).all())
    expected = (weights[:, None, None] * written).sum(0)
    for part in (whole, rest):
        assert torch.allclose(part.weighted_sum(weights).reshape(ROWS, COLUMNS), expected)
        assert torch.allclose(part.per_example(slice(1, 3)).reshape(2, ROWS, COLUMNS), written[1:3])
        keep = torch.tensor([True, False, True])
        kept = (weights * keep)[:, None, None] * written
        assert torch.allclose(
            part.cleaned(keep).weighted_sum(weights).reshape(ROWS, COLUMNS), kept.sum(0)
        )
        if isinstance(part, Sliced):
            place = torch.full((ROWS, COLUMNS), 7.0, dtype=torch.float64)
            assert torch.allclose(part.sum_into(weights, place), expected)


def test_rows_that_do_not_meet_do_not_overlap() -> None:
    parameter = torch.zeros(ROWS, COLUMNS)
    one, two, three = (
        rows_of(Direct(torch.randn(B, 2, COLUMNS)), parameter, start) for start in (0, 2, 1)
    )
    assert not overlapping([one, two])
    assert overlapping([one, three])
    assert overlapping([one, Direct(torch.randn(B, ROWS, COLUMNS))])
    assert isinstance(combine_uses([one, two]), Sliced)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_nearly_cancels_is_not_longer_than_its_norm(
    overlap: bool, dtype: torch.dtype, device: str
) -> None:
    """Positions in pairs that cancel but for a little, and two uses of the same rows that do:
    rounding is in the norm.
    """
    torch.manual_seed(0)
    positions, width = 64, 32
    parameter = torch.zeros(3 * width, width)
    for gap in (0.0, 1e-6, 1e-3):
        left, right = torch.randn(2, positions, 2 * width), torch.randn(2, positions, width)
        left[:, 1::2], right[:, 1::2] = -left[:, ::2] * (1 - gap), right[:, ::2]
        kv = Outer(left.to(device, dtype), right.to(device, dtype))
        q = Outer(left[..., :width].to(device, dtype).contiguous(), right.to(device, dtype))
        uses = [rows_of(kv, parameter, width), rows_of(q, parameter, 0)]
        if overlap:
            uses.append(rows_of(Outer(-q.left, q.right * (1 - gap)), parameter, 0))
            uses.append(rows_of(Outer(-kv.left * (1 - gap), kv.right), parameter, width))
        norms, rest = combine_uses(uses).measured()
        for i in range(2):
            one = torch.zeros(2, device=device, dtype=torch.float32)
            one[i] = 1.0
            added = rest.weighted_sum(one.to(dtype)).double().square().sum()
            assert float(added) <= float(norms.sum(0)[i])
