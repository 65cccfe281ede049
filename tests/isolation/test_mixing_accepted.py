"""Models and losses that keep examples apart: every one trains to its card, checked by running its
operations again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import CLASSES, LENGTH, WIDTH, WORDS, Apply, ce, net, plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dpfy


def accepted(training: dpfy.PrivateTraining, replayed: int = 1) -> None:
    """The run is finished, its steps were run again, and the card says so."""
    assert training.isolation is not None
    summary = training.isolation.summary
    assert summary.replayed, summary
    assert summary.replayed + summary.proven >= replayed, summary
    assert not training.isolation.summary.through_model, training.isolation.summary.why
    card = json.loads((training.folder.path / "privacy.json").read_text())
    assert "run again with other records" in json.dumps(card)


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Gate(nn.Module):
    """A block behind a gate that starts at zero, example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.zeros(1)),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.gate * torch.tanh(self.body(x)))
        return out


class Excite(nn.Module):
    """Squeeze and excite: channels weighted by a pooled view of the same image."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]


class LowRank(nn.Module):
    """A frozen layer with a low-rank one beside it, which starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, 2, bias=False),
            nn.Linear(2, 8, bias=False),
        )
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Experts(nn.Module):
    """Every record goes to two of three experts: whose gradients are added up in which order
    depends on where others go.
    """

    def __init__(self, sort: bool) -> None:
        super().__init__()
        self.sort, self.gate, self.up = (
            sort,
            nn.Linear(WIDTH, 3),
            nn.Parameter(torch.randn(3, 960, WIDTH) / 3),
        )
        self.head = nn.Linear(960, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).topk(2, 1)
        order = chosen.flatten().argsort(stable=True) if self.sort else torch.arange(2 * len(x))
        mine, expert = x.repeat_interleave(2, 0)[order], chosen.flatten()[order]
        made = torch.tanh(torch.bmm(self.up[expert], mine[:, :, None])[:, :, 0])[order.argsort()]
        out: Tensor = self.head((made.view(len(x), 2, -1) * weights[:, :, None]).sum(1))
        return out


class Checkpointed(nn.Module):
    """Activations made again in the backward pass."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self.first, x, use_reentrant=False))
        return out


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.clamp(-1, 1)


class Skipping(nn.Module):
    """Layers that are left out at random, by Python's generator and by torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.7 and torch.rand(()) < 0.9:
                x = block(x)
        out: Tensor = self.head(x)
        return out


def hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1e-3))
    return torch.tanh(h)


