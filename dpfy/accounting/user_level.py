"""Privacy of groups, and of users who own several examples. By the event: `of_group`; from any
curve: `from_curve`.

Two routes to a guarantee for users, at one price in gradients: records drawn one by one (ELS),
or users drawn whole (ULS).

With k records of each user in play and B gradients a step on average, both routes draw at the same
rate B / (records in play). Records one by one are clipped each, and a user moves a step by as many
clip norms as records of theirs were drawn: noise s_E, which leaves s_E / B in the mean gradient.
Users whole are clipped as one: the mean of a user's k gradients has at most the length r of one of
them, and B / k users leave s_U r / (B / k). How long that mean is says how alike a user's records
are: r = sqrt((1 + (k - 1) a) / k) for gradients of one length with cosine a between them, from 1 /
sqrt(k) (nothing in common) to 1 (copies). (Charles et al. 2024; Chua et al. 2024.)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from dpfy.accounting import calibrate, table
from dpfy.accounting.rules import grouped as of_group
from dpfy.accounting.rules.stated import walked
from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.events import poisson
from dpfy.core.guarantee import Curve

MOST_GROUP = 200
"""The largest group whose guarantee is asked for."""

__all__ = ["from_curve", "of_group", "textbook"]


def textbook(epsilon: float, delta: float, size: int) -> tuple[float, float]:
    """The textbook rule: a group of k is (k epsilon, k e^{k epsilon} delta)-private (Dwork & Roth
    2014, Theorem 2.2, loosened).
    """
    check.integer("size", size)
    return size * epsilon, min(1.0, size * math.exp(size * epsilon) * delta)


def from_curve(curve: Curve, epsilon: float, size: int) -> float:
    """The delta at `epsilon` of a group of `size`, from the curve of one member alone.

    With e = epsilon / size: delta(e) (e^{k e} - 1) / (e^e - 1), see `walked`. Never above the
    textbook rule, which bounds the sum by its largest term times k.
    """
    each = check.nonnegative("epsilon", epsilon) / check.integer("size", size)
    return walked(curve.delta(each), each, size)


ELS, ULS = "records", "users"
MOST_EACH = 256
"""The most records of one user that are compared."""


@dataclass(frozen=True)
class UserSetting:
    """All of it public: users, most records of one, gradients a step, steps, guarantee, how alike a
    user's records are taken to be.

    `records` is the number of all records where users have fewer than `most`: at most so many are
    in play.
    """

    users: int
    most: int
    batch_size: float
    steps: int
    epsilon: float
    delta: float
    alike: float = 0.0
    records: int | None = None
    accountant: str = table.DEFAULT

    def __post_init__(self) -> None:
        check.integer("users", self.users, most=check.RECORDS)
        check.integer("max_contributions", self.most, most=MOST_EACH)
        check.positive("batch_size", self.batch_size)
        check.integer("steps", self.steps, most=check.STEPS)
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta", self.delta)
        if not 0 <= check.real("alike", self.alike) <= 1:
            raise InvalidInput(
                "alike",
                self.alike,
                "must lie between 0 (a user's records have nothing in common) and 1 (copies)",
            )
        if (
            self.records is not None
            and check.integer("records", self.records, most=check.RECORDS) < self.users
        ):
            raise InvalidInput(
                "records", self.records, f"must be at least one for each of the {self.users} users"
            )
        if self.batch_size > self.in_play(self.most):
            rule = (
                f"must be at most the records in play, {self.in_play(self.most)} of {self.users} "
                f"users"
            )
            raise InvalidInput("batch_size", self.batch_size, rule)

    def in_play(self, each: int) -> int:
        """The most records that there are with at most `each` of a user."""
        return min(self.users * each, self.records or self.users * each)

    def range(self) -> tuple[int, int]:
        """The least and the most records of a user with which a step has `batch_size` gradients, of
        one user at least.
        """
        least = next(
            each for each in range(1, self.most + 1) if self.in_play(each) >= self.batch_size
        )
        return least, max(least, min(self.most, math.floor(self.batch_size)))


@dataclass(frozen=True)
class UserRoutes:
    """Both routes with `each` records of a user in play: noise multipliers, and what is left in the
    mean gradient, in clip norms.
    """

    each: int
    mean: float
    rate: float
    cohort: float
    els_noise: float
    uls_noise: float
    els: float
    uls: float

    @property
    def better(self) -> str:
        """The route that leaves less noise; records one by one where both are the same."""
        return ULS if self.uls < self.els else ELS

    @property
    def even(self) -> float:
        """How alike a user's records must be for both routes to be the same: users whole win below.
        May lie outside of 0 to 1.
        """
        if self.mean == 1:
            return 1.0
        length = self.els_noise / (self.mean * self.uls_noise)
        return (self.mean * length**2 - 1) / (self.mean - 1)

    def to_json(self) -> dict[str, float | int | str]:
        """A row of the table."""
        return {
            "contributions": self.each,
            "sampling_rate": self.rate,
            "users_a_step": self.cohort,
            "records_noise_multiplier": self.els_noise,
            "users_noise_multiplier": self.uls_noise,
            "records_noise_std": self.els,
            "users_noise_std": self.uls,
            "even_if_alike": self.even,
            "better": self.better,
        }


@lru_cache(maxsize=4096)
def _noise(
    rate: float, steps: int, each: int, epsilon: float, delta: float, accountant: str
) -> float:
    return calibrate.noise(
        lambda s: of_group(poisson(s, rate, steps), each), epsilon, delta, accountant=accountant
    )


def at(setting: UserSetting, each: int) -> UserRoutes:
    """Both routes calibrated to the guarantee, with at most `each` records of a user in play."""
    rate = setting.batch_size / setting.in_play(each)
    goal = (setting.epsilon, setting.delta, setting.accountant)
    one_by_one, whole = (
        _noise(rate, setting.steps, each, *goal),
        _noise(rate, setting.steps, 1, *goal),
    )
    mean = setting.in_play(each) / setting.users
    length = math.sqrt((1 + (mean - 1) * setting.alike) / mean)
    cohort = rate * setting.users
    left = (one_by_one / setting.batch_size, whole * length / cohort)
    return UserRoutes(each, mean, rate, cohort, one_by_one, whole, *left)


def compare(setting: UserSetting) -> tuple[list[UserRoutes], list[tuple[int, str]]]:
    """Both routes at about doubling numbers of records of a user; and from which number on which of
    them leaves less noise.

    With more records in play at the same price fewer users are drawn. The noise of users drawn
    whole falls at first, and then counts for more than it falls: they win up to some number. Once
    all records are in play, a higher bound costs records drawn one by one alone. So between the
    numbers looked at here the routes cross once at most, and halving finds where.
    """
    least, most = setting.range()
    full = -(-(setting.records or 0) // setting.users)
    looked_at = {
        least,
        most,
        2,
        3,
        full,
        full + 1,
        *(least << power for power in range(most.bit_length())),
    }
    rows = [
        at(setting, each) for each in sorted(each for each in looked_at if least <= each <= most)
    ]
    changes = [(least, rows[0].better)]
    for before, after in itertools.pairwise(rows):
        if before.better != after.better:
            changes.append((_crossing(setting, before, after), after.better))
    return rows, changes


def _crossing(setting: UserSetting, before: UserRoutes, after: UserRoutes) -> int:
    """The first number of records of a user with which the better route is that of `after`."""
    low, high = before.each, after.each
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(setting, middle).better == after.better else (middle, high)
    return high
