"""What a user gives to train on, as records: in memory where it is, else read when it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dpfy.core import errors
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.lazy import PREFETCH, LazyRecords, RecordSource
from dpfy.data.mapped import MappedArrays
from dpfy.data.owners import Owned
from dpfy.data.reader import Collate
from dpfy.data.records import Records, as_records
from dpfy.data.split import SplitRecords

BY_NUMBER = (
    "every plan draws records by number, those in a fixed order too (blt, dpftrl, bandmf with "
    "sampling='fixed-order'): give a map-style "
    "Dataset, or write the stream to shards (dpfy.data.shards)"
)
DRAWN = (
    "the plan draws the records: give the loader without it, or dpfy.lazy(loader.dataset, "
    "collate=...)"
)


def lazy(
    dataset: object,
    *,
    collate: Collate | None = None,
    workers: int | None = None,
    pin_memory: bool | None = None,
    prefetch: int | None = None,
    views: int = 1,
    worker_init: Callable[[int], None] | None = None,
) -> LazyRecords:
    """Records that are read when they are drawn, for data that does not fit into memory.

    The plan decides which records are read. Memory-mapped arrays, alone or nested, Hugging Face
    `datasets` and a DataLoader are taken too. The settings of a DataLoader count where none is
    given here.

    Args:
        dataset: A map-style dataset.
        collate: Makes a batch of a list of records; torch's own way by default. A batch is any
            nesting of dicts, tuples and lists with tensors, a row for each record.
        workers: How many processes read ahead; 0 reads in this one.
        pin_memory: None pins where training is on a GPU.
        prefetch: How many batches each worker reads ahead; by default 2.
        views: Read each record that many times, with augmentation drawn for each. The tensors of
            a batch are then [records, views, ...], and :func:`dpfy.gradients.per_view` joins the
            losses, so that an example has one gradient, clipped once (De et al. 2022).
        worker_init: Called in each worker with its number.

    Returns:
        The records, for `dpfy.fit` and `dpfy.PrivateTraining`.

    Raises:
        InvalidInput: The dataset has no length or no records by number, or a value does not fit.

    Guarantees: nothing is read here. What a record draws from the global generators of torch, NumPy
    and Python is a function of the run's secret, the step, the record and the view.

    Example:
        >>> import torch
        >>> import dpfy
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 50
        ...     def __getitem__(self, number):
        ...         return torch.full((2,), float(number)), number % 2
        >>> train = dpfy.lazy(Squares(), workers=0)
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = dpfy.dpsgd(records=50, batch_size=10, steps=2).calibrate(3.0, 1e-5)
        >>> dpfy.fit(model, train, optimizer=optimizer, plan=plan).epsilon <= 3.0
        True
    """
    records = _lazy(dataset)
    if records is None:
        raise InvalidInput(
            "dataset",
            type(dataset).__name__,
            "must be a map-style Dataset: with a length, and an item for each number",
        )
    if collate is not None and not callable(collate):
        raise InvalidInput(
            "collate", type(collate).__name__, "must be a function from a list of items to a batch"
        )
    given: dict[str, Any] = {
        "collate": collate,
        "workers": workers,
        "pin_memory": pin_memory,
        "prefetch": prefetch,
        "worker_init": worker_init,
    }
    return replace(
        records, views=views, **{name: value for name, value in given.items() if value is not None}
    )


def admitted(train: object) -> object:
    """`train`, as lazy records if it is to be read lazily. What no plan can train on is refused
    before anything is reserved.

    Guarantees: reads nothing.
    """
    if isinstance(train, Owned):
        admitted(train.fields)
        return train
    if isinstance(train, Mapping) and _package(train) != "datasets":  # also what a tokenizer gives
        train = dict(train)
    found = _lazy(train)
    return train if found is None else found


def as_source(train: object) -> RecordSource:
    """Records from what the user holds: what is in memory as :func:`as_records` takes it, all else
    lazily.

    Guarantees: of what is lazy nothing is read here, but whose each record is where it has an
    owner.
    """
    found = admitted(train)
    if isinstance(found, Owned):
        return found.grouped(as_source(found.fields))
    return found if isinstance(found, LazyRecords) else as_records(found)


def rows_of(train: object) -> int | None:
    """How many records `train` says it holds, without reading one; None where only reading
    tells.
    """
    if isinstance(train, SplitRecords):
        return train.expected
    if is_rows(train):
        return len(train)  # type: ignore[arg-type]
    if isinstance(train, tuple | list | Mapping):
        held = [
            leaf
            for leaf in pytree.tree_leaves(dict(train) if isinstance(train, Mapping) else train)
            if leaf is not None
        ]
        return rows_of(held[0]) if held else None
    if isinstance(train, DataLoader):
        return rows_of(train.dataset)
    if not (hasattr(train, "__len__") and hasattr(train, "__getitem__")) and not isinstance(
        train, Records | LazyRecords
    ):
        return None
    return None if isinstance(train, str | bytes) or getattr(train, "ndim", 1) == 0 else len(train)  # type: ignore[arg-type]


def is_rows(train: object) -> bool:
    """Whether `train` is a list of records, as torch takes it for a dataset, and not one of
    fields.
    """
    return isinstance(train, list) and bool(train) and isinstance(train[0], tuple | list | Mapping)


def _lazy(train: object) -> LazyRecords | None:
    """The records of what is read lazily; None for what is in memory, or is no set of records."""
    if isinstance(train, LazyRecords):
        return train
    if isinstance(train, DataLoader):
        return _of_loader(train)
    if is_rows(train):
        return LazyRecords(train)
    kind = type(train)
    if isinstance(train, IterableDataset) or kind.__name__ == "IterableDataset":
        raise Unsupported(f"{_an(kind.__name__)}, which has no record number 7,", BY_NUMBER)
    if _package(train) == "datasets":
        return LazyRecords(_hugging_face(train))
    if any(isinstance(leaf, np.memmap) for leaf in pytree.tree_leaves(train)):
        return LazyRecords(MappedArrays(train))
    if isinstance(
        train, Records | TensorDataset | np.ndarray | tuple | list | dict | str | bytes
    ) or hasattr(train, "untyped_storage"):
        return None
    if _package(train) in ("pandas", "polars"):
        raise InvalidInput(
            "train",
            kind.__name__,
            "must be tensors, arrays or a map-style Dataset: give columns as tensors",
        )
    return (
        LazyRecords(train) if hasattr(train, "__getitem__") and hasattr(train, "__len__") else None
    )


def _of_loader(loader: DataLoader[Any]) -> LazyRecords:
    """A loader's dataset, collate function and workers. Which records a batch holds is the plan's
    to say, and a line tells so.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise Unsupported("a DataLoader of an IterableDataset", BY_NUMBER)
    plain = isinstance(loader.sampler, SequentialSampler) or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and loader.sampler._num_samples is None
    )
    if not plain:
        raise Unsupported(
            f"a DataLoader with {_an(type(loader.sampler).__name__)} of its own", DRAWN
        )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise Unsupported(
            f"a DataLoader with {_an(type(loader.batch_sampler).__name__)} of its own", DRAWN
        )
    if loader.batch_size is None:
        raise Unsupported(
            "a DataLoader with batch_size=None, whose dataset makes batches itself",
            "give a dataset of single records",
        )
    told = [f"batch_size={loader.batch_size}"]
    told += ["shuffle=True"] if isinstance(loader.sampler, RandomSampler) else []
    told += ["drop_last=True"] if loader.drop_last else []
    errors.warn(
        f"DataLoader({', '.join(told)}): the plan draws the batches instead; dataset, collate and "
        f"workers are used"
    )
    base = _lazy(loader.dataset) or LazyRecords(loader.dataset)
    return replace(
        base,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        workers=loader.num_workers,
        pin_memory=loader.pin_memory or None,
        prefetch=loader.prefetch_factor or PREFETCH,
        worker_init=loader.worker_init_fn,
        context=loader.multiprocessing_context,
        timeout=loader.timeout,
    )


class HuggingFace:
    """A `datasets.Dataset` without a transform of its own: it reads many records at once much
    faster than one after the other.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def many(self, indices: list[int]) -> list[Any]:
        """The records at `indices`."""
        found: list[Any] = self.dataset.__getitems__(indices)
        return found


def _hugging_face(dataset: Any) -> Any:
    """A `datasets.Dataset` that gives tensors, unless its owner chose another format."""
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "__getitems__"):
        raise InvalidInput(
            "train",
            f"datasets.{type(dataset).__name__}",
            "must be one split of it: give dataset['train']",
        )
    given = dataset.format["type"]
    if given == "custom":  # a transform, which may draw at random
        return dataset
    return HuggingFace(dataset.with_format("torch") if given is None else dataset)


def _package(value: object) -> str:
    """The package that the class of a value comes from."""
    return type(value).__module__.partition(".")[0]


def _an(name: str) -> str:
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
