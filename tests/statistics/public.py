"""The public columns of the tables that statistics are tested on."""

from __future__ import annotations

from dpfy.statistics.columns import CategoryColumn, NumberColumn, OpenColumn

COLUMNS = {
    "age": NumberColumn("age", 0, 100),
    "hours": NumberColumn("hours", -5, 60, fill=40),
    "share": NumberColumn("share", 0, 1),
    "sex": CategoryColumn("sex", ("f", "m")),
    "job": CategoryColumn("job", ("a", "b", "c")),
    "guess": CategoryColumn("guess", ("f", "m")),
    "id": OpenColumn("id"),
}
