"""A loss written for one record gives the losses and the clipped sums of the same loss written for
a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import BatchedEngine, LoopEngine
from dpfy.gradients.record_losses import losses_of_rows, losses_one_by_one

ROWS, WIDTH, CLASSES, WORDS, LENGTH = 6, 6, 3, 11, 5


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, its losses for a batch and its loss for one record."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    whole: Callable[[Any, tuple[Tensor, ...]], Tensor]
    one: Callable[[Any, tuple[Tensor, ...]], Tensor]


def many(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(*batch[:-1]), batch[-1], reduction="none")


def as_batch_of_one(model: Any, record: tuple[Tensor, ...]) -> Tensor:
    *fields, y = record
    return F.cross_entropy(model(*[t[None] for t in fields])[0], y)


def as_it_is(model: Any, record: tuple[Tensor, ...]) -> Tensor:
    *fields, y = record
    return F.cross_entropy(model(*fields), y)


def several(model: Any, record: tuple[Tensor, ...]) -> Tensor:
    """A record as two rows of a batch of its own."""
    *fields, y = record
    return F.cross_entropy(model(*[torch.stack([t, t]) for t in fields]), torch.stack([y, y]))


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


def vectors() -> tuple[Tensor, ...]:
    return torch.randn(ROWS, WIDTH), labels()


def images() -> tuple[Tensor, ...]:
    return torch.randn(ROWS, 2, 8, 8), labels()


def sequences() -> tuple[Tensor, ...]:
    return torch.randn(ROWS, LENGTH, WIDTH), labels()


def words() -> tuple[Tensor, ...]:
    return torch.randint(0, WORDS, (ROWS, LENGTH)), labels()


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8),
        nn.ReLU(inplace=True),
        nn.LayerNorm(8),
        nn.RMSNorm(8),
        nn.Linear(8, CLASSES),
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding="same", padding_mode="circular", groups=2),  # noqa: E501
        nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(-3), nn.Linear(16, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm, self.conv = (
            nn.Conv2d(2, 4, 3, padding=1),
            norm(),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
        )
        self.up, self.head = nn.ConvTranspose2d(4, 4, 2, 2), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.conv(F.relu(self.norm(h)))
        return self.head(self.up(h).mean((-2, -1)))


class Encoder(nn.Module):
    """Tokens with a class token and learned positions, through torch's own encoder layer."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(WORDS, 8, padding_idx=0), nn.Embedding(LENGTH + 1, 8)
        self.start, self.scale = (
            nn.Parameter(torch.randn(1, 1, 8)),
            nn.Parameter(torch.rand(8) + 0.5),
        )
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.first, self.head = batch_first, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.start.expand(len(x), -1, -1), self.table(x)], 1)
        h = h * self.scale + self.place(torch.arange(LENGTH + 1))
        padding = torch.cat([torch.zeros(len(x), 1, dtype=torch.bool), x == 1], 1)
        h = h if self.first else h.transpose(0, 1)
        h = self.layer(h, src_key_padding_mask=padding)
        return self.head(h[:, 0] if self.first else h[0])


class Attend(nn.Module):
    """Attention with every kind of mask and bias, over a batch or one sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.weights = options.pop("weights", False)
        self.attention, self.head = (
            nn.MultiheadAttention(WIDTH, 2, **options),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        first = self.attention.batch_first or x.dim() == 2
        h, memory = (x, x * 2) if first else (x.transpose(0, 1), x.transpose(0, 1) * 2)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()
        if self.weights:
            h, weights = self.attention(h, memory, memory + 1, attn_mask=mask)
            return (
                self.head(h.mean(-2 if first else 0)) + weights.square().mean((-2, -1))[..., None]
            )
        h, _ = self.attention(h, h, h, attn_mask=mask, need_weights=False)
        return self.head(h.mean(-2 if first else 0))


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.recurrent = kind(WIDTH, 4, **options)
        self.head = nn.Linear(4 * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = self.recurrent.batch_first or x.dim() == 2
        h, _ = self.recurrent(x if first else x.transpose(0, 1))
        return self.head(h.mean(-2 if first else 0))


class Cells(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell, self.head = kind(WIDTH, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(-2):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Tied(nn.Module):
    """A table that also scores the words, with low-rank additions to a frozen layer between
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x).mean(-2)
        h = torch.tanh(self.frozen(h) + 0.5 * self.up(self.down(h)))
        return F.linear(h, self.table.weight)[..., :CLASSES]


