"""Checks of the private training loop, from outside: the white-box audit, sensitivity, noise,
sampling, resumption.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfy.audit import whitebox
from dpfy.audit.families import ClaimedFamily
from dpfy.core.guarantee import Curve
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.noise.gaussian import draw
from dpfy.noise.toeplitz import Banded
from dpfy.noise.tree import Tree
from dpfy.plan.recipe import EXACT, dpsgd
from dpfy.sampling.samplers import FixedOrderSampler
from dpfy_lab.checks.loop import (
    DELTA,
    LENGTH,
    NOISE_MULTIPLIER,
    RATE,
    STEPS,
    Array,
    dimension,
    noisy_sums,
    places,
    plan_of,
    updates,
)
from dpfy_lab.selftest.mistake import Found, check

SIGMAS, RUNS = 5.0, (0, 1)


@check("white-box audit")
def WHITE_BOX() -> Found:
    """One Dirac canary for each parameter of the model, in by a fair coin, in two runs; likelihood
    ratio and spread, by layer too.
    """
    return _audited(Adjacency.ADD_OR_REMOVE_ONE, 0.0)


@check("replace-one audit")
def REPLACED() -> Found:
    """The same canaries, replaced by their opposites where the coin says so: what replace-one must
    hide.
    """
    return _audited(Adjacency.REPLACE_ONE, -1.0)


def _audited(adjacency: Adjacency, absent: float) -> Found:
    """Run the audit against the claim; the family is asked only about the claim itself, so one
    curve is enough.
    """

    @cache
    def curve(strength: float) -> Curve:
        noise = NOISE_MULTIPLIER / strength
        return plan_of(dimension(), noise, adjacency=adjacency).guarantee().curve

    family = ClaimedFamily(curve)
    epsilon = family.epsilon(1.0, DELTA)
    claim = whitebox.AuditedClaim(epsilon, DELTA, NOISE_MULTIPLIER, RATE, family, absent)
    coins = [whitebox.fair_coins(dimension(), 11 + seed) for seed in RUNS]
    gains = [np.where(c, LENGTH, absent * LENGTH) for c in coins]
    seen = np.concatenate(
        [updates(np.diag(g), seed=seed) for g, seed in zip(gains, RUNS, strict=True)],
        axis=1,
    )
    if not np.isfinite(seen).all():
        return "an update is not finite"
    observed = whitebox.ObservedSums(seen, np.concatenate(coins), _layers())
    allowed = (1 + family.advantage(1.0)) / 2
    name, right, counted, limit = whitebox.best_attack(observed, claim, 0.99)
    if limit <= allowed:
        return None
    return (
        f"{right} of {counted} coins guessed by {name}: at least {limit:.3f}, where the claim "
        f"allows {allowed:.3f}"
    )


def _layers() -> dict[str, NDArray[np.bool_]]:
    """The canaries of each parameter tensor, over all runs."""
    positions = np.tile(np.arange(dimension()), len(RUNS))
    return {
        name: (positions >= place.start) & (positions < place.stop)
        for name, place in places().items()
    }


@check("sensitivity")
def SENSITIVITY() -> Found:
    """Without noise, at rate one: leaving one record out changes the sum by at most one clip norm,
    whatever the gradients.
    """
    for name, rows in _difficult().items():
        whole = updates(rows, noise=0.0, rate=1.0, steps=1)[0]
        for left_out in (0, len(rows) // 2):
            without = updates(np.delete(rows, left_out, 0), noise=0.0, rate=1.0, steps=1)[0]
            change = float(np.linalg.norm(whole - without))
            if not change <= 1 + 1e-3:
                return f"leaving out one record changes the sum by {change:.3f} clip norms ({name})"
    return None


def _difficult() -> dict[str, Array]:
    """Gradients that break wrong clipping: large, aligned, in the bias alone, in every layer, one
    giant among dwarfs.
    """
    d = dimension()
    rng = np.random.default_rng(5)
    dense = rng.standard_normal((9, d))
    dense *= LENGTH / np.linalg.norm(dense, axis=1, keepdims=True)
    bias = np.zeros((9, d))
    layered = np.zeros((9, d))
    for name, place in places().items():
        layered[:, place.start] = LENGTH
        if name.endswith("bias"):
            bias[np.arange(9), place.start + np.arange(9) % (place.stop - place.start)] = LENGTH
    aligned = np.repeat(dense[:1], 9, 0)
    giant = 0.02 * dense
    giant[0] = 1000 * dense[0]
    return {
        "large": dense,
        "bias alone": bias,
        "in every layer": layered,
        "aligned": aligned,
        "one giant": giant,
    }


@check("permit")
def PERMIT() -> Found:
    """No more steps are released than were billed: the ledger's permit refuses the next one."""
    released = len(updates(np.zeros((4, dimension()))))
    return None if released <= STEPS else f"{released} steps were released, {STEPS} charged"


