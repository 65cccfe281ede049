"""Ordinary programs, which keep examples apart and must be accepted: models, losses and loops that
people write.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.isolation import cases
from tests.isolation import test_mixing_accepted as earlier
from tests.isolation.cases import CLASSES, LENGTH, WIDTH, WORDS, Apply, Case, Job, ce, net, plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import dpfy
from dpfy.gradients import per_view

CASES: dict[str, Case] = {}
Model = Callable[[], nn.Module]
Losses = Callable[..., Tensor]

DRAWING = (
    "dropout",
    "random",
    "noise",
    "skip",
    "both ways",
    "encoder",
    "decoder",
    "two views",
    "diffusion",
    "variational",
)
"""Names with one of these words draw random numbers for all rows at once."""


def case(name: str, **options: Any) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Register a function that builds a program."""

    def register(build: Callable[[], Job]) -> Callable[[], Job]:
        assert name not in CASES, name
        options.setdefault("draws", any(word in name for word in DRAWING))
        CASES[name] = Case(name, lambda now: build(), **options)
        return build

    return register


def add(
    name: str,
    model: Model = net,
    losses: Losses = plain,
    data: Callable[[], Any] = cases.vectors,
    *,
    job: Any = None,
    **options: Any,
) -> None:
    """Register a model with its losses and data. `job` holds more fields of the program."""
    case(name, **options)(lambda: Job(model(), losses, data(), **(job or {})))


def add_all(kind: str, data: Callable[[], Any], models: dict[str, Model]) -> None:
    for name, model in models.items():
        add(f"{kind}: {name}", model, plain, data)


# The models and losses of the earlier tests

add_all("vectors", cases.vectors, earlier.VECTORS)
add_all("images", cases.images, earlier.IMAGES)
add_all("sequences", cases.sequences, earlier.SEQUENCES)
for _name, _losses in earlier.LOSSES.items():
    if _name != "annealed":
        add(f"loss: {_name}", net, _losses)
for _tied in (True, False):
    add(
        f"language, tied {_tied}",
        lambda tied=_tied: earlier.Language(tied),
        earlier.language,
        cases.tokens,
    )
add(
    "bags of words",
    lambda: net(nn.EmbeddingBag(WORDS, 8), nn.Linear(8, WORDS)),
    earlier.bags,
    cases.tokens,
    job={"runtime": {"engine": "loop"}},
)


# dpfy's own models, by name


def _built(name: str, features: tuple[int, ...] = (WIDTH,), **options: Any) -> Model:
    def make() -> nn.Module:
        from dpfy.models.build import build
        from dpfy.models.config import ModelConfig

        return build(ModelConfig(name=name, **options), features, CLASSES)

    return make


def big_images() -> Any:
    g = cases.seeded()
    return cases.given(
        torch.randn(cases.RECORDS, 1, 28, 28, generator=g),
        torch.randint(0, CLASSES, (cases.RECORDS,), generator=g),
    )


add("model linear", _built("linear"))
add("model mlp", _built("mlp", hidden=(8, 8)))
add("model mlp with dropout", _built("mlp", hidden=(8,), dropout=0.2))
add("model lenet5", _built("lenet5", (1, 28, 28)), plain, big_images, rows=8)
add("model tanh-cnn", _built("tanh-cnn", (1, 28, 28)), plain, big_images, rows=8)


# Losses

