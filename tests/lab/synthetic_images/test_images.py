"""Synthetic images: what a picture adds is bounded and made of itself alone; noise is as stated;
the model has the moments it was given.
"""

from __future__ import annotations

import math
import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest

from dpfy.accounting import gaussian
from dpfy.accounting.filters import squares
from dpfy.core import events
from dpfy.core.errors import BudgetExceeded, DpfyError, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import mock_permit
from dpfy_lab import replay
from dpfy_lab.synthetic_images import mixture, stages
from dpfy_lab.synthetic_images.claim import ImageSynthesis
from dpfy_lab.synthetic_images.encoding import Encoding
from dpfy_lab.synthetic_images.releases import BoundedSums, ImageReleases
from dpfy_lab.synthetic_images.run import ImageOptions, ImageSettings, drawn, measured, plan
from dpfy_lab.synthetic_images.sheet import sheet
from dpfy_lab.synthetic_images.source import ImageSchema, read
from dpfy_lab.synthetic_images.stages import Pictures

SMALL = ImageSchema(6, 5, 3)


def metered(claim, seed=1):
    return ImageReleases(
        claim,
        mock_permit(claim.event, claim.releases, claim.name, claim.adjacency),
        Randomness.for_tests(seed),
    )


def random_pictures(rng, count, schema=SMALL):
    shape = (count, schema.height, schema.width)
    return Pictures(
        rng.integers(0, 256, shape).astype(np.uint8), rng.integers(0, schema.classes, count)
    )


def test_a_vector_is_made_of_its_picture_alone():
    """Bit for bit, wherever it lies and whatever lies beside it."""
    rng = np.random.default_rng(0)
    for height, width in ((28, 28), (8, 8), (5, 17)):
        encoding = Encoding(height, width)
        held = rng.integers(0, 256, (70, height, width)).astype(np.uint8)
        whole = encoding.vectors(held)
        assert whole.shape == (70, encoding.size)
        for part in ([3], [69, 0, 12], list(range(1, 70))):
            assert (encoding.vectors(held[part]) == whole[part]).all()


def test_cosines_keep_lengths_and_lead_back():
    encoding = Encoding(8, 6, frequencies=32)
    assert encoding.size == 36
    rng = np.random.default_rng(1)
    held = rng.integers(0, 256, (20, 8, 6)).astype(np.uint8)
    vectors = encoding.vectors(held)
    assert (
        np.linalg.norm(vectors, axis=1)
        <= np.linalg.norm(held.reshape(20, -1) / 255, axis=1) * 1.001
    ).all()
    smooth = encoding.pictures(vectors)
    again = encoding.vectors(np.rint(np.clip(smooth, 0, 1) * 255).astype(np.uint8))
    assert np.abs(again - vectors).max() < 0.5
    flat = np.full((1, 8, 6), 51, np.uint8)
    assert encoding.pictures(encoding.vectors(flat)) == pytest.approx(0.2, abs=1e-3)


def test_the_length_of_bounded_vectors_is_billed_with_their_rounding():
    rng = np.random.default_rng(2)
    for size in (1, 7, 144):
        held = rng.standard_normal((200, size)) * 10.0 ** rng.integers(-8, 9, (200, 1))
        lengths = np.linalg.norm(stages.bounded(held), axis=1)
        assert (lengths <= stages.longest(size)).all()
        if size == 144:
            assert (lengths > 1).any()


def test_packed_products_have_the_norm_of_the_matrix():
    rng = np.random.default_rng(3)
    held = rng.standard_normal((4, 9, 9))
    held = held + held.transpose(0, 2, 1)
    assert np.linalg.norm(stages.packed(held), axis=1) == pytest.approx(
        np.linalg.norm(held, axis=(1, 2))
    )
    assert stages.unpacked(stages.packed(held)) == pytest.approx(held)


@pytest.mark.parametrize("trial", range(8))
def test_nothing_but_noise_tells_pictures_apart(trial):
    """Record and replay on random neighbours: any picture, any label, few or many clusters; down to
    no picture at all.
    """
    rng = np.random.default_rng(trial)
    epsilon = 200.0 if trial % 2 else float(rng.lognormal(1, 1))  # with little noise, counts matter
    made = plan(
        SMALL,
        ImageSettings(epsilon, 1e-5),
        ImageOptions(40, int(rng.integers(1, 4)), 5, int(rng.integers(1, 4))),
    )
    some = random_pictures(rng, int(rng.integers(20, 40) if trial % 2 else rng.integers(0, 25)))
    extreme = [np.zeros, np.ones, lambda shape: rng.random(shape), lambda shape: np.eye(*shape)][
        trial % 4
    ]((6, 5))
    more = Pictures(
        np.concatenate([some.pixels, (255 * extreme).astype(np.uint8)[None]]),
        np.append(some.labels, rng.integers(0, 3)),
    )

    def run(data):
        meter = metered(made.claim, trial)
        found = measured(meter, data, made)
        return drawn(found, made, np.random.default_rng(0)), [
            noisy.values for noisy in meter.released.values()
        ]

    assert replay.check(run, some, more) == []
    assert replay.check(run, more, some) == []
    strangers = replay.check(run, some, random_pictures(rng, 9))
    assert all(fault.kind == "distance" for fault in strangers)


