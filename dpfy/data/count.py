"""How many records there are to train on, counted in the file: only where its owner declared the
count public.
"""

from __future__ import annotations

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.files import DataFile
from dpfy.data.config import DataConfig
from dpfy.tables.sources import read_table

PUBLIC = "public"
"""`privacy.records = "public"`: the number of records is public, and is counted."""


def records(config: DataConfig) -> int:
    """The number of records of a table that remain to train on.

    Guarantees: only the count leaves this function.
    """
    if config.kind not in ("csv", "parquet") or config.path is None or config.user is not None:
        what = (
            "counting users"
            if config.user is not None
            else f"counting records of kind {config.kind!r}"
        )
        raise Unsupported(what, "give the public number in privacy.records (--records)")
    file = DataFile.given(config.path)
    columns = read_table(file, parquet=config.kind == "parquet")
    whole = len(next(iter(columns.values())))
    if config.test_path is not None:
        return whole
    if whole < 2:
        raise InvalidInput(
            "data.path",
            config.path,
            "must hold at least 2 records: a share is held out (data.test_fraction)",
        )
    return whole - held_out(whole, config.test_fraction)


def held_out(count: int, fraction: float) -> int:
    """How many of `count` records are held out."""
    return min(max(round(fraction * count), 1), count - 1)