@check("divisor")
def DIVISOR() -> Found:
    """Without noise, each record shows as one clip norm or not at all, however many records the
    batch happens to hold.
    """
    count = 24
    seen = updates(LENGTH * np.eye(count, dimension()), noise=0.0, rate=0.5, steps=6)[:, :count]
    off = np.minimum(np.abs(seen), np.abs(seen - 1)).max()
    return (
        None
        if off < 1e-3
        else f"a clipped record shows as {seen.max():.3f} clip norms: the divisor depends on the "
        f"batch"
    )


@check("noise alone")
def NOISE_ALONE() -> Found:
    """Records without gradients: what is released is noise of the claimed scale, Gaussian,
    everywhere, fresh at every step.
    """
    from scipy.stats import kstest

    seen = updates(np.zeros((4, dimension())), steps=40) / NOISE_MULTIPLIER
    for name, place in places().items():
        part = seen[:, place]
        if (part == 0).any():
            return f"{name}: {np.mean(part == 0):.0%} of the values have no noise"
        excess = (float(np.mean(part**2)) - 1) * math.sqrt(part.size / 2)
        if abs(excess) > SIGMAS:
            return (
                f"{name}: noise of {math.sqrt(np.mean(part**2)):.3f} of the claimed standard "
                f"deviation"
            )
    for axis, what in ((0, "step"), (1, "parameter")):
        if np.unique(seen, axis=axis).shape[axis] < seen.shape[axis]:
            return f"the noise of one {what} is used for another"
    echo = float((seen[1:] * seen[:-1]).mean() * math.sqrt(seen[1:].size))
    if abs(echo) > SIGMAS:
        return "the noise of one step is correlated with the noise of the next"
    if kstest(seen.reshape(-1), "norm").pvalue < 1e-6:
        return "the noise is not Gaussian"
    return None


@check("lattice")
def LATTICE() -> Found:
    """Released values lie on one lattice of half-odd multiples, with records as without: no output
    is possible in one world only.
    """
    d = dimension()
    alone = updates(np.zeros((8, d)), rate=1.0, steps=8)
    for place in places().values():
        known = np.unique(alone[:, place])
        step = float(np.diff(known).min(initial=np.inf, where=np.diff(known) > 1e-9))
        if not step > 1e-3 * NOISE_MULTIPLIER:
            return "noise alone lies on no lattice: an output can show which sum it was added to"
        for rows in (np.zeros((8, d)), np.eye(8, d) * 0.37, np.full((8, d), 0.1 / math.sqrt(d))):
            seen = updates(rows, rate=1.0, steps=2)[:, place] / step - 0.5
            if (off := np.abs(seen - np.round(seen)).max()) > 1e-2:
                return (
                    f"a released value lies {off:.2f} steps off the lattice of the noise: it is "
                    f"impossible without the record"
                )
    return None


@check("exact noise")
def EXACT_NOISE() -> Found:
    """Exact noise, under one secret: a sum moves every value by the whole steps in it or by one
    more, and by itself in the mean.
    """
    d, steps = dimension(), 12

    plan = plan_of(1, rate=1.0, steps=steps)
    exact = replace(plan, recipe=replace(plan.recipe, noise=EXACT))

    def seen(gradient: float) -> Array:
        return noisy_sums(np.full((1, d), gradient), exact, seed=51, physical=4)

    alone = seen(0.0)
    known = np.diff(np.unique(alone))
    step = float(known.min(initial=np.inf, where=known > 1e-9))
    for gradient in (0.31 * step, -0.17 * step, 0.02 / math.sqrt(d)):
        moved, expected = (seen(gradient) - alone) / step, gradient / step
        if (
            np.abs(moved - expected).max() >= 1 + 1e-6
            or np.abs(moved - np.round(moved)).max() > 1e-6
        ):
            return (
                f"a sum of {expected:.2f} steps moves a value by "
                f"{moved[np.abs(moved - expected).argmax() // d].max():.2f}"
            )
        spread = math.sqrt(abs(expected) % 1 * (1 - abs(expected) % 1) / moved.size)
        if abs(off := float(moved.mean()) - expected) > SIGMAS * spread:
            return (
                f"a sum of {expected:.3f} steps moves values by {expected + off:.3f} in the mean: "
                f"the rounding is biased"
            )
    if np.unique(alone, axis=0).shape[0] < steps:
        return "the noise of one step is used for another"
    return None


@check("noise and data")
def NOISE_AND_DATA() -> Found:
    """The scale of the noise is public: it is the same for short and for long gradients."""
    d = dimension()
    for length in (0.01, LENGTH):
        rows = length * np.eye(8, d)
        quiet = updates(rows, rate=1.0, steps=6)[:, 8:] / NOISE_MULTIPLIER
        scale = math.sqrt(float(np.mean(quiet**2)))
        if abs(scale - 1) > SIGMAS / math.sqrt(2 * quiet.size):
            return (
                f"with gradients of {length} clip norms the noise has {scale:.3f} of its claimed "
                f"scale"
            )
    return None


@check("secret")
def SECRET() -> Found:
    """Two runs with different secrets share no noise."""
    blank = np.zeros((4, dimension()))
    one, other = (updates(blank, steps=2, seed=s).reshape(-1) for s in (21, 22))
    alike = abs(float(np.corrcoef(one, other)[0, 1])) * math.sqrt(one.size)
    return (
        None
        if alike < SIGMAS
        else f"the noise of two runs is alike ({alike:.0f} standard deviations): it is not the "
        f"secret's"
    )


