"""Figures as SVG text: lines with markers and bands, histograms, heat maps. The same data gives the
same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "dpfy",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Line:
    """One curve: its label, points, how it is drawn, and the half-width of a band around it if
    there is one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"
    band: Sequence[float] | None = None


@dataclass(frozen=True)
class Axes:
    """Labels and scales of a figure, and values to mark by dashed lines: (value, label)."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)


def lines(curves: Sequence[Line], axes: Axes) -> str:
    """Curves over one pair of axes."""
    with rc_context(STYLE):
        canvas = Canvas(figsize=(5.2, 3.4), layout="constrained")
        plot = canvas.subplots()
        for curve in curves:
            (drawn,) = plot.plot(
                curve.x,
                curve.y,
                curve.style,
                label=curve.label or None,
                linewidth=1.4,
                markersize=4,
            )
            if curve.band is not None:
                low = [v - w for v, w in zip(curve.y, curve.band, strict=True)]
                high = [v + w for v, w in zip(curve.y, curve.band, strict=True)]
                plot.fill_between(curve.x, low, high, alpha=0.2, color=drawn.get_color())
        _dress(plot, axes)
        if any(curve.label for curve in curves):
            plot.legend(fontsize=8)
        return _svg(canvas)


def histogram(edges: Sequence[float], counts: Sequence[float], axes: Axes) -> str:
    """Bars between `edges`, with marks as vertical lines."""
    with rc_context(STYLE):
        canvas = Canvas(figsize=(5.2, 3.4), layout="constrained")
        plot = canvas.subplots()
        plot.stairs(counts, edges, fill=True, alpha=0.7)
        _dress(plot, axes)
        return _svg(canvas)


def heat(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    axes: Axes,
    *,
    write: bool = True,
) -> str:
    """A table of numbers as colours; `rows` from top to bottom."""
    with rc_context(STYLE | {"axes.grid": False}):
        canvas = Canvas(figsize=(5.2, 4.0), layout="constrained")
        plot = canvas.subplots()
        picture = plot.imshow(values, aspect="auto", cmap="viridis")
        canvas.colorbar(picture, ax=plot)
        plot.set_xticks(range(len(columns)) if columns else [], columns)
        plot.set_yticks(range(len(rows)) if rows else [], rows)
        plot.set_xlabel(axes.x)
        plot.set_ylabel(axes.y)
        if write:
            top = max(map(max, values))
            middle, digits = (top + min(map(min, values))) / 2, 0 if top >= 10 else 1
            for i, row in enumerate(values):
                for j, value in enumerate(row):
                    plot.text(
                        j,
                        i,
                        f"{value:.{digits}f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="w" if value < middle else "k",
                    )
        return _svg(canvas)


def _dress(plot: Any, axes: Axes) -> None:
    plot.set_xlabel(axes.x)
    plot.set_ylabel(axes.y)
    if axes.log_x:
        plot.set_xscale("log")
    if axes.log_y:
        plot.set_yscale("log")
    for value, label in axes.marks:
        plot.axvline(value, linestyle="--", color="0.4", linewidth=1)
        plot.annotate(
            label,
            (value, 1),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            ha="left",
            va="top",
            rotation=90,
        )


def _svg(canvas: Canvas) -> str:
    out = io.StringIO()
    canvas.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
