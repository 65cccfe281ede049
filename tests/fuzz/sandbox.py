"""A folder with everything a command line can name: runs, cards, ledgers, data, a user's own files,
and what is no file at all.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

SMALL = [
    "--data",
    "digits",
    "--records",
    "1438",
    "--model",
    "linear",
    "--delta",
    "1e-4",
    "--batch-size",
    "40",
    "--steps",
    "3",
]
SCHEMA = (
    '[columns.a]\nkind = "number"\nrange = [0, 9]\n[columns.b]\nkind = "category"\ncategories = '
    '["u", "v"]\n'
    '[columns.c]\nkind = "label"\nclasses = ["x", "y"]\n'
)
JOB = (
    '[data]\nkind = "csv"\npath = "data.csv"\nschema = "schema.toml"\ntest_path = '
    '"test.csv"\n[model]\nname = "mlp"\nhidden = [4]\n'
    "[privacy]\nrecords = 30\nepsilon = 2.0\ndelta = 1e-3\n[training]\nsteps = 2\nbatch_size = "
    "10\nlearning_rate = 0.1\n"
    "[runtime]\nmax_physical_batch = 16\n"
)
PHASES = (
    "[[phase]]\nnoise_multiplier = 1.0\nsampling_rate = 0.01\nsteps = "
    "20\n\n[[phase]]\nnoise_multiplier = 4\nsteps = 3\n"
)


def main(*arguments: str) -> int:
    """The exit status of a command line, in this process."""
    from dpfy.cli.app import main as dpfy

    try:
        dpfy(list(arguments))
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("main returns by SystemExit")


def build(place: Path) -> Path:
    """Make the pristine sandbox at `place`."""
    import torch

    torch.set_num_threads(1)
    place.mkdir(parents=True)
    here = Path.cwd()
    os.chdir(place)
    try:
        data(place)
        assert main("train", *SMALL, "--epsilon", "3", "--insecure-seed", "1", "--out", "run") == 0
        assert (
            main(
                "train",
                *SMALL,
                "--epsilon",
                "2",
                "--out",
                "other",
                "--ledger",
                "people.jsonl",
                "--budget",
                "9",
            )
            == 0
        )
        audit = [
            "--attack",
            "final-model",
            "--canaries",
            "40",
            "--data",
            "digits",
            "--model",
            "linear",
            "--steps",
            "3",
        ]
        assert main("audit", "train", *audit, "--out", "audited", "--insecure-seed", "1") in (0, 1)
        assert main("sign", "--new-key", "key.pem") == 0
        assert main("sign", "other", "--key", "key.pem") == 0
        interrupted()
        shutil.copy("run/privacy.json", "card.json")
    finally:
        os.chdir(here)
    return place


def interrupted() -> None:
    """A run that stopped at its third step, with a checkpoint of the second."""
    import torch

    before, count = torch.optim.SGD.step, [0]

    def step(self: Any, *arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] > 2:
            raise KeyboardInterrupt
        return before(self, *arguments, **named)

    torch.optim.SGD.step = step  # type: ignore[method-assign]
    try:
        main(
            "train",
            *SMALL,
            "--steps",
            "6",
            "--set",
            "runtime.checkpoint_every=0",
            "--epsilon",
            "3",
            "--out",
            "unfinished",
        )
    finally:
        torch.optim.SGD.step = before  # type: ignore[method-assign]
    assert (Path("unfinished") / "checkpoint").is_dir()


def data(place: Path) -> None:
    """The same 30 records in every format, and configurations."""
    rows = [f"{k % 10},{'uv'[k % 2]},{'xy'[k // 3 % 2]}" for k in range(30)]
    for name in ("data.csv", "test.csv"):
        (place / name).write_text("a,b,c\n" + "\n".join(rows) + "\n")
    (place / "data.csv.gz").write_bytes(gzip.compress((place / "data.csv").read_bytes()))
    (place / "schema.toml").write_text(SCHEMA)
    (place / "job.toml").write_text(JOB)
    (place / "phases.toml").write_text(PHASES)
    (place / "images.idx").write_bytes(struct.pack(">IIII", 2051, 30, 4, 4) + bytes(range(16)) * 30)
    (place / "labels.idx").write_bytes(
        struct.pack(">II", 2049, 30) + bytes(k % 3 for k in range(30))
    )
    arrays = io.BytesIO()
    np.savez_compressed(arrays, x=np.arange(90.0).reshape(30, 3), y=np.arange(30) % 2)
    (place / "arrays.npz").write_bytes(arrays.getvalue())
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    columns = list(zip(*(row.split(",") for row in rows), strict=True))
    table = {"a": [int(v) for v in columns[0]], "b": columns[1], "c": columns[2]}
    pyarrow.parquet.write_table(pyarrow.table(table), place / "table.parquet")


def hostile(place: Path) -> None:
    """What a path may turn out to be; and files of a user that no run may touch."""
    (place / "dangling").symlink_to("nowhere")
    (place / "loop").symlink_to("loop")
    (place / "linked").symlink_to("folder")
    (place / "outside.svg").symlink_to("mine/notes.txt")
    os.mkfifo(place / "pipe")
    os.mkfifo(place / "pipe.svg")
    (place / "folder").mkdir()
    (place / "folder" / "kept.txt").write_text("kept")
    (place / "empty").mkdir()
    (place / "mine" / "checkpoint").mkdir(parents=True)
    (place / "mine" / "checkpoint" / "epoch10.pt").write_text("weeks of work")
    (place / "mine" / "notes.txt").write_text("notes")
    (place / "mine.svg").write_text("my own drawing")
    (place / "other-config").mkdir()
    (place / "other-config" / "config.toml").write_text("of another program")
    (place / "dotted").mkdir()
    (place / "dotted" / ".gitignore").write_text("*")
    (place / "closed").write_text("closed")
    (place / "closed").chmod(0)
    (place / "shut").mkdir()
    (place / "shut").chmod(0)
    Path(os.fsdecode(os.fsencode(place) + b"/\xff\xfe.toml")).write_text(PHASES)
    (place / "a b\nc").write_text("name of two lines")
    (place / "\x1b[2Jred.toml").write_text("[data]\n")


def copy(pristine: Path, place: Path) -> Path:
    """A fresh sandbox at `place`, in place of what is there."""
    if place.exists():
        for folder, names, _ in os.walk(place):
            for name in names:
                if not os.path.islink(os.path.join(folder, name)):
                    os.chmod(os.path.join(folder, name), 0o700)
        shutil.rmtree(place)
    shutil.copytree(pristine, place, symlinks=True)
    hostile(place)
    return place