add(
    "cross entropy with smoothing and public weights",
    net,
    lambda m, x, y: F.cross_entropy(
        m(x), y, torch.tensor([1.0, 2, 3]), label_smoothing=0.2, reduction="none"
    ),
)
add(
    "focal, fixed normalisation",
    net,
    lambda m, x, y: (1 - torch.exp(-plain(m, x, y))) ** 2 * 0.25 * plain(m, x, y) / 10.0,
)
add(
    "soft targets",
    net,
    lambda m, x, y: F.cross_entropy(
        m(x), (0.9 * F.one_hot(y, CLASSES) + 0.1 / CLASSES).float(), reduction="none"
    ),
)
add(
    "one hot of ten classes",
    lambda: nn.Linear(WIDTH, 10),
    lambda m, x, y: -(F.one_hot(y, 10) * m(x).log_softmax(1)).sum(1),
)
add(
    "several labels",
    net,
    lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x), (x[:, :CLASSES] > 0).float(), reduction="none"
    ).mean(1),
)
add(
    "several labels, positive weight",
    net,
    lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x),
        (x[:, :CLASSES] > 0).float(),
        pos_weight=torch.tensor([1.0, 2.0, 3.0]),
        reduction="none",
    ).sum(1),
)
add("regression", net, lambda m, x, y: (m(x)[:, 0] - x.sum(1)).square())
add("regression, absolute", net, lambda m, x, y: F.l1_loss(m(x)[:, 0], x[:, 0], reduction="none"))
add(
    "regression, smooth",
    net,
    lambda m, x, y: F.smooth_l1_loss(m(x), x[:, :CLASSES], reduction="none", beta=0.5).mean(1),
)
add(
    "quantile regression",
    net,
    lambda m, x, y: torch.maximum(0.9 * (x[:, 0] - m(x)[:, 0]), -0.1 * (x[:, 0] - m(x)[:, 0])),
)
add(
    "poisson counts",
    net,
    lambda m, x, y: F.poisson_nll_loss(m(x)[:, 0], y.float(), full=True, reduction="none"),
)
add(
    "margin ranking of own fields",
    net,
    lambda m, x, y: F.margin_ranking_loss(
        m(x)[:, 0], m(x)[:, 1], (y > 0).float() * 2 - 1, reduction="none"
    ),
)
add(
    "triplets of own fields",
    net,
    lambda m, x, y: F.triplet_margin_loss(m(x), m(x + 0.1), m(-x), reduction="none"),
)
add(
    "contrast of own candidates",
    lambda: nn.Linear(WIDTH, 4),
    lambda m, x, y: ce(
        torch.einsum("bd,bkd->bk", m(x), torch.stack([m(x + 0.1), m(-x), m(x.flip(1))], 1)) / 0.5,
        torch.zeros_like(y),
    ),
)
add(
    "cosine embedding",
    net,
    lambda m, x, y: F.cosine_embedding_loss(
        m(x), m(x.flip(1)), (y > 0).float() * 2 - 1, reduction="none"
    ),
)
add("hinge", net, lambda m, x, y: F.relu(1 - m(x)[:, 0] * ((y > 0).float() * 2 - 1)))
add(
    "ordinal",
    net,
    lambda m, x, y: F.binary_cross_entropy_with_logits(
        m(x), (y[:, None] > torch.arange(CLASSES)).float(), reduction="none"
    ).sum(1),
)
add("over a fixed batch size", net, lambda m, x, y: plain(m, x, y) / 24)
add("times a fixed weight", net, lambda m, x, y: plain(m, x, y) * 0.5)
add("clamped losses", net, lambda m, x, y: plain(m, x, y).clamp(max=2.0))
add(
    "easy examples left out by a fixed threshold",
    net,
    lambda m, x, y: plain(m, x, y) * (plain(m, x, y).detach() > 0.5),
)
add("where by class", net, lambda m, x, y: torch.where(y == 1, 2 * plain(m, x, y), plain(m, x, y)))
add("boolean mask by multiplication", net, lambda m, x, y: plain(m, x, y) * (x[:, 0] > 0).float())
add(
    "public class weights by table",
    net,
    lambda m, x, y: plain(m, x, y) * torch.tensor([0.2, 1.0, 3.0])[y],
)
add(
    "penalty of weights",
    net,
    lambda m, x, y: plain(m, x, y) + 1e-3 * sum(p.abs().sum() for p in m.parameters()),
)
add(
    "entropy bonus",
    net,
    lambda m, x, y: plain(m, x, y) - 0.1 * -(m(x).softmax(1) * m(x).log_softmax(1)).sum(1),
)
add(
    "dice of one image",
    lambda: nn.Conv2d(2, 1, 3, padding=1),
    lambda m, x, y: (
        1
        - (2 * (m(x).sigmoid() * (x[:, :1] > 0)).flatten(1).sum(1) + 1)
        / (m(x).sigmoid().flatten(1).sum(1) + (x[:, :1] > 0).flatten(1).sum(1) + 1)
    ),
    cases.images,
)
add(
    "segmentation, pixels that count",
    lambda: nn.Conv2d(2, CLASSES, 1),
    lambda m, x, y: _pixels(m(x), (x[:, 0] * 2).long().clamp(-1, 2)),
    cases.images,
)
add(
    "gaussian mixture output",
    lambda: nn.Linear(WIDTH, 6),
    lambda m, x, y: (
        -torch.logsumexp(m(x)[:, :3].log_softmax(1) - 0.5 * (x[:, :1] - m(x)[:, 3:]).square(), 1)
    ),
)
add(
    "reward weighted, own reward",
    net,
    lambda m, x, y: -(m(x).log_softmax(1).gather(1, y[:, None])[:, 0] * torch.tanh(x[:, 0])),
)
add(
    "preference pair of one record",
    lambda: nn.Linear(3, 1),
    lambda m, x, y: -F.logsigmoid((m(x[:, :3]) - m(x[:, 3:]))[:, 0]),
)
add(
    "largest score in the record",
    net,
    lambda m, x, y: (m(x).argmax(1) != y) * m(x).max(1).values + plain(m, x, y),
)
add(
    "top two within the record",
    net,
    lambda m, x, y: m(x).topk(2, 1).values.sum(1) - m(x).gather(1, y[:, None])[:, 0],
)
add(
    "sorted within the record",
    net,
    lambda m, x, y: (m(x).sort(1).values * torch.tensor([1.0, 2, 3])).sum(1),
)
add(
    "median within the record",
    lambda: nn.Linear(WIDTH, 5),
    lambda m, x, y: (m(x) - m(x).median(1, keepdim=True).values).square().mean(1),
)
add(
    "standardised within the record",
    net,
    lambda m, x, y: ce(m((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)), y),
)
add(
    "gradient penalty of each input",
    net,
    lambda m, x, y: plain(m, x, y) + 0.1 * _input_gradient(m, x),
)
add(
    "adversarial examples, sign of own gradient",
    net,
    lambda m, x, y: plain(m, (x + 0.1 * _input_sign(m, x, y)).detach(), y),
)
add(
    "distillation from a public teacher",
    net,
    lambda m, x, y: F.kl_div(
        m(x).log_softmax(1), _TEACHER(x).softmax(1).detach(), reduction="none"
    ).sum(1),
)
_TEACHER = net().requires_grad_(False)


def _pixels(outputs: Tensor, labels: Tensor) -> Tensor:
    labels = torch.where(labels < 0, -100, labels)
    each = F.cross_entropy(outputs, labels, ignore_index=-100, reduction="none").flatten(1)
    return each.sum(1) / (labels != -100).flatten(1).sum(1).clamp(min=1)


def _input_gradient(m: nn.Module, x: Tensor) -> Tensor:
    mine = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(m(mine).sum(), mine, create_graph=True)
    return g.norm(dim=1)


