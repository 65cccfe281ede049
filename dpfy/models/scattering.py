"""A scattering transform of small images: two layers of Morlet wavelets with fixed filters, so
nothing in it is trained.

Order 0 is a local average, order 1 the average of |x * psi|, order 2 the average of ||x * psi_1| *
psi_2| over pairs of growing scale. With 2 scales and 8 angles that makes 1 + 16 + 64 = 81 channels
on a grid of a quarter of the image's side.

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
    """Filters for one padded size: wavelets in the frequency domain, where they are real; the
    average as rows and columns.
    """

    wavelets: tuple[Tensor, ...]  # by scale: (angles, height, width)
    rows: tuple[Tensor, ...]  # by scale of the signal: (output rows, signal rows)
    columns: tuple[Tensor, ...]  # by scale of the signal: (output columns, signal columns)


def grid(image: tuple[int, ...]) -> tuple[int, int]:
    """The size of the output for an image of shape (1, height, width); any other shape is
    refused.
    """
    if len(image) != 3 or image[0] != 1 or min(image[1:]) < LEAST_SIDE:
        rule = (
            f"scattering needs images of one channel and at least {LEAST_SIDE} x {LEAST_SIDE} "
            f"pixels"
        )
        raise InvalidInput("model.name", f"records of shape {image}", rule)
    return -(-image[1] // STRIDE), -(-image[2] // STRIDE)


def scattering(images: Tensor) -> Tensor:
    """(n, 1, height, width) -> (n, 81, ceil(height / 4), ceil(width / 4)).

    Guarantees: row `i` of the result depends on image `i` alone, and no statistic of the data is
    used.
    """
    rows, columns = grid(tuple(images.shape[1:]))
    padded = _padded(images[:, 0])
    cells = _channels(
        padded, _filters(padded.shape[1], padded.shape[2], padded.dtype, padded.device)
    )
    return cells[:, :, 1 : 1 + rows, 1 : 1 + columns].contiguous()


def _padded(images: Tensor) -> Tensor:
    """Mirrored at the border by one output cell or a little more, to a multiple of the stride."""
    bottom, right = (STRIDE + -size % STRIDE for size in images.shape[1:])
    return functional.pad(images, (STRIDE, right, STRIDE, bottom), mode="reflect")


def _channels(images: Tensor, filters: Filters) -> Tensor:
    """All 81 channels. After a wavelet of scale j the signal is kept at every 2**j-th point, where
    it loses next to nothing.
    """
    signal = images.unsqueeze(1)
    spectrum = torch.fft.fft2(signal)
    channels = [_averaged(signal, filters, 0)]
    seconds = []
    for scale in range(SCALES):
        first = _modulus(spectrum, filters.wavelets[scale], 2**scale)
        channels.append(_averaged(first, filters, scale))
        for later in range(scale + 1, SCALES):
            wavelets = _folded(filters.wavelets[later], 2**scale)
            second = _modulus(
                torch.fft.fft2(first).unsqueeze(2), wavelets, 2 ** (later - scale)
            ).flatten(1, 2)
            seconds.append(_averaged(second, filters, later))
    return torch.cat(channels + seconds, dim=1)


def _modulus(spectrum: Tensor, wavelets: Tensor, step: int) -> Tensor:
    """|x * wavelet| for each wavelet, kept at every `step`-th point: that is the mean over the
    aliases of the spectrum.
    """
    first, *others = zip(_aliases(spectrum, step), _aliases(wavelets, step), strict=True)
    kept = first[0] * first[1]
    for part, wavelet in others:
        kept += part * wavelet
    found = torch.view_as_real(torch.fft.ifft2(kept))
    return found[..., 0].square().addcmul(found[..., 1], found[..., 1]).sqrt() / step**2


def _averaged(signal: Tensor, filters: Filters, scale: int) -> Tensor:
    """The local average on the output grid, of a signal that is already kept at every 2**scale-th
    point.
    """
    return filters.rows[scale] @ signal @ filters.columns[scale].t()


def _aliases(spectrum: Tensor, step: int) -> list[Tensor]:
    """The blocks of a spectrum that fall on one another when every `step`-th point is kept."""
    bands = spectrum.tensor_split(step, dim=-2)
    return [block for band in bands for block in band.tensor_split(step, dim=-1)]


def _folded(wavelets: Tensor, step: int) -> Tensor:
    """Wavelets for a signal that is kept at every `step`-th point."""
    return torch.stack(_aliases(wavelets, step)).sum(dim=0)


@functools.lru_cache(maxsize=8)
def _filters(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Filters:
    angles = [math.pi * turn / ANGLES for turn in range(ANGLES)]
    banks = [
        torch.stack([_morlet(height, width, scale, angle) for angle in angles])
        for scale in range(SCALES)
    ]
    rows = [_average(height, 2**scale) for scale in range(SCALES)]
    columns = [_average(width, 2**scale) for scale in range(SCALES)]
    wavelets, rows_, columns_ = (
        tuple(part.to(dtype).to(device) for part in group) for group in (banks, rows, columns)
    )
    return Filters(wavelets, rows_, columns_)


def _average(size: int, step: int) -> Tensor:
    """A Gaussian of unit mass around each output point of a circle of `size` points, for a signal
    kept at every `step`-th.
    """
    blur = BLUR * 2 ** (SCALES - 1)
    outputs = torch.arange(0, size, STRIDE, dtype=torch.float64).reshape(-1, 1, 1)
    inputs = torch.arange(0, size, step, dtype=torch.float64).reshape(1, -1, 1)
    wraps = size * torch.arange(-2, 3, dtype=torch.float64)
    bell: Tensor = torch.exp(-((inputs - outputs + wraps) ** 2) / (2 * blur**2)).sum(dim=2)
    mass: float = step / (math.sqrt(2 * math.pi) * blur)
    return bell * mass


def _morlet(height: int, width: int, scale: int, angle: float) -> Tensor:
    """A Gabor wave less as much of its envelope as makes its mean zero, in the frequency domain."""
    blur, frequency = BLUR * 2**scale, FREQUENCY / 2**scale
    wave = _wave(height, width, blur, angle, frequency)
    envelope = _wave(height, width, blur, angle, 0.0)
    spectrum: Tensor = torch.fft.fft2(wave - envelope * (wave.sum() / envelope.sum())).real
    return spectrum


def _wave(height: int, width: int, blur: float, angle: float, frequency: float) -> Tensor:
    """A plane wave under an elliptic Gaussian of unit mass, wrapped around the torus."""
    y = torch.arange(-2 * height, 3 * height, dtype=torch.float64).unsqueeze(1)
    x = torch.arange(-2 * width, 3 * width, dtype=torch.float64).unsqueeze(0)
    along, across = (
        math.cos(angle) * y + math.sin(angle) * x,
        math.cos(angle) * x - math.sin(angle) * y,
    )
    mass = SLANT / (2 * math.pi * blur**2)
    bell = mass * torch.exp(-(along**2 + (SLANT * across) ** 2) / (2 * blur**2))
    wave = torch.polar(bell, frequency * along)
    return wave.reshape(5, height, 5, width).sum(dim=(0, 2))