def test_bounds_are_reached():
    """A bound far above what pictures can add would be a waste; one white picture comes close to it
    in the first stages.
    """
    made = plan(ImageSchema(6, 6, 2), ImageSettings(50.0, 1e-4), ImageOptions(None, 2, 4, 2))
    shades = np.random.default_rng(0).integers(0, 120, (30, 6, 6)).astype(np.uint8)
    white = np.full((1, 6, 6), 255, np.uint8)
    asked = []
    for pixels in (shades, np.concatenate([shades, white])):
        meter = metered(made.claim, 23)

        def release(share, sums, real=meter.release):
            asked.append(sums)
            return real(share, sums)

        meter.release = release
        measured(meter, Pictures(pixels, np.r_[np.arange(30) % 2, 0][: len(pixels)]), made)
    half = len(asked) // 2
    for one, other in zip(asked[:2], asked[half : half + 2], strict=True):
        apart = math.sqrt(
            sum(
                part.weight**2 * np.square(part.total - other[name].total).sum()
                for name, part in one.items()
            )
        )
        allowed = math.sqrt(sum((part.weight * part.length) ** 2 for part in one.values()))
        assert 0.9 * allowed < apart <= allowed * (1 + 1e-9)


def test_whatever_sums_are_asked_for_stay_within_the_claim():
    claim, rng = ImageSynthesis(6, 5, 3, 5, 20, 2.0), np.random.default_rng(4)
    for trial in range(20):
        held, spent = metered(claim, trial), Fraction(0)
        for _ in range(20):
            share = Fraction(float(rng.random()) * 0.3)
            try:
                held.release(share, {"some": BoundedSums(np.zeros(3), 1.0)})
                spent += held.squares[-1]
            except BudgetExceeded:
                continue
        assert 0 < spent <= squares(claim.noise_multiplier)
        assert held.left == held.whole - spent
    held = metered(claim)
    for share in (stages.LEVELS, stages.MOMENTS, stages.ROUNDS, stages.CLUSTERS):
        held.release(share, {"some": BoundedSums(np.zeros(3), 1.0)})
    assert held.left < held.whole * Fraction(1, 10**9)
    with pytest.raises(BudgetExceeded, match="left of the sum of squares"):
        held.release(Fraction(1, 100), {"more": BoundedSums(np.zeros(3), 1.0)})


def accepts(ratio):
    """Whether 20,000 draws have this standard deviation: off by chance by more than 3% in one of
    10^8.
    """
    return abs(ratio - 1) < 0.03


def test_the_noise_of_sums_has_the_stated_deviation():
    claim = ImageSynthesis(6, 5, 3, 5, 4, 2.0)
    sums = {
        "a": BoundedSums(np.zeros(20_000), 0.5, 0.25),
        "b": BoundedSums(np.zeros((200, 100)), 2.0),
    }
    one, other = metered(claim).release(Fraction(1, 4), sums)
    bound = math.hypot(0.125, 2.0)
    for noisy, weight in ((one, 0.25), (other, 1.0)):
        assert noisy.deviation == pytest.approx(2.0 * 2 * bound / weight, rel=1e-5)
        measured_ = float(noisy.values.std()) / noisy.deviation
        assert accepts(measured_)
        assert not accepts(measured_ * 2 / 3)
        assert not accepts(measured_ * 3 / 2)


def test_eigenvalues_keep_their_sum():
    rng = np.random.default_rng(5)
    values = -np.sort(-rng.standard_normal((50, 12)), axis=1) + 0.3
    found = mixture.with_trace(values)
    assert (found >= 0).all()
    assert found.sum(axis=1) == pytest.approx(np.maximum(values.sum(axis=1), 0), abs=1e-9)
    fine = np.abs(values)
    assert mixture.with_trace(-np.sort(-fine, axis=1)) == pytest.approx(-np.sort(-fine, axis=1))


