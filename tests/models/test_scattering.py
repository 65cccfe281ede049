from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from dpfy.core.errors import InvalidInput
from dpfy.data.source import load
from dpfy.models import ModelConfig
from dpfy.models.features import feature_shape, features
from dpfy.models.scattering import ANGLES, CHANNELS, _filters, scattering


def wave(size: int, blur: float, angle: float, frequency: float, slant: float) -> np.ndarray:
    """A Gabor wave on a torus of size x size with its peak in the middle, written point by
    point.
    """
    half = size // 2
    out = np.zeros((size, size), dtype=complex)
    for row in range(size):
        for column in range(size):
            for wrap_row in range(-2, 3):
                for wrap_column in range(-2, 3):
                    y, x = row - half + wrap_row * size, column - half + wrap_column * size
                    along = y * math.cos(angle) + x * math.sin(angle)
                    across = -y * math.sin(angle) + x * math.cos(angle)
                    bell = math.exp(-(along**2 + slant**2 * across**2) / (2 * blur**2))
                    out[row, column] += bell * np.exp(1j * frequency * along)
    return out * slant / (2 * math.pi * blur**2)


def morlet(size: int, scale: int, turn: int) -> np.ndarray:
    blur, angle, frequency = 0.8 * 2**scale, math.pi * turn / 8, 0.75 * math.pi / 2**scale
    gabor, envelope = wave(size, blur, angle, frequency, 0.5), wave(size, blur, angle, 0.0, 0.5)
    return gabor - envelope * gabor.sum() / envelope.sum()


def convolve(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Circular convolution in space; the kernel's origin is its middle."""
    odd = np.pad(kernel, ((0, 1), (0, 1)))  # ndimage centres an odd kernel without ambiguity
    return ndimage.convolve(image.astype(complex), odd, mode="wrap")


def kept(kernel: np.ndarray, step: int) -> np.ndarray:
    """A kernel for a signal that is kept at every `step`-th point."""
    size = len(kernel) // step
    rolled = np.roll(kernel, (-(len(kernel) // 2),) * 2, (0, 1))[::step, ::step] * step**2
    return np.roll(rolled, (size // 2,) * 2, (0, 1))


def reference(image: np.ndarray) -> np.ndarray:
    """Scattering of an image of 8 x 8 by convolution in space, padded to 16 x 16."""
    x = np.pad(image, 4, mode="reflect")
    blur = wave(16, 1.6, 0.0, 0.0, 1.0)
    first = [np.abs(convolve(x, morlet(16, 0, turn))) for turn in range(8)]
    zeroth = [convolve(x, blur)[::4, ::4]]
    order_1 = [convolve(u, blur)[::4, ::4] for u in first]
    order_2 = []
    for u in first:
        for turn in range(8):
            again = np.abs(convolve(u, morlet(16, 1, turn))[::2, ::2])
            order_2.append(convolve(again, kept(blur, 2))[::2, ::2])
    for turn in range(8):
        coarse = np.abs(convolve(x, morlet(16, 1, turn))[::2, ::2])
        order_1.append(convolve(coarse, kept(blur, 2))[::2, ::2])
    return np.stack(zeroth + order_1 + order_2).real[:, 1:3, 1:3]


def test_scattering_equals_convolution_in_space() -> None:
    image = np.random.default_rng(0).random((8, 8))
    found = scattering(torch.from_numpy(image).reshape(1, 1, 8, 8))[0].numpy()
    np.testing.assert_allclose(found, reference(image), rtol=0, atol=1e-12)


def test_wavelets_have_mean_zero_and_the_average_has_mass_one() -> None:
    filters = _filters(36, 36, torch.float64, torch.device("cpu"))
    for average in (*filters.rows, *filters.columns):
        assert average.sum(dim=1).numpy() == pytest.approx(1.0, abs=1e-3)
    for bank in filters.wavelets:
        assert float(bank[:, 0, 0].abs().max()) < 1e-12
        assert float(bank.abs().max()) > 0.5


@pytest.mark.parametrize(
    ("height", "width", "cells"),
    [(28, 28, (7, 7)), (8, 8, (2, 2)), (30, 9, (8, 3)), (32, 28, (8, 7))],
)
def test_81_channels_on_a_quarter_of_the_side(
    height: int, width: int, cells: tuple[int, int]
) -> None:
    assert scattering(torch.rand(2, 1, height, width)).shape == (2, CHANNELS, *cells)
    assert feature_shape(ModelConfig(), (1, height, width)) == (81 * cells[0] * cells[1],)


def test_a_constant_image_has_no_wavelet_energy_and_keeps_its_level() -> None:
    out = scattering(torch.full((1, 1, 28, 28), 0.7, dtype=torch.float64))
    assert out[0, 0].numpy() == pytest.approx(0.7, abs=1e-6)
    assert float(out[0, 1:].abs().max()) < 1e-6


def test_stripes_are_seen_at_their_own_angle() -> None:
    rows = torch.arange(28, dtype=torch.float64).unsqueeze(1).expand(28, 28)
    stripes = torch.cos(2 * math.pi * rows / 4)  # they vary from row to row: angle 0
    energy = scattering(stripes.reshape(1, 1, 28, 28))[0, 1 : 1 + ANGLES].mean(dim=(1, 2))
    assert int(energy.argmax()) == 0
    turned = scattering(stripes.t().reshape(1, 1, 28, 28))[0, 1 : 1 + ANGLES].mean(dim=(1, 2))
    assert int(turned.argmax()) == ANGLES // 2


def test_a_row_depends_on_its_own_image_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(300, 1, 28, 28, generator=generator)
    transform = features(ModelConfig())
    assert transform is not None
    base = transform(images)
    other = images.clone()
    other[7] = 1e3 * torch.rand(1, 28, 28, generator=generator)
    changed = (transform(other) != base).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [7]
    torch.testing.assert_close(transform(images[5:6]), base[5:6], rtol=0, atol=1e-5)


def test_features_are_bounded_by_public_constants_whatever_the_image() -> None:
    transform = features(ModelConfig())
    assert transform is not None
    images = torch.rand(4, 1, 28, 28) * torch.tensor([0.0, 1e-3, 1.0, 1e4]).reshape(4, 1, 1, 1)
    norms = transform(images).norm(dim=1)
    assert float(norms.max()) <= math.sqrt(81 * 49) / ModelConfig().scale * (1 + 1e-5)
    assert torch.isfinite(norms).all()


@pytest.mark.parametrize("shape", [(3, 28, 28), (1, 7, 28), (28, 28), (64,)])
def test_images_it_was_not_made_for_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InvalidInput, match="scattering needs images of one channel and at least 8 x 8 pixels"
    ):
        scattering(torch.zeros(2, *shape))


def test_the_features_separate_digits_better_than_pixels() -> None:
    source = load()
    x, y = source.train.take(torch.arange(0, 4000, 5))  # the file is sorted by digit
    x_test, y_test = source.test.take(torch.arange(0, 1000, 2))
    transform = features(ModelConfig())
    assert transform is not None

    def accuracy(train: torch.Tensor, test: torch.Tensor) -> float:
        means = torch.stack([train[y == digit].mean(dim=0) for digit in range(10)])
        return float((torch.cdist(test, means).argmin(dim=1) == y_test).float().mean())

    assert (
        accuracy(transform(x), transform(x_test)) > accuracy(x.flatten(1), x_test.flatten(1)) + 0.05
    )