def _input_sign(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mine = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(plain(m, mine, y).sum(), mine)
    return g.sign()


# Tokens


def masked_tokens(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    """Cross entropy with ignore_index, over the record's own count."""
    labels = torch.where(real > 0, words, -100)
    each = F.cross_entropy(m(words).transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return each.sum(1) / (labels != -100).sum(1)


def mean_pooled(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    h = m[0](words) * real[:, :, None]
    return ce(m[1](h.sum(1) / real.sum(1, keepdim=True)), words[:, 0])


def last_real(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    h = m[0](words)
    return ce(m[1](h[torch.arange(len(h)), real.sum(1) - 1]), words[:, 0])


def embedded() -> nn.Module:
    return net(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


add("ignored positions over own count", embedded, masked_tokens, cases.tokens)
add("mean over own positions", embedded, mean_pooled, cases.tokens)
add("last position of each", embedded, last_real, cases.tokens)
add(
    "padding index",
    lambda: net(nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, WORDS)),
    masked_tokens,
    cases.tokens,
)
add(
    "sparse embedding",
    lambda: net(nn.Embedding(WORDS, 8, sparse=True), nn.Linear(8, WORDS)),
    mean_pooled,
    cases.tokens,
)
add(
    "masked softmax over positions",
    embedded,
    lambda m, words, real: ce(
        m[1](
            (
                m[0](words) * m[0](words).sum(2).masked_fill(real == 0, -1e9).softmax(1)[:, :, None]
            ).sum(1)
        ),
        words[:, 0],
    ),
    cases.tokens,
)
add(
    "counts of own words",
    lambda: nn.Linear(WORDS, WORDS),
    lambda m, words, real: ce(
        m(torch.zeros(len(words), WORDS).scatter_add(1, words, real.float())), words[:, 0]
    ),
    cases.tokens,
)
add(
    "skip grams of the record",
    lambda: nn.Embedding(WORDS, 8),
    lambda m, words, real: F.softplus(-(m(words[:, :1]) * m(words[:, 1:])).sum(2)).mean(1),
    cases.tokens,
)


@case("masked language model, random masks")
def _masked() -> Job:
    def losses(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
        hidden = (torch.rand(words.shape) < 0.3) & (real > 0)
        labels = torch.where(hidden, words, -100)
        each = F.cross_entropy(
            m(torch.where(hidden, 1, words)).transpose(1, 2), labels, reduction="none"
        )
        return each.sum(1) / hidden.sum(1).clamp(min=1)

    return Job(embedded(), losses, cases.tokens())


class Tagger(nn.Module):
    """An LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out: Tensor = self.head(self.lstm(packed)[1][0][-1])
        return out


class Unpacked(Tagger):
    """The same, unpacked to the fixed length, and the mean over own positions."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)
        real = torch.arange(LENGTH) < lengths[:, None]
        out: Tensor = self.head(torch.where(real[:, :, None], h, 0.0).sum(1) / lengths[:, None])
        return out


def of_lengths(m: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    return ce(m(x, lengths), y)


class Pooled(nn.Module):
    """Attention with a padding mask, then the mean over own positions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = (
            nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(x.shape[1]) < lengths[:, None]
        h = self.attention(x, x, x, key_padding_mask=~real, need_weights=False)[0]
        out: Tensor = self.head((h * real[:, :, None]).sum(1) / lengths[:, None])
        return out


add("packed sequences, last state", Tagger, of_lengths, cases.padded)
add("packed sequences, unpacked to a fixed length", Unpacked, of_lengths, cases.padded)
add("attention with a padding mask", Pooled, of_lengths, cases.padded)
add(
    "scaled dot product attention with a mask",
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda m, x, n, y: ce(
        (
            F.scaled_dot_product_attention(
                m(x), m(x), m(x), attn_mask=(torch.arange(LENGTH) < n[:, None])[:, None, :]
            )
            * (torch.arange(LENGTH) < n[:, None])[:, :, None]
        ).sum(1)[:, :CLASSES]
        / n[:, None],
        y,
    ),
    cases.padded,
)
add(
    "encoder with a padding mask",
    lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True),
    lambda m, x, n, y: ce(
        (
            m(x, src_key_padding_mask=torch.arange(LENGTH) >= n[:, None])
            * (torch.arange(LENGTH) < n[:, None])[:, :, None]
        ).sum(1)[:, :CLASSES],
        y,
    ),
    cases.padded,
)
add(
    "connectionist temporal classification",
    lambda: nn.Linear(WIDTH, 4),
    lambda m, x, n, y: F.ctc_loss(
        m(x).log_softmax(2).transpose(0, 1),
        y[:, None] % 3 + 1,
        n,
        torch.ones_like(n),
        reduction="none",
        zero_infinity=True,
    ),
    cases.padded,
)
add(
    "gru step by step",
    lambda: nn.ModuleList([nn.GRUCell(WIDTH, 8), nn.Linear(8, CLASSES)]),
    lambda m, x, n, y: ce(m[1](_scan(m[0], x, n)), y),
    cases.padded,
)
add(
    "lstm cell step by step",
    lambda: nn.ModuleList([nn.LSTMCell(WIDTH, 8), nn.Linear(8, CLASSES)]),
    lambda m, x, y: ce(m[1](_cells(m[0], x)), y),
    cases.sequences,
)
add(
    "linear recurrence",
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda m, x, y: ce(_recurrence(m, x)[:, :CLASSES], y),
    cases.sequences,
)
add(
    "causal convolution over time",
    lambda: net(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(WIDTH, 4, 3)),
    lambda m, x, y: ce(m(x.transpose(1, 2)).mean(2)[:, :CLASSES], y),
    cases.sequences,
)


def _scan(cell: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    h = torch.zeros(len(x), 8)
    for t in range(x.shape[1]):
        h = torch.where((t < lengths)[:, None], cell(x[:, t], h), h)
    return h


def _cells(cell: nn.Module, x: Tensor) -> Tensor:
    h, c = torch.zeros(len(x), 8), torch.zeros(len(x), 8)
    for t in range(x.shape[1]):
        h, c = cell(x[:, t], (h, c))
    return h


def _recurrence(m: nn.Module, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), WIDTH)
    for t in range(x.shape[1]):
        h = 0.9 * h + m(x[:, t])
    return h


# Generative models and noise


class Vae(nn.Module):
    """A variational autoencoder of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.down(x).chunk(2, 1)
        return self.up(mean + torch.exp(log / 2) * torch.randn_like(mean)), mean, log


@case("vae, annealed by step", draws=True)
def _vae() -> Job:
    step = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        beta = min(1.0, step / 10)
        back, mean, log = m(x)
        return (back - x).square().sum(1) + beta * -0.5 * (1 + log - mean.square() - log.exp()).sum(
            1
        )

    return Job(Vae(), losses, cases.vectors())


def denoising(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (m(x + 0.3 * torch.randn_like(x)) - x).square().mean(1)


def diffusion(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    bars = torch.linspace(0.99, 0.01, 50)
    t = torch.randint(0, 50, (len(x),))
    noise = torch.randn_like(x)
    seen = bars[t].sqrt()[:, None] * x + (1 - bars[t]).sqrt()[:, None] * noise
    return (m(torch.cat([seen, t[:, None] / 50], 1)) - noise).square().mean(1)


def flow_matching(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    noise, t = torch.randn_like(x), torch.rand(len(x), 1)
    return (m(torch.cat([t * x + (1 - t) * noise, t], 1)) - (x - noise)).square().mean(1)


def coupling(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    shift, scale = m(x[:, :3]).chunk(2, 1)
    z = torch.cat([x[:, :3], x[:, 3:] * torch.exp(torch.tanh(scale)) + shift], 1)
    return 0.5 * z.square().sum(1) - torch.tanh(scale).sum(1)


def contrastive_views(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = m(x * (torch.rand_like(x) > 0.1)), m(x * (torch.rand_like(x) > 0.1))
    return 2 - 2 * F.cosine_similarity(a, b.detach(), dim=1)


add(
    "autoencoder",
    lambda: net(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH)),
    lambda m, x, y: (m(x) - x).square().mean(1),
)
add("denoising, random noise", lambda: nn.Linear(WIDTH, WIDTH), denoising)
add("diffusion, random times", lambda: nn.Linear(WIDTH + 1, WIDTH), diffusion)
add("flow matching, random times", lambda: nn.Linear(WIDTH + 1, WIDTH), flow_matching)
add("normalising flow", lambda: nn.Linear(3, 6), coupling)
add("two random views", net, contrastive_views)
add(
    "random flips of each image",
    lambda: earlier.IMAGES["convolution"](),
    lambda m, x, y: plain(m, torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x), y),
    cases.images,
)
add(
    "random shifts of each image",
    lambda: earlier.IMAGES["convolution"](),
    lambda m, x, y: plain(m, _cropped(x), y),
    cases.images,
)
add(
    "random crops, image by image",
    lambda: earlier.IMAGES["convolution"](),
    lambda m, x, y: plain(m, torch.stack([_crop(image) for image in x]), y),
    cases.images,
)
add(
    "random erasing",
    lambda: earlier.IMAGES["convolution"](),
    lambda m, x, y: plain(m, _erased(x), y),
    cases.images,
)
add(
    "random colours",
    lambda: earlier.IMAGES["convolution"](),
    lambda m, x, y: plain(
        m, x * (0.8 + 0.4 * torch.rand(len(x), 2, 1, 1)) + 0.1 * torch.randn(len(x), 1, 1, 1), y
    ),
    cases.images,
)
add(
    "stochastic depth, random by example",
    lambda: earlier.Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    lambda m, x, y: ce((x + m.layers(x) * (torch.rand(len(x), 1) < 0.8) / 0.8)[:, :CLASSES], y),
)
add(
    "random features dropped by numpy",
    net,
    lambda m, x, y: ce(m(x * torch.from_numpy(np.random.binomial(1, 0.8, WIDTH)).float()), y),
)
add("random temperature by python", net, lambda m, x, y: ce(m(x) / random.uniform(0.5, 2.0), y))
add(
    "gumbel softmax, random",
    net,
    lambda m, x, y: (F.gumbel_softmax(m(x), 0.5) - F.one_hot(y, CLASSES)).square().sum(1),
)
add(
    "mixup within the record, random",
    net,
    lambda m, x, y: ce(m(torch.rand(len(x), 1) * x + 0.5 * x.flip(1)), y),
)


def _cropped(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1))
    dx, dy = torch.randint(0, 3, (2, len(x), 1))
    rows, columns = dy + torch.arange(8), dx + torch.arange(8)
    return padded[
        torch.arange(len(x))[:, None, None, None],
        torch.arange(2)[:, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]


def _crop(image: Tensor) -> Tensor:
    top, left = random.randint(0, 2), random.randint(0, 2)
    return F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]


def _erased(x: Tensor) -> Tensor:
    at = torch.randint(0, 6, (len(x), 1))
    inside = (torch.arange(8) >= at) & (torch.arange(8) < at + 3)
    return x * ~(inside[:, None, :, None] & inside[:, None, None, :])


# Layers and operations


class Block(nn.Module):
    """A ConvNeXt block: depthwise convolution, norm of channels, two layers, a scale for each
    channel.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.depthwise, self.norm = (
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.GroupNorm(1, width),
        )
        self.up, self.down, self.scale = (
            nn.Conv2d(width, 8, 1),
            nn.Conv2d(8, width, 1),
            nn.Parameter(1e-2 * torch.ones(width, 1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.scale * self.down(F.gelu(self.up(self.norm(self.depthwise(x)))))
        return out


def warped(x: Tensor) -> Tensor:
    theta = torch.tensor([[1.0, 0.1, 0.0], [0.0, 0.9, 0.1]]) + 0.1 * x.mean((1, 2, 3)).view(
        -1, 1, 1
    )
    return F.grid_sample(
        x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
    )


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T)
        return out


class Lora(nn.Module):
    """Low-rank adapters beside every frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = net().requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 3), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base[2](torch.tanh(self.base[0](x) + x @ self.a.T @ self.b.T))
        return out


class Deep(nn.Module):
    """Many layers, some of them checkpointed."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.layers, self.every = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]), every
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = (
                checkpoint(self._one, layer, x, use_reentrant=False)
                if k % self.every == 0
                else self._one(layer, x)
            )
        out: Tensor = self.head(x)
        return out

    @staticmethod
    def _one(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(layer(x))


class Memory(nn.Module):
    """A learned memory that each example attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = (
            nn.Parameter(torch.randn(5, WIDTH)),
            nn.Parameter(torch.randn(5, 8)),
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((x @ self.keys.T).softmax(1) @ self.values)
        return out


class Codebook(Memory):
    """Vector quantisation, straight through."""

    def forward(self, x: Tensor) -> Tensor:
        code = self.keys[torch.cdist(x, self.keys).argmin(1)]
        out: Tensor = self.head(torch.cat([x + (code - x).detach(), code[:, :2]], 1))
        return out


class Hyper(nn.Module):
    """Each example makes the weights of its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Linear(WIDTH, CLASSES * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.make(x).view(-1, CLASSES, WIDTH), x[:, :, None])[:, :, 0]


class Early(nn.Module):
    """Two exits with losses of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.first, self.second = (
            nn.Linear(WIDTH, 8),
            nn.Linear(8, 8),
            nn.Linear(8, CLASSES),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return self.first(h), self.second(torch.tanh(self.b(h)))


add("convnext block", lambda: earlier.conv(Block()), plain, cases.images)
add(
    "grid sample",
    lambda: Apply(
        warped, nn.Conv2d(2, 4, 3, padding=1), net(nn.Flatten(), nn.Linear(256, CLASSES))
    ),
    plain,
    cases.images,
)
add(
    "interpolation",
    lambda: Apply(
        lambda h: F.interpolate(h, scale_factor=0.5, mode="bicubic"),
        nn.Conv2d(2, 4, 3, padding=1),
        net(nn.Flatten(), nn.Linear(64, CLASSES)),
    ),
    plain,
    cases.images,
)
add(
    "transform of Fourier in the image",
    lambda: Apply(
        lambda h: torch.fft.irfft2(torch.fft.rfft2(h) * torch.linspace(1, 0, 5)),
        nn.Conv2d(2, 4, 3, padding=1),
        net(nn.Flatten(), nn.Linear(256, CLASSES)),
    ),
    plain,
    cases.images,
)
add(
    "patches",
    lambda: Apply(
        lambda h: F.unfold(h, 4, stride=4).transpose(1, 2).mean(1),
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Linear(64, CLASSES),
    ),
    plain,
    cases.images,
)
add(
    "convolution in three dimensions",
    lambda: net(nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, CLASSES)),
    lambda m, x, y: ce(m(F.pad(x.unsqueeze(1), (0, 0, 0, 0, 2, 2))), y),
    cases.images,
)
add(
    "convolution over time, strided",
    lambda: net(nn.Conv1d(WIDTH, 8, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(16, CLASSES)),
    lambda m, x, y: plain(m, x.transpose(1, 2), y),
    cases.sequences,
)
add(
    "transposed convolution over time",
    lambda: net(
        nn.ConvTranspose1d(WIDTH, 4, 2, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(40, CLASSES)
    ),
    lambda m, x, y: plain(m, x.transpose(1, 2), y),
    cases.sequences,
)
add(
    "u-net",
    lambda: nn.ModuleList(
        [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
            nn.Conv2d(8, CLASSES, 1),
        ]
    ),
    lambda m, x, y: ce(
        m[3](
            torch.cat(
                [torch.relu(m[0](x)), m[2](torch.relu(m[1](F.max_pool2d(torch.relu(m[0](x)), 2))))],
                1,
            )
        ).mean((2, 3)),
        y,
    ),
    cases.images,
)
add(
    "frozen batch norm",
    lambda: dpfy.repair(_pretrained(), statistics="of public pretraining").model.train(),
    plain,
    cases.images,
)
add(
    "batch norm repaired",
    lambda: dpfy.repair(earlier.conv(nn.BatchNorm2d(4))).model.train(),
    plain,
    cases.images,
)
add(
    "weight norm and layer norm",
    lambda: net(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8)),
        nn.LayerNorm(8),
        nn.Linear(8, CLASSES),
    ),
)
add("tied autoencoder", Tied, lambda m, x, y: (m(x) - x).square().mean(1))
add("adapters", Lora)
add("checkpoint every layer", lambda: Deep(1))
add("checkpoint every second layer", lambda: Deep(2))
add("memory", Memory)
add("codebook", lambda: Codebook(), plain)
add("weights made by the example", Hyper)
add("two exits", Early, lambda m, x, y: sum(ce(out, y) for out in m(x)) / 2)
add(
    "quadratic features",
    lambda: nn.Linear(WIDTH * WIDTH, CLASSES),
    lambda m, x, y: ce(m(torch.einsum("bi,bj->bij", x, x).flatten(1)), y),
)
add(
    "determinant of own matrix",
    lambda: nn.Linear(WIDTH, 9),
    lambda m, x, y: (torch.linalg.det(torch.eye(3) + 0.1 * m(x).view(-1, 3, 3)) - x[:, 0]).square(),
)
add(
    "solve by example",
    lambda: nn.Linear(WIDTH, 9),
    lambda m, x, y: (
        torch.linalg.solve(3 * torch.eye(3) + 0.1 * m(x).view(-1, 3, 3), x[:, :3, None])
        .square()
        .sum((1, 2))
    ),
)
add(
    "singular values of own matrix",
    lambda: nn.Linear(WIDTH, 6),
    lambda m, x, y: torch.linalg.svdvals(m(x).view(-1, 2, 3) + torch.eye(2, 3)).sum(1),
)
add(
    "dictionary of losses",
    net,
    lambda m, x, y: torch.stack(
        list({"a": plain(m, x, y), "b": 0.1 * m(x).square().sum(1)}.values())
    ).sum(0),
)
add(
    "loop over examples",
    net,
    lambda m, x, y: torch.stack(
        [F.cross_entropy(m(a[None]), b[None]) for a, b in zip(x, y, strict=True)]
    ),
)
add(
    "vmap of one example's loss",
    net,
    lambda m, x, y: torch.func.vmap(lambda out, c: F.cross_entropy(out, c))(m(x), y),
)
add(
    "frozen encoder, no gradient",
    lambda: net(nn.Linear(WIDTH, 8).requires_grad_(False), nn.Tanh(), nn.Linear(8, CLASSES)),
    lambda m, x, y: ce(m[2](_detached(m, x)), y),
)
add("hook on a layer that looks at itself", lambda: _hooked_layer())
add(
    "normalised embeddings",
    lambda: nn.Linear(WIDTH, 8),
    lambda m, x, y: ce(
        F.normalize(m(x), dim=1) @ F.normalize(torch.eye(8), dim=1)[:, :CLASSES] * 10, y
    ),
)
add(
    "additive margin",
    lambda: nn.Linear(WIDTH, CLASSES, bias=False),
    lambda m, x, y: ce(
        10 * (F.normalize(x) @ F.normalize(m.weight).T - 0.2 * F.one_hot(y, CLASSES)), y
    ),
)
add(
    "cumulative in time",
    lambda: nn.Linear(WIDTH, CLASSES),
    lambda m, x, y: ce(m(x).cumsum(1)[:, -1], y),
    cases.sequences,
)
add(
    "roll in time",
    lambda: nn.Linear(WIDTH, CLASSES),
    lambda m, x, y: ce((m(x) + m(x).roll(1, 1)).mean(1), y),
    cases.sequences,
)
add(
    "attention over positions by hand",
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda m, x, y: ce(
        (torch.softmax(m(x) @ x.transpose(1, 2) / WIDTH**0.5, 2) @ x).mean(1)[:, :CLASSES], y
    ),
    cases.sequences,
)
add(
    "deep sets",
    lambda: nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)]),
    lambda m, x, y: ce(m[1](torch.relu(m[0](x)).sum(1)), y),
    cases.sequences,
)
add(
    "graph of own nodes",
    lambda: nn.Linear(WIDTH, CLASSES),
    lambda m, x, y: ce((torch.softmax(-torch.cdist(x, x), 2) @ m(x)).mean(1), y),
    cases.sequences,
)
add(
    "factorisation machine",
    lambda: nn.Embedding(WORDS, 4),
    lambda m, words, real: (
        (0.5 * (m(words).sum(1).square() - m(words).square().sum(1)).sum(1) - real.sum(1)).square()
        / 10
    ),
    cases.tokens,
)
add(
    "two towers, own pair",
    lambda: nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)]),
    lambda m, x, y: F.binary_cross_entropy_with_logits(
        (m[0](x[:, :3]) * m[1](x[:, 3:])).sum(1), (y > 0).float(), reduction="none"
    ),
)
add(
    "physics, second derivatives",
    lambda: net(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)),
    lambda m, x, y: (_input_gradient(m, x) - 1).square(),
)
add(
    "spline by buckets",
    lambda: nn.Embedding(5, CLASSES),
    lambda m, x, y: ce(m(torch.bucketize(x[:, 0], torch.tensor([-1.0, 0, 1, 2]))), y),
)
add("fixed quantisation", lambda: Apply(lambda h: h + ((h * 16).round() / 16 - h).detach()))
add(
    "mixed types",
    lambda: net(nn.Linear(WIDTH, 8).double(), nn.Tanh(), nn.Linear(8, CLASSES).double()),
    lambda m, x, y: plain(m, x.double(), y),
)


def _pretrained() -> nn.Module:
    model = earlier.conv(nn.BatchNorm2d(4))
    with torch.no_grad():
        model(torch.rand(8, 2, 8, 8))
    return model


def _detached(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(m[0](x))


def _hooked_layer() -> nn.Module:
    model = net()
    model[0].register_forward_hook(lambda module, inputs, out: out * 2)
    return model


# Data, batches and loops


class Items(Dataset[Any]):
    """Records one by one, each with augmentation of its own."""

    def __init__(self, augmented: bool = False) -> None:
        self.x, self.y = cases.vectors()
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return (x + 0.1 * torch.randn(WIDTH) if self.augmented else x), self.y[index]


def texts() -> list[tuple[Tensor, Tensor]]:
    """Token lists of different lengths."""
    words, real = cases.tokens()
    return [(w[: int(r.sum())], w[0]) for w, r in zip(words, real, strict=True)]


def to_fixed_length(items: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Each record padded to the longest length that there may be."""
    words = torch.stack([F.pad(w, (0, LENGTH - len(w))) for w, _ in items])
    return words, (words > 0).long(), torch.stack([y for _, y in items])


def standardised_items() -> dpfy.lazy:  # type: ignore[valid-type]
    return dpfy.lazy(
        Items(),
        collate=lambda items: (
            torch.stack([(x - x.mean()) / x.std() for x, _ in items]),
            torch.stack([y for _, y in items]),
        ),
    )


def by_name() -> dict[str, Any]:
    x, y = cases.vectors()
    return {"features": x, "labels": y}


add("items read one by one", net, plain, lambda: dpfy.lazy(Items()))
add("items with random augmentation", net, plain, lambda: dpfy.lazy(Items(True)))
add("items standardised in collate", net, plain, standardised_items)
add(
    "padded in collate to a fixed length",
    embedded,
    lambda m, words, real, y: ce(
        (m(words) * real[:, :, None]).sum(1) / real.sum(1, keepdim=True), y
    ),
    lambda: dpfy.lazy(texts(), collate=to_fixed_length),
)
add(
    "views of each record",
    net,
    lambda m, x, y: per_view(ce(m(x.flatten(0, 1)), y.flatten()), 2),
    lambda: dpfy.lazy(Items(True), views=2),
    draws=True,
    fit=False,
)
add("batches that are dicts", net, lambda m, b: ce(m(b["features"]), b["labels"]), by_name)
add(
    "nested batches",
    net,
    lambda m, b: ce(m(b["in"][0]), b["out"]),
    lambda: (lambda v: {"in": (v[0],), "out": v[1]})(cases.vectors()),
)
add("batches of one", net, plain, rows=1)
add("batches of two", net, plain, rows=2)
add("all records at every step", net, plain, rows=cases.RECORDS)
add("large batches", net, plain, lambda: cases.vectors(640), rows=512)
add("physical batches of eight", net, plain, job={"runtime": {"max_physical_batch": 8}})
add("filled up batches", net, plain, job={"runtime": {"pad": True, "max_physical_batch": 16}})
add("engine loop", net, plain, job={"runtime": {"engine": "loop"}})
add("engine batched", net, plain, job={"runtime": {"engine": "batched"}})


def users() -> Any:
    """Users with one to four records each."""
    g = cases.seeded()
    x, y = torch.randn(80, 4, WIDTH, generator=g), torch.randint(0, CLASSES, (80, 4), generator=g)
    x, y, count = cases.given(x, y, torch.randint(1, 5, (80,), generator=g))
    mine = torch.arange(4) < count[:, None]
    return dpfy.by_user((x[mine], y[mine]), mine.nonzero()[:, 0], 4)


def by_users(losses: Losses) -> Callable[[], Job]:
    return lambda: (lambda found: Job(net(), losses, found, unit=found.unit))(users())


def _of_user(reduction: str) -> Losses:
    return lambda m, x, y, real: dpfy.per_user(
        ce(m(x.flatten(0, 1)), y.flatten()), real, reduction=reduction
    )


def own_contrast(m: nn.Module, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
    h = m(x) * real[:, :, None]
    return F.softplus(-torch.bmm(h, h.transpose(1, 2)).sum((1, 2)) / real.sum(1).clamp(min=1) ** 2)


case("users, sum", rows=12, fit=False)(by_users(_of_user("sum")))
case("users, mean", rows=12, fit=False)(by_users(_of_user("mean")))
case("users, contrast among own records", rows=12, fit=False)(by_users(own_contrast))


class Shown:
    """What a loop prints or keeps for its bar: nothing of it comes back into a loss."""

    def __init__(self, how: str) -> None:
        self.how, self.mean, self.lines = how, 0.0, []  # type: ignore[var-annotated]

    def __call__(self, losses: Tensor) -> None:
        if self.how == "item":
            self.lines.append(f"loss {losses.mean().item():.3f}")
        elif self.how == "float":
            self.mean = 0.9 * self.mean + 0.1 * float(losses.detach().mean())
        elif self.how == "numpy":
            self.lines.append(losses.detach().numpy().max())
        elif self.how == "list":
            self.lines.extend(losses.tolist()[:2])
        else:
            self.lines.append(repr(losses.detach()))


for _how in ("item", "float", "numpy", "list", "repr"):
    case(f"loss shown after the step: {_how}")(
        lambda how=_how: Job(net(), plain, cases.vectors(), after=Shown(how))
    )


@case("accuracy kept as a tensor, read at the end")
def _accuracy() -> Job:
    right = torch.zeros(())

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)
        right.add_((out.detach().argmax(1) == y).float().mean())
        return ce(out, y)

    return Job(net(), losses, cases.vectors())


@case("debug metrics that nobody reads")
def _debug() -> Job:
    seen: dict[str, Tensor] = {}

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = m(x)
        seen["mean"], seen["largest"] = out.detach().mean(), x.abs().max()
        seen["histogram"] = torch.bincount(y, minlength=CLASSES)
        return ce(out, y)

    return Job(net(), losses, cases.vectors())


@case("public evaluation in the loop")
def _evaluated() -> Job:
    x, y = torch.randn(8, WIDTH), torch.randint(0, CLASSES, (8,))
    model = net()

    def after(losses: Tensor) -> None:
        model.eval()
        with torch.no_grad():
            float((model(x).argmax(1) == y).float().mean())
        model.train()

    return Job(model, plain, cases.vectors(), after=after)


@case("temperature from public data")
def _public() -> Job:
    calm = torch.randn(50, WIDTH)
    return Job(net(), lambda m, x, y: ce(m((x - calm.mean(0)) / calm.std(0)), y), cases.vectors())


@case("curriculum by the step number")
def _curriculum() -> Job:
    step = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        smoothing = 0.3 * math.exp(-step / 5)
        return F.cross_entropy(
            m(x) / (1 + 1 / step), y, label_smoothing=smoothing, reduction="none"
        )

    return Job(net(), losses, cases.vectors())


@case("another loss in the second half")
def _second_half() -> Job:
    step = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        if step > 7:
            return F.multi_margin_loss(m(x), y, reduction="none") + 0.1 * m(x).square().sum(1)
        return plain(m, x, y)

    return Job(net(), losses, cases.vectors())


@case("another loss at random steps", draws=True)
def _sometimes() -> Job:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if random.random() < 0.3:
            return ce(m(x * (torch.rand(len(x), 1) + 0.5)), y)
        return plain(m, x, y)

    return Job(net(), losses, cases.vectors())


@case("layers thawed in mid-run by weight")
def _thawed() -> Job:
    step = 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        h = torch.tanh(m[0](x))
        return ce(m[2](h if step > 5 else h.detach()), y)

    return Job(net(), losses, cases.vectors())


case("learning rate by step")(
    lambda: Job(
        net(), plain, cases.vectors(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3)
    )
)
case("learning rate by cosine")(
    lambda: Job(
        net(),
        plain,
        cases.vectors(),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 14),
    )
)


@case("autocast to bfloat16")
def _autocast() -> Job:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(m, x, y).float()

    return Job(net(), losses, cases.vectors())


@case("bfloat16 weights")
def _narrow() -> Job:
    x, y = cases.vectors()
    return Job(net().bfloat16(), lambda m, x, y: plain(m, x, y).float(), (x.bfloat16(), y))


@case("gradients accumulated in the model's own way")
def _no_grad_metrics() -> Job:
    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            guess = m(x).argmax(1)
        return ce(m(x), torch.where(guess == y, y, guess))

    return Job(net(), losses, cases.vectors())


@case("exponential average of the weights as a teacher")
def _teacher() -> Job:
    model, teacher = net(), net().requires_grad_(False)

    def after(losses: Tensor) -> None:
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), teacher.parameters(), strict=True):
                theirs.lerp_(mine, 0.05)

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain(m, x, y) + F.kl_div(
            m(x).log_softmax(1), teacher(x).softmax(1), reduction="none"
        ).sum(1)

    return Job(model, losses, cases.vectors(), after=after)


# What looks like mixing, and is none

add(
    "two views in one batch",
    net,
    lambda m, x, y: 1 - F.cosine_similarity(*m(torch.cat([x, -x])).chunk(2)),
    job={"runtime": {"engine": "batched"}},
)
add(
    "parts of the batch one after the other",
    net,
    lambda m, x, y: ce(torch.cat([m(part) for part in x.split(8)]), y),
    job={"runtime": {"engine": "batched"}},
)
add("shuffled and put back", net, lambda m, x, y: _shuffled(m, x, y), draws=True)
add(
    "sorted by length and put back", Tagger, lambda m, x, n, y: _by_length(m, x, n, y), cases.padded
)
add("rows by their number", net, lambda m, x, y: -m(x).log_softmax(1)[torch.arange(len(x)), y])
add("zeros of the batch's size", net, lambda m, x, y: ce(m(x) + x.new_zeros(len(x), CLASSES), y))
add("ones that are averaged", net, lambda m, x, y: plain(m, x, y) * torch.ones(len(x)).mean())
add("finite losses asserted", net, lambda m, x, y: _finite(plain(m, x, y)))
add("labels looked over", net, lambda m, x, y: _looked_over(m, x, y))
add(
    "masks that may be left out",
    Pooled,
    lambda m, x, n, y: ce(m(x, n), y) if bool((n <= LENGTH).all()) else ce(m(x, n * 0 + LENGTH), y),
    cases.padded,
)
add("experts routed with nonzero", lambda: Routed(), plain)


@case("annealed by step, loss shown after the step", draws=True)
def _annealed_and_shown() -> Job:
    shown, step = Shown("item"), 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        back, mean, log = m(x)
        return (back - x).square().sum(1) - 0.5 * min(1.0, step / 8) * (
            1 + log - mean.square() - log.exp()
        ).sum(1)

    return Job(Vae(), losses, cases.vectors(), after=shown)


@case("annealed by a table of all steps, loss shown after the step", draws=True)
def _table_and_shown() -> Job:
    table, step = torch.linspace(0, 0.5, 1000), -1

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        back, mean, log = m(x)
        prior = (1 + log - mean.square() - log.exp()).sum(1)
        return (back - x).square().sum(1) - table[step] * prior

    return Job(Vae(), losses, cases.vectors(), after=Shown("item"))


def _told(losses: Tensor, best: list[float], counts: Counter[bool]) -> None:
    """What a loop writes to its log: the best loss, its root, and how many were small."""
    best.append(min([*best, losses.mean().item()]))
    counts.update(one < 1 for one in losses.tolist())
    f"{math.sqrt(best[-1]):.3f} {np.mean(best):.3f} {counts[True]}"


case("best loss, its root and counts for a log")(
    lambda: Job(net(), plain, cases.vectors(), after=lambda v, best=[], c=Counter(): _told(v, best, c))
)  # fmt: skip
add(
    "two layers of attention, batch first",
    lambda: net(
        nn.Linear(WIDTH, 8),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2),
        nn.Flatten(),
        nn.Linear(8 * LENGTH, CLASSES),
    ),
    data=cases.sequences,
)
add(
    "bins and prefix sums within the record",
    net,
    lambda m, x, y: ce(m(x.cumsum(1) - torch.bucketize(x, torch.linspace(-2, 2, 9)).float()), y),
)
add(
    "confidence penalty and margin of the own label",
    net,
    lambda m, x, y: (
        ce(m(x), y)
        - 0.1 * (m(x).softmax(1) * m(x).log_softmax(1)).sum(1)
        + F.relu(1 - m(x).gather(1, y[:, None])[:, 0])
    ),
)


@case("temperature by step, average of the loss kept as a float")
def _cooled_and_kept() -> Job:
    shown, step = Shown("float"), 0

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return ce(m(x) / (0.5 + 0.9**step), y)

    return Job(net(), losses, cases.vectors(), after=shown)


@case("random factor by python, loss shown after the step")
def _factor_and_shown() -> Job:
    return Job(
        net(),
        lambda m, x, y: ce(m(x) * random.uniform(0.9, 1.1), y),
        cases.vectors(),
        after=Shown("float"),
    )


@case("learning rate by step, loss shown after the step")
def _rate_and_shown() -> Job:
    return Job(
        net(),
        plain,
        cases.vectors(),
        after=Shown("item"),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    )


@case("a line that runs first in the second half")
def _new_line() -> Job:
    step, seen = 0, []

    def losses(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal step
        step += 1
        if step > 9:
            seen.append(step)
            x = x * 1.5
        return plain(m, x, y)

    return Job(net(), losses, cases.vectors())


@case("a message at every fifth step")
def _message() -> Job:
    lines: list[str] = []

    def after(losses: Tensor) -> None:
        if len(lines) % 5 == 0:
            lines.append(f"loss {losses.mean().item():.2f}, largest {losses.max():.2f}")
        lines.append("")

    return Job(net(), plain, cases.vectors(), after=after)


class Routed(nn.Module):
    """A hard mixture of two experts, each run on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(WIDTH, 2),
            nn.ModuleList([nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)]),
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), CLASSES)
        for k, expert in enumerate(self.experts):
            mine = (chosen == k).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return out


def _shuffled(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return ce(m(x[order])[order.argsort()], y)


def _by_length(m: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    order = lengths.argsort(descending=True, stable=True)
    return ce(m(x[order], lengths[order])[order.argsort()], y)


def _finite(losses: Tensor) -> Tensor:
    if not torch.isfinite(losses).all():
        raise FloatingPointError("a loss is not finite")
    return losses


def _looked_over(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if (y < 0).any() or y.max() >= CLASSES or x.isnan().any():
        raise ValueError("bad labels")
    return plain(m, x, y)


# Models of the Hugging Face library, as small as they get

SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": WORDS,
}


def hf_tokens(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    """Next tokens, over the record's own count."""
    logits = m(input_ids=words, attention_mask=real).logits
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), words[:, 1:].flatten(), reduction="none"
    ).view(len(words), -1)
    return (each * real[:, 1:]).sum(1) / real[:, 1:].sum(1).clamp(min=1)


def hf_classes(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    return ce(m(input_ids=words, attention_mask=real).logits, words[:, 0] % 2)


def hf_fill(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    """Tokens in their own places."""
    each = F.cross_entropy(
        m(input_ids=words, attention_mask=real).logits.transpose(1, 2), words, reduction="none"
    )
    return (each * real).sum(1) / real.sum(1)


def hf_pairs(m: nn.Module, words: Tensor, real: Tensor) -> Tensor:
    """Text in, the same text out."""
    logits = m(input_ids=words, attention_mask=real, labels=words).logits
    return (F.cross_entropy(logits.transpose(1, 2), words, reduction="none") * real).sum(
        1
    ) / real.sum(1)


def hf_images(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(pixel_values=x).logits, y % 2)


def hf(
    kind: str,
    head: str,
    losses: Losses,
    data: Callable[[], Any] = cases.tokens,
    adapt: Any = None,
    **config: Any,
) -> None:
    """Register a model of transformers, and with `adapt` its adapters of peft on these modules."""

    def build() -> Job:
        import transformers

        model = getattr(transformers, f"{kind}{head}")(
            getattr(transformers, f"{kind}Config")(**config)
        ).train()
        if config.get("num_local_experts") and not config.get("routed"):
            model.set_experts_implementation("batched_mm")
        if config.get("checkpointed"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if adapt is not None:
            import peft

            model = peft.get_peft_model(
                model,
                peft.LoraConfig(
                    r=2, target_modules=adapt, lora_dropout=0.1, fan_in_fan_out=kind == "GPT2"
                ),
            )
        return Job(model, losses, data())

    what = (
        f"{kind}{head}"
        + (" routed" if config.get("routed") else "")
        + (" with LoRA" if adapt else "")
        + (" with checkpoints" if config.get("checkpointed") else "")
    )
    case(f"hf {what}", rows=8, draws=True)(build)


CAUSAL, SEQUENCE = "ForCausalLM", "ForSequenceClassification"
hf("Bert", SEQUENCE, hf_classes, **SMALL, max_position_embeddings=8)
hf("Bert", "ForMaskedLM", hf_fill, **SMALL, max_position_embeddings=8)
hf(
    "Bert",
    "ForTokenClassification",
    lambda m, w, r: (
        (
            F.cross_entropy(
                m(input_ids=w, attention_mask=r).logits.transpose(1, 2), w % 2, reduction="none"
            )
            * r
        ).sum(1)
        / r.sum(1)
    ),
    **SMALL,
    max_position_embeddings=8,
)
hf(
    "Bert",
    "ForQuestionAnswering",
    lambda m, w, r: (lambda o: ce(o.start_logits, w[:, 0] % 2) + ce(o.end_logits, w[:, 1] % 2))(
        m(input_ids=w, attention_mask=r)
    ),
    **SMALL,
    max_position_embeddings=8,
)
hf("Roberta", SEQUENCE, hf_classes, **SMALL, max_position_embeddings=16, pad_token_id=1)
hf(
    "DistilBert",
    SEQUENCE,
    hf_classes,
    vocab_size=WORDS,
    dim=8,
    n_layers=1,
    n_heads=2,
    hidden_dim=16,
    max_position_embeddings=8,
)
hf("Electra", SEQUENCE, hf_classes, **SMALL, embedding_size=8, max_position_embeddings=8)
hf("Albert", SEQUENCE, hf_classes, **SMALL, embedding_size=8, max_position_embeddings=8)
hf("DebertaV2", SEQUENCE, hf_classes, **SMALL, max_position_embeddings=8)
hf("MPNet", SEQUENCE, hf_classes, **SMALL, max_position_embeddings=16)
hf("GPT2", "LMHeadModel", hf_tokens, vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=8)
hf(
    "GPT2",
    "LMHeadModel",
    hf_tokens,
    vocab_size=WORDS,
    n_embd=8,
    n_layer=1,
    n_head=2,
    n_positions=8,
    checkpointed=True,
)
hf(
    "GPT2",
    "LMHeadModel",
    hf_tokens,
    adapt=["c_attn"],
    vocab_size=WORDS,
    n_embd=8,
    n_layer=1,
    n_head=2,
    n_positions=8,
)
hf("GPTNeoX", CAUSAL, hf_tokens, **SMALL, max_position_embeddings=8)
hf(
    "OPT",
    CAUSAL,
    hf_tokens,
    vocab_size=WORDS,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    ffn_dim=16,
    word_embed_proj_dim=8,
)
hf("Llama", CAUSAL, hf_tokens, **SMALL)
hf("Llama", CAUSAL, hf_tokens, adapt=["q_proj", "v_proj"], **SMALL)
hf("Mistral", CAUSAL, hf_tokens, **SMALL, num_key_value_heads=1, sliding_window=3)
hf("Qwen2", CAUSAL, hf_tokens, **SMALL, num_key_value_heads=1)
hf("Qwen3", CAUSAL, hf_tokens, **SMALL, num_key_value_heads=1, head_dim=4)
hf("Gemma", CAUSAL, hf_tokens, **SMALL, num_key_value_heads=1, head_dim=4, pad_token_id=0)
hf("Phi", CAUSAL, hf_tokens, **SMALL)
hf(
    "Mixtral",
    CAUSAL,
    hf_tokens,
    **(SMALL | {"hidden_size": 32, "intermediate_size": 32}),
    num_key_value_heads=2,
    num_local_experts=4,
)
hf(
    "Mixtral",
    CAUSAL,
    hf_tokens,
    **(SMALL | {"hidden_size": 32, "intermediate_size": 32}),
    num_key_value_heads=2,
    num_local_experts=4,
    routed=True,
)
hf(
    "T5",
    "ForConditionalGeneration",
    hf_pairs,
    vocab_size=WORDS,
    d_model=8,
    d_kv=4,
    d_ff=16,
    num_layers=1,
    num_heads=2,
    decoder_start_token_id=0,
)
hf(
    "Bart",
    "ForConditionalGeneration",
    hf_pairs,
    vocab_size=WORDS,
    d_model=8,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
    max_position_embeddings=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=2,
)
PICTURE = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
hf("ViT", "ForImageClassification", hf_images, cases.images, **PICTURE)
hf("ViT", "ForImageClassification", hf_images, cases.images, adapt=["q_proj", "v_proj"], **PICTURE)
hf("DeiT", "ForImageClassification", hf_images, cases.images, **PICTURE)
hf("Dinov2", "ForImageClassification", hf_images, cases.images, **(PICTURE | {"mlp_ratio": 2}))
hf(
    "ConvNext",
    "ForImageClassification",
    hf_images,
    cases.images,
    num_channels=2,
    patch_size=2,
    num_stages=2,
    hidden_sizes=[4, 8],
    depths=[1, 1],
    image_size=8,
)
