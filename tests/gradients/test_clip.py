"""Clip rules: multipliers, bounds and the rounding that keeps them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput
from dpfy.gradients.clip import (
    CLIPS,
    COUNT,
    AutomaticClip,
    Clip,
    FlatClip,
    GroupClip,
    MicrobatchClip,
    PerLayerClip,
    PsacClip,
    QuantileClip,
)
from dpfy.gradients.engine import zeros
from dpfy.gradients.engines.choice import choose


def test_short_gradients_pass_and_long_ones_are_cut() -> None:
    scale = FlatClip(2.0).scale(torch.tensor([[0.0, 1.0, 3.9, 16.0, 1e30]], dtype=torch.float64))
    assert torch.allclose(
        scale, torch.tensor([[1.0, 1.0, 1.0, 0.5, 2e-15]], dtype=torch.float64), rtol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_multiplier_is_rounded_down(dtype: torch.dtype) -> None:
    squared = torch.rand(1, 10_000, dtype=dtype) * 100
    scale = FlatClip(1.5).scale(squared).double()
    assert bool((scale * squared.double().sqrt() <= 1.5).all())


def test_not_finite_means_zero() -> None:
    bad = torch.tensor([[math.nan, math.inf, 4.0]])
    assert FlatClip(1.0).scale(bad)[0, :2].tolist() == [0.0, 0.0]
    assert FlatClip(math.inf).scale(bad)[0].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("norm", [0, -1, math.nan, "1", True, 1e-13])
def test_bad_norms_are_refused_by_name(norm: object) -> None:
    with pytest.raises(InvalidInput, match="clip_norm"):
        FlatClip(norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", [FlatClip(0.3), FlatClip(math.inf)])
def test_json_and_back(clip: object) -> None:
    codec = Codec("clip", CLIPS)
    assert codec.decode(codec.encode(clip)) == clip


def test_clip_module_imports_no_torch() -> None:
    code = "import sys, dpfy.gradients.clip; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


RULES: dict[str, Clip] = {
    "flat": FlatClip(0.3),
    "per layer": PerLayerClip(0.3),
    "per group": GroupClip(("first", "head", ""), (0.1, 0.2, 0.3)),
    "automatic": AutomaticClip(0.3),
    "psac": PsacClip(0.3),
    "quantile": QuantileClip(0.3),
    "microbatch": MicrobatchClip(0.3, 2),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def losses(model: nn.Module, x: Tensor, size: float = 1.0) -> Tensor:
    return (torch.sin(3 * model(x)) * size).sum(1)


def grads_of(engine: str, clip: Clip, model: nn.Module, values: Tensor) -> dict[str, Tensor]:
    made, _ = choose(model, engine)
    made.attach(model)
    try:
        return made.bounded_sum(
            values if values.requires_grad else losses(model, values), clip
        ).value
    finally:
        made.detach()


@pytest.mark.parametrize("rule", RULES)
def test_json_of_every_rule(rule: str) -> None:
    codec = Codec("clip", CLIPS)
    assert codec.decode(codec.encode(RULES[rule])) == RULES[rule]
    assert len(CLIPS) == len(RULES)


@pytest.mark.parametrize("rule", [r for r in RULES if r != "microbatch"])
def test_rules_equal_their_formula_in_every_engine(rule: str) -> None:
    """One example at a time, by hand: groups, multiplier, sum."""
    torch.manual_seed(0)
    model, x, clip = Net().double(), torch.randn(7, 5, dtype=torch.float64), RULES[rule]
    names, params = zip(*model.named_parameters(), strict=True)
    expected = {name: torch.zeros_like(p) for name, p in zip(names, params, strict=True)}
    passed = 0.0
    for i in range(7):
        grads = torch.autograd.grad(losses(model, x[i : i + 1]).sum(), params)
        groups = clip.groups(names)
        squares = [
            sum(float(g.square().sum()) for g, k in zip(grads, groups, strict=True) if k == j)
            for j in range(max(groups) + 1)
        ]
        whole = [math.sqrt(s) for s in squares]
        factors = [_factor(clip, n, j, len(whole)) for j, n in enumerate(whole)]
        passed += 0.5 if factors[0] >= 1 else -0.5
        for name, g, k in zip(names, grads, groups, strict=True):
            expected[name] += factors[k] * g
    for engine in ("loop", "batched", "bookkeeping"):
        found = grads_of(engine, clip, model, x)
        if rule == "quantile":
            assert found.pop(COUNT).item() == pytest.approx(passed * 0.3 * 0.2)
        assert list(found) == list(names)
        for name in names:
            assert torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12), (
                engine,
                name,
            )


def _factor(clip: Clip, norm: float, group: int, groups: int) -> float:
    if isinstance(clip, PerLayerClip):
        return min(1.0, clip.norm / math.sqrt(groups) / norm)
    if isinstance(clip, GroupClip):
        return min(1.0, clip.norms[group] / norm)
    if isinstance(clip, AutomaticClip):
        return clip.norm / (norm + clip.gamma)
    if isinstance(clip, PsacClip):
        return clip.norm / (norm + clip.gamma / (norm + clip.gamma))
    return min(1.0, 0.3 / norm)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e12, math.nan, math.inf])
@pytest.mark.parametrize("engine", ["loop", "batched", "bookkeeping"])
@pytest.mark.parametrize("rule", [r for r in RULES if r != "microbatch"])
def test_no_contribution_exceeds_the_bound(
    rule: str, engine: str, size: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model, clip = Net().to(dtype), RULES[rule]
    found = grads_of(engine, clip, model, losses(model, torch.randn(1, 5).to(dtype), size))
    length = math.sqrt(sum(float(g.double().square().sum()) for g in found.values()))
    assert length <= clip.bound.l2
    if not math.isfinite(size):
        assert length == 0


def test_microbatches_clip_means_and_say_that_they_are_worse() -> None:
    torch.manual_seed(0)
    model, x, clip = Net().double(), torch.randn(8, 5, dtype=torch.float64), MicrobatchClip(0.3, 2)
    assert clip.bound.l2 == 2 * FlatClip(0.3).bound.l2
    params = list(model.parameters())
    expected = [torch.zeros_like(p) for p in params]
    for i in range(0, 8, 2):
        grads = torch.autograd.grad(losses(model, x[i : i + 2]).mean(), params)
        factor = min(1.0, 0.3 / math.sqrt(sum(float(g.square().sum()) for g in grads)))
        for total, g in zip(expected, grads, strict=True):
            total += factor * g
    for engine in ("loop", "bookkeeping"):
        made, _ = choose(model, engine)
        made.attach(model)
        found = made.bounded_sum(clip.losses(losses(model, x)), clip).value
        made.detach()
        assert all(
            torch.allclose(a, b, rtol=1e-9) for a, b in zip(found.values(), expected, strict=True)
        )
    with pytest.raises(InvalidInput, match="multiple of the microbatch size"):
        clip.losses(torch.zeros(7))


def test_quantile_rule_finds_the_quantile() -> None:
    """Without noise the norm converges to the wanted quantile of the gradient norms."""
    lengths = torch.linspace(0.1, 2.0, 200, dtype=torch.float64)
    clip = QuantileClip(5.0, quantile=0.3, learning_rate=0.3)
    for _ in range(200):
        clip = clip.updated(
            float(clip.count(clip.scale(lengths.square()[None])).sum()), expected_batch=200
        )
    assert clip.norm == pytest.approx(float(lengths.quantile(0.3)), rel=0.05)


@pytest.mark.parametrize("engine", ["loop", "batched", "bookkeeping"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_what_it_adds_beside_the_gradients_and_how_it_goes_on(
    rule: str, engine: str
) -> None:
    """By default nothing, and as it was. A batch without records carries the same names, with
    zeros.
    """
    torch.manual_seed(0)
    model, clip, x = Net().double(), RULES[rule], torch.randn(4, 5, dtype=torch.float64)
    found = grads_of(engine, clip, model, x)
    assert list(found) == [*dict(model.named_parameters()), *clip.coordinates]
    nothing = zeros(dict(model.named_parameters()), clip)
    assert list(nothing) == list(found)
    assert all(
        float(t.abs().sum()) == 0 and t.dtype == found[name].dtype for name, t in nothing.items()
    )
    after = clip.after({name: t / 4 for name, t in found.items()}, 4)
    if isinstance(clip, QuantileClip):
        assert after == clip.updated(float(found[COUNT]), 4) != clip
    else:
        assert clip.coordinates == ()
        assert after is clip


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: GroupClip(("a", "a"), (1.0, 1.0)), "clip_prefixes"),
        (lambda: GroupClip(("a",), (1.0, 2.0)), "clip_prefixes"),
        (lambda: GroupClip(("a",), (1.0,)).groups(["b.weight"]), "clip_prefixes"),
        (lambda: AutomaticClip(math.inf), "clip_norm"),
        (lambda: PsacClip(1.0, gamma=0.0), "gamma"),
        (lambda: QuantileClip(1.0, quantile=1.0), "quantile"),
        (lambda: MicrobatchClip(1.0, 0), "microbatch size"),
    ],
)
def test_bad_rules_are_refused_by_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        make()
