"""Tensor parallel: ranks that hold parts of the weights make the run that one process would, with
every norm counted once.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.training.parallel import ranked
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dpfy
from dpfy.core.errors import Lost, Unsupported
from dpfy.gradients.clip import FlatClip, PerLayerClip
from dpfy.gradients.cuda_graphs.captured import CapturedSum
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.per_example.clipped_sum import ShardedNorms
from dpfy.training import Update
from dpfy.training.parallel.tensor_parallel import TensorParallel

KINDS = ["dpsgd", "banded", "adaptive", "few", "layers", "otherwise"]
WORDS, LENGTH, WIDTH, STEPS = 11, 5, 8, 6


class Attention(nn.Module):
    """Causal, with heads of two: as many as lie on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.own_norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(self.own_norm(q), k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Text(nn.Module):
    """A table, a block of attention and feed-forward part, and a head that is not parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
        self.norm1, self.norm2, self.drop = (
            nn.LayerNorm(WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Dropout(0.2),
        )
        self.up, self.down, self.head = (
            nn.Linear(WIDTH, 13),
            nn.Linear(13, WIDTH),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.table(x))
        x = x + self.attention(self.norm1(x))
        return self.head((x + self.down(torch.tanh(self.up(self.norm2(x))))).mean(1))


STYLES: dict[str, Any] = {
    "table": lambda: ColwiseParallel(output_layouts=Replicate()),
    **{f"attention.{name}": ColwiseParallel for name in "qkv"},
    "attention.out": RowwiseParallel,
    "up": ColwiseParallel,
    "down": RowwiseParallel,
}
OTHERWISE = {
    "up": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1)),
    "down": RowwiseParallel,
    "head": lambda: ColwiseParallel(output_layouts=Replicate()),
}
"""A sum that is cut again, a head that is put together, and attention that every rank computes
whole.
"""


def text(ranks: int = 1, styles: dict[str, Any] = STYLES, own_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Text().double()
    if own_norm:
        model.attention.own_norm = nn.LayerNorm(2).double()
    if ranks == 1:
        return model
    mesh = init_device_mesh("cpu", (ranks,))
    return parallelize_module(model, mesh, {name: style() for name, style in styles.items()})


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (ranked.RECORDS, LENGTH), generator=generator)
    return x, x[:, 0] % 3


def held_out(given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Other records like these, which may be public."""
    x, y = given
    return (x + 3 if x.is_floating_point() else (x + 1) % WORDS), y


def plan(kind: str) -> dpfy.Plan:
    if kind != "layers":
        return ranked.plan("dpsgd" if kind == "otherwise" else kind)
    recipe = dpfy.dpsgd(ranked.RECORDS, 9, clip_norm=0.7, steps=STEPS)
    return dataclasses.replace(recipe, clip=PerLayerClip(0.7)).with_noise(1.5, delta=1e-3)


def train(kind: str, run: dpfy.Run, model: nn.Module, stop: int = STEPS) -> dict[str, Any]:
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, foreach=False)
    how = {"update": Update(average=0.9), "runtime": dpfy.Runtime(max_physical_batch=6)}
    with dpfy.PrivateTraining(model, optimizer, data(), plan(kind), run, **how) as training:
        for x, y in training.batches():
            training.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
            if training.steps_done >= stop:
                break
        assert isinstance(training.parallel, TensorParallel) is dist.is_initialized()
        held = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
        found: dict[str, Any] = {name: ranked.full(p) for name, p in model.named_parameters()}
        found |= {
            "past": sum(t.numel() for t in training.state.noise.values()),
            "held": held,
            "clip": training.clip.bound.l2,
        }
    return found


