"""Checks of users who own several records, from outside: what one user adds, drawn whole or record by
record, and what happens to all others meanwhile.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dpfy.core.storage import parsed_json
from dpfy.core.unit import Adjacency, user_unit
from dpfy.data.config import RANDOM
from dpfy.data.owners import Owned, Users, order_of
from dpfy.data.users import by_user
from dpfy.plan.recipe import RECORD, UNIT, Plan, dpsgd
from dpfy.report.card import NAME, trained_section
from dpfy.runs.run import Run
from dpfy.tables.shared import within_limit
from dpfy.training.evaluation import PrivateTest
from dpfy.training.fit import fit
from dpfy_lab.checks.loop import CLIP, DELTA, LENGTH, NOISE_MULTIPLIER, Array, dimension, noisy_sums
from dpfy_lab.checks.published import temporary
from dpfy_lab.selftest.mistake import Found, check

FAINT = 0.01
"""Noise of an evaluation that hides nothing: its counts can be read."""
MOST, LARGE = 4, 2
"""Records of one user that may be used; the user that has more."""
UNEQUAL = (1, 2, 40, MOST, 3, MOST + 1)
NEARLY_EQUAL = (MOST, MOST, MOST + 1, MOST, MOST, MOST)
"""How many records each user has. One has more than may be used: far more, or one."""


def _plan(units: int, noise: float, steps: int = 1, draw: str = UNIT) -> Plan:
    recipe = dpsgd(units, units, steps=steps, clip_norm=CLIP, unit=user_unit(MOST), draw=draw)
    return recipe.with_noise(noise, delta=DELTA, allow_large_delta=True)


def _left_out(counts: tuple[int, ...], single: bool, most: float) -> Found:
    """Without noise, all users in one step, with records that are alike and three clipping norms
    long: leaving the large one out changes the sum by at most so many clipping norms.
    """
    every = np.repeat(np.arange(len(counts)), counts)
    sums = []
    for owners in (every, every[every != LARGE]):
        rows = np.zeros((len(owners), dimension()))
        rows[np.arange(len(owners)), owners] = 3.0
        names, held = np.unique(owners, return_counts=True)
        units = int(np.minimum(held, MOST).sum()) if single else len(names)
        plan = _plan(units, 0.0, draw=RECORD if single else UNIT)
        users = Users(owners)
        sums.append(noisy_sums(rows, plan, by=lambda r, u=users: Owned(r, u, MOST, single))[0])  # type: ignore[misc]
    change = float(np.linalg.norm(sums[0] - sums[1]))
    if change <= most + 1e-3:
        return None
    return (
        f"leaving out a user of {counts[LARGE]} records changes the sum by {change:.3f} clip "
        f"norms, not {most:g}"
    )


@check("users drawn whole")
def WHOLE() -> Found:
    """A user with all records changes the sum by at most one clipping norm."""
    return _left_out(UNEQUAL, False, 1.0)


@check("records of users")
def SINGLE() -> Found:
    """Records drawn one by one: a user changes the sum by as many clipping norms as records of one
    may be used.
    """
    return _left_out(NEARLY_EQUAL, True, float(MOST))


@check("records with several owners")
def SHARED() -> Found:
    """Records of three persons each: what the records of one hold is zero in one of two runs, and
    the sum changes by as many clipping norms as records of one may be used.
    """
    rng = np.random.default_rng(0)
    owners = np.stack([rng.choice(8, 3, replace=False) for _ in range(60)])
    units = int(within_limit(owners, MOST, order_of(len(owners), RANDOM)).sum())
    recipe = dpsgd(
        units,
        units,
        steps=1,
        clip_norm=CLIP,
        unit=user_unit(MOST, shared=True),
        adjacency=Adjacency.ZERO_OUT,
        draw=RECORD,
    )
    plan = recipe.with_noise(0.0, delta=DELTA, allow_large_delta=True)
    rows = np.zeros((len(owners), dimension()))
    rows[:, 0] = 3.0
    sums = [
        noisy_sums(
            np.where((owners == person).any(axis=1)[:, None], 0.0, rows),
            plan,
            by=lambda r: Owned(r, Users(owners), MOST, single=True),
        )[0]
        for person in range(-1, 8)
    ]
    change = max(float(np.linalg.norm(sums[0] - other)) for other in sums[1:])
    if change <= MOST + 1e-3:
        return None
    return f"the records of one person change the sum by {change:.3f} clip norms, not {MOST}"


def _users() -> tuple[Array, NDArray[np.int64]]:
    """Six users of four records each: the records of a user are long and alike, which clipping them
    one by one would let add up.
    """
    d = dimension()
    rng = np.random.default_rng(8)
    own = rng.standard_normal((6, 1, d)) + 0.1 * rng.standard_normal((6, MOST, d))
    own *= LENGTH / np.linalg.norm(own, axis=2, keepdims=True)
    return own.reshape(-1, d), np.repeat(np.arange(6), MOST)


def _sums(rows: Array, owners: NDArray[np.int64], noise: float, steps: int = 1) -> Array:
    plan = _plan(len(np.unique(owners)), noise, steps)
    return noisy_sums(rows, plan, by=lambda records: by_user(records, owners, MOST))


@check("user sensitivity")
def SENSITIVITY() -> Found:
    """Without noise: leaving out all records of one user changes the sum by at most one clipping
    norm.
    """
    rows, owners = _users()
    whole = _sums(rows, owners, 0.0)[0]
    for user in (0, 3):
        kept = owners != user
        change = float(np.linalg.norm(whole - _sums(rows[kept], owners[kept], 0.0)[0]))
        if not change <= 1 + 1e-3:
            return f"leaving out one user changes the sum by {change:.3f} clip norms"
    return None


@check("user noise")
def NOISE() -> Found:
    """Records without gradients: the noise is that of the claim, in clipping norms of a user."""
    rows, owners = _users()
    seen = _sums(0 * rows, owners, NOISE_MULTIPLIER, steps=4) / NOISE_MULTIPLIER
    scale = math.sqrt(float(np.mean(seen**2)))
    if abs(scale - 1) < 6 / math.sqrt(2 * seen.size):
        return None
    return f"noise of {scale:.3f} of what hides a user was added"


@check("user evaluation")
def EVALUATION() -> Found:
    """A user with many held-out records moves the counts of a private evaluation by one in all."""
    owners = np.repeat(np.arange(len(UNEQUAL)), UNEQUAL)
    told = []
    for kept in (owners >= 0, owners != LARGE):
        rows = torch.zeros(int(kept.sum()), 2), torch.ones(int(kept.sum()), dtype=torch.int64)
        model = nn.Linear(2, 2)
        test = PrivateTest(rows, user=owners[kept], noise_multiplier=FAINT)
        plan = _plan(len(np.unique(owners[kept])), NOISE_MULTIPLIER)
        with temporary() as folder:
            fit(
                model,
                rows,
                user=owners[kept],
                plan=plan,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                run=Run(folder, seed=1),
                evaluation=test,
            )
            card = trained_section(parsed_json(NAME, (folder / NAME).read_bytes()))
        told.append(np.array(card["confusion"]).sum())
    if (moved := int(told[0] - told[1])) == 1:
        return None
    return f"leaving out a user of {UNEQUAL[LARGE]} records moves the counts by {moved}, not by one"


CHECKS = (WHOLE, SINGLE, SHARED, SENSITIVITY, NOISE, EVALUATION)
