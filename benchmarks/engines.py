"""A private query against the same plain aggregates, both in DuckDB over the same Parquet files.

    python benchmarks/engines.py --rows 10000000 --persons 1000000

Times are CPU seconds of this process (all threads) and seconds of the clock, the best of `--repeats`
runs that take turns. The plain query reads the same columns and makes the same sums without moving
numbers into their range. The figures of the private query hold its plan, not its ledger and report.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from dpfy.core.randomness import Randomness
from dpfy.core.values import mock_permit
from dpfy.engines.aggregates import Answered
from dpfy.engines.duckdb_engine import of_parquet
from dpfy.queries.plan import QueryTerms, plan
from dpfy.statistics.statistic import Spend, key_of
from dpfy.tables import Category, Number, OpenColumn, Schema

SCHEMA = Schema.of(
    [
        Number("charge", 0, 500),
        Number("age", 0, 100),
        Category("diagnosis", [f"d{k}" for k in range(8)]),
        OpenColumn("patient"),
    ]
)
TEXTS = {
    "sums": "SELECT diagnosis, COUNT(*), AVG(charge) FROM visits WHERE age >= 18 GROUP BY diagnosis",
    "all": "SELECT diagnosis, COUNT(*), COUNT(DISTINCT patient), AVG(charge), MEDIAN(age) "
    "FROM visits WHERE age >= 18 GROUP BY diagnosis",
}


def generate(folder: Path, rows: int, persons: int) -> None:
    """Visits in 8 files; a person has rows / persons of them on average."""
    made = duckdb.connect()
    for part in range(8):
        made.execute(
            f"COPY (SELECT CAST(random() * {persons} AS INTEGER) AS patient, "
            "random() * 600 - 20 AS charge, CAST(random() * 100 AS INTEGER) AS age, "
            "'d' || CAST(random() * 8 AS INTEGER) AS diagnosis "
            f"FROM range({rows // 8})) TO '{folder}/{part}.parquet' (FORMAT parquet)"
        )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds and seconds."""
    cpu, clock = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - clock


def private(
    folder: Path, text: str, person: str | None, most: int, threads: int, memory: str
) -> None:
    """The releases of a query, which reads the table once."""
    terms = QueryTerms(1.0, 0.0, person, most if person else None)
    asked = plan(text, SCHEMA, terms)
    engine = of_parquet(sorted(folder.glob("*.parquet")), SCHEMA, person, "visits")
    engine.connection.execute(f"SET threads = {threads}")  # type: ignore[attr-defined]
    engine.connection.execute(f"SET memory_limit = '{memory}'")  # type: ignore[attr-defined]
    pairs = list(zip(asked.statistics, asked.claims, strict=True))
    key = key_of(Randomness.for_tests(1))
    requests = [s.asked(engine.schema, claim, terms.contribution, key) for s, claim in pairs]
    known = Answered(engine, requests)
    for statistic, claim in pairs:
        permit = mock_permit(claim.event, claim.releases, claim.name, claim.adjacency)
        statistic.release(known, Spend(claim, terms.contribution, permit, Randomness.for_tests(1)))


def plain(folder: Path, text: str, threads: int, memory: str) -> None:
    """The same SELECT."""
    found = duckdb.connect()
    found.execute(f"SET threads = {threads}")
    found.execute(f"SET memory_limit = '{memory}'")
    found.execute(f"CREATE VIEW visits AS SELECT * FROM '{folder}/*.parquet'")
    found.execute(text).fetchall()


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--persons", type=int, default=1_000_000)
    parser.add_argument("--at-most", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dpfy-engines-", dir=given.folder))
    limits = (given.threads, given.memory)
    try:
        generate(folder, given.rows, given.persons)
        seen: dict[str, list[tuple[float, float]]] = {}
        for _ in range(given.repeats):
            for name, text in TEXTS.items():
                seen.setdefault(f"{name}, plain", []).append(
                    timed(lambda text=text: plain(folder, text, *limits))
                )
                for who in (None, "patient"):
                    if "DISTINCT" in text and who is None:
                        continue
                    label = f"{name}, {'persons' if who else 'rows'}"
                    seen.setdefault(label, []).append(
                        timed(lambda t=text, w=who: private(folder, t, w, given.at_most, *limits))
                    )
        best = {
            name: [min(part) for part in zip(*times, strict=True)] for name, times in seen.items()
        }
        ratios = {
            name: [
                round(a / b, 2)
                for a, b in zip(times, best[name.split(",")[0] + ", plain"], strict=True)
            ]
            for name, times in best.items()
            if "plain" not in name
        }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        told = {"rows": given.rows, "persons": given.persons, "at_most": given.at_most}
        told |= {"cpu and clock seconds": best, "ratios": ratios, "peak GiB": round(peak, 2)}
        print(json.dumps(told, indent=1))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
