"""Small pictures as SVG text: lines, areas, dots and a table of counts. No library, no script;
colours come from the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 12, 46

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

Pairs = Sequence[tuple[float, float]]
Place = Callable[[tuple[float, float]], tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One thing drawn: `kind` is line, area or dots; `tone` is the name of a colour in the style;
    `label` stands in a key, if given.
    """

    points: Pairs
    kind: str = "line"
    tone: str = "a"
    label: str = ""


@dataclass(frozen=True)
class Axis:
    """A direction: its label, its range, and whether its numbers are percentages or powers of
    ten.
    """

    label: str
    low: float
    high: float
    percent: bool = False
    power: bool = False

    def ticks(self) -> list[float]:
        """Four to six round numbers inside the range."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        if self.power and span >= 2:
            return [
                float(k)
                for k in range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1)
            ]
        rough = span / 4
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        """A tick's label."""
        if self.power:
            return (
                "10" + str(round(value)).translate(SUPERSCRIPT)
                if abs(value - round(value)) < 1e-9
                else f"{10**value:.2g}"
            )
        return (
            f"{100 * value:.4g}%"
            if self.percent
            else f"{value:,.4g}"
            if abs(value) < 1e5
            else f"{value:.2g}"
        )


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """An SVG picture of `series`, described by `title` for those who cannot see it."""

    def place(point: tuple[float, float]) -> tuple[float, float]:
        across = (point[0] - x.low) / ((x.high - x.low) or 1)
        upward = (point[1] - y.low) / ((y.high - y.low) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - upward * (
            HEIGHT - TOP - BOTTOM
        )

    parts = [
        f'<svg class="figure" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'aria-label="{escape(title, quote=True)}">'
    ]
    parts += _axes(x, y, place)
    for one in series:
        parts.append(_drawn(one, [place(p) for p in one.points], place((x.low, y.low))[1]))
    for row, one in enumerate(one for one in series if one.label):
        parts.append(
            f'<text class="key {one.tone}" x="{LEFT + 8}" '
            f'y="{TOP + 12 + 16 * row}">{escape(one.label)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _axes(x: Axis, y: Axis, place: Place) -> list[str]:
    parts = []
    for value in y.ticks():
        row = place((x.low, value))[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{row:.1f}" y2="{row:.1f}"/>'
        )
        parts.append(
            f'<text x="{LEFT - 7}" y="{row + 4:.1f}" text-anchor="end">{y.text(value)}</text>'
        )
    for value in x.ticks():
        column = place((value, y.low))[0]
        parts.append(
            f'<text x="{column:.1f}" y="{HEIGHT - BOTTOM + 17}" '
            f'text-anchor="middle">{x.text(value)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x.label)}</text>'
    )
    across = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 12 {across})"'
    parts.append(
        f'<text class="label" x="12" y="{across}" text-anchor="middle" '
        f"{turned}>{escape(y.label)}</text>"
    )
    return parts


def _drawn(series: Series, at: list[tuple[float, float]], floor: float) -> str:
    if not at:
        return ""
    if series.kind == "dots":
        size = 4 if len(at) <= 20 else 2.5
        return "".join(
            f'<circle class="dot {series.tone}" cx="{a:.1f}" cy="{b:.1f}" r="{size}"/>'
            for a, b in at
        )
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    if series.kind == "area":
        return (
            f'<polygon class="area {series.tone}" points="{at[0][0]:.1f},{floor:.1f} {path} '
            f'{at[-1][0]:.1f},{floor:.1f}"/>'
        )
    return f'<polyline class="line {series.tone}" points="{path}"/>'


def counts(title: str, rows: Sequence[Sequence[int]], across: str, down: str) -> str:
    """A square table of counts, darker where there are more."""
    size = len(rows)
    cell = min(34.0, 330 / size)
    left, top = 40.0, 30.0
    width, height = left + cell * size + 6, top + cell * size + 6
    most = max((v for row in rows for v in row), default=0) or 1
    parts = [
        f'<svg class="figure counts" role="img" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'style="max-width: {1.25 * width:.0f}px" aria-label="{escape(title, quote=True)}">'
    ]
    parts.append(
        f'<text class="label" x="{left + cell * size / 2:.1f}" y="11" '
        f'text-anchor="middle">{escape(across)}</text>'
    )
    middle = top + cell * size / 2
    parts.append(
        f'<text class="label" x="10" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 '
        f'10 {middle:.1f})">{escape(down)}</text>'
    )
    for i, row in enumerate(rows):
        centre = top + cell * (i + 0.5)
        if size <= 20:
            parts.append(f'<text x="{left - 6}" y="{centre + 4:.1f}" text-anchor="end">{i}</text>')
            parts.append(
                f'<text x="{left + cell * (i + 0.5):.1f}" y="{top - 5}" '
                f'text-anchor="middle">{i}</text>'
            )
        for j, value in enumerate(row):
            tone = "right" if i == j else "wrong"
            x, y = left + cell * j, top + cell * i
            shade = 0.06 + 0.5 * math.sqrt(value / most) if value else 0.0
            parts.append(
                f'<rect class="{tone}" x="{x:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" '
                f'height="{cell - 1:.1f}" '
                f'fill-opacity="{shade:.2f}"/>'
            )
            if value and size <= 12:
                parts.append(
                    f'<text class="count" x="{x + cell / 2:.1f}" y="{centre + 4:.1f}" '
                    f'text-anchor="middle">{value}</text>'
                )
    return "".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Coordinate:
    """One upright axis of a picture of parallel coordinates: what it is, and the words at its lower
    and upper end.
    """

    label: str
    low: str
    high: str


def parallel(
    title: str, axes: Sequence[Coordinate], rows: Sequence[tuple[Sequence[float | None], str]]
) -> str:
    """Parallel coordinates: each row is a line over all axes, its places from 0 (below) to 1, and
    the name of its colour.

    A place that is None leaves the axis out. Rows that come later are drawn over those before them.
    """
    width = max(WIDTH, 90 * len(axes) + 60)
    left, right, top, bottom = 46.0, width - 46.0, 30.0, HEIGHT - 34.0
    across = [left + (right - left) * k / max(1, len(axes) - 1) for k in range(len(axes))]
    head = (
        f'<svg class="figure wide" role="img" viewBox="0 0 {width} {HEIGHT + 16}" '
        f'aria-label="{escape(title, quote=True)}">'
    )
    parts = [head]
    for x, axis in zip(across, axes, strict=True):
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        for y, text, kind in (
            (top - 8, axis.high, ""),
            (bottom + 16, axis.low, ""),
            (HEIGHT + 6, axis.label, "label"),
        ):
            parts.append(
                f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" '
                f'text-anchor="middle">{escape(_cut(text))}</text>'
            )
    for places, tone in rows:
        at = [
            (x, bottom - p * (bottom - top))
            for x, p in zip(across, places, strict=True)
            if p is not None
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        parts.append(f'<polyline class="line {tone}" points="{path}"/>')
    return "".join([*parts, "</svg>"])


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars from zero, each with its words before it and its number behind it; the third
    is the name of its colour.
    """
    most, height = max((value for _, value, _ in rows), default=0) or 1, 34 * len(rows) + 8
    parts = [
        f'<svg class="figure" role="img" viewBox="0 0 {WIDTH} {height}" '
        f'aria-label="{escape(title, quote=True)}">'
    ]
    for place, (label, value, tone) in enumerate(rows):
        y, length = 4 + 34 * place, 170 * value / most
        parts.append(
            f'<text x="150" y="{y + 17}" text-anchor="end">{escape(_cut(label, 22))}</text>'
        )
        parts.append(
            f'<rect class="bar {tone}" x="158" y="{y + 3}" width="{length:.1f}" height="20"/>'
        )
        parts.append(f'<text x="{164 + length:.1f}" y="{y + 17}">{value:.4g}</text>')
    return "".join([*parts, "</svg>"])


def _cut(text: str, most: int = 16) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