def together(rank: int, folder: str, ranks: int) -> None:
    """Each plan, left in the middle and resumed; then what is refused."""
    warnings.simplefilter("ignore")
    for kind in KINDS:
        run = dpfy.Run(f"{folder}/{kind}", seed=3, checkpoint_every=0.0)
        model = text(ranks, OTHERWISE if kind == "otherwise" else STYLES)
        torch.manual_seed(5 + rank)
        if kind in ("banded", "adaptive"):
            train(kind, run, model, stop=3)
            run, model = dataclasses.replace(run, resume=True), text(ranks)
        torch.save(train(kind, run, model), f"{folder}/{kind}-{rank}.pt")
    if ranks > 2:
        return
    for use in ("public", "billed"):
        for name, given, model in (
            ("fsdp", ranked.data(), ranked.sharded(ranked.net())),
            ("parallel", data(), text(2)),
        ):
            sgd, run = (
                torch.optim.SGD(model.parameters(), lr=0.1),
                dpfy.Run(f"{folder}/fit-{name}-{use}", seed=3),
            )
            done = dpfy.fit(
                model,
                given,
                plan=plan("dpsgd"),
                optimizer=sgd,
                run=run,
                evaluation=dpfy.PrivateTest(given)
                if use == "billed"
                else dpfy.PublicTest(held_out(given)),
            )
            torch.save(done.utility, f"{folder}/fit-{name}-{use}-{rank}.pt")
    said = {}
    for name, model in (
        ("rows of a table", text(2, {"table": lambda: RowwiseParallel(input_layouts=Replicate())})),
        ("a cut sequence", text(2, STYLES | {"norm1": SequenceParallel})),
        ("a norm of its own heads", text(2, own_norm=True)),
    ):
        try:
            train("dpsgd", dpfy.Run(f"{folder}/{name}", seed=3), model)
        except (Unsupported, Lost, RuntimeError) as error:
            said[name] = str(error)
        dist.barrier()
    torch.save(said, f"{folder}/said-{rank}.pt")


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def group(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    ranked.done(ranked.start(together, request.param, str(folder), request.param))
    return request.param, folder


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_with_parts_of_the_weights_make_the_run_of_one_process(
    group, tmp_path: Path, kind: str
) -> None:
    ranks, folder = group
    model = text()
    torch.manual_seed(5)
    alone = train(kind, dpfy.Run(tmp_path / "run", seed=3), model)
    found = ranked.results(folder, kind, ranks)
    for mine in found:
        for name, value in alone.items():
            if isinstance(value, Tensor):
                assert (mine[name] - value).abs().max() < 1e-9, name
                assert torch.equal(mine[name], found[0][name])
        assert abs(mine["clip"] - alone["clip"]) < 1e-9
        assert mine["held"] < alone["held"]
    assert sum(mine["past"] for mine in found) == alone["past"]


SAID = {
    "rows of a table": "Embedding: a layer whose weights",
    "a cut sequence": "LayerNorm: a layer whose weights",
    "a norm of its own heads": "another gradient of a parameter that every rank holds",
}


def test_weights_that_are_spread_otherwise_are_refused(group) -> None:
    ranks, folder = group
    for rank in range(ranks if ranks == 2 else 0):
        said = torch.load(folder / f"said-{rank}.pt")
        assert {name for name, words in SAID.items() if words in said[name]} == SAID.keys()


@pytest.mark.parametrize(
    "name", ["fsdp-public", "fsdp-billed", "parallel-public", "parallel-billed"]
)
def test_fit_evaluates_a_model_in_parts_on_all_ranks_and_tells_them_what_rank_0_released(
    group, name: str
) -> None:
    ranks, folder = group
    if ranks == 2:
        first, second = ranked.results(folder, f"fit-{name}", 2)
        assert first == second
        assert ("test_accuracy_noise" in first) is name.endswith("billed")


def test_nothing_is_recorded_where_other_ranks_have_a_part() -> None:
    """A graph of this rank's norms alone would clip by them."""
    sharded = ShardedNorms({"weight", "bias"}, lambda norms: norms)
    each = {"each": lambda name, total: total}
    for parts, may in (({}, True), ({"sharded": sharded}, False), (each, False)):
        engine, model, clip = BookkeepingEngine(), nn.Linear(3, 2), FlatClip(1.0)
        engine.attach(model, **parts)
        losses = model(torch.randn(4, 3)).square().sum(1)
        engine.bounded_sum(losses, clip)
        capture = CapturedSum(engine, lambda x: model(x).sum(1))  # noqa: B023
        assert capture._can((SimpleNamespace(is_cuda=True),)) is may  # type: ignore[arg-type]
        engine.detach()
        assert engine.alone