class Own(nn.Module):
    """Parameters of its own, used by scale, shift, product, einsum and power."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.rand(WIDTH) + 0.5),
            nn.Parameter(torch.randn(1, WIDTH)),
        )
        self.weight, self.gain = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)),
            nn.Parameter(torch.rand(()) + 0.5),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("...i,ij->...j", x * self.scale + self.shift.view(-1), self.weight)
        return self.head(torch.tanh(h).abs() ** self.gain + F.linear(x, self.weight))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x))


class OneDimensional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = (
            nn.Conv1d(LENGTH, 4, 2),
            nn.InstanceNorm1d(4, affine=True),
            nn.Linear(5, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.silu(self.norm(self.conv(x))).mean(-2))


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": WORDS, "pad_token_id": 0}
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=LENGTH,  # noqa: E501
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES, **small,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=8,
            n_layer=1,
            n_head=2,
            n_positions=LENGTH,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            vocab_size=WORDS,
        )
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    if name == "llama":
        config = transformers.LlamaConfig(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=LENGTH,
            **small,
        )
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]
    config = transformers.T5Config(
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **small,
    )
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def text_many(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    x, y = (
        batch[0],
        batch[-1]
        if isinstance(model, nn.Module) and "Sequence" in type(model).__name__
        else batch[0],
    )
    if "T5" in type(model).__name__:
        scores = model(input_ids=x, labels=x).logits
    else:
        scores = model(input_ids=x).logits
    return (
        F.cross_entropy(scores, y, reduction="none")
        if scores.dim() == 2
        else F.cross_entropy(scores.mT, y, reduction="none").mean(1)
    )


def text_one(model: Any, record: tuple[Tensor, ...]) -> Tensor:
    return text_many(model, tuple(t[None] for t in record))[0]


CASES: dict[str, Case] = {
    "mlp, as it is": Case(mlp, vectors, many, as_it_is),
    "mlp, batch of one": Case(mlp, vectors, many, as_batch_of_one),
    "mlp, two rows a record": Case(mlp, vectors, many, several),
    "mlp over positions": Case(
        mlp, sequences, lambda m, b: many(lambda x: m(x).mean(1), b), lambda m, r: as_it_is(lambda x: m(x).mean(0), r)
    ),
    "convnet, as it is": Case(convnet, images, many, as_it_is),
    "convnet, batch of one": Case(convnet, images, many, as_batch_of_one),
    "convnet, two rows a record": Case(convnet, images, many, several),
    "groupnorm "
    "resnet": Case(lambda: Residual(lambda: nn.GroupNorm(2, 4)), images, many, as_batch_of_one),
    "instancenorm "
    "resnet": Case(lambda: Residual(lambda: nn.InstanceNorm2d(4, affine=True)), images, many, as_it_is),
    "one-dimensional": Case(OneDimensional, sequences, many, as_it_is),
    "encoder": Case(Encoder, words, many, as_batch_of_one),
    "encoder, two rows a record": Case(Encoder, words, many, several),
    "encoder, batch second": Case(lambda: Encoder(False), words, many, as_batch_of_one),
    "attention, as it is": Case(lambda: Attend(batch_first=True), sequences, many, as_it_is),
    "attention with "
    "weights": Case(lambda: Attend(batch_first=True, weights=True, add_bias_kv=False), sequences, many, as_batch_of_one),  # noqa: E501
    "attention with more "
    "keys": Case(lambda: Attend(add_bias_kv=True, add_zero_attn=True), sequences, many, as_batch_of_one),
    "attention, batch second": Case(lambda: Attend(weights=True), sequences, many, several),
    "attention, batch second, as it is": Case(Attend, sequences, many, as_it_is),
    "lstm": Case(lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2), sequences, many, as_batch_of_one),
    "lstm, as it "
    "is": Case(lambda: Recurrent(nn.LSTM, bidirectional=True), sequences, many, as_it_is),
    "gru, two rows a record": Case(lambda: Recurrent(nn.GRU), sequences, many, several),
    "rnn": Case(lambda: Recurrent(nn.RNN, batch_first=True), sequences, many, as_it_is),
    "lstm cell": Case(lambda: Cells(nn.LSTMCell), sequences, many, as_it_is),
    "gru cell": Case(lambda: Cells(nn.GRUCell), sequences, many, several),
    "tied and low-rank": Case(Tied, words, many, as_it_is),
    "own parameters": Case(Own, vectors, many, as_it_is),
    "own parameters, batch of one": Case(Own, vectors, many, as_batch_of_one),
    "bags": Case(Bags, words, many, as_batch_of_one),
    "bert": Case(lambda: hugging_face("bert"), words, text_many, text_one),
    "gpt2": Case(lambda: hugging_face("gpt2"), words, text_many, text_one),
    "llama": Case(lambda: hugging_face("llama"), words, text_many, text_one),
    "t5": Case(lambda: hugging_face("t5"), words, text_many, text_one),
}  # fmt: skip


def made(case: Case, seed: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(seed)
    model = case.model().to(dtype).train()
    return model, tuple(t.to(dtype) if t.is_floating_point() else t for t in case.batch())


def apart(losses: list[Tensor]) -> Tensor:
    stacked = torch.stack(losses)
    vars(stacked)["apart"] = losses
    return stacked


def close(a: Any, b: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        a,
        b,
        rtol=1e-9 if dtype == torch.float64 else 2e-4,
        atol=1e-10 if dtype == torch.float64 else 2e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_clipped_sums_are_those_of_the_batched_loss(
    name: str, dtype: torch.dtype
) -> None:
    case = CASES[name]
    for seed, norm in ((1, 0.3), (2, 2.0)):
        model, batch = made(case, seed, dtype)
        clip, mask = FlatClip(norm), torch.arange(ROWS) != seed
        sums = []
        for losses_of, engine in (
            (case.whole, LoopEngine()),
            (lambda m, b: losses_of_rows(case.one, m, b), BookkeepingEngine()),
            (lambda m, b: apart(losses_one_by_one(case.one, m, b)), LoopEngine()),
        ):
            engine.attach(model)
            for _ in range(2):  # the second time everything about the model is known
                with warnings.catch_warnings():
                    warnings.simplefilter("error", UserWarning)
                    losses = losses_of(model, batch)
                value = engine.bounded_sum(losses, clip, mask).value
                sums.append((losses.detach(), value))
            engine.detach()
        for losses, value in sums[1:]:
            close(losses, sums[0][0], dtype)
            close(value, sums[0][1], dtype)


UNTRACED = [
    "mlp, as it is",
    "convnet, batch of one",
    "encoder",
    "own parameters",
    "tied and low-rank",
    "bert",
]
"""Models whose layers torch can map over records without the rules of dpfy."""


@pytest.mark.parametrize("engine", [LoopEngine, BatchedEngine])
@pytest.mark.parametrize("name", UNTRACED)
def test_other_engines_sum_the_same(name: str, engine: Any) -> None:
    case = CASES[name]
    model, batch = made(case, 3, torch.float64)
    reference, other = LoopEngine(), engine()
    reference.attach(model)
    expected = reference.bounded_sum(case.whole(model, batch), FlatClip(0.5)).value
    reference.detach()
    other.attach(model)
    close(
        other.bounded_sum(losses_of_rows(case.one, model, batch), FlatClip(0.5)).value,
        expected,
        torch.float64,
    )


@pytest.mark.parametrize("engine", [LoopEngine, BookkeepingEngine])
def test_a_record_without_a_finite_gradient_adds_nothing_and_leaves_the_others_alone(
    engine: Any,
) -> None:
    model, batch = made(CASES["mlp, as it is"], 4, torch.float64)
    held = engine()
    held.attach(model)
    losses_of = losses_of_rows if engine is BookkeepingEngine else None
    counts = torch.arange(ROWS) != 2

    def total(fields: tuple[Tensor, ...], mask: Tensor | None) -> Any:
        losses = (
            losses_of(as_it_is, model, fields)
            if losses_of
            else apart(losses_one_by_one(as_it_is, model, fields))
        )
        return held.bounded_sum(losses, FlatClip(0.5), mask).value

    expected = total(batch, counts)
    spoilt = batch[0].clone()
    spoilt[2, 0] = float("nan")
    close(total((spoilt, batch[1]), None), expected, torch.float64)


def test_parameters_stay_in_the_rules_of_their_layers() -> None:
    """No layer of these models falls back to gradients example by example, which would cost
    speed.
    """
    for name in (
        "mlp, batch of one",
        "convnet, as it is",
        "groupnorm resnet",
        "attention with weights",
        "lstm",
        "bert",
        "llama",
        "t5",
    ):
        case = CASES[name]
        model, batch = made(case, 5, torch.float32)
        engine = BookkeepingEngine()
        engine.attach(model)
        for _ in range(2):
            engine.bounded_sum(losses_of_rows(case.one, model, batch), FlatClip(0.5))
        assert engine.per_example_parameters == {}, name
        assert not engine.sums.untracked, name


ENTROPIES: dict[str, dict[str, Any]] = {
    "usual": {},
    "sum": {"reduction": "sum"},
    "each": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "left out": {"ignore_index": 1},
    "weighed": {"weight": torch.tensor([1.0, 2.0, 0.5])},
}


@pytest.mark.parametrize("name", ENTROPIES)
def test_cross_entropy_of_a_record_is_that_of_torch(name: str) -> None:
    """For one position, a batch of one, and several positions."""
    torch.manual_seed(0)
    options = ENTROPIES[name]
    for shape in ((), (1,), (LENGTH,), (2, LENGTH)):
        x = torch.randn(ROWS, *shape, CLASSES, requires_grad=True)
        y = torch.randint(0, CLASSES, (ROWS, *shape))
        y[:, ...] = (
            torch.where(y == 1, 0, y) if not shape or shape == (1,) else y
        )  # all left out is NaN, in torch too

        def loss(model: Any, record: Any, dims: int = len(shape)) -> Tensor:
            scores, targets = record
            if dims == 2:
                scores, targets = scores.movedim(-1, 1), targets
            return F.cross_entropy(scores, targets, **options).sum()

        expected = torch.stack([loss(None, record) for record in zip(x, y, strict=True)])
        found = losses_of_rows(loss, None, (x, y))
        torch.testing.assert_close(found, expected, equal_nan=True)
        weights = torch.rand(ROWS)
        torch.testing.assert_close(
            *[torch.autograd.grad(t, x, weights)[0] for t in (found, expected)], equal_nan=True
        )


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("masked", ["", "of all", "of the record", "causal"])
def test_attention_products_of_a_record_are_those_of_torch(dims: int, masked: str) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(ROWS, *(2, 3)[4 - dims :], LENGTH, 4, requires_grad=True) for _ in range(3)
    )
    own, shared = torch.rand(ROWS, LENGTH, LENGTH) > 0.3, torch.rand(LENGTH, LENGTH) > 0.3
    own |= torch.eye(LENGTH).bool()
    shared |= torch.eye(LENGTH).bool()

    def loss(model: Any, record: Any) -> Tensor:
        a, b, c, mask = record
        chosen = {"of all": shared, "of the record": mask}.get(masked)
        return (
            F.scaled_dot_product_attention(a, b, c, attn_mask=chosen, is_causal=masked == "causal")
            .square()
            .sum()
        )

    expected = torch.stack([loss(None, record) for record in zip(q, k, v, own, strict=True)])
    found = losses_of_rows(loss, None, (q, k, v, own))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v))
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_models_give_the_sums_of_the_batched_loss(seed: int) -> None:
    """Random widths, activations, norms, records as they are or as batches of one, masks and
    bounds.
    """
    g = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(0, len(options), (1,), generator=g))]

    def stack() -> nn.Module:
        layers: list[nn.Module] = []
        wide = WIDTH
        for _ in range(pick(1, 2, 4)):
            width = pick(2, 4, 8)
            layers += [
                nn.Linear(wide, width, bias=pick(True, False)),
                pick(nn.ReLU(inplace=True), nn.Tanh(), nn.GELU()),
            ]
            layers += pick([], [nn.LayerNorm(width)], [nn.RMSNorm(width)])
            wide = width
        return nn.Sequential(*layers, nn.Linear(wide, CLASSES))

    case = Case(stack, vectors, many, pick(as_it_is, as_batch_of_one, several))
    dtype, norm = pick(torch.float64, torch.float32), pick(0.01, 0.5, 50.0)
    model, batch = made(case, seed, dtype)
    mask = torch.rand(ROWS, generator=g) > 0.3
    sums = []
    for losses_of in (case.whole, lambda m, b: losses_of_rows(case.one, m, b)):
        engine = BookkeepingEngine()
        engine.attach(model)
        sums.append(engine.bounded_sum(losses_of(model, batch), FlatClip(norm), mask).value)
        engine.detach()
    close(sums[1], sums[0], dtype)


class Wide(nn.Module):
    """Parameters of three dimensions beside records of two; the first dimension of one is as long
    as the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Parameter(torch.randn(ROWS, 1, WIDTH)),
            nn.Parameter(torch.randn(1, LENGTH, WIDTH)),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.tanh(x * self.scale).mean(-3) + self.shift).mean((-3, -2)))


def test_a_parameter_with_as_many_rows_as_the_batch_is_no_part_of_it() -> None:
    """Were the batch put in front without a look at shapes, record i would meet row i of the
    parameter alone.
    """
    case = Case(
        Wide,
        sequences,
        lambda m, b: torch.stack([as_it_is(m, r) for r in zip(*b, strict=True)]),
        as_it_is,
    )
    model, batch = made(case, 1, torch.float64)
    sums = []
    for losses_of, engine in (
        (case.whole, LoopEngine()),
        (lambda m, b: losses_of_rows(case.one, m, b), BookkeepingEngine()),
    ):
        engine.attach(model)
        losses = losses_of(model, batch)
        sums.append((losses.detach(), engine.bounded_sum(losses, FlatClip(0.5)).value))
        engine.detach()
    close(sums[1], sums[0], torch.float64)
