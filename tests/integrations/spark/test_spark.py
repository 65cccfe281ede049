"""Spark and the reference are one: the same whole numbers and the same answers, with any partitions,
and where an executor is killed in the middle of a query. `make test-spark` runs this.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

pyspark_sql = pytest.importorskip("pyspark.sql")

from tests.engines.test_engines import LIMITS, SCHEMA, released, table  # noqa: E402

import dpfy  # noqa: E402
from dpfy.engines.aggregates import MemoryEngine  # noqa: E402
from dpfy.engines.contributions import ContributionLimit  # noqa: E402
from dpfy.engines.spark_engine import SparkEngine  # noqa: E402
from dpfy.report.verify import verify  # noqa: E402
from dpfy.tables import PrivateTable  # noqa: E402

TEXTS = [
    "count() by sex where age > 18",
    "mean(pay) by month(when)",
    "quantile(age, 0.25, 0.5) by guess",
    "margins(sex, job, guess, order=2)",
    "top(note)",
    "distinct(who) by sex",
]


@pytest.fixture(scope="module")
def spark():
    os.environ["PYSPARK_PYTHON"] = sys.executable
    made = (
        pyspark_sql.SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.memory", "512m")
        .getOrCreate()
    )
    yield made
    made.stop()


def executors(application: str) -> list[int]:
    """The processes of the executors of an application."""
    told = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True).stdout
    lines = [line.split(maxsplit=1) for line in told.splitlines()]
    return [
        int(pid)
        for pid, args in lines
        if "CoarseGrainedExecutorBackend" in args and application in args
    ]


@pytest.mark.parametrize("seed", range(3))
def test_spark_finds_what_the_reference_finds(spark, seed, tmp_path):
    rows = table(np.random.default_rng(seed), 400)
    pq.write_table(rows, tmp_path / "rows.parquet")
    owner = None if seed == 0 else "who"
    limit = ContributionLimit() if owner is None else LIMITS[seed]
    frame = spark.read.parquet(str(tmp_path / "rows.parquet")).repartition(2 + seed)
    engines = [
        MemoryEngine(PrivateTable(rows, SCHEMA, owner)),
        SparkEngine(frame, SCHEMA, owner),
    ]
    for text in TEXTS[2 * seed : 2 * seed + 2]:
        one, other = (released(engine, text, owner, limit, "laplace") for engine in engines)
        assert one == other, text


def test_a_killed_executor_changes_no_answer(spark, tmp_path):
    rows = table(np.random.default_rng(5), 3000)
    pq.write_table(rows, tmp_path / "rows.parquet")
    frame = spark.read.parquet(str(tmp_path / "rows.parquet")).repartition(8)
    person = dpfy.Person("who", at_most=3)

    def ask(data, place):
        people = dpfy.Dataset(data, SCHEMA, unit=person)
        run = dpfy.Run(tmp_path / place, seed=7)
        return dpfy.query(people, "count(), mean(pay) by sex", epsilon=1.0, delta=1e-6, run=run)

    due = ask(tmp_path / "rows.parquet", "memory")
    spark.range(100).repartition(2).count()  # both executors are up
    killed = []

    def kill():
        time.sleep(1.0)
        killed.append(executors(spark.sparkContext.applicationId)[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = ask(frame, "spark")
    killer.join()
    assert killed
    assert found.answers == due.answers
    assert all(finding.holds for finding in verify(tmp_path / "spark"))
