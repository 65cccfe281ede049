"""Models and losses that mix examples, or carry them from step to step: every one is refused in
training, and nothing is published.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import CLASSES, WIDTH, WORDS, Apply, ce, net, plain
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.core.errors import DpfyError, Unsupported
from dpfy.data.users import UserRecords

REFUSED = (
    r"mix examples|Python reads|shapes depend|number of records|earlier step|from the batch|beside "
    r"the batch|changed in training"
)


def attention(h: Tensor) -> Tensor:
    return torch.softmax(h @ h.T, 1) @ h


class Gated(nn.Module):
    """Batch attention behind a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = (
            nn.Linear(WIDTH, 8),
            nn.Parameter(torch.zeros(())),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h + self.gate * attention(h))


class TwoGates(Gated):
    """Behind two gates, both at zero: neither has a gradient, so only moved parameters show what is
    behind them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h + self.gate * self.second * attention(h))


class ZeroProjection(Gated):
    """The same behind a projection that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.head(h + self.out(h.mean(0, keepdim=True)))


class Steal(nn.Module):
    """Keeps a training record in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.copy_(x[0])
        return self.body(x)


class RunningMean(Steal):
    """Subtracts a mean that it learns."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.body(x - self.last)


class Overwrite(Steal):
    """Writes the batch into a weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.body[0].bias.data.add_(x.detach().mean() * torch.ones(8))
        return self.body(x)


class Scaled(torch.autograd.Function):
    """The identity, whose backward divides by the norm of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / grad.norm()


class Statistics(torch.autograd.Function):
    """The identity, whose backward scales by a statistic of the batch that forward saw."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x.detach().std(0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * ctx.scale


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(h: Tensor) -> Tensor:
        h.register_hook(hook)
        return torch.tanh(h)

    return function


def through(h: Tensor) -> Tensor:
    """Each row passes as it is, but gradients go to the mean."""
    mean = h.mean(0, keepdim=True)
    return h + mean - mean.detach()


def capacity(h: Tensor) -> Tensor:
    """An expert that takes the four examples it likes best."""
    chosen = torch.zeros(len(h)).scatter(0, h[:, 0].topk(min(4, len(h))).indices, 1.0)
    return h * (1 + chosen[:, None])


def whiten(h: Tensor) -> Tensor:
    centred = h - h.mean(0)
    return centred @ torch.linalg.cholesky(
        torch.linalg.inv(centred.T @ centred / len(h) + torch.eye(8))
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Apply(lambda h: h - h.mean(0)),
    "mean detached": lambda: Apply(lambda h: h - h.detach().mean(0)),
    "mean of data alone": lambda: Apply(
        torch.tanh, body=Apply(lambda x: x - x.mean(0), nn.Identity(), nn.Linear(WIDTH, 8))
    ),
    "deviation": lambda: Apply(lambda h: h / h.std(0)),
    "deviation detached": lambda: Apply(lambda h: h / h.detach().std(0)),
    "batch norm as a function": lambda: Apply(lambda h: F.batch_norm(h, None, None, training=True)),
    "layer norm of the transposed": lambda: Apply(lambda h: F.layer_norm(h.T, (h.shape[0],)).T),
    "instance norm over examples": lambda: Apply(lambda h: F.instance_norm(h.T[None])[0].T),
    "largest of the batch": lambda: Apply(lambda h: h / h.abs().amax(0)),
    "global maximum in a softmax": lambda: Apply(
        lambda h: torch.exp(h - h.max()) / torch.exp(h - h.max()).sum(1, keepdim=True)
    ),
    "quantised by the batch": lambda: Apply(
        lambda h: h + ((h / h.abs().max() * 127).round() / 127 * h.abs().max() - h).detach()
    ),
    "batch attention": lambda: Apply(attention),
    "batch attention detached": lambda: Apply(lambda h: h + attention(h.detach())),
    "gate at zero": Gated,
    "two gates at zero": TwoGates,
    "projection at zero": ZeroProjection,
    "cumulative sum": lambda: Apply(lambda h: h.cumsum(0)),
    "neighbour": lambda: Apply(lambda h: h + h.roll(1, 0)),
    "reversed": lambda: Apply(lambda h: h.flip(0)),
    "sorted": lambda: Apply(lambda h: h.sort(0).values),
    "ranks": lambda: Apply(lambda h: h * h.argsort(0).argsort(0)),
    "first record": lambda: Apply(lambda h: h - h[:1]),
    "last record detached": lambda: Apply(lambda h: h * h[-1:].detach()),
    "nearest neighbour": lambda: Apply(
        lambda h: h + h[torch.cdist(h, h).fill_diagonal_(9e9).argmin(1)]
    ),
    "graph of neighbours": lambda: Apply(lambda h: (torch.cdist(h, h) < 1.0).float() @ h),
    "convolution over examples": lambda: Apply(lambda h: F.avg_pool1d(h.T[None], 3, 1, 1)[0].T),
    "wrong view": lambda: Apply(lambda h: h.reshape(h.shape[1], h.shape[0]).T),
    "expert with a capacity": lambda: Apply(capacity),
    "median": lambda: Apply(lambda h: h - h.median(0).values),
    "quantile": lambda: Apply(lambda h: h.clamp(max=h.detach().quantile(0.9))),
    "whitening": lambda: Apply(whiten),
    "singular vectors": lambda: Apply(
        lambda h: h @ torch.linalg.svd(h.detach(), full_matrices=False).Vh.T
    ),
    "power normalised": lambda: Apply(lambda h: h / h.norm()),
    "gradient to the mean alone": lambda: Apply(through),
    "backward scales by its norm": lambda: Apply(Scaled.apply),
    "backward scales by statistics": lambda: Apply(Statistics.apply),
    "hook normalises": lambda: Apply(hooked(lambda g: g / g.norm())),
    "hook centres": lambda: Apply(hooked(lambda g: g - g.mean(0))),
    "hook clips to the batch": lambda: Apply(
        hooked(lambda g: g * (0.01 / g.abs().max()).clamp(max=1))
    ),
    "buffer holds a record": Steal,
    "buffer learns a mean": RunningMean,
    "weight is overwritten": Overwrite,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_mix(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match=REFUSED):
        small_runs.train(tmp_path, MODELS[name]())
    assert not (tmp_path / "run" / "privacy.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["gate at zero", "two gates at zero"])
def test_gates_at_zero_are_seen_through_at_the_first_step(name: str, tmp_path: Path) -> None:
    """Noise opens a gate, and a later check would find what is behind it: after a release."""
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match=REFUSED):
        small_runs.train(tmp_path, MODELS[name](), steps=1)


class Recurrent(nn.Module):
    """A sequence model that takes the batch for the time."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = (
            self.layer(x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)
        )
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH),
    "gru": lambda: nn.GRU(WIDTH, WIDTH),
    "rnn": lambda: nn.RNN(WIDTH, WIDTH, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),
    "encoder with dropout": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequence_models_without_batch_first(name: str, engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match=REFUSED):
        small_runs.train(
            tmp_path, Recurrent(SEQUENCES[name]()), data=small_runs.sequences(), engine=engine
        )


