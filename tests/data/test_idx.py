from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.data import DataConfig
from dpfy.data.source import load

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, size=(10, 4, 3), dtype=np.uint8)
LABELS = np.arange(10, dtype=np.uint8)


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return (
        bytes([0, 0, kind, array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def write(folder: Path, images: bytes | None = None, labels: bytes | None = None) -> DataConfig:
    (folder / "images").write_bytes(idx(IMAGES) if images is None else images)
    (folder / "labels").write_bytes(idx(LABELS) if labels is None else labels)
    return DataConfig(
        kind="idx", path=str(folder / "images"), labels_path=str(folder / "labels"), classes=10
    )


def test_images_are_scaled_by_255_and_split_without_loss(tmp_path: Path) -> None:
    source = load(write(tmp_path))
    assert (len(source.train), len(source.test), source.features, source.classes) == (
        8,
        2,
        (1, 4, 3),
        10,
    )
    labels = torch.cat([source.train.tensors[1], source.test.tensors[1]])
    assert sorted(labels.tolist()) == list(range(10))
    for part in (source.train, source.test):
        for image, label in zip(*part.tensors, strict=True):
            np.testing.assert_allclose(
                image[0].numpy() * 255, IMAGES[int(label)], rtol=0, atol=1e-4
            )


def test_gzip_is_recognised_by_content_not_by_name(tmp_path: Path) -> None:
    plain = load(write(tmp_path))
    packed = load(write(tmp_path, gzip.compress(idx(IMAGES)), gzip.compress(idx(LABELS))))
    assert torch.equal(plain.train.tensors[0], packed.train.tensors[0])


def test_a_test_file_is_used_instead_of_a_split(tmp_path: Path) -> None:
    write(tmp_path)
    path, labels = str(tmp_path / "images"), str(tmp_path / "labels")
    config = DataConfig(
        kind="idx",
        path=path,
        labels_path=labels,
        classes=10,
        test_path=path,
        test_labels_path=labels,
    )
    assert (len(load(config).train), len(load(config).test)) == (10, 10)


@pytest.mark.parametrize("cut", range(0, 16 + 120, 9))
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, cut: int) -> None:
    whole = idx(IMAGES)
    assert cut < len(whole)
    with pytest.raises(Corrupt, match=r"images: .*(truncated|not an IDX file)"):
        load(write(tmp_path, images=whole[:cut]))


@pytest.mark.parametrize("cut", [2, 10, 40, -9, -1])
def test_a_gzip_file_cut_anywhere_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(Corrupt, match="images: gzip data is truncated or damaged"):
        load(write(tmp_path, images=gzip.compress(idx(IMAGES))[:cut]))


def test_a_flipped_byte_inside_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(idx(IMAGES)))
    packed[len(packed) // 2] ^= 1
    with pytest.raises(Corrupt, match="gzip data is truncated or damaged"):
        load(write(tmp_path, images=bytes(packed)))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, None, "images: not an IDX file of unsigned bytes"),
        (b"", None, "images: not an IDX file"),
        (idx(IMAGES, kind=0x0D), None, "images: not an IDX file of unsigned bytes"),
        (idx(LABELS), None, "images: holds an array of 1 dimensions, expected 3"),
        (None, idx(IMAGES), "labels: holds an array of 3 dimensions, expected 1"),
        (
            idx(IMAGES) + b"\0",
            None,
            "images: too long: the header announces 120 bytes of data, the file holds 121",
        ),
        (None, idx(LABELS[:9]), "labels: holds 9 labels, but .*images holds 10 images"),
        (None, idx(LABELS + 1), r"labels\[9\]: got 'a value outside'; must be a class from 0 to 9"),
    ],
)
def test_foreign_or_inconsistent_files_are_refused_in_one_line(
    tmp_path: Path, images: bytes | None, labels: bytes | None, message: str
) -> None:
    with pytest.raises(DpfyError, match=message) as caught:
        load(write(tmp_path, images, labels))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named_as_the_user_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        load(DataConfig(kind="idx", path="nowhere/images", labels_path="labels", classes=10))
    assert str(caught.value) == "data file: got 'nowhere/images'; does not exist"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a folder"):
        load(DataConfig(kind="idx", path=str(tmp_path), labels_path=str(tmp_path), classes=10))


def well_known(folder: Path, kind: str) -> None:
    (folder / kind).mkdir()
    for prefix in ("train", "t10k"):
        (folder / kind / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES)))
        (folder / kind / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(LABELS))


@pytest.mark.parametrize("kind", ["mnist", "fashion-mnist"])
def test_well_known_sets_are_found_by_folder_and_by_environment(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    well_known(tmp_path, kind)
    monkeypatch.delenv("DPFY_DATA", raising=False)
    by_argument, by_config = (
        load(kind, data_dir=tmp_path),
        load(DataConfig(kind=kind, dir=str(tmp_path))),
    )
    monkeypatch.setenv("DPFY_DATA", str(tmp_path))
    by_environment = load(kind)
    for source in (by_argument, by_config, by_environment):
        assert (len(source.train), len(source.test)) == (10, 10)
        assert str(tmp_path) not in source.description
        assert str(tmp_path) not in repr(source)


def test_errors_below_the_environment_folder_do_not_print_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFY_DATA", str(tmp_path))
    with pytest.raises(InvalidInput) as caught:
        load("mnist")
    assert (
        str(caught.value)
        == "data file: got '$DPFY_DATA/mnist/train-images-idx3-ubyte.gz'; does not exist"
    )


def test_without_a_folder_the_error_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPFY_DATA", raising=False)
    with pytest.raises(
        InvalidInput,
        match=r"data.dir: got None; give the data folder in data.dir or in .* DPFY_DATA",
    ):
        load("mnist")
