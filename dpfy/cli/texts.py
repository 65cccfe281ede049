"""`dpfy synthesize texts` and `dpfy synthesize tokenizer`: releases of private texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.cli.form import RULE, Asked, RunForm, command, flag
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell


@dataclass(frozen=True)
class CorpusForm(RunForm):
    """What every command takes that makes a run of private texts."""

    data: str = flag(
        "The private texts: JSON Lines, CSV or Parquet.", metavar="TEXTS", placed=True, path=True
    )
    column: str = flag("The column with the texts.", "text")
    delta: float | None = flag("Delta.", None, RULE)
    person: str | None = flag("Column with the person that a text belongs to.", None)
    at_most: int | None = flag("Most texts of one person that are used.", None)

    def dataset(self, length: int, records: int | None) -> Any:
        """The texts, with their unit and ledger."""
        from dpfy.core.errors import InvalidInput
        from dpfy.core.unit import Person
        from dpfy.runs.dataset import Dataset
        from dpfy.text.corpus import Texts

        if (self.person is None) != (self.at_most is None):
            lacks = "--at-most" if self.at_most is None else "--person"
            rule = "must be given with the other of --person and --at-most"
            raise InvalidInput(lacks, None, rule)
        known = self.person is not None and self.at_most is not None
        unit = Person(self.person, self.at_most) if known else None  # type: ignore[arg-type]
        source = Texts(self.data, length=length, column=self.column)
        return Dataset(source, unit=unit, records=records, ledger=self.ledger)


@dataclass(frozen=True)
class TextsForm(CorpusForm):
    """`dpfy synthesize texts`."""

    epsilon: float = flag("What the texts may cost.")
    records: int = flag("Public number of texts; with --person, of persons.")
    length: int = flag("Tokens of a text that are read.", 64)
    rows: int = flag("Texts to make.", 100)
    tokenizer: str | None = flag(
        "Run of dpfy synthesize tokenizer.", None, "bytes are the tokens", path=True
    )
    batch_size: int = flag("Mean size of a batch.", 256)
    epochs: float = flag("Expected passes over the texts.", 3.0)
    device: str = flag("cpu or cuda.", "cpu")


@command(TextsForm)
def texts(asked: Asked[TextsForm]) -> None:
    """Make private synthetic texts: a language model is trained on the texts, and sampled from.

    The texts are texts.jsonl in the run folder. With --person all texts of a person, at most
    --at-most of them, are protected together.

    Example: dpfy synthesize texts notes.jsonl --records 20000 --epsilon 3 --out runs/notes
    """
    from dpfy.synthetic.run import synthesize

    form = asked.form
    known: dict[str, Any] = {} if form.tokenizer is None else {"tokens": _tokenizer(form.tokenizer)}
    held = form.dataset(form.length, form.records)
    known |= {"rows": form.rows, "device": form.device}
    known |= {"batch_size": form.batch_size, "epochs": form.epochs}
    made = _released(asked, "texts", synthesize, held, known)
    _tell(asked, made, f"texts: {made.to_json()['texts']}")


@dataclass(frozen=True)
class TokenizerForm(CorpusForm):
    """`dpfy synthesize tokenizer`."""

    epsilon: float = flag("What the vocabulary may cost.")
    size: int = flag("Most tokens.", 4000)
    words: int | None = flag("Words of a text, or of a person, in a round.", None, "4, or 40")
    records: int | None = flag("Public number of texts; with --person, of persons.", None)


@command(TokenizerForm)
def tokenizer(asked: Asked[TokenizerForm]) -> None:
    """Learn a private tokenizer: byte pairs, of words that many texts or persons have.

    The tokenizer is tokenizer.json in the run folder, as Hugging Face reads it.

    Example: dpfy synthesize tokenizer notes.jsonl --records 20000 --epsilon 1 --out runs/tokens
    """
    from dpfy.text.tokenizer import train_tokenizer

    form = asked.form
    held = form.dataset(64, form.records)
    how = {"size": form.size, "words": form.words}
    made = _released(asked, "tokenizer", train_tokenizer, held, how)
    told = made.to_json()
    _tell(asked, made, f"tokenizer: {told['tokenizer']} ({told['tokens']} tokens)")


def _released(
    asked: Asked[Any], verb: str, make: Callable[..., Any], held: Any, how: dict[str, Any]
) -> Any:
    form = asked.form
    with resumable(asked.out, asked.again("synthesize", verb)):
        return make(held, epsilon=form.epsilon, delta=form.delta, run=asked.run(), **how)


def _tell(asked: Asked[Any], made: Any, first: str) -> None:
    told = made.to_json()
    lines = [first, told["statement"], f"check it: dpfy verify {asked.out}"]
    tell(told, [*lines, *charged(made.epsilon, asked.form.ledger)], as_json=asked.as_json)


def _tokenizer(run: str) -> Any:
    from dpfy.core.errors import InvalidInput
    from dpfy.runs.released import kind_of_run, load

    if kind_of_run(Path(run)) != "vocabulary":
        raise InvalidInput("--tokenizer", run, "must be a run of dpfy synthesize tokenizer")
    return load(run)
