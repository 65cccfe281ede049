"""`dpfy plan compare estimators`: which classical learner suits which epsilon and how many records, on
public or made-up data.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.output import tell


def _option(help_text: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, show_default=False)


def estimators(
    schema: Annotated[str, _option("Public schema of the columns (TOML), or adult.")],
    target: Annotated[
        str | None, _option("Column to predict (default: the label of the schema).")
    ] = None,
    records: Annotated[
        list[int] | None, _option("Records to fit on; may be repeated (default: 1000 and 10000).")
    ] = None,
    epsilon: Annotated[
        list[float] | None, _option("Epsilon of a fit; may be repeated (default: 0.1, 1 and 4).")
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of a fit.")] = 1e-6,
    estimator: Annotated[
        list[str] | None, _option("Estimators by name; may be repeated (default: all).")
    ] = None,
    public_data: Annotated[
        str | None,
        _option("Public table to compare on (CSV, Parquet). Nothing of it is protected."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare classical learners on made-up data with the columns of a schema, or on a public
    table. Nothing is charged.

    Private records have no place here: choosing by scores on them is a release (dpfy tune).

    Example: dpfy plan compare estimators --schema adult --records 1000 --epsilon 0.5 --epsilon
    4
    """
    import sys

    from rich.console import Console
    from rich.status import Status

    from dpfy.core import check
    from dpfy.estimators import comparison

    sizes = [
        check.integer("--records", n, least=10, most=comparison.MOST_RECORDS)
        for n in records or (1000, 10_000)
    ]
    epsilons = [check.epsilon("--epsilon", e) for e in epsilon or (0.1, 1.0, 4.0)]
    _, aim = comparison.described(schema, target)
    kinds = comparison.candidates(estimator or [], hasattr(aim, "classes"))
    if public_data is None:
        data = comparison.made_up(schema, target, max(sizes) + comparison.TEST)
    else:
        data = comparison.public(public_data, schema, target)
    with Status("fits", console=Console(file=sys.stderr)) as shown:
        rows = comparison.compare(data, kinds, sizes, epsilons, delta, shown.update)
    source = "made up from the schema" if public_data is None else "a public table"
    told = {
        "data": source,
        "target": data.aim.name,
        "measure": data.measure,
        "delta": delta,
        "rows": rows,
    }
    told["best"] = _best(rows)
    tell(told, _lines(rows, data.measure, source), as_json=as_json)


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each number of records and epsilon that was fitted."""
    found: dict[tuple[int, float], dict[str, Any]] = {}
    for row in rows:
        if row["score"] is not None:
            found.setdefault((row["records"], row["epsilon"]), row)
    return [
        {key: row[key] for key in ("records", "epsilon", "estimator", "score")}
        for row in found.values()
    ]


def _lines(rows: list[dict[str, Any]], measure: str, source: str) -> list[str]:
    """A table with a column for each number of records and epsilon, and under it the best of
    each.
    """
    places = list(dict.fromkeys((row["records"], row["epsilon"]) for row in rows))
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    wide = max(len(name) for name in names) + 2
    scores = {(row["estimator"], row["records"], row["epsilon"]): row["score"] for row in rows}
    lines = [f"{measure} on rows not seen, by records and epsilon; data: {source}"]
    lines.append(" " * wide + "".join(f"{f'{n} / {e:g}':>14}" for n, e in places))
    for name in names:
        found = [scores[name, n, e] for n, e in places]
        lines.append(
            f"{name:<{wide}}"
            + "".join(f"{'refused' if s is None else f'{s:.4f}':>14}" for s in found)
        )
    lines += [
        f"best at {row['records']} records, epsilon {row['epsilon']:g}: {row['estimator']} "
        f"({row['score']:.4f})"
        for row in _best(rows)
    ]
    lines += sorted(
        {f"{row['estimator']} refused: {row['refused']}" for row in rows if row["refused"]}
    )
    return lines
