"""`dpfy synthesize`: a private synthetic table; and how good it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options, texts
from dpfy.cli.form import RULE, Asked, TableRunForm, command, flag
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell
from dpfy.cli.plugins import group

DEFAULT = "table"


app = group(
    """Make a private synthetic table; say how good it is (evaluate); make texts, and a tokenizer for
    them. The options of dpfy synthesize DATA: dpfy synthesize table --help.

    Example: dpfy synthesize people.csv --schema people.toml --epsilon 1 --out runs/synthetic""",
    short="Make a private synthetic table, or texts.",
    default=DEFAULT,
    name="synthesize",
)


@dataclass(frozen=True)
class SynthesizeForm(TableRunForm):
    """`dpfy synthesize`."""

    epsilon: float = flag("What the whole table may cost.")
    delta: float | None = flag("Delta.", None, RULE)
    method: str = flag(
        "aim or mst; of dpfy-lab: mwem, privbayes, rap, independent, dp-gan, pate-gan.", "aim"
    )
    workload: str | int | None = flag(
        "What matters: 2 or 3 for all pairs or triples, or marginals: age,sex;job,income.", None
    )
    target: str | None = flag("A column to be predicted: what goes with it matters more.", None)
    rows: int | None = flag("Rows to make.", None, "as many as there seem to be")
    public: str | None = flag("A public table of the same schema, to start from.", None, path=True)
    model_size: float | None = flag("Most megabytes of the model's tables.", None, "8")
    records: int | None = flag(
        "Public number of records: protects replacing one (dp-gan: adding or removing one).", None
    )
    device: str = flag("cpu or cuda.", "cpu")


@app.command(DEFAULT)
@command(SynthesizeForm)
def table(asked: Asked[SynthesizeForm]) -> None:
    """Make a synthetic table, and leave a run folder that anyone can verify.

    The table is synthetic.csv in the run folder. Columns, ranges, bins, categories and constraints
    come from the schema, never from the data. Marginals are chosen, measured with noise and fitted;
    rows are drawn from what was fitted. How far the table is from the records is measured too, with
    noise, for the report.

    Methods: aim (best, adaptive), mst (fast, for many columns). Of dpfy-lab, for comparison: mwem,
    privbayes, rap, independent, dp-gan (needs --records) and pate-gan (needs --rows).

    Example: dpfy synthesize people.csv --schema people.toml --epsilon 1 --out runs/synthetic
    """
    from dpfy.core import check
    from dpfy.synthetic.plan import MODEL_CELLS, SynthesisOptions, SynthesisTerms
    from dpfy.synthetic.run import synthesize_table

    form = asked.form
    terms = SynthesisTerms(form.epsilon, asked.delta(), form.person, form.at_most, form.records)
    cells = MODEL_CELLS
    if form.model_size is not None:
        cells = max(1, int(check.positive("--model-size", form.model_size) * 2**17))
    matters = _workload(form.workload)
    how = SynthesisOptions(form.method, matters, form.target, form.rows, cells, form.device)
    stated: tuple[dict[str, str], ...] = ()
    if form.public is not None:
        said = {"used_for": "the start of the model", "provenance": "as given by --public"}
        stated = ({"data": Path(form.public).name[:80] or "a table", **said},)
    with resumable(asked.out, asked.again("synthesize")), progress_bar() as progress:
        made = synthesize_table(
            form.data,
            schema=form.schema,
            terms=terms,
            run=asked.run(public_data=stated),
            options=how,
            public=form.public,
            progress=progress,
        )
    lines = [*_lines(made), *charged(made.epsilon, form.ledger)]
    tell(made.to_json(), lines, as_json=asked.as_json)


@app.command("evaluate")
def evaluate(
    real: Annotated[
        str,
        typer.Argument(metavar="REAL", help="Real records: CSV or Parquet.", show_default=False),
    ],
    synthetic: Annotated[
        str, typer.Argument(metavar="SYNTHETIC", help="The synthetic table.", show_default=False)
    ],
    schema: options.SchemaFile,
    target: Annotated[str | None, option("Column that learners predict.")] = None,
    holdout: Annotated[str | None, option("Real records that the table was not made from.")] = None,
    degree: Annotated[int, typer.Option(help="Marginals of up to so many columns.")] = 3,
    public: Annotated[
        bool,
        typer.Option("--public", help="The real records are public: figures may be published."),
    ] = False,
    out: Annotated[Path | None, option("Write a page with figures here (HTML).")] = None,
    as_json: options.Json = False,
) -> None:
    """Compare a synthetic table with real records: marginals, correlations, learners, closeness.

    Unless the real records are public (--public), what is printed is NOT private: it was computed
    without noise.

    Example: dpfy synthesize evaluate people.csv runs/synthetic/synthetic.csv --schema
    people.toml --public
    """
    from dpfy.cli.output import PAGE, require_writable, save
    from dpfy.core import check
    from dpfy.synthetic.evaluate import evaluate as compared
    from dpfy.synthetic.evaluate import lines
    from dpfy.synthetic.page import page

    check.integer("--degree", degree, most=3)
    if out is not None:
        require_writable("--out", out, PAGE)
    given: dict[str, Any] = {"schema": schema, "target": target, "holdout": holdout}
    with _status() as show:
        found = compared(
            real, synthetic, public=public, degree=degree, progress=show, **given
        ).to_json()
    if out is not None:
        save("--out", out, page(found).encode())
    tell(found, lines(found), as_json=as_json)


app.command("texts")(texts.texts)
app.command("tokenizer")(texts.tokenizer)


def _workload(given: int | str | None) -> Any:
    """A number, or marginals separated by semicolons, each of columns separated by commas."""
    if not isinstance(given, str):
        return given
    if given.strip().isdigit():
        return int(given)
    return [[name.strip() for name in part.split(",")] for part in given.split(";") if part.strip()]


@contextmanager
def progress_bar() -> Iterator[Any]:
    """What is being done, and how much of the budget is spent, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% of the budget"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)  # to a file a bar is one empty line
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        bar = shown.add_task("planning", total=1.0)
        yield lambda what, share: shown.update(
            bar, description=what.replace("[", "\\[")[:60], completed=share
        )


@contextmanager
def _status() -> Iterator[Any]:
    from rich.console import Console

    with Console(stderr=True).status("reading") as shown:
        yield lambda what: shown.update(what)


def _lines(made: Any) -> list[str]:
    found = made.facts
    lines = [
        f"{found['rows']} rows of {len(found['columns'])} columns: {made.table}",
        f"{found['measured']} marginals were measured ({found['method']})"
        if found["measured"]
        else found["method"],
    ]
    for degree, held in found["error"].items():
        lines.append(
            f"marginals of {degree}: off by {held['mean_l1']:.4f} in L1 on average "
            f"(standard error {held['standard_error']:.1g}; {held['marginals']} of them)"
        )
    return [*lines, "", made.report["statement"], f"check it: dpfy verify {made.run}"]