@check("resumed")
def RESUMED() -> Found:
    """A run that was left and resumed releases the same bits as one that was not: no step is
    released twice with other noise.
    """
    rows = np.eye(8, dimension())
    whole, halves = (updates(rows, steps=6, seed=31, interrupt=at) for at in (None, 3))
    return (
        None
        if np.array_equal(whole, halves)
        else "a resumed run releases other values than an uninterrupted one"
    )


@check("sampling")
def SAMPLING() -> Found:
    """Who takes part when, over 400 steps: rate, independence over steps, over records, and of
    consecutive batches.
    """
    from scipy.stats import chi2

    steps, records, rate = 400, 200, RATE
    sampler = plan_of(records, 1.0, steps=steps).recipe.sampler
    there, randomness = np.zeros((steps, records)), Randomness.for_tests(41)
    for step in range(steps):
        rng = randomness.generator("sampling", sampler.address(step))
        there[step, sampler.batch(step, records=records, rng=rng)] = 1.0
    spread = rate * (1 - rate)
    if abs(z := (there.sum() - there.size * rate) / math.sqrt(there.size * spread)) > SIGMAS:
        return (
            f"records take part at rate {there.mean():.4f}, charged {rate:.4f} ({z:+.0f} standard "
            f"deviations)"
        )
    for axis, who in ((0, "a record's participations"), (1, "batch sizes")):
        counts = there.sum(axis)
        n = there.shape[axis]
        statistic = float(((counts - n * rate) ** 2).sum() / (n * spread))
        tail = min(chi2.cdf(statistic, len(counts)), chi2.sf(statistic, len(counts)))
        if tail < 1e-6:
            return (
                f"{who} vary {statistic / len(counts):.2f} times as much as independent coins would"
            )
    overlap = float((there[1:] * there[:-1]).sum())
    expected = (steps - 1) * records * rate**2
    if abs(overlap - expected) > SIGMAS * math.sqrt(2 * expected):
        return "consecutive batches share more or fewer records than independent ones"
    return None


@check("random allocation")
def ALLOCATION() -> Found:
    """Who takes part when with random allocation: once an epoch, in places that are uniform and
    independent over epochs and over records; and what it is charged for.
    """
    from dpfy.core.events import RandomlyAllocated, Repeated
    from dpfy.testing import ContractBroken, check_sampler

    recipe = dpsgd(records=200, batch_size=25, epochs=6, sampling="random-allocation")
    if recipe.event(1.0) != Repeated(RandomlyAllocated(1.0, 8), 6):
        return f"six epochs of eight steps are charged as {recipe.event(1.0)}"
    try:
        check_sampler(recipe.sampler, records=(200,))
    except ContractBroken as broken:
        return str(broken).splitlines()[0]
    return None


CORRELATED_STEPS, CELL = 12, 0.1
"""A value lies in the cell of its lattice, which is far smaller."""
STRATEGIES: dict[str, Any] = {
    "banded": Banded((1.0, 0.5, 0.25)),
    "tree": Tree(restart=4),
    "completed tree": Tree("completed", restart=4, completion=True),
}


def _correlated() -> Iterator[tuple[str, Array, Array]]:
    """For each strategy: the noise of a run that was left half-way and resumed, and what the
    strategy's matrix says.
    """
    rows, sampler = np.zeros((8, dimension())), FixedOrderSampler(4, CORRELATED_STEPS // 4)
    recipe = plan_of(8, rate=0.25, steps=CORRELATED_STEPS).recipe
    for name, strategy in STRATEGIES.items():
        plan = replace(recipe, sampler=sampler, strategy=strategy).with_noise(
            NOISE_MULTIPLIER, delta=DELTA, allow_large_delta=True
        )
        seen = noisy_sums(rows, plan, seed=42, interrupt=CORRELATED_STEPS // 2)
        matrix, secret = strategy.noise_matrix(CORRELATED_STEPS), Randomness.for_tests(42)
        like = {"all": torch.zeros(dimension(), dtype=torch.float64)}
        drawn = [draw(like, secret, "noise", k)["all"].numpy() for k in range(matrix.shape[1])]
        yield name, seen / plan.scale, matrix @ np.array(drawn)


@check("correlated noise")
def CORRELATED() -> Found:
    """Correlated noise, streamed through a resumption, is what the strategy's matrix says: the
    accounting is for that matrix.
    """
    for name, streamed, dense in _correlated():
        off = np.abs(streamed - dense).max(1)
        if not (off < CELL).all():
            return (
                f"{name}: the noise of step {int(np.argmax(off >= CELL))} is not the row of the "
                f"charged matrix"
            )
    return None


CHECKS = (
    WHITE_BOX,
    REPLACED,
    SENSITIVITY,
    PERMIT,
    DIVISOR,
    NOISE_ALONE,
    NOISE_AND_DATA,
    LATTICE,
    EXACT_NOISE,
    SECRET,
    RESUMED,
    SAMPLING,
    ALLOCATION,
    CORRELATED,
)
