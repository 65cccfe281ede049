"""`nn.MultiheadAttention` and torch's Transformer modules: equal to the loop, and never example by
example.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpfy.gradients.clip import AutomaticClip, Clip, FlatClip, GroupClip, PerLayerClip
from dpfy.gradients.engine import Grads
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Attends(nn.Module):
    """One attention module, used once or several times on streams that lie as it wants them; the
    batch of `streams` lies first.
    """

    def __init__(self, inner: nn.MultiheadAttention, uses: list[dict[str, Any]]) -> None:
        super().__init__()
        self.inner, self.uses = inner, uses

    def forward(self, *streams: Tensor) -> Tensor:
        total: Any = 0.0
        for use in self.uses:
            options = dict(use)
            laid = [x if self.inner.batch_first else x.transpose(0, 1) for x in streams]
            out, weights = self.inner(*[laid[i] for i in options.pop("reads")], **options)
            out = out if self.inner.batch_first else out.transpose(0, 1)
            total = total + out.square().flatten(1).sum(1) * (1 + 0.5 * len(options))
            if weights is not None:
                total = total + weights.flatten(1)[:, ::3].square().sum(1)
        return total


def masks(r: random.Random, batch: int, heads: int, length: int, keys: int) -> dict[str, Any]:
    """Masks under which every query sees the first key."""
    made: dict[str, Any] = {}
    floating = r.random() < 0.5

    def mask(*shape: int) -> Tensor:
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        return torch.randn(shape) if floating else hidden

    if r.random() < 0.5:
        made["key_padding_mask"] = mask(batch, keys)
    if (kind := r.choice(["none", "all", "each", "causal"])) in ("all", "each"):
        made["attn_mask"] = (
            mask(length, keys) if kind == "all" else mask(batch * heads, length, keys)
        )
    elif kind == "causal" and length == keys:
        after = torch.ones(length, keys).triu(1).bool()
        made["attn_mask"] = (
            torch.zeros(length, keys).masked_fill(after, -math.inf) if floating else after
        )
        made["is_causal"] = r.random() < 0.7
    made["need_weights"] = r.random() < 0.5
    made["average_attn_weights"] = r.random() < 0.5
    return made


def drawn(seed: int) -> tuple[Attends, tuple[Tensor, ...]]:
    """A module, its uses and its inputs."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    heads, batch, length, keys = r.randint(1, 3), r.randint(2, 4), r.randint(1, 5), r.randint(1, 5)
    width = heads * r.randint(1, 3)
    separate = r.random() < 0.3
    kdim, vdim = (r.randint(1, 5), r.randint(1, 5)) if separate else (width, width)
    flags = {
        name: r.random() < 0.5 for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    }
    inner = nn.MultiheadAttention(
        width, heads, dropout=r.choice([0.0, 0.3]), kdim=kdim, vdim=vdim, **flags
    )
    for p in inner.parameters():
        nn.init.normal_(p, std=0.5)
    streams = (
        torch.randn(batch, length, width),
        torch.randn(batch, keys, kdim),
        torch.randn(batch, keys, vdim),
    )
    kinds = (
        [(0, 1, 2)]
        if separate
        else r.choices([(0, 0, 0), (0, 1, 1), (0, 1, 2), (1, 0, 0)], k=r.randint(1, 3))
    )
    uses = []
    for reads in kinds:
        shape = streams[reads[0]].shape[1], streams[reads[1]].shape[1]
        uses.append({"reads": reads} | masks(r, batch, heads, *shape))
    for p in inner.parameters():
        p.requires_grad_(r.random() < 0.85)
    next(inner.parameters()).requires_grad_(True)
    return Attends(inner.train(r.random() < 0.8), uses), streams


def clips(r: random.Random) -> Clip:
    return r.choice(
        [
            FlatClip(0.5),
            FlatClip(math.inf),
            PerLayerClip(0.7),
            AutomaticClip(0.5, 0.1),
            GroupClip(("",), (0.4,)),
        ]
    )


def bounded(
    engine: Any, model: nn.Module, losses: Callable[[nn.Module], Tensor], clip: Clip
) -> Grads:
    """What the engine gives at the last of three steps: the first ones measure, the last one knows.
    It stays attached.
    """
    engine.attach(model)
    for step in range(3):
        torch.manual_seed(step)
        found = engine.bounded_sum(losses(model), clip).value
    return found


