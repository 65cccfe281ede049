"""Users as the unit of privacy in one call and in a loop of one's own: sampled, bounded and clipped
whole, read when drawn.
"""

from __future__ import annotations

import json
import os
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import user_unit
from dpfy.data import source
from dpfy.data.batch import Draw
from dpfy.data.config import DataConfig
from dpfy.data.given import as_source
from dpfy.data.owners import KeptRecords, Owned, Users, UserSource, chosen
from dpfy.gradients.clip import QuantileClip
from dpfy.plan import bandmf
from dpfy.plan.recipe import Plan
from dpfy.report.verify import verify

OWNERS = np.array([7, 3, 3, 3, 9, 9, 4, 7, 9, 3, 9, 9, 3])
USERS = len(set(OWNERS.tolist()))
CLIP = 1.0
"""Some users are clipped by it and some are not."""


def records(rows: int = len(OWNERS), seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, dtype=torch.float64, generator=generator), torch.randint(
        0, 3, (rows,), generator=generator
    )


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def plan_of(
    most: int,
    users: int = USERS,
    batch: float | None = None,
    steps: int = 1,
    noise: float = 0.0,
    **more: object,
):
    unit = more.pop("unit", user_unit(most))
    return dpfy.dpsgd(
        users, users if batch is None else batch, steps=steps, clip_norm=CLIP, unit=unit, **more
    ).with_noise(noise)


def by_hand(
    model: nn.Module, data: tuple[Tensor, Tensor], owners: np.ndarray, mean: bool
) -> list[Tensor]:
    """The clipped gradients of all users added up, each from all of that user's records alone."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for user in np.unique(owners):
        x, y = (field[torch.from_numpy(owners == user)] for field in data)
        losses = F.cross_entropy(model(x), y, reduction="none")
        grads = torch.autograd.grad(
            losses.mean() if mean else losses.sum(), list(model.parameters())
        )
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        total = [t + g * min(1.0, CLIP / float(norm)) for t, g in zip(total, grads, strict=True)]
    return total


class Rows(Dataset):
    """Records in dicts, read one by one."""

    def __init__(self, data: tuple[Tensor, Tensor], owners: np.ndarray) -> None:
        self.data, self.owners, self.reads = data, owners, 0

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, index: int) -> dict[str, object]:
        self.reads += 1
        return {
            "input": self.data[0][index],
            "who": f"user {self.owners[index]}",
            "label": self.data[1][index],
        }


class Pairs(Rows):
    """The same in tuples, without their owners."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[0][index], self.data[1][index]


GIVEN = {
    "arrays": lambda data: (data, OWNERS),
    "words": lambda data: (data, [f"user {k}" for k in OWNERS]),
    "a dict": lambda data: ({"input": data[0], "label": data[1], "who": OWNERS}, "who"),
    "a data set": lambda data: (Rows(data, OWNERS), "who"),
    "lazily": lambda data: (dpfy.lazy(Pairs(data, OWNERS)), torch.from_numpy(OWNERS)),
}


@pytest.mark.parametrize("loss", ["sum", "mean"])
@pytest.mark.parametrize("given", GIVEN)
def test_one_step_is_the_clipped_sum_over_users(tmp_path, given, loss):
    """Exact against the loop in float64, whatever the data is given as."""
    data, model = records(), model_of()
    expected = by_hand(model, data, OWNERS, loss == "mean")
    before = [p.detach().clone() for p in model.parameters()]
    train, user = GIVEN[given](data)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = dpfy.fit(
        model,
        train,
        user=Users(user, loss=loss),
        plan=plan_of(5),
        optimizer=optimizer,
        run=tmp_path / "run",
    )
    assert result.guarantee.unit == dpfy.Unit("user", 5)
    for was, now, due in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(was - now.detach(), due / USERS, rtol=1e-9, atol=1e-12)


