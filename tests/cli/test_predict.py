"""`dpfy predict` as a user meets it: the answers of the released model, and one line for whatever
is wrong with run or records.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpfy
from dpfy.cli.app import main
from dpfy.data import source

sys.path.insert(0, str(Path(__file__).parent))
from test_train import call, refused

SCHEMA = """
# a comment that nobody is to read
[columns.age]
kind = "number"
range = [0, 100]
[columns.job]
kind = "category"
categories = ["clerk", "nurse"]
[columns.note]
ignore = true
[columns.income]
kind = "label"
classes = ["low", "high"]
"""


def row(number: int) -> str:
    return f"{number % 100},{('clerk', 'nurse')[number % 2]},x,{('low', 'high')[number % 100 > 50]}"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A finished run on a table of 100 people."""
    place = tmp_path_factory.mktemp("table")
    (place / "schema.toml").write_text(SCHEMA)
    (place / "people.csv").write_text(
        "\n".join(["age,job,note,income", *map(row, range(100))]) + "\n"
    )
    words = [
        "--set",
        "data.kind=csv",
        "--set",
        f"data.path={place / 'people.csv'}",
        "--set",
        f"data.schema={place / 'schema.toml'}",
    ]
    more = [
        "--records",
        "80",
        "--delta",
        "1e-3",
        "--model",
        "linear",
        "--steps",
        "3",
        "--batch-size",
        "20",
    ]
    with pytest.raises(SystemExit) as stop:
        main(["train", *words, *more, "--out", str(place / "run"), "--json"])
    assert stop.value.code == 0
    return place


