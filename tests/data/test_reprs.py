"""Nothing that holds private data shows a value of it when it is printed: not in a log, a traceback
or a debugger.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfy
from dpfy.core.errors import DpfyError
from dpfy.core.randomness import Randomness
from dpfy.data.given import admitted, as_source
from dpfy.data.records import Records, as_records, require_labels
from dpfy.data.split import kept, split

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import small

REAL, WHOLE, WORD = 7351.25, 918273645, "Leocadia Quintanilla"
"""Values that stand in no other place."""


def fields():
    x = torch.full((12, 4), REAL)
    return x, torch.full((12,), WHOLE)


def shows(value: object) -> list[str]:
    texts = [repr(value), str(value), f"{value}", "%s" % (value,)]  # noqa: UP031
    texts += [repr([value]), repr({"kept": value})]
    return [text for text in texts if re.search(r"7351|7\.351|918273|9\.1827|Leocadia", text)]


OWNERS = [WORD] * 6 + [str(WHOLE)] * 6


def held():
    x, y = fields()
    whole = as_records((x, y))
    numbered = torch.tensor([WHOLE] * 6 + [WHOLE + 1] * 6)
    rows = [(row, label) for row, label in zip(x, y, strict=True)]
    lazy = dpfy.lazy(rows)
    yield "records", whole
    yield "nested", as_records({"x": x, "y": [y, x]})
    yield "parts", split(whole, 3)
    yield "drawn", kept(whole, np.arange(12) % 2 == 0, 6)
    yield "by user", dpfy.by_user((x, y), numbered, 3)
    yield "by user, alone", dpfy.by_user((x, y), numbered, 3).alone()
    for of in (OWNERS, np.array(OWNERS), numbered, tuple(OWNERS), {"a": WORD}):
        yield f"users of {type(of).__name__}", dpfy.Users(of)
    yield "users in time", dpfy.Users(OWNERS, time=[WHOLE] * 12, window="day")
    owned = dpfy.by_user((x, y), dpfy.Users(OWNERS), 3)
    yield "owned", owned
    yield "owned, read", as_source(owned)
    yield "owned, lazy", as_source(dpfy.by_user(lazy, dpfy.Users(OWNERS), 3))
    yield "single", as_source(dataclasses.replace(owned, single=True))
    yield "lazy", lazy
    yield "lazy reader", lazy._reader
    yield "lazy of views", dpfy.lazy(rows, views=2)
    yield "admitted", admitted(DataLoader(TensorDataset(x, y)))


@pytest.mark.filterwarnings("ignore:DataLoader")
def test_data_shows_no_value():
    found = {name: shown[0][:80] for name, value in held() if (shown := shows(value))}
    assert not found


def test_a_training_and_its_parts_show_no_value(tmp_path):
    x, y = small.data()
    x = x.clone()
    x[:, 0] = REAL
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=1e-6)
    with dpfy.PrivateTraining(net, sgd, (x, y), small.plan(2), tmp_path / "run") as training:
        parts = [
            training,
            training.records,
            training.drawing,
            training.state,
            training.private_step,
            training.batches,
        ]
        for features, labels in training.batches():
            assert not [type(part).__name__ for part in [*parts, training._pieces] if shows(part)]
            training.step(nn.functional.cross_entropy(net(features), labels, reduction="none"))
    assert "7351" not in repr(training.folder)


def test_what_is_refused_shows_no_value():
    x, y = fields()
    for bad in (
        lambda: require_labels("train", y, 10),
        lambda: as_records((torch.where(torch.arange(48).view(12, 4) == 5, torch.nan, x), y)),
        lambda: as_records(
            [
                (row, label) if k else (row[:2], label)
                for k, (row, label) in enumerate(zip(x, y, strict=True))
            ]
        ),
        lambda: dpfy.by_user((x, y), torch.full((12,), REAL), 2),
        lambda: dpfy.by_user((x, y), y[:5], 2),
        lambda: as_source(dpfy.by_user((x, y), dpfy.Users(OWNERS[:5]), 3)),
    ):
        with pytest.raises(DpfyError) as refused:
            bad()
        assert not shows(refused.value)


def _classes():
    for module in pkgutil.walk_packages(dpfy.__path__, "dpfy."):
        if re.match(
            r"dpfy\.(data|federated|prediction|estimators|queries|local|training)\b", module.name
        ):
            for kind in vars(importlib.import_module(module.name)).values():
                if (
                    isinstance(kind, type)
                    and kind.__module__ == module.name
                    and dataclasses.is_dataclass(kind)
                ):
                    yield kind


RELEASED = {
    "FullySharded",
    "LinearVoters",
    "Predictions",
    "Released",
    "FittedArrays",
    "TridiagonalPrecision",
    "ShapeFunction",
    "Splits",
    "Trees",
    "BinGroups",
}
"""Classes that hold released numbers alone, or how a space is cut by public bounds."""


def test_no_class_that_holds_records_has_the_repr_of_a_dataclass():
    """A new class of records inherits the rule: a dataclass would print all of its fields."""

    def printed(kind: type) -> list[str]:
        if (
            not kind.__repr__.__qualname__.endswith("__create_fn__.<locals>.__repr__")
            and hasattr(kind.__repr__, "__wrapped__") is False
        ):
            return []
        return [
            f.name
            for f in dataclasses.fields(kind)
            if f.repr
            and "Callable" not in str(f.type)
            and re.search(r"\b(Tensor|NDArray|ndarray)\b", str(f.type))
        ]

    found = {
        f"{kind.__module__}.{kind.__name__}": names
        for kind in _classes()
        if kind.__name__ not in RELEASED and (names := printed(kind))
    }
    assert not found
    records = [kind for kind in _classes() if issubclass(kind, Records)]
    assert len(records) >= 7
    assert all(kind.__repr__ is Records.__repr__ for kind in records)


def test_randomness_is_not_printed():
    assert "123456789" not in repr(Randomness.for_tests(123456789))
