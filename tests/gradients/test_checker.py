"""The model checker names the guilty module and the way out, and leaves the model as it was."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.checker import LossProbe, check_model, probe_call, probe_mixing
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.choice import choose


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.mean()
        return x


def net(*inside: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *inside, nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(8),
        nn.SyncBatchNorm(8),
        nn.BatchNorm1d(8, affine=False, track_running_stats=False),
    ],
)
def test_batch_normalisation_is_refused_with_its_path(norm: nn.Module) -> None:
    with pytest.raises(Unsupported, match=r"^1 \(.*BatchNorm.*dpfy\.repair\(model\)"):
        check_model(net(norm))


def test_nested_path_is_named() -> None:
    with pytest.raises(Unsupported, match=r"body\.1 \(BatchNorm1d\)"):
        check_model(nn.ModuleDict({"body": net(nn.BatchNorm1d(8))}))


def test_running_statistics_are_refused() -> None:
    with pytest.raises(Unsupported, match="track_running_stats=False"):
        check_model(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
        )
    check_model(nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True)))


def test_embedding_options_that_read_the_batch_are_refused() -> None:
    with pytest.raises(Unsupported, match="scale_grad_by_freq"):
        check_model(nn.Sequential(nn.Embedding(5, 3, scale_grad_by_freq=True)))
    with pytest.raises(Unsupported, match="max_norm"):
        check_model(nn.Sequential(nn.Embedding(5, 3, max_norm=1.0)))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(InvalidInput, match="requires_grad=True"):
        check_model(net().requires_grad_(False))


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(Unsupported, match="lazy"):
        check_model(nn.Sequential(nn.LazyLinear(3)))


def test_probe_accepts_models_that_keep_examples_apart() -> None:
    x = torch.randn(4, 6)
    for model in (net(), net(nn.LayerNorm(8)), net(nn.Dropout(0.5)), net(nn.GroupNorm(2, 8))):
        probe_mixing(model, (x,))


def test_probe_names_the_module_that_mixes() -> None:
    with pytest.raises(Unsupported, match=r"^1 \(Centre\)"):
        probe_mixing(net(Centre()), (torch.randn(4, 6),))
    quiet = nn.BatchNorm1d(8, track_running_stats=False)
    with pytest.raises(Unsupported, match=r"^1 \(BatchNorm1d\)"):
        probe_mixing(net(quiet), (torch.randn(4, 6),))


def test_probe_finds_mixing_through_integer_inputs() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(24, 5), Centre())
    with pytest.raises(Unsupported, match="Centre"):
        probe_mixing(model, (torch.randint(0, 9, (3, 4)),))


def test_probe_finds_buffers_that_learn() -> None:
    with pytest.raises(Unsupported, match=r"1\.seen: a buffer that changes"):
        probe_mixing(net(Counter()), (torch.randn(4, 6),))


@pytest.mark.parametrize("guilty", [Counter(), Centre(), nn.Dropout(0.5)])
def test_probe_restores_everything(guilty: nn.Module) -> None:
    model = net(guilty).eval()
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    with contextlib.suppress(Unsupported):
        probe_mixing(model, (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    assert torch.equal(state, torch.random.get_rng_state())


def test_probe_needs_two_examples_and_outputs_with_a_batch() -> None:
    with pytest.raises(InvalidInput, match="two examples"):
        probe_mixing(net(), (torch.randn(1, 6),))
    with pytest.raises(InvalidInput, match="first dimension is the batch"):
        probe_mixing(nn.Sequential(net(), nn.Flatten(0)), (torch.randn(4, 6),))


def check_losses(model: nn.Module, x: Tensor, losses: object) -> None:
    probe = LossProbe(model)
    try:
        probe.check(losses(model(x)))  # type: ignore[operator]
    finally:
        probe.close()


def test_loss_probe_accepts_one_loss_per_example() -> None:
    y = torch.randint(0, 3, (5,))
    check_losses(net(), torch.randn(5, 6), lambda out: F.cross_entropy(out, y, reduction="none"))
    tokens = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))
    check_losses(tokens, torch.randint(0, 9, (5, 4)), lambda out: out.square().mean((1, 2)))


@pytest.mark.parametrize(
    "losses",
    [
        lambda out: out.sum(1) - out.sum(1).logsumexp(0),
        lambda out: (out - out.mean(0)).square().sum(1),
        lambda out: out.sum(1).roll(1, 0) * out.sum(1),
        lambda out: F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="none"),
    ],
)
def test_loss_probe_refuses_losses_that_mix(losses: object) -> None:
    with pytest.raises(Unsupported, match="mix examples"):
        check_losses(net(), torch.randn(5, 6), losses)


@pytest.mark.parametrize("name", ["loop", "batched", "bookkeeping"])
def test_loss_probe_works_beside_an_engine(name: str) -> None:
    model, y = net(), torch.randint(0, 3, (5,))
    engine, _ = choose(model, name)
    engine.attach(model)
    probe = LossProbe(model)
    losses = F.cross_entropy(model(torch.randn(5, 6)), y, reduction="none")
    probe.check(losses)
    engine.bounded_sum(losses, FlatClip(1.0))
    check_losses(model, torch.randn(5, 6), lambda out: F.cross_entropy(out, y, reduction="none"))
    with pytest.raises(Unsupported, match="mix examples"):
        check_losses(model, torch.randn(5, 6), lambda out: (out - out.mean(0)).square().sum(1))
    engine.detach()


def test_loss_probe_removes_itself_and_keeps_the_graph() -> None:
    model = net()
    probe = LossProbe(model)
    losses = model(torch.randn(5, 6)).square().sum(1)
    probe.check(losses)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    losses.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_spectral_norm_is_refused_with_the_way_out_and_exact_by_it() -> None:
    layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(Unsupported, match="n_power_iterations = 0"):
        check_model(model)
    layer.parametrizations.weight[0].n_power_iterations = 0
    check_model(model)
    probe_mixing(model, (torch.randn(4, 4),))


class Rows(nn.Module):
    """Adds to each row `share` of the other rows' mean, or nothing where `share` is 0."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.weight = share, nn.Parameter(torch.randn(8, 8))
        self.register_buffer("rate", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.share * x.mean(0)) @ self.weight * self.rate


