"""A cell means the same in SQL as in the reference, whatever it holds: thousands of hostile cells of
every type that a source can have.
"""

from __future__ import annotations

import math
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpfy.engines import expressions as e
from dpfy.engines.aggregates import CountRequest, MemoryEngine
from dpfy.engines.duckdb_engine import of_arrow
from dpfy.engines.sources import opened
from dpfy.tables import Category, Date, Label, Number, OpenColumn, PrivateTable, Schema

R = random.Random(5)
TEXTS = [
    *(
        "",
        " ",
        "0",
        "-0",
        "+5",
        "5.",
        ".5",
        "5e3",
        "5E-3",
        "1e400",
        "-1e400",
        "1e-400",
        "inf",
        "-inf",
    ),
    *(
        "Infinity",
        "-INFINITY",
        "+inf",
        "nan",
        "NaN",
        "-nan",
        "1_000",
        "1,234.50",
        "$5",
        "0x10",
        "1e",
    ),
    *(
        "e5",
        "--5",
        "5-",
        "5 5",
        "٣",
        "１２",
        "½",
        "NA",
        "NULL",
        "None",
        "true",
        "True",
        "\u00a05\u2003",
    ),
    *(
        "\x1c7",
        "7\x1f",
        "\t8\n",
        "\x0b9",
        "\u20289",
        "a\nb",
        "a'b",
        'a"b',
        "a;b",
        "clerk",
        " clerk ",
    ),
    *(
        "Clerk",
        "clérk",
        "cle\u0301rk",
        "🙂",
        "nurse\u3000",
        "\u200bclerk",
        "(other)",
        "a|b",
        "%",
        "_",
        "\\",
    ),
    *(
        "2020-01-31",
        "2020-02-30",
        "2020-1-31",
        "2020-01-31T25:00",
        "2020-01-31 10:00:00+02",
        "0000-01-01",
    ),
    *(
        "9999-12-31",
        "10000-01-01",
        "-2020-01-31",
        "2020-01-31\nx",
        "20200131",
        "31.01.2020",
        "٢020-01-31",
    ),
    *("0001-01-01", "2020-02-29", "2019-02-29", "179769313486231580793728971405301e300", "9" * 400),
    *(
        "4.9406564584124654e-324",
        "2.4703282292062328e-324",
        "0.1",
        "100",
        "100.00000000000001",
        "?",
    ),
]