def agree(
    model: nn.Module, losses: Callable[[nn.Module], Tensor], clip: Clip, tolerance: float = 1e-9
) -> BookkeepingEngine:
    """Whether the fast engine's sum is the loop's; the engine, still attached."""
    loop, fast = LoopEngine(), BookkeepingEngine()
    expected = bounded(loop, copy.deepcopy(model), losses, clip)
    found = bounded(fast, model, losses, clip)
    loop.detach()
    assert list(found) == list(expected)
    gap = math.sqrt(sum(float((found[k] - expected[k]).double().square().sum()) for k in found))
    size = math.sqrt(sum(float(expected[k].double().square().sum()) for k in found))
    assert gap <= tolerance * size, (gap, size)
    return fast


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", range(60))
def test_any_attention_equals_the_loop(seed: int) -> None:
    model, streams = drawn(seed)
    fast = agree(model, lambda m: m(*streams), clips(random.Random(seed)))
    assert not fast.sums.untracked
    assert not fast.example_by_example
    assert fast.sums.steady == all(p in fast.sums.seen for p in fast.sums.params)
    fast.detach()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 600))
def test_many_attentions_equal_the_loop(seed: int) -> None:
    test_any_attention_equals_the_loop(seed)


CAUSAL = torch.ones(4, 4).triu(1).bool()
HIDDEN = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False, True, False, True, False]])


class Both(nn.Module):
    """nn.Transformer, or an encoder on the first stream and a decoder on the second, with the masks
    of both.
    """

    def __init__(self, dropout: float, whole: bool, first: bool) -> None:
        super().__init__()
        options = {
            "dim_feedforward": 9,
            "dropout": dropout,
            "batch_first": True,
            "norm_first": first,
        }
        self.whole = nn.Transformer(6, 2, 2, 2, **options) if whole else None
        self.encoder = (
            None if whole else nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, **options), 2)
        )
        self.decoder = (
            None if whole else nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, **options), 2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        given = {"tgt_mask": CAUSAL, "memory_key_padding_mask": HIDDEN}
        if self.whole is not None:
            out = self.whole(x, y, src_key_padding_mask=HIDDEN, **given)
        else:
            out = self.decoder(
                y, self.encoder(x, src_key_padding_mask=HIDDEN), tgt_is_causal=True, **given
            )  # type: ignore[misc]
        return (out.square() * torch.linspace(-1, 1, 6)).flatten(1).sum(1)


def sequences() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(3, 5, 6), torch.randn(3, 4, 6)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_transformers_of_torch_equal_the_loop(dropout: float, whole: bool, first: bool) -> None:
    torch.manual_seed(0)
    x, y = sequences()
    fast = agree(Both(dropout, whole, first), lambda m: m(x, y), FlatClip(0.3))
    assert fast.sums.steady
    assert not fast.example_by_example
    fast.detach()


def test_self_attention_is_one_product() -> None:
    x, _ = sequences()
    engine, model = (
        BookkeepingEngine(),
        Attends(nn.MultiheadAttention(6, 2, batch_first=True), [{"reads": (0, 0, 0)}]),
    )
    engine.attach(model)
    seen = []
    engine.sums.report(
        model(x), lambda report: seen.append((report.site.name, tuple(report.grad.shape)))
    )
    assert seen == [("inner.out_proj", (3, 5, 6)), ("inner.qkv", (3, 5, 18))]
    engine.detach()


class Tied(nn.Module):
    """Two attention modules with one weight between them, which is also a bare matrix elsewhere."""

    def __init__(self, bare: bool) -> None:
        super().__init__()
        self.one, self.two = (nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))
        self.two.in_proj_weight, self.two.out_proj.weight = (
            self.one.in_proj_weight,
            self.one.out_proj.weight,
        )
        self.bare = bare

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.two(y, *[self.one(x, x, x, need_weights=False)[0]] * 2)[0]
        more = (x @ self.one.in_proj_weight.t()).sum((1, 2)) if self.bare else 0.0
        return out.square().flatten(1).sum(1) + more


@pytest.mark.parametrize("bare", [False, True])
def test_a_weight_shared_by_two_attentions(bare: bool) -> None:
    torch.manual_seed(0)
    x, y = sequences()
    agree(Tied(bare), lambda m: m(x, y), FlatClip(0.3)).detach()


def test_a_head_tied_to_the_packed_weight() -> None:
    """An embedding whose table is the packed weight: rows of a table and slices of it in one
    sum.
    """
    torch.manual_seed(0)
    x, y = sequences()
    model = nn.ModuleDict(
        {"table": nn.Embedding(18, 6), "attention": nn.MultiheadAttention(6, 2, batch_first=True)}
    )
    model["attention"].in_proj_weight = model["table"].weight
    index = torch.randint(0, 18, (3, 7))

    def losses(m: Any) -> Tensor:
        return (m["attention"](x, y, y)[0].sum(1) * m["table"](index).sum(1)).square().sum(1)

    agree(model, losses, FlatClip(0.3)).detach()


