"""Images: CIFAR in every published layout, folders of images, and views of them."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpfy
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.data.config import DataConfig
from dpfy.data.images import ImageFolder, augmented
from dpfy.data.source import load

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
LABELS = [int(v) for v in RNG.integers(0, 10, 12)]
PARTS = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]


def rows(part: int) -> tuple[np.ndarray, list[int]]:
    return IMAGES[2 * part : 2 * part + 2], LABELS[2 * part : 2 * part + 2]


def binary(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(PARTS):
        pixels, labels = rows(number)
        table = np.concatenate([np.array(labels, np.uint8)[:, None], pixels.reshape(2, -1)], 1)
        (folder / f"{name}.bin").write_bytes(table.tobytes())


def pickled(folder: Path, protocol: int = 2) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(PARTS):
        pixels, labels = rows(number)
        batch = {"data": pixels.reshape(2, -1), "labels": labels, "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol))


def encoded(pixels: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(out, "PNG")
    return out.getvalue()


def parquet(folder: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for name, start, end in (("train", 0, 10), ("test", 10, 12)):
        images = [{"bytes": encoded(p), "path": None} for p in IMAGES[start:end]]
        table = pa.table({"img": images, "label": LABELS[start:end]})
        pq.write_table(table, folder / f"{name}-00000-of-00001.parquet")


def same(folder: Path) -> None:
    source = load("cifar10", data_dir=folder)
    (x, y), (test_x, test_y) = source.train.tensors, source.test.tensors
    torch.testing.assert_close(
        torch.cat([x, test_x]) * 255, torch.from_numpy(IMAGES).float(), atol=1e-4, rtol=0
    )
    assert torch.cat([y, test_y]).tolist() == LABELS
    assert (source.features, source.classes, len(x)) == ((3, 32, 32), 10, 10)


@pytest.mark.parametrize("inside", ["", "cifar10"])
def test_the_binary_layout(tmp_path: Path, inside: str) -> None:
    binary(tmp_path / inside / "cifar-10-batches-bin")
    same(tmp_path)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_the_python_layout_by_every_protocol(tmp_path: Path, protocol: int) -> None:
    pickled(tmp_path / "cifar-10-batches-py", protocol)
    same(tmp_path)


def test_the_parquet_files_of_hugging_face(tmp_path: Path) -> None:
    parquet(tmp_path / "cifar10" / "plain_text")
    same(tmp_path)


def test_cifar100_has_fine_classes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, start, end in (("train", 0, 9), ("test", 9, 12)):
        fine = np.arange(start, end, dtype=np.uint8)[:, None] + 80
        table = np.concatenate([fine % 20, fine, IMAGES[start:end].reshape(end - start, -1)], 1)
        (folder / f"{name}.bin").write_bytes(table.tobytes())
    source = load("cifar100", data_dir=tmp_path)
    assert source.classes == 100
    assert source.train.tensors[1].tolist() == list(range(80, 89))


def test_without_the_data_one_line_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no CIFAR-10: expected cifar-10-batches-bin/"):
        load("cifar10", data_dir=tmp_path)


class Runs:
    """What a hostile pickle is: an object that runs a command where it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_pickle_that_names_functions_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled(tmp_path / "cifar-10-batches-py")
    for hostile in ({"data": Runs(), "labels": []}, {"data": np.array([Runs()], object)}):
        (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(hostile))
        with pytest.raises(Corrupt, match=r"data_batch_3: not a (pickled )?batch"):
            load("cifar10", data_dir=tmp_path)
    assert not (tmp_path / "ran").exists()


