"""A study's page: sections of words, tables and figures, all of them made from stored cells. HTML
in one file, CSV and SVG beside it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import mean, stdev
from typing import Any

from dpfy_lab.studies.study import Results, Study

Value = str | int | float | None

CSS = """body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2rem}table{border-collapse:collapse;margin:.6rem 0;font-size:.9rem}
td,th{border:1px solid #ccc;padding:.2rem .6rem;text-align:right}td:first-child,th:first-child{text-align:left}
th{background:#f2f2f2}caption{text-align:left;font-weight:600;padding:.3rem 0}figure{margin:.6rem 0;display:inline-block}
figure svg{max-width:30rem;width:100%;height:auto}figcaption{font-size:.85rem;max-width:30rem}.facts td{text-align:left}
p{max-width:46rem}"""  # noqa: E501


@dataclass(frozen=True)
class Table:
    """Rows under a heading; also written as NAME.csv with full precision."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]

    def csv(self) -> str:
        """The table as CSV."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([["" if v is None else v for v in row] for row in self.rows])
        return out.getvalue()

    def html(self) -> str:
        """The table as HTML, numbers shortened."""
        head = "".join(f"<th>{escape(str(c))}</th>" for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(shown(v))}</td>" for v in row) + "</tr>"
            for row in self.rows
        )
        return f"<table><caption>{escape(self.caption)}</caption><tr>{head}</tr>{body}</table>"

    def markdown(self) -> str:
        """The table as Markdown, numbers shortened."""
        lines = ["| " + " | ".join(map(str, self.columns)) + " |", "|" + "---|" * len(self.columns)]
        return "\n".join(
            lines + ["| " + " | ".join(shown(v) for v in row) + " |" for row in self.rows]
        )


@dataclass(frozen=True)
class Figure:
    """A picture with its caption; also written as NAME.svg."""

    name: str
    caption: str
    svg: str

    def html(self) -> str:
        """The picture inline."""
        return f"<figure>{self.svg}<figcaption>{escape(self.caption)}</figcaption></figure>"


@dataclass(frozen=True)
class Section:
    """A heading, a few sentences, tables and figures."""

    title: str
    words: str
    parts: Sequence[Table | Figure] = ()


@dataclass(frozen=True)
class Page:
    """A whole page. `facts` says what every page must: seeds, runs, accountant, unit, adjacency,
    how hyperparameters were chosen.
    """

    sections: Sequence[Section]
    facts: dict[str, str] = field(default_factory=dict)

    def files(self) -> dict[str, str]:
        """What lies beside index.html."""
        parts = [part for section in self.sections for part in section.parts]
        tables = {f"{part.name}.csv": part.csv() for part in parts if isinstance(part, Table)}
        return tables | {f"{part.name}.svg": part.svg for part in parts if isinstance(part, Figure)}

    def tables(self) -> dict[str, Table]:
        """Every table by name."""
        return {
            part.name: part
            for section in self.sections
            for part in section.parts
            if isinstance(part, Table)
        }


FACTS = ("seeds", "runs and spread", "accountant", "unit", "adjacency", "hyperparameters")
"""What no page may leave out; hardware and time are added from the cells."""


def render(study: Study, page: Page, results: Results) -> str:
    """The page as one HTML file without script or outside reference."""
    missing = [name for name in FACTS if not page.facts.get(name)]
    if missing:
        raise ValueError(f"the page of {study.name} does not say: {', '.join(missing)}")
    facts = page.facts | made_on(results)
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in facts.items())
    body = "".join(
        f"<section><h2>{escape(s.title)}</h2><p>{escape(s.words)}</p>{''.join(part.html() for part in s.parts)}</section>"  # noqa: E501
        for s in page.sections
    )
    return (
        f'<!doctype html><html lang="en"><head><meta '
        f'charset="utf-8"><title>{escape(study.title)}</title><style>{CSS}</style></head>'
        f"<body><h1>{escape(study.title)}</h1><p>{escape(study.source)}</p>"
        f'<table class="facts">{rows}</table>{body}</body></html>\n'
    )


def made_on(results: Results) -> dict[str, str]:
    """Hardware, versions and time of the cells."""
    machines = sorted({_machine(c.made) for c in results.values()})
    versions = sorted(
        {
            f"dpfy {c.made['dpfy']}, torch {c.made['torch']}, Python {c.made['python']}"
            for c in results.values()
        }
    )
    wall, cpu = results.seconds()
    return {
        "hardware": "; ".join(machines),
        "versions": "; ".join(versions),
        "time": f"{wall:.0f} s in all cells, {cpu:.0f} s of processor time",
    }


def _machine(made: Mapping[str, Any]) -> str:
    """Device, threads, and how many cells shared it, which makes times longer."""
    threads = f"{made['threads']} thread{'' if made['threads'] == '1' else 's'}"
    shared = made.get("at_once", 1)
    return f"{made['device']} ({threads}{f', {shared} cells at a time' if shared > 1 else ''})"


def shown(value: Value) -> str:
    """A cell of a table in print."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if 1 <= abs(value) < 1000 else f"{value:.4g}"


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation, worst and number of runs of accuracies (as fractions), in
    percent.
    """
    return {
        "mean": 100 * mean(values),
        "deviation": 100 * stdev(values) if len(values) > 1 else None,
        "worst": 100 * min(values),
        "runs": len(values),
    }
