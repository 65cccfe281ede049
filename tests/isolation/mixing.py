"""Programs in which the gradient of one example depends on another, as ordinary or careless people
write them: all must be refused.

Each says when it mixes: at every step, from some share of the run on, with some probability at each
step, or in large batches only.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import pickle
import random
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.isolation import cases
from tests.isolation import test_mixing_refused as earlier
from tests.isolation.cases import (
    CLASSES,
    EVERY,
    LENGTH,
    WIDTH,
    WORDS,
    Case,
    Job,
    Now,
    ce,
    chance,
    late,
    least,
    net,
    plain,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import dpfy

CASES: dict[str, Case] = {}
Losses = Callable[..., Tensor]
LATE = (late(0.25), late(0.5), late(0.75), late(0.9))
OFTEN = (chance(0.1), chance(0.25), chance(0.5))


def program(
    name: str, *when: Now, **options: Any
) -> Callable[[Callable[[Now], Job]], Callable[[Now], Job]]:
    """Register a function that builds a program; it mixes at every step if nothing else is said."""

    def register(build: Callable[[Now], Job]) -> Callable[[Now], Job]:
        assert name not in CASES, name
        CASES[name] = Case(name, build, when=when or (EVERY,), **options)
        return build

    return register


def mixes(
    name: str,
    *when: Now,
    model: Callable[[], nn.Module] = net,
    data: Callable[[], Any] = cases.vectors,
    engine: str = "auto",
    **options: Any,
) -> Callable[[Losses], Losses]:
    """Register losses of (now, model, fields ...)."""

    def register(losses: Losses) -> Losses:
        runtime = {"engine": engine}
        program(name, *when, **options)(
            lambda now: Job(
                model(), lambda m, *fields: losses(now, m, *fields), data(), runtime=runtime
            )
        )
        return losses

    return register


def add(name: str, losses: Losses, *when: Now, **options: Any) -> None:
    """Register losses of (model, fields ...) that mix when asked to, and are plain else."""
    data = options.get("data", cases.vectors)
    usual = options.pop("usual", plain)

    def either(now: Now, m: nn.Module, *fields: Tensor) -> Tensor:
        return losses(m, *fields) if now(fields[0]) else usual(m, *fields)

    mixes(name, *when, **(options | {"data": data}))(either)


# The models and losses of the earlier tests, at every step

for _name, _model in earlier.MODELS.items():
    program(f"model: {_name}")(lambda now, model=_model: Job(model(), plain, cases.vectors()))
for _name, _losses in earlier.LOSSES.items():
    program(f"loss: {_name}")(lambda now, losses=_losses: Job(net(), losses, cases.vectors()))
for _name in ("mean", "mean in place", "queue", "loss"):
    program(f"kept in the forward pass: {_name}")(
        lambda now, kind=_name: Job(net(), earlier.Kept(kind), cases.vectors())
    )


# Counts that are taken from shapes

add(
    "positives by nonzero",
    lambda m, x, y: plain(m, x, y) / max(1, (y > 0).nonzero().shape[0]),
    EVERY,
    late(0.5),
    chance(0.25),
)
add(
    "positives by boolean index",
    lambda m, x, y: plain(m, x, y) / len(y[y > 0]),
    EVERY,
    late(0.75),
    chance(0.5),
)
add("positives by where", lambda m, x, y: plain(m, x, y) / torch.where(y > 0)[0].size(0))
add("positives by argwhere", lambda m, x, y: plain(m, x, y) / torch.argwhere(x > 1).shape[0] * 50)
add(
    "positives by masked_select",
    lambda m, x, y: plain(m, x, y) * 20 / x.masked_select(x > 1.5).numel(),
)
add(
    "number of classes by unique",
    lambda m, x, y: plain(m, x, y) / len(torch.unique((x[:, 0] * 3).long())) * 9,
    EVERY,
    late(0.5),
)
add(
    "runs by unique_consecutive",
    lambda m, x, y: plain(m, x, y) / len(torch.unique_consecutive(y)) * 9,
)
add(
    "smoothing by a count",
    lambda m, x, y: F.cross_entropy(
        m(x), y, label_smoothing=(y > 0).nonzero().shape[0] / len(y), reduction="none"
    ),
)
add("temperature by a count", lambda m, x, y: ce(m(x) * (1 + len(y[y == 1])), y))
add(
    "largest class by bincount",
    lambda m, x, y: plain(m, x, y) * torch.bincount((3 * x[:, 0].abs()).long()).shape[0],
)
add(
    "classes by one_hot without a number",
    lambda m, x, y: plain(m, x, y) * F.one_hot((3 * x[:, 0].abs()).long()).shape[1],
)
add(
    "rows by repeat_interleave",
    lambda m, x, y: plain(m, x, y) / max(1, y.repeat_interleave(y).shape[0]) * 20,
)
add(
    "focal over positives",
    lambda m, x, y: (
        (1 - torch.exp(-plain(m, x, y))) ** 2 * plain(m, x, y) / max(1, len((y == 2).nonzero())) * 8
    ),
)
add(
    "boxes that count",
    lambda m, x, y: (
        F.smooth_l1_loss(m(x), x[:, :CLASSES], reduction="none").sum(1)
        * (y > 0)
        / max(1, x[y > 0].shape[0])
        * 9
    ),
)
add(
    "expanded by a count",
    lambda m, x, y: plain(m, x, y) * torch.ones(max(1, len(y[y > 1]))).sum() / 8,
)
add("list of positives", lambda m, x, y: plain(m, x, y) / max(1, len(list((y > 0).nonzero()))) * 9)
add(
    "chunks of positives",
    lambda m, x, y: plain(m, x, y) / max(1, len(torch.split(y[y > 0], 2))) * 5,
)
add(
    "sum of ones at positives",
    lambda m, x, y: plain(m, x, y) / torch.ones_like(y[y > 0]).sum().clamp(min=1) * 9,
)
add(
    "tokens that count, by index",
    lambda m, w, r: (
        F.cross_entropy(m(w).transpose(1, 2), w, reduction="none").sum(1) / w[r > 0].numel() * 20
    ),
    model=lambda: net(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)),
    data=cases.tokens,
    usual=lambda m, w, r: F.cross_entropy(m(w).transpose(1, 2), w, reduction="none").mean(1),
)


# Scalars that are read inside of torch


def words_model() -> nn.Module:
    return net(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


def sequence_model() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def fixed_mean(m: nn.Module, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
    return ce(m(x).mean(1), y)


def lengthy(name: str, losses: Losses, *when: Now) -> None:
    """Losses of sequences and their lengths."""
    add(name, losses, *when, model=sequence_model, data=cases.padded, usual=fixed_mean)


lengthy(
    "cut to the longest, mean",
    lambda m, x, n, y: ce(m(x)[:, : n.max()].mean(1), y),
    EVERY,
    late(0.5),
    chance(0.25),
)
lengthy(
    "cut to the longest by narrow", lambda m, x, n, y: ce(m(x).narrow(1, 0, n.max()).mean(1), y)
)
lengthy(
    "positions up to the longest",
    lambda m, x, n, y: ce(m(x).sum(1) / len(torch.arange(n.max())), y),
)
lengthy(
    "buffer of the longest",
    lambda m, x, n, y: ce(torch.cat([m(x), torch.zeros(len(x), n.max(), CLASSES)], 1).mean(1), y),
)
lengthy("cut to the longest by int", lambda m, x, n, y: ce(m(x)[:, : int(n.max())].mean(1), y))
lengthy(
    "loop to the longest",
    lambda m, x, n, y: ce(
        sum(m(x[:, t]) for t in range(n.max())) / 2 + 0 * m(x[:, 0]) / n[:, None], y
    ),
)
lengthy(
    "mask of the longest",
    lambda m, x, n, y: ce(m(x).sum(1) / (torch.arange(LENGTH)[None] < n.max()).sum(), y),
)
lengthy(
    "padded again to the longest",
    lambda m, x, n, y: ce(
        pad_sequence([a[:k] for a, k in zip(m(x), n.tolist(), strict=True)], True).mean(1), y
    ),
    EVERY,
    chance(0.25),
)
lengthy(
    "mean over the unpacked length",
    lambda m, x, n, y: ce(
        m(pad_packed_sequence(pack_padded_sequence(x, n, True, False), True)[0]).mean(1), y
    ),
)
lengthy(
    "all positions of the batch in one row",
    lambda m, x, n, y: ce(m(x).sum(1) / n.sum() * 60, y),
    EVERY,
    late(0.9),
)
lengthy(
    "positional scale of the longest",
    lambda m, x, n, y: ce(m(x * torch.linspace(0, 1, LENGTH)[:, None] / n.max()).mean(1), y),
)
lengthy(
    "smaller when the batch is long",
    lambda m, x, n, y: ce(m(x).mean(1), y) * (0.5 if torch.any(n == LENGTH) else 1.0),
)

add(
    "torch.tensor of statistics",
    lambda m, x, y: (lambda s: ce(m((x - s[0]) / s[1]), y))(torch.tensor([x.mean(), x.std()])),
    EVERY,
    late(0.75),
    chance(0.25),
)
add(
    "layer norm, eps of the batch", lambda m, x, y: ce(m(F.layer_norm(x, (WIDTH,), eps=x.var())), y)
)
add(
    "torch.full of the mean",
    lambda m, x, y: ce(m(x - torch.full((WIDTH,), x.mean())), y),
    EVERY,
    late(0.5),
)
add("alpha of the mean", lambda m, x, y: ce(m(torch.add(x, torch.ones(WIDTH), alpha=-x.mean())), y))
add("leaky slope of the batch", lambda m, x, y: ce(F.leaky_relu(m(x), negative_slope=x.std()), y))
add("elu of the batch", lambda m, x, y: ce(F.elu(m(x), alpha=x.abs().max()), y))
add(
    "linspace to the largest",
    lambda m, x, y: ce(m(x * torch.linspace(0.1, x.abs().max(), WIDTH)), y),
)
add(
    "clamp by a number of the batch",
    lambda m, x, y: plain(m, x, y) * x.mean().mul(100).clamp(-2, 2).long().__index__(),
)
add(
    "dropout rate of the batch",
    lambda m, x, y: ce(m(x) * torch.sigmoid(torch.as_tensor(float(x.std()))), y),
)
add(
    "huber, delta of the batch",
    lambda m, x, y: F.huber_loss(m(x), x[:, :CLASSES], delta=x.std(), reduction="none").sum(1),
)
add(
    "smooth l1, beta of the batch",
    lambda m, x, y: F.smooth_l1_loss(m(x), x[:, :CLASSES], beta=x.std(), reduction="none").sum(1),
)
add(
    "margin of the batch",
    lambda m, x, y: F.multi_margin_loss(m(x), y, margin=x.std().item(), reduction="none"),
)
add(
    "k of the batch",
    lambda m, x, y: m(x).topk(1 + (y == 2).sum() % CLASSES, 1).values.sum(1) * (y + 1),
)
add("roll by a number of the batch", lambda m, x, y: ce(m(x.roll(int(y.sum()), 1)), y))
add("f-string", lambda m, x, y: plain(m, x, y) * float(f"{x.std():.4f}"), EVERY, late(0.5))
add("repr", lambda m, x, y: plain(m, x, y) * float(re.search(r"-?[\d.]+", repr(x.abs().max()))[0]))  # type: ignore[index]
add("str of the class counts", lambda m, x, y: plain(m, x, y) * str(y).count("1"))
add("pickle", lambda m, x, y: ce(m(x - pickle.loads(pickle.dumps(x)).mean(0)), y))
add("saved and loaded", lambda m, x, y: ce(m(x / _saved(x).std(0)), y))
add(
    "bytes of the storage",
    lambda m, x, y: ce(
        m(x - float(np.frombuffer(bytes(x.contiguous().untyped_storage()), np.float32).mean())), y
    ),
)
add(
    "pointer",
    lambda m, x, y: (
        plain(m, x, y)
        * (
            1
            + abs(
                float(
                    np.ctypeslib.as_array(
                        (ctypes.c_float * x.numel()).from_address(x.data_ptr())
                    ).mean()
                )
            )
        )
    ),
)
add(
    "numpy view",
    lambda m, x, y: ce(m((x - x.numpy().mean()) / x.numpy().std()), y),
    EVERY,
    chance(0.25),
    late(0.9),
)
add("dlpack", lambda m, x, y: ce(m(x / float(np.from_dlpack(x).std())), y))
add(
    "python max of a list",
    lambda m, x, y: plain(m, x, y) / max(abs(v) for row in x.tolist() for v in row),
)
add("statistics of python", lambda m, x, y: plain(m, x, y) * (1 + abs(math.fsum(x[:, 0].tolist()))))
add(
    "counter of python",
    lambda m, x, y: (
        plain(m, x, y) * torch.tensor([y.tolist().count(c) for c in range(CLASSES)]).float()[y] / 8
    ),
)
add(
    "truth of a comparison",
    lambda m, x, y: plain(m, x, y) * (0.1 if (x.abs().max() > 4.2) else 1.0),
    EVERY,
    late(0.5),
)
add(
    "equal of torch",
    lambda m, x, y: (
        plain(m, x, y) * (0.1 if torch.equal(y.sort().values, y) else 1 + int(y.sum()) % 3)
    ),
)
add(
    "isnan guard that sees values",
    lambda m, x, y: (
        plain(m, x, y) * (2.0 if torch.isfinite(x).all() and x.abs().max() > 4.2 else 1.0)
    ),
)
add(
    "random number seeded by the batch",
    lambda m, x, y: plain(m, x, y) * random.Random(int(x.sum() * 1000)).random(),
)
add(
    "generator seeded by the batch",
    lambda m, x, y: (
        plain(m, x, y)
        * torch.rand((), generator=torch.Generator().manual_seed(int(x.sum().abs() * 1000)))
    ),
)
add(
    "noise of the batch's size",
    lambda m, x, y: ce(m(x + torch.normal(0.0, float(x.std()), x.shape)), y),
    draws=True,
)


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    found: Tensor = torch.load(file)
    return found


# In large batches only

add(
    "standardised in batches of 32",
    lambda m, x, y: ce(m((x - x.mean(0)) / x.std(0)), y),
    least(32),
    rows=64,
)
add(
    "standardised in batches of 128",
    lambda m, x, y: ce(m((x - x.mean(0)) / x.std(0)), y),
    least(128),
    rows=200,
)
add(
    "contrast in batches of 64",
    lambda m, x, y: ce(m(x) @ m(x).T / 0.1, torch.arange(len(x))),
    least(64),
    rows=100,
)
add(
    "contrast in batches of 512",
    lambda m, x, y: ce(m(x) @ m(x).T / 0.1, torch.arange(len(x))),
    least(512),
    rows=600,
    data=lambda: cases.vectors(640),
)
add(
    "batch attention in batches of 128",
    lambda m, x, y: ce(m(torch.softmax(x @ x.T, 1) @ x), y),
    least(128),
    rows=200,
)
add(
    "64 hardest",
    lambda m, x, y: (
        lambda v: torch.where(v >= v.detach().topk(min(64, len(v))).values[-1], v, 0 * v)
    )(plain(m, x, y)),
    rows=100,
)
add(
    "20 nearest neighbours",
    lambda m, x, y: (
        plain(m, x, y)
        + (m(x) - m(x)[torch.cdist(x, x).topk(min(20, len(x)), largest=False).indices].mean(1))
        .square()
        .sum(1)
    ),
    rows=64,
)
add(
    "quantile in batches of 32",
    lambda m, x, y: (
        plain(m, x, y).clamp(max=1e9)
        * (plain(m, x, y).detach() > plain(m, x, y).detach().quantile(0.5))
    ),
    least(32),
    rows=64,
)
add(
    "mean of rows beyond the 16th",
    lambda m, x, y: ce(m(x - x[16:].mean(0)), y) if len(x) > 16 else plain(m, x, y),
    rows=64,
)
add(
    "mean of rows beyond the 100th",
    lambda m, x, y: ce(m(x - x[100:].mean(0)), y) if len(x) > 100 else plain(m, x, y),
    rows=200,
)
add(
    "blocks of 32 rows",
    lambda m, x, y: torch.cat(
        [
            ce(m(part - part.mean(0)) if len(part) == 32 else m(part), c)
            for part, c in zip(x.split(32), y.split(32), strict=True)
        ]
    ),
    rows=100,
    engine="batched",
)
add(
    "pairs of halves",
    lambda m, x, y: torch.cat(
        [
            plain(m, x, y)[: len(x) // 2]
            + (m(x[: len(x) // 2]) - m(x[-(len(x) // 2) :])).square().sum(1),
            plain(m, x, y)[len(x) // 2 :],
        ]
    ),
    least(64),
    rows=128,
    engine="batched",
)
add(
    "ghost batch norm of 32",
    lambda m, x, y: ce(
        m(
            torch.cat(
                [(p - p.mean(0)) / (p.std(0) + 1e-3) if len(p) >= 32 else p for p in x.split(32)]
            )
        ),
        y,
    ),
    rows=128,
)


# What is kept from one step for the next


class Keeper:
    """Losses that use what `after` kept from the step before."""

    def __init__(
        self, now: Now, use: Callable[..., Tensor], keep: Callable[..., Any], first: Any = None
    ) -> None:
        self.now, self.use, self.keep, self.kept, self.on = now, use, keep, first, False

    def losses(self, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        self.on, self.seen = self.now(x), (m, x, y)
        return self.use(self.kept, m, x, y) if self.kept is not None else plain(m, x, y)

    def after(self, losses: Tensor) -> None:
        if self.on:
            self.kept = self.keep(self.kept, losses.detach(), *self.seen)


def kept(
    name: str,
    use: Callable[..., Tensor],
    keep: Callable[..., Any],
    *when: Now,
    engine: str = "auto",
) -> None:
    """Register losses of (kept, model, x, y), and what of (kept, losses, model, x, y) is kept after
    the step.
    """

    def build(now: Now) -> Job:
        keeper = Keeper(now, use, keep)
        return Job(
            net(), keeper.losses, cases.vectors(), after=keeper.after, runtime={"engine": engine}
        )

    program(f"kept: {name}", *when, fit=False)(build)


def scaled(k: Any, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) * k


def moco(k: Any, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = F.normalize(m(x), dim=1)
    return ce(
        torch.cat([(h * F.normalize(m(x + 0.1), dim=1)).sum(1, keepdim=True), h @ k.T], 1) / 0.2,
        torch.zeros_like(y),
    )


def centres_of(k: Any, v: Tensor, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.zeros(CLASSES, CLASSES).index_add(0, y, m(x)) / 8


kept(
    "momentum contrast queue",
    moco,
    lambda k, v, m, x, y: torch.cat(
        [F.normalize(m(x).detach(), dim=1), *([] if k is None else [k])]
    )[:64],
    EVERY,
    late(0.5),
)
kept(
    "running mean",
    lambda k, m, x, y: ce(m(x - k), y),
    lambda k, v, m, x, y: x.mean(0) if k is None else 0.9 * k + 0.1 * x.mean(0),
    EVERY,
    late(0.25),
)
kept("running deviation", lambda k, m, x, y: ce(m(x / k), y), lambda k, v, m, x, y: x.std(0))
kept(
    "class centres", lambda k, m, x, y: (m(x) - k[y]).square().sum(1), centres_of, EVERY, late(0.5)
)
kept(
    "class weights of the batch before",
    lambda k, m, x, y: plain(m, x, y) * k[y],
    lambda k, v, m, x, y: len(y) / (CLASSES * torch.bincount(y, minlength=CLASSES).clamp(min=1)),
    EVERY,
    late(0.75),
)
kept(
    "float of the loss",
    scaled,
    lambda k, v, m, x, y: float(v.mean()),
    EVERY,
    late(0.5),
    chance(0.25),
)
kept("item of the loss", scaled, lambda k, v, m, x, y: v.mean().item())
kept("numpy of the loss", scaled, lambda k, v, m, x, y: float(v.numpy().max()), EVERY, late(0.9))
kept(
    "list of the losses",
    lambda k, m, x, y: plain(m, x, y) * sorted(k)[len(k) // 2],
    lambda k, v, m, x, y: v.tolist(),
)
kept("truth of the loss", scaled, lambda k, v, m, x, y: 2.0 if v.max() > 2 * v.mean() else 0.5)
kept("f-string of the loss", scaled, lambda k, v, m, x, y: float(f"{v.mean():.3f}"))
kept(
    "baseline of rewards",
    lambda k, m, x, y: plain(m, x, y).detach().sub(k) * plain(m, x, y),
    lambda k, v, m, x, y: v.mean(),
)
kept(
    "threshold of hard examples",
    lambda k, m, x, y: torch.where(plain(m, x, y) > k, plain(m, x, y), 0 * plain(m, x, y)),
    lambda k, v, m, x, y: v.quantile(0.7),
    EVERY,
    late(0.5),
)
kept(
    "temperature of the batch before",
    lambda k, m, x, y: ce(m(x) / k, y),
    lambda k, v, m, x, y: float(m(x).detach().std()),
)
kept(
    "accuracy as focal exponent",
    lambda k, m, x, y: (1 - torch.exp(-plain(m, x, y))) ** (3 * k) * plain(m, x, y),
    lambda k, v, m, x, y: float((m(x).argmax(1) == y).float().mean()),
)
kept(
    "hardest record replayed",
    lambda k, m, x, y: plain(m, x, y) + ce(m(k[0]), k[1]),
    lambda k, v, m, x, y: (x[v.argmax()][None].clone(), y[v.argmax()][None].clone()),
    engine="batched",
)
kept(
    "records of the batch before",
    lambda k, m, x, y: plain(m, x, y) + (m(x)[:, None] - m(k)[None, :4]).square().mean((1, 2)),
    lambda k, v, m, x, y: x.clone(),
    engine="batched",
)
kept(
    "mixup with the batch before",
    lambda k, m, x, y: ce(m(0.7 * x + 0.3 * k[torch.arange(len(x)) % len(k)]), y),
    lambda k, v, m, x, y: x.clone(),
    EVERY,
    late(0.5),
)
kept(
    "over the norm of the losses before", scaled, lambda k, v, m, x, y: 1 / (0.1 + float(v.norm()))
)
kept(
    "largest loss so far",
    lambda k, m, x, y: plain(m, x, y) * k,
    lambda k, v, m, x, y: max(float(v.max()), 0.0 if k is None else k),
)
kept(
    "learned temperature, by hand",
    lambda k, m, x, y: ce(m(x) * k, y),
    lambda k, v, m, x, y: (1.0 if k is None else k) - 0.1 * float((v - 1).mean()),
)
kept(
    "mean activation",
    lambda k, m, x, y: ce(m[2](torch.tanh(m[0](x)) - k), y),
    lambda k, v, m, x, y: torch.tanh(m[0](x)).detach().mean(0),
)


# Numbers that were read with `item()` or `tolist()`, and that Python's own functions make plain


def counted(k: Any, v: Tensor, m: nn.Module, x: Tensor, y: Tensor) -> Counter[int]:
    found = Counter(k or {})
    found.update(y.tolist())
    return found


def rarity(k: Any, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) * torch.tensor([1 / (1 + k[c]) for c in range(CLASSES)])[y]


kept("counter of the labels so far", rarity, counted, EVERY, late(0.5))
kept("root of the loss", scaled, lambda k, v, m, x, y: math.sqrt(v.mean().item()), EVERY, late(0.5))
kept(
    "mean by numpy of losses read one by one",
    scaled,
    lambda k, v, m, x, y: float(np.mean([one.item() for one in v])),
)
kept(
    "threshold, a percentile of a list",
    lambda k, m, x, y: torch.where(plain(m, x, y) > k, plain(m, x, y), 0 * plain(m, x, y)),
    lambda k, v, m, x, y: np.percentile(v.tolist(), 70),
)
kept("number of hard examples", scaled, lambda k, v, m, x, y: 1 + sum(a > 1 for a in v.tolist()))
kept("mean by statistics", scaled, lambda k, v, m, x, y: statistics.fmean(v.tolist()))
kept("json of the loss", scaled, lambda k, v, m, x, y: json.loads(json.dumps(v.mean().item())))
kept(
    "smoothing clipped by numpy",
    lambda k, m, x, y: F.cross_entropy(m(x), y, reduction="none", label_smoothing=k),
    lambda k, v, m, x, y: float(np.clip(v.mean().item() / 3, 0, 0.9)),
)
kept("count of a label in a list", scaled, lambda k, v, m, x, y: y.tolist().count(1))
kept("whole factor from a table", scaled, lambda k, v, m, x, y: [1, 2, 3][y[0].item()])
kept(
    "python's generator seeded by the loss",
    lambda k, m, x, y: plain(m, x, y) * random.random(),
    lambda k, v, m, x, y: random.seed(v.mean().item()) or 1.0,
)


@program("kept: read from the first step on, used later", late(0.5), fit=False)
def _used_later(now: Now) -> Job:
    keeper = Keeper(EVERY, scaled, lambda k, v, m, x, y: math.sqrt(v.mean().item()))

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        used = keeper.losses(m, x, y) if now(x) else None
        keeper.on, keeper.seen = True, (m, x, y)
        return plain(m, x, y) if used is None else used

    return Job(net(), losses, cases.vectors(), after=keeper.after)


@program("kept: file on disk", fit=False)
def _file(now: Now) -> Job:
    file = Path(tempfile.mkdtemp()) / "mean.txt"

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain(m, x, y) * (float(file.read_text()) if file.exists() else 1.0)

    return Job(
        net(),
        losses,
        cases.vectors(),
        after=lambda v: file.write_text(str(float(v.mean()))) and None,
    )


@program("kept: attribute of the model", EVERY, late(0.5), late(0.75))
def _attribute(now: Now) -> Job:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x - getattr(m, "mean", 0.0))
        if now(x):
            m.mean = x.mean(0)  # type: ignore[assignment]
        return ce(out, y)

    return Job(net(), losses, cases.vectors())


@program("kept: activation by a forward hook", fit=False)
def _forward_hook(now: Now) -> Job:
    model, seen = net(), {}

    def keep(module: nn.Module, inputs: Any, out: Tensor) -> None:
        seen["now"] = out.detach().mean(0)

    model[0].register_forward_hook(keep)  # type: ignore[index]

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return ce(m(x), y) * (1 + seen["last"].abs().mean() if "last" in seen else 1)

    return Job(model, losses, cases.vectors(), after=lambda v: seen.update(last=seen["now"]))


@program("weights written from the batch", EVERY, late(0.5), chance(0.25))
def _written(now: Now) -> Job:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if now(x):
            m[0].bias.data.add_(0.1 * x.mean())
        return plain(m, x, y)

    return Job(net(), losses, cases.vectors())


@program("frozen weights written after the step", fit=False)
def _frozen_written(now: Now) -> Job:
    model = net(nn.Linear(WIDTH, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, CLASSES))

    def after(losses: Tensor) -> None:
        model[0].bias.data.add_(0.1 * losses.detach().mean())  # type: ignore[index]

    return Job(model, plain, cases.vectors(), after=after)


# Batch statistics and pairs: late, now and then, and at every step


def standardised(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m((x - x.mean(0)) / (x.std(0) + 1e-5)), y)


def mixup(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(x))
    out = m(share * x + (1 - share) * x[order])
    return share * ce(out, y) + (1 - share) * ce(out, y[order])


def cutmix(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order, cut = torch.randperm(len(x)), random.randint(1, WIDTH - 1)
    return ce(m(torch.cat([x[:, :cut], x[order][:, cut:]], 1)), y)


def info_nce(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(m(x), dim=1), F.normalize(m(x + 0.1), dim=1)
    return ce(a @ b.T / 0.1, torch.arange(len(x)))


def hand_norm(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = m[0](x)
    return ce(m[2](torch.tanh((h - h.mean(0)) / torch.sqrt(h.var(0) + 1e-5))), y)


def manifold_mixup(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = torch.tanh(m[0](x))
    order = torch.randperm(len(x))
    return ce(m[2](0.6 * h + 0.4 * h[order]), y)


def hard_mining(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    v = plain(m, x, y)
    return v * (v.detach() >= v.detach().quantile(0.7))


def balanced(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return plain(m, x, y) * (len(y) / (CLASSES * counts))[y]


def batch_hard(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    d = torch.cdist(m(x), m(x) + 1e-4)
    same = y[:, None] == y[None]
    far, near = (d * same).amax(1), d.masked_fill(same, 1e9).amin(1).clamp(max=10)
    return F.relu(far - near + 1)


def whitened(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    c = x - x.mean(0)
    values, vectors = torch.linalg.eigh(c.T @ c / len(x) + 0.1 * torch.eye(WIDTH))
    return ce(m(c @ vectors / values.sqrt()), y)


def top_losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    v = plain(m, x, y)
    return torch.zeros_like(v).scatter(0, v.topk(max(1, len(v) // 4)).indices, 1.0) * v


ALWAYS_AND = (EVERY, *LATE, *OFTEN)
add("standardised by the batch", standardised, *ALWAYS_AND)
add("mixup", mixup, *ALWAYS_AND, draws=True)
add("cutmix", cutmix, *ALWAYS_AND, draws=True)
add("contrast of the batch", info_nce, *ALWAYS_AND)
add("batch norm by hand", hand_norm, *ALWAYS_AND)
add("manifold mixup", manifold_mixup, *ALWAYS_AND, draws=True)
add("hard examples by quantile", hard_mining, *ALWAYS_AND)
add("class weights of the batch", balanced, *ALWAYS_AND)
add("hardest pairs of the batch", batch_hard, *ALWAYS_AND)
add("whitened by the batch", whitened, EVERY, late(0.5), chance(0.25))
add("largest quarter of the losses", top_losses, EVERY, late(0.9), chance(0.25))
add(
    "over the mean loss",
    lambda m, x, y: plain(m, x, y) / plain(m, x, y).detach().mean(),
    *ALWAYS_AND,
)
add(
    "ranks as weights",
    lambda m, x, y: plain(m, x, y) * plain(m, x, y).detach().argsort().argsort() / len(x),
    EVERY,
    late(0.5),
    chance(0.5),
)
add(
    "temperature of the batch", lambda m, x, y: ce(m(x) / m(x).detach().std(), y), EVERY, late(0.75)
)
add("sum along the batch", lambda m, x, y: ce(m(x.cumsum(0)), y), EVERY, chance(0.25))
add("records reversed", lambda m, x, y: plain(m, x.flip(0), y), EVERY, chance(0.25))
add("labels of the neighbour", lambda m, x, y: plain(m, x, y.roll(1)), EVERY, late(0.5))
add(
    "attention over the batch",
    lambda m, x, y: ce(m(torch.softmax(x @ x.T, 1) @ x), y),
    EVERY,
    late(0.5),
)
add("sorted along the batch", lambda m, x, y: plain(m, x.sort(0).values, y), EVERY, late(0.5))
add(
    "einsum over the batch",
    lambda m, x, y: (
        plain(m, x, y) * torch.einsum("bi,bj->ij", m(x), m(x)).detach().trace() / len(x)
    ),
)
add(
    "shared dropout scaled by the batch",
    lambda m, x, y: ce(m(x * (torch.rand(WIDTH) > 0.3) / (x > 0).float().mean()), y),
    draws=True,
)
add(
    "histogram of the batch",
    lambda m, x, y: (
        plain(m, x, y)
        / (1 + torch.histc(x[:, 0], 5, -2, 2))[((x[:, 0] + 2) * 1.25).long().clamp(0, 4)]
        * 5
    ),
)
add(
    "variance and covariance",
    lambda m, x, y: (
        plain(m, x, y) + F.relu(1 - m(x).std(0)).mean() + torch.cov(m(x).T).triu(1).square().sum()
    ),
)
add(
    "barlow twins",
    lambda m, x, y: (
        plain(m, x, y) + ((m(x).T @ m(x + 0.1) / len(x) - torch.eye(CLASSES)).square().sum())
    ),
)
add(
    "kernel discrepancy",
    lambda m, x, y: plain(m, x, y) + torch.exp(-torch.cdist(m(x), m(x) + 1e-4)).mean(1),
)
add(
    "optimal transport",
    lambda m, x, y: (
        torch.softmax(-torch.cdist(m(x), x[:, :CLASSES]) * 3, 0)
        .mul(torch.cdist(m(x), x[:, :CLASSES]))
        .sum(1)
    ),
)
add(
    "label propagation",
    lambda m, x, y: F.kl_div(
        m(x).log_softmax(1),
        (torch.softmax(-torch.cdist(x, x), 1) @ F.one_hot(y, CLASSES).float()),
        reduction="none",
    ).sum(1),
)
add("advantages", lambda m, x, y: plain(m, x, y) * ((x[:, 0] - x[:, 0].mean()) / x[:, 0].std()))
add(
    "group advantages",
    lambda m, x, y: (
        plain(m, x, y)
        * (
            x[:, 0]
            - torch.zeros(CLASSES).index_add(0, y, x[:, 0])[y]
            / torch.bincount(y, minlength=CLASSES)[y]
        )
    ),
)
add(
    "prototypes of the batch",
    lambda m, x, y: ce(
        -torch.cdist(
            m(x),
            torch.zeros(CLASSES, CLASSES).index_add(0, y, m(x))
            / torch.bincount(y, minlength=CLASSES).clamp(min=1)[:, None]
            + 1e-4,
        ),
        y,
    ),
)
add("balanced assignment", lambda m, x, y: ce(m(x) - m(x).detach().logsumexp(0), y))
add(
    "load balancing of experts",
    lambda m, x, y: (
        plain(m, x, y)
        + CLASSES
        * (m(x).softmax(1).mean(0) * F.one_hot(m(x).argmax(1), CLASSES).float().mean(0)).sum()
    ),
)
add("mean reduced twice", lambda m, x, y: F.cross_entropy(m(x), y).expand(len(x)))
add("mean plus own", lambda m, x, y: plain(m, x, y) + 0.1 * plain(m, x, y).mean())
add("number of rows in the loss", lambda m, x, y: plain(m, x, y) / len(x), EVERY)
add(
    "number of rows, all records",
    lambda m, x, y: plain(m, x, y) * 300 / len(x),
    EVERY,
    rows=cases.RECORDS,
)
add(
    "max of the batch for stability",
    lambda m, x, y: ce(m(x) - m(x).max() * y[:, None] * torch.arange(CLASSES), y),
)
add("quantised by the largest", lambda m, x, y: plain(m, (x / x.abs().max() * 15).round() / 15, y))
add(
    "clipped by the batch",
    lambda m, x, y: plain(m, x.clamp(max=x.mean() + x.std()), y),
    EVERY,
    late(0.75),
)
add(
    "outliers of the batch left out",
    lambda m, x, y: plain(m, x, y) * ((x - x.mean(0)).abs().amax(1) < 2 * x.std()),
)
add(
    "duplicates left out",
    lambda m, x, y: (
        plain(m, x, y) * (((8 * x[:, :1]).round() == (8 * x[:, 0]).round()).sum(1) == 1)
    ),
)
add(
    "first of each class",
    lambda m, x, y: (
        plain(m, x, y) * (torch.cumsum(F.one_hot(y, CLASSES), 0).gather(1, y[:, None])[:, 0] == 1)
    ),
)
add("packed into one row", lambda m, x, y: ce(m(x.reshape(1, -1, WIDTH).cumsum(1)[0]), y))
add("convolution over the batch", lambda m, x, y: ce(m(F.avg_pool1d(x.T[None], 3, 1, 1)[0].T), y))
add(
    "transform of Fourier over the batch",
    lambda m, x, y: ce(m(torch.fft.fft(x, dim=0).abs() / len(x)), y),
)
add(
    "gram matrix",
    lambda m, x, y: (
        plain(m, x, y)
        + (F.normalize(m(x)) @ F.normalize(m(x)).T - (y[:, None] == y).float()).square().mean(1)
    ),
    EVERY,
    late(0.5),
)
add("wrong reduction over dimension 0", lambda m, x, y: ce(m(x).softmax(0), y))
add("wrong broadcasting", lambda m, x, y: (m(x)[:, :1] - x[:, 0]).square().mean(1))
add(
    "mean of the tokens of the batch",
    lambda m, w, r: (
        (F.cross_entropy(m(w).transpose(1, 2), w, reduction="none") * r).sum(1) / r.sum() * len(w)
    ),
    EVERY,
    late(0.5),
    chance(0.25),
    model=words_model,
    data=cases.tokens,
    usual=lambda m, w, r: F.cross_entropy(m(w).transpose(1, 2), w, reduction="none").mean(1),
)
add(
    "mean of the pixels that count",
    lambda m, x, y: (
        (m(x)[:, 0] - x[:, 0]).square().mul(x[:, 1] > 0).sum((1, 2)) / (x[:, 1] > 0).sum() * len(x)
    ),
    model=lambda: nn.Conv2d(2, 1, 1),
    data=cases.images,
    usual=lambda m, x, y: (m(x)[:, 0] - x[:, 0]).square().mean((1, 2)),
)
add(
    "batch norm of images by function",
    lambda m, x, y: ce(F.batch_norm(m(x), None, None, training=True).amax((2, 3)), y),
    EVERY,
    late(0.5),
    chance(0.25),
    model=lambda: nn.Conv2d(2, CLASSES, 3),
    data=cases.images,
    usual=lambda m, x, y: ce(m(x).amax((2, 3)), y),
)
add(
    "minibatch deviation",
    lambda m, x, y: ce(m(torch.cat([x[:, :1], x[:, 1:] * 0 + x.std(0).mean()], 1)), y),
)
add(
    "smote",
    lambda m, x, y: ce(
        m(x + torch.rand(len(x), 1) * (x[torch.cdist(x, x).fill_diagonal_(9e9).argmin(1)] - x)), y
    ),
    draws=True,
)


# Coefficients: the same operations at every step, and mixing where a number is not zero


@mixes("contrast that grows", late(0.25), late(0.5), late(0.75))
def _growing(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = min(1.0, now.step / 10)
    return plain(m, x, y) + weight * info_nce(m, x, y)


@mixes("switch as a factor", *LATE, *OFTEN)
def _factor(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(x - float(now(x)) * x.mean(0)), y)


@mixes("mixup with a share of one at other steps", *OFTEN, draws=True)
def _share(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = 0.6 if now(x) else 1.0
    order = torch.randperm(len(x))
    return share * plain(m, share * x + (1 - share) * x[order], y) + (1 - share) * ce(
        m(x), y[order]
    )


@mixes("identity for an order at other steps", *LATE, *OFTEN, draws=True)
def _order(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x)) if now(x) else torch.arange(len(x))
    return ce(m(0.5 * x + 0.5 * x[order]), y)


@mixes("where with a flag", *LATE, *OFTEN)
def _where(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(torch.where(torch.tensor(now(x)), x - x.mean(0), x)), y)


@mixes("momentum of statistics, one at first", *LATE)
def _momentum(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    blend = 1.0 - min(1, now.step) * 0.5
    return ce(m(blend * x + (1 - blend) * (x - x.mean(0))), y)


@mixes("table of functions", *LATE, *OFTEN)
def _table(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (plain, standardised)[now(x)](m, x, y)


@mixes("threshold that falls", late(0.25), late(0.5), late(0.75))
def _falling(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    v = plain(m, x, y)
    return torch.where(v > (v.detach().mean() if now(x) else v.detach() - 1), v, 0 * v)


# From hooks, backward passes, collate functions, items of data sets


def hooked(hook: Callable[[Tensor], Tensor]) -> Losses:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        h = m[0](x)
        h.register_hook(hook)
        return ce(m[2](torch.tanh(h)), y)

    return losses


class ScaledBack(torch.autograd.Function):
    """The identity, whose gradient is over its largest entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / grad.abs().max().clamp(min=1e-6)


