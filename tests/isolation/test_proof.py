"""The proof that a step keeps its examples apart: what it proves is true of random programs, and of
what mixes it proves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
from tests.isolation.test_program import recorded
from torch import Tensor, nn
from torch.nn import functional as F

from dpfy.isolation.proof import works_apart

ROWS = 6
Step = Callable[[Tensor], Tensor]


def proven(function: Step, x: Tensor) -> bool:
    program, result = recorded(function, x)
    return works_apart(program, [program.ref(result)], [program.ref(x)], len(x))


def apart(function: Step, x: Tensor, tries: int = 3) -> bool:
    """Whether other rows keep their bits when some are replaced, as far as trials show it."""
    for seed in range(tries):
        torch.manual_seed(seed)
        rows = torch.randperm(len(x))[: 1 + seed % (len(x) - 1)]
        other = x.clone()
        other[rows] = 5 * torch.randn_like(x[rows])
        torch.manual_seed(1)
        a = function(x.clone())
        torch.manual_seed(1)
        b = function(other)
        rest = torch.ones(len(x), dtype=torch.bool)
        rest[rows] = False
        if not torch.equal(a.nan_to_num(7.0)[rest], b.nan_to_num(7.0)[rest]):
            return False
    return True


def layer(module: nn.Module) -> Step:
    torch.manual_seed(2)
    return module.requires_grad_(False)


def with_gradient(function: Step) -> Step:
    """The gradient of what the function gives, row by row."""

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).flatten(1).sum(1), x, torch.ones(len(x)))[0]

    return gradient


INTS = torch.arange(ROWS * 4).view(ROWS, 4) % 4

# of a batch of 6 rows, each 4 by 8 numbers
APART: dict[str, Step] = {
    "linear": layer(nn.Linear(8, 3)),
    "linear over folded rows": lambda x: layer(nn.Linear(8, 3))(x.flatten(0, 1)).view(ROWS, -1),
    "rows last": lambda x: (torch.ones(3, 8) @ x.flatten(1)[:, :8].t()).t(),
    "products within rows": lambda x: x @ x.transpose(1, 2),
    "folded products": lambda x: torch.bmm(
        x.reshape(ROWS * 2, 2, 8), x.reshape(ROWS * 2, 2, 8).mT
    ).view(ROWS, -1),
    "transposed": lambda x: x.transpose(0, 1).contiguous().exp().transpose(0, 1),
    "rows inside": lambda x: x.permute(1, 0, 2).reshape(4, -1).tanh().view(4, ROWS, 8).sum((0, 2)),
    "convolution": lambda x: layer(nn.Conv2d(1, 2, 3))(x[:, None]),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]),
    "layer norm": layer(nn.LayerNorm(8)),
    "group norm": layer(nn.GroupNorm(2, 4)),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(1),
    "sums within rows": lambda x: x.sum(-1) + x.mean((1,), keepdim=True)[..., 0],
    "largest within rows": lambda x: x.amax(1) + x.max(1)[0] + x.logsumexp(1) + x.var(1),
    "pooling": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),
    "cat and stack": lambda x: torch.cat([torch.stack([x, x.sin()], 1), x[:, None]], 1),
    "padding": lambda x: F.pad(x, (1, 0, 2, 2)),
    "embedding": lambda x: layer(nn.Embedding(9, 3))((x[..., 0] > 0).long()),
    "gather": lambda x: x.gather(1, torch.zeros(ROWS, 1, 8, dtype=torch.long)),
    "sorted within rows": lambda x: x.sort(-1)[0] + x.topk(8, -1)[0] + x.cumsum(1),
    "written in place": lambda x: x.clone().mul_(2).relu_(),
    "written in part": lambda x: (
        torch.zeros(ROWS, 4, 8).index_select(1, torch.tensor([0, 1, 2, 3])) + x
    ),
    "put into zeros": lambda x: torch.zeros(ROWS, 9).scatter(1, INTS, x[:, :, 0]),
    "cross entropy": lambda x: F.cross_entropy(
        x, INTS.fill_(1)[:, :1].expand(-1, 8), reduction="none"
    ),
    "squares": lambda x: F.mse_loss(x, torch.ones(ROWS, 4, 8), reduction="none"),
    "dropout": lambda x: F.dropout(x, 0.5),
    "noise": lambda x: x + torch.randn_like(x) * torch.rand(()),
    "gradient of a network": with_gradient(
        nn.Sequential(layer(nn.Linear(8, 8)), nn.ReLU(), layer(nn.LayerNorm(8)))
    ),
    "gradient of convolutions": with_gradient(
        lambda x: F.max_pool2d(layer(nn.Conv2d(1, 2, 3))(x[:, None]), 2)
    ),
    "gradient of attention": with_gradient(
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
    ),
    "gradient of slices": with_gradient(
        lambda x: x[:, 1:3] * x[:, 0:1] + x[:, 3].sum(-1)[:, None, None]
    ),
    "gradient of a group norm": with_gradient(layer(nn.GroupNorm(2, 4))),
}

MIXED: dict[str, Step] = {
    "mean": lambda x: x - x.mean(0),
    "mean of all": lambda x: x * x.mean(),
    "softmax over the batch": lambda x: x.softmax(0),
    "products between rows": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "sum over the batch in a product": lambda x: (
        x.flatten(1) @ (x.flatten(1).t() @ torch.ones(ROWS, 2))
    ),
    "matrix times the batch": lambda x: torch.ones(ROWS, ROWS) @ x.flatten(1),
    "shifted in a stack": lambda x: torch.stack([x, x]).flatten(0, 1)[1 : ROWS + 1].clone(),
    "other row": lambda x: x.flip(0),
    "next row": lambda x: torch.cat([x[1:], x[:1]]),
    "first row": lambda x: x + x[0],
    "last row": lambda x: x + x[-1:],
    "half the rows": lambda x: torch.cat([x[:3], x[:3]]),
    "every other row": lambda x: torch.cat([x[::2], x[::2]]),
    "shifted by a view": lambda x: torch.cat([x.flatten()[4:], x.flatten()[:4]]).view_as(x),
    "other folding": lambda x: x.flatten().view(8, 4, ROWS).permute(2, 1, 0).contiguous(),
    "strided over rows": lambda x: x.as_strided((ROWS, 4, 8), (8, 48, 1)).clone(),
    "overlapping": lambda x: x.flatten().as_strided((ROWS, 40), (30, 1)).sum(1),
    "along the other dimension": lambda x: x[:, 0, :ROWS] + x[:, 0, :ROWS].t(),
    "row numbers against columns": lambda x: (x[:, 0, 0] + x[:, 0, :ROWS]).sum(1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm over the batch": lambda x: F.layer_norm(x, (ROWS, 4, 8)),
    "group norm over the batch": lambda x: F.group_norm(x.view(1, ROWS * 4, 8), 2).view_as(x),
    "attention over the batch": lambda x: F.scaled_dot_product_attention(
        *(x[None, None, :, k] for k in range(3))
    )[0, 0],
    "convolution over the batch": lambda x: F.conv1d(
        x.flatten(1).t()[:, None], torch.ones(1, 1, 3), padding=1
    )[:, 0].t(),
    "pooled over the batch": lambda x: F.max_pool2d(x.permute(1, 0, 2), (2, 1), 1)[
        :, [0, 1, 2, 3, 4, 4]
    ].permute(1, 0, 2),
    "summed over the batch": lambda x: x.cumsum(0),
    "sorted over the batch": lambda x: x.sort(0)[0],
    "padded over the batch": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0))[:ROWS],
    "gathered from the batch": lambda x: x.gather(0, torch.zeros(ROWS, 4, 8, dtype=torch.long)),
    "read": lambda x: x * float(x[0, 0, 0]),
    "kept in a buffer": lambda x: torch.zeros(1, 4, 8).add_(x.sum(0)) + x,
    "written over": lambda x: x.clone().copy_(x[:1].expand_as(x)),
    "by a shape": lambda x: x * len(x[x > 0]),
    "indexed": lambda x: x[torch.arange(ROWS).flip(0)],
    "cross entropy, reduced": lambda x: x * F.cross_entropy(x[:, 0], INTS[:, 0]),
    "gradient of a mean": with_gradient(lambda x: x * x.mean(0)),
    "gradient of first row": with_gradient(lambda x: x * x[:1]),
    "weights of a linear layer": lambda x: x @ (x.mean(0).t() @ torch.ones(4, 2)),
}


def images() -> Tensor:
    return torch.randn(ROWS, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", APART)
def test_what_keeps_rows_apart_is_proven(name: str) -> None:
    assert apart(APART[name], images())
    torch.manual_seed(1)
    assert proven(APART[name], images())


@pytest.mark.parametrize("name", MIXED)
def test_of_what_mixes_nothing_is_proven(name: str) -> None:
    assert not apart(MIXED[name], images(), tries=8)
    assert not proven(MIXED[name], images())


def test_the_whole_batch_in_one_row_or_another_number_of_rows_is_not_proven() -> None:
    program, result = recorded(torch.exp, x := torch.randn(4, 3))
    refs = [program.ref(result)], [program.ref(x)]
    assert works_apart(program, *refs, 4)
    assert not works_apart(program, *refs, 2)
    assert not works_apart(program, *refs, 1)


PIECES: Sequence[Callable[[Tensor], Tensor]] = (
    lambda t: t.transpose(0, -1),
    lambda t: t.transpose(0, 1) if t.dim() > 1 else t,
    lambda t: t.transpose(1, -1) if t.dim() > 2 else t,
    lambda t: t.contiguous(),
    lambda t: t.flatten(0, 1) if t.dim() > 1 else t,
    lambda t: t.flatten(1),
    lambda t: t.reshape(ROWS, -1),
    lambda t: t.reshape(-1, ROWS),
    lambda t: t.reshape(2, -1),
    lambda t: t.reshape(-1, 4, ROWS),
    lambda t: t.unsqueeze(0),
    lambda t: t[..., : max(1, t.shape[-1] // 2)],
    lambda t: t[: max(1, t.shape[0] // 2)],
    lambda t: t[:, 1:] if t.dim() > 1 and t.shape[1] > 1 else t,
    lambda t: t.sin(),
    lambda t: t + t.clone().mul_(2),
    lambda t: t.softmax(-1),
    lambda t: t.softmax(0),
    lambda t: t.sum(-1, keepdim=True) * t,
    lambda t: t - t.mean(0, keepdim=True),
    lambda t: t.amax(-1) if t.dim() > 1 else t,
    lambda t: t.cumsum(0),
    lambda t: t @ torch.ones(t.shape[-1], 3) if t.dim() > 1 else t,
    lambda t: torch.ones(2, t.shape[-2]) @ t if t.dim() > 1 else t,
    lambda t: torch.bmm(t, t.transpose(1, 2)) if t.dim() == 3 else t,
    lambda t: torch.cat([t, t.cos()], -1),
    lambda t: torch.cat([t, t.cos()], 0),
    lambda t: torch.stack([t, t.exp()], 1) if t.dim() > 1 else t,
    lambda t: F.layer_norm(t, t.shape[-1:]),
    lambda t: F.pad(t, (1, 1)),
    lambda t: t.flip(-1),
    lambda t: t + torch.randn(t.shape[-1]),
)


def programs(seed: int) -> Step:
    """A random chain of operations, ending with one number for each row."""
    rng = random.Random(seed)
    chain = rng.choices(PIECES, k=rng.randint(1, 7))
    end = rng.choice(("rows", "folded", "last"))

    def run(x: Tensor) -> Tensor:
        for piece in chain:
            with suppress(IndexError, RuntimeError):  # a piece for other shapes
                x = piece(x) if x.numel() < 20000 else x
        if end == "last":
            x = x.transpose(0, -1)
        if end == "folded" or x.shape[0] != ROWS:
            count = x.numel() // ROWS * ROWS
            x = x.reshape(-1) if count == x.numel() else x.reshape(-1)[:count]
        return x.reshape(ROWS, -1).contiguous().sum(1)

    return run


def test_what_is_proven_of_random_programs_is_true() -> None:
    found = {True: 0, False: 0}
    for seed in range(400):
        function, x = programs(seed), images()
        if proven(function, x):
            found[True] += 1
            assert apart(function, x), seed
        else:
            found[False] += 1
    assert min(found.values()) > 30, found