@settings(max_examples=60, deadline=None)
@given(layout=st.sampled_from([binary, pickled]), data=st.data())
def test_a_damaged_file_is_one_line_that_shows_no_pixel(
    tmp_path_factory: pytest.TempPathFactory, layout: Any, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    layout(folder / ("cifar-10-batches-bin" if layout is binary else "cifar-10-batches-py"))
    target = sorted(folder.rglob("*batch*_2*"))[0]
    content = bytearray(target.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    target.write_bytes(bytes(content))
    words, labels = "", []
    try:
        labels = load("cifar10", data_dir=folder).train.tensors[1].tolist()
    except DpfyError as problem:
        words = str(problem)
    assert "\n" not in words
    assert len(words) < 300
    assert bool(words) != bool(labels)
    assert all(0 <= label < 10 for label in labels)


def test_a_class_beyond_the_last_is_refused(tmp_path: Path) -> None:
    binary(tmp_path / "cifar-10-batches-bin")
    target = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    target.write_bytes(b"\x0a" + target.read_bytes()[1:])
    with pytest.raises(DpfyError, match="test_batch"):
        load("cifar10", data_dir=tmp_path)


def test_a_bad_folder_spends_nothing(tmp_path: Path) -> None:
    from dpfy.cli.app import main

    with pytest.raises(SystemExit) as ended:
        main(["train", "cifar10", "--data-dir", str(tmp_path), "--model", "linear", "--steps", "2",
              "--out", str(tmp_path / "run")])  # fmt: skip
    assert ended.value.code == 2
    assert not (tmp_path / "run").exists()


def test_training_on_cifar_from_the_command_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    table = rng.integers(0, 256, (10_000, 3073), dtype=np.uint8)
    table[:, 0] %= 10
    for name in PARTS:
        (folder / f"{name}.bin").write_bytes(table.tobytes())
        table = table[:, ::-1].copy()
        table[:, 0] %= 10
        table = rng.permuted(table, axis=0)
        table[:, 0] %= 10
    from dpfy.cli.app import main

    with pytest.raises(SystemExit) as ended:
        main(["train", "cifar10", "--data-dir", str(tmp_path), "--model", "linear", "--steps", "2",
              "--batch-size", "50", "--out", str(tmp_path / "run")])  # fmt: skip
    assert ended.value.code == 0
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))


def folder_of(place: Path, count: int = 6) -> Path:
    from PIL import Image

    for name in ("cat", "dog"):
        (place / name).mkdir(parents=True)
        for number in range(count):
            pixels = RNG.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / name / f"{number}.png")
    (place / "cat" / "notes.txt").write_text("no image")
    return place


def test_a_folder_of_images_is_read_one_by_one_when_drawn(tmp_path: Path) -> None:
    images = ImageFolder(folder_of(tmp_path / "pets"), ["dog", "cat"], 16)
    assert len(images) == 12
    assert [images[n][1] for n in range(12)] == [0] * 6 + [1] * 6
    assert all(images[n][0].shape == (3, 16, 16) for n in range(12))
    (tmp_path / "pets" / "dog" / "2.png").write_bytes(b"no image")
    images[1]  # the broken file is another record's
    with pytest.raises(Corrupt, match=r"^image 2: not an image that can be read$"):
        images[2]
    assert "dog" not in repr(images)


@pytest.mark.parametrize("classes", [["cat", "cat"], "cat", [], ["cat", "../cat"], ["cat", "cow"]])
def test_classes_are_named_and_not_found(tmp_path: Path, classes: Any) -> None:
    with pytest.raises(InvalidInput, match="classes"):
        ImageFolder(folder_of(tmp_path / "pets"), classes, 16)


def test_training_on_a_folder_with_views(tmp_path: Path) -> None:
    images = ImageFolder(folder_of(tmp_path / "pets"), ["cat", "dog"], 8, flip=True, shift=2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
    plan = dpfy.dpsgd(records=12, batch_size=6, steps=3).calibrate(3.0, 1e-3)
    result = dpfy.fit(
        model,
        dpfy.lazy(images, views=3),
        plan=plan,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        run=tmp_path / "run",
    )
    assert all(finding.holds for finding in dpfy.verify(result.run))


def test_a_folder_by_configuration(tmp_path: Path) -> None:
    folder_of(tmp_path / "pets")
    config = DataConfig(
        kind="images",
        path=str(tmp_path / "pets"),
        names=("cat", "dog"),
        size=16,
        test_fraction=0.25,
    )
    source = load(config)
    assert (len(source.train), len(source.test), source.features) == (9, 3, (3, 16, 16))
    for wrong in ({"names": ("cat",)}, {"size": 1}, {"names": ("cat", 3)}):
        with pytest.raises(InvalidInput):
            DataConfig(**{"kind": "images", "path": "x", "names": ("a", "b"), "size": 8} | wrong)


def test_views_are_of_one_image_and_drawn_by_the_key() -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 3, 8, 8) + torch.arange(8) / 10
    records = augmented(images.contiguous(), torch.arange(5), views=8, shift=2)
    seen, labels = records.take(torch.tensor([3, 1]))
    assert labels.tolist() == [[3] * 8, [1] * 8]
    assert set(seen[0].floor().unique().tolist()) == {3.0}
    assert len({view.numpy().tobytes() for view in seen[0]}) > 1
    again, _ = records.take(torch.tensor([3, 1]))
    assert torch.equal(seen, again)
    with pytest.raises(InvalidInput):
        augmented(images, torch.arange(4))
