"""Where the examples lie follows from the graph: every rule against what the operation does to
zeros, in any place of the batch; and what no rule can know.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.autograd import batch_axes
from dpfy.gradients.autograd.batch_axes import BatchAxes
from dpfy.gradients.autograd.graph_nodes import AutogradGraph
from dpfy.gradients.autograd.passages import Rows, viewed
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine

B = 4
Operation = Callable[[Tensor], Tensor]
torch.manual_seed(5)
LEFT = torch.randn(2 * B, 2 * B, dtype=torch.float64)
M, IMAGE = torch.randn(6, 6, dtype=torch.float64), torch.randn(3, 6, 3, 3, dtype=torch.float64)

OPERATIONS: dict[str, tuple[Operation, tuple[int, ...]]] = {
    "pointwise": (lambda x: torch.tanh(x) * x.exp(), (6,)),
    "broadcast": (lambda x: x + torch.ones(3, 1, *x.shape, dtype=x.dtype), (6,)),
    "sum": (lambda x: x.sum(-1), (3, 6)),
    "sum kept": (lambda x: x.sum(1, keepdim=True), (3, 6)),
    "mean of several": (lambda x: x.mean((1, 2)), (3, 6)),
    "norm": (lambda x: x.norm(dim=-1), (3, 6)),
    "logsumexp": (lambda x: x.logsumexp(1), (3, 6)),
    "maximum": (lambda x: x.max(1).values, (3, 6)),
    "variance": (lambda x: x.var(1), (3, 6)),
    "softmax": (lambda x: x.softmax(-1), (3, 6)),
    "cumsum": (lambda x: x.cumsum(1), (3, 6)),
    "sort": (lambda x: x.sort(1).values, (3, 6)),
    "roll": (lambda x: x.roll(1, 1), (3, 6)),
    "flip": (lambda x: x.flip(1), (3, 6)),
    "gather": (lambda x: x.gather(1, torch.zeros(*x.shape, dtype=torch.long)), (3, 6)),
    "take": (lambda x: x.index_select(1, torch.tensor([2, 0])), (3, 6)),
    "index": (lambda x: x[:, [0, 2]], (3, 6)),
    "own index": (lambda x: x[torch.arange(len(x)), 0], (3, 6)),
    "slice": (lambda x: x[:, 1:], (3, 6)),
    "cat": (lambda x: torch.cat([x, x * 2], 1), (3, 6)),
    "cat over the first": (lambda x: torch.cat([x, x * 2], 0), (3, 6)),
    "chunks of the first": (lambda x: torch.cat([c.tanh() for c in x.chunk(2)], 0), (3, 6)),
    "stack": (lambda x: torch.stack([x, x * 2], 1), (3, 6)),
    "unbind": (lambda x: sum(x.unbind(1)), (3, 6)),
    "split": (lambda x: x.split(2, -1)[1], (3, 6)),
    "repeat": (lambda x: x.repeat(1, 2, 1), (3, 6)),
    "repeat the first": (lambda x: x.repeat(2, *[1] * (x.dim() - 1)), (3, 6)),
    "expand": (lambda x: x[:, None].expand(-1, 5, -1, -1), (3, 6)),
    "permute": (lambda x: x.permute(2, 0, 1), (3, 6)),
    "transpose": (lambda x: x.mT.contiguous(), (3, 6)),
    "fold": (lambda x: x.flatten(0, 1), (3, 6)),
    "fold the other way": (lambda x: x.transpose(0, 1).flatten(0, 1), (3, 6)),
    "windows": (lambda x: x.view(x.shape[0], 2, 2, 6).transpose(1, 2).reshape(-1, 2, 6), (4, 6)),
    "unfold": (lambda x: x.unfold(1, 2, 1), (4, 6)),
    "product": (lambda x: x @ M, (3, 6)),
    "product of two": (lambda x: x @ x.mT, (3, 6)),
    "product from the left": (lambda x: M[:3, :3] @ x, (3, 6)),
    "einsum": (lambda x: torch.einsum("nij,jk->kni", x, M), (3, 6)),
    "layer norm": (lambda x: F.layer_norm(x, (6,)), (3, 6)),
    "group norm": (lambda x: F.group_norm(x, 3), (6, 3)),
    "instance norm": (lambda x: F.instance_norm(x), (6, 3)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (6, 3)),
    "convolution": (lambda x: F.conv2d(x, IMAGE, padding=1), (6, 5, 5)),
    "pooling": (lambda x: F.max_pool2d(x, 2), (6, 4, 4)),
    "mean pooling": (lambda x: F.adaptive_avg_pool2d(x, 1), (6, 4, 4)),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (6, 3, 3)),
    "padding": (lambda x: F.pad(x, (1, 1)), (3, 6)),
    "reflection": (lambda x: F.pad(x, (1, 1), mode="reflect"), (3, 6)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), (2, 3, 6)),
    "fourier": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (3, 6)),
    "complex": (lambda x: torch.view_as_complex(x.reshape(*x.shape[:-1], 3, 2)).abs(), (3, 6)),
    "scatter": (
        lambda x: torch.zeros_like(x).scatter(1, torch.zeros(*x.shape, dtype=torch.long), x),
        (3, 6),
    ),
    "index add": (lambda x: torch.zeros_like(x).index_add(1, torch.tensor([0, 2, 0]), x), (3, 6)),
    "copied in": (lambda x: torch.zeros_like(x).index_copy(1, torch.tensor([2, 0, 1]), x), (3, 6)),
    "written in": (lambda x: _written(x), (3, 6)),
    "diagonal": (lambda x: x.diagonal(dim1=1, dim2=2), (3, 3)),
    "triangle": (lambda x: x.tril(), (3, 3)),
    "masked": (lambda x: x.masked_fill(torch.eye(3, dtype=torch.bool), 0.0), (3, 3)),
    "sorted batch": (lambda x: x[torch.tensor([2, 0, 3, 1]).repeat(len(x) // 4)], (3, 6)),
    "mixing": (lambda x: x - x.mean(0, keepdim=True), (6,)),
    "softmax over the examples": (lambda x: x.softmax(0), (6,)),
    "product over the examples": (lambda x: LEFT[: len(x), : len(x)] @ x, (6,)),
    "cross entropy": (
        lambda x: F.cross_entropy(
            x.flatten(0, -2), torch.zeros(x[..., 0].numel(), dtype=torch.long), reduction="none"
        ),
        (6,),
    ),
}


def _written(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[:, 1:] = x[:, :-1] * 2
    return made


def owners(x: Tensor, y: Tensor, rows: Rows) -> list[Tensor]:
    """Which numbers of the gradient at `x` come from each example, if they lie in `y` as given."""
    each = rows.of(y.shape[rows.dim], B)
    reached = []
    for k in range(B):
        mask = (each == k).view(-1, *[1] * (y.dim() - rows.dim - 1))
        (g,) = torch.autograd.grad(y, x, torch.rand_like(y) * mask, retain_graph=True)
        reached.append(g != 0)
    return reached


def everywhere(shape: torch.Size) -> list[Rows]:
    """All regular places of the batch in a tensor."""
    return [
        Rows(dim, inner)
        for dim, size in enumerate(shape)
        for inner in range(1, size + 1)
        if size % (inner * B) == 0
    ]


def checked(operation: Operation, x: Tensor) -> int:
    """Compare what is found at `x` with what reaches it, for all places at the result; how many
    were found.
    """
    y, count = operation(x * 1.0), 0
    graph = AutogradGraph.of(y)
    leaf = graph.leaves[x]
    if y.grad_fn is None or y.output_nr:
        return 1
    for rows in everywhere(y.shape):
        found = BatchAxes(graph, B, rows).rows(leaf)
        if found is None:
            continue
        count += 1
        owner = found.of(x.shape[found.dim], B)
        for k, reached in enumerate(owners(x, y, rows)):
            places = reached.movedim(found.dim, 0).flatten(1).any(1)
            assert bool((owner[places] == k).all()), (rows, found)
    return count


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("way", ["first", "folded", "positions first"])
def test_rules_say_what_the_operation_does(name: str, way: str) -> None:
    """Wherever the batch lies in the result. In the usual place it must be found."""
    torch.manual_seed(0)
    operation, shape = OPERATIONS[name]
    many = B if way == "first" else 2 * B
    x = torch.randn(many, *shape, dtype=torch.float64, requires_grad=True)
    count = checked(operation, x)
    assert count or name in ("mixing", "batch norm") or "over the examples" in name


@pytest.mark.parametrize("name", OPERATIONS)
def test_without_its_rule_every_operation_is_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    operation, shape = OPERATIONS[name]
    x = torch.randn(B, *shape, dtype=torch.float64, requires_grad=True)
    known = checked(operation, x)
    monkeypatch.setattr(batch_axes, "RULES", {})
    assert checked(operation, x) >= min(known, 1)


def test_views_keep_every_number_at_its_example() -> None:
    """All factorings of one dimension, whatever the batch is."""
    for batch in (1, 2, 3):
        out, whole = (2, batch, 4), 2 * batch * 4
        numbers = torch.arange(whole) // 4 % batch
        for shape in ((2 * batch, 4), (2, batch * 4), (whole,), (2, batch, 2, 2), (1, 2, batch, 4)):
            found = viewed(out, shape, Rows(1), batch)
            assert found is not None
            owner = found.of(shape[found.dim], batch)
            each = owner.view(-1, *[1] * (len(shape) - found.dim - 1)).expand(shape)
            assert torch.equal(each.flatten(), numbers)
    for out, shape, batch in (((4, 6), (3, 8), 4), ((4, 6), (6, 4), 4), ((8, 10), (20, 4), 2)):
        assert viewed(out, shape, Rows(0), batch) is None


class Noisy(nn.Module):
    """A model whose gradients are not the same twice, as on a GPU: one part in a hundred."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x.register_hook(lambda g: g * (1 + 0.02 * torch.randn_like(g)))
        return x


