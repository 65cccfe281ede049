"""The checksum of tensors: of values, not of places; every change shows."""

from __future__ import annotations

import pytest
import torch

from dpfy.training.integrity.guard import BLOCK, HUGE, LARGE, PARTS, checksum

TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def made(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randn(count, generator=generator) * 50).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 9, LARGE - 1, LARGE, LARGE + 3])
def test_it_depends_on_values_alone(dtype, count):
    whole = made(dtype, count + 5)
    for start in range(5):
        view = whole[start : start + count]
        assert (
            int(checksum([view]))
            == int(checksum([view.clone()]))
            == int(checksum([view.clone().view(-1, 1)]))
        )
    flipped = view.clone()
    flipped[count // 2] = (
        ~flipped[count // 2]
        if dtype is torch.bool
        else flipped[count // 2] + 1
        if count < 9
        else -flipped[count // 2] - 3
    )
    assert int(checksum([flipped])) != int(checksum([view]))


def test_every_single_change_shows():
    tensors = [
        torch.randn(7),
        torch.randn(LARGE + 1),
        torch.randn(3, 5).t(),
        torch.tensor(2.0),
        torch.zeros(0),
    ]
    before = int(checksum(tensors))
    for t in tensors[:4]:
        flat = t if t.dim() == 1 else t.view(-1) if t.is_contiguous() else t.t().view(-1)
        for place in (0, len(flat) // 2, len(flat) - 1):
            kept = flat[place].clone()
            flat[place] = torch.nextafter(kept, torch.tensor(100.0))
            assert int(checksum(tensors)) != before
            flat[place] = -kept
            assert int(checksum(tensors)) != before
            flat[place] = kept
    assert int(checksum(tensors)) == before


def test_signs_and_scale_show():
    values = [torch.randn(100, 64), torch.randn(64)]
    found = {int(checksum([sign * t for t in values])) for sign in (1.0, -1.0, 2.0, 0.5, 0.0)}
    assert len(found) == 5


def test_parts_cover_all_blocks_of_huge_tensors():
    huge = torch.randn(HUGE + 1)[1:]
    seen = set()
    for block in range(PARTS):
        changed = huge.clone()
        changed[block * BLOCK + 7] += 1
        seen |= {
            (block, part)
            for part in range(PARTS)
            if int(checksum([changed], part)) != int(checksum([huge], part))
        }
    assert seen == {(block, block) for block in range(PARTS)}
    assert int(checksum([changed], PARTS + 1)) == int(checksum([changed], 1))


def test_nothing_has_a_checksum():
    assert int(checksum([])) == int(checksum([torch.zeros(0)])) == 0
