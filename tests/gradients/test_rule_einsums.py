"""The einsum that stands in the docstring of every layer rule is what the rule computes.

The output gradient g is given: the loss of an example is the sum of its outputs times g. What else
an einsum reads is computed here from the definition of the layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.layers.linear import run_transformers_linear
from dpfy.gradients.layers.rule import LayerRule
from dpfy.gradients.layers.table import FOREIGN, LAYERS, rule_for

BATCH = 3
SPEC = re.compile(r"^ +([\w.]+): einsum\(\"([\w,>-]+)\", ([\w, ]+)\)$", re.MULTILINE)

Operands = dict[str, Tensor]


def einsums(run: Callable[..., Any]) -> dict[str, tuple[str, list[str]]]:
    """Parameter name to equation and operands, as the docstring of a rule states them."""
    found = SPEC.findall(run.__doc__ or "")
    return {name: (equation, operands.split(", ")) for name, equation, operands in found}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts_of(module: nn.Module, inputs: tuple[Any, ...], g: Tensor) -> dict[str, Tensor]:
    """What the engine's rules say that every example adds to every parameter's gradient."""
    engine = BookkeepingEngine()

    def losses() -> Tensor:
        y = module(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        return (y * g).flatten(1).sum(1)

    engine.attach(module)
    engine.bounded_sum(losses(), FlatClip(1.0))  # finds out where the examples lie
    assert not engine.sums.untracked
    found = engine._contributions(losses())
    engine.detach()
    rows = slice(0, BATCH)
    return {name: sum(part.per_example(rows) for part in parts) for name, parts in found.items()}  # type: ignore[misc]


def hold(
    rule: LayerRule, module: nn.Module, inputs: tuple[Any, ...], g: Tensor, operands: Operands
) -> None:
    """Every trainable parameter is in the docstring, and receives what stands there."""
    stated, found = einsums(rule.run), parts_of(module, inputs, g)
    for name, p in module.named_parameters():
        equation, names = stated[re.sub(r"_l\d+$", "", name)]
        expected = torch.einsum(equation, *[operands[each] for each in names])
        torch.testing.assert_close(
            found[name].reshape(BATCH, *p.shape),
            expected.reshape(BATCH, *p.shape),
            rtol=1e-10,
            atol=1e-12,
        )


def linear() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
    x, g = randn(BATCH, 4, 5), randn(BATCH, 4, 6)
    yield nn.Linear(5, 6).double(), (x,), g, {"g": g, "x": x}


def onehot(index: Tensor, rows: int) -> Tensor:
    return F.one_hot(index, rows).double()


def embedding() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
    index, g = torch.tensor([[1, 2, 2, 0], [5, 5, 5, 5], [0, 1, 6, 3]]), randn(BATCH, 4, 3)
    yield nn.Embedding(7, 3).double(), (index,), g, {"g": g, "onehot": onehot(index, 7)}
    padded = onehot(index, 7) * (index != 2)[..., None]
    yield nn.Embedding(7, 3, padding_idx=2).double(), (index,), g, {"g": g, "onehot": padded}


def bag() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
    index, g = torch.tensor([[1, 2, 2, 0], [5, 5, 5, 5], [0, 1, 6, 3]]), randn(BATCH, 3)
    for mode, size in (("sum", 1), ("mean", 4)):
        rows = {"g": g, "onehot": onehot(index, 7) / size}
        yield nn.EmbeddingBag(7, 3, mode=mode).double(), (index,), g, rows


def within(kind: type[nn.Module]) -> Callable[[], Any]:
    def cases() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
        x, g = randn(BATCH, 4, 5), randn(BATCH, 4, 5)
        module = kind(5, eps=1e-3).double()
        for p in module.parameters():
            nn.init.normal_(p)
        centred = x - x.mean(-1, keepdim=True) if kind is nn.LayerNorm else x
        normalised = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        yield module, (x,), g, {"g": g, "normalised": normalised}

    return cases


def grouped(kind: type[nn.Module], dims: int) -> Callable[[], Any]:
    def cases() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
        x, g = randn(BATCH, 6, *[3] * dims), randn(BATCH, 6, *[3] * dims)
        groups = 2 if kind is nn.GroupNorm else 6
        module = kind(2, 6) if kind is nn.GroupNorm else kind(6, affine=True)
        each = x.reshape(BATCH, groups, -1)
        centred = each - each.mean(-1, keepdim=True)
        normalised = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        places = {"g": g.flatten(2), "normalised": normalised.reshape(BATCH, 6, -1)}
        yield module.double(), (x,), g, places

    return cases


def patches(x: Tensor, kernel: int, stride: int, dilation: int, groups: int) -> Tensor:
    """[n, groups, positions, channels of the group x taps], by the definition of a convolution."""
    dims, span = x.dim() - 2, dilation * (kernel - 1) + 1
    windows = x
    for dim in range(2, 2 + dims):
        windows = windows.unfold(dim, span, stride)
    windows = windows[(..., *[slice(None, None, dilation)] * dims)]
    split = windows.unflatten(1, (groups, -1))  # [n, groups, channels, *positions, *taps]
    places = list(range(3, 3 + dims))
    taps = list(range(3 + dims, 3 + 2 * dims))
    return split.permute(0, 1, *places, 2, *taps).flatten(2 + dims).flatten(2, 1 + dims)


def convolution(dims: int) -> Callable[[], Any]:
    def cases() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        for stride, padding, dilation, groups in ((1, 0, 1, 1), (2, 1, 1, 2), (1, 1, 2, 1)):
            x = randn(BATCH, 4, *[6] * dims)
            module = kind(4, 6, 2, stride, padding, dilation, groups).double()
            g = randn(*module(x).shape)
            bordered = F.pad(x, [padding] * 2 * dims)
            rows = g.unflatten(1, (groups, -1)).flatten(3)
            found = patches(bordered, 2, stride, dilation, groups)
            yield module, (x,), g, {"g": rows, "patches": found}

    return cases


def transposed(dims: int) -> Callable[[], Any]:
    def cases() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
        kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        for stride, padding, groups in ((1, 0, 1), (2, 1, 2)):
            x = randn(BATCH, 4, *[3] * dims)
            module = kind(4, 6, 2, stride, padding, groups=groups).double()
            g = randn(*module(x).shape)
            found = patches(F.pad(g, [padding] * 2 * dims), 2, stride, 1, groups)
            rows, given = (t.unflatten(1, (groups, -1)).flatten(3) for t in (g, x))
            yield module, (x,), g, {"g": rows, "x": given, "patches": found}

    return cases


def attended(q: Tensor, k: Tensor, v: Tensor, bias_k: Tensor, bias_v: Tensor, heads: int) -> Tensor:
    """The joint output of all heads, for queries, keys and values that were projected."""
    k, v = torch.cat([k, bias_k[:, None]], 1), torch.cat([v, bias_v[:, None]], 1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    return (weights @ v).transpose(1, 2).flatten(2)


def attention() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
    for packed in (True, False):
        size = {} if packed else {"kdim": 5, "vdim": 7}
        module = nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True, **size).double()
        for p in module.parameters():
            nn.init.normal_(p)
        query = randn(BATCH, 4, 6)
        key, value = (query, query) if packed else (randn(BATCH, 4, 5), randn(BATCH, 4, 7))
        weights = (
            module.in_proj_weight.chunk(3)
            if packed
            else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        )
        given = zip((query, key, value), weights, module.in_proj_bias.chunk(3), strict=True)
        projected = [(x @ w.t() + b).detach().requires_grad_() for x, w, b in given]
        added = [
            p.detach().expand(BATCH, 1, -1)[:, 0].clone().requires_grad_()
            for p in (module.bias_k, module.bias_v)
        ]
        mixed = attended(*projected, *added, heads=2)
        last = randn(BATCH, 4, 6)
        loss = (mixed @ module.out_proj.weight.t() * last).sum()
        found = torch.autograd.grad(loss, [*projected, *added])
        operands = dict(zip(("g_query", "g_key", "g_value", "g_bias_k", "g_bias_v"), found))
        operands |= {"g": torch.cat(found[:3], -1), "x": query, "last": last, "mixed": mixed}
        operands |= {"query": query, "key": key, "value": value}
        yield module, (query, key, value), last, {n: t.detach() for n, t in operands.items()}


def stepped(kind: str, a: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step, from the products with input and state: the next state (within), and the cell."""
    if kind == "RNN":
        return torch.tanh(a + b), c
    if kind == "GRU":
        (ra, za, na), (rb, zb, nb) = a.chunk(3, 1), b.chunk(3, 1)
        z = torch.sigmoid(za + zb)
        return (1 - z) * torch.tanh(na + torch.sigmoid(ra + rb) * nb) + z * h, c
    i, f, n, o = (a + b).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
    return torch.sigmoid(o) * torch.tanh(c), c