def test_a_loop_of_ones_own_draws_users(tmp_path):
    data, model = records(), model_of()
    grouped = dpfy.by_user(data, Users(OWNERS), 2)
    plan = plan_of(2, batch=2.0, steps=6, noise=1.0)
    seen = set()
    with dpfy.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), 0.1), grouped, plan, tmp_path / "run"
    ) as training:
        for x, y, real in training.batches():
            assert x.shape[1:] == (2, 5)
            training.step(
                dpfy.per_user(
                    F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), reduction="none"), real
                )
            )
            assert bool(real[:, 0].all())
            seen |= {tuple(row.tolist()) for row in x.flatten(0, 1)}
    assert seen <= {tuple(row.tolist()) for row in data[0]}
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "for one user" in card["statement"]
    assert (card["unit"]["name"], card["unit"]["most_records"]) == ("user", 2)
    assert all(finding.holds for finding in verify(tmp_path / "run"))
    forged = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert forged["body"]["unit"] == {"name": "user", "most_records": 2}


def test_one_user_more_with_ten_thousand_records_adds_one_bounded_contribution():
    """The sum moves by at most the clip norm, no other user's places change, and no row grows."""
    many, most = 10_000, 8
    data, more = records(), records(many, seed=1)
    both = tuple(torch.cat(pair) for pair in zip(data, more, strict=True))
    few = as_source(Owned(data, Users(OWNERS), most))
    large = as_source(Owned(both, Users(np.concatenate([OWNERS, np.full(many, 99)])), most))
    assert isinstance(few, UserSource)
    assert (len(few), len(large)) == (USERS, USERS + 1)
    model = model_of()

    def sums(source: UserSource, users: int, key: bytes) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in model.parameters()]
        batch = next(iter(source.read([Draw(np.arange(users), 0, key)], torch.device("cpu"))))
        for x, y, real in zip(*batch, strict=True):
            assert len(x) == most
            loss = F.cross_entropy(model(x), y, reduction="none")[real].sum()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            norm = float(torch.sqrt(sum(g.square().sum() for g in grads)))
            total = [t + g * min(1.0, 0.3 / norm) for t, g in zip(total, grads, strict=True)]
        return total

    for number in range(3):
        key = bytes([number]) * 32
        rows, real = few.places(Draw(np.arange(USERS), 0, key))
        wide, true = large.places(Draw(np.arange(USERS + 1), 0, key))
        assert np.array_equal(rows, wide[:USERS])
        assert np.array_equal(real, true[:USERS])
        assert true[USERS].all()
        assert len(set(wide[USERS].tolist())) == most
        assert (wide[USERS] >= len(OWNERS)).all()
        moved = [
            a - b for a, b in zip(sums(large, USERS + 1, key), sums(few, USERS, key), strict=True)
        ]
        assert float(torch.sqrt(sum(m.square().sum() for m in moved))) <= 0.3 * (1 + 1e-12)


