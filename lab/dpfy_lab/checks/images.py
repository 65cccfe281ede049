"""Checks of synthetic images, by record and replay: nothing but noisy sums tells two sets of
pictures apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.accounting.filters import squares
from dpfy.runs.run import Run
from dpfy_lab.checks.published import in_folder
from dpfy_lab.checks.replayed import faults
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.selftest.patch import patching
from dpfy_lab.synthetic_images import run
from dpfy_lab.synthetic_images.source import ImageSchema

Pictures = tuple[NDArray[np.uint8], NDArray[np.int64]]
SCHEMA, TERMS = ImageSchema(6, 6, 2), run.ImageSettings(50.0, 1e-4)
OPTIONS = run.ImageOptions(clusters=2, frequencies=4, rounds=2)
SEED = 23


def synthesized(data: Pictures) -> dict[str, bytes]:
    """All that is published of images made from these pictures."""

    def make(place: Run) -> object:
        return run.synthesize_images(data, terms=TERMS, run=place, schema=SCHEMA, options=OPTIONS)

    return in_folder(make, SEED)


def pictures(count: int, seed: int, brightest: int) -> Pictures:
    """Random ones, of two classes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, brightest, (count, 6, 6)).astype(np.uint8), np.arange(count) % 2


def _with(data: Pictures, shade: int, label: int) -> Pictures:
    one = np.full((1, 6, 6), shade, np.uint8)
    return np.concatenate([data[0], one]), np.append(data[1], label)


def pairs() -> Iterator[tuple[str, Pictures, Pictures, bool]]:
    """Two data sets each: with one picture more, all white or all black, and with other pictures."""
    some = pictures(30, 0, 120)
    yield "one white picture", some, _with(some, 255, 0), False
    yield "one black picture", some, _with(some, 0, 1), False
    yield "other pictures", some, pictures(17, 1, 255), True


@check("synthetic images")
def REPLAYED() -> Found:
    """With the same noisy sums the same images are published, whatever the pictures are."""
    return faults(synthesized, pairs())


@check("image charges")
def BILLED() -> Found:
    """All sums together are within the claim, by the noise that each of them had."""
    spent, claimed = [], run.plan(SCHEMA, TERMS, OPTIONS).claim.noise_multiplier

    def release(real: Any, self: Any, *given: Any) -> Any:
        spent.append(squares(self.noise_multiplier))
        return real(self, *given)

    with patching() as patch:
        patch.around("dpfy.mechanisms.additive.Additive.release", release)
        synthesized(next(pairs())[1])
    share = float(sum(spent) / squares(claimed))
    return None if share <= 1 else f"sums take {share:.2f} times what is claimed"


CHECKS = (REPLAYED, BILLED)