FROZEN = {
    "packed weight": ("in_proj_weight",),
    "packed bias": ("in_proj_bias",),
    "all but the last projection": ("in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    "last projection": ("out_proj.weight", "out_proj.bias"),
    "bare rows": ("bias_k", "bias_v"),
}


@pytest.mark.parametrize("reads", [(0, 0, 0), (0, 1, 1)])
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_parts(name: str, reads: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    x, y = sequences()
    model = Attends(
        nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True), [{"reads": reads}]
    )
    for key, p in model.inner.named_parameters():
        p.requires_grad_(key not in FROZEN[name])
    fast = agree(model, lambda m: m(x, y), FlatClip(0.3))
    assert not fast.example_by_example
    assert not fast.sums.untracked
    fast.detach()


class Windows(nn.Module):
    """Attention inside of windows: several of an example lie one after another in the first
    dimension.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (2, 3)).flatten(0, 1)
        return (
            self.inner(parts, parts, parts)[0].unflatten(0, (len(x), 2)).square().flatten(1).sum(1)
        )


class Biased(nn.Module):
    """A learnt bias for the scores, as a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = (
            nn.MultiheadAttention(6, 2, batch_first=True),
            nn.Parameter(torch.randn(6, 6)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.inner(x, x, x, attn_mask=self.bias, need_weights=False)[0]
            .square()
            .flatten(1)
            .sum(1)
        )


class OneByOne(nn.Module):
    """Unbatched calls, one for each example: the module's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.inner(row, row, row)[0].square().sum() for row in x])


class Checkpointed(nn.Module):
    """Activations computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(6, 2, 9, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, x[:, :4], use_reentrant=False).square().flatten(1).sum(1)


class ReadOnly(nn.Module):
    """A hook on the last projection never runs, with an engine as without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2)
        self.inner.out_proj.register_forward_hook(lambda *given: pytest.fail("the hook ran"))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.inner(x, x, x)[0].transpose(0, 1).square().flatten(1).sum(1)


@pytest.mark.parametrize("kind", [Windows, Biased, OneByOne, Checkpointed, ReadOnly])
def test_other_uses(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, 6)
    agree(kind(), lambda m: m(x), FlatClip(0.3)).detach()


def test_parametrized_projections_take_another_route() -> None:
    torch.manual_seed(0)
    x, y = sequences()
    for name, of in (("in_proj_weight", lambda m: m.inner), ("weight", lambda m: m.inner.out_proj)):
        model = Attends(nn.MultiheadAttention(6, 2, batch_first=True), [{"reads": (0, 0, 0)}])
        nn.utils.parametrizations.weight_norm(of(model), name)
        agree(model, lambda m: m(x, y), FlatClip(0.3)).detach()


BAD: dict[str, Callable[[nn.MultiheadAttention, Tensor, Tensor], object]] = {
    "a mask of another size": lambda m, x, y: m(x, x, x, attn_mask=torch.zeros(4, 4)),
    "a mask for another number of heads": lambda m, x, y: m(
        x, x, x, attn_mask=torch.zeros(3, 5, 5)
    ),
    "a mask of one dimension": lambda m, x, y: m(x, x, x, attn_mask=torch.zeros(5)),
    "a mask of integers": lambda m, x, y: m(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.long)),
    "padding of another size": lambda m, x, y: m(x, y, y, key_padding_mask=torch.zeros(3, 5)),
    "padding of one dimension": lambda m, x, y: m(x, y, y, key_padding_mask=torch.zeros(4)),
    "causal without a mask": lambda m, x, y: m(x, x, x, is_causal=True),
    "keys without their values": lambda m, x, y: m(x, y, x),
    "another width": lambda m, x, y: m(x[..., :4], x[..., :4], x[..., :4]),
    "another batch": lambda m, x, y: m(x, y[:2], y[:2]),
    "four dimensions": lambda m, x, y: m(x[None], x[None], x[None]),
}


@pytest.mark.parametrize("name", BAD)
def test_the_errors_are_those_of_torch(name: str) -> None:
    x, y = sequences()
    model = nn.MultiheadAttention(6, 2, batch_first=True)
    with pytest.raises(Exception) as plain:
        BAD[name](model, x, y)
    engine = BookkeepingEngine()
    engine.attach(model)
    with pytest.raises(plain.type) as found:
        BAD[name](model, x, y)
    assert str(found.value) == str(plain.value)
    engine.detach()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_with_an_engine_are_those_without(training: bool, grad: bool) -> None:
    """Evaluation too: torch then has a fast path of its own, with nested tensors."""
    torch.manual_seed(0)
    x, y = sequences()
    model = Both(0.1, whole=False, first=False).train(training)
    engine = BookkeepingEngine()
    outputs = []
    for attached in (False, True):
        if attached:
            engine.attach(model)
        with torch.set_grad_enabled(grad):
            torch.manual_seed(1)
            outputs.append(model(x, y).detach())
    engine.detach()
    assert torch.allclose(*outputs, rtol=1e-12, atol=1e-12)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_compiled_encoder() -> None:
    torch.manual_seed(0)
    x, _ = sequences()
    model = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
    plain = bounded(
        LoopEngine(), copy.deepcopy(model), lambda m: m(x).square().flatten(1).sum(1), FlatClip(0.3)
    )
    engine, compiled = BookkeepingEngine(), torch.compile(model, backend="eager")
    engine.attach(model)
    for _ in range(2):
        found = engine.bounded_sum(compiled(x).square().flatten(1).sum(1), FlatClip(0.3)).value
    assert all(torch.allclose(found[k], plain[k], atol=1e-9) for k in plain)
    engine.detach()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reads", [(0, 0, 0), (0, 1, 1), (0, 1, 2)])
def test_autocast(reads: tuple[int, int, int], device: str) -> None:
    torch.manual_seed(0)
    model = (
        Attends(nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True), [{"reads": reads}])
        .float()
        .to(device)
    )
    streams = [torch.randn(3, n, 8, dtype=torch.float32, device=device) for n in (5, 4, 4)]

    def losses(m: nn.Module) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return m(*streams).float()

    fast = agree(model, losses, FlatClip(0.5), tolerance=0.03)
    assert not fast.example_by_example
    fast.detach()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_example_adds_at_most_the_bound(dtype: torch.dtype, device: str) -> None:
    """Long sequences of nearly equal positions and large losses: what rounding does to slices is in
    their norms.
    """
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(16, 2, 8, dropout=0.0, batch_first=True).to(device, dtype)
    x, y = (torch.randn(2, 1, 16) + 0.01 * torch.randn(2, n, 16) for n in (64, 48))
    x, y = x.to(device, dtype), y.to(device, dtype)
    engine = BookkeepingEngine()
    engine.attach(model)
    for scale in (1.0, 1e3, 1e6):
        for i in range(2):
            mask = torch.arange(2, device=device) == i
            losses = (
                model(x, y).float() * torch.linspace(-1, 1, 64, device=device)[:, None]
            ).flatten(1).sum(1) * scale
            total = engine.bounded_sum(losses, FlatClip(1.0), mask).value
            length = math.sqrt(sum(float(t.double().square().sum()) for t in total.values()))
            assert length <= 1.0
            assert scale == 1.0 or length > 0.5
    assert not engine.example_by_example
    engine.detach()


def test_bad_examples_add_nothing() -> None:
    torch.manual_seed(0)
    x, y = sequences()
    x[1] = math.nan
    model = nn.TransformerDecoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
    fast = agree(model, lambda m: m(y, x).square().flatten(1).sum(1), FlatClip(0.3))
    assert fast.sums.steady
    fast.detach()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(20))
def test_on_a_gpu_as_on_a_cpu(seed: int) -> None:
    """Eight steps, so that the engine's part is recorded and repeated."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model, streams = drawn(seed)
    model.inner.dropout = 0.0
    expected = bounded(LoopEngine(), copy.deepcopy(model), lambda m: m(*streams), FlatClip(0.5))
    model = model.float().cuda()
    for use in model.uses:
        for key, value in use.items():
            if isinstance(value, Tensor):
                use[key] = value.cuda().float() if value.is_floating_point() else value.cuda()
    there = [x.float().cuda() for x in streams]
    engine = BookkeepingEngine()
    engine.attach(model)
    for _ in range(8):
        found = engine.bounded_sum(model(*there), FlatClip(0.5)).value
    assert not engine.example_by_example
    assert engine._recorder.problem is None
    gap = math.sqrt(
        sum(float((found[k].cpu().double() - expected[k]).square().sum()) for k in expected)
    )
    assert gap < 1e-3 * max(
        math.sqrt(sum(float(expected[k].square().sum()) for k in expected)), 1e-3
    )
    engine.detach()
