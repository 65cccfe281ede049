"""Test data that is declared public and holds training data is refused, however it was copied; data
of its own is not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.data.given import as_source
from dpfy.training.integrity import overlap

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

REFUSED = "data declared public that holds training data"


def shares(train, test, seed=1):
    try:
        overlap.require_apart("test", as_source(train), as_source(test), Randomness.for_tests(seed))
    except InvalidInput as refused:
        return REFUSED in str(refused)
    return False


def normal(rows, seed, features=12):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, features, generator=rng), torch.randint(0, 3, (rows,), generator=rng)


class Rows(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def test_fit_refuses_the_training_data_as_public_test_data(tmp_path):
    def fit(name, **settings):
        net = small.model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        return dpfy.fit(
            net, small.data(), plan=small.plan(3), optimizer=sgd, run=tmp_path / name, **settings
        )

    with pytest.raises(InvalidInput, match=f"evaluation: got '{REFUSED}'"):
        fit("public", evaluation=dpfy.PublicTest(small.data()))
    assert not list(tmp_path.glob("public/metrics.jsonl"))
    fit("withheld", evaluation=dpfy.WithheldTest(small.data()))
    fit("billed", evaluation=dpfy.PrivateTest(small.data(), noise_multiplier=5.0))
    fit("other", evaluation=dpfy.PublicTest(small.held_out()))


x, y = normal(2000, 0)
ORDER = torch.randperm(2000, generator=torch.Generator().manual_seed(1))
COPIES = {
    "itself": lambda: (x, y),
    "a view": lambda: (x[100:400], y[100:400]),
    "a copy": lambda: (x.clone(), y.clone()),
    "another order": lambda: (x[ORDER], y[ORDER]),
    "double": lambda: (x.double(), y),
    "half": lambda: (x.half(), y),
    "bfloat16": lambda: (x.bfloat16(), y),
    "numpy": lambda: (x.numpy().copy(), y.numpy()),
    "numpy, double": lambda: (x.numpy().astype(np.float64), y.numpy()),
    "other labels": lambda: (x, (y + 1) % 3),
    "one record": lambda: (x[[5]], y[[5]]),
    "dataset": lambda: TensorDataset(x, y),
    "a subset": lambda: Subset(TensorDataset(x, y), list(range(50, 250))),
    "a subset of a dataset": lambda: Subset(Rows(x, y), list(range(0, 2000, 2))),
    "lazy": lambda: dpfy.lazy(Rows(x, y)),
    "one in ten": lambda: tuple(
        torch.cat([a, b]) for a, b in zip((x[:60], y[:60]), normal(540, 5), strict=True)
    ),
    "one in a hundred": lambda: tuple(
        torch.cat([a, b]) for a, b in zip((x[:10], y[:10]), normal(990, 5), strict=True)
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found(name):
    assert shares((x, y), COPIES[name]())


@pytest.mark.parametrize("train", ["lazy", "by user", "owned", "double", "dataset"])
def test_other_kinds_of_training_data_are_compared(train):
    owners = torch.arange(2000) // 4
    given = {
        "lazy": lambda: dpfy.lazy(Rows(x, y)),
        "by user": lambda: dpfy.by_user((x, y), owners, 4),
        "owned": lambda: dpfy.by_user((x, y), dpfy.Users(owners), 4),
        "double": lambda: (x.double(), y),
        "dataset": lambda: Rows(x, y),
    }[train]()
    assert shares(given, (x[ORDER], y[ORDER]))
    assert not shares(given, normal(500, 9))


@pytest.mark.parametrize("seed", range(10))
def test_data_of_its_own_is_accepted(seed):
    """Also where rows recur by themselves: few values, few columns, one column."""
    rng = np.random.default_rng(seed)
    for features, levels in (
        (1, 0),
        (1, 5),
        (2, 3),
        (3, 10),
        (8, 2),
        (12, 2),
        (20, 2),
        (5, 0),
        (64, 17),
    ):

        def drawn(rows, features=features, levels=levels):
            whole = (
                rng.normal(size=(rows, features))
                if levels == 0
                else rng.integers(0, levels, (rows, features))
            )
            return torch.tensor(whole).float(), torch.tensor(rng.integers(0, 2, rows))

        for rows, tested in ((300, 100), (2000, 500), (50, 500)):
            assert not shares(drawn(rows), drawn(tested), seed), (features, levels, rows)


def test_repeated_training_records_hide_no_copy():
    doubled = torch.cat([x, x]), torch.cat([y, y])
    assert shares(doubled, (x, y))
    assert not shares(doubled, normal(500, 9))


def test_rows_of_several_columns_are_compared_together():
    columns = {f"c{k}": x[:, k].clone() for k in range(8)} | {"label": y}
    assert shares(columns, {k: v[ORDER] for k, v in columns.items()})
    assert not shares(columns, {k: v[ORDER[torch.randperm(2000)]] for k, v in columns.items()}), (
        "each column in another order"
    )