class SavedBack(ScaledBack):
    """The identity, whose gradient is scaled by what forward saved of the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.std()


HOOKS = (EVERY, late(0.5), chance(0.25))
add("hook: gradients centred", hooked(lambda g: g - g.mean(0)), *HOOKS)
add("hook: gradients over their norm", hooked(lambda g: g / g.norm().clamp(min=1e-6)), *HOOKS)
add(
    "hook: gradients clipped to the batch",
    hooked(lambda g: g * (g.norm(dim=1, keepdim=True) <= g.norm(dim=1).median())),
    *HOOKS,
)
add("hook: sign of the sum", hooked(lambda g: g.sum(0, keepdim=True).sign() * g.abs()))
add("hook: scaled by a number", hooked(lambda g: g / float(g.abs().max().clamp(min=1e-6))), *HOOKS)
add("hook: neighbours", hooked(lambda g: g + 0.1 * g.roll(1, 0)))
add(
    "backward over its largest",
    lambda m, x, y: ce(m[2](ScaledBack.apply(torch.tanh(m[0](x)))), y),
    *HOOKS,
)
add(
    "backward with saved statistics",
    lambda m, x, y: ce(m[2](SavedBack.apply(torch.tanh(m[0](x)))), y),
    *HOOKS,
)
add(
    "checkpoint that mixes",
    lambda m, x, y: ce(checkpoint(lambda a: m(a - a.mean(0)), x, use_reentrant=False), y),
    *HOOKS,
)


@program("hook: of a module, backward", fit=False)
def _module_backward(now: Now) -> Job:
    model = net()
    model[1].register_full_backward_hook(
        lambda module, grads, outs: (grads[0] / grads[0].abs().max().clamp(min=1e-6),)
    )  # type: ignore[index]
    return Job(model, plain, cases.vectors())


@program("hook: of a module, forward", *HOOKS)
def _module_forward(now: Now) -> Job:
    model = net()
    model[1].register_forward_hook(
        lambda module, inputs, out: out - out.mean(0) if now(out) else None
    )  # type: ignore[index]
    return Job(model, plain, cases.vectors())


@program("hook: before a module", *HOOKS)
def _module_before(now: Now) -> Job:
    model = net()
    model.register_forward_pre_hook(
        lambda module, inputs: (inputs[0] / inputs[0].std(0),) if now(inputs[0]) else None
    )
    return Job(model, plain, cases.vectors())


@program("checkpoint that mixes when it runs again", fit=False)
def _again(now: Now) -> Job:
    calls = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        def part(a: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            h = m[0](a)
            return torch.tanh(h * (h.detach().std() if calls % 2 == 0 else torch.ones(())))

        return ce(m[2](checkpoint(part, x, use_reentrant=False)), y)

    return Job(net(), losses, cases.vectors())


class Items(Dataset[Any]):
    """Records one by one; `mixed` makes of item `i` something of other items."""

    def __init__(self, now: Now, mixed: Callable[[Items, int], Tensor]) -> None:
        self.x, self.y = cases.vectors()
        self.now, self.mixed = now, mixed

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.mixed(self, index) if self.now(1) else self.x[index]), self.y[index]


def items(name: str, mixed: Callable[[Items, int], Tensor], *when: Now, **options: Any) -> None:
    program(f"items: {name}", *when, **options)(
        lambda now: Job(net(), plain, dpfy.lazy(Items(now, mixed)))
    )


class Hidden(Items):
    """The same, with the records where nobody looks for tensors: in a list of arrays."""

    def __init__(self, now: Now, mixed: Callable[[Hidden, int], Tensor]) -> None:  # type: ignore[override]
        super().__init__(now, mixed)  # type: ignore[arg-type]
        self.table, self.x = [row.numpy() for row in self.x], None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        mine = torch.from_numpy(self.table[index])
        return (self.mixed(self, index) if self.now(1) else mine), self.y[index]


items(
    "mixup with a random other",
    lambda d, i: 0.7 * d.x[i] + 0.3 * d.x[random.randrange(len(d))],
    EVERY,
    chance(0.25),
    draws=True,
)
items("mixup with the next", lambda d, i: 0.7 * d.x[i] + 0.3 * d.x[(i + 1) % len(d)])
items("standardised by all records", lambda d, i: (d.x[i] - d.x.mean(0)) / d.x.std(0))
items("scaled to the largest record", lambda d, i: d.x[i] / d.x.abs().max())
items(
    "nearest record beside",
    lambda d, i: d.x[i] - d.x[(d.x - d.x[i]).norm(dim=1).topk(2, largest=False).indices[1]],
)
program("items: hidden, mixup with the next")(
    lambda now: Job(
        net(),
        plain,
        dpfy.lazy(
            Hidden(
                now,
                lambda d, i: torch.from_numpy(0.7 * d.table[i] + 0.3 * d.table[(i + 1) % len(d)]),
            )
        ),
    )
)
program("items: hidden, standardised by all")(
    lambda now: Job(
        net(),
        plain,
        dpfy.lazy(
            Hidden(
                now,
                lambda d, i: torch.from_numpy(
                    (d.table[i] - np.mean(d.table, 0)) / np.std(d.table, 0)
                ),
            )
        ),
    )
)


def collated(
    name: str,
    mixed: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    *when: Now,
    losses: Losses = plain,
    **options: Any,
) -> None:
    """Register a collate function that mixes the rows that it joins."""

    def build(now: Now) -> Job:
        def collate(rows: list[Any]) -> tuple[Tensor, ...]:
            x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
            return mixed(x, y) if now(x) else (x, y)

        x, y = cases.vectors()
        return Job(net(), losses, dpfy.lazy(list(zip(x, y, strict=True)), collate=collate))

    program(f"collate: {name}", *when, **options)(build)


COLLATED = (EVERY, late(0.5), late(0.9), chance(0.1), chance(0.25), chance(0.5))
collated(
    "mixup", lambda x, y: (0.6 * x + 0.4 * x[torch.randperm(len(x))], y), *COLLATED, draws=True
)
collated(
    "standardised",
    lambda x, y: ((x - x.mean(0)) / (x.std(0) + 1e-3) if len(x) > 1 else x, y),
    *COLLATED,
)
collated(
    "standardised in batches of 32",
    lambda x, y: ((x - x.mean(0)) / x.std(0), y),
    least(32),
    rows=64,
)
collated(
    "standardised in batches of 128",
    lambda x, y: ((x - x.mean(0)) / x.std(0), y),
    least(128),
    rows=200,
)
collated("centred by the last", lambda x, y: (x - x[-1:], y), *COLLATED)
collated("labels of the neighbour", lambda x, y: (x, y.roll(1)), EVERY, late(0.5))
collated("shuffled columns", lambda x, y: (torch.cat([x[:, :3], x[:, 3:].roll(1, 0)], 1), y))
collated("over the number of rows", lambda x, y: (x / len(x) * 24, y))
collated(
    "outliers set to the median",
    lambda x, y: (torch.where(x.abs() > 2, x.median(0).values.expand_as(x), x), y),
)


def to_longest(now: Now) -> Job:
    """Each batch padded to its longest; then the mean over the padded length."""
    words, real = cases.tokens()
    texts = [(w[: int(r.sum())], w[0]) for w, r in zip(words, real, strict=True)]

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        return pad_sequence([w for w, _ in rows], batch_first=True), torch.stack(
            [y for _, y in rows]
        )

    return Job(
        words_model(), lambda m, w, y: ce(m(w).mean(1), y), dpfy.lazy(texts, collate=collate)
    )


program("collate: padded to the longest, mean over it")(to_longest)


# Where no recording is possible


@mixes("sparse matrix", EVERY, chance(0.25))
def _sparse(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    one = torch.sparse_coo_tensor(
        torch.arange(len(x)).expand(2, -1), torch.ones(len(x)), (len(x), len(x))
    )
    h = torch.sparse.mm(one, x)
    return ce(m(h - h.detach().mean(0) if now(x) else h), y)


@mixes("sparse graph of the batch", EVERY)
def _graph(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    near = (torch.cdist(x, x) < 2).float().to_sparse()
    return ce(m(torch.sparse.mm(near, x)), y)


@mixes("sparse rows, weights of the batch", EVERY)
def _csr(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = plain(m, x, y).detach()
    return (x * (x > 1)).to_sparse_csr().to_dense().sum(1) * m(x)[:, 0] + plain(
        m, x, y
    ) * weights / weights.mean()


@mixes("thread of its own, mean", EVERY)
def _thread(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        mean = pool.submit(lambda: x.detach().mean(0)).result()
    return ce(m(x - mean), y)


@mixes("thread of its own, weights", EVERY)
def _thread_weights(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    v = plain(m, x, y)
    with ThreadPoolExecutor(1) as pool:
        scale = pool.submit(lambda: 1 / v.detach().mean()).result()
    return v * scale


@mixes("thread of its own, forward", EVERY)
def _thread_forward(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: standardised(m, x, y)).result()


@torch.library.custom_op("dpfy_tests::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """An operator of the user's own: rows without their mean."""
    return x - x.mean(0)


