from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.records import Records, as_records, require_labels

X = torch.arange(12, dtype=torch.float32).reshape(6, 2)
Y = torch.arange(6)


def fingerprint(records: Records) -> str:
    digest = hashlib.blake2b()
    for part in records.content():
        digest.update(part)
    return digest.hexdigest()


class Items(Dataset):
    def __init__(self, items: list[object]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


def test_take_gives_rows_in_the_order_asked_and_with_repeats() -> None:
    x, y = Records((X, Y)).take(torch.tensor([5, 0, 0]))
    assert y.tolist() == [5, 0, 0]
    assert torch.equal(x, X[[5, 0, 0]])


def test_fields_in_dicts_and_tuples_give_batches_of_that_structure() -> None:
    records = as_records({"x": X, "more": (Y, [Y.numpy()])})
    batch = records.take(torch.tensor([5, 0]))
    assert list(batch) == ["x", "more"]
    assert torch.equal(batch["x"], X[[5, 0]])
    assert batch["more"][0].tolist() == batch["more"][1][0].tolist() == [5, 0]
    assert fingerprint(records) != fingerprint(Records(records.tensors))
    assert fingerprint(as_records([X, Y])) == fingerprint(Records((X, Y)))


def test_take_of_nothing_is_an_empty_batch() -> None:
    x, y = Records((X, Y)).take(torch.tensor([], dtype=torch.int64))
    assert x.shape == (0, 2)
    assert y.shape == (0,)


@pytest.mark.parametrize(
    "train",
    [
        Records((X, Y)),
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        Items([(X[i], Y[i]) for i in range(6)]),
        Items([(X[i].numpy(), int(Y[i])) for i in range(6)]),
        Subset(TensorDataset(X, Y), range(6)),
    ],
    ids=[
        "records",
        "tuple",
        "list",
        "numpy",
        "tensor dataset",
        "map dataset",
        "map dataset of arrays",
        "subset",
    ],
)
def test_every_accepted_form_gives_the_same_records(train: object) -> None:
    records = as_records(train)
    assert len(records) == 6
    assert fingerprint(records) == fingerprint(Records((X, Y)))


def test_one_tensor_is_records_of_one_field() -> None:
    assert as_records(X).tensors[0] is not None
    assert len(as_records(X).tensors) == 1


def test_big_endian_and_read_only_arrays_are_accepted() -> None:
    array = np.array([1.0, 2.0], dtype=">f4").reshape(2, 1)
    array.setflags(write=False)
    assert as_records((array,)).tensors[0].tolist() == [[1.0], [2.0]]


def test_content_sees_every_bit_the_order_the_shape_and_the_type() -> None:
    base = fingerprint(Records((X, Y)))
    changed = X.clone()
    changed[3, 1] = torch.nextafter(changed[3, 1], torch.tensor(1e9))
    others = [(changed, Y), (X.flip(0), Y), (X.reshape(6, 1, 2), Y), (X.double(), Y), (Y, X), (X,)]
    prints = [fingerprint(Records(tensors)) for tensors in others]
    assert base not in prints
    assert len(set(prints)) == len(prints)
    assert fingerprint(Records((X.t().contiguous().t(), Y.clone()))) == base


def test_content_reads_half_precision() -> None:
    assert fingerprint(Records((X.bfloat16(),))) != fingerprint(Records((X.half(),)))


def test_repr_shows_shapes_and_no_value() -> None:
    text = repr(Records((torch.full((3, 2), 1234.5), torch.arange(3))))
    assert "(2,)" in text
    assert "3" not in text.replace("32", "")
    assert "1234" not in text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_with_its_record_number(bad: float) -> None:
    x = X.clone()
    x[4, 1] = bad
    with pytest.raises(
        InvalidInput,
        match=r"train\[0\]: got 'NaN or infinity in record 4'; every value must be finite",
    ):
        as_records((x, Y))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((X, Y[:5]), r"records: got \[6, 5\]; every tensor must have the same number of rows"),
        ((), "records: got 'no tensor'; must hold at least one tensor"),
        ((X[:0], Y[:0]), "records: got 0; must hold at least 1 record"),
        (
            (torch.tensor(1.0),),
            r"records\[0\]: got 'Tensor'; must be a tensor with a first dimension",
        ),
        (
            (np.array(["a", "b"]),),
            r"train\[0\]: got 'array of <U1'; must be a tensor or a numeric array",
        ),
        ("mnist", "train: got 'str'; must be Records"),
        (42, "train: got 'int'; must be Records"),
        ({"x": X, "y": "text"}, r"train\['y'\]: got 'str'; must be a tensor or a numeric array"),
        ({}, "records: got 'no tensor'; must hold at least one tensor"),
        (Items([]), "train: got 0; must hold at least 1 record"),
        (
            Items([X[0], X[1, :1]]),
            r"train\[1\]\[0\]: got 'torch.float32 \(1,\)'; items must stack: train\[0\] has "
            r"torch.float32 \(2,\)",
        ),
        (
            Items([(X[0], 1), (X[1],)]),
            r"train\[1\]: got '1 fields'; must have 2 fields like train\[0\]",
        ),
        (
            Items([{"x": X[0]}]),
            r"train\[0\]\[0\]: got 'dict'; must be a tensor, an array or a number",
        ),
        (Items(["text"]), r"train\[0\]\[0\]: got 'str'; must be a tensor, an array or a number"),
    ],
)
def test_what_is_no_set_of_records_is_refused_in_one_line(train: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        as_records(train)
    assert "\n" not in str(caught.value)


def test_a_stream_is_unsupported_and_the_message_says_why() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(X)

    with pytest.raises(Unsupported, match="sampling needs records by index"):
        as_records(Stream())


def test_labels_outside_the_declared_classes_are_refused() -> None:
    require_labels("labels", torch.tensor([0, 9]), 10)
    with pytest.raises(
        InvalidInput,
        match=r"labels\[1\]: got 'a value outside'; must be a class from 0 to 9, as declared",
    ):
        require_labels("labels", torch.tensor([0, 10]), 10)
    with pytest.raises(InvalidInput, match=r"labels\[0\]: got .a value outside"):
        require_labels("labels", torch.tensor([-1]), 10)
    with pytest.raises(InvalidInput, match="labels must be whole numbers"):
        require_labels("labels", torch.tensor([0.5]), 10)