def test_gradients_that_differ_from_pass_to_pass_do_not_hide_the_batch() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        model, engine = Noisy().to(dtype), BookkeepingEngine()
        engine.attach(model)
        engine.bounded_sum(
            model(torch.randn(6, 5, 6, dtype=dtype)).square().sum((1, 2)), FlatClip(1.0)
        )
        assert engine.sums.steady
        assert not any(site.without_batch for site in engine._sites.values())
        engine.detach()


def test_a_hook_that_mixes_examples_takes_the_axis_away() -> None:
    """No operation of the graph tells it; gradients of examples without weight do."""

    class Mixed(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
            x.register_hook(lambda g: g - 0.5 * g.mean(0, keepdim=True))
            for layer in self.layers[2:]:
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    model, engine = Mixed().double(), BookkeepingEngine()
    engine.attach(model)
    engine.bounded_sum(
        model(torch.randn(6, 5, 6, dtype=torch.float64)).square().sum((1, 2)), FlatClip(1.0)
    )
    assert [site.without_batch for site in engine._sites.values()] == [True, True, False, False]


USES: dict[str, Operation] = {
    "reordered": lambda x: x[torch.tensor([2, 0, 1, 4, 3])].tanh()[torch.tensor([1, 2, 0, 4, 3])],
    "windows in many dimensions": lambda x: (
        x.view(len(x), 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 6)
    ),
    "frames between": lambda x: x.view(len(x), 4, 4, 6).permute(1, 0, 2, 3).reshape(-1, 6),
}


@pytest.mark.parametrize("name", USES)
def test_equals_the_loop(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            if name == "reordered":
                order = torch.arange(len(x)).roll(1)
                x = self.first(x)[order]
                return torch.tanh(self.second(x))[order.argsort()].square().sum((1, 2))
            shape = (len(x), -1)
            y = self.second(torch.tanh(USES[name](self.first(x))))
            if name == "frames between":
                y = y.view(4, len(x), 4, 6).transpose(0, 1)
            return y.reshape(shape).square().sum(1)

    torch.manual_seed(0)
    model = Model().double()
    fast, slow, twin = BookkeepingEngine(), LoopEngine(), copy.deepcopy(model)
    fast.attach(model)
    slow.attach(twin)
    for batch in (5, 1, 3):
        x = torch.randn(batch, 16, 6, dtype=torch.float64)
        for clip in (FlatClip(0.1), FlatClip(math.inf)):
            right, found = (
                e.bounded_sum(m(x), clip).value for e, m in ((slow, twin), (fast, model))
            )
            assert all(torch.allclose(found[k], right[k], rtol=1e-9, atol=1e-12) for k in right)


def test_the_graph_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of a usual network has to be asked."""
    monkeypatch.setattr(batch_axes, "_asked", lambda *a: pytest.fail(f"asked {a[0].name()}"))
    layer: Any = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    networks: list[tuple[nn.Module, Tensor]] = [
        (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
            torch.randn(3, 3, 8, 8),
        ),
        (nn.Sequential(nn.LSTM(8, 4, batch_first=True)), torch.randn(3, 5, 8)),
    ]
    for model, x in networks:
        engine = BookkeepingEngine()
        engine.attach(model)
        y = model(x)
        engine.bounded_sum(
            (y[0] if isinstance(y, tuple) else y).flatten(1).square().sum(1), FlatClip(1.0)
        )
        engine.detach()
