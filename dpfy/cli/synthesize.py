"""`dpfy synthesize`: a private synthetic table; and how good it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell
from dpfy.cli.plugins import VerbGroup

DEFAULT = "table"


class SynthesizeVerbs(VerbGroup):
    """The verbs below; anything else is a table: `dpfy synthesize DATA`."""

    default = DEFAULT


app = typer.Typer(
    name="synthesize",
    short_help="Make a private synthetic table.",
    help="Make a private synthetic table: dpfy synthesize people.csv --schema s.toml --epsilon 1. "
    "[b]dpfy synthesize table --help[/b] says how; [b]dpfy synthesize "
    "evaluate[/b] says how good a table is.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    cls=SynthesizeVerbs,
)


@app.command(DEFAULT)
def table(
    data: options.Table,
    schema: options.SchemaFile,
    epsilon: Annotated[float, option("What the whole table may cost.")],
    out: Annotated[Path | None, option("Run folder (default: new, in runs/).")] = None,
    delta: Annotated[float, typer.Option(help="Delta.")] = 1e-9,
    method: Annotated[
        str,
        typer.Option(
            help="aim or mst; of dpfy-lab: mwem, privbayes, rap, independent, dp-gan, pate-gan."
        ),
    ] = "aim",
    workload: Annotated[
        str | None,
        option("What matters: 2 or 3 for all pairs or triples, or marginals: age,sex;job,income."),
    ] = None,
    target: Annotated[
        str | None, option("A column to be predicted: what goes with it matters more.")
    ] = None,
    rows: Annotated[
        int | None, option("Rows to make (default: as many as there seem to be).")
    ] = None,
    public: Annotated[
        str | None, option("A public table of the same schema, to start from.")
    ] = None,
    model_size: Annotated[
        float | None, option("Most megabytes of the model's tables (default: 8).")
    ] = None,
    resume: options.Resume = False,
    ledger: options.LedgerFile = None,
    person: options.Person = None,
    at_most: options.AtMost = None,
    records: Annotated[
        int | None,
        option(
            "Public number of records: protects replacing one (dp-gan: adding or removing one)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Make a synthetic table, and leave a run folder that anyone can verify.

    dpfy synthesize people.csv --schema people.toml --epsilon 1 --out runs/synthetic

    The table is runs/synthetic/synthetic.csv. Columns, ranges, bins, categories and constraints
    come from the schema, never from the data. Marginals are chosen, measured with noise and fitted;
    rows are drawn from what was fitted. The number of rows is that of what was measured, or --rows.
    How far the table is from the records is measured too, with noise, and stands on the card.

    Methods: aim (best, adaptive), mst (fast, for many columns); of dpfy-lab, for comparison: mwem,
    privbayes, rap, independent, and the networks dp-gan (needs --records, the public number of
    records) and pate-gan (needs --rows).
    """
    from dpfy.core import check
    from dpfy.runs.run import Run
    from dpfy.synthetic.plan import MODEL_CELLS, SynthesisOptions, SynthesisTerms
    from dpfy.synthetic.run import synthesize_table

    out = options.run_folder(out, resume)
    terms = SynthesisTerms(epsilon, delta, person, at_most, records)
    cells = (
        MODEL_CELLS
        if model_size is None
        else max(1, int(check.positive("--model-size", model_size) * 2**17))
    )
    how = SynthesisOptions(method, _workload(workload), target, rows, cells, device)
    asked = {
        "method": method,
        "epsilon": epsilon,
        "delta": delta,
        "workload": workload,
        "target": target,
        "rows": rows,
    }
    asked |= {
        "model_size": model_size,
        "person": person,
        "at_most": at_most,
        "records": records,
        "device": device,
    }
    private = {
        "schema": schema,
        "public": public,
        "ledger": None if ledger is None else str(ledger),
    }
    stated = (
        ()
        if public is None
        else (
            {
                "data": Path(public).name[:80] or "a table",
                "used_for": "the start of the model",
                "provenance": "as given by --public",
            },
        )
    )
    place = Run(
        out,
        resume,
        ledger,
        seed=insecure_seed,
        config=(options.toml(asked), options.toml(asked | private | {"data": data})),
        public_data=stated,
    )
    again = options.command_line(["synthesize", data], asked | private)
    with resumable(out, again), progress_bar() as progress:
        made = synthesize_table(
            data,
            schema=schema,
            terms=terms,
            run=place,
            options=how,
            public=public,
            progress=progress,
        )
    left = charged(made.epsilon, ledger)
    tell(made.to_json(), [*_lines(made), *left], as_json=as_json)


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
    """
    from dpfy.cli.output import PAGE, require_writable, save
    from dpfy.core import check
    from dpfy.synthetic.evaluate import evaluate as compared
    from dpfy.synthetic.evaluate import lines
    from dpfy.synthetic.page import page

    check.integer("--degree", degree, most=3)
    if out is not None:
        require_writable("--out", out, PAGE)
    with _status() as show:
        found = compared(
            real,
            synthetic,
            schema=schema,
            target=target,
            holdout=holdout,
            public=public,
            degree=degree,
            progress=show,
        ).to_json()
    if out is not None:
        save("--out", out, page(found).encode())
    tell(found, lines(found), as_json=as_json)


def _workload(text: str | None) -> Any:
    """A number, or marginals separated by semicolons, each of columns separated by commas."""
    if text is None:
        return None
    if text.strip().isdigit():
        return int(text)
    return [[name.strip() for name in part.split(",")] for part in text.split(";") if part.strip()]


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