def test_a_large_user_takes_no_more_memory_than_a_small_one():
    owners = np.concatenate([np.arange(50), np.full(200_000, 99)])
    source = as_source(
        Owned(
            (torch.zeros(len(owners), 3), torch.zeros(len(owners), dtype=torch.int64)),
            Users(owners),
            8,
        )
    )
    list(source.read([Draw(np.arange(51), 0, bytes(32))], torch.device("cpu")))
    tracemalloc.start()
    list(source.read([Draw(np.arange(51), 0, bytes(32))] * 3, torch.device("cpu")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20, "of 200,000 records eight are touched"


def test_the_choice_among_a_users_records_is_uniform_and_changes_with_the_step():
    counts = np.zeros(10)
    for number in range(4000):
        taken = chosen(number.to_bytes(32, "little"), b"user", 10, 3, "random")
        assert len(set(taken.tolist())) == 3
        counts[taken] += 1
    assert abs(counts - 1200).max() < 5 * np.sqrt(4000 * 0.3 * 0.7)
    assert chosen(bytes(32), b"a", 2, 3, "random").tolist() == [0, 1]
    assert chosen(bytes(32), b"a", 9, 3, "first").tolist() == [0, 1, 2]


def test_owners_are_read_after_the_reservation(tmp_path):
    """And by name: a refused plan has read nothing."""
    data = Rows(records(), OWNERS)
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    class Told(Rows):
        def __getitem__(self, index: int) -> dict[str, object]:
            if not self.reads:
                seen.extend(
                    p.name for p in Ledger.read(tmp_path / "run" / "ledger.jsonl").permits()
                )
            return super().__getitem__(index)

    days = Users("who", time=np.zeros(len(OWNERS), np.int64), window="day")
    with pytest.raises(InvalidInput, match="by user's day"):
        dpfy.fit(model, data, user=days, plan=plan_of(3), optimizer=optimizer, run=tmp_path / "no")
    assert data.reads == 0
    dpfy.fit(
        model,
        Told(records(), OWNERS),
        user="who",
        plan=plan_of(3),
        optimizer=optimizer,
        run=tmp_path / "run",
    )
    assert seen == ["training"]


def test_resumed_runs_draw_the_same_records(tmp_path):
    """A run killed between steps and resumed ends with the same weights; with other owners it is
    refused.
    """
    data, weights = records(), []
    plan = plan_of(2, batch=2.0, steps=8, noise=1.0)

    def trained(place, owners, stop=None, **more):
        model = model_of()
        made = dpfy.Run(tmp_path / place, seed=5, **more)
        grouped = dpfy.by_user(data, Users(owners), 2)
        with dpfy.PrivateTraining(
            model, torch.optim.SGD(model.parameters(), 0.1), grouped, plan, made
        ) as training:
            for x, y, real in training.batches():
                if stop is not None and training.steps_done >= stop:
                    raise KeyboardInterrupt
                training.step(
                    dpfy.per_user(
                        F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), reduction="none"), real
                    )
                )
        return [p.detach().clone() for p in model.parameters()]

    weights = trained("whole", OWNERS)
    with pytest.raises(KeyboardInterrupt):
        trained("cut", OWNERS, stop=4, checkpoint_every=0)
    other = OWNERS.copy()
    other[0] = 3
    with pytest.raises((InvalidInput, Unsupported), match=r"data|records"):
        trained("cut", other, resume=True)
    assert all(
        torch.equal(a, b) for a, b in zip(weights, trained("cut", OWNERS, resume=True), strict=True)
    )


DAYS = np.array(
    ["2026-01-01T23:00", "2026-01-02T01:00", "2026-01-02T02:00", "2026-02-01", "2026-02-01T09:00"],
    "datetime64[s]",
)


@pytest.mark.parametrize(("window", "units"), [("day", 4), ("week", 3), ("month", 3), ("year", 2)])
def test_windows_of_time_are_units_of_their_own(window, units):
    owners = np.array([1, 1, 1, 1, 2])
    seconds = DAYS.astype(np.int64)
    for time in (
        DAYS,
        seconds,
        [str(when) for when in DAYS],
        [f"{when}.5" for when in seconds],
        torch.from_numpy(DAYS.astype(np.int64)),
    ):
        source = as_source(Owned(records(5), Users(owners, time=time, window=window), 2))
        assert len(source) == units
    assert user_unit(2, window) == dpfy.Unit(f"user's {window}", 2, "window")


NOBODY = [None, "", " ", float("nan"), np.datetime64("NaT")]
NO_TIME = [
    "x",
    "",
    None,
    "31.12.2020",
    "2020-02-30",
    "287000-01-01",
    "1e400",
    "inf",
    "-1e30",
    1j,
    10**400,
]
NO_TIME += [float("nan"), float("inf"), "1_000", b"2020-01-01", [1], {"a": 1}, "\ud800"]


