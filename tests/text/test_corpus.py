"""One corpus, authors or documents as units, and one ledger for all that is released of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import dpfy
from dpfy.core.errors import BudgetExceeded, DpfyError
from dpfy.report.card import section
from dpfy.text import train_tokenizer
from dpfy.text.corpus import Texts, corpus_of

TRAINING = {"rows": 3, "batch_size": 30, "epochs": 1.0}


def lines(path, count=240, authors=60):
    """Texts with their authors as JSON Lines; some rows lack one or the other."""
    rng = np.random.default_rng(0)
    words = ["patient", "slept", "well", "pain", "none", "walked"]
    with path.open("w") as file:
        for k in range(count):
            row = {"text": " ".join(rng.choice(words, 4)), "author": f"a{k % authors}", "n": k}
            if k == 7:
                del row["author"]
            if k == 9:
                row["text"] = None
            file.write(json.dumps(row) + "\n")
    return path


def test_json_lines_are_a_table_for_every_family(tmp_path):
    path = lines(tmp_path / "texts.jsonl")
    held = dpfy.Dataset(path, schema=[dpfy.Number("n", 0, 300)])
    found = dpfy.query(held, "count()", epsilon=50.0, delta=0, run=tmp_path / "q")
    assert abs(found[0].value - 240) < 3
    assert (
        corpus_of(dpfy.Dataset(Texts(path))).texts[:1]
        == corpus_of(dpfy.Dataset(path, schema=[dpfy.Text("text")])).texts[:1]
    )


@pytest.mark.parametrize("by", ["document", "author"])
def test_vocabulary_synthetic_text_and_a_query_share_one_ledger(tmp_path, by):
    path = lines(tmp_path / "texts.jsonl")
    unit = dpfy.Person("author", at_most=3) if by == "author" else None
    held = dpfy.Dataset(
        Texts(path, length=12),
        unit=unit,
        ledger=tmp_path / "l.jsonl",
        budget=dpfy.Budget(9.0, 1e-3),
        records=60 if unit else 239,
    )
    tokenizer = train_tokenizer(held, epsilon=2.0, delta=1e-4, size=300, run=tmp_path / "v")
    made = dpfy.synthesize(
        held, epsilon=3.0, delta=1e-4, tokens=tokenizer, run=tmp_path / "s", **TRAINING
    )
    assert len(made.texts) == 3
    for run in (tokenizer, made):
        assert all(finding.holds for finding in run.verify(ledger=held.ledger))
    assert made.model.token.num_embeddings == tokenizer.vocabulary
    told = made.report["unit"]
    assert told["tokens"] == 12
    assert told["name"] == ("user" if unit else "document")
    assert "at most 12 tokens" in told["meaning"]
    assert tokenizer.report["unit"]["name"] == told["name"]
    assert "learnt privately" in section(made.report, "generated-text")["tokens"]
    assert 3.0 < held.spent().epsilon < 5.5
    for call in (
        lambda: dpfy.synthesize(held, epsilon=8.0, delta=1e-4, run=tmp_path / "x", **TRAINING),
        lambda: train_tokenizer(held, epsilon=8.0, delta=1e-4, run=tmp_path / "x"),
    ):
        with pytest.raises(BudgetExceeded):
            call()
    assert not (tmp_path / "x").exists()


def test_all_texts_of_an_author_move_a_sum_by_one_clipping_norm(tmp_path):
    """An author more, with a thousand texts: the sums of the steps differ by one contribution."""
    from dpfy_lab.checks.text import TextTape, recorded

    path = lines(tmp_path / "a.jsonl")
    more = tmp_path / "b.jsonl"
    row = json.dumps({"text": "zz yy xx", "author": "other"}) + "\n"
    more.write_text(path.read_text() + row * 1000)
    sums = []
    for number, file in enumerate((path, more)):
        held = dpfy.Dataset(
            Texts(file, length=8), unit=dpfy.Person("author", at_most=2), records=60
        )
        tape = TextTape()
        with recorded(tape):
            dpfy.synthesize(
                held,
                epsilon=50.0,
                delta=1e-4,
                run=dpfy.Run(tmp_path / f"r{number}", seed=4),
                rows=1,
                batch_size=60,
                epochs=1.0,
            )
        sums.append(tape.sums[0])
        assert tape.bounds[0] == pytest.approx(1.0, rel=1e-3)
    apart = sum(float((sums[0][n] - sums[1][n]).square().sum()) for n in sums[0]) ** 0.5
    assert 0 < apart <= 1.001


BAD = {
    "empty": b"",
    "no json": b"hello\nworld\n",
    "half": b'{"text": "a"}\n{"text": \n',
    "a list": b'["a", "b"]\n',
    "numbers": b"1\n2\n",
    "deep": b"[" * 100_000,
    "latin": b'{"text": "\xe9\xff"}\n\xff\xfe{',
    "zeros": b"\0" * 50,
    "gzip": b"\x1f\x8b\x08\0broken",
    "no text": b'{"body": "a"}\n',
    "null": b"null\n",
    "string": b'"text"\n',
    "open": b'{"text": "a"',
    "two": b'{"text": "a"} {"text": "b"}\n',
    "nan": b"NaN\n",
    "csv": b"text,author\na,b\n",
    "empty object": b"{}\n",
    "utf-16": '{"text": "a"}\n'.encode("utf-16"),
}


@pytest.mark.parametrize("what", [*BAD, "missing", "folder"])
def test_a_malformed_corpus_ends_in_one_line_with_nothing_spent(tmp_path, what):
    path = tmp_path / "texts.jsonl"
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(BAD[what])
    held = dpfy.Dataset(
        Texts(path), ledger=tmp_path / "l.jsonl", budget=dpfy.Budget(5.0, 1e-3), records=20
    )
    for call in (
        lambda: train_tokenizer(held, epsilon=1.0, delta=1e-4, run=tmp_path / "x"),
        lambda: dpfy.synthesize(held, epsilon=1.0, delta=1e-4, run=tmp_path / "x", **TRAINING),
    ):
        with pytest.raises(DpfyError) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
        assert not (tmp_path / "x").exists()
    assert held.spent().epsilon == 0


def call(capsys, *arguments):
    from dpfy.cli.app import main

    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_the_command_line_makes_a_tokenizer_and_texts_by_author_on_one_ledger(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "texts.jsonl")
    budget = ("--epsilon", 9, "--delta", 1e-3, "--at-most", 3)
    assert call(capsys, "ledger", "create", "l.jsonl", *budget)[0] == 0
    by = ("--person", "author", "--at-most", 3, "--records", 60, "--delta", 1e-4)
    rest = (*by, "--ledger", "l.jsonl", "--json")
    code, out, err = call(
        capsys, "synthesize", "tokenizer", "texts.jsonl", "--epsilon", 2, "--size", 300,
        "--out", "v", *rest,
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["tokens"] <= 300
    small = ("--rows", 2, "--batch-size", 30, "--epochs", 1, "--length", 8)
    words = ("synthesize", "texts", "texts.jsonl", *small, *rest)
    code, out, err = call(capsys, *words, "--epsilon", 3, "--tokenizer", "v", "--out", "s")
    assert code == 0, err
    assert len((tmp_path / "s" / "texts.jsonl").read_text().splitlines()) == 2
    for run in ("v", "s"):
        assert call(capsys, "verify", run, "--ledger", "l.jsonl")[0] == 0
    code, _, err = call(capsys, *words, "--epsilon", 8, "--out", "x")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()
    code, _, err = call(capsys, *words, "--epsilon", 1, "--tokenizer", "s", "--out", "x")
    assert code == 2
    assert "--tokenizer" in err


@pytest.mark.parametrize("what", [*BAD, "missing", "folder"])
def test_the_command_line_says_in_one_line_what_is_wrong_with_a_corpus(
    tmp_path, monkeypatch, capsys, what
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "texts.jsonl"
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(BAD[what])
    code, out, err = call(
        capsys, "synthesize", "texts", "texts.jsonl", "--records", 20, "--epsilon", 1,
        "--out", "x", "--ledger", "l.jsonl",
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()
    held = dpfy.Dataset(Texts(path), ledger=tmp_path / "l.jsonl")
    assert held.spent().epsilon == 0
