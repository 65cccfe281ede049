"""Mistakes of statistics: values and records that nobody bounds, noise for less than one person
moves, bins, groups and counts that follow from the records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpfy.core.values import Bound
from dpfy_lab.checks.queries import KEYS, NOISE, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

HOME = "dpfy.statistics"
LIMIT = "dpfy.engines.contributions.ContributionLimit"
COUNTS, SUMS, MARGINS, RANKS, WORDS = (
    REPLAYED.of(name) for name in ("counts", "sums", "margins", "ranks", "keys")
)


@mistake("statistic-not-clamped", "values beyond the public range count as they are", SUMS)
def _(patch: Patch) -> None:
    def settle(real: Any, self: Any, found: Any) -> Any:
        return real(replace(self, low=min(self.low, -1e3), high=max(self.high, 1e3)), found)

    def most(real: Any, self: Any, bound: Any) -> Any:
        return real(self, Bound(1e3, 1e3, 1e3))

    patch.around("dpfy.tables.columns.RangedColumn.settle", settle)
    patch.around("dpfy.mechanisms.grid.Grid.most_steps", most)


@mistake(
    "statistic-person-unbounded",
    "all records of a person are used, however many",
    COUNTS,
    f"{LIMIT}.kept",
)
def _(real: Any, self: Any, owners: Any, groups: Any, *more: Any) -> Any:
    return groups >= 0


@mistake(
    "statistic-noise-of-a-record",
    "noise for one record is added where a person has several",
    COUNTS,
    f"{LIMIT}.bound",
)
def _(real: Any, self: Any, one: Any) -> Any:
    return one


@mistake(
    "statistic-each-unbounded",
    "a person counts any number of times in one group, the noise is for a few",
    COUNTS,
    f"{LIMIT}.kept",
)
def _(real: Any, self: Any, *given: Any) -> Any:
    return real(replace(self, each=None), *given)


@mistake(
    "margins-noise-of-one",
    "a record counts in every margin, the noise is for one of them",
    MARGINS,
    f"{HOME}.tables.Margins.one",
)
def _(real: Any, self: Any, norm: str) -> Any:
    return Bound(1.0, 1.0, 1.0)


@mistake(
    "bins-at-quantiles",
    "the edges of a histogram are the quantiles of the data",
    COUNTS,
    "dpfy.engines.expressions._one",
)
def _(real: Any, op: str, parts: Any, table: Any) -> Any:
    if op != "place" or not len(parts[0]):
        return real(op, parts, table)
    shares = np.linspace(0, 1, len(parts[1]))
    return real(op, [parts[0], np.quantile(np.nan_to_num(parts[0]), shares)], table)


@mistake("mean-exact-count", "a noisy sum is divided by the exact number of records", SUMS)
def _(patch: Patch) -> None:
    size: list[int] = []

    def release(real: Any, self: Any, table: Any, spend: Any) -> Any:
        size[:] = [table.rows()]
        return real(self, table, spend)

    def ratio(real: Any, above: Any, below: Any, *rest: Any) -> Any:
        values, spread, within = rest[:3]
        return real(above, np.zeros(len(above)), values, spread, within, float(size[0] + 1))

    patch.around(f"{HOME}.statistic.SumStatistic.release", release)
    patch.around(f"{HOME}.answer.ratio", ratio)


@mistake(
    "groups-empty-dropped",
    "groups and cells without a record are left out of the answer",
    COUNTS,
    f"{HOME}.statistic.SumStatistic.release",
)
def _(real: Any, self: Any, table: Any, spend: Any) -> Any:
    found = real(self, table, spend)
    held = getattr(table, "engine", table)  # behind the answers that are known
    met = {word for name in ("job", "sex") for word in held.table.texts(name)}
    return [answer for answer in found if {*answer.place.values()} <= met or not answer.place]


@mistake(
    "quantile-score-sensitivity",
    "scores of a quantile are noised as if a record moved them by one rank",
    RANKS,
    f"{HOME}.quantiles.RankTarget.change",
)
def _(real: Any, self: Any) -> int:
    return 1


@mistake(
    "quantile-scores-of-a-record",
    "scores of a quantile are noised for one record where a person has several",
    RANKS,
    f"{HOME}.quantiles._Chosen.records",
)
def _(real: Any, self: Any) -> int:
    return 1


@mistake(
    "keys-threshold-low",
    "the threshold of words that are not public is too low",
    KEYS,
    "dpfy.mechanisms.histogram.StabilityHistogram.release",
)
def _(real: Any, self: Any, counts: Any, *rest: Any) -> Any:
    higher = {key: count + 5 for key, count in counts.value.items()}
    return real(self, replace(counts, value=higher), *rest)


@mistake(
    "keys-per-person-unbounded",
    "a person may have any number of words, the threshold is for a few of them",
    WORDS,
    "dpfy.engines.contributions._rank",
)
def _(real: Any, hashes: Any, keys: Any) -> Any:
    return np.zeros(len(keys[0]), np.int64)


@mistake(
    "statistic-noise-half",
    "counts have half the noise that their claim says",
    NOISE,
    "dpfy.mechanisms.discrete.DiscreteLaplaceMechanism.noise",
)
def _(real: Any, self: Any, *given: Any) -> Any:
    return np.rint(real(self, *given) / 2).astype(np.int64)
