"""Records among the initial weights, and exact statistics of all records, are refused before
anything is released.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.data.given import as_source
from dpfy.training import Update
from dpfy.training.integrity import copies

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

RECORD, STATISTIC = "values of a record of the training data", "a statistic of the training data"


class Memory(nn.Module):
    """A model that holds something beside what it trains."""

    def __init__(self, features: int, held: torch.Tensor, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(features, small.CLASSES)
        if kind == "buffer":
            self.register_buffer("held", held)
        else:
            self.held = nn.Parameter(held.clone(), requires_grad=kind == "trained")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1)) + 0.0 * self.held.float().sum()


def found(weights, data, settings=(), seed=1):
    named = weights if isinstance(weights, dict) else {"held": weights}
    try:
        copies.check(named, settings, as_source(data), Randomness.for_tests(seed))
    except InvalidInput as refused:
        return str(refused)
    return None


@pytest.fixture(scope="module")
def tables():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 10, generator=rng)
    return x, torch.randint(0, 3, (300,), generator=rng)


@pytest.fixture(scope="module")
def pictures():
    """Pictures with a dark rim, of 256 levels."""
    rng = torch.Generator().manual_seed(0)
    x = torch.zeros(200, 1, 20, 20)
    x[:, :, 5:15, 5:15] = torch.randint(0, 256, (200, 1, 10, 10), generator=rng) / 255
    return x, torch.randint(0, 3, (200,), generator=rng)


# --- a whole run
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["buffer", "frozen", "trained"])
@pytest.mark.parametrize("what", ["record", "neighbours", "mean", "deviation"])
def test_a_model_filled_from_the_data_is_refused_before_a_step(tmp_path, tables, kind, what):
    x, y = tables
    held = {"record": x[7], "neighbours": x[100:140], "mean": x.mean(0), "deviation": x.std(0)}[
        what
    ]
    net = Memory(10, held, kind)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = dpfy.dpsgd(300, 30, steps=3, clip_norm=1.0).with_noise(2.0, delta=1e-3)
    training = dpfy.PrivateTraining(net, sgd, (x, y), plan, tmp_path / "run")
    with pytest.raises(
        InvalidInput, match=rf"held: got '{STATISTIC if what in ('mean', 'deviation') else RECORD}'"
    ):
        training.__enter__()
    assert not list((tmp_path / "run").glob("**/model.safetensors"))


def test_weights_that_are_declared_public_are_named_in_the_report(tmp_path, tables):
    x, y = tables
    plan = dpfy.dpsgd(300, 30, steps=3, clip_norm=1.0).with_noise(2.0, delta=1e-3)

    def train(name, held, update):
        net = Memory(10, held, "buffer")
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        dpfy.fit(net, (x, y), plan=plan, optimizer=sgd, run=tmp_path / name, update=update)
        card = small.card_of(tmp_path / name)
        assert all(finding.holds for finding in dpfy.verify(tmp_path / name))
        return card["optimizer"]["initial_weights"], [
            r["done"] for r in card["accounting"]["assumptions"] if r["what"] == "the beginning"
        ]

    told, (words,) = train("public", x[7].clone(), Update(public_weights=True))
    assert told == "declared public"
    assert "declared initial weights and buffers public" in words
    told, (words,) = train("plain", torch.randn(10), None)
    assert told == "searched for copies of records"
    assert "searched for exact copies of records and for exact statistics" in words


# --- what is found
# ------------------------------------------------------------------------------------------------------------------


WAYS = {
    "one": lambda x: x[3],
    "flat": lambda x: x[3:5].flatten(),
    "rows": lambda x: x[10:60].flatten(1),
    "columns": lambda x: x[10:60].flatten(1).t().contiguous(),
    "half": lambda x: x[3:40].half(),
    "bfloat16": lambda x: x[3:40].bfloat16(),
    "half and back": lambda x: x[3:40].half().float(),
    "double": lambda x: x[3].double(),
    "in the middle": lambda x: torch.cat([torch.randn(1001), x[3].flatten(), torch.randn(77)]),
    "in a row of a table": lambda x: torch.cat(
        [torch.randn(40, x[0].numel()), x[[3]].flatten(1), torch.randn(9, x[0].numel())]
    ),
    "beside others": lambda x: torch.cat([x[:9].flatten(1), torch.randn(9, 7)], 1),
    "scattered": lambda x: torch.randn(64, x[0].numel()).index_copy_(
        0, torch.tensor([33]), x[[3]].flatten(1)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("data", ["tables", "pictures"])
def test_a_copy_is_found_wherever_it_stands(request, way, data):
    torch.manual_seed(2)
    x, y = request.getfixturevalue(data)
    assert RECORD in (found(WAYS[way](x), (x, y)) or "")


@pytest.mark.parametrize("seed", range(12))
def test_random_records_of_random_shapes_are_found_and_random_weights_are_not(seed):
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shape = tuple(int(n) for n in rng.integers(2, 7, rng.integers(1, 4)))
    shape = shape if np.prod(shape) >= 8 else (9,)
    kind = rng.choice(["normal", "levels", "whole", "double"])
    x = torch.randn(80, *shape)
    if kind == "levels":
        x = torch.randint(0, 256, (80, *shape)) / 255
    if kind == "double":
        x = x.double()
    if kind == "whole":
        x = torch.randint(0, 30_000, (80, 40))
    data = (x, torch.randint(0, 2, (80,)))
    row = x[int(rng.integers(80))].flatten()
    around = torch.randn(int(rng.integers(0, 500)))
    assert RECORD in (found(torch.cat([around, row.to(around.dtype), around]), data) or ""), (
        kind,
        shape,
    )
    net = nn.Sequential(
        nn.Linear(len(row), 64), nn.LayerNorm(64), nn.Embedding(500, 64), nn.BatchNorm1d(64)
    )
    assert found(net.state_dict(), data) is None


def test_other_kinds_of_data_are_searched_too(tables):
    x, y = tables

    class Rows(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, index):
            return {"x": x[index], "y": y[index]}

    owners = torch.arange(300) // 3
    for data in (
        {"x": x, "y": y},
        (x.numpy(), y.numpy()),
        dpfy.by_user((x, y), owners, 3),
        dpfy.by_user((x, y), dpfy.Users(owners), 3),
        dpfy.lazy(Rows()),
    ):
        assert RECORD in (found(x.clone(), data) or "")


@pytest.mark.parametrize(
    "name", ["mean", "std", "var", "min", "max", "unbiased", "inverse", "negative", "shift"]
)
@pytest.mark.parametrize("data", ["tables", "pictures"])
def test_an_exact_statistic_is_found(request, name, data):
    x, y = request.getfixturevalue(data)
    x = x[:, :, 5:15, 5:15].contiguous() if data == "pictures" else x * 3.7 + 0.31
    figure = {
        "mean": lambda v, *a: v.mean(*a),
        "std": lambda v, *a: v.std(*a, unbiased=False),
        "var": lambda v, *a: v.var(*a),
        "min": lambda v, *a: v.amin(*a),
        "max": lambda v, *a: v.amax(*a),
        "unbiased": lambda v, *a: v.std(*a),
        "inverse": lambda v, *a: 1 / v.std(*a),
        "negative": lambda v, *a: -v.mean(*a),
        "shift": lambda v, *a: -v.mean(*a) / v.std(*a),
    }[name]
    if data == "pictures" and name in ("min", "max"):
        return  # 0 and 1
    assert STATISTIC in (found(figure(x, 0), (x, y)) or "")
    if data == "tables":
        assert STATISTIC in (found(figure(x.flatten(), 0).view(1), (x, y)) or "")
    numpy = {"mean": x.numpy().mean(0), "std": x.numpy().std(0), "var": x.numpy().var(0, ddof=1)}
    if name in numpy:
        assert STATISTIC in (found(torch.from_numpy(numpy[name]), (x.numpy(), y.numpy())) or "")


def test_statistics_of_channels_are_found():
    torch.manual_seed(0)
    x = torch.rand(400, 3, 8, 8)
    for figure in (x.mean((0, 2, 3)), x.std((0, 2, 3)), x.mean((0, 2, 3)).view(1, 3, 1, 1)):
        assert STATISTIC in (found(figure, (x, torch.zeros(400).long())) or "")


def test_a_setting_that_is_a_value_of_a_record_is_refused(tmp_path, tables):
    x, y = tables
    value = abs(float(x[0, 0]))
    positive = x.clone()
    positive[0, 0] = value
    net = nn.Linear(10, 3)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=value)
    plan = dpfy.dpsgd(300, 30, steps=3, clip_norm=1.0).with_noise(2.0, delta=1e-3)
    with pytest.raises(InvalidInput, match="a setting that is a value of a record") as refused:
        dpfy.fit(net, (positive, y), plan=plan, optimizer=sgd, run=tmp_path / "run")
    assert f"{value:.4g}" not in str(refused.value)


# --- what is not taken for a copy
# -----------------------------------------------------------------------------------------------------


def test_ordinary_weights_of_ordinary_data_are_accepted(tables, pictures):
    torch.manual_seed(0)
    digits = torch.randint(0, 17, (500, 64)).float()
    words = torch.randint(0, 1000, (300, 64))
    few = torch.randint(0, 2, (400, 40)).float()
    ramp = torch.arange(100 * 30).view(100, 30)
    data = {
        "tables": tables[0],
        "pictures": pictures[0],
        "raw pictures": (pictures[0] * 255).to(torch.uint8),
        "digits": digits,
        "words": words,
        "one hot": torch.eye(40).repeat(10, 1),
        "zeros and ones": few,
        "ramps": ramp,
        "two features": torch.randn(200, 2),
        "one": torch.randn(200, 1),
        "none": torch.randn(200),
        "standardised": (tables[0] - tables[0].mean(0)) / tables[0].std(0),
        "halves": tables[0].half(),
    }
    width = 64
    models = {
        "conv": nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3)
        ),
        "transformer": nn.TransformerEncoderLayer(width, 4, 128),
        "recurrent": nn.LSTM(width, 64, 2),
        "tables": nn.ModuleList([nn.Embedding(1000, width, padding_idx=0), nn.Linear(width, 1000)]),
        "parametrised": nn.utils.parametrizations.weight_norm(nn.Linear(40, 40)),
    }
    others = {
        "positions": torch.arange(512).expand(1, -1),
        "causal": torch.tril(torch.ones(64, 64)),
        "sinus": torch.sin(torch.arange(512)[:, None] / 10_000 ** (torch.arange(64) / 64)),
        "relative": torch.arange(49)[:, None] - torch.arange(49),
        "eye": torch.eye(40),
        "imagenet mean": torch.tensor([0.485, 0.456, 0.406]),
        "mnist mean": torch.tensor([0.1307]),
        "one": torch.ones(10),
        "count": torch.zeros((), dtype=torch.long),
        "scale": torch.tensor(2.6592600),
        "half": torch.randn(300, 64).half(),
        "bfloat16": torch.randn(300, 64).bfloat16(),
        "pruned": torch.randn(300, 64).bfloat16() * (torch.rand(300, 64) > 0.9),
        "quantised": torch.randint(-127, 128, (64, 64), dtype=torch.int8),
    }
    weights = others | {f"{n}.{k}": v for n, m in models.items() for k, v in m.state_dict().items()}
    for name, x in data.items():
        for seed in range(2):
            assert (
                found(weights, (x, torch.zeros(len(x)).long()), [0.1, 0.9, 0.999, 1e-8, 3e-4], seed)
                is None
            ), name


def test_statistics_of_other_data_and_public_constants_are_accepted(tables):
    torch.manual_seed(5)
    x, y = tables
    other = torch.randn(300, 10)
    for t in (
        other.mean(0),
        other.std(0),
        other[4],
        x.mean(0) + 1e-3 * torch.randn(10),
        torch.zeros(10),
        torch.ones(10),
    ):
        assert found(t, (x, y)) is None
    cifar = torch.rand(200, 3, 8, 8)
    rounded = (cifar.mean((0, 2, 3)) * 1e4).round() / 1e4
    assert found(rounded, (cifar, torch.zeros(200).long())) is None


def test_random_weights_are_never_taken_for_records():
    """Many records against many weights, in every type."""
    torch.manual_seed(0)
    x = torch.randn(20_000, 16)
    t = torch.randn(1_000_000)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert found(t.to(dtype), (x, torch.zeros(20_000).long())) is None
        levels = torch.randint(0, 256, (20_000, 16)) / 255
        assert found(t.to(dtype), (levels, torch.zeros(20_000).long())) is None


def test_it_is_cheap():
    torch.manual_seed(0)
    x, weights = torch.rand(60_000, 784), {"w": torch.randn(1_000_000)}
    started = time.process_time()
    assert found(weights, (x, torch.zeros(60_000).long())) is None
    assert time.process_time() - started < 10
