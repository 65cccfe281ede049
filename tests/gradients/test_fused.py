"""Layers that run with their tap as one node: same outputs, exact under everything a user may do
around them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpfy.gradients.autograd.tape import LayerReport
from dpfy.gradients.checker import LossProbe
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Grads
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.layers import fused
from dpfy.gradients.per_example.contribution import Contribution

B = 5


class Conv1D(nn.Module):
    """What transformers calls so: a linear layer with its weight stored transposed."""

    def __init__(self, outs: int, ins: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(ins, outs)),
            nn.Parameter(torch.randn(outs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(
            *x.shape[:-1], -1
        )


Conv1D.__module__ = "transformers.pytorch_utils"

KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 6), (6,)),
    "linear over positions": (lambda: nn.Linear(6, 6), (3, 6)),
    "linear over a grid": (lambda: nn.Linear(6, 6), (2, 3, 6)),
    "linear without bias": (lambda: nn.Linear(6, 6, bias=False), (3, 6)),
    "transposed linear": (lambda: Conv1D(6, 6), (3, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (3, 6)),
    "layer norm over two": (lambda: nn.LayerNorm((3, 6), bias=False), (3, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 3, 2)),
    "instance norm": (lambda: nn.InstanceNorm1d(6, affine=True), (6, 4)),
    "convolution": (lambda: nn.Conv2d(6, 6, 3, padding=1, groups=2), (6, 3, 3)),
    "circular convolution": (
        lambda: nn.Conv1d(6, 6, 3, padding=1, padding_mode="circular", bias=False),
        (6, 4),
    ),
    "transposed convolution": (lambda: nn.ConvTranspose1d(6, 6, 3, padding=1), (6, 4)),
}
ONE_NODE = [kind for kind in KINDS if kind != "rms norm"]


class Sandwich(nn.Module):
    """A layer below, the layer in question, and whatever `around` does with the two."""

    def __init__(
        self, kind: str, around: Callable[[nn.Module, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        make, shape = KINDS[kind]
        self.below, self.layer = nn.Linear(shape[-1], shape[-1]), make()
        self.around = around or (lambda layer, h: layer(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.layer, torch.tanh(self.below(x)))


def made(
    kind: str, around: Callable[[nn.Module, Tensor], Tensor] | None = None
) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Sandwich(kind, around).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model, torch.randn(B, *KINDS[kind][1], dtype=torch.float64)


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x).flatten(1)
    return (
        torch.sin(y) * torch.linspace(0.5, 1.5, y.shape[1], dtype=y.dtype, device=y.device)
        + 0.1 * y.square()
    ).sum(1)


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / math.sqrt(sum(float(b[k].square().sum()) for k in b))


def gap_to_loop(model: nn.Module, x: Tensor, steps: int = 3) -> float:
    twin, clip = copy.deepcopy(model), FlatClip(0.3)
    loop, fast = LoopEngine(), BookkeepingEngine()
    loop.attach(twin)
    fast.attach(model)
    expected = loop.bounded_sum(losses_of(twin, x), clip).value
    found = [fast.bounded_sum(losses_of(model, x), clip).value for _ in range(steps)]
    loop.detach()
    fast.detach()
    return max(distance(f, expected) for f in found)


@pytest.fixture
def attached() -> object:
    engines: list[BookkeepingEngine] = []

    def attach(model: nn.Module) -> BookkeepingEngine:
        engines.append(BookkeepingEngine())
        engines[-1].attach(model)
        return engines[-1]

    yield attach
    for engine in engines:
        engine.detach()


Attach = Callable[[nn.Module], BookkeepingEngine]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "instance norm"]
)  # which runs as a GroupNorm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_output_is_that_of_the_layer_bit_for_bit(
    kind: str, dtype: torch.dtype, attached: Attach
) -> None:
    model, x = made(kind)
    model, x = model.to(dtype), x.to(dtype)
    expected = model(x).detach()
    attached(model)
    found = model(x)
    assert found.requires_grad
    assert torch.equal(found, expected)
    with torch.no_grad():
        found = model(x)
    assert not found.requires_grad
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ONE_NODE)
def test_a_layer_is_one_node(kind: str, attached: Attach) -> None:
    model, x = made(kind)
    attached(model)
    inputs: list[Tensor] = []
    model.layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))  # type: ignore[union-attr, operator]
    y = model(x)
    if kind != "circular convolution":  # there the padding comes between
        assert y.grad_fn.next_functions[0][0] is inputs[0].grad_fn
    assert hasattr(y.grad_fn, "where")


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "added to": lambda y: y.add_(1.0),
    "rectified": lambda y: F.relu(y, inplace=True),
    "a part of it": lambda y: (y[:, :1].mul_(2.0), y)[1],
    "through a view": lambda y: (y.view(-1).mul_(0.5), y)[1] if y.is_contiguous() else y.mul_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_may_be_changed_in_place(kind: str, change: str) -> None:
    model, x = made(kind, lambda layer, h: CHANGES[change](layer(h)))
    assert gap_to_loop(model, x) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed(kind: str) -> None:
    model, x = made(
        kind, lambda layer, h: checkpoint(lambda t: torch.tanh(layer(t)), h, use_reentrant=False)
    )  # type: ignore[arg-type, return-value]
    assert gap_to_loop(model, x) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [False, True], ids=["as it is", "checkpointed"])
def test_a_layer_that_runs_without_a_batch(kind: str, saved: bool) -> None:
    """Its gradient mixes all examples and is taken apart further up; under checkpointing what it
    saved may be read only once.
    """

    def around(layer: nn.Module, h: Tensor) -> Tensor:
        one = torch.linspace(-1, 1, h[0].numel(), dtype=h.dtype).view_as(h[:1])
        y = (
            checkpoint(lambda t: torch.tanh(layer(t)), one, use_reentrant=False)
            if saved
            else torch.tanh(layer(one))
        )
        return h * y  # type: ignore[no-any-return, operator]

    model, x = made(kind, around)
    assert gap_to_loop(model, x) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_wants_a_gradient_itself(kind: str) -> None:
    model, x = made(kind)
    assert gap_to_loop(model, x.requires_grad_()) < 1e-9
    assert x.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_in_another_order(kind: str) -> None:
    """Neither the input nor the gradient lies in memory as the layer would have it."""

    def around(layer: nn.Module, h: Tensor) -> Tensor:
        turned = h.movedim(0, -1).contiguous().movedim(-1, 0)
        y = layer(turned)
        return y.movedim(-1, 0).sum(0, keepdim=True).movedim(0, -1) + 0.3 * y.square()  # type: ignore[no-any-return]

    model, x = made(kind, around)
    assert gap_to_loop(model, x) < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("change", [None, *CHANGES])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_loop_on_a_gpu(kind: str, change: str | None) -> None:
    model, x = made(kind, None if change is None else lambda layer, h: CHANGES[change](layer(h)))
    loop, fast, clip = LoopEngine(), BookkeepingEngine(), FlatClip(0.3)
    loop.attach(model)
    expected = loop.bounded_sum(losses_of(model, x), clip).value
    loop.detach()
    model, x = model.float().cuda(), x.float().cuda()
    fast.attach(model)
    for _ in range(4):
        found = fast.bounded_sum(losses_of(model, x), clip).value
        assert distance({k: g.double().cpu() for k, g in found.items()}, expected) < 1e-3
    fast.detach()


@pytest.mark.parametrize("kind", ONE_NODE)
@pytest.mark.parametrize("what", ["input", "weight"])
def test_what_backward_needs_may_not_change_in_between(
    kind: str, what: str, attached: Attach
) -> None:
    held: list[Tensor] = []

    def around(layer: nn.Module, h: Tensor) -> Tensor:
        held.append(h)
        return layer(h)  # type: ignore[no-any-return]

    model, x = made(kind, around)
    engine = attached(model)
    losses = losses_of(model, x)
    if kind == "circular convolution" and what == "input":
        return  # a padded copy of it was used
    with torch.no_grad():
        (held[0] if what == "input" else model.layer.weight).mul_(2.0)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.bounded_sum(losses, FlatClip(1.0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_remembers_no_weight_without_its_gradient(kind: str, device: str) -> None:
    """Autocast keeps what it made of a parameter. Made inside of a node it would hide a second use
    of the parameter from autograd.
    """

    def around(layer: nn.Module, h: Tensor) -> Tensor:
        y = layer(h)
        weight = layer.weight if layer.weight.shape == (6, 6) else None  # type: ignore[union-attr, operator]
        return (y if weight is None else y.tanh() @ weight).float()  # type: ignore[no-any-return, operator]

    torch.manual_seed(0)
    model, x = made(kind, around)
    model, x = model.float().to(device), x.float().to(device)
    found = {}
    for engine in (LoopEngine(), BookkeepingEngine()):
        engine.attach(model)
        for _ in range(2):
            with torch.autocast(device, dtype=torch.bfloat16):
                losses = losses_of(model, x)
            found[engine.name] = engine.bounded_sum(losses, FlatClip(0.3)).value
        engine.detach()
    # In bfloat16 a contribution is clipped a little more, for what the rounding of its factors may
    # add: compare what is left of it.
    length = {
        name: sum(float(g.double().square().sum()) for g in total.values()) ** 0.5
        for name, total in found.items()
    }
    shorter = length["bookkeeping"] / length["loop"]
    assert 0.95 < shorter < 1.01
    assert (
        distance({name: g / shorter for name, g in found["bookkeeping"].items()}, found["loop"])
        < 2e-2
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("narrow", [False, True], ids=["weights in float32", "weights in bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_gives_a_tapped_layer_the_dtype_of_the_layer(
    kind: str, narrow: bool, device: str, attached: Attach
) -> None:
    model, x = made(kind)
    model, x = model.to(device, torch.bfloat16 if narrow else torch.float32), x.float().to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = model(x)
        attached(model)
        found = model(x)
    assert found.dtype is expected.dtype
    assert torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_may_look_through(kind: str, attached: Attach) -> None:
    model, x = made(kind)
    probe = LossProbe(model)
    engine = attached(model)
    losses = losses_of(model, x)
    probe.check(losses)
    assert engine.bounded_sum(losses, FlatClip(1.0)).value


def reported(engine: BookkeepingEngine, losses: Tensor) -> list[LayerReport]:
    reports: list[LayerReport] = []
    engine.sums.report(losses, reports.append)
    return reports


def grads_of(found: list[tuple[Tensor, Contribution]]) -> list[Tensor]:
    return [part.per_example(slice(0, B)) for _, part in found]


@pytest.mark.parametrize("kind", KINDS)
def test_an_explanation_depends_on_the_facts_the_site_and_the_tensors_alone(
    kind: str, attached: Attach
) -> None:
    """So that work on one step's reports can be repeated for the next step's."""
    model, x = made(kind)
    engine = attached(model)
    engine.bounded_sum(losses_of(model, x), FlatClip(1.0))
    first, second = (reported(engine, losses_of(model, scale * x)) for scale in (1.0, 0.7))
    assert len(first) == len(second) == 2
    with torch.no_grad():
        for a, b in zip(first, second, strict=True):
            assert a.site is b.site
            assert hash(a.facts) == hash(b.facts)
            assert a.facts == b.facts
            assert [t.shape for t in a.saved] == [t.shape for t in b.saved]
            mine, theirs = (
                grads_of(explain(a.grad, a.saved, lambda t: t))
                for explain in (a.explain, b.explain)
            )
            assert len(mine) == len(a.site.params)
            assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


OTHER = {
    "layer norm": lambda: nn.LayerNorm((3, 6)),
    "group norm": lambda: nn.GroupNorm(3, 6),
    "convolution": lambda: nn.Conv2d(6, 6, 3, padding=1, groups=3),
    "circular convolution": lambda: nn.Conv1d(
        6, 6, 3, padding=1, dilation=1, stride=2, padding_mode="circular", bias=False
    ),
    "transposed convolution": lambda: nn.ConvTranspose1d(
        6, 6, 3, padding=1, stride=2, output_padding=1
    ),
}


@pytest.mark.parametrize("kind", OTHER)
def test_uses_that_are_explained_otherwise_have_other_facts(kind: str, attached: Attach) -> None:
    facts = []
    for make in (KINDS[kind][0], OTHER[kind]):
        model, x = made(kind)
        model.layer = make().double()
        facts.append(reported(attached(model), losses_of(model, x))[0].facts)
    assert facts[0] != facts[1]


@pytest.mark.parametrize("padding", [None, 0])
def test_the_padding_row_is_a_fact(padding: int | None, attached: Attach) -> None:
    model = nn.Embedding(4, 3, padding_idx=padding).double()
    engine = attached(model)
    (report,) = reported(engine, losses_of(model, torch.randint(0, 4, (B, 2))))
    assert report.facts == (padding,)
    assert [t.dtype for t in report.saved] == [torch.int64]


def test_settings_that_rule_out_one_node() -> None:
    assert fused.can_fuse()
    with torch.no_grad():
        assert not fused.can_fuse()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.autocast_active()
        assert not fused.can_fuse()
    with torch.autograd.graph.save_on_cpu():
        assert fused.saved_tensor_hooks_active()
        assert not fused.can_fuse()
    assert fused.can_fuse()
