"""An evaluation as one page with figures: no script, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dpfy.synthetic.evaluate import LEARNERS

WIDTH, ROW, LEFT = 640, 26, 250

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
.warning { background: #fdecea; border-left: 6px solid #c0392b; padding: .8rem 1rem; font-weight: 600; }
.public { background: #e8f5ee; border-left: 6px solid #2e7d54; padding: .8rem 1rem; }
table { border-collapse: collapse; } td, th { padding: .25rem .9rem .25rem 0; text-align: left; }
svg { max-width: 100%; height: auto; } .bar { fill: #35618e; } .other { fill: #b9c7d6; }
text { font: 13px system-ui, sans-serif; fill: #1c2430; }
"""


def bars(title: str, rows: Sequence[tuple[str, float, str]], top: float) -> str:
    """Bars with their labels, as SVG; the third entry of a row is its style."""
    height = ROW * len(rows) + 8
    parts = [
        f'<svg role="img" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'aria-label="{escape(title, quote=True)}">'
    ]
    for number, (label, value, style) in enumerate(rows):
        y, length = 4 + ROW * number, (WIDTH - LEFT - 70) * min(max(value / top, 0.0), 1.0)
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(label[:38])}</text>'
        )
        parts.append(
            f'<rect class="{style}" x="{LEFT}" y="{y + 3}" width="{length:.1f}" '
            f'height="{ROW - 8}"/>'
        )
        parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 16}">{value:.4f}</text>')
    return "".join([*parts, "</svg>"])


def page(found: Mapping[str, Any]) -> str:
    """The page of an evaluation."""
    warning = "warning" if found["private"].startswith("NOT") else "public"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>A synthetic table, "
        "evaluated</title>",
        f"<style>{STYLE}</style></head><body><h1>A synthetic table, evaluated</h1>",
        f'<p class="{warning}">{escape(found["private"])}</p>',
        "<p>"
        + ", ".join(f"{escape(name)}: {count:,} rows" for name, count in found["rows"].items())
        + "</p>",
    ]
    parts += _marginals(found["marginals"]) + _learners(found["learners"]) + _disclosure(found)
    return "\n".join([*parts, "</body></html>\n"])


def _marginals(held: Mapping[str, Any]) -> list[str]:
    known = {degree: one for degree, one in held.items() if one["marginals"]}
    means = [
        (f"mean of all {one['marginals']} of {degree}", one["mean_l1"], "bar")
        for degree, one in known.items()
    ]
    worst = [
        (" x ".join(row["columns"]), row["l1"], "other")
        for one in known.values()
        for row in one["worst"][:3]
    ]
    top = max((value for _, value, _ in (*means, *worst)), default=1.0) or 1.0
    return [
        "<h2>Marginals</h2><p>L1 distance between the shares in the two tables: 0 is equal, 2 is "
        "nothing in common.</p>",
        bars("L1 distances of marginals", [*means, *worst], top),
    ]


def _learners(held: Mapping[str, Any]) -> list[str]:
    if not held:
        return []
    rows = []
    for name in LEARNERS:
        rows.append((f"{name}, synthetic rows", held[name]["trained_on_synthetic"]["auroc"], "bar"))
        rows.append((f"{name}, real rows", held[name]["trained_on_real"]["auroc"], "other"))
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{held[name]['trained_on_synthetic']['accuracy']:.4f}</td><td>{held[name]['trained_on_real']['accuracy']:.4f}</td></tr>"
        for name in LEARNERS
    )
    return [
        f"<h2>Learners</h2><p>Trained to predict {escape(held['target'])}, tested on real rows: "
        f"area under the ROC curve.</p>",
        bars("area under the ROC curve by learner", rows, 1.0),
        f"<table><tr><th>accuracy</th><th>synthetic rows</th><th>real rows</th></tr>{cells}"
        f"<tr><td>always the most frequent "
        f"value</td><td>{held['majority']:.4f}</td><td></td></tr></table>",
    ]


def _disclosure(found: Mapping[str, Any]) -> list[str]:
    words = {
        "copies": "rows that equal a record",
        "copies_of_holdout": "rows that equal a record of the holdout",
        "mean_distance": "columns in which the closest record differs",
        "closer_to_real": "rows closer to the records than to the holdout (0.5 is chance)",
        "membership_auroc": "membership attack, area under the ROC curve (0.5 is chance)",
    }
    rows = "".join(
        f"<tr><td>{words[key]}</td><td>{value:.4f}</td></tr>"
        for key, value in found["disclosure"].items()
    )
    apart = found["correlations"]
    return [
        f"<h2>Correlations</h2><p>Cramer's V of {apart['pairs']} pairs differs by "
        f"{apart['mean_difference']:.4f} on average, "
        f"{apart['largest']:.4f} at most.</p>",
        f"<h2>Closeness to records</h2><table>{rows}</table>",
        "<p>Differential privacy is what protects; these figures can only show that something went "
        "wrong.</p>",
    ]
