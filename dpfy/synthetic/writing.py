"""Cells as a table: rows that obey the constraints, with a value in each cell, as CSV."""

from __future__ import annotations

import io

import numpy as np

from dpfy.core.randomness import Randomness
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.constraints import within_bins
from dpfy.synthetic.domain import Domain

CHUNK = 1 << 16
"""Rows that are written at a time."""


def allowed(domain: Domain, codes: Codes) -> Codes:
    """The rows that obey the constraints: those that rounding, or a network, let through are left
    out.
    """
    keep = np.ones(len(codes), bool)
    for rule in domain.constraints:
        keep &= rule.allowed(domain.columns)[tuple(codes[:, number] for number in rule.clique)]
    return codes[keep]


def written(domain: Domain, codes: Codes, randomness: Randomness) -> bytes:
    """The table as CSV."""
    whole = io.StringIO()
    whole.write(_line(domain.names))
    for number, start in enumerate(range(0, len(codes), CHUNK)):
        rng = randomness.generator("synthetic values", number)
        columns = within_bins(domain.columns, domain.constraints, codes[start : start + CHUNK], rng)
        safe = [[_cell(text) for text in column] for column in columns]
        whole.writelines(",".join(row) + "\n" for row in zip(*safe, strict=True))
    return whole.getvalue().encode()


def _cell(text: str) -> str:
    return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n\r;\t') else text


def _line(cells: tuple[str, ...]) -> str:
    return ",".join(_cell(text) for text in cells) + "\n"
