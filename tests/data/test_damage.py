"""Whatever bytes a file holds, loading it gives records or one typed, one-line error: never another
exception.
"""

from __future__ import annotations

import gzip
import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.files import DataFile
from dpfy.data import DataConfig
from dpfy.data.source import load

ROUNDS = 150
SCHEMA = (
    '[columns.a]\nkind = "number"\nrange = [0, 9]\n[columns.b]\nkind = "label"\nclasses = ["x", '
    '"y"]\n'
)


def npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.arange(20.0).reshape(10, 2), y=np.arange(10) % 2)
    return out.getvalue()


def parquet() -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table({"a": [1.0, 2.0, 3.0] * 5, "b": ["x", "y", "x"] * 5}), out
    )
    return out.getvalue()


def csv() -> bytes:
    return b"a,b\n" + b'1,x\n2.5,"y"\n' * 6


def idx() -> bytes:
    return bytes([0, 0, 8, 3]) + struct.pack(">3I", 4, 2, 2) + bytes(range(16))


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    """Flip, insert, delete or cut at random places."""
    data = bytearray(content)
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(0, len(data) + 1))
        match int(rng.integers(0, 4)):
            case 0 if place < len(data):
                data[place] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case 2:
                del data[place : place + int(rng.integers(1, 9))]
            case 3 if rng.random() < 0.3:
                del data[place:]
    return bytes(data)


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("kind", "make"), [("npz", npz), ("parquet", parquet), ("csv", csv), ("idx", idx)]
)
def test_damage_gives_records_or_a_typed_error(
    tmp_path: Path, kind: str, make: Callable[[], bytes], compressed: bool
) -> None:
    rng = np.random.default_rng(sum(kind.encode()) + compressed)
    file, labels, schema = tmp_path / "file", tmp_path / "labels", tmp_path / "schema.toml"
    schema.write_text(SCHEMA)
    labels.write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", 4) + bytes([0, 1, 0, 1]))
    config = {
        "idx": DataConfig(kind="idx", path=str(file), labels_path=str(labels), classes=2),
        "npz": DataConfig(kind="npz", path=str(file), classes=2),
        "csv": DataConfig(kind="csv", path=str(file), schema=str(schema)),
        "parquet": DataConfig(kind="parquet", path=str(file), schema=str(schema)),
    }[kind]
    whole = gzip.compress(make()) if compressed else make()
    file.write_bytes(whole)
    load(config)
    said = []
    for _ in range(ROUNDS):
        file.write_bytes(mutated(whole, rng))
        try:
            load(config)
        except DpfyError as error:
            said.append(str(error))
    assert len(said) > ROUNDS // 5
    assert not [message for message in said if "\n" in message]


def test_a_damaged_schema_gives_a_schema_or_a_typed_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    (tmp_path / "file").write_bytes(csv())
    config = DataConfig(
        kind="csv", path=str(tmp_path / "file"), schema=str(tmp_path / "schema.toml")
    )
    said = []
    for _ in range(2 * ROUNDS):
        (tmp_path / "schema.toml").write_bytes(mutated(SCHEMA.encode(), rng))
        try:
            load(config)
        except DpfyError as error:
            said.append(str(error))
    assert len(said) > ROUNDS
    assert not [message for message in said if "\n" in message]


def test_a_small_file_is_not_unpacked_into_a_huge_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed run of zeros, as gzip and as NPZ: refused by its size, not by the memory of the
    machine.
    """
    from dpfy.core import files

    monkeypatch.setattr(files, "unpacked", lambda packed: 1 << 20)
    monkeypatch.setattr("dpfy.data.arrays.unpacked", lambda packed: 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(2 << 20)))
    with pytest.raises(InvalidInput, match="unpacks to more than 1048576 bytes"):
        DataFile(tmp_path / "bomb.gz", "bomb.gz").read()
    np.savez_compressed(
        tmp_path / "bomb.npz", x=np.zeros((2 << 18, 1)), y=np.zeros(2 << 18, dtype=np.int64)
    )
    with pytest.raises(InvalidInput, match="too many for its size"):
        load(DataConfig(kind="npz", path=str(tmp_path / "bomb.npz"), classes=2))
    assert files.unpacked(3 << 20) <= 1 << 20


def test_honest_compression_is_within_the_limit() -> None:
    from dpfy.core import files

    assert files.unpacked(3 << 20) == 600 << 20
    assert files.unpacked(1 << 40) == 2 << 30


def test_pipes_devices_and_links_to_nothing_are_refused_at_once(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, words in (
        (tmp_path / "pipe", "is a pipe"),
        (Path("/dev/zero"), "is a device"),
        (Path("/dev/full"), "is a device"),
        (tmp_path / "loop", "cannot be read"),
        (tmp_path / ("a" * 300), "too long"),
        (tmp_path / "a\0b", "is not the name of a file"),
    ):
        with pytest.raises(InvalidInput, match=words):
            DataFile(path, "it").read()