def steps_of(kind: str, p: dict[str, Tensor], x: Tensor, g: Tensor) -> Operands:
    """What the einsums of a recurrent layer read, by its definition and autograd."""
    outs, hidden = (
        p["weight_hh"].shape[1],
        p["weight_hh"].shape[0] // {"RNN": 1, "GRU": 3}.get(kind, 4),
    )
    h, c = x.new_zeros(BATCH, outs), x.new_zeros(BATCH, hidden)
    seen: dict[str, list[Tensor]] = {name: [] for name in ("a", "b", "before", "within", "h")}
    for t in range(x.shape[1]):
        a = (x[:, t] @ p["weight_ih"].t() + p["bias_ih"]).detach().requires_grad_()
        b = h @ p["weight_hh"].t() + p["bias_hh"]
        b = b if b.requires_grad else b.detach().requires_grad_()
        seen["before"].append(h)
        inside, c = stepped(kind, a, b, h, c)
        h = inside @ p["weight_hr"].t() if "weight_hr" in p else inside
        for name, each in (("a", a), ("b", b), ("within", inside), ("h", h)):
            seen[name].append(each)
    loss = (torch.stack(seen["h"], 1) * g).sum()
    many = [*seen["a"], *seen["b"], *seen["h"]]
    found = torch.autograd.grad(loss, many)
    gates, inner, projected = (torch.stack(each, 1) for each in _thirds(found))
    states = {name: torch.stack(seen[name], 1).detach() for name in ("before", "within")}
    return states | {"gates": gates, "inner": inner, "projected": projected, "x": x}