@pytest.mark.parametrize("pick", ["first", "random"])
def test_records_of_nobody_are_left_out_and_change_no_others(pick):
    for single in (False, True):
        for cell in NOBODY:
            of = [*OWNERS[:5].tolist(), cell, *OWNERS[5:].tolist()]
            data, clean = records(14), [*range(5), *range(6, 14)]
            others = tuple(field[clean] for field in data)
            found = as_source(Owned(data, Users(of, pick), 2, single))
            wanted = as_source(Owned(others, Users(OWNERS.tolist(), pick), 2, single))
            assert len(found) == len(wanted)
            for a, b in zip(*(s.take(torch.arange(len(s))) for s in (found, wanted)), strict=True):
                assert torch.equal(a, b)
    nobody = as_source(Owned(records(3), Users([None, "", None], pick), 2, single=True))
    assert len(nobody) == 0


@pytest.mark.parametrize("window", ["day", "week", "month", "year"])
def test_a_record_without_a_time_is_left_out_and_changes_no_other(window):
    for cell in NO_TIME:
        time = [*map(str, DAYS), cell]
        held = Owned(records(6), Users([1, 1, 1, 1, 2, 2], time=time, window=window), 2)
        names, which = held.users_of(6)
        assert which[5] == -1
        clean = Owned(records(5), Users([1, 1, 1, 1, 2], time=time[:5], window=window), 2)
        assert which[:5].tolist() == clean.users_of(5)[1].tolist()
        assert names.tolist() == clean.users_of(5)[0].tolist()


BAD = [
    ({"user": "who"}, "names a field"),
    ({"user": OWNERS[:4]}, "one for each of the 13 records"),
    ({"user": OWNERS.astype(float)}, "whole number or word"),
    (
        {
            "user": Users(OWNERS, time=DAYS[:2], window="day"),
            "plan": plan_of(3, unit=user_unit(3, "day")),
        },
        "user.time",
    ),
    (
        {"user": OWNERS, "plan": dpfy.dpsgd(USERS, USERS, steps=1).with_noise(0.0)},
        "records have owners",
    ),
]


