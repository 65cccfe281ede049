"""`dpfy synthesize images`: one line for what is wrong, one JSON object for what is right."""

from __future__ import annotations

import json

import pytest

from dpfy.cli.app import main


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


IMAGES = (
    "synthesize",
    "images",
    "digits",
    "--epsilon",
    2,
    "--delta",
    1e-4,
    "--images",
    60,
    "--rounds",
    2,
)


def test_images_and_their_verification(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, *IMAGES, "--out", "runs/i", "--ledger", "ledger.jsonl", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["epsilon"] <= 2.0
    assert found["images"] == 60
    assert call(capsys, "verify", "runs/i", "--ledger", "ledger.jsonl")[0] == 0
    assert (tmp_path / found["sheet"]).read_bytes()[:4] == b"\x89PNG"
    config = (tmp_path / "runs/i/config.toml").read_text()
    assert "rounds = 2" in config
    assert "ledger.jsonl" not in config
    assert call(capsys, *IMAGES, "--out", "runs/i", "--resume")[0] == 0
    code, out, _ = call(
        capsys,
        "synthesize",
        "images",
        "runs/i/images.npz",
        "--size",
        "8x8",
        "--classes",
        10,
        *IMAGES[3:],
    )
    assert code == 0  # what was made can be read again
    assert "60 images of 8 x 8 pixels in 10 classes" in out
    assert "differential privacy" in out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--size", "8x8"), "--classes"),
        (("--classes", 10), "--size"),
        (("--size", "8by8", "--classes", 10), "HEIGHTxWIDTH"),
        (("--size", "9x8", "--classes", 10), "digits"),
        (("--resume",), "--out"),
        (("--clusters", 0), "clusters"),
    ],
)
def test_wrong_images_are_one_line(tmp_path, monkeypatch, capsys, change, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, *IMAGES, *change)
    assert code == 2
    assert words in err
    assert err.count("\n") <= 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_images_needs_its_size(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "synthesize", "images", "letters.npz", "--epsilon", 1)
    assert code == 2
    assert "how large the pictures are" in err