def test_at_a_large_epsilon_the_model_has_the_moments_of_the_pictures():
    """Two blobs a class: the mean of every class, and the variance of every pixel, are those of the
    data.
    """
    rng = np.random.default_rng(6)
    schema, count = ImageSchema(6, 6, 2), 4000
    labels = rng.integers(0, 2, count)
    held = 60 + 80.0 * (np.arange(36).reshape(6, 6) // 6 > 2) * (labels == 1)[:, None, None]
    held = (
        held
        + 40.0 * rng.integers(0, 2, (count, 1, 1)) * (np.arange(6) > 2)
        + 8 * rng.standard_normal((count, 6, 6))
    )
    data = Pictures(np.clip(np.rint(held), 0, 255).astype(np.uint8), labels)
    made = plan(schema, ImageSettings(1000.0, 1e-5), ImageOptions(4000, 2, 6))
    model = measured(metered(made.claim), data, made)
    vectors, due = model.draw(labels, rng), made.encoding.vectors(data.pixels)
    for label in (0, 1):
        mine = labels == label
        assert vectors[mine].mean(axis=0) == pytest.approx(due[mine].mean(axis=0), abs=0.05)
        assert vectors[mine].std(axis=0) == pytest.approx(due[mine].std(axis=0), abs=0.08)
    assert model.weights.sum(axis=1) / count == pytest.approx(np.bincount(labels) / count, abs=0.01)


def test_shades_are_those_of_the_data_and_keep_their_order():
    rng = np.random.default_rng(7)
    shades = np.zeros(stages.SHADES)
    shades[0], shades[10], shades[31] = 0.7, 0.1, 0.2
    raw = rng.standard_normal((200, 8, 8)) + 0.5
    found = mixture.shaded(raw, shades, float(raw.mean()))
    met = np.bincount((found // 8).ravel(), minlength=stages.SHADES) / found.size
    assert met[0] == pytest.approx(0.7, abs=0.05)
    assert met[10:12].sum() == pytest.approx(0.1, abs=0.03)
    assert met[31] == pytest.approx(0.2, abs=0.05)
    for one, other in zip(raw.reshape(200, -1), found.reshape(200, -1), strict=True):
        assert (np.diff(other[np.argsort(one)].astype(int)) >= 0).all()


def test_clusters_grow_with_pictures_and_fall_with_noise():
    assert stages.clusters_for(60_000, 10, 50, 3.73) == 8
    assert stages.clusters_for(60_000, 10, 50, 0.5) > 20
    assert stages.clusters_for(100, 10, 50, 3.73) == 1
    assert stages.clusters_for(-5.0, 10, 50, 3.73) == 1
    assert stages.clusters_for(1e9, 1000, 80, 0.1) <= 3


def test_the_price_is_that_of_one_gaussian_release():
    made = plan(SMALL, ImageSettings(1.0, 1e-5))
    noise = made.claim.noise_multiplier
    assert made.claim.event == events.Gaussian(noise)
    assert 0.999 < gaussian.epsilon(1 / noise, 1e-5) <= 1.0
    with pytest.raises(InvalidInput, match="added or removed"):
        ImageSynthesis(6, 5, 3, 5, 4, 2.0, adjacency=Adjacency.REPLACE_ONE)


def test_a_sheet_is_a_png_that_holds_the_pictures():
    held = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    found = sheet(held, np.array([1, 0, 1], np.uint8), 2)
    assert found[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", found[16:24])
    assert (width, height) == (100, 8)
    size = struct.unpack(">I", found[33:37])[0]
    lines = np.frombuffer(zlib.decompress(found[41 : 41 + size]), np.uint8).reshape(8, 101)
    assert (lines[:4, 1:6] == held[1]).all()
    assert (lines[4:, 6:11] == held[2]).all()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((np.zeros((3, 5, 6), np.uint8), [0, 1, 2]), "6 x 5"),
        ((np.zeros((3, 6, 5), np.int32), [0, 1, 2]), "bytes"),
        ((np.zeros((3, 6, 5), np.uint8), [0, 1, 3]), "from 0 to 2"),
        ((np.zeros((3, 6, 5), np.uint8), [0, -1, 2]), "from 0 to 2"),
        ((np.zeros((3, 6, 5), np.uint8), [0.0, 1.0, 2.0]), "whole numbers"),
        ((np.zeros((3, 6, 5), np.uint8), [0, 1]), "one label for each"),
        ((np.zeros((3, 3, 6, 5), np.uint8), [0, 1, 2]), "grey"),
        (np.zeros((3, 6, 5), np.uint8), "pictures, labels"),
        ((np.full((3, 6, 5), 200.0), [0, 1, 2]), "from 0 to 1, or bytes"),
        ("no-such-file.npz", "no-such-file"),
    ],
)
def test_bad_pictures_are_one_line(data, words):
    with pytest.raises(DpfyError, match=words) as found:
        read(data, SMALL)
    assert "\n" not in str(found.value)


def test_pixels_are_clamped_to_their_public_range():
    wild = np.zeros((9, 6, 5))
    wild[0, 0] = [0.5, -3.0, np.nan, np.inf, 1.0]
    assert (read((wild, np.arange(9) % 3), SMALL).pixels[0, 0] == [128, 0, 0, 255, 255]).all()
    assert read((wild[:, None], np.arange(9) % 3), SMALL).pixels.shape == (9, 6, 5)
