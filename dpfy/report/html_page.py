"""report.html: the report as one page that needs nothing else: no network, no script, light and dark,
phone and paper.

Published deployments, to set an epsilon beside. Each has its own unit, adjacency and trust: a
smaller number alone is no ranking.
"""

from __future__ import annotations

import base64
import math
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.guarantee import Tradeoff
from dpfy.report import charts, words
from dpfy.report.charts import SUPERSCRIPT, Axis, Series

if TYPE_CHECKING:
    import jinja2

NOT_STATED = "not stated"
NOTE = "An epsilon can be compared with another only where unit, adjacency and trust are the same."
ROWS: tuple[dict[str, str], ...] = (
    {
        "who": "US Census Bureau 2022",
        "what": "demonstration data",
        "epsilon": "12.2",
        "unit": "person",
        "adjacency": NOT_STATED,
    },
    {
        "who": "Google Gboard 2022",
        "what": "Spanish-language next-word prediction",
        "epsilon": "8.9 (rho 0.81)",
        "unit": "device",
        "adjacency": "zero-out",
    },
    {
        "who": "Apple 2016-2022",
        "what": "various data of end users running iOS or macOS",
        "epsilon": "2 to 16",
        "unit": "user and day",
        "adjacency": "add-or-remove-one",
    },
    {
        "who": "Microsoft 2021",
        "what": "mentioned; no specific production use is described",
        "epsilon": "4",
        "unit": "user in six months",
        "adjacency": NOT_STATED,
    },
    {
        "who": "Facebook 2022",
        "what": "mobility changes of users",
        "epsilon": "2",
        "unit": "user and day",
        "adjacency": NOT_STATED,
    },
)
"""As the guide tells them (Ponomareva et al. 2023, section 5.2.2): its words, and the years of its
sources.
"""


SOURCES = {
    "US Census Bureau 2022": "United States Census Bureau (2022)",
    "Google Gboard 2022": "McMahan and Thakurta (2022)",
    "Apple 2016-2022": "Thakurta (2016) and the Differential Privacy Team, Apple (2022)",
    "Microsoft 2021": "Ruehle et al. (2021)",
    "Facebook 2022": "Facebook (2022)",
}
"""Whom the guide cites for each row."""


def table() -> dict[str, Any]:
    """For the report."""
    cited = "; ".join(f"{row['who']}: {SOURCES[row['who']]}" for row in ROWS)
    words = (
        f"{NOTE} Each row says what Ponomareva et al. (2023), section 5.2.2, say, who cite {cited}."
    )
    return {"words": words, "rows": [dict(row) for row in ROWS]}


NAME = "report.html"
METRICS, AUDIT, SHEET = "metrics.jsonl", "audit.json", "sheet.png"


def extras(folder: Path) -> dict[str, Any]:
    """What a run folder holds beside the report and the page shows: the rows of metrics.jsonl, an
    audit made after the run, and a sheet of synthetic images.
    """
    metrics, audit, sheet = (_content(folder / name) for name in (METRICS, AUDIT, SHEET))
    return {
        "metrics": [
            _parsed(METRICS, line) for line in (metrics or b"").splitlines() if line.strip()
        ],
        "audit": _parsed(AUDIT, audit, "epsilon_lower") if audit is not None else None,
        "sheet": None if sheet is None else base64.b64encode(sheet).decode(),
    }


def _content(file: Path) -> bytes | None:
    try:
        return storage.content(file.name, file) if file.is_file() else None
    except InvalidInput as problem:
        raise Corrupt(file.name, problem.rule) from None


