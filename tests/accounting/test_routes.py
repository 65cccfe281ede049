"""Records drawn one by one or users drawn whole: which leaves less noise, and from which number of
records of a user on.
"""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest

from dpfy import accounting
from dpfy.accounting import user_level
from dpfy.cli.app import main
from dpfy.core import events
from dpfy.core.errors import InvalidInput

ASKED = [
    "--users",
    400,
    "--max-contributions",
    3,
    "--batch-size",
    100,
    "--steps",
    20,
    "--epsilon",
    3,
    "--delta",
    1e-4,
]


def settings(count: int, seed: int, most: int):
    """Random public settings."""
    rng = random.Random(seed)
    for _ in range(count):
        users = int(10 ** rng.uniform(2, 4))
        each = rng.randint(2, most)
        records = None if rng.random() < 0.5 else rng.randint(users, users * each)
        batch = min(users * rng.uniform(0.02, 1.2), records or users * each)
        guarantee = (10 ** rng.uniform(-0.5, 1), 10 ** rng.uniform(-7, -4))
        yield user_level.UserSetting(
            users,
            each,
            max(batch, 2.0),
            rng.randint(1, 300),
            *guarantee,
            rng.choice([0, rng.random() ** 3]),
            records,
        )


def exhaustive(setting: user_level.UserSetting) -> list[tuple[int, str]]:
    """Where the better route changes, by looking at every number."""
    least, most = setting.range()
    found = [(each, user_level.at(setting, each).better) for each in range(least, most + 1)]
    return [found[0], *[b for a, b in pairwise(found) if a[1] != b[1]]]


@pytest.mark.parametrize("setting", settings(2, 5, 6), ids=str)
def test_the_crossing_is_that_of_an_exhaustive_search(setting):
    assert user_level.compare(setting)[1] == exhaustive(setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", settings(24, 2, 24), ids=str)
def test_the_crossing_is_that_of_an_exhaustive_search_in_many_settings(setting):
    assert user_level.compare(setting)[1] == exhaustive(setting)


def test_both_routes_keep_the_guarantee_and_records_never_need_more_than_users_of_copies():
    setting = user_level.UserSetting(500, 4, 100.0, 30, 3.0, 1e-5, alike=1.0)
    for row in user_level.compare(setting)[0]:
        one_by_one = user_level.of_group(events.poisson(row.els_noise, row.rate, 30), row.each)
        for event in (one_by_one, events.poisson(row.uls_noise, row.rate, 30)):
            assert 2.99 < accounting.epsilon(event, 1e-5) <= 3.0
        assert row.better == "records", "a sum of coins spreads less than one coin for all of them"
        assert row.each == 1 or row.even < 1
    apart = user_level.at(user_level.UserSetting(500, 4, 100.0, 30, 3.0, 1e-5), 4)
    alike = user_level.at(setting, 4)
    assert alike.uls == pytest.approx(apart.uls * math.sqrt(4))
    even = user_level.at(
        user_level.UserSetting(500, 4, 100.0, 30, 3.0, 1e-5, alike=max(0.0, apart.even)), 4
    )
    assert even.uls == pytest.approx(even.els, rel=1e-9)


def test_the_verb_prints_one_object_and_a_picture(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(
            [
                str(word)
                for word in (
                    "plan",
                    "compare",
                    "users",
                    *ASKED,
                    "--json",
                    "--plot",
                    tmp_path / "users.svg",
                )
            ]
        )
    assert stop.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["better"] == told["routes"][-1]["better"]
    assert told["crossings"][0]["from"] == 1
    assert (tmp_path / "users.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("named", "said"),
    [({"users": 0}, "users"), ({"most": 300}, "max_contributions"), ({"batch_size": 1e9}, "in play"), ({"alike": 2.0}, "alike"),  # noqa: E501
     ({"records": 5}, "at least one for "
                      "each"), ({"epsilon": 0.0}, "epsilon"), ({"delta": 1.0}, "delta"), ({"alike": math.nan}, "alike")],  # noqa: E501
)  # fmt: skip
def test_bad_settings_are_refused(named, said):
    good = {"users": 100, "most": 4, "batch_size": 10.0, "steps": 5, "epsilon": 1.0, "delta": 1e-3}
    with pytest.raises(InvalidInput, match=said):
        user_level.UserSetting(**(good | named))
