"""The table of proven (participation, strategy) pairs: what a run with them releases, as an event,
and by which theorem.

A pair that is not here has no proof here: it is an error that names the nearest pair that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dpfy.core import events
from dpfy.core import unit as patterns
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.noise import strategy
from dpfy.noise.dense import Dense
from dpfy.noise.schedule import Schedule
from dpfy.noise.shares import Shares
from dpfy.noise.strategy import Identity
from dpfy.noise.toeplitz import Banded, Blt, InverseBanded, NormalisedBanded, SquareRoot
from dpfy.noise.tree import Tree


@dataclass(frozen=True)
class ProvenPair:
    """One proven pair: the event of the whole run given noise multiplier, pattern, strategy and
    steps, and the proof.
    """

    event: Callable[[float, patterns.Participation, strategy.Strategy, int], events.Event]
    theorem: str


def _sampled(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    """Steps on fresh samples, each with sensitivity one."""
    noise.sensitivity(pattern, steps)  # more than one band has no proof: it raises
    if isinstance(pattern, patterns.WithoutReplacement):
        return events.without_replacement(multiplier, pattern.records, pattern.batch_size, steps)
    assert isinstance(pattern, patterns.Poisson)
    return events.poisson(multiplier, pattern.rate, steps)


def _allocated(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    """The epochs that were started, each as a whole: a part of an epoch shows less than all of it."""
    assert isinstance(pattern, patterns.RandomAllocation)
    epochs = -(-steps // pattern.steps_per_epoch)
    if epochs > pattern.epochs:
        raise InvalidInput(
            "steps",
            steps,
            f"must be at most {pattern.epochs} epochs of {pattern.steps_per_epoch} steps",
        )
    return events.random_allocation(multiplier, pattern.steps_per_epoch, epochs, pattern.times)


def _scheduled(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    """The phases one after the other, each sampled as before, with its own noise."""
    assert isinstance(noise, Schedule)
    parts = [
        _sampled(multiplier * factor, pattern, noise, count)
        for count, factor in noise.phases(steps)
    ]
    return parts[0] if len(parts) == 1 else events.Composed(tuple(parts))


def _gaussian(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    """One release of the whole stream. A run cut short has released less, so the charge does not
    depend on the steps made.
    """
    if (
        isinstance(pattern, (patterns.FixedOrder, patterns.Reshuffled))
        and steps > pattern.steps_per_epoch * pattern.epochs
    ):
        raise InvalidInput(
            "steps",
            steps,
            f"must be at most {pattern.epochs} epochs of {pattern.steps_per_epoch} steps",
        )
    return events.Gaussian(multiplier)


def _shared(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    """Every round as if the unit were in it: the server knows who is."""
    assert isinstance(noise, Shares)
    return events.Repeated(noise.event(multiplier), steps)


def _cyclic(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    assert isinstance(pattern, patterns.CyclicPoisson)
    return events.poisson(multiplier, pattern.rate, -(-steps // pattern.cycle))


def _bins(
    multiplier: float, pattern: patterns.Participation, noise: strategy.Strategy, steps: int
) -> events.Event:
    """The inner products of the bins' responses over all epochs of the pattern, however many steps
    were made.
    """
    assert isinstance(pattern, patterns.SecretBins)
    return events.BallsInBins(multiplier, bins_gram(noise, pattern))  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def bins_gram(
    noise: strategy.Strategy, pattern: patterns.SecretBins
) -> tuple[tuple[float, ...], ...]:
    """Inner products of the responses C u_j of the bins, in units of the squared sensitivity,
    rounding errors below zero cut off.
    """
    import numpy as np

    steps = pattern.bins * pattern.epochs
    encoder = noise.encoder(steps)  # type: ignore[attr-defined]
    responses = np.stack([encoder[:, j :: pattern.bins].sum(axis=1) for j in range(pattern.bins)])
    gram = (
        np.maximum(responses @ responses.T, 0)
        / noise.sensitivity(pattern, steps) ** 2
        * (1 + 1e-11)
    )  # rounded up
    return tuple(tuple(float(v) for v in row) for row in gram)


STREAM = (
    "The whole noisy stream C G + Z is one Gaussian release of the strategy's sensitivity under "
    "the participation pattern, also when "
    "gradients depend on earlier outputs, C being lower-triangular (Denisov et al. 2022, theorem "
    "2.1); "
)
EXACT = {
    patterns.SinglePass: "each unit meets one column of C.",
    patterns.FixedOrder: "exact for columns with non-negative inner products (Choquette-Choo "
    "et al. 2022).",
    patterns.Separated: "exact for at most as many bands as the separation (Choquette-Choo et "
    "al. 2023) and for non-negative "
    "non-increasing Toeplitz matrices (Kalinin & Lampert 2024, theorem 2).",
    patterns.Reshuffled: "every tree node counts the epochs that touch it, maximised over all orders.",
}
CORRELATED = (Banded, NormalisedBanded, InverseBanded, Blt, SquareRoot, Dense)
AMPLIFIED = (
    "At most as many bands as the cycle: a unit's participations in different rounds do not "
    "overlap, and the stream is dominated by one "
    "Poisson-subsampled Gaussian a round (Choquette-Choo et al. 2023, theorem 4)."
)
BINS = (
    "The release with the unit is a mixture over its secret bin of Gaussians, without it one "
    "Gaussian; for non-negative C this pair "
    "dominates adaptively (Chua et al. 2024; Choquette-Choo et al. 2024). Its curve is computed by "
    "Monte Carlo, with proven confidence."
)
SAMPLED = (
    "Each step is a Poisson-subsampled Gaussian mechanism of sensitivity one clip norm; steps "
    "compose adaptively "
    "(Abadi et al. 2016; Mironov, Talwar & Zhang 2019)."
)
ALLOCATED = (
    "In every epoch a unit's steps are a secret uniform choice. With the unit the noisy steps of an "
    "epoch are a mixture of Gaussians over that choice, without it one Gaussian; the pair dominates "
    "adaptively, and a choice of k of t steps reveals at most what k choices of one of t // k do "
    "(Feldman & Shenfeld 2025). Epochs are independent and compose adaptively. Both directions are "
    "computed from the law of the likelihood ratio, a mean of log-normal variables."
)
FIXED_SIZE = (
    "Each step is a Gaussian mechanism on a uniform subset of a fixed size. Replacing a unit moves "
    "the sum by two clip norms if it is "
    "drawn; the pair of that dominates (Zhu, Dong & Wang 2022, proposition 30), and steps compose "
    "adaptively."
)
SHARED = (
    "Each round is a sum of whole vectors of bounded length with a share of noise from every "
    "honest client: a discrete Gaussian up to a "
    "given factor, itself rounded real Gaussian noise (Kairouz, Liu & Steinke 2021), or Skellam "
    "noise by its Rényi divergences (Agarwal, "
    "Kairouz & Liu 2021). Rounds compose adaptively; who takes part is known to the server, and no "
    "amplification is claimed."
)
PHASES = (
    "The noise multiplier given is that of the phase with the least noise; all factors were fixed "
    "before the run."
)

PAIRS: dict[tuple[type, type], ProvenPair] = {
    (patterns.Poisson, strategy.Identity): ProvenPair(_sampled, SAMPLED),
    (patterns.Poisson, Schedule): ProvenPair(_scheduled, SAMPLED + " " + PHASES),
    (patterns.RandomAllocation, strategy.Identity): ProvenPair(_allocated, ALLOCATED),
    (patterns.Poisson, Shares): ProvenPair(_shared, SHARED),
    (patterns.WithoutReplacement, strategy.Identity): ProvenPair(_sampled, FIXED_SIZE),
    (patterns.WithoutReplacement, Schedule): ProvenPair(_scheduled, FIXED_SIZE + " " + PHASES),
    (patterns.Poisson, Banded): ProvenPair(_sampled, SAMPLED + " One band only."),
    (patterns.CyclicPoisson, Banded): ProvenPair(_cyclic, AMPLIFIED),
    (patterns.CyclicPoisson, NormalisedBanded): ProvenPair(_cyclic, AMPLIFIED),
    (patterns.SinglePass, Tree): ProvenPair(_gaussian, STREAM + EXACT[patterns.SinglePass]),
    (patterns.FixedOrder, Tree): ProvenPair(_gaussian, STREAM + EXACT[patterns.FixedOrder]),
    (patterns.Reshuffled, Tree): ProvenPair(_gaussian, STREAM + EXACT[patterns.Reshuffled]),
    (patterns.Reshuffled, Banded): ProvenPair(
        _gaussian, STREAM + "one band: participations never overlap."
    ),
    **{
        (pattern, kind): ProvenPair(_gaussian, STREAM + EXACT[pattern])
        for pattern in (patterns.SinglePass, patterns.FixedOrder, patterns.Separated)
        for kind in CORRELATED
    },
    **{(patterns.SecretBins, kind): ProvenPair(_bins, BINS) for kind in CORRELATED},
}


def find(pattern: patterns.Participation, noise: strategy.Strategy) -> ProvenPair:
    """The proof for this pair, or an error that names what is proven."""
    pair = PAIRS.get((type(pattern), type(noise)))
    if pair is None:
        near = [
            f"{p.__name__} with {s.__name__}"
            for p, s in PAIRS
            if p is type(pattern) or s is type(noise)
        ]
        known = near or [f"{p.__name__} with {s.__name__}" for p, s in PAIRS]
        hint = (
            "use cyclic Poisson sampling for correlated noise; "
            if isinstance(pattern, patterns.Poisson)
            else ""
        )
        raise Unsupported(
            f"{type(pattern).__name__} participation with {type(noise).__name__} noise",
            f"{hint}proven: {', '.join(known)}",
        )
    return pair


def event(
    noise_multiplier: float,
    pattern: patterns.Participation,
    noise: strategy.Strategy,
    steps: int,
) -> events.Event:
    """What a run of `steps` releases. Noise zero is a release without protection, never an infinite
    multiplier in disguise.
    """
    pair = find(pattern, noise)
    return (
        events.NotPrivate()
        if noise_multiplier == 0
        else pair.event(noise_multiplier, pattern, noise, steps)
    )


STRATEGIES: dict[str, type] = {
    "identity": Identity,
    "schedule": Schedule,
    "shares": Shares,
    "banded": Banded,
    "normalised-banded": NormalisedBanded,
    "inverse-banded": InverseBanded,
    "blt": Blt,
    "square-root": SquareRoot,
    "dense": Dense,
    "tree": Tree,
}
