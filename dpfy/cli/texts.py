"""`dpfy synthesize texts` and `dpfy synthesize tokenizer`: releases of private texts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import form, options
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell

_Corpus = Annotated[
    str,
    typer.Argument(
        metavar="TEXTS", help="The private texts: JSON Lines, CSV or Parquet.", show_default=False
    ),
]
_Column = Annotated[str, typer.Option(help="The column with the texts.")]
_LedgerFile = Annotated[
    Path | None, option("Ledger of the data set, over all its releases.", "--ledger")
]
_Records = Annotated[int | None, option("Public number of texts; with --person, of persons.")]
_Delta = Annotated[float | None, option("Delta (default: from --records).", "--delta")]


def texts(
    data: _Corpus,
    epsilon: Annotated[float, option("What the texts may cost.")],
    records: Annotated[int, option("Public number of texts; with --person, of persons.")],
    out: options.Out = None,
    delta: _Delta = None,
    column: _Column = "text",
    length: Annotated[int, typer.Option(help="Tokens of a text that are read.")] = 64,
    rows: Annotated[int, typer.Option(help="Texts to make.")] = 100,
    tokenizer: Annotated[
        Path | None, option("Run of dpfy synthesize tokenizer (default: bytes).")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Mean size of a batch.")] = 256,
    epochs: Annotated[float, typer.Option(help="Expected passes over the texts.")] = 3.0,
    person: options.Person = None,
    at_most: options.AtMost = None,
    resume: options.Resume = False,
    ledger: _LedgerFile = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Make private synthetic texts: a language model is trained on the texts, and sampled from.

    dpfy synthesize texts notes.jsonl --records 20000 --epsilon 3 --out runs/notes

    The texts are runs/notes/texts.jsonl. With --person all texts of a person, at most --at-most of
    them, are protected together.
    """
    from dpfy.runs.run import Run
    from dpfy.synthetic.run import synthesize

    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "rows": rows}
    asked |= {"batch_size": batch_size, "epochs": epochs, "length": length, "column": column}
    asked |= {"records": records, "person": person, "at_most": at_most, "device": device}
    known = {} if tokenizer is None else {"tokens": _tokenizer(tokenizer)}
    private = {"tokenizer": None if tokenizer is None else str(tokenizer), "ledger": _text(ledger)}
    out = options.run_folder(out, resume)
    held = _dataset(data, column, length, records, person, at_most, ledger)
    config = _toml(asked), _toml(asked | private | {"data": data})
    again = _command_line(["synthesize", "texts", data], asked | private)
    with resumable(out, again):
        made = synthesize(
            held,
            epsilon=epsilon,
            delta=delta,
            rows=rows,
            device=device,
            run=Run(out, resume, seed=insecure_seed, config=config),
            batch_size=batch_size,
            epochs=epochs,
            **known,
        )
    told = made.to_json()
    lines = [f"texts: {told['texts']}", told["statement"], f"check it: dpfy verify {out}"]
    tell(told, [*lines, *charged(made.epsilon, ledger)], as_json=as_json)


def tokenizer(
    data: _Corpus,
    epsilon: Annotated[float, option("What the vocabulary may cost.")],
    out: options.Out = None,
    delta: _Delta = None,
    column: _Column = "text",
    size: Annotated[int, typer.Option(help="Most tokens.")] = 4000,
    words: Annotated[
        int | None, option("Words that a text (4), or a person (40), counts in a round.")
    ] = None,
    records: _Records = None,
    person: options.Person = None,
    at_most: options.AtMost = None,
    resume: options.Resume = False,
    ledger: _LedgerFile = None,
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Learn a private tokenizer: byte pairs, of words that many texts or persons have.

    dpfy synthesize tokenizer notes.jsonl --records 20000 --epsilon 1 --out runs/tokens

    The tokenizer is runs/tokens/tokenizer.json, as Hugging Face reads it.
    """
    from dpfy.runs.run import Run
    from dpfy.text.tokenizer import train_tokenizer

    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "size": size, "words": words}
    asked |= {"column": column, "records": records, "person": person, "at_most": at_most}
    private = {"ledger": _text(ledger)}
    out = options.run_folder(out, resume)
    held = _dataset(data, column, 64, records, person, at_most, ledger)
    config = _toml(asked), _toml(asked | private | {"data": data})
    again = _command_line(["synthesize", "tokenizer", data], asked | private)
    with resumable(out, again):
        made = train_tokenizer(
            held,
            epsilon=epsilon,
            delta=delta,
            size=size,
            words=words,
            run=Run(out, resume, seed=insecure_seed, config=config),
        )
    told = made.to_json()
    lines = [f"tokenizer: {told['tokenizer']} ({told['tokens']} tokens)", told["statement"]]
    lines += [f"check it: dpfy verify {out}", *charged(made.epsilon, ledger)]
    tell(told, lines, as_json=as_json)


def _dataset(
    data: str,
    column: str,
    length: int,
    records: int | None,
    person: str | None,
    at_most: int | None,
    ledger: Path | None,
) -> Any:
    from dpfy.core.errors import InvalidInput
    from dpfy.core.unit import Person
    from dpfy.runs.dataset import Dataset
    from dpfy.text.corpus import Texts

    if (person is None) != (at_most is None):
        lacks = "--at-most" if at_most is None else "--person"
        raise InvalidInput(lacks, None, "must be given with the other of --person and --at-most")
    unit = None if person is None or at_most is None else Person(person, at_most)
    source = Texts(data, length=length, column=column)
    return Dataset(source, unit=unit, records=records, ledger=ledger)


def _tokenizer(run: Path) -> Any:
    from dpfy.core.errors import InvalidInput
    from dpfy.runs.released import kind_of_run, load

    if kind_of_run(run) != "vocabulary":
        raise InvalidInput("--tokenizer", str(run), "must be a run of dpfy synthesize tokenizer")
    return load(run)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _toml(fields: Mapping[str, Any]) -> str:
    return form.lines(fields)


def _command_line(words: list[str], fields: Mapping[str, Any]) -> str:
    """The command of these words, with a flag for every field that is given."""
    given = {key.replace("_", "-"): str(v) for key, v in fields.items() if v is not None}
    return shlex.join(["dpfy", *words, *(w for k, v in given.items() for w in (f"--{k}", v))])