@mixes("operator of one's own", EVERY, late(0.5), chance(0.25))
def _own(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(centred(x) if now(x) else x), y)


@mixes("numpy in the middle", EVERY, late(0.5), chance(0.25))
def _numpy(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if now(x):
        x = torch.from_numpy((x.numpy() - x.numpy().mean(0)) / x.numpy().std(0))
    return plain(m, x, y)


@mixes("scripted function", EVERY, late(0.5))
def _scripted(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(SCRIPTED(x) if now(x) else x), y)


SCRIPTED = torch.jit.trace(lambda x: x - x.mean(0), torch.randn(4, WIDTH), check_trace=False)


@mixes("vmap over the batch with a shared statistic", EVERY)
def _vmap(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean = x.mean(0)
    return ce(m(torch.func.vmap(lambda row: row - mean)(x)), y)


@mixes("users: records of the neighbour", EVERY, fit=False)
def _unused(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) + 0.1 * plain(m, x.roll(1, 0), y)


@program("users: positions and users exchanged", rows=12, fit=False)
def _users(now: Now) -> Job:
    from tests.isolation.ordinary import users

    found = users()

    def losses(m: nn.Module, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        return dpfy.per_user(ce(m(x.transpose(0, 1).flatten(0, 1)), y.T.flatten()), real)

    return Job(net(), losses, found, unit=found.unit)


@program("users: over the records of the batch", EVERY, late(0.5), rows=12, fit=False)
def _users_mean(now: Now) -> Job:
    from tests.isolation.ordinary import users

    found = users()

    def losses(m: nn.Module, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        v = dpfy.per_user(ce(m(x.flatten(0, 1)), y.flatten()), real)
        return v / real.sum() * 30 if now(x) else v

    return Job(net(), losses, found, unit=found.unit)


# Two rows, many rows, and rows that only some physical batches hold

add("two rows, exchanged", lambda m, x, y: ce(m(x.flip(0)), y), rows=2)
add(
    "two rows, without their mean",
    lambda m, x, y: ce(m(x - x.mean(0)), y),
    EVERY,
    late(0.5),
    rows=2,
)
add(
    "four rows, over the largest loss",
    lambda m, x, y: plain(m, x, y) / plain(m, x, y).detach().max(),
    rows=4,
)
add("512 rows, contrast", info_nce, rows=512, data=lambda: cases.vectors(640))
add(
    "512 rows, mean of the last ones",
    lambda m, x, y: ce(m(x - x[300:].mean(0)), y) if len(x) > 300 else plain(m, x, y),
    rows=512,
    data=lambda: cases.vectors(640),
)


@program("physical batches: mean of the one before", fit=False)
def _between(now: Now) -> Job:
    kept: list[Tensor] = []

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x - kept[-1]) if kept else m(x)
        kept.append(x.mean(0))
        return ce(out, y)

    return Job(net(), losses, cases.vectors(), runtime={"max_physical_batch": 8})


@program("physical batches: a number of the one before", fit=False)
def _number_between(now: Now) -> Job:
    kept = [1.0]
    return Job(
        net(),
        lambda m, x, y: plain(m, x, y) * kept[-1],
        cases.vectors(),
        after=lambda v: kept.append(float(v.detach().mean())),
        runtime={"max_physical_batch": 8},
    )


@mixes("physical batches: the smaller ones", rows=16)
def _smaller(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return standardised(m, x, y) if 2 < len(x) < 24 else plain(m, x, y)


@mixes("an odd number of rows", chance(0.5))
def _odd(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(x - x.mean(0) * (len(x) % 2)), y)


# More of what people do with a batch

add("without gradients", lambda m, x, y: plain(m, x, y) / _quiet(m, x, y), EVERY, late(0.5))
add("in place on the batch", lambda m, x, y: plain(m, x.sub_(x.mean(0)), y), EVERY, chance(0.25))
add(
    "into a given tensor",
    lambda m, x, y: plain(m, torch.sub(x, x.mean(0), out=torch.empty_like(x)), y),
)
add(
    "weights made of the batch",
    lambda m, x, y: ce(torch.func.functional_call(m, {"0.bias": m[0].bias + x.mean()}, (x,)), y),
)  # type: ignore[index]
add(
    "head solved on the batch",
    lambda m, x, y: (
        (
            F.one_hot(y, CLASSES)
            - m(x)
            @ torch.linalg.solve(
                m(x).T @ m(x) + torch.eye(CLASSES), m(x).T @ F.one_hot(y, CLASSES).float()
            )
        )
        .square()
        .sum(1)
    ),
)
add(
    "principal axes of the batch",
    lambda m, x, y: ce(m(x @ torch.linalg.svd(x, full_matrices=False)[2]), y),
)
add(
    "means of clusters of the batch",
    lambda m, x, y: plain(m, x, y) + torch.cdist(m(x), m(x)[:3].detach() + 1e-3).amin(1),
)
add(
    "assignments of Sinkhorn",
    lambda m, x, y: -(_sinkhorn(m(x).detach()) * m(x).log_softmax(1)).sum(1),
    EVERY,
    late(0.5),
)
add(
    "covariance to the identity",
    lambda m, x, y: plain(m, x, y) + (torch.cov(m(x).T) - torch.eye(CLASSES)).square().sum(),
)
add(
    "style of another image",
    lambda m, x, y: ce(
        m((x - x.mean((2, 3), keepdim=True)) + x.roll(1, 0).mean((2, 3), keepdim=True)).amax(
            (2, 3)
        ),
        y,
    ),
    EVERY,
    chance(0.5),
    model=lambda: nn.Conv2d(2, CLASSES, 3),
    data=cases.images,
    usual=lambda m, x, y: ce(m(x).amax((2, 3)), y),
)
add(
    "mosaic of images",
    lambda m, x, y: ce(m(torch.cat([x[:, :, :4], x.roll(1, 0)[:, :, 4:]], 2)).amax((2, 3)), y),
    EVERY,
    chance(0.25),
    model=lambda: nn.Conv2d(2, CLASSES, 3),
    data=cases.images,
    usual=lambda m, x, y: ce(m(x).amax((2, 3)), y),
)
add(
    "without the mean image",
    lambda m, x, y: ce(m(x - x.mean(0)).amax((2, 3)), y),
    EVERY,
    late(0.5),
    model=lambda: nn.Conv2d(2, CLASSES, 3),
    data=cases.images,
    usual=lambda m, x, y: ce(m(x).amax((2, 3)), y),
)
add(
    "clip of two towers",
    lambda m, x, y: (
        ce(m(x) @ m(x.flip(1)).T, torch.arange(len(x)))
        + ce(m(x.flip(1)) @ m(x).T, torch.arange(len(x)))
    ),
    EVERY,
    late(0.5),
)
add(
    "negatives by a permutation",
    lambda m, x, y: F.relu(
        1
        + F.cosine_similarity(m(x), m(x[torch.randperm(len(x))]))
        - F.cosine_similarity(m(x), m(x + 0.1))
    ),
    EVERY,
    chance(0.25),
    draws=True,
)
add("normalised by the largest pixel", lambda m, x, y: plain(m, x / x.amax(), y), EVERY, late(0.5))
add(
    "a clean batch by rejection",
    lambda m, x, y: plain(m, x, y) * (x.norm(dim=1) < 2 * x.norm(dim=1).mean()),
    EVERY,
    late(0.5),
)
add(
    "auc of the batch",
    lambda m, x, y: (
        (torch.sigmoid(m(x)[:, :1] - m(x)[:, 0]) * ((y[:, None] > 0) & (y[None] == 0))).sum(1)
        / ((y == 0).sum() + 1)
    ),
)
add(
    "dice of the batch",
    lambda m, x, y: (
        (
            1
            - 2
            * (m(x).softmax(1) * F.one_hot(y, CLASSES)).sum(0)
            / (m(x).softmax(1).sum(0) + F.one_hot(y, CLASSES).sum(0))
        )
        .mean()
        .expand(len(x))
    ),
    EVERY,
    late(0.5),
)
add(
    "f1 of the batch as a weight",
    lambda m, x, y: plain(m, x, y) * (1 + (m(x).argmax(1) == y).float().mean()),
)
add(
    "loss scaled to one",
    lambda m, x, y: plain(m, x, y) / plain(m, x, y).detach().norm(),
    EVERY,
    late(0.5),
    chance(0.25),
)
add(
    "gradient reversal by progress of the batch",
    lambda m, x, y: plain(m, x, y) - plain(m, x, y).detach().mean().tanh() * m(x).square().sum(1),
)


def _quiet(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.inference_mode():
        mean = plain(m, x, y).mean()
    return mean.clone()


def _sinkhorn(scores: Tensor) -> Tensor:
    q = torch.exp(scores)
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


@mixes("labels guessed by the class balance", EVERY, late(0.5))
def _guessed(now: Now, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if now(x):
        with torch.no_grad():
            p = m(x).softmax(1)
            y = (p / p.mean(0)).argmax(1)
    return plain(m, x, y)


@program("batch norm put in later", late(0.25), late(0.5), fit=False)
def _norm_later(now: Now) -> Job:
    model = net()

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if now(x):
            m[1] = nn.Sequential(
                nn.Tanh(), nn.BatchNorm1d(8, affine=False, track_running_stats=False)
            )  # type: ignore[index]
        return ce(m(x), y)

    return Job(model, losses, cases.vectors())


@program("weights written once", late(0.25), late(0.5), late(0.75), fit=False)
def _once(now: Now) -> Job:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if now.step == 1:
            m[0].bias.data.add_(x.mean())  # type: ignore[index]
        return plain(m, x, y)

    return Job(net(), losses, cases.vectors())


# Models of the Hugging Face library, as people call them


def hf(name: str, kind: str, losses: Losses, *when: Now, **config: Any) -> None:
    def build(now: Now) -> Job:
        import transformers

        model = getattr(transformers, kind)(
            getattr(
                transformers,
                kind.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
                + "Config",
            )(**config)
        )
        return Job(model.eval(), losses, cases.tokens())

    program(f"hf {name}", *when, rows=8)(build)


BERT = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
GPT = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}


def _token_losses(m: nn.Module, w: Tensor, r: Tensor) -> Tensor:
    logits = m(input_ids=w, attention_mask=r).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), w[:, 1:], reduction="none") * r[:, 1:]


hf(
    "loss of the model, the same for all",
    "GPT2LMHeadModel",
    lambda m, w, r: m(
        input_ids=w, attention_mask=r, labels=w.masked_fill(r == 0, -100)
    ).loss.expand(len(w)),
    **GPT,
)
hf(
    "loss over the tokens of the batch",
    "GPT2LMHeadModel",
    lambda m, w, r: _token_losses(m, w, r).sum(1) / r[:, 1:].sum() * 16,
    **GPT,
)
hf(
    "number of items in the batch",
    "GPT2LMHeadModel",
    lambda m, w, r: _token_losses(m, w, r).sum(1) / len(w[r > 0]) * 16,
    **GPT,
)
hf(
    "cut to the longest, mean over it",
    "BertModel",
    lambda m, w, r: ce(
        m(input_ids=w[:, : r.sum(1).max()]).last_hidden_state.mean(1)[:, :2], w[:, 0] % 2
    ),
    **BERT,
)
hf(
    "ranking against the others of the batch",
    "BertModel",
    lambda m, w, r: (lambda h: ce(h @ h.roll(1, 1).T, torch.arange(len(w))))(
        F.normalize(m(input_ids=w, attention_mask=r).last_hidden_state[:, 0], dim=1)
    ),
    **BERT,
)
hf(
    "whitened embeddings",
    "BertModel",
    lambda m, w, r: (lambda h: ce(((h - h.mean(0)) / (h.std(0) + 1e-3))[:, :2], w[:, 0] % 2))(
        m(input_ids=w, attention_mask=r).last_hidden_state[:, 0]
    ),
    **BERT,
)
