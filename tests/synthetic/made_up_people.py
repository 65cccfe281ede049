"""Small made-up tables and schemas for the tests of synthetic data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SCHEMA = """
missing = ["", "?"]

[columns.age]
kind = "number"
range = [18, 80]
bins = 8
required = true

[columns.job]
kind = "category"
categories = ["clerk", "nurse", "cook"]

[columns.grade]
kind = "category"
categories = ["low", "mid", "high"]
ordered = true
required = true

[columns.since]
kind = "date"
range = ["2020-01-01", "2021-12-31"]
every = "year"

[columns.rich]
kind = "label"
classes = ["no", "yes"]
required = true

[columns.id]
ignore = true
"""


def people(count: int, seed: int = 0) -> dict[str, list[str]]:
    """Records that obey the schema, with dependences, some missing cells, and an owner of about
    three records each.
    """
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 81, count)
    rich = (age + rng.integers(-20, 20, count) > 50).astype(int)
    job = np.where(rng.random(count) < 0.7, rich, rng.integers(0, 3, count))
    grade = np.clip(job + rng.integers(0, 2, count), 0, 2)
    years = rng.integers(0, 2, count)
    return {
        "age": [str(v) for v in age],
        "job": [["clerk", "nurse", "cook", ""][3 if rng.random() < 0.05 else v] for v in job],
        "grade": [["low", "mid", "high"][v] for v in grade],
        "since": [
            f"202{y}-0{1 + int(rng.integers(0, 9))}-1{int(rng.integers(0, 9))}" for y in years
        ],
        "rich": [["no", "yes"][v] for v in rich],
        "id": [f"p{v}" for v in rng.integers(0, max(1, count // 3), count)],
    }


def write_csv(path: Path, columns: dict[str, list[str]]) -> Path:
    """The records as a CSV file."""
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path
