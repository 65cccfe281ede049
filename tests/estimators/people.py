"""Made-up people for the tests of estimators, and what is public about them."""

from __future__ import annotations

import numpy as np
import pandas

from dpfy.tables.columns import Category, Label, Number

JOBS = ("clerk", "nurse", "smith")
SCHEMA = (
    Number("age", 17.0, 90.0),
    Category("job", JOBS, fill="other"),
    Number("gain", 0.0, 1000.0, scale="unit", transform="log1p", fill=0.0),
    Label("rich", ("no", "yes")),
)


def people(count: int = 400, seed: int = 0) -> tuple[pandas.DataFrame, pandas.Series]:
    """A table with numbers, a category, missing cells, and a label that follows from them."""
    rng = np.random.default_rng(seed)
    age = rng.uniform(17, 90, count)
    job = rng.choice(np.array([*JOBS, "?"], object), count)
    gain = np.where(rng.random(count) < 0.1, np.nan, rng.exponential(100, count))
    score = (
        (age - 50) / 15 + (job == "nurse") + np.nan_to_num(gain) / 200 + rng.normal(0, 0.5, count)
    )
    table = pandas.DataFrame({"age": age, "job": job, "gain": gain})
    return table, pandas.Series(np.where(score > 0.7, "yes", "no"), name="rich")