VECTORS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, CLASSES),
    "perceptron": net,
    "relu": lambda: net(nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)),
    "gelu": lambda: net(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, CLASSES)),
    "prelu": lambda: net(nn.Linear(WIDTH, 8), nn.PReLU(), nn.Linear(8, CLASSES)),
    "maxout": lambda: Apply(lambda h: h.view(len(h), 4, 2).amax(2), head=nn.Linear(4, CLASSES)),
    "dropout": lambda: net(nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES)),
    "alpha dropout": lambda: net(
        nn.Linear(WIDTH, 8), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(8, CLASSES)
    ),
    "layer norm": lambda: net(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, CLASSES)),
    "rms norm": lambda: net(nn.Linear(WIDTH, 8), nn.RMSNorm(8), nn.Linear(8, CLASSES)),
    "group norm": lambda: net(nn.Linear(WIDTH, 8), nn.GroupNorm(2, 8), nn.Linear(8, CLASSES)),
    "residual": lambda: net(
        Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, CLASSES)
    ),
    "gate at zero": Gate,
    "shared layer": lambda: (lambda layer: net(layer, nn.Tanh(), layer, nn.Linear(WIDTH, CLASSES)))(
        nn.Linear(WIDTH, WIDTH)
    ),
    "experts": lambda: Experts(sort=False),
    "experts, sorted": lambda: Experts(sort=True),
    "low rank": lambda: net(LowRank(), nn.Tanh(), nn.Linear(8, CLASSES)),
    "frozen": lambda: net(
        nn.Linear(WIDTH, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, CLASSES)
    ),
    "weight norm": lambda: net(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, CLASSES)
    ),
    "checkpoint": Checkpointed,
    "checkpoint with dropout": lambda: Checkpointed(0.2),
    "straight through": lambda: Apply(Rounded.apply),
    "rounded and detached": lambda: Apply(lambda h: h + (h.round() - h).detach()),
    "hook by row": lambda: Apply(hooked),
    "sorted in the row": lambda: Apply(lambda h: h.sort(1).values),
    "largest in the row": lambda: Apply(lambda h: h * (h >= h.topk(3, 1).values[:, -1:])),
    "cumulative in the row": lambda: Apply(lambda h: h.cumsum(1)),
    "softmax by hand": lambda: Apply(lambda h: torch.exp(h - h.amax(1, keepdim=True)) / 8),
    "norm of the row": lambda: Apply(lambda h: h / h.norm(dim=1, keepdim=True).detach()),
    "fourier": lambda: Apply(lambda h: torch.fft.rfft(h).abs(), head=nn.Linear(5, CLASSES)),
    "outer products": lambda: Apply(
        lambda h: torch.einsum("bi,bj->bij", h, h).flatten(1), head=nn.Linear(64, CLASSES)
    ),
    "loop over rows": lambda: Apply(lambda h: torch.stack([torch.tanh(row) for row in h])),
    "vmap": lambda: Apply(torch.func.vmap(lambda row: torch.tanh(row) * row.norm())),
    "in place": lambda: Apply(lambda h: h.clone().mul_(2).add_(1).clamp_(min=0)),
    "written by slices": lambda: Apply(
        lambda h: torch.zeros_like(h).index_copy(1, torch.arange(4), h[:, 4:])
    ),
    "random noise": lambda: Apply(lambda h: h + 0.1 * torch.randn_like(h)),
    "random signs": lambda: Apply(lambda h: h * (torch.rand(len(h), 1) < 0.5)),
    "random layers": Skipping,
    "bilinear": lambda: Apply(lambda h: h[:, :4] * h[:, 4:], head=nn.Linear(4, CLASSES)),
    "mixture of experts": lambda: Apply(
        lambda h: (h[:, :2].softmax(1)[:, :, None] * torch.stack([h.tanh(), h.relu()], 1)).sum(1)
    ),
    "read of a shape": lambda: Apply(lambda h: h.reshape(h.shape[0], -1) * (1 if len(h) else 2)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_models_of_vectors(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, VECTORS[name]()), replayed=2)


def conv(*layers: nn.Module, width: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, CLASSES),
    )


IMAGES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: conv(nn.ReLU()),
    "strided": lambda: conv(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU(), width=6),
    "depthwise": lambda: conv(nn.Conv2d(4, 4, 3, groups=4)),
    "dilated": lambda: conv(nn.Conv2d(4, 4, 3, dilation=2)),
    "transposed": lambda: conv(nn.ConvTranspose2d(4, 4, 2, stride=2)),
    "group norm": lambda: conv(nn.GroupNorm(2, 4), nn.ReLU()),
    "instance norm": lambda: conv(nn.InstanceNorm2d(4, affine=True)),
    "local response": lambda: conv(nn.LocalResponseNorm(3)),
    "pools": lambda: conv(nn.MaxPool2d(2), nn.AvgPool2d(2)),
    "dropout of channels": lambda: conv(nn.Dropout2d(0.3)),
    "excite": lambda: conv(Excite()),
    "upsampling": lambda: conv(nn.Upsample(scale_factor=2, mode="bilinear")),
    "pixels shuffled": lambda: conv(nn.PixelShuffle(2), width=1),
    "residual": lambda: conv(
        Residual(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
    ),
}


