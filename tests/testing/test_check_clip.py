"""The contract suite of clip rules catches wrong ones, and all of ours pass it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from dpfy.core.values import Bound
from dpfy.gradients.clip import (
    CLIPS,
    AutomaticClip,
    Clip,
    FlatClip,
    GroupClip,
    MicrobatchClip,
    PerLayerClip,
    PsacClip,
    QuantileClip,
)
from dpfy.testing import ContractBroken, check_clip

OURS = {
    "flat": [FlatClip(norm) for norm in (1.0, 0.7, 1e-9, 1e6, math.inf)],
    "per-layer": [PerLayerClip(0.7), PerLayerClip(math.inf)],
    "per-group": [GroupClip(("head", ""), (0.3, 1.1)), GroupClip(("",), (2.0,))],
    "automatic": [AutomaticClip(0.7), AutomaticClip(3.0, 1e-4)],
    "psac": [PsacClip(0.7), PsacClip(3.0, 1e-4)],
    "quantile": [QuantileClip(0.7), QuantileClip(2.0, 0.9, 0.5, 1.0)],
    "microbatch": [MicrobatchClip(0.3, 2)],
}


def test_every_clip_rule_of_ours_has_settings():
    assert set(OURS) == set(CLIPS)
    assert all(type(c) is CLIPS[name] for name, held in OURS.items() for c in held)


@pytest.mark.parametrize("name", CLIPS)
def test_ours_keep_the_contract(name):
    for clip in OURS[name]:
        check_clip(clip)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
def test_ours_keep_the_contract_thoroughly(name):
    for clip in OURS[name]:
        check_clip(clip, seed=3, thorough=True)


@dataclass(frozen=True)
class Halves(Clip):
    """Every gradient to at most half of the bound: a rule without any help of ours."""

    norm: float

    @property
    def bound(self):
        return Bound(l2=self.norm)

    def scale(self, squared_norms):
        lengths = squared_norms.sqrt()
        scale = (self.norm / 2 / lengths).clamp(max=1.0) / math.sqrt(len(squared_norms))
        return scale.masked_fill(~squared_norms.isfinite(), 0.0)


@dataclass(frozen=True)
class Plain(Halves):
    """min(1, norm / length) without a margin for rounding."""

    def scale(self, squared_norms):
        scale = (self.norm / squared_norms.sqrt()).clamp(max=1.0)
        return scale.masked_fill(~squared_norms.isfinite(), 0.0)


class ByPower(Plain):
    """The margin is smaller than what single precision loses."""

    def scale(self, squared_norms):
        return super().scale(squared_norms) * (1 - 1e-9)


class NoZero(Halves):
    """A gradient that is not finite keeps a multiplier."""

    def scale(self, squared_norms):
        return super().scale(squared_norms.nan_to_num(nan=1.0))


class NanStaysNan(Halves):
    def scale(self, squared_norms):
        return (self.norm / 2 / squared_norms.sqrt()).clamp(max=1.0)


class OneGroupOnly(Halves):
    """Right for one group, too long for several."""

    def groups(self, names):
        return list(range(len(names)))

    def scale(self, squared_norms):
        return super().scale(squared_norms) * math.sqrt(len(squared_norms)) * 2 * (1 - 1e-6)


class ByTheMean(Halves):
    """The clipping norm follows the other gradients of the batch."""

    def scale(self, squared_norms):
        found = super().scale(squared_norms)
        usual = squared_norms.nan_to_num(0.0, 0.0).mean() if squared_norms.numel() else 0.0
        return found / (1 + usual)


class LastRowLeftOut(Halves):
    """Odd batches lose their last multiplier."""

    def scale(self, squared_norms):
        found = super().scale(squared_norms)
        return found[:, : len(found[0]) // 2 * 2] if found.shape[1] % 2 else found


class LongInLargeBatches(Halves):
    """In batches of more than 64 the rule forgets to clip the rest."""

    def scale(self, squared_norms):
        found = super().scale(squared_norms)
        found[:, 64:] = 1.0
        return found


class Writes(Halves):
    def scale(self, squared_norms):
        return super().scale(squared_norms.sqrt_().square_().add_(1e-3))


class Doubles(Halves):
    """Multipliers in another type than the norms."""

    def scale(self, squared_norms):
        return super().scale(squared_norms).double()


class Negative(Halves):
    def scale(self, squared_norms):
        return -super().scale(squared_norms)


class GapInGroups(Halves):
    def groups(self, names):
        return [-1 for _ in names]


@dataclass(frozen=True)
class CountBeside(QuantileClip):
    """The coordinate is not covered by the bound."""

    @property
    def bound(self):
        return Bound(l2=self.norm)


class CountsSilent(QuantileClip):
    """Units that were left out are counted."""

    def beside(self, scale):
        return {name: self.count(scale).sum() for name in self.coordinates}


class CountsTheBatch(QuantileClip):
    """The coordinate is a mean over the batch, not a sum over units."""

    def beside(self, scale):
        return {
            name: value / max(scale.shape[1], 1) for name, value in super().beside(scale).items()
        }


class Unnamed(QuantileClip):
    coordinates: ClassVar[tuple[str, ...]] = ("another",)


class GrowsAfterwards(QuantileClip):
    """The next rule has a longer norm and the same bound."""

    def after(self, released, expected_batch):
        return Longer(self.norm)


@dataclass(frozen=True)
class Longer(Plain):
    coordinates: ClassVar[tuple[str, ...]] = QuantileClip.coordinates

    def scale(self, squared_norms):
        return super().scale(squared_norms) * 2

    def beside(self, scale):
        return {name: torch.zeros(()) for name in self.coordinates}


class RandomAfterwards(QuantileClip):
    def after(self, released, expected_batch):
        return replace(self, norm=float(torch.rand(())) + 0.1)


@dataclass
class Thawed:
    norm: float = 1.0


WRONG = [
    (Plain(1.1), "exactly"),
    (ByPower(0.7), "exactly"),
    (NoZero(1.0), "NaN or infinite"),
    (NanStaysNan(1.0), "NaN or infinite|finite and not negative"),
    (OneGroupOnly(1.0), "exactly"),
    (ByTheMean(1.0), "depends on that unit's norms alone"),
    (LastRowLeftOut(1.0), "groups, batch"),
    (LongInLargeBatches(0.5), "exactly"),
    (Writes(1.0), "leaves its input"),
    (Doubles(1.0), "groups, batch"),
    (Negative(1.0), "not negative"),
    (GapInGroups(1.0), "numbered from 0"),
    (CountBeside(0.7), "exactly"),
    (CountsSilent(0.7), "adds nothing"),
    (CountsTheBatch(0.7), "sum over units"),
    (Unnamed(0.7), "coordinates"),
    (GrowsAfterwards(0.7), "exactly"),
    (RandomAfterwards(0.7), "`after` gives"),
    (Thawed(), "frozen"),
]


@pytest.mark.parametrize(("clip", "property"), WRONG, ids=[type(c).__name__ for c, _ in WRONG])
def test_wrong_clip_rules_are_caught(clip, property):
    with pytest.raises(ContractBroken, match=property) as caught:
        check_clip(clip)
    assert type(clip).__name__ in caught.value.setting or "Longer" in caught.value.setting


def test_the_obvious_rule_passes():
    check_clip(Halves(1.0))
