"""Clip rules: multipliers, bounds and the rounding that keeps them."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput
from dpfy.gradients.clip import CLIPS, FlatClip


def test_short_gradients_pass_and_long_ones_are_cut() -> None:
    scale = FlatClip(2.0).scale(torch.tensor([[0.0, 1.0, 3.9, 16.0, 1e30]], dtype=torch.float64))
    assert torch.allclose(scale, torch.tensor([[1.0, 1.0, 1.0, 0.5, 2e-15]], dtype=torch.float64), rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_multiplier_is_rounded_down(dtype: torch.dtype) -> None:
    squared = torch.rand(1, 10_000, dtype=dtype) * 100
    scale = FlatClip(1.5).scale(squared).double()
    assert bool((scale * squared.double().sqrt() <= 1.5).all())


def test_not_finite_means_zero() -> None:
    bad = torch.tensor([[math.nan, math.inf, 4.0]])
    assert FlatClip(1.0).scale(bad)[0, :2].tolist() == [0.0, 0.0]
    assert FlatClip(math.inf).scale(bad)[0].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("norm", [0, -1, math.nan, "1", True, 1e-13])
def test_bad_norms_are_refused_by_name(norm: object) -> None:
    with pytest.raises(InvalidInput, match="clip_norm"):
        FlatClip(norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", [FlatClip(0.3), FlatClip(math.inf)])
def test_json_and_back(clip: object) -> None:
    codec = Codec("clip", CLIPS)
    assert codec.decode(codec.encode(clip)) == clip


def test_clip_module_imports_no_torch() -> None:
    code = "import sys, dpfy.gradients.clip; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