@pytest.mark.parametrize("sort", [False, True])
def test_experts_on_several_threads(sort: bool, tmp_path: Path) -> None:
    """Threads add up what belongs to one expert in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        accepted(small_runs.train(tmp_path, Experts(sort)))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", IMAGES)
def test_models_of_images(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, IMAGES[name](), data=small_runs.images()))


class Sequence(nn.Module):
    """A layer over sequences, then the mean over time."""

    def __init__(self, layer: nn.Module, width: int = WIDTH, **options: Any) -> None:
        super().__init__()
        self.layer, self.options, self.head = layer, options, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            out = self.layer(x, x, x, **self.options)
        elif isinstance(self.layer, nn.TransformerDecoderLayer):
            out = self.layer(x, x)
        else:
            out = self.layer(x, **self.options)
        answer: Tensor = self.head((out[0] if isinstance(out, tuple) else out).mean(1))
        return answer


CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Sequence(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "lstm both ways": lambda: Sequence(
        nn.LSTM(WIDTH, 4, 2, batch_first=True, bidirectional=True, dropout=0.1), 8
    ),
    "gru": lambda: Sequence(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "rnn": lambda: Sequence(nn.RNN(WIDTH, WIDTH, batch_first=True)),
    "attention": lambda: Sequence(nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "causal attention": lambda: Sequence(
        nn.MultiheadAttention(WIDTH, 2, batch_first=True), attn_mask=CAUSAL, need_weights=False
    ),
    "attention with dropout": lambda: Sequence(
        nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
    ),
    "encoder": lambda: Sequence(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)),
    "two encoders": lambda: Sequence(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 2)
    ),
    "decoder": lambda: Sequence(nn.TransformerDecoderLayer(WIDTH, 2, 8, batch_first=True)),
    "convolution over time": lambda: net(
        nn.Conv1d(LENGTH, 4, 3),
        nn.InstanceNorm1d(4),
        nn.Flatten(),
        nn.Linear(4 * (WIDTH - 2), CLASSES),
    ),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_models_of_sequences(name: str, engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(
        small_runs.train(tmp_path, SEQUENCES[name](), data=small_runs.sequences(), engine=engine)
    )


class Language(nn.Module):
    """Embeddings of words and places, masked attention, and the embedding again as head."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(LENGTH, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, real: Tensor) -> Tensor:
        h = self.words(words) + self.places(torch.arange(LENGTH))
        out: Tensor = self.head(
            h + self.attention(h, h, h, key_padding_mask=real == 0, need_weights=False)[0]
        )
        return out


