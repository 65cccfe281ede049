"""What shuffling the reports of local randomisers, and random check-ins, leave to see: privacy
profiles, and pairs that are attained.

Write e for e^epsilon0, t = e^epsilon, and (x)+ for max(x, 0).

**Shuffling** (the clones of Feldman, McMillan & Talwar 2021, with as many of them as in their work
of 2023; the proof there has a gap for randomisers in general, and the argument here does not need
it). At one output let r0 and r1 be the densities of the unit's report in the two worlds. Every
other report has there at least the density m = max(r0, r1) / e: with that part it is a clone, which
depends on nobody. Summing over the places at which the unit may lie among the clones,
delta(epsilon) is at most E(X_1 + ... + X_n)+ / n, where X is (r0 - t r1) / m at the output of a
clone, 0 without one, and the draws are independent. X has mean 1 - t. As r0 / r1 lies between 1/e
and e, its law is below, in convex order, the one of e - t and 1 - te with chance 1 / (e + 1) each
and of 0 otherwise: r0 and r1 are mixtures of a part with ratio e, one with ratio 1/e, and one with
ratio 1, and of all such mixtures the one without a third part is the widest. The sum of those is
the profile of one binary randomised response among C clones that are fair coins, C being Binomial(n
- 1, 2 / (e + 1)) and known. Randomisers may differ and depend on earlier reports: the means stay,
and laws are exchanged from the last to the first.

**Random check-ins** (the protocol of Balle, Kairouz, McMahan, Thakkar & Thakurta 2020). A unit
takes part with chance q, in one of m slots. Given what all others do, let b be the density of a
slot's report without the unit, r its density if it is for the unit: within e of b. At worst a unit
is drawn wherever it checks in; then all reports have density prod b times 1 - q + q/m sum(r / b).
Under b each r / b has mean 1, and is in convex order at most e with chance 1 / (e + 1) and 1/e
otherwise: a unit against none. Likewise (r0 - t r1) / b has mean 1 - t and lies between 1 - te and
e - t, the latter at most with chance t / (1 + t): one value against another.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dpfy.accounting.moments import Array
from dpfy.accounting.profiles import Bound, Points, dominating, points
from dpfy.accounting.tight.losses import Atoms

ROUND = 1e-11
"""What rounding may change where no tail of many trials is computed."""
LEAST = 1e-290
"""Added to every delta: what underflows."""
MOST_EPSILON = 60.0
"""Beyond, no amplification is claimed: there are no clones among 1e15 reports."""
MOST_COINS = 400_000
"""For more, tails are not summed up but computed one by one."""
RESPONSE_POINTS = 200
"""Points of epsilon for randomised responses, where each takes longer."""
MERGED = 3000
"""Values of a count that a lower bound tells apart; more are merged."""


# --- shuffling
# ------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def shuffled(epsilon0: float, records: int, answers: int = 0) -> Atoms:
    """The loss of a pair that dominates `records` shuffled reports of `epsilon0`-private
    randomisers, in both directions.
    """
    if answers > 2:
        epsilons = _epsilons(
            epsilon0, (records - 1) * 2 / (math.exp(epsilon0) + answers - 1), RESPONSE_POINTS
        )
        deltas = answered_deltas(epsilon0, records, answers, epsilons[:-1])
    else:
        epsilons = _epsilons(epsilon0, (records - 1) * _clone_chance(epsilon0))
        deltas = shuffled_deltas(epsilon0, records, epsilons[:-1])
    found = Points(epsilons, np.append(deltas, 0.0))
    return dominating(found, found)


def answered_deltas(epsilon0: float, records: int, answers: int, epsilons: Array) -> Array:
    """The same for randomised responses: a clone is a uniform answer, and X is 1 - t where it is
    neither of the unit's two.

    That is in convex order at most 1 - te with a chance of (t - 1) / (te - 1), and 0 otherwise.
    Given how many terms are not 0, what counts is the expected positive part of their mean, which
    falls with their number: blocks are charged as their least one.
    """
    e, t = math.exp(epsilon0), np.exp(epsilons)
    p = 1 / (e + answers - 1) * (1 - 1e-15)
    against = p * (1 + (answers - 2) * np.expm1(epsilons) / np.expm1(epsilons + epsilon0))
    chance = p + against
    starts = _blocks(records - 1, 2 * p, float(chance.max()), 4e-3)
    scale = math.expm1(epsilon0) * (1 + t)
    share = (
        t * np.expm1(epsilon0 - epsilons) / scale
    )  # of terms that speak against the unit's first answer, at most
    total, before, slack = np.zeros_like(t), np.zeros_like(t), _slack(records)
    for clones, end in zip(starts.tolist(), [*starts.tolist()[1:], records], strict=True):
        below = _below(records - 1, chance, np.full_like(t, float(end)))
        weight = np.maximum(below - before, 0.0) + slack * below
        total += (
            weight
            * scale
            * chance
            / (clones + 1)
            * _shortfall(clones + 1, against / chance, (clones + 1) * share)
        )
        before = below
    alone = -np.expm1(epsilons - epsilon0) * e * p * (1 + ROUND)  # what one report shows
    return np.minimum(total * (1 + slack) + LEAST, alone)


def shuffled_deltas(epsilon0: float, records: int, epsilons: Array) -> Array:
    """Upper bounds on delta at epsilons in [0, epsilon0).

    The number of clones is cut into blocks, and each block has the delta of its least number: with
    more clones less is seen.
    """
    starts = _blocks(records - 1, _clone_chance(epsilon0), _clone_chance(epsilon0), 8e-4)
    weights = _block_masses(starts, records - 1, _clone_chance(epsilon0))
    low, high = math.exp(-epsilon0), np.exp(epsilons - epsilon0)
    share = -np.expm1(-(epsilons + epsilon0)) / (-math.expm1(-epsilon0) * (1 + np.exp(-epsilons)))
    factor, excess = (1 - high) / (1 + low), np.expm1(epsilons)
    total, slack = np.zeros_like(factor), _slack(records)
    for clones, weight in zip(starts.tolist(), weights.tolist(), strict=True):
        mass, tail = _fair_coins(clones, np.minimum(np.ceil((clones + 1) * share), clones + 1))
        total += weight * np.maximum(factor * mass * (1 + ROUND) - excess * tail, 0.0)
    return np.minimum(total * (1 + slack) + LEAST, factor)


def _slack(trials: int) -> float:
    """What rounding may change in a tail of a binomial law, relative to it: measured are 1e-12 at
    1e6 trials, 9e-10 at 1e12.
    """
    return ROUND + 5e-15 * math.sqrt(trials)


def _clone_chance(epsilon0: float) -> float:
    """The chance that another report is a clone, rounded down."""
    return 2 / (math.exp(epsilon0) + 1) * (1 - 1e-15)


def _epsilons(epsilon0: float, mean: float, number: int = 700) -> Array:
    """Points from 0 to epsilon0: close together where delta is above about 1e-40 at the mean number
    of clones.
    """
    low, high = 0.0, epsilon0
    for _ in range(60):
        middle = (low + high) / 2
        share = -math.expm1(-(middle + epsilon0)) / (
            -math.expm1(-epsilon0) * (1 + math.exp(-middle))
        )
        y = min(1.0, 2 * share - 1)
        deep = (
            mean / 2 * (math.log1p(-y * y) + 2 * y * math.atanh(y)) > 100 if y < 1 else mean > 150
        )
        low, high = (low, middle) if deep else (middle, high)
    far = np.geomspace(high, epsilon0, number // 5) if high < epsilon0 else np.array([])
    return np.unique(np.concatenate([np.linspace(0.0, high, number), far[:-1], [epsilon0]]))


def _blocks(others: int, least: float, most: float, part: float) -> Array:
    """The least number of clones in each block, ascending from 0: single numbers, or blocks of a
    `part` of that.

    Epsilon falls with the root of the number of clones: such a block costs about a quarter of that
    part. A clone has a chance between `least` and `most`.
    """
    mean = others * least
    width, end = math.sqrt(mean), others * most
    low, high = (
        max(0, math.floor(mean - 14 * width)),
        min(others, math.ceil(end + 9 * math.sqrt(end) + 20)),
    )
    rare = np.append(np.maximum(0, low - width * np.arange(1, 25)), np.linspace(0, low, 8)).astype(
        np.int64
    )
    found = [low]
    while found[-1] < high:
        found.append(found[-1] + max(1, int(part * found[-1])))
    return np.unique(np.concatenate([rare, np.minimum(found, others)]))


def _block_masses(starts: Array, others: int, chance: float) -> Array:
    """Upper bounds on the chance of each block."""
    below = np.append(_below(others, chance, starts[1:]), 1.0)
    return np.diff(below, prepend=0.0) + _slack(others) * below


def _from(trials: int, chance: float | Array, least: Array) -> Array:
    """P(Binomial(trials, chance) >= least), for whole numbers `least`."""
    from scipy.special import betainc

    k = np.clip(least, 1.0, max(trials, 1))
    return np.where(
        least < 1, 1.0, np.where(least > trials, 0.0, betainc(k, trials - k + 1.0, chance))
    )


def _below(trials: int, chance: float | Array, least: Array) -> Array:
    """P(Binomial(trials, chance) < least), for whole numbers `least`."""
    from scipy.special import betaincc

    k = np.clip(least, 1.0, max(trials, 1))
    return np.where(
        least < 1, 0.0, np.where(least > trials, 1.0, betaincc(k, trials - k + 1.0, chance))
    )


def _fair_coins(coins: int, least: Array) -> tuple[Array, Array]:
    """P(heads = least - 1) and P(heads >= least) of so many fair coins, for `least` of at least
    half of them.
    """
    if coins > MOST_COINS:
        return _fair_mass(coins, least - 1), _from(coins, 0.5, least) * (1 - _slack(coins))
    first = max(0, coins // 2 - 1)
    heads = np.arange(first, min(coins, math.ceil(coins / 2 + 19.3 * math.sqrt(coins))) + 1)
    mass = _fair_mass(coins, heads.astype(np.float64))
    tail = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    place = np.minimum(least.astype(np.int64) - first, len(heads))
    return np.append(mass, 0.0)[place - 1], tail[place]


def _fair_mass(coins: int, heads: Array) -> Array:
    """The masses of Binomial(coins, 1/2), by Stirling's series: right to about 1e-12 wherever the
    mass lies.
    """
    if coins < 200:
        return np.array([math.comb(coins, int(k)) * 0.5**coins for k in heads])
    inner = np.clip(heads, 1.0, coins - 1.0)
    y = (2 * inner - coins) / coins
    logs = (
        -coins / 2 * (np.log1p(-y * y) + 2 * y * np.arctanh(y))
        - np.log(2 * math.pi / coins * inner * (coins - inner)) / 2
    )
    logs += _stirling(np.array([float(coins)])) - _stirling(inner) - _stirling(coins - inner)
    return np.where(inner == heads, np.exp(logs), 0.5 ** min(coins, 1074))


def _stirling(n: Array) -> Array:
    """log n! less n log n - n + log(2 pi n) / 2."""
    square = 1 / np.maximum(n, 16.0) ** 2
    series = (
        1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - square / 1188) * square) * square) * square
    ) / n
    if n.min() >= 16:
        return np.asarray(series)
    few = np.minimum(n, 16.0)
    exact = (
        np.array([math.lgamma(k + 1) for k in few])
        - few * np.log(few)
        + few
        - np.log(2 * math.pi * few) / 2
    )
    return np.where(n < 16, exact, series)


# --- random check-ins
# -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def checked_in(epsilon0: float, slots: int, rate: float, replaced: bool) -> tuple[Atoms, Atoms]:
    """Losses of pairs that dominate check-ins, of a unit that is removed and of one that is added;
    the same if it is replaced.
    """
    most, least = math.log1p(rate * math.expm1(epsilon0)), -math.log1p(rate * math.expm1(-epsilon0))
    if replaced:
        both = _ended(_replaced(epsilon0, slots, rate), most)
        return (pair := dominating(both, both)), pair
    removed, added = (
        _ended(_removed(epsilon0, slots, rate), most),
        _ended(_added(epsilon0, slots, rate), least),
    )
    return dominating(removed, added), dominating(added, removed)


def _ended(bound: Bound, pure: float) -> Points:
    """The points of a bound on what is `pure`-private."""
    found, pure = points(bound), pure * (1 + ROUND)
    before = found.epsilons < pure
    return Points(np.append(found.epsilons[before], pure), np.append(found.deltas[before], 0.0))


def _excess(trials: int, chance: float, beyond: Array) -> Array:
    """E(B - beyond)+ of B ~ Binomial(trials, chance), rounded up; `beyond` is not negative."""
    least, slack = np.ceil(beyond), _slack(trials)
    gained = trials * chance * _from(trials - 1, chance, least - 1)
    return np.maximum(
        gained * (1 + slack) - beyond * _from(trials, chance, least) * (1 - slack), 0.0
    )


def _shortfall(trials: int, chance: float | Array, under: Array) -> Array:
    """E(under - B)+ of the same, rounded up."""
    least, slack = np.ceil(under), _slack(trials)
    lost = trials * chance * _below(trials - 1, chance, least - 1)
    return np.maximum(
        np.maximum(under, 0.0) * _below(trials, chance, least) * (1 + slack) - lost * (1 - slack),
        0.0,
    )


def _removed(epsilon0: float, slots: int, rate: float) -> Bound:
    """The world with the unit against the one without: the ratio is 1 - q + q (1/e + (e - 1/e) B /
    m), B of chance 1/(e+1).
    """
    slope = rate * 2 * math.sinh(epsilon0) / slots

    def bound(epsilons: Array) -> Array:
        beyond = (
            np.expm1(np.minimum(epsilons, 2 * MOST_EPSILON)) - rate * math.expm1(-epsilon0)
        ) / slope
        found = slope * _excess(slots, 1 / (math.exp(epsilon0) + 1), beyond)
        return np.where(beyond < slots, np.minimum(1.0, found * (1 + ROUND) + LEAST), 0.0)

    return bound


def _added(epsilon0: float, slots: int, rate: float) -> Bound:
    """The same the other way round."""
    slope = rate * 2 * math.sinh(epsilon0) / slots

    def bound(epsilons: Array) -> Array:
        under = (np.expm1(-epsilons) - rate * math.expm1(-epsilon0)) / slope
        found = (
            np.exp(np.minimum(epsilons, 2 * MOST_EPSILON))
            * slope
            * _shortfall(slots, 1 / (math.exp(epsilon0) + 1), under)
        )
        return np.where(under > 0, np.minimum(1.0, found * (1 + ROUND) + LEAST), 0.0)

    return bound


def _replaced(epsilon0: float, slots: int, rate: float) -> Bound:
    """One value of the unit against another; at most one binary randomised response, and at most
    removing the one and adding the other.

    B counts the answers that speak against the first value.
    """
    removed, added = _removed(epsilon0, slots, rate), _added(epsilon0, slots, rate)

    def bound(epsilons: Array) -> Array:
        near = np.minimum(epsilons, epsilon0)
        t = np.exp(near)
        scale = math.expm1(epsilon0) * (1 + t)
        under = slots * (t * np.expm1(epsilon0 - near) - np.expm1(near) * (1 - rate) / rate) / scale
        found = rate / slots * scale * _shortfall(slots, 1 / (1 + t), under) * (1 + ROUND) + LEAST
        alone = -np.expm1(near - epsilon0) / (1 + math.exp(-epsilon0))
        moved = (removed(near / 2) + np.exp(near / 2) * added(near / 2)) * (1 + ROUND)
        return np.where(under > 0, np.minimum.reduce([np.ones_like(t), found, alone, moved]), 0.0)

    return bound


# --- what is attained
# -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def attained(
    epsilon0: float, slots: int, rate: float = 1.0, answers: int = 2
) -> tuple[Atoms, Atoms]:
    """Losses that are attained, by randomised response of one against nobody else.

    No other unit has the unit's answer, and what is looked at is how often it is given:
    Binomial(slots, p) in one world, p = 1/(e+k-1) of k answers, and times 1 - q + q ((1 - ep) / (1
    - p) (1 - j/slots) + e j/slots) at j of `slots` in the other. At rate 1 these are shuffled
    reports. Merging numbers shows less.
    """
    e = math.exp(epsilon0)
    chance, never = (
        1 / (e + answers - 1),
        (answers - 1) / (e + answers - 2),
    )  # never is (1 - ep) / (1 - p)
    width = 39 * math.sqrt(slots * chance * (1 - chance)) + 800
    numbers = np.arange(
        max(0, math.floor(slots * chance - width)),
        min(slots, math.ceil(slots * chance + width)) + 1,
    )
    mass = _binomial_mass(slots, chance, numbers)
    told = mass * (1 - rate + rate * (never + (e - never) * numbers / slots))
    first = np.unique(
        np.linspace(0, len(numbers), min(MERGED, len(numbers)), endpoint=False).astype(np.int64)
    )
    mass, told = (np.add.reduceat(part, first) for part in (mass, told))
    kept = (mass > 1e-290) & (told > 1e-290)
    mass, told = mass[kept] / mass[kept].sum(), told[kept] / told[kept].sum()
    return _lossy(told, mass), _lossy(mass, told)


def _binomial_mass(trials: int, chance: float, numbers: Array) -> Array:
    """The masses of Binomial(trials, chance), as in `_fair_mass`."""
    ends = np.where(numbers == 0, trials * math.log1p(-chance), trials * math.log(chance))
    if trials == 1:
        return np.exp(ends)
    inner = np.clip(numbers, 1.0, trials - 1.0)
    off = inner - trials * chance
    logs = -trials * chance * _deviance(off / (trials * chance)) - trials * (
        1 - chance
    ) * _deviance(-off / (trials * (1 - chance)))
    logs += np.log(trials / (2 * math.pi * inner * (trials - inner))) / 2
    logs += _stirling(np.array([float(trials)])) - _stirling(inner) - _stirling(trials - inner)
    return np.exp(np.where(inner == numbers, logs, ends))


def _deviance(x: Array) -> Array:
    """(1 + x) log(1 + x) - x."""
    return np.asarray((1 + x) * np.log1p(x) - x)


def _lossy(masses: Array, others: Array) -> Atoms:
    """The loss of a pair, given the masses of its outcomes in both worlds."""
    return Atoms(tuple(np.log(masses / others).tolist()), tuple(masses.tolist()))
