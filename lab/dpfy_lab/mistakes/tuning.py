"""Mistakes of a search for settings: each of them voids the theorem that makes it cheap."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpfy.data.records import Records, as_records
from dpfy_lab.checks.tuning import CANARY, LOSERS, PARTS, PEOPLE, PROPOSALS, SCORES, USERS
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

HOME = "dpfy.tuning"
TRIAL = f"{HOME}.trial.Trial"


@mistake(
    "search-fixed-number",
    "the number of trials is fixed, and charged as random",
    CANARY,
    f"{HOME}.run.drawn",
)
def _(real: Any, claim: Any, permit: Any, randomness: Any) -> int:
    return int(claim.payment.trials)


@mistake(
    "search-all-released",
    "every trial leaves a search that is charged for the best one",
    LOSERS,
    f"{HOME}.outcome._rows",
)
def _(real: Any, claim: Any, found: Any, rows: Any) -> Any:
    return [{**row.to_json(), "selected": number == found.number} for number, row in rows.items()]


@mistake(
    "search-score-exact",
    "the best trial is shown with its score on private records, without noise",
    SCORES,
    f"{TRIAL}.count",
)
def _(real: Any, self: Any, right: Any) -> float:
    self.counted = float(right)
    return self.counted


@mistake(
    "search-validates-on-training",
    "trials are scored on training records, charged as records held out",
    PARTS,
    f"{TRIAL}.valid",
)
def _(real: Any, self: Any, data: Any) -> Any:
    return self.train(data)


@mistake(
    "search-adaptive",
    "settings follow from earlier scores under a random number of trials",
    PROPOSALS,
)
def _(patch: Patch) -> None:
    made: list[Any] = []

    def trial(real: Any, self: Any) -> Any:
        made.append(real(self))
        return made[-1]

    def ask(real: Any, self: Any, *given: Any) -> Any:
        again = made and made[-1].score > 0.5
        return made[-1].settings if again else real(self, *given)

    patch.around(f"{HOME}.trial.TrialTask.__call__", trial)
    patch.around(f"{HOME}.search.RandomSearch.ask", ask)


@mistake(
    "search-score-of-a-record",
    "every record of a user counts in a score, the noise is for one of them",
    USERS,
    f"{HOME}.trial._points",
)
def _(real: Any, right: Any, scored: Any, each: int) -> int:
    return each * int(right.sum())


@mistake(
    "search-parts-of-records",
    "each record of a user tosses a coin of its own for the part that it is in",
    PEOPLE,
    f"{HOME}.terms.kept_users",
)
def _(real: Any, owned: Any, coins: Any, *rest: Any) -> Any:
    count = len(as_records(owned.fields))
    kept = np.flatnonzero(np.resize(coins, count))
    whole = as_records(owned.fields)
    return owned.at(Records(tuple(field[kept] for field in whole.tensors)), kept)