class Rounded(Rows):
    """Rounds by what all rows are together, as a product of all tokens of an expert does."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        places = 4 * torch.finfo(out.dtype).eps
        return out * (1 + places * (int(x.detach().abs().sum() * 1000) % 3))


def test_running_a_model_on_other_inputs_writes_to_no_buffer() -> None:
    model, rows = Rows(0.0), torch.arange(6) < 3
    before = {name: b._version for name, b in model.named_buffers()}
    probe_call(model, (torch.randn(6, 8),), {}, rows)
    probe_mixing(model, (torch.randn(6, 8),))
    assert {name: b._version for name, b in model.named_buffers()} == before


def test_rounding_that_depends_on_the_batch_is_told_from_mixing() -> None:
    torch.manual_seed(0)
    rows = torch.arange(6) < 3
    for _ in range(20):
        x = torch.randn(6, 8)
        probe_call(Rounded(0.0), (x,), {}, rows)
        for share in (1.0, 1e-3, 1e-5):
            for model in (Rows(share), Rounded(share)):
                with pytest.raises(Unsupported, match="mixing examples"):
                    probe_call(model, (x,), {}, rows)


def test_a_loss_made_of_gradients_is_refused_with_a_way_out_that_works() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 6)

    def losses() -> Tensor:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        return slope.square().sum(1)

    engine, _ = choose(model, "auto")
    engine.attach(model)
    with pytest.raises(Unsupported, match=r"made of gradients .*engine='loop'"):
        losses()
    engine.detach()
    engine, _ = choose(model, "loop")
    engine.attach(model)
    found = engine.bounded_sum(losses(), FlatClip(1e6)).value
    engine.detach()
    grads = torch.autograd.grad(losses().sum(), list(model.parameters()), allow_unused=True)
    for (name, _), g in zip(model.named_parameters(), grads, strict=True):
        assert torch.allclose(found[name], torch.zeros_like(found[name]) if g is None else g)
