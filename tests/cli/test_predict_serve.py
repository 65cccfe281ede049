"""`dpfy serve teach` and `serve` as a user meets them; the service itself is tested in
tests/prediction.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dpfy
from dpfy.cli import app
from dpfy.core.randomness import Randomness
from dpfy.prediction.voters import LinearVoters, load_voters


def call(capsys, *words) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app.main(["predict", *map(str, words)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def refused(capsys, *words) -> str:
    status, out, err = call(capsys, *words)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    return err


def test_help_names_the_verbs_and_the_short_form(capsys):
    with pytest.raises(SystemExit) as ended:
        app.main(["serve", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for word in ("teach", "start", "student"):
        assert word in out


def test_voters_are_made_from_data_by_name_and_from_a_file(capsys, tmp_path: Path):
    status, out, _ = call(
        capsys, "teach", "digits", "--voters", 7, "--out", tmp_path / "v", "--json"
    )
    assert status == 0
    assert json.loads(out) == {
        "voters": 7,
        "classes": 10,
        "features": 64,
        "out": str(tmp_path / "v"),
    }
    held, about = LinearVoters.load(tmp_path / "v")
    assert (held.count, held.features, about["labels"]) == (7, 64, [str(k) for k in range(10)])
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "a.npz", x=rng.normal(size=(40, 3)).astype(np.float32), y=rng.integers(0, 2, 40)
    )
    assert (
        call(
            capsys,
            "teach",
            tmp_path / "a.npz",
            "--classes",
            2,
            "--voters",
            4,
            "--out",
            tmp_path / "w",
        )[0]
        == 0
    )
    assert LinearVoters.load(tmp_path / "w")[0].classes == 2


@pytest.mark.parametrize("model", ["class-means", "linear"])
def test_all_rows_of_a_person_make_one_teacher(capsys, tmp_path: Path, model, monkeypatch):
    """The voters of a table of people: without one person, at most one voter is another."""
    monkeypatch.setattr(Randomness, "from_os", lambda: Randomness.for_tests(3))
    schema = tmp_path / "s.toml"
    schema.write_text(
        '[columns.who]\nignore = true\n[columns.a]\nkind = "number"\nrange = [0, 9]\n'
        '[columns.c]\nkind = "label"\nclasses = ["x", "y"]\n'
    )
    rows = [(f"p{k % 40}", k % 10, "xyz"[k // 3 % 3]) for k in range(400)]
    folders = []
    for left in (rows, [row for row in rows if row[0] != "p8"]):
        file = tmp_path / "people.csv"
        file.write_text("who,a,c\n" + "".join(f"{p},{a},{c}\n" for p, a, c in left))
        folders.append(tmp_path / f"v{len(folders)}")
        words = ["--schema", schema, "--person", "who", "--at-most", 5, "--voters", 8]
        words += ["--model", model, *(["--steps", 3] if model == "linear" else [])]
        assert call(capsys, "teach", file, *words, "--out", folders[-1])[0] == 0
    (one, about), (two, _) = map(load_voters, folders)
    assert about["most_records"] == 5
    pairs = (
        [(one.weights, two.weights), (one.biases, two.biases)]
        if model == "class-means"
        else [(one.weights[name], two.weights[name]) for name in one.weights]
    )
    axis = 1 if model == "class-means" else 0
    changed = set()
    for first, second in pairs:
        place = 0 if first.ndim == 2 and axis == 1 else axis
        differs = np.asarray(first != second)
        changed |= set(np.flatnonzero(differs.any(axis=tuple(set(range(differs.ndim)) - {place}))))
    assert len(changed) == 1
    run = tmp_path / "run"
    words = ["--answers", 3, "--epsilon", 1, "--finish", "--out", run, "--ledger", tmp_path / "l"]
    assert call(capsys, "serve", folders[0], *words)[0] == 0
    assert "for one user" in dpfy.Released.read(run).statement


def test_networks_are_voters_too(capsys, tmp_path: Path):
    words = ("--model", "mlp", "--steps", 3, "--batch-size", 8, "--learning-rate", 0.2)
    assert call(capsys, "teach", "digits", "--voters", 5, *words, "--out", tmp_path / "v")[0] == 0
    held, about = load_voters(tmp_path / "v")
    assert (type(held).__name__, held.count, held.features, len(about["labels"])) == (
        "NetworkVoters",
        5,
        64,
        10,
    )


def test_a_student_is_released_verified_and_predicts(capsys, tmp_path: Path):
    words = ("--teachers", 40, "--answers", 50, "--epsilon", 8, "--out", tmp_path / "run")
    status, out, _ = call(capsys, "student", "digits", *words, "--json")
    told = json.loads(out)
    assert (status, told["answered"], told["public_inputs"]) == (0, 50, 323)
    assert told["epsilon"] <= 8
    assert told["test_accuracy"] > 0.5
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    np.savez(tmp_path / "asked.npz", x=16 * np.ones((3, 8, 8), np.float32))
    status, out, _ = call(capsys, tmp_path / "run", tmp_path / "asked.npz", "--json")
    assert (status, json.loads(out)["records"]) == (0, 3)
    assert "finished run" in refused(
        capsys, "student", "fashion-mnist", *words[:4], "--out", tmp_path / "run"
    )


def test_a_student_that_cannot_be_is_refused_in_one_line_and_leaves_nothing(capsys, tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.ones((40, 3), np.float32), y=np.arange(40) % 2)
    run = ("--out", tmp_path / "run", "--answers", 5, "--teachers", 4)
    file = ("student", tmp_path / "a.npz", "--classes", 2, *run)
    for words, message in (
        (("student", "adult", *run), "use dpfy.prediction.train_student"),
        (file, "must be a file of public inputs"),
        ((*file, "--public", tmp_path / "a.npz"), "--provenance"),
        (("student", "digits", *run, "--provenance", "x"), "goes with --public FILE"),
        (("student", "digits", *run, "--public-records", 1000), "held-out records"),
        (("student", "digits", *run, "--public-records", 4), "number of public inputs"),
        (("student", "digits", *run, "--steps", 4), "goes with a network"),
        (("student", "digits", *run, "--model", "resnet"), "must be one of"),
        (("student", "digits", *run, "--epsilon", -1), "epsilon"),
        (("student", "digits", *run, "--queries", 3), "queries"),
        (("student", "digits", *run, "--resume"), "holds no run to resume"),
    ):
        assert message in refused(capsys, *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz"]


def test_bad_words_are_refused_in_one_line_and_leave_nothing(capsys, tmp_path: Path):
    (tmp_path / "there").mkdir()
    for words, message in (
        (("teach", "digits", "--out", tmp_path / "there"), "is there already"),
        (("teach", "digitz", "--out", tmp_path / "v"), "must be one of"),
        (("teach", "digits", "--voters", 1, "--out", tmp_path / "v"), "voters"),
        (("teach", "digits", "--shrink", -1, "--out", tmp_path / "v"), "shrink"),
        (("teach", tmp_path / "none.npz", "--classes", 2, "--out", tmp_path / "v"), "none.npz"),
        (("serve", tmp_path / "none", "--run", tmp_path / "run"), "voters"),
    ):
        assert message in refused(capsys, *words)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_a_service_says_what_it_needs(capsys, tmp_path: Path):
    assert call(capsys, "teach", "digits", "--voters", 5, "--out", tmp_path / "v")[0] == 0
    serve = ("serve", tmp_path / "v", "--run", tmp_path / "run")
    assert "must both be given" in refused(capsys, *serve, "--epsilon", 1)
    assert "epsilon" in refused(capsys, *serve, "--answers", 5, "--epsilon", 0)
    assert "delta" in refused(capsys, *serve, "--answers", 5, "--epsilon", 1, "--delta", 2)
    assert "threshold" in refused(
        capsys, *serve, "--answers", 5, "--epsilon", 1, "--queries", 9, "--threshold", 3
    )
    assert "answers" in refused(capsys, *serve, "--answers", 9, "--epsilon", 1, "--queries", 5)
    assert "port" in refused(capsys, *serve, "--answers", 5, "--epsilon", 1, "--port", 99999)
    assert "cannot be listened on" in refused(
        capsys, *serve, "--answers", 5, "--epsilon", 1, "--host", "nowhere.invalid"
    )
    assert not (tmp_path / "run").exists()


def people(folder: Path) -> Path:
    """40 people with 3 to 50 records each, as an NPZ file."""
    rng = np.random.default_rng(1)
    who = np.repeat([f"p{k:02d}" for k in range(40)], [50, 1, *rng.integers(3, 9, 38)])
    x = rng.normal(size=(len(who), 3)).astype(np.float32)
    y = rng.integers(0, 2, len(who))
    np.savez(folder / "people.npz", x=x, y=y, who=who)
    return folder / "people.npz"


@pytest.mark.parametrize("verb", ["teach", "student"])
def test_the_guarantee_of_a_service_and_of_a_student_is_for_a_person(capsys, tmp_path, verb):
    data = people(tmp_path)
    owned = ["--classes", 2, "--person", "who", "--at-most", 5]
    if verb == "teach":
        status, _, err = call(
            capsys, "teach", data, *owned, "--voters", 20, "--out", tmp_path / "v"
        )
        assert status == 0, err
        start = ["--answers", 5, "--epsilon", 20, "--finish", "--out", tmp_path / "run"]
        status, _, err = call(capsys, "serve", tmp_path / "v", *start)
    else:
        np.savez(tmp_path / "public.npz", x=np.random.default_rng(2).normal(size=(60, 3)))
        about = ["--public", tmp_path / "public.npz", "--provenance", "drawn at random"]
        shape = ["--teachers", 10, "--answers", 20, "--epsilon", 20, "--delta", 1e-3]
        status, _, err = call(
            capsys, "student", data, *owned, *about, *shape, "--out", tmp_path / "run"
        )
    assert status == 0, err
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "one user" in card["statement"]
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_a_column_of_persons_that_is_not_there_is_one_line(capsys, tmp_path: Path):
    words = ["--classes", 2, "--person", "nobody", "--at-most", 5, "--out", tmp_path / "v"]
    assert "data.user" in refused(capsys, "teach", people(tmp_path), *words)
    assert not (tmp_path / "v").exists()


def test_persons_of_a_data_set_that_has_none_are_refused(capsys, tmp_path: Path):
    """The guarantee would else be for a record, and nobody would notice."""
    words = ["--person", "who", "--at-most", 5, "--out", tmp_path / "v"]
    assert "does not read it" in refused(capsys, "teach", "digits", *words)