@pytest.mark.parametrize(("named", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_owners_are_refused(tmp_path, named, said):
    model = model_of()
    given = {
        "plan": plan_of(3),
        "optimizer": torch.optim.SGD(model.parameters(), 1.0),
        "run": tmp_path / "r",
    } | named
    with pytest.raises(InvalidInput, match=said):
        dpfy.fit(model, records(), **given)
    assert not (tmp_path / "r").exists()


def test_bad_users_are_refused():
    for named in (
        {"pick": "last"},
        {"loss": "max"},
        {"window": "day"},
        {"time": OWNERS},
        {"window": "hour", "time": OWNERS},
    ):
        with pytest.raises(InvalidInput, match="user"):
            Users(OWNERS, **named)
    model = model_of()
    grouped, optimizer = (
        dpfy.by_user(records(), OWNERS, 3),
        torch.optim.SGD(model.parameters(), 1.0),
    )
    with pytest.raises(InvalidInput, match="grouped by user already"):
        dpfy.fit(model, grouped, user=OWNERS, plan=plan_of(3), optimizer=optimizer)
    with pytest.raises(Unsupported, match="one view"):
        as_source(Owned(dpfy.lazy(Pairs(records(), OWNERS), views=2), Users(OWNERS), 3))


def test_of_each_user_at_most_k_records_are_kept_and_others_do_not_matter():
    """The choice of a user's records is the same whoever else is there."""
    rng = np.random.default_rng(0)
    owners = rng.integers(0, 20, 400)
    for pick in ("random", "first"):
        kept = as_source(Owned(records(400), Users(owners, pick), 5, single=True))
        assert isinstance(kept, KeptRecords)
        assert np.bincount(owners[kept.rows]).tolist() == [5] * 20
        for gone in (0, 7, 19):
            there = np.flatnonzero(owners != gone)
            fewer = as_source(
                Owned(
                    tuple(f[there] for f in records(400)),
                    Users(owners[there], pick),
                    5,
                    single=True,
                )
            )
            assert set(there[fewer.rows]) == set(kept.rows[owners[kept.rows] != gone])
    first = as_source(Owned(records(400), Users(owners, "first"), 5, single=True))
    assert not np.array_equal(
        first.rows, as_source(Owned(records(400), Users(owners), 5, single=True)).rows
    )


def test_records_drawn_one_by_one_need_owners_and_a_bill_for_all_of_them(tmp_path):
    plan = dpfy.dpsgd(12, 4, steps=3, unit=user_unit(4), draw="record").with_noise(2.0)
    alone = dpfy.dpsgd(12, 4, steps=3).with_noise(2.0)
    assert plan.epsilon > 1.5 * alone.epsilon
    assert plan.epsilon_after(2) < plan.epsilon_after(3) == pytest.approx(plan.epsilon)
    assert Plan.from_json(plan.to_json()) == plan
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused = [
        records(),
        dpfy.by_user(records(), OWNERS, 4),
        dpfy.by_user(records(), Users(OWNERS), 4),
    ]
    for train in [*refused, Owned(records(), Users(OWNERS), 5, single=True)]:
        with pytest.raises(InvalidInput, match="train"):
            dpfy.fit(model, train, plan=plan, optimizer=optimizer, run=tmp_path / "no")
    with pytest.raises(InvalidInput, match="draws the other"):
        dpfy.fit(
            model,
            Owned(records(), Users(OWNERS), 4, single=True),
            plan=plan_of(4),
            optimizer=optimizer,
            run=tmp_path / "no",
        )
    assert not (tmp_path / "no").exists()
    result = dpfy.fit(
        model, records(), user=OWNERS, plan=plan, optimizer=optimizer, run=tmp_path / "run"
    )
    assert result.epsilon == plan.epsilon
    assert all(finding.holds for finding in verify(tmp_path / "run"))


@pytest.mark.parametrize(
    "recipe",
    [
        lambda: dpfy.dpsgd(
            100, 10, steps=3, unit=user_unit(3), adjacency="replace-one", draw="record"
        ),
        lambda: replace(
            dpfy.dpsgd(100, 10, steps=3, unit=user_unit(3), draw="record"), clip=QuantileClip(1.0)
        ),
        lambda: replace(bandmf(100, 10, steps=20, bands=4), unit=user_unit(3), draw="record"),
    ],
    ids=["replace-one", "quantile", "cycles"],
)
def test_what_has_no_proof_for_several_records_is_refused(recipe):
    with pytest.raises(Unsupported, match=r"one by one|in cycles"):
        recipe()


def test_groups_of_units_that_are_drawn_in_cycles_have_no_proof():
    """Members in different blocks overlap in correlated noise: what hides each alone is not known
    to hide both.
    """
    recipe = bandmf(100, 10, steps=20, bands=4)
    with pytest.raises(Unsupported, match="in cycles"):
        recipe.calibrate(3.0, 1e-3, group=2)
    assert recipe.calibrate(3.0, 1e-3, group=1).epsilon <= 3.0


@pytest.mark.skipif("DPFY_DATA" not in os.environ, reason="needs MNIST and its writers (DPFY_DATA)")
def test_mnist_by_its_writers():
    found = source.load(DataConfig(kind="mnist", user="writer", most_records=8))
    assert (found.units, len(found.train), len(found.test)) == (539, 60_000, 10_000)


def test_a_part_of_users_is_read_alike_whoever_else_is_there():
    """Which records of a user `take` gives follows from that user's own, whatever their place."""
    owners = np.repeat([1, 2, 3], 6)
    x = torch.arange(18.0)[:, None]
    found = []
    for left in (owners > 0, owners > 1):
        rows = torch.from_numpy(left)
        given = Owned(x[rows], Users(owners[left], "random"), 2)
        source = as_source(given)
        found.append(source.take(torch.arange(len(source)))[0][-2:])
    assert torch.equal(*found)
