"""The scheme for a privacy budget: the finest steps that the bits allow, and the least shares that
the budget allows.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace

from dpfy.accounting import calibrate
from dpfy.core import check, events
from dpfy.core.errors import Unsupported
from dpfy.core.unit import Adjacency
from dpfy.federated.recipes import CLIENT
from dpfy.federated.shares.scheme import SharingScheme
from dpfy.gradients.clip import FlatClip
from dpfy.noise.shares import DISCRETE, FINEST, Shares
from dpfy.plan.recipe import Plan, Recipe
from dpfy.sampling.samplers import PoissonSampler

OVERFLOW = 1e-6
"""The largest probability with which a round may wrap around, unless another is asked for."""
SPREAD = 6
"""Standard deviations above its mean that a cohort drawn at random has room for."""
COARSER = 1.02
SURVIVORS = 0.8
"""The part of a mean cohort that must survive, unless another number is asked for."""


def choose(
    *,
    dimension: int,
    clip: float,
    clients: int,
    bits: int,
    epsilon: float,
    delta: float,
    rounds: int = 1,
    least: int | None = None,
    law: str = DISCRETE,
    adjacency: Adjacency | str = Adjacency.ZERO_OUT,
    overflow: float = OVERFLOW,
    rotation: int | None = None,
) -> SharingScheme:
    """The scheme of least error for so many bits: (epsilon, delta) for all rounds together, if
    `least` honest clients survive each.

    The error falls with the step, since less is lost by rounding, until a sum no longer fits: the
    step returned is the least one for which the probability of a wrap-around is within the bound
    asked for.

    Guarantees: the tight accountant's epsilon for `rounds` times the event of the scheme is at most
    `epsilon`.
    """
    kind = Adjacency.parse(adjacency)
    check.inside_unit("overflow", overflow)
    seed = secrets.randbits(52) if rotation is None else rotation
    draft = Shares(dimension, clients, clients if least is None else least, bits, 1.0, law, seed)

    def needed(event: Callable[[float], events.Event]) -> float:
        return calibrate.noise(
            lambda z: events.Repeated(event(z), rounds), epsilon, delta, adjacency=kind
        )

    found = _finest(draft, needed(events.Gaussian), overflow)
    while True:
        multiplier = needed(found.event)
        if found.overflow(found.share(multiplier)) <= overflow:
            return SharingScheme(found, clip, multiplier)
        found = replace(
            found, scaled=found.scaled / COARSER
        )  # shares had to be larger than for a Gaussian
        if found.scaled < 1:
            raise _too_few_bits(found)


def _finest(draft: Shares, multiplier: float, overflow: float) -> Shares:
    """The finest steps whose sums fit, to a part in a thousand."""

    def fits(scaled: float) -> bool:
        shares = replace(draft, scaled=scaled)
        return shares.overflow(shares.share(multiplier)) <= overflow

    low = 1.0
    if not fits(low):
        raise _too_few_bits(draft)
    high = low
    while high < FINEST and fits(2 * high):
        low = high = 2 * high
    high = min(2 * high, FINEST)
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return replace(draft, scaled=low)


def _too_few_bits(shares: Shares) -> Unsupported:
    return Unsupported(
        f"{shares.bits} bits for {shares.clients:,} clients",
        "use more bits, fewer clients, or a larger epsilon",
    )


def plan(
    *,
    clients: int,
    dimension: int,
    rounds: int,
    epsilon: float,
    delta: float,
    cohort: float | None = None,
    least: int | None = None,
    clip_norm: float = 1.0,
    bits: int = 16,
    law: str = DISCRETE,
    adjacency: Adjacency | str = Adjacency.ZERO_OUT,
    overflow: float = OVERFLOW,
    rotation: int | None = None,
) -> Plan:
    """A plan whose noise the clients add: for :class:`dpfy.federated.shares.DistributedRounds`.

    Of so many `clients` a round has all, or a `cohort` of so many on average, drawn by the server:
    which is no secret to it, so that every round is charged as if a client were in it. `dimension`
    is the number of trainable parameters; `least` the number of honest clients that survive a
    round, by default four fifths of the cohort.

    Guarantees: the plan's epsilon at `delta` is at most `epsilon`.
    """
    check.integer("clients", clients)
    mean = float(clients) if cohort is None else check.positive("cohort", cohort)
    rate = check.sampling_rate("cohort / clients", mean / clients)
    most = (
        clients
        if rate == 1
        else min(clients, math.ceil(mean + SPREAD * math.sqrt(mean * (1 - rate))))
    )
    survivors = max(1, math.floor(SURVIVORS * mean)) if least is None else least
    found = choose(
        dimension=dimension, clip=clip_norm, clients=most, bits=bits, epsilon=epsilon, delta=delta, rounds=rounds,
        least=survivors, law=law, adjacency=adjacency, overflow=overflow, rotation=rotation,
    )  # fmt: skip
    recipe = Recipe(
        clients,
        PoissonSampler(rate),
        rounds,
        FlatClip(clip_norm),
        found.shares,
        CLIENT,
        Adjacency.parse(adjacency),
    )
    return recipe.with_noise(found.noise_multiplier, delta=delta)