def texts(n):
    marks = "0123456789.+-eE_ ,$naif\u00a0"
    made = ["".join(R.choice(marks) for _ in range(R.randint(1, 8))) for _ in range(n // 3)]
    made += [repr(R.uniform(-200, 200)) for _ in range(n // 3)]
    made += [R.choice([" ", ""]) + R.choice(TEXTS) + R.choice([" ", ""]) for _ in range(n // 3)]
    return [*TEXTS, None, *made]


def floats(n):
    fixed = [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7e308, -1e16, 1e15, 2.0**53 + 1]
    fixed += [2.0**63, -(2.0**63), 99.99999999999999, 100.00000000000001, 1e-7, 1e22, None]
    return fixed + [math.ldexp(R.uniform(-1, 1), R.randint(-70, 70)) for _ in range(n)]


def integers(n):
    return [0, -1, None, 2**63 - 1, -(2**63), 2**53 + 1] + [R.randint(-300, 300) for _ in range(n)]


def times(n, zone):
    first = datetime(1900, 1, 1, tzinfo=zone)
    made = [first + timedelta(microseconds=R.randint(0, 6 * 10**15)) for _ in range(n)]
    return [
        None,
        datetime(1969, 12, 31, 23, 59, 59, 999999, zone),
        datetime(1970, 1, 1, tzinfo=zone),
        *made,
    ]


COLUMNS = {
    "text": pa.array(texts(3000)),
    "words": pa.array(texts(900)).dictionary_encode(),
    "double": pa.array(floats(1500)),
    "single": pa.array(floats(600)).cast(pa.float32(), safe=False),
    "long": pa.array(integers(600)),
    "unsigned": pa.array([0, 2**64 - 1, None, 2**63, *range(300)], pa.uint64()),
    "decimal": pa.array(
        [None, Decimal("1.50"), Decimal("-0.00")]
        + [Decimal(R.randint(-(10**20), 10**20)).scaleb(-R.choice([0, 2, 12])) for _ in range(600)],
        pa.decimal128(38, 12),
    ),
    "truth": pa.array([True, False, None] * 20),
    "day": pa.array(
        [None, date(1, 1, 1), date(9999, 12, 31)]
        + [date(2019, 12, 1) + timedelta(k) for k in range(400)]
    ),
    "far": pa.array([-(10**6), 3 * 10**6, 10**8, 18000], pa.int32()).cast(pa.date32()),
    "naive": pa.array(times(900, None), pa.timestamp("us")),
    "second": pa.array(times(300, None), pa.timestamp("us")).cast(pa.timestamp("s"), safe=False),
    "nano": pa.array([0, -1, 2**62, None, 1577836800 * 10**9 - 1], pa.int64()).cast(
        pa.timestamp("ns")
    ),
    "zone": pa.array(times(900, UTC), pa.timestamp("us", tz="America/New_York")),
    "nothing": pa.nulls(5),
    "bytes": pa.array([b"12", b"\xff", None]),
    "list": pa.array([[1], [], None]),
}
WORDS = (
    "clerk",
    "nurse",
    "5",
    "True",
    "0.1",
    "1.50",
    "-1",
    "2020-01-31",
    "a'b",
    "🙂",
    "inf",
    "1.500000000000",
)
MANY = (*WORDS, *(f"{k}" for k in range(6, 40)))
MISSING = ("", "NA", "?", "5.")
RANGED = [
    *(Number("x", -50, 100, **more) for more in ({}, {"fill": 7.5}, {"drop": True})),
    Number("x", -1e300, 1e300),
    *(
        Date("x", "1960-02-29", "2020-12-31", **more)
        for more in ({"parts": ("year", "month", "weekday")}, {"fill": "2001-01-01"})
    ),
]
NAMED = [
    *(
        Category("x", words, **more)
        for words in (WORDS, MANY)
        for more in ({}, {"fill": "other"}, {"fill": "5"})
    ),
    *(Label("x", words, **more) for words in (WORDS, MANY) for more in ({}, {"fill": "nurse"})),
    OpenColumn("x"),
]
WORDLESS = ("naive", "second", "nano", "zone", "bytes", "list", "nothing")


def compared(cells, column, leaves):
    """The leaves of every row, by both: rows are told apart by their number."""
    table = pa.table({"x": cells, "row": pa.array(range(len(cells)))})
    schema = Schema((column, OpenColumn("row")), MISSING)
    engines = [MemoryEngine(PrivateTable(table, schema)), of_arrow(table, schema, None, "table")]
    for leaf in leaves:
        asked = CountRequest(e.of(0), (leaf, e.text("row", 20)))
        one, other = (engine.counts(asked) for engine in engines)
        wrong = {k[1:] for k in one.keys() ^ other.keys()}
        shown = [(value, cells[int(row)].as_py()) for value, row in sorted(wrong, key=repr)[:5]]
        assert not wrong, (column, leaf, shown)
    return len(cells) * len(leaves)


FLAGS = [e.choose(flag("x"), 1, 0) for flag in (e.unfit, e.absent)]


def leaves_of(column):
    """Everything that is read of a column."""
    if isinstance(column, Date):
        return [e.number("x"), *(e.part("x", part) for part in column.parts)]
    if isinstance(column, Number):
        return [e.number("x"), e.raw("x")]
    return [e.text("x", 200), e.text("x", 3)] if isinstance(column, OpenColumn) else [e.code("x")]


@pytest.mark.parametrize("name", COLUMNS)
def test_every_cell_is_read_alike(name):
    columns = [*RANGED, *(NAMED if name not in WORDLESS else ())]
    seen = [compared(COLUMNS[name], c, [*leaves_of(c), *FLAGS]) for c in columns]
    assert sum(seen) >= 30


def test_there_are_ten_thousand_cells():
    assert sum(map(len, COLUMNS.values())) >= 10_000


FAR = [0, None, -1, 2**63 - 1, -(2**63), 2**62, 9 * 10**18, -9 * 10**18, 9 * 10**15, -(10**15)]
FAR_DAYS = [0, None, -1, 2**31 - 1, -(2**31), 2**30, -(2**30), 5881581]
FAR_CELLS = {
    **{
        f"time {unit} {zone}": pa.array(FAR, pa.int64()).cast(pa.timestamp(unit, zone))
        for unit in ("s", "ms", "us", "ns")
        for zone in (None, "UTC")
    },
    "days": pa.array(FAR_DAYS, pa.int32()).cast(pa.date32()),
    "milliseconds": pa.array([0, None, 86_400_000 * 2**30, -86_400_000], pa.int64()).view(
        pa.date64()
    ),
    **{f"duration {unit}": pa.array(FAR, pa.duration(unit)) for unit in ("s", "ms", "us", "ns")},
    "words of times": pa.array(FAR, pa.int64()).cast(pa.timestamp("s")).dictionary_encode(),
    "list of times": pa.array([[x] for x in FAR], pa.list_(pa.timestamp("s"))),
    "wide decimal": pa.array([Decimal(10) ** 60, None], pa.decimal256(70, 2)),
    "tens": pa.array([Decimal(100), None], pa.decimal128(5, -1)),
    "half": pa.array([1.0, None, math.inf], pa.float16()),
}


@pytest.mark.parametrize("name", FAR_CELLS)
def test_no_cell_stops_an_engine(name, tmp_path):
    """DuckDB raised while it read times that its microseconds do not reach."""
    cells = pa.chunked_array([FAR_CELLS[name][:1], FAR_CELLS[name][1:]])
    rows = pa.array([str(k) for k in range(len(cells))])
    table = pa.table({"x": cells, "row": rows})
    sources = [table]
    try:
        pq.write_table(table, tmp_path / "one.parquet")
        for k in range(2):
            (tmp_path / "parts").mkdir(exist_ok=True)
            pq.write_table(table, tmp_path / "parts" / f"{k}.parquet")
        sources += [tmp_path / "one.parquet", tmp_path / "parts"]
    except (pa.ArrowException, OSError):  # what no file can hold
        pass
    seen = 0
    for column in RANGED:
        schema = Schema((column, OpenColumn("row")), MISSING)
        due = MemoryEngine(PrivateTable(table, schema))
        for place, source in enumerate(sources):
            engine = opened(source, schema)
            for leaf in [*leaves_of(column), *FLAGS]:
                asked = CountRequest(e.of(0), (leaf, e.text("row", 20)))
                found = engine.counts(asked)
                if place == 0:  # the ends of the ranges of files are infinite to DuckDB
                    assert found == due.counts(asked), (column, leaf)
                seen += 1
    assert seen >= len(sources) * len(RANGED)


def test_no_cell_of_a_relation_stops_an_engine():
    duck = duckdb.connect()
    duck.execute("CREATE TABLE t AS SELECT make_timestamp(0)::TIMESTAMP_S AS x, '0' AS row")
    far = pa.table({"x": pa.array([9 * 10**18, -9 * 10**18], pa.timestamp("s")), "row": ["1", "2"]})
    duck.register("far", far)
    duck.execute("INSERT INTO t SELECT * FROM far")
    schema = Schema((RANGED[-1], OpenColumn("row")), MISSING)
    engine = opened(duck.table("t"), schema)
    found = engine.counts(CountRequest(e.of(0), (e.number("x"), e.text("row", 9))))
    assert len(found) == 3