def language(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    each = F.cross_entropy(
        m(words, real)[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="none"
    ).view(len(words), -1)
    return (each * real[:, 1:]).sum(1) / real[:, 1:].sum(1).clamp(min=1)


@pytest.mark.parametrize("engine", ["bookkeeping", "batched", "loop"])
@pytest.mark.parametrize("tied", [True, False])
def test_language_models(tied: bool, engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(
        small_runs.train(tmp_path, Language(tied), language, small_runs.tokens(), engine=engine)
    )


def bags(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    return ce(m(words), words[:, 0])


def test_bags_of_words(tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(
        small_runs.train(
            tmp_path,
            net(nn.EmbeddingBag(WORDS, 8), nn.Linear(8, WORDS)),
            bags,
            small_runs.tokens(),
            engine="loop",
        )
    )


def focal(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    lost = plain(m, x, y)
    return (1 - torch.exp(-lost)) ** 2 * lost


def diffusion(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    level = torch.rand(len(x), 1)
    noise = torch.randn_like(x)
    return (m(level * x + (1 - level) * noise) - noise[:, :CLASSES]).square().mean(1)


def variational(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, log = m(x)[:, :1], m(x)[:, 1:2].clamp(-3, 3)
    drawn = mean + torch.exp(log / 2) * torch.randn_like(mean)
    return (drawn - x[:, :1]).square().sum(1) + 0.5 * (mean.square() + log.exp() - 1 - log).sum(1)


def two_views(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(m(x + 0.1 * torch.randn_like(x)), m(x).detach(), dim=1)


def penalty(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain(m, x, y) + 0.01 * sum(p.square().sum() for p in m.parameters())


def annealed() -> small_runs.Losses:
    calls = [0]

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        return plain(m, x, y) * min(1.0, calls[0] / 10) + torch.tensor(0.01 * calls[0]) * m(
            x
        ).square().sum(1)

    return losses


CONSTANT = torch.linspace(-1, 1, WIDTH)
LOSSES: dict[str, small_runs.Losses] = {
    "smoothed labels": lambda m, x, y: F.cross_entropy(
        m(x), y, label_smoothing=0.1, reduction="none"
    ),
    "public class weights": lambda m, x, y: F.cross_entropy(
        m(x), y, torch.tensor([1.0, 2.0, 0.5]), reduction="none"
    ),
    "one hot": lambda m, x, y: (m(x).softmax(1) - F.one_hot(y, CLASSES)).square().sum(1),
    "binary": lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x)[:, 0], (y > 0).float(), reduction="none"
    ),
    "squared": lambda m, x, y: F.mse_loss(m(x), x[:, :CLASSES], reduction="none").mean(1),
    "huber": lambda m, x, y: F.huber_loss(m(x), x[:, :CLASSES], reduction="none").sum(1),
    "divergence": lambda m, x, y: F.kl_div(
        m(x).log_softmax(1), x[:, :CLASSES].softmax(1), reduction="none"
    ).sum(1),
    "poisson": lambda m, x, y: F.poisson_nll_loss(m(x)[:, 0], y.float(), reduction="none"),
    "gaussian": lambda m, x, y: F.gaussian_nll_loss(
        m(x)[:, 0], x[:, 0], m(x)[:, 1].exp(), reduction="none"
    ),
    "hinge": lambda m, x, y: F.multi_margin_loss(m(x), y, reduction="none"),
    "triplets of the record": lambda m, x, y: F.triplet_margin_loss(
        m(x), m(x + 0.1), m(x.flip(1)), reduction="none"
    ),
    "focal": focal,
    "diffusion": diffusion,
    "variational": variational,
    "two views of a record": two_views,
    "weights of the record": lambda m, x, y: plain(m, x, y) * torch.sigmoid(x[:, 0]),
    "own norm": lambda m, x, y: plain(m, x, y) / plain(m, x, y).detach().clamp(min=0.1),
    "weight penalty": penalty,
    "annealed": annealed(),
    "a constant from outside": lambda m, x, y: ce(m(x - CONSTANT), y),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, net(), LOSSES[name]), replayed=2)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "loop"},
        {"engine": "batched"},
        {"max_physical_batch": 5},
        {"max_physical_batch": 1},
        {"pad": True, "max_physical_batch": 16},
        {"max_physical_batch": "auto"},
    ],
    ids=str,
)
def test_ways_to_run(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, net(), **options))


@pytest.mark.parametrize("batch", [1, 2, 60, 96])
def test_batches_of_all_sizes(batch: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, net(), steps=30, batch=batch))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = small_runs.vectors()
    accepted(small_runs.train(tmp_path, net().to(dtype), data=(x.to(dtype), y)))


@pytest.mark.parametrize("engine", ["bookkeeping", "loop"])
def test_autocast(engine: str, tmp_path: Path) -> None:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(m, x, y)

    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, net(), losses, engine=engine))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_users(reduction: str, tmp_path: Path) -> None:
    x, y = small_runs.vectors()
    users = dpfy.by_user((x, y), torch.arange(len(x)) // 3, 4)

    def losses(m: nn.Module, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        return dpfy.per_user(ce(m(x.flatten(0, 1)), y.flatten()), real, reduction=reduction)

    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, net(), losses, users, unit=users.unit, batch=8))


