"""Images made by random processes: no photograph and no record is behind them, so that a network
may learn from them at no cost in privacy.

Two processes: leaves that fall on one another (Lee, Mumford & Huang 2001) with textures of a power
spectrum like that of nature, and untrained generators with random styles (Baradad et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 48
LEAVES = 40
CHANNELS = 24


def images(count: int, seed: int, device: torch.device | str = "cpu", chunk: int = 2000) -> Tensor:
    """`count` images of SIDE x SIDE pixels as bytes, a function of (count, seed, chunk) on a given
    device: half of them leaves, a quarter of random generators, a quarter leaves cut from those.
    """
    generator = torch.Generator(device).manual_seed(seed)
    parts = []
    for start in range(0, count, chunk):
        n = min(chunk, count - start)
        plain = styled(max(2, n // 2), generator)
        half, quarter = n - n // 2, n // 4
        cut = leaves(spectra(quarter, generator), plain[-max(1, quarter) :], generator)
        whole = leaves(spectra(half, generator), spectra(half, generator), generator)
        made = torch.cat([whole, cut, plain])[:n]
        parts.append((made.clamp(0, 1) * 255).to(torch.uint8))
    return torch.cat(parts)


def spectra(count: int, generator: torch.Generator) -> Tensor:
    """Coloured noise whose power falls with frequency, at a rate drawn for each image, stretched
    along one direction.
    """
    device = generator.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(count, *shape, generator=generator, device=device)
        return low + (high - low) * drawn

    frequency = torch.fft.fftfreq(SIDE, device=device)
    angle, stretch = uniform(0, math.pi, 1, 1), torch.exp(uniform(0, 1.5, 1, 1))
    y, x = frequency.view(1, -1, 1), frequency.view(1, 1, -1)
    along = angle.cos() * x + angle.sin() * y
    across = angle.cos() * y - angle.sin() * x
    radius = ((along * stretch) ** 2 + across**2).sqrt().clamp(min=1 / SIDE)
    amplitude = radius ** -uniform(0.6, 2.2, 1, 1)
    white = torch.randn(count, 3, SIDE, SIDE, generator=generator, device=device)
    noise = torch.fft.ifft2(torch.fft.fft2(white) * amplitude.unsqueeze(1)).real
    noise = functional.layer_norm(noise, noise.shape[2:])
    mixing = torch.randn(count, 3, 3, generator=generator, device=device) * 0.4
    mixing = mixing + uniform(0.2, 1.0, 1, 1) * torch.ones(3, 3, device=device) * 0.58
    mixed = torch.einsum("nij,njhw->nihw", mixing, noise)
    return uniform(0.2, 0.8, 3, 1, 1) + uniform(0.05, 0.3, 1, 1, 1) * mixed


def leaves(ground: Tensor, texture: Tensor, generator: torch.Generator) -> Tensor:
    """`ground` behind LEAVES shapes an image: ellipses, boxes and stars of all sizes and colours,
    small ones in front, filled with pieces of `texture` or one colour, shaded along a direction.
    """
    device, count = generator.device, len(ground)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        drawn = torch.rand(count, *shape, generator=generator, device=device)
        return low + (high - low) * drawn

    axis = torch.linspace(-1, 1, SIDE, device=device)
    y0, x0 = axis.view(1, -1, 1), axis.view(1, 1, -1)
    least = torch.exp(uniform(math.log(0.06), math.log(0.3), 1, 1))
    grey, spread = uniform(0.15, 0.85, 1, 1, 1), uniform(0.02, 0.4, 1, 1, 1)
    palette = torch.lerp(grey, uniform(0.1, 0.9, 3, 1, 1), uniform(0.1, 0.7, 1, 1, 1))
    count_of_each = uniform(3, LEAVES, 1, 1)
    out = ground
    sizes = (least**-2 - uniform(0, 1, LEAVES, 1) * (least**-2 - 1.2)).clamp(min=0.7)
    sizes = sizes.rsqrt().sort(dim=1, descending=True).values
    for number in range(LEAVES):
        size = sizes[:, number : number + 1]
        angle, aspect = uniform(0, 2 * math.pi, 1, 1), torch.exp(uniform(-0.8, 0.8, 1, 1))
        dx, dy = x0 - uniform(-1.1, 1.1, 1, 1), y0 - uniform(-1.1, 1.1, 1, 1)
        along = (angle.cos() * dx + angle.sin() * dy) * aspect / size
        across = (angle.cos() * dy - angle.sin() * dx) / (aspect * size)
        turn = torch.atan2(across, along)
        wave = 1.0 + uniform(0, 0.45, 1, 1) * torch.sin(
            uniform(1, 7, 1, 1).round() * turn + uniform(0, 6.3, 1, 1)
        )
        power = torch.exp(uniform(0, 2.3, 1, 1))
        inside = along.abs().clamp(min=1e-4) ** power + across.abs().clamp(min=1e-4) ** power
        edge = (1 - inside.clamp(max=1e4) ** (1 / power) / wave) * size * SIDE / 2
        mask = (edge + 0.5).clamp(0, 1).unsqueeze(1)
        mask = mask * (uniform(0, LEAVES, 1, 1, 1) < count_of_each.unsqueeze(1))
        light, hue = uniform(-0.5, 0.5, 1, 1, 1), uniform(-0.5, 0.5, 3, 1, 1)
        colour = palette + spread * (1.6 * light + hue)
        order = torch.randint(len(texture), (count,), generator=generator, device=device)
        filled = texture[order].roll(number, 3)
        amount = uniform(-0.4, 1.0, 1, 1, 1).clamp(min=0)
        shade = uniform(-0.4, 0.4, 1, 1, 1) * along.clamp(-1, 1).unsqueeze(1)
        out = torch.lerp(out, torch.lerp(colour, filled, amount) + shade, mask)
    return out


def styled(count: int, generator: torch.Generator) -> Tensor:
    """Images of one untrained generator with a style for each image: random filters at growing
    size, scaled by the style, with noise added at every size.
    """
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x = normal(1, CHANNELS, 3, 3) + 0.5 * normal(count, CHANNELS, 3, 3)
    latent = normal(count, 16)
    for side in (6, 12, 24, 48):
        x = functional.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)
        for turn in range(2):
            style = torch.exp(0.7 * latent @ normal(16, CHANNELS) / 4)
            x = functional.pad(x * style[:, :, None, None], (1, 1, 1, 1), mode="replicate")
            x = functional.conv2d(x, _filters(normal))
            if side <= 12 and not turn:
                strength = torch.exp(normal(1, CHANNELS, 1, 1) - 1) * normal(count, CHANNELS, 1, 1)
                sparse = normal(count, 1, side, side)
                x = x + strength * sparse * (sparse.abs() > 1)
            x = functional.leaky_relu(functional.instance_norm(x) + normal(1, CHANNELS, 1, 1), 0.2)
    mixing = normal(1, 3, CHANNELS) / CHANNELS**0.5 + normal(count, 3, CHANNELS) * 0.5 / (
        CHANNELS**0.5
    )
    colours = torch.einsum("nic,nchw->nihw", mixing, x)
    grey = colours.mean(1, keepdim=True)
    paler = torch.lerp(
        grey, colours, torch.rand(count, 1, 1, 1, generator=generator, device=device)
    )
    contrast = torch.exp(0.5 * normal(count, 1, 1, 1))
    shift = normal(count, 1, 1, 1)
    return torch.sigmoid(contrast * functional.layer_norm(paler, paler.shape[1:]) + 0.7 * shift)


def _filters(normal: Callable[..., Tensor]) -> Tensor:
    """3 x 3 filters: a smooth part and differences along random directions."""
    draw = normal(CHANNELS, CHANNELS, 3, 3)
    flat = draw.mean((2, 3), keepdim=True) * 3
    return (flat + 1.1 * draw / 3) / CHANNELS**0.5