def test_a_table_is_predicted_by_the_schema_that_the_run_keeps(table, capsys, tmp_path):
    assert all(f.holds for f in dpfy.verify(table / "run"))
    assert "comment" not in (table / "run" / "schema.toml").read_text()
    (tmp_path / "new.csv").write_text(
        "job,age\nclerk,10\nnurse,90\nnobody,200\n"
    )  # no label, other order, two values outside
    status, out, err = call(capsys, "predict", table / "run", tmp_path / "new.csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0
    assert [set(r) for r in rows] == [{"prediction", "probability low", "probability high"}] * 3
    model = dpfy.load(table / "run")
    due = model(torch.tensor([[-0.8, 1, 0], [0.8, 0, 1], [1, 0, 0]])).softmax(1)
    assert [float(r["probability high"]) for r in rows] == pytest.approx(
        due[:, 1].tolist(), abs=1e-6
    )
    assert [r["prediction"] for r in rows] == [("low", "high")[i] for i in due.argmax(1).tolist()]
    assert "post-processing" in err
    status, out, _ = call(capsys, "predict", table / "run", tmp_path / "new.csv", "--json")
    told = json.loads(out)
    assert (status, told["records"], told["classes"]) == (0, 3, ["low", "high"])
    assert "post-processing" in told["note"]
    for name in ("found.csv", "found.json"):
        assert (
            call(capsys, "predict", table / "run", tmp_path / "new.csv", "--out", tmp_path / name)[
                0
            ]
            == 0
        )
    assert json.loads((tmp_path / "found.json").read_text())["predictions"] == told["predictions"]
    assert len((tmp_path / "found.csv").read_text().splitlines()) == 4


BAD = [
    ("age\n3\n", "new.csv: column: got 'job'; is in the schema but not in the file"),
    (
        "age,job,shoes\n3,clerk,44\n",
        "new.csv: column: got 'shoes'; is in the file but not in the schema",
    ),
    ("age,job\n", "must hold at least 1 row after the header"),
    ("", "new.csv"),
]


def test_a_cell_that_does_not_fit_is_the_middle_or_nothing(table, capsys, tmp_path):
    odd = ["old,clerk", ",clerk", "nan,clerk", "$1,clerk", "3", "inf,pilot"]
    (tmp_path / "new.csv").write_text("\n".join(["age,job", *odd, ""]))
    status, out, _ = call(capsys, "predict", table / "run", tmp_path / "new.csv", "--json")
    assert (status, json.loads(out)["records"]) == (0, len(odd))


@pytest.mark.parametrize(("text", "words"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_a_bad_table_is_one_line(table, capsys, tmp_path, text, words):
    (tmp_path / "new.csv").write_text(text)
    assert words in refused(capsys, "predict", table / "run", tmp_path / "new.csv")


def test_a_bad_run_or_place_is_one_line(table, capsys, tmp_path):
    (tmp_path / "new.csv").write_text("age,job\n3,clerk\n")
    assert "is not a folder" in refused(capsys, "predict", tmp_path / "none", tmp_path / "new.csv")
    assert "holds no dpfy run" in refused(capsys, "predict", tmp_path, tmp_path / "new.csv")
    assert "none.csv" in refused(capsys, "predict", table / "run", tmp_path / "none.csv")
    (tmp_path / "there.csv").write_text("")
    for out, words in (
        ("there.csv", "is there already"),
        ("no/where.csv", "in a folder that exists"),
    ):
        assert words in refused(
            capsys, "predict", table / "run", tmp_path / "new.csv", "--out", tmp_path / out
        )
    inside = refused(
        capsys, "predict", table / "run", tmp_path / "new.csv", "--out", table / "run" / "found.csv"
    )
    assert "outside of the run folder" in inside
    for name in ("schema.toml", "config.toml", "model.safetensors"):
        shutil.copytree(table / "run", tmp_path / name)
        with (tmp_path / name / name).open("ab") as file:
            file.write(b"\n")
        assert f"{name}: does not have the hash" in refused(
            capsys, "predict", tmp_path / name, tmp_path / "new.csv"
        )
    shutil.copytree(table / "run", tmp_path / "unfinished")
    (tmp_path / "unfinished" / "privacy.json").unlink()
    assert "is unfinished" in refused(
        capsys, "predict", tmp_path / "unfinished", tmp_path / "new.csv"
    )


def test_images_are_predicted_from_arrays_and_from_a_table_of_pixels(capsys, tmp_path):
    more = [
        "--data",
        "digits",
        "--model",
        "mlp",
        "--delta",
        "1e-4",
        "--batch-size",
        "100",
        "--steps",
        "2",
    ]
    assert call(capsys, "train", *more, "--out", tmp_path / "run", "--json")[0] == 0
    held = source.load("digits").test.tensors[0][:5]
    pixels = (held * 16).round().numpy()
    np.savez(tmp_path / "x.npz", x=pixels)
    lines = [",".join(["label", *(f"p{n}" for n in range(64))])]
    lines += [",".join(["0", *(f"{v:g}" for v in image.ravel())]) for image in pixels]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    due = dpfy.load(tmp_path / "run")(held).softmax(1)
    for name in ("x.npz", "x.csv"):
        found = dpfy.predict(tmp_path / "run", tmp_path / name)
        assert torch.allclose(found.probabilities, due, atol=1e-6)
        assert found.classes == tuple("0123456789")
    np.savez(tmp_path / "wide.npz", x=np.zeros((2, 1, 9, 9)))
    assert "shape [1, 9, 9]" in refused(capsys, "predict", tmp_path / "run", tmp_path / "wide.npz")
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 1, 8, 8)))
    assert "at least 1 record" in refused(
        capsys, "predict", tmp_path / "run", tmp_path / "none.npz"
    )
    np.savez(tmp_path / "nan.npz", x=np.full((1, 1, 8, 8), np.nan))
    assert "NaN or infinity" in refused(capsys, "predict", tmp_path / "run", tmp_path / "nan.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), allow_pickle=True)
    assert "pickled" in refused(capsys, "predict", tmp_path / "run", tmp_path / "objects.npz")
    (tmp_path / "few.csv").write_text("a,b\n1,2\n")
    assert "few.csv: columns: got 2; must be 64" in refused(
        capsys, "predict", tmp_path / "run", tmp_path / "few.csv"
    )