def _parsed(name: str, text: bytes, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys."""
    try:
        read = storage.parsed_json(name, text)
    except Corrupt:
        read = None
    if isinstance(read, dict) and all(key in read for key in keys):
        return read
    raise Corrupt(name, "is damaged: it cannot be read")


def render(card: dict[str, Any], extra: dict[str, Any] | None = None) -> str:
    """The page. A function of its arguments alone: the same report gives the same bytes."""
    extra = extra or {"metrics": [], "audit": None}
    shown = content(card, extra["audit"])
    drawn = pictures(shown["card"], extra["metrics"], shown["audit"]) | {
        "sheet": extra.get("sheet")
    }
    return environment().get_template("report.html.j2").render(**shown, pictures=drawn)


def content(card: dict[str, Any], audit: dict[str, Any] | None) -> dict[str, Any]:
    """What every page shows: the report in its present layout, all assumptions in one list, and what
    an audit says.
    """
    card = words.raised(card)
    card = PRESENT | card | {"unit": {"protection_words": ""} | card["unit"]}
    found, training = audit or card["audit"], _trained(card)
    return {
        "card": card,
        "audit": found,
        "alarm": contradiction(card, found),
        "assumptions": [
            *card["accounting"]["assumptions"],
            *(row for part in card["sections"] for row in part["assumptions"]),
        ],
        "utility": training[0]["utility"] if training else words.absent("nothing was trained"),
        "plain": PLAIN,
        "heading": heading(card["provenance"]),
    }


def heading(provenance: dict[str, Any]) -> str:
    """What the report is about, in a line: model, data, date and author, as far as they are given."""
    said = {key: provenance.get(key, UNSAID) for key in ABOUT}
    return "; ".join(f"{key}: {value}" for key, value in said.items() if value != UNSAID)


def _trained(card: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that tell how a model was trained: of training, or of a search that ended with
    it.
    """
    return [part for part in card["sections"] if part["kind"] == "training" or "mechanism" in part]


PLAIN = ("name", "kind", "purpose", "claim", "title", "words", "assumptions")
"""Fields of a section that are shown in their own way, or nowhere."""
ABOUT, UNSAID = ("model", "data", "date", "author"), "not stated"
UNSTATED = "reports of the first format do not state it"
PRESENT = {
    "boundary": {"name": "B4", "words": UNSTATED},
    "public_data": words.absent(UNSTATED),
    "deployments": table(),
}
"""What a report of the first format leaves open."""


def contradiction(card: dict[str, Any], audit: dict[str, Any]) -> str | None:
    """What an audit says against the claim; None where it says nothing."""
    found = audit.get("epsilon_lower", 0.0)
    claimed = card["guarantee"]["epsilon"]
    if claimed == "infinity" or (found != "infinity" and found <= claimed):
        return None
    return (
        f"An audit contradicts the claim: it found epsilon to be at least {words.down(found)}, "
        f"above the given {words.up(claimed)}."
    )


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The templates of this package; values are escaped."""
    import jinja2

    home = resources.files("dpfy.report").joinpath("templates")
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: home.joinpath(name).read_text()),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {
        "up": words.up,
        "down": words.down,
        "power": power,
        "figure": figure,
        "percent_up": words.percent_up,
    }
    made.tests["absent"] = words.is_absent
    return made


def power(value: float | str) -> str:
    """A small number as it is written by hand: 10⁻⁵, 3.2 × 10⁻⁶."""
    if not isinstance(value, (int, float)) or not 0 < abs(value) < 0.01:
        return figure(value)
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    tail = "10" + str(int(exponent)).translate(SUPERSCRIPT)
    return tail if mantissa == "1" else f"{mantissa} × {tail}"


def figure(value: Any) -> str:
    """A number for reading; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or value.is_integer():
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) >= 1e-4 else power(value)


def pictures(
    card: dict[str, Any], rows: list[dict[str, Any]], audit: dict[str, Any]
) -> dict[str, Any]:
    """Every picture of the page as SVG, or a typed absence."""
    drawn = {"attacker": attack_picture(card, audit)}
    drawn |= {
        f"search {part['name']}": searched(part) for part in card["sections"] if "search" in part
    }
    for part in _trained(card)[:1]:
        steps, confused = part["mechanism"]["steps"], part["confusion"]
        drawn |= {
            "epsilon": _over_steps(rows, "epsilon", "epsilon so far", "a", steps),
            "loss": _over_steps(rows, "test_loss", "loss on test data", "b", steps),
            "accuracy": _over_steps(rows, "test_accuracy", "accuracy on test data", "a", steps),
            "confusion": confused
            if words.is_absent(confused)
            else charts.counts(
                "Predicted against true class on test data", confused, "predicted", "true"
            ),
        }
    return drawn


