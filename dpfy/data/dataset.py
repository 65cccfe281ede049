"""A loaded data set: training and held-out records with the public facts about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from dpfy.core.errors import InvalidInput
from dpfy.data.config import DataConfig
from dpfy.data.owners import Owned, days, order_of
from dpfy.data.records import Records, as_records, require_finite, require_labels
from dpfy.data.split import some, split_fraction, stated
from dpfy.data.users import by_owner, held_out
from dpfy.tables.shared import numbered, within_limit


@dataclass(frozen=True)
class DataSource:
    """Records to train on and records held out, both encoded by public rules only.

    features: the shape of one record. classes: the declared number of classes. description: public
    words, no path. owned: the training records with their owners, where users are the unit. held:
    the records held out with their owners, where those are known.

    Guarantees: features are finite and labels lie in the declared classes, in both parts.
    """

    train: Records
    test: Records
    features: tuple[int, ...]
    classes: int | None
    description: str
    owned: Owned | None = field(default=None, repr=False)
    held: Owned | None = field(default=None, repr=False)

    @property
    def units(self) -> int:
        """How many rows there are to draw from, as a plan must state them: records, or users."""
        return stated(self.train) if self.owned is None else len(self.owned.grouped(self.train))


@dataclass(frozen=True)
class Encoded:
    """One file as tensors; where it was asked for, whose each record is and when; and which rows are
    left out. Where records have several owners there is a column for each.
    """

    records: Records
    left_out: np.ndarray | None = field(default=None, repr=False)
    owners: np.ndarray | None = field(default=None, repr=False)
    times: object = field(default=None, repr=False)

    def without(self, rows: np.ndarray | None) -> Encoded:
        """With these rows left out too."""
        if rows is None:
            return self
        return replace(self, left_out=rows if self.left_out is None else self.left_out | rows)

    def owned(self, columns: Sequence[np.ndarray], times: object, config: DataConfig) -> Encoded:
        """With whose each record is, and when it was made where that is asked for. Records without
        the one or the other are left out; of records with several owners those beyond the limit of
        one of them, before what a record holds can leave it out.
        """
        if len(columns) > 1:
            assert config.most_records is not None
            order = order_of(len(self.records), config.pick)
            used = within_limit(numbered(columns), config.most_records, order)
            return replace(self.without(~used), owners=np.stack(columns, axis=1))
        owners = columns[0]
        found = None if times is None else days(times)
        missing = owners == "" if found is None else (owners == "") | np.isnan(found)
        return replace(self.without(missing), owners=owners, times=times)

    @property
    def kept(self) -> np.ndarray:
        """Which rows are not left out."""
        return np.ones(len(self.records), bool) if self.left_out is None else ~self.left_out

    @property
    def times_kept(self) -> object:
        """When each record that is not left out was made."""
        if self.times is None:
            return None
        return [self.times[row] for row in np.flatnonzero(self.kept)]  # type: ignore[index]


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
    train_records, held, owned = some(train.records, train.kept), None, None
    if config.most_records is not None and train.owners is not None:
        fraction = config.test_fraction if test is None else None
        train_records, held, owned = by_owner(
            train_records, train.owners[train.kept], train.times_kept, config, fraction
        )
        if test is None and held is None:
            train_records, test_records = split_fraction(train_records, config.test_fraction)
    elif test is None:
        train_records, test_records = split_fraction(
            train.records, config.test_fraction, train.kept
        )
    if held is not None:
        test_records = as_records(held.records)
    parts = "held out by a fixed public permutation"
    if test is not None:
        test_records = some(test.records, test.kept)
        if test.owners is not None:
            held = held_out(test_records, test.owners[test.kept], test.times_kept, config)
            test_records = as_records(held.records)
        parts = "held out in a separate file"
    shape = tuple(train.records.tensors[0].shape[1:])
    if tuple(test_records.tensors[0].shape[1:]) != shape:
        seen = tuple(test_records.tensors[0].shape[1:])
        raise InvalidInput(
            "held-out records",
            f"shape {seen}",
            f"must have the shape of the training records, {shape}",
        )
    words = f"{what}: {stated(train_records)} to train, {stated(test_records)} {parts}"
    return DataSource(train_records, test_records, shape, classes, words, owned, held)
