"""The public columns of the tables that statistics are tested on."""

from __future__ import annotations

from dpfy.statistics.columns import Number, Open, Words

COLUMNS = {
    "age": Number("age", 0, 100),
    "hours": Number("hours", -5, 60, fill=40),
    "share": Number("share", 0, 1),
    "sex": Words("sex", ("f", "m")),
    "job": Words("job", ("a", "b", "c")),
    "guess": Words("guess", ("f", "m")),
    "id": Open("id"),
}