def _thirds(found: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    size = len(found) // 3
    return [found[i : i + size] for i in range(0, 3 * size, size)]


def recurrent(kind: type[nn.Module], proj: int = 0) -> Callable[[], Any]:
    def cases() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
        for size in {0, proj}:
            more = {"proj_size": size} if size else {}
            module: Any = kind(5, 4, batch_first=True, **more).double()
            x, g = randn(BATCH, 6, 5), randn(BATCH, 6, size or 4)
            p = {n.removesuffix("_l0"): t.detach() for n, t in module.named_parameters()}
            yield module, (x,), g, steps_of(kind.__name__, p, x, g)

    return cases


def cell(kind: type[nn.Module]) -> Callable[[], Any]:
    def cases() -> Iterator[tuple[nn.Module, tuple[Any, ...], Tensor, Operands]]:
        module: Any = kind(5, 4).double()
        x, h, c, g = randn(BATCH, 5), randn(BATCH, 4), randn(BATCH, 4), randn(BATCH, 4)
        a = (x @ module.weight_ih.t() + module.bias_ih).detach().requires_grad_()
        b = (h @ module.weight_hh.t() + module.bias_hh).detach().requires_grad_()
        made, _ = stepped(kind.__name__.removesuffix("Cell"), a, b, h, c)
        gates, inner = torch.autograd.grad((made * g).sum(), [a, b])
        states = (h, c) if kind is nn.LSTMCell else h
        yield module, (x, states), g, {"x": x, "before": h, "gates": gates, "inner": inner}

    return cases


CASES: dict[type, Callable[[], Any]] = {
    nn.Linear: linear,
    nn.Embedding: embedding,
    nn.EmbeddingBag: bag,
    nn.LayerNorm: within(nn.LayerNorm),
    nn.RMSNorm: within(nn.RMSNorm),
    nn.GroupNorm: grouped(nn.GroupNorm, 2),
    nn.InstanceNorm1d: grouped(nn.InstanceNorm1d, 1),
    nn.InstanceNorm2d: grouped(nn.InstanceNorm2d, 2),
    nn.InstanceNorm3d: grouped(nn.InstanceNorm3d, 3),
    nn.Conv1d: convolution(1),
    nn.Conv2d: convolution(2),
    nn.Conv3d: convolution(3),
    nn.ConvTranspose1d: transposed(1),
    nn.ConvTranspose2d: transposed(2),
    nn.ConvTranspose3d: transposed(3),
    nn.MultiheadAttention: attention,
    nn.LSTM: recurrent(nn.LSTM, 2),
    nn.GRU: recurrent(nn.GRU),
    nn.RNN: recurrent(nn.RNN),
    nn.LSTMCell: cell(nn.LSTMCell),
    nn.GRUCell: cell(nn.GRUCell),
    nn.RNNCell: cell(nn.RNNCell),
}


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_a_rule_computes_the_einsum_of_its_docstring(kind: type) -> None:
    torch.manual_seed(0)
    for module, inputs, g, operands in CASES[kind]():
        assert rule_for(module) is LAYERS[kind]
        hold(LAYERS[kind], module, inputs, g, operands)


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(5, 6)), nn.Parameter(randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def test_the_linear_layer_of_transformers_does_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = FOREIGN["transformers.pytorch_utils", "Conv1D"]
    assert rule.run is run_transformers_linear
    monkeypatch.setitem(FOREIGN, (Conv1D.__module__, "Conv1D"), rule)
    x, g = randn(BATCH, 4, 5), randn(BATCH, 4, 6)
    hold(rule, Conv1D(), (x,), g, {"g": g, "x": x})


def test_another_einsum_would_be_noticed() -> None:
    """The comparison has power: with operands in another order no case passes."""
    for module, inputs, g, operands in linear():
        other = operands | {"x": operands["x"].flip(1)}
        with pytest.raises(AssertionError, match="not close"):
            hold(LAYERS[nn.Linear], module, inputs, g, other)
