"""On a GPU too: models and losses that mix are refused, and those that do not are trained, by every
engine.
"""

from __future__ import annotations

import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import CLASSES, LENGTH, WIDTH, Apply, ce, net, plain
from torch import Tensor, nn

from dpfy.core.errors import Unsupported

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENGINES = ["loop", "batched", "bookkeeping"]


def divided(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = ce(model(x), y)
    return losses / losses.detach().mean()


class Encoder(nn.Module):
    """A layer of torch's own transformer, and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).mean(1))
        return out


class Reader(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x)[0][:, -1])
        return out


class Attending(nn.Module):
    """Long sequences, few heads: the backward pass of torch's attention is split over the keys, and
    its parts are added in any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(WIDTH, 3 * 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        out: Tensor = self.head(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0].mean(1)
        )
        return out


def long() -> tuple[Tensor, Tensor]:
    x, y = small_runs.sequences()
    return x.repeat(1, 400, 1), y


MIXED = {
    "attention over the batch": lambda: (
        Apply(lambda h: h + 1e-2 * h.mean(0), Attending(), net(nn.Linear(CLASSES, CLASSES))),
        plain,
        long(),
    ),
    "steps for examples": lambda: (Reader(nn.LSTM(WIDTH, WIDTH)), plain, small_runs.sequences()),
    "batch mean": lambda: (Apply(lambda h: h - h.mean(0)), plain, small_runs.vectors()),
    "detached batch mean": lambda: (
        Apply(lambda h: h - h.detach().mean(0)),
        plain,
        small_runs.vectors(),
    ),
    "batch attention": lambda: (
        Apply(lambda h: torch.softmax(h @ h.T, 1) @ h),
        plain,
        small_runs.vectors(),
    ),
    "divided by the mean": lambda: (net(), divided, small_runs.vectors()),
}
APART = {
    "perceptron": lambda: (net(), plain, small_runs.vectors()),
    "dropout": lambda: (
        net(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES)),
        plain,
        small_runs.vectors(),
    ),
    "convolutions": lambda: (
        net(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)
        ),
        plain,
        small_runs.images(),
    ),
    "sequences": lambda: (
        net(nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES)),
        plain,
        small_runs.sequences(),
    ),
    "encoder": lambda: (Encoder(), plain, small_runs.sequences()),
    "long attention": lambda: (Attending(), plain, long()),
    "lstm": lambda: (
        Reader(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True)),
        plain,
        small_runs.sequences(),
    ),
    "gru": lambda: (Reader(nn.GRU(WIDTH, WIDTH, batch_first=True)), plain, small_runs.sequences()),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", MIXED)
def test_mixing_is_refused(tmp_path, case, engine):
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(tmp_path, *MIXED[case](), device="cuda", engine=engine, batch=32)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", APART)
def test_what_does_not_mix_is_trained(tmp_path, case, engine):
    if engine == "batched" and case in ("lstm", "gru"):
        pytest.skip("cuDNN has no vectorised backward: refused, with the way out")
    small_runs.train(tmp_path, *APART[case](), device="cuda", engine=engine, batch=32)
    assert (tmp_path / "run" / "privacy.json").is_file()


class Deep(nn.Module):
    """Many layers of attention with many heads: one of their tiles moves by its last bits once in
    some runs of the backward pass.
    """

    def __init__(self, width: int = 1024, layers: int = 12) -> None:
        super().__init__()
        each = [
            nn.TransformerEncoderLayer(
                width, width // 64, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        ]
        self.first, self.layers, self.head = (
            nn.Linear(WIDTH, width),
            nn.Sequential(*each),
            nn.Linear(width, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.first(x)).mean(1))
        return out


@pytest.mark.parametrize("attempt", range(3))
def test_a_deep_transformer_is_trained_every_time(tmp_path, attempt):
    x, y = small_runs.sequences()
    small_runs.train(
        tmp_path,
        Deep(),
        plain,
        (x.repeat(1, 256 // LENGTH + 1, 1), y),
        device="cuda",
        engine="bookkeeping",
        batch=32,
    )
    assert (tmp_path / "run" / "privacy.json").is_file()


def test_a_deep_transformer_over_the_batch_is_refused(tmp_path):
    x, y = small_runs.sequences()
    model = Apply(lambda h: h + 1e-2 * h.mean(0), Deep(), net(nn.Linear(CLASSES, CLASSES)))
    with pytest.raises(Unsupported, match="mix examples"):
        small_runs.train(
            tmp_path,
            model,
            plain,
            (x.repeat(1, 256 // LENGTH + 1, 1), y),
            device="cuda",
            engine="bookkeeping",
            batch=32,
        )
