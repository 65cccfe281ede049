"""A scattering transform of small images: two layers of Morlet wavelets with fixed filters, so nothing in it is trained.

Order 0 is a local average, order 1 the average of |x * psi|, order 2 the average of ||x * psi_1| * psi_2| over pairs of growing
scale. With 2 scales and 8 angles that makes 1 + 16 + 64 = 81 channels on a grid of a quarter of the image's side.

Reference: Bruna & Mallat 2013 (transform); Tramer & Boneh 2021 (as features for private learning).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpfy.core.errors import InvalidInput

SCALES = 2
ANGLES = 8
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2 * SCALES * (SCALES - 1) // 2
STRIDE = 2**SCALES
BLUR = 0.8
FREQUENCY = 3 * math.pi / 4
SLANT = 4 / ANGLES
LEAST_SIDE = 8


@dataclass(frozen=True)
class Filters:
    """Filters for one padded size in the frequency domain. They are real, because each wavelet is Hermitian in space."""

    wavelets: tuple[Tensor, ...]  # by scale: (angles, height, width)
    average: Tensor  # (height, width)


def grid(height: int, width: int) -> tuple[int, int]:
    """The size of the output for an image of that size."""
    return -(-height // STRIDE), -(-width // STRIDE)


def scattering(images: Tensor) -> Tensor:
    """(n, 1, height, width) -> (n, 81, ceil(height / 4), ceil(width / 4)).

    Guarantees: row `i` of the result depends on image `i` alone, and no statistic of the data is used.
    """
    if images.dim() != 4 or images.shape[1] != 1 or min(images.shape[2:]) < LEAST_SIDE:
        rule = f"scattering needs images of one channel and at least {LEAST_SIDE} x {LEAST_SIDE} pixels"
        raise InvalidInput("model.name", f"records of shape {tuple(images.shape[1:])}", rule)
    height, width = images.shape[2:]
    rows, columns = grid(height, width)
    padded = _padded(images[:, 0])
    filters = _filters(padded.shape[1], padded.shape[2], padded.dtype, padded.device)
    cells = torch.stack(_channels(padded, filters), dim=1)
    return cells[:, :, 1 : 1 + rows, 1 : 1 + columns].contiguous()


def _padded(images: Tensor) -> Tensor:
    """Mirrored at the border by one output cell or a little more, to a multiple of the stride."""
    bottom, right = (STRIDE + -size % STRIDE for size in images.shape[1:])
    return functional.pad(images, (STRIDE, right, STRIDE, bottom), mode="reflect")


def _channels(images: Tensor, filters: Filters) -> list[Tensor]:
    """All 81 channels. After a wavelet of scale j the signal is kept at every 2**j-th point, where it loses next to nothing."""
    spectrum = torch.fft.fft2(images)
    zeroth = [_averaged(spectrum, filters.average, 1)]
    first, second = [], []
    for scale in range(SCALES):
        for angle in range(ANGLES):
            modulus = _modulus(spectrum, filters.wavelets[scale][angle], 2**scale)
            first.append(_averaged(modulus, _folded(filters.average, 2**scale), 2**scale))
            for later in range(scale + 1, SCALES):
                for turn in range(ANGLES):
                    wavelet = _folded(filters.wavelets[later][turn], 2**scale)
                    again = _modulus(modulus, wavelet, 2 ** (later - scale))
                    second.append(_averaged(again, _folded(filters.average, 2**later), 2**later))
    return zeroth + first + second


def _modulus(spectrum: Tensor, wavelet: Tensor, step: int) -> Tensor:
    """The spectrum of |x * wavelet|, kept at every `step`-th point."""
    return torch.fft.fft2(torch.fft.ifft2(_subsampled(spectrum * wavelet, step)).abs())


def _averaged(spectrum: Tensor, average: Tensor, resolution: int) -> Tensor:
    """The local average on the output grid, of a signal that was already kept at every `resolution`-th point."""
    return torch.fft.ifft2(_subsampled(spectrum * average, STRIDE // resolution)).real


def _subsampled(spectrum: Tensor, step: int) -> Tensor:
    """Keeping every `step`-th point of a signal is the mean over the `step`**2 aliases of its spectrum."""
    height, width = spectrum.shape[-2] // step, spectrum.shape[-1] // step
    return spectrum.reshape(*spectrum.shape[:-2], step, height, step, width).mean(dim=(-4, -2))


def _folded(filter_: Tensor, step: int) -> Tensor:
    """A filter for a signal kept at every `step`-th point: the sum of its aliases."""
    return _subsampled(filter_, step) * step**2


@functools.lru_cache(maxsize=8)
def _filters(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Filters:
    wavelets = tuple(
        torch.stack([_morlet(height, width, scale, math.pi * turn / ANGLES) for turn in range(ANGLES)]) for scale in range(SCALES)
    )
    average = torch.fft.fft2(_wave(height, width, BLUR * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)).real
    return Filters(tuple(bank.to(dtype).to(device) for bank in wavelets), average.to(dtype).to(device))


def _morlet(height: int, width: int, scale: int, angle: float) -> Tensor:
    """A Gabor wave less as much of its envelope as makes its mean zero, in the frequency domain."""
    blur, frequency = BLUR * 2**scale, FREQUENCY / 2**scale
    wave = _wave(height, width, blur, angle, frequency, SLANT)
    envelope = _wave(height, width, blur, angle, 0.0, SLANT)
    return torch.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real


def _wave(height: int, width: int, blur: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A plane wave under an elliptic Gaussian of unit mass, wrapped around the torus."""
    y = torch.arange(-2 * height, 3 * height, dtype=torch.float64).unsqueeze(1)
    x = torch.arange(-2 * width, 3 * width, dtype=torch.float64).unsqueeze(0)
    along, across = math.cos(angle) * y + math.sin(angle) * x, math.cos(angle) * x - math.sin(angle) * y
    mass = slant / (2 * math.pi * blur**2)
    bell = mass * torch.exp(-(along**2 + (slant * across) ** 2) / (2 * blur**2))
    wave = torch.polar(bell, frequency * along)
    return wave.reshape(5, height, 5, width).sum(dim=(0, 2))
