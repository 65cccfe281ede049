"""Single cells, whatever a source holds: as words, as numbers, as days.

Guarantees: no cell raises an error, and no cell changes how another one is read.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Mask = NDArray[np.bool_]
PLAIN = frozenset({str, int, float, type(None)})
"""Cells of these types that are equal are the same word."""
EPOCH = date(1970, 1, 1).toordinal()
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
LARGE = 2.0**63
"""Whole floats from here on are written as floats."""


def word(cell: Any) -> str:
    """A cell as a word, "" where it has none: whole floats as whole numbers, since missing cells
    make floats of them; decimals with the digits that they have.
    """
    if type(cell) is str:
        return cell.strip()
    try:
        if cell is None or cell != cell:  # NaN is not itself
            return ""
        if isinstance(cell, float | np.floating):
            whole = float(cell).is_integer() and abs(float(cell)) < LARGE
            return str(int(cell)) if whole else str(float(cell))
        return format(cell, "f") if isinstance(cell, Decimal) else str(cell).strip()
    except Exception:  # whatever an object of a stranger does when it is shown
        return ""


def number(cell: Any, missing: Sequence[str]) -> float:
    """A cell as a number: infinite where it is beyond every float, NaN where it is none."""
    try:
        if isinstance(cell, str):
            text = cell.strip()
            plain = text.isascii() and "_" not in text and text not in missing
            return float(text) if plain else math.nan
        return math.nan if isinstance(cell, bytes | bytearray) else float(cell)
    except OverflowError:
        return math.inf if str(cell)[:1] != "-" else -math.inf
    except Exception:  # text, an object, nothing
        return math.nan


def numbers(cells: Any, missing: Sequence[str]) -> Floats:
    """Cells as numbers; NaN where one is missing."""
    held = array(cells)
    if isinstance(held, np.ndarray):
        if held.dtype.kind in "biuf":
            return held.astype(np.float64, copy=False)
        if held.dtype.kind in "mMc":  # dates and complex numbers are no numbers here
            return np.full(len(held), np.nan)
        held = held.tolist()
    if set(map(type, held)) <= {str} and not any(number(m, ()) == number(m, ()) for m in missing):
        try:
            if "_" not in (text := "".join(held)) and text.isascii():
                return np.fromiter(map(float, held), np.float64, len(held))
        except ValueError:  # one of them is no number
            pass
    if set(map(type, held)) <= PLAIN:
        place, codes = _coded(held)
        return np.array([number(cell, missing) for cell in place], np.float64)[codes]
    return np.array([number(cell, missing) for cell in held], np.float64)


def _coded(held: Sequence[Any]) -> tuple[list[Any], Codes]:
    """The different cells, and the place of each cell among them."""
    place = {cell: k for k, cell in enumerate(dict.fromkeys(held))}
    return list(place), np.fromiter(map(place.__getitem__, held), np.int64, len(held))


def array(cells: Any) -> Any:
    """The cells of a column of any library as an array or a list."""
    if isinstance(cells, np.ndarray | list | tuple):
        return cells
    try:
        if hasattr(cells, "to_pylist"):  # Arrow, which decodes a missing word as the last one
            if str(cells.type).startswith("dictionary"):
                return listed(cells)
            return cells.to_numpy(zero_copy_only=False)
        return cells.to_numpy() if hasattr(cells, "to_numpy") else list(cells)
    except Exception:  # Arrow raises for a cell that it has no value for
        return listed(cells)


def taken(cells: Any, places: Codes) -> Any:
    """The cells at these places."""
    held = array(cells)
    return held[places] if isinstance(held, np.ndarray) else [held[k] for k in places.tolist()]


def listed(column: Any) -> list[Any]:
    """The cells of an Arrow column. One that Python has no value for, as a date in the year
    287,000, is None: a missing cell.
    """
    try:
        return list(column.to_pylist())
    except Exception:
        return [_scalar(scalar) for scalar in column]


def _scalar(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except Exception:  # overflow, letters that are none, whatever a type of its own does
        return None


def distinct(cells: Any) -> tuple[list[str], Codes]:
    """The words of a column, and the place of each cell among them; -1 where there is no value. A
    word may stand there twice.
    """
    if hasattr(cells, "dictionary_encode"):  # Arrow
        try:
            held = cells.combine_chunks() if hasattr(cells, "combine_chunks") else cells
            held = held if hasattr(held, "dictionary") else held.dictionary_encode()
            places = np.asarray(held.indices.fill_null(-1), np.int64)
            return [word(w) for w in listed(held.dictionary)], places
        except Exception:  # a type that has no dictionary
            return distinct(listed(cells))
    if hasattr(cells, "cat") and hasattr(cells.cat, "codes"):  # a pandas column of categories
        return [word(w) for w in cells.cat.categories], np.asarray(cells.cat.codes, np.int64)
    held = array(cells)
    pandas = sys.modules.get("pandas")
    if isinstance(held, np.ndarray):
        if held.dtype.kind == "M":
            held = np.datetime_as_string(held, unit="s")
        elif (
            pandas is not None
            and held.dtype.kind == "O"
            and pandas.api.types.infer_dtype(held, skipna=True) == "string"
        ):
            places, found = pandas.factorize(held)
            return [word(w) for w in found], np.asarray(places, np.int64)
        held = held.tolist()
    if not set(map(type, held)) <= PLAIN:
        held = [word(cell) for cell in held]
    place, codes = _coded(held)
    return [word(cell) for cell in place], codes


def days(cells: Any, missing: Sequence[str]) -> Floats:
    """Dates, and of times their days, as days since 1970; NaN where a cell is none."""
    held = array(cells)
    if isinstance(held, np.ndarray) and held.dtype.kind == "M":
        whole = held.astype("datetime64[D]")
        return np.where(np.isnat(whole), np.nan, whole.astype(np.float64))
    words, places = distinct(held)
    found = [math.nan if text in missing else day(text) for text in words]
    return np.array([*found, math.nan])[places]


def day(text: str) -> float:
    """The day, since 1970, that a text begins with, as 2020-01-31; NaN where it begins with none."""
    try:
        if DAY.match(text):
            return float(date.fromisoformat(text[:10]).toordinal() - EPOCH)
    except ValueError:
        pass
    return math.nan
