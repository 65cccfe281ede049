"""The public columns of the tables that statistics are tested on."""

from __future__ import annotations

from dpfy.tables.columns import Category, Date, Number, OpenColumn

COLUMNS = {
    "age": Number("age", 0, 100),
    "hours": Number("hours", -5, 60, fill=40),
    "share": Number("share", 0, 1),
    "sex": Category("sex", ("f", "m")),
    "job": Category("job", ("a", "b", "c")),
    "guess": Category("guess", ("f", "m")),
    "day": Date("day", "2019-11-30", "2021-02-28"),
    "id": OpenColumn("id"),
}