def searched(part: dict[str, Any]) -> dict[str, Any]:
    """The pictures of a search: the trials that may be shown over their settings, and its charge
    beside that of the run.
    """
    bill, drawn = (
        part.get("bill"),
        {"bill": words.absent("the run has a charge of its own"), "trials": _over_settings(part)},
    )
    if bill is not None:
        both = [
            ("training alone", bill["training_alone"], "a"),
            ("with the search", bill["with_the_search"], "b"),
        ]
        rows = [row for row in both if not isinstance(row[1], str)]
        drawn["bill"] = charts.bars("Epsilon of training alone, and with the search", rows)
    return drawn


def _over_settings(part: dict[str, Any]) -> Any:
    """Parallel coordinates of the trials that may be shown, the selected one last and marked."""
    axes = part["search"].get("axes", [])
    trials = [row for row in part.get("trials", []) if len(row.get("at", [])) == len(axes)]
    if not axes or not trials:
        return words.absent("no trial may be shown")
    scores = [row["score"] for row in trials if isinstance(row.get("score"), (int, float))]
    low, high = (min(scores), max(scores)) if scores else (0.0, 0.0)
    every = [charts.Coordinate(axis["name"], axis["low"], axis["high"]) for axis in axes]
    every += [charts.Coordinate("score", figure(low), figure(high))] if high > low else []
    lines = []
    for row in sorted(trials, key=lambda row: bool(row.get("selected"))):
        last = [_share(row.get("score"), low, high)] if high > low else []
        lines.append(([*row["at"], *last], "chosen" if row.get("selected") else "faint"))
    return charts.parallel("Trials that may be shown, over their settings", every, lines)


def _share(score: Any, low: float, high: float) -> float | None:
    return (score - low) / (high - low) if isinstance(score, (int, float)) else None


def attack_picture(card: dict[str, Any], audit: dict[str, Any]) -> Any:
    """True-positive against false-positive rate: what the curve allows, and what an audit found."""
    curve = card["formal"]["curve"]
    if words.is_absent(curve):
        return words.absent("an attacker is not limited: " + curve[words.ABSENT])
    pairs = tuple((row["epsilon"], row["delta"]) for row in curve)
    rates = [k / 200 for k in range(201)]
    reached = list(zip(rates, Tradeoff(pairs).hit_rates(rates), strict=True))
    found = [(p["false_positive_rate"], p["true_positive_rate"]) for p in audit.get("points", [])]
    series = [
        Series([(0, 0), *reached], "area", "a"),
        Series([(0, 0), (1, 1)], "line", "quiet"),
        Series([(0, 0), *reached], "line", "a"),
        Series(found, "dots", "b"),
    ]
    title = (
        "The most that any attacker can reach: share of members recognised against share of others "
        "accused"
    )
    return charts.chart(
        title,
        series,
        Axis("wrongly accused (false positives)", 0, 1, True),
        Axis("recognised (true positives)", 0, 1, True),
    )


def _over_steps(rows: list[dict[str, Any]], key: str, label: str, tone: str, steps: int) -> Any:
    points = [
        (float(r["step"]), float(r[key]))
        for r in rows
        if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])
    ]
    if not points:
        return words.absent(f"metrics.jsonl holds no finite {key}")
    if key == "epsilon":
        points = [(0.0, 0.0), *points]
    high = 1.0 if key == "test_accuracy" else max(v for _, v in points) * 1.08 or 1.0
    shapes = [Series(points, "line", tone)] + (
        [Series(points, "dots", tone)] if len(points) <= 3 else []
    )
    return charts.chart(
        f"{label} over steps",
        shapes,
        Axis("step", 0, steps),
        Axis(label, 0, high, key == "test_accuracy"),
    )
