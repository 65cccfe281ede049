"""One suite over every engine: the answer is fixed by the clip rule, an engine changes only speed
and memory.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Engine, Grads
from dpfy.gradients.engines.choice import ENGINES, choose


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


class Small(nn.Module):
    """Linear layers, one of them used twice, bare parameters (one of them a scalar), a frozen one,
    a tied head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(5, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 6)
        self.head.weight = self.twice.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.twice(torch.tanh(self.twice(F.relu_(self.first(x))))))
        return self.head(self.norm(self.frozen(h) * self.scale)) * self.gain


def small(batch: int = 7, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    return (
        Small().double(),
        torch.randn(batch, 5, dtype=torch.float64),
        torch.randint(0, 6, (batch,)),
    )


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def run(
    engine: Engine,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    clip: FlatClip,
    mask: Tensor | None = None,
) -> Grads:
    engine.attach(model)
    try:
        return engine.bounded_sum(losses_of(model, x, y), clip, mask).value
    finally:
        engine.detach()


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).double().square().sum()) for k in a))
    return gap / max(math.sqrt(sum(float(b[k].double().square().sum()) for k in b)), 1e-300)


def norm(grads: Grads) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


def by_hand(model: nn.Module, x: Tensor, y: Tensor, clip_norm: float) -> Grads:
    """Clipped sum from separate forwards: shares no code with the engines."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    for i in range(len(x)):
        grads = torch.autograd.grad(
            losses_of(model, x[i : i + 1], y[i : i + 1]).sum(),
            list(params.values()),
            allow_unused=True,
        )
        flat = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(params.values(), grads, strict=True)
        ]
        length = math.sqrt(sum(float(g.square().sum()) for g in flat))
        for n, g in zip(params, flat, strict=True):
            total[n] += g * min(1.0, clip_norm / length)
    return total


@pytest.mark.parametrize("clip_norm", [0.05, 1.0, 100.0])
def test_clipped_sum_equals_separate_forwards(engine: Engine, clip_norm: float) -> None:
    model, x, y = small()
    assert (
        distance(run(engine, model, x, y, FlatClip(clip_norm)), by_hand(model, x, y, clip_norm))
        < 1e-9
    )


def test_infinite_clip_equals_the_plain_gradient_sum(engine: Engine) -> None:
    model, x, y = small()
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    plain = torch.autograd.grad(
        losses_of(model, x, y).sum(), [p for p in model.parameters() if p.requires_grad]
    )
    found = run(engine, model, x, y, FlatClip(math.inf))
    assert distance(found, dict(zip(names, plain, strict=True))) < 1e-12


def test_dropout_off_in_train_mode(engine: Engine) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 6)).double().train()
    _, x, y = small()
    assert distance(run(engine, model, x, y, FlatClip(0.3)), by_hand(model, x, y, 0.3)) < 1e-9


def test_names_are_the_trainable_parameters_shared_once(engine: Engine) -> None:
    model, x, y = small()
    found = run(engine, model, x, y, FlatClip(1.0))
    assert list(found) == [n for n, p in model.named_parameters() if p.requires_grad]
    assert "head.weight" not in found
    assert not any(n.startswith("frozen") for n in found)
    assert all(
        g.shape == model.get_parameter(n).shape and not g.requires_grad for n, g in found.items()
    )


def test_masked_rows_add_exactly_zero(engine: Engine) -> None:
    model, x, y = small()
    mask = torch.tensor([True, False, True, True, False, True, True])
    found = run(engine, model, x, y, FlatClip(0.5), mask)
    assert distance(found, by_hand(model, x[mask], y[mask], 0.5)) < 1e-9
    nothing = run(engine, model, x, y, FlatClip(0.5), torch.zeros(7, dtype=torch.bool))
    assert norm(nothing) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_example_adds_zero_and_spoils_nobody(engine: Engine, bad: float) -> None:
    model, x, y = small()
    x[2, 3] = bad
    good = torch.arange(7) != 2
    assert (
        distance(run(engine, model, x, y, FlatClip(0.5)), by_hand(model, x[good], y[good], 0.5))
        < 1e-9
    )


def test_a_bad_loss_adds_zero_and_spoils_nobody(engine: Engine) -> None:
    model, x, y = small()
    engine.attach(model)
    losses = losses_of(model, x, y) * torch.tensor(
        [1, 1, math.nan, 1, 1, 1, math.inf], dtype=torch.float64
    )
    found = engine.bounded_sum(losses, FlatClip(0.5)).value
    engine.detach()
    good = torch.tensor([0, 1, 3, 4, 5])
    assert distance(found, by_hand(model, x[good], y[good], 0.5)) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1.0, 1e3, 1e15])
def test_one_contribution_never_exceeds_the_bound(
    engine: Engine, dtype: torch.dtype, size: float
) -> None:
    model, x, y = small(batch=1, seed=3)
    model = model.to(dtype)
    for clip_norm in (1e-6, 0.7, 3.0):
        engine.attach(model)
        losses = losses_of(model, x.to(dtype), y) * torch.tensor(size, dtype=dtype)
        found = engine.bounded_sum(losses, FlatClip(clip_norm))
        engine.detach()
        assert found.bound.l2 == clip_norm
        assert norm(found.value) <= clip_norm
        assert all(bool(g.isfinite().all()) for g in found.value.values())


def test_clipped_contributions_use_the_bound(engine: Engine) -> None:
    """The margin for rounding is small: a long gradient comes out at nearly the full clip norm."""
    model, x, y = small(batch=1)
    length = norm(run(engine, model, x, y, FlatClip(1e-3)))
    assert 1e-3 * (1 - 1e-9) <= length <= 1e-3


def test_empty_batch_gives_zeros(engine: Engine) -> None:
    model, x, y = small()
    found = run(engine, model, x[:0], y[:0], FlatClip(1.0))
    assert norm(found) == 0.0
    assert list(found) == [n for n, p in model.named_parameters() if p.requires_grad]


def test_model_is_left_as_it_was(engine: Engine) -> None:
    model, x, y = small()
    twin = copy.deepcopy(model)
    before = {m: set(vars(m)) for m in model.modules()}
    keys, kind = list(model.state_dict()), type(model)
    engine.attach(model)
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert torch.equal(model(x), twin(x))
    engine.bounded_sum(losses_of(model, x, y), FlatClip(1.0))
    assert all(p.grad is None for p in model.parameters())
    engine.detach()
    engine.detach()
    assert {m: set(vars(m)) for m in model.modules()} == before
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    losses_of(model, x, y).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_grad_fields_are_untouched(engine: Engine) -> None:
    model, x, y = small()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    run(engine, model, x, y, FlatClip(1.0))
    assert all(bool((p.grad == 7.0).all()) for p in model.parameters() if p.grad is not None)


def test_detach_after_an_exception(engine: Engine) -> None:
    model, x, y = small()
    engine.attach(model)
    with pytest.raises(InvalidInput):
        engine.bounded_sum(losses_of(model, x, y).mean(), FlatClip(1.0))
    engine.detach()
    assert all("forward" not in vars(m) for m in model.modules())


def test_no_grad_and_eval_record_nothing(engine: Engine) -> None:
    model, x, y = small()
    reference = by_hand(model, x, y, 0.5)
    engine.attach(model)
    with torch.no_grad():
        model(x[:3])
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    found = engine.bounded_sum(losses_of(model, x, y), FlatClip(0.5)).value
    engine.detach()
    assert distance(found, reference) < 1e-9


def test_many_steps_with_changing_batch_sizes(engine: Engine) -> None:
    model, x, y = small(batch=12)
    engine.attach(model)
    for size in (1, 5, 12, 6, 0, 1, 12):
        found = engine.bounded_sum(losses_of(model, x[:size], y[:size]), FlatClip(0.2)).value
        if size:
            engine_free = copy.deepcopy(model)
            assert distance(found, by_hand(engine_free, x[:size], y[:size], 0.2)) < 1e-9
    engine.detach()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda losses: losses.mean(), "one loss per unit"),
        (lambda losses: losses[:, None], "one loss per unit"),
        (lambda losses: losses.detach(), "gradients enabled"),
        (lambda losses: losses.detach().long(), "floating point"),
    ],
)
def test_reduced_or_detached_losses_are_refused(engine: Engine, make: object, text: str) -> None:
    model, x, y = small()
    engine.attach(model)
    with pytest.raises(InvalidInput, match=text):
        engine.bounded_sum(make(losses_of(model, x, y)), FlatClip(1.0))  # type: ignore[operator]
    engine.detach()


def test_wrong_mask_is_refused(engine: Engine) -> None:
    model, x, y = small()
    engine.attach(model)
    with pytest.raises(InvalidInput, match="one entry per loss"):
        engine.bounded_sum(losses_of(model, x, y), FlatClip(1.0), torch.ones(3, dtype=torch.bool))
    engine.detach()


def test_use_before_attach_is_refused(engine: Engine) -> None:
    model, x, y = small()
    with pytest.raises(DpfyError, match="attach"):
        engine.bounded_sum(losses_of(model, x, y), FlatClip(1.0))


def test_choice_is_automatic_said_and_overridable() -> None:
    model, _, _ = small()
    picked, why = choose(model)
    assert picked.name == "bookkeeping"
    assert "bookkeeping" in why
    assert "\n" not in why
    for name in ENGINES:
        assert choose(model, name)[0].name == name
    with pytest.raises(InvalidInput, match="bookkeeping"):
        choose(model, "bookeeping")