def l_of(change: Callable[[Tensor], Tensor]) -> small_runs.Losses:
    return lambda m, x, y: change(plain(m, x, y))


def class_weights(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(
        m(x), y, weight=1 / (1 + torch.bincount(y, minlength=CLASSES)).float(), reduction="none"
    )


def class_weights_by_numpy(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.from_numpy(1 / (1 + np.bincount(y.numpy(), minlength=CLASSES))).float()
    return F.cross_entropy(m(x), y, weight=weight, reduction="none")


def mixup(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return 0.7 * ce(m(0.7 * x + 0.3 * x[order]), y) + 0.3 * ce(
        m(0.7 * x + 0.3 * x[order]), y[order]
    )


def cutmix(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = np.random.default_rng(0).permutation(len(x))
    mask = torch.rand(WIDTH) > 0.5
    return ce(m(torch.where(mask, x, x[torch.from_numpy(order)])), y)


def contrastive(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = F.normalize(m(x))
    return F.cross_entropy(h @ F.normalize(m(x + 0.1)).T, torch.arange(len(x)), reduction="none")


def advantages(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    reward = x[:, 0]
    return plain(m, x, y) * ((reward - reward.mean()) / (reward.std() + 1e-6))


def pairwise(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    score = m(x)[:, 0]
    return F.relu(1 - (score[:, None] - score[None, :]) * (y[:, None] > y[None, :])).mean(1)


def pseudo_labels(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = m(x)
    confidence = out.softmax(1).amax(1).detach()
    return ce(out, out.argmax(1)) * (confidence >= confidence.quantile(0.5))


def centres(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h, hot = m(x), F.one_hot(y, CLASSES).float()
    return (h - (hot.T @ h / hot.sum(0).clamp(min=1)[:, None])[y].detach()).square().sum(1)


def discrepancy(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = m(x)
    return plain(m, x, y) + torch.exp(-torch.cdist(h, h)).mean()


def variance_penalty(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) + F.relu(1 - m(x).std(0)).mean()


def reads(kind: str) -> small_runs.Losses:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        lost = plain(m, x, y)
        if kind == "item":
            return lost * lost.mean().item()
        if kind == "float":
            return lost / float(x.abs().max())
        if kind == "truth":
            return lost * (2.0 if x.mean() > 0 else 1.0)
        if kind == "list":
            return lost * max(x[:, 0].tolist())
        if kind == "numpy":
            return lost * float(np.asarray(x.detach()).mean())
        return lost * (1 + int((y == 1).sum()))

    return losses


def written_by_numpy(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Past torch in both directions: no operation shows where the weights come from."""
    weight = torch.zeros(CLASSES)
    weight.numpy()[:] = 1 / (1 + np.bincount(y.numpy(), minlength=CLASSES))
    return F.cross_entropy(m(x), y, weight=weight, reduction="none")


def uneven(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The losses of the examples above the mean, the others zero: by selection."""
    lost = plain(m, x, y)
    hard = torch.nonzero(lost > lost.detach().mean()).flatten()
    return torch.zeros_like(lost).index_put((hard,), lost[hard])


def most_frequent(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) * torch.where(y == y.mode().values, 0.5, 1.0)


LOSSES: dict[str, small_runs.Losses] = {
    "divided by the mean": l_of(lambda v: v / v.detach().mean()),
    "divided by the largest": l_of(lambda v: v / v.detach().max()),
    "minus the mean": l_of(lambda v: (v - v.detach().mean()).square()),
    "the mean for all": l_of(lambda v: v.mean().expand(len(v)) + 0 * v),
    "hard mining by the mean": l_of(lambda v: torch.where(v > v.detach().mean(), v, 0 * v)),
    "hard mining by the top": l_of(
        lambda v: v * torch.zeros_like(v).scatter(0, v.topk(2).indices, 1.0)
    ),
    "hard mining by selection": uneven,
    "focal by the largest": l_of(lambda v: v * (v / v.max()).detach() ** 2),
    "softmax over the batch": l_of(lambda v: v * v.detach().softmax(0)),
    "exponential weights": l_of(lambda v: v * torch.exp(v.detach() - v.detach().logsumexp(0))),
    "sorted": l_of(lambda v: v.sort().values),
    "swapped": l_of(lambda v: v.flip(0)),
    "value kept, gradient of the mean": l_of(lambda v: v + v.mean() - v.mean().detach()),
    "one percent of the mean": l_of(lambda v: v * (1 + 0.009 * (v.detach().mean() - 1))),
    "a millionth of the mean": l_of(lambda v: v * (1 + 1e-5 * v.detach().mean())),
    "a little of the neighbour": l_of(lambda v: v + 0.001 * v.roll(1)),
    "over the number of records": l_of(lambda v: v / len(v)),
    "times the number of records": l_of(lambda v: v * (1.0 / v.shape[0])),
    "advantages": advantages,
    "class weights": class_weights,
    "class weights by numpy": class_weights_by_numpy,
    "class weights written by numpy": written_by_numpy,
    "most frequent class": most_frequent,
    "mixup": mixup,
    "cutmix": cutmix,
    "contrast in the batch": contrastive,
    "triplets": lambda m, x, y: F.triplet_margin_loss(
        m(x), m(x + 0.1), m(x).roll(1, 0), reduction="none"
    ),
    "pairs": pairwise,
    "pseudo labels": pseudo_labels,
    "centres": centres,
    "discrepancy": discrepancy,
    "variance penalty": variance_penalty,
    **{
        f"read by {kind}": reads(kind)
        for kind in ("item", "float", "truth", "list", "numpy", "int")
    },
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_mix(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match=REFUSED):
        small_runs.train(tmp_path, net(), LOSSES[name])
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize("engine", ["bookkeeping", "batched", "loop"])
@pytest.mark.parametrize(
    "name", ["divided by the mean", "value kept, gradient of the mean", "a little of the neighbour"]
)
def test_every_engine_refuses(name: str, engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, net(), LOSSES[name], engine=engine)


def test_tokens_normalised_over_the_batch(tmp_path: Path) -> None:
    def losses(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
        each = F.cross_entropy(m(words).flatten(0, 1), words.flatten(), reduction="none").view(
            words.shape
        )
        return (each * real).sum(1) / real.sum()

    torch.manual_seed(0)
    model = net(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, model, losses, small_runs.tokens())


def by_user() -> UserRecords:
    x, y = small_runs.vectors()
    return dpfy.by_user((x, y), torch.arange(len(x)) // 3, 3)


def test_users_fed_position_by_position(tmp_path: Path) -> None:
    """Losses of [most, users] in the place of [users, most] give one user's loss to another."""
    users = by_user()

    def losses(m: nn.Module, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        return dpfy.per_user(ce(m(x.transpose(0, 1).flatten(0, 1)), y.T.flatten()), real)

    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, net(), losses, users, unit=users.unit)


class Kept:
    """What loops keep from step to step in Python."""

    def __init__(self, kind: str) -> None:
        self.kind, self.state, self.queue = kind, torch.zeros(WIDTH), [torch.zeros(1, WIDTH)]

    def __call__(self, m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "mean":
            lost = ce(m(x - self.state), y)
            self.state = 0.9 * self.state + 0.1 * x.mean(0)
        elif self.kind == "mean in place":
            lost = ce(m(x - self.state), y)
            self.state.mul_(0.9).add_(x.mean(0), alpha=0.1)
        elif self.kind == "queue":
            lost = plain(m, x, y) + (x @ torch.cat(self.queue).T).mean(1) * m(x)[:, 0]
            self.queue = [*self.queue[-3:], x[:2].clone()]
        else:
            lost = plain(m, x, y) * (1 + self.state[0])
            self.state = lost.detach().mean().expand(WIDTH)
        return lost


@pytest.mark.parametrize("kind", ["mean", "mean in place", "queue", "loss"])
def test_what_is_kept_from_step_to_step(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="earlier step"):
        small_runs.train(tmp_path, net(), Kept(kind))


def test_the_data_beside_the_batch(tmp_path: Path) -> None:
    data = small_runs.vectors()
    with pytest.raises(Unsupported, match="beside the batch"):
        small_runs.train(tmp_path, net(), lambda m, x, y: ce(m(x - data[0].mean(0)), y), data)


@pytest.mark.parametrize("seed", range(4))
def test_mixing_that_begins_in_mid_run_is_found_at_a_random_step(seed: int, tmp_path: Path) -> None:
    calls = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return contrastive(m, x, y) if calls > 30 else plain(m, x, y)

    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, net(), losses, steps=60, seed=seed)
    assert 30 < calls < 61


def test_mixing_is_found_at_an_expected_batch_of_one(tmp_path: Path) -> None:
    """Most batches hold no record or one: those that are due are filled up, so that there is
    somebody to mix with.
    """
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, net(), LOSSES["divided by the mean"], steps=60, batch=1)


def test_physical_batches_of_one_record_are_checked_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, net(), LOSSES["divided by the mean"], max_physical_batch=1)


def test_a_refusal_that_the_caller_catches_ends_the_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, mixing = net(), LOSSES["divided by the mean"]
    plan = dpfy.dpsgd(small_runs.RECORDS, 12, steps=4).with_noise(1.0, delta=1e-3)
    training = dpfy.PrivateTraining(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        small_runs.vectors(),
        plan,
        dpfy.Run(tmp_path / "run", seed=1),
    )
    before = [p.detach().clone() for p in model.parameters()]

    def goes_on() -> None:
        with training:
            x, y = next(iter(training.batches()))
            attempts = (
                lambda: training.step(mixing(model, x, y)),
                lambda: training.step(plain(model, x, y)),
                training.save,
                training.finish,
                training.guarantee,
                lambda: next(iter(training.batches())),
            )
            for attempt in attempts:
                with pytest.raises(Unsupported, match="mix examples"):
                    attempt()

    with pytest.raises(Unsupported, match="mix examples"):
        goes_on()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not (tmp_path / "run" / "privacy.json").exists()


def test_a_refused_run_cannot_be_resumed_once_it_has_released(tmp_path: Path) -> None:
    calls = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return contrastive(m, x, y) if calls > 20 else plain(m, x, y)

    def again(steps: int, losses: small_runs.Losses) -> None:
        torch.manual_seed(0)
        model = net()
        plan = dpfy.dpsgd(small_runs.RECORDS, 12, steps=steps).with_noise(1.0, delta=1e-3)
        run = dpfy.Run(tmp_path / "run", seed=1, resume=True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with dpfy.PrivateTraining(model, sgd, small_runs.vectors(), plan, run) as training:
            for x, y in training.batches():
                training.step(losses(model, x, y))

    with pytest.raises(Unsupported, match="mix examples"):
        again(60, losses)
    with pytest.raises(Unsupported, match="a run that was refused"):
        again(60, plain)


def test_a_run_refused_at_its_first_step_may_be_mended(tmp_path: Path) -> None:
    """Nothing was released: the same folder takes the mended loss."""
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, net(), LOSSES["divided by the mean"])
    small_runs.train(tmp_path, net())
    assert (tmp_path / "run" / "privacy.json").exists()
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_fit_refuses_too(tmp_path: Path) -> None:
    model = Apply(lambda h: h - h.detach().mean(0))
    plan = dpfy.dpsgd(small_runs.RECORDS, 12, steps=4).with_noise(1.0, delta=1e-3)
    with pytest.raises(DpfyError, match="mix examples"):
        dpfy.fit(
            model,
            small_runs.vectors(),
            plan=plan,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            run=tmp_path / "run",
        )


def test_the_refusal_names_the_operation(tmp_path: Path) -> None:
    random.seed(0)
    with pytest.raises(Unsupported, match="first seen after mean is not supported"):
        small_runs.train(tmp_path, Apply(lambda h: h - h.detach().mean(0)))
