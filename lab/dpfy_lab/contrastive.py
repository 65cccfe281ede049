"""A network that learns, from images of random processes alone, to know two views of one image
among many (Chen et al. 2020; as a prior for private training: Tang et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy_lab import random_images

SIDE = 32
WIDTH = 128
WARM_UP = 0.05


@dataclass(frozen=True)
class Contrast:
    """How a prior is learned: images made, pairs in a batch, steps, and the usual settings.

    The rate falls along a half cosine to the share `ends` of itself.
    """

    images: int = 300_000
    pairs: int = 2048
    steps: int = 2000
    rate: float = 2e-3
    decay: float = 1e-2
    temperature: float = 0.2
    seed: int = 0
    ends: float = 0.0


def learn(
    network: nn.Module,
    features: Callable[[Tensor], Tensor],
    width: int,
    how: Contrast,
    device: torch.device | str,
) -> list[float]:
    """Train `network` in place so that `features` of two views of an image point the same way;
    returns the loss at every 50th step.

    Guarantees: no record is read: all images come from :mod:`dpfy_lab.random_images`.
    """
    torch.manual_seed(how.seed)
    pool = random_images.images(how.images, how.seed, device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.to(device).train()
    head = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, WIDTH)).to(device)
    moved = [p for p in (*network.parameters(), *head.parameters()) if p.requires_grad]
    cuda = torch.device(device).type == "cuda"
    optimizer = torch.optim.AdamW(moved, how.rate, (0.9, 0.95), weight_decay=how.decay, fused=cuda)
    run = torch.compile(features) if cuda else features
    losses = []
    for step in range(how.steps):
        fallen = how.ends + (1 - how.ends) * (1 + math.cos(math.pi * step / how.steps)) / 2
        factor = min(1.0, (step + 1) / (WARM_UP * how.steps)) * fallen
        for group in optimizer.param_groups:
            group["lr"] = how.rate * factor
        chosen = pool[torch.randint(len(pool), (how.pairs,), device=device)].float() / 255
        both = torch.cat([view(chosen), view(chosen)]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            points = head(run(both))
        loss = agreement(points.float(), how.temperature)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(moved, 1.0)
        optimizer.step()
        if step % 50 == 0:
            losses.append(float(loss.detach()))
    network.eval()
    return losses


def agreement(points: Tensor, temperature: float) -> Tensor:
    """The mean cross entropy of finding, among all other rows, the other view of each image; row i
    and row i + n / 2 are two views of one.
    """
    unit = functional.normalize(points, dim=1)
    alike = unit @ unit.t() / temperature
    alike.fill_diagonal_(-math.inf)
    count = len(points) // 2
    other = torch.arange(len(points), device=points.device).roll(count)
    return functional.cross_entropy(alike, other)


def view(images: Tensor) -> Tensor:
    """A random piece of each image, turned over or not, resized to SIDE x SIDE, in other
    colours.
    """
    n, device = len(images), images.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, device=device)

    share = uniform(0.12, 1.0).sqrt()
    aspect = torch.exp(uniform(-0.28, 0.28))
    high, wide = (share * aspect).clamp(max=1), (share / aspect).clamp(max=1)
    flip = torch.where(uniform(0, 1) < 0.5, -1.0, 1.0)
    zero = torch.zeros(n, device=device)
    rows = [wide * flip, zero, (1 - wide) * uniform(-1, 1)]
    rows += [zero, high, (1 - high) * uniform(-1, 1)]
    grid = functional.affine_grid(torch.stack(rows, 1).view(n, 2, 3), [n, 3, SIDE, SIDE], False)
    x = functional.grid_sample(images, grid, "bilinear", "reflection", False)
    grey = x.mean(1, keepdim=True)
    amount = torch.where(uniform(0, 1, 1, 1, 1) < 0.2, 0.0, uniform(0.4, 1.6, 1, 1, 1))
    x = torch.lerp(grey, x, amount)
    turned = torch.where(uniform(0, 1) < 0.8, uniform(-0.6, 0.6), 0.0)
    x = torch.einsum("nij,njhw->nihw", _hue(turned), x)
    middle = x.mean((1, 2, 3), keepdim=True)
    x = (x - middle) * uniform(0.6, 1.4, 1, 1, 1) + middle * uniform(0.6, 1.4, 1, 1, 1)
    return x.clamp(0, 1)


def _hue(angle: Tensor) -> Tensor:
    """Rotations of the colours around grey."""
    cos, sin = angle.cos().view(-1, 1, 1), angle.sin().view(-1, 1, 1) / math.sqrt(3)
    eye = torch.eye(3, device=angle.device)
    cross = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]], device=angle.device)
    return cos * eye + (1 - cos) / 3 + sin * cross
