"""Shards on disk by record number: tables and tar files, with what is in memory bounded."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.data.given import as_source
from dpfy.data.lazy import LazyRecords
from dpfy.data.mapped import MappedArrays
from dpfy.data.shards import TableShards, TarShards

ROWS = 100
X = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
Y = np.arange(ROWS) % 7
DRAWN = [99, 0, 41, 41, 7, 50]


def table(rows: slice = slice(None)) -> pa.Table:
    return pa.table(
        {"x": X[rows].tolist(), "y": Y[rows], "z": X[rows, 1]},
        pa.schema({"x": pa.list_(pa.float32()), "y": pa.int64(), "z": pa.float32()}),
    )


def parquet(folder: Path) -> list[Path]:
    for part, rows in enumerate((slice(0, 60), slice(60, None))):
        pyarrow.parquet.write_table(table(rows), folder / f"{part}.parquet", row_group_size=16)
    return [folder / "0.parquet", folder / "1.parquet"]


def arrow(folder: Path) -> Path:
    with (
        pa.OSFile(str(folder / "0.arrow"), "wb") as file,
        pa.ipc.new_file(file, table().schema) as writer,
    ):
        for batch in table().to_batches(max_chunksize=32):
            writer.write_batch(batch)
    return folder


@pytest.mark.parametrize("form", [parquet, arrow])
def test_rows_of_a_table_in_any_order_and_from_any_shard(form, tmp_path: Path) -> None:
    records = as_source(TableShards(form(tmp_path)))
    assert isinstance(records, LazyRecords)
    assert len(records) == ROWS
    batch = records.take(torch.tensor(DRAWN))
    assert torch.equal(batch["x"], torch.from_numpy(X[DRAWN]))
    assert batch["y"].tolist() == Y[DRAWN].tolist()
    assert list(TableShards(form(tmp_path), columns=["z"]).rows(DRAWN)) == ["z"]
    assert TableShards(form(tmp_path))[5]["z"] == X[5, 1]


def test_decoded_row_groups_are_bounded_and_stay_in_their_process(tmp_path: Path) -> None:
    group = 16 * (3 * 4 + 8 + 4)
    shards = TableShards(parquet(tmp_path), cache=2 * group)
    for _ in range(2):
        shards.rows(list(range(ROWS)))
        assert len(shards._kept) == 2
    assert len(pickle.dumps(shards)) < 2000


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array(["anna"] * 4), "column c: got 'string'; must be numbers"),
        (pa.array([1, None, 2, 3]), "column c: got 'a missing value'"),
        (pa.array([[1], [1, 2], [1], [1, 2, 3, 4]]), "column c: got 'lists of several lengths'"),
    ],
)
def test_a_column_that_is_no_tensor_is_refused_without_a_value(
    column: pa.Array, message: str, tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pa.table({"c": column}), tmp_path / "0.parquet")
    with pytest.raises(InvalidInput, match=message) as caught:
        TableShards(tmp_path).rows([0])
    assert "anna" not in str(caught.value)


def test_damaged_and_missing_shards_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(Corrupt, match=r"0.parquet: is no Parquet file"):
        TableShards(tmp_path / "0.parquet")
    (tmp_path / "0.tar").write_bytes(b"x" * 2000)
    with pytest.raises(Corrupt, match=r"0.tar: is no tar file without compression"):
        TarShards(tmp_path / "0.tar")
    with pytest.raises(InvalidInput, match="there is no such file"):
        TarShards(tmp_path / "1.tar")
    with pytest.raises(InvalidInput, match=r"must end in one of .tar"):
        TarShards(tmp_path / "0.parquet")


def tar(folder: Path) -> Path:
    path = folder / "0.tar"
    with tarfile.open(path, "w") as held:
        for number in range(20):
            image = io.BytesIO()
            Image.fromarray(np.full((4, 5), number, np.uint8)).save(image, "PNG")
            for ending, content in (("png", image.getvalue()), ("cls", str(number % 3).encode())):
                about = tarfile.TarInfo(f"people/{number:04}.{ending}")
                about.size = len(content)
                held.addfile(about, io.BytesIO(content))
    return path


def test_samples_of_a_tar_file_by_number(tmp_path: Path) -> None:
    records = as_source(TarShards(tar(tmp_path)))
    batch = records.take(torch.tensor([19, 0, 4]))
    assert batch["png"].shape == (3, 1, 4, 5)
    assert batch["png"][:, 0, 0, 0].tolist() == [19, 0, 4]
    assert batch["cls"].tolist() == [1, 0, 1]
    own = TarShards(tmp_path, decode=lambda parts: torch.tensor(int(parts["cls"])))
    assert as_source(own).take(torch.tensor([5])).tolist() == [2]
    with tarfile.open(tmp_path / "0.tar", "a") as held:
        held.addfile(tarfile.TarInfo("people/0021.txt"))
    with pytest.raises(Unsupported, match=r"a part of a sample that ends in .txt"):
        TarShards(tmp_path)[20]


def test_memory_mapped_arrays_keep_their_structure_and_let_pages_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpfy.data import mapped

    np.save(tmp_path / "x.npy", X)
    held = np.load(tmp_path / "x.npy", mmap_mode="r")
    arrays = MappedArrays({"in": [held], "y": Y.astype(">i4")})
    batch = arrays.rows(DRAWN)
    assert torch.equal(batch["in"][0], torch.from_numpy(X[DRAWN]))
    assert batch["y"].tolist() == Y[DRAWN].tolist()
    assert torch.equal(arrays[3]["in"][0], torch.from_numpy(X[3]))
    stored = pickle.dumps(
        MappedArrays(np.lib.format.open_memmap(tmp_path / "big.npy", "w+", np.uint8, (10_000, 100)))
    )
    assert len(stored) < 5000, "a process that is spawned maps the file itself"
    assert len(pickle.loads(stored)) == 10_000
    again = pickle.loads(pickle.dumps(arrays))
    assert torch.equal(again.rows(DRAWN)["in"][0], batch["in"][0])
    part = pickle.loads(pickle.dumps(MappedArrays(held[10:20])))
    assert torch.equal(part.rows([3])[0], torch.from_numpy(X[[13]]))
    assert arrays._read > 0
    monkeypatch.setattr(mapped, "KEPT", 1)
    assert torch.equal(arrays.rows(DRAWN)["in"][0], torch.from_numpy(X[DRAWN]))
    assert arrays._read == 0, "let go"
    assert torch.equal(arrays.rows(DRAWN)["in"][0], torch.from_numpy(X[DRAWN])), (
        "and come back when they are asked for"
    )
    with pytest.raises(InvalidInput, match="every array must have the same number of rows"):
        MappedArrays((held, Y[:5]))
    with pytest.raises(InvalidInput, match=r"train\[1\]: got 'array of <U1'"):
        MappedArrays((held, np.array(["a"] * ROWS)))
