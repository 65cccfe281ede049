"""A loaded data set: training and held-out records with the public facts about them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.data.config import DataConfig
from dpfy.data.owners import Owned
from dpfy.data.records import Records, as_records, require_finite, require_labels
from dpfy.data.split import split_fraction
from dpfy.data.users import by_owner, held_out


@dataclass(frozen=True)
class DataSource:
    """Records to train on and records held out, both encoded by public rules only.

    features: the shape of one record. classes: the declared number of classes. description: public
    words, no path. clamped: how many values lay outside their public range or categories. It is a
    fact about the data, so it is left out of `repr` and must not be logged unless it is billed.
    owned: the training records with their owners, where users are the unit. held: the records held
    out with their owners, where those are known.

    Guarantees: features are finite and labels lie in the declared classes, in both parts.
    """

    train: Records
    test: Records
    features: tuple[int, ...]
    classes: int | None
    clamped: int = field(repr=False)
    description: str
    owned: Owned | None = field(default=None, repr=False)
    held: Owned | None = field(default=None, repr=False)

    @property
    def units(self) -> int:
        """How many rows there are to draw from: records, or users."""
        return len(self.train) if self.owned is None else len(self.owned.grouped(self.train))


@dataclass(frozen=True)
class Encoded:
    """One file as tensors, with the count of values that had to be clamped and, where it was asked
    for, whose each record is and when.
    """

    records: Records
    clamped: int = 0
    owners: np.ndarray | None = field(default=None, repr=False)
    times: object = field(default=None, repr=False)


def labelled(features: Tensor, labels: Tensor, classes: int, name: str) -> Records:
    """Records (features, labels), checked: finite features, labels in range, as many of one as of
    the other.
    """
    records = Records((features, labels.to(torch.int64)))
    require_finite(name, records)
    require_labels(f"{name} labels", labels, classes)
    return records


def assemble(
    train: Encoded, test: Encoded | None, config: DataConfig, classes: int, what: str
) -> DataSource:
    """A DataSource from one file (split by the public permutation) or from two. With owners, users
    are trained on and held out whole.
    """
    train_records, held, owned = train.records, None, None
    if config.most_records is not None and train.owners is not None:
        fraction = config.test_fraction if test is None else None
        train_records, held, owned = by_owner(
            train.records, train.owners, train.times, config, fraction
        )
    if test is None:
        train_records, test_records = (
            (train_records, as_records(held.records))
            if held is not None
            else split_fraction(train_records, config.test_fraction)
        )
        parts = f"{len(test_records)} held out by a fixed public permutation"
    else:
        test_records = test.records
        if test.owners is not None:
            held = held_out(test.records, test.owners, test.times, config)
            test_records = as_records(held.records)
        parts = f"{len(test_records)} held out in a separate file"
    shape = tuple(train.records.tensors[0].shape[1:])
    if tuple(test_records.tensors[0].shape[1:]) != shape:
        seen = tuple(test_records.tensors[0].shape[1:])
        raise InvalidInput(
            "held-out records",
            f"shape {seen}",
            f"must have the shape of the training records, {shape}",
        )
    clamped = train.clamped + (test.clamped if test is not None else 0)
    words = f"{what}: {len(train_records)} to train, {parts}"
    return DataSource(train_records, test_records, shape, classes, clamped, words, owned, held)
