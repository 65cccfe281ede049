"""What an estimator has learnt, to look at: a table with a bar for each row, as text or as an SVG
picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LONG, BAR = 24, 220
"""Characters of a bar in text; its width in a picture."""


@dataclass(frozen=True)
class Explanation:
    """Rows under their heads. The first column names a row, the second is its size, drawn as a bar;
    others are beside it.

    `note` says how far off the figures may be: noise is part of every one of them.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        shown = [[_text(v) for v in row] for row in self.rows]
        widths = [max([len(h), *(len(r[k]) for r in shown)]) for k, h in enumerate(self.heads)]
        lines = [
            "  ".join(
                h.ljust(w) if k == 0 else h.rjust(w)
                for k, (h, w) in enumerate(zip(self.heads, widths, strict=True))
            )
        ]
        for row, bar in zip(shown, self._bars(LONG), strict=True):
            cells = (
                v.ljust(w) if k == 0 else v.rjust(w)
                for k, (v, w) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join(cells) + "  " + "#" * round(abs(bar)))
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _bars(self, most: float) -> Sequence[float]:
        sizes = [float(row[1]) for row in self.rows]
        top = max((abs(s) for s in sizes), default=0.0) or 1.0
        return [most * s / top for s in sizes]

    def svg(self) -> str:
        """The table as a picture: bars to the right for positive sizes, to the left for negative
        ones.
        """
        height, middle = 18 * (len(self.rows) + 2), 220 + BAR
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{middle + BAR + 90}" '
            f'height="{height}" font-size="12">'
        ]
        parts.append(f'<text x="4" y="14">{escape(self.heads[0])} / {escape(self.heads[1])}</text>')
        for k, (row, bar) in enumerate(zip(self.rows, self._bars(BAR), strict=True)):
            y = 18 * (k + 1) + 6
            parts.append(f'<text x="4" y="{y + 11}">{escape(_text(row[0])[:34])}</text>')
            parts.append(
                f'<rect x="{middle + min(bar, 0):.1f}" y="{y}" width="{abs(bar):.1f}" height="13" '
                f'fill="#4477aa"/>'
            )
            parts.append(
                f'<text x="{middle + max(bar, 0) + 4:.1f}" '
                f'y="{y + 11}">{escape(_text(row[1]))}</text>'
            )
        parts.append(f'<text x="4" y="{height - 4}">{escape(self.note)}</text></svg>')
        return "".join(parts)

    def _repr_html_(self) -> str:
        return self.svg()


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