def test_one_call(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net()
    plan = dpfy.dpsgd(small_runs.RECORDS, 12, steps=8).with_noise(1.0, delta=1e-3)
    data, sgd = small_runs.vectors(), torch.optim.SGD(model.parameters(), lr=0.1)
    dpfy.fit(
        model,
        data,
        plan=plan,
        optimizer=sgd,
        run=tmp_path / "run",
        evaluation=dpfy.WithheldTest(data),
    )
    assert "run again with other records" in (tmp_path / "run" / "privacy.json").read_text()


def test_what_is_only_watched_may_be_kept(tmp_path: Path) -> None:
    """A mean of losses for the terminal, an evaluation in mid-step, a value read after the step:
    none reaches a loss.
    """
    x, y = small_runs.vectors()
    shown = torch.zeros(())

    def losses(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        nonlocal shown
        with torch.no_grad():
            float((m(torch.ones(4, WIDTH)).argmax(1) == 0).float().mean())
        lost = plain(m, a, b)
        shown = 0.9 * shown + 0.1 * lost.detach().mean()
        return lost

    torch.manual_seed(0)
    accepted(small_runs.train(tmp_path, net(), losses, (x, y)), replayed=2)


@pytest.mark.slow
def test_a_compiled_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net()
    fast = torch.compile(model, backend="eager")
    accepted(small_runs.train(tmp_path, model, lambda m, x, y: plain(fast, x, y)))


def tiny(kind: str) -> tuple[nn.Module, small_runs.Losses]:
    """Models of the Hugging Face library, as small as they get."""
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": WORDS,
    }

    def tokens(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
        logits = m(input_ids=words, attention_mask=real).logits
        each = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="none"
        ).view(len(words), -1)
        return (each * real[:, 1:]).sum(1) / real[:, 1:].sum(1).clamp(min=1)

    def classes(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
        return ce(m(input_ids=words, attention_mask=real).logits, words[:, 0] % 2)

    if kind == "bert":
        return transformers.BertForSequenceClassification(
            transformers.BertConfig(**small, max_position_embeddings=8)
        ), classes
    if kind == "roberta":
        config = transformers.RobertaConfig(**small, max_position_embeddings=16, pad_token_id=1)
        return transformers.RobertaForSequenceClassification(config), classes
    if kind == "distilbert":
        config = transformers.DistilBertConfig(
            vocab_size=WORDS, dim=8, n_layers=1, n_heads=2, hidden_dim=16
        )
        return transformers.DistilBertForSequenceClassification(config), classes
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)), tokens
    if kind == "mixtral":
        wide = small | {"hidden_size": 32, "intermediate_size": 32}
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**wide, num_key_value_heads=2, num_local_experts=4)
        )
        model.set_experts_implementation("batched_mm")
        return model, tokens
    if kind == "opt":
        config = transformers.OPTConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16
        )
        return transformers.OPTForCausalLM(config), tokens
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=8)
    return transformers.GPT2LMHeadModel(config), tokens


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "llama", "opt", "gpt2", "mixtral"]
)
def test_hugging_face(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, losses = tiny(kind)
    accepted(small_runs.train(tmp_path, model.train(), losses, small_runs.tokens(), steps=3))


def test_hugging_face_with_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model, losses = tiny("gpt2")
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True),
    )
    accepted(small_runs.train(tmp_path, adapted, losses, small_runs.tokens(), steps=3))


def test_hugging_face_with_checkpoints(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, losses = tiny("gpt2")
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    accepted(small_runs.train(tmp_path, model.train(), losses, small_runs.tokens(), steps=3))


def test_hugging_face_images(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_channels=2,
    )
    model = transformers.ViTForImageClassification(config)
    accepted(
        small_runs.train(
            tmp_path, model, lambda m, x, y: ce(m(x).logits, y % 2), small_runs.images(), steps=3
        )
    )
