"""The contract suite of noise strategies catches wrong ones, and all of ours pass it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from dpfy.core import unit as patterns
from dpfy.core.errors import Unsupported
from dpfy.noise.dense import dense
from dpfy.noise.schedule import Schedule
from dpfy.noise.shares import Shares
from dpfy.noise.strategy import Identity, Recurrence, Recurrent
from dpfy.noise.toeplitz import (
    Banded,
    Blt,
    InverseBanded,
    NormalisedBanded,
    SquareRoot,
    cancelling,
    inverse_square_root_banded,
    square_root_banded,
)
from dpfy.noise.tree import Tree
from dpfy.plan.pairs import STRATEGIES
from dpfy.testing import ContractBroken, check_strategy

STEPS = 21
BANDS = (1.0, 0.7, 0.6, 0.5)


def own_matrix():
    rng = np.random.default_rng(3)
    return dense(np.tril(rng.uniform(0.05, 0.5, (STEPS, STEPS))) + np.eye(STEPS))


OURS = {
    "identity": [Identity()],
    "schedule": [Schedule((4, 10, 7), (1.5, 1.0, 2.25))],
    "shares": [Shares(10, 5, 4, 20, 100.0)],
    "banded": [Banded((2.0,)), Banded(BANDS), Banded((0.5, 0.3, 0.2)), square_root_banded(40)],
    "normalised-banded": [NormalisedBanded(BANDS, STEPS)],
    "inverse-banded": [inverse_square_root_banded(5), cancelling(0.9)],
    "blt": [Blt((0.99, 0.9, 0.5), (0.156, 0.233, 0.141))],
    "square-root": [SquareRoot()],
    "dense": [own_matrix()],
    "tree": [
        Tree("completed"),
        Tree("honaker"),
        Tree("completed", restart=6),
        Tree("honaker", restart=6),
        Tree("completed", restart=5, completion=True),
        Tree("honaker", restart=5, completion=True),
        Tree("honaker", restart=4, completion=True),
    ],
}
NO_STREAM = {"shares"}


def test_every_strategy_of_ours_has_settings():
    assert set(OURS) == set(STRATEGIES)
    assert all(type(s) is STRATEGIES[name] for name, held in OURS.items() for s in held)


@pytest.mark.parametrize("name", STRATEGIES)
def test_ours_keep_the_contract(name):
    for strategy in OURS[name]:
        check_strategy(strategy, steps=STEPS, streams=name not in NO_STREAM)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - NO_STREAM))
def test_ours_keep_the_contract_thoroughly(name):
    for strategy in OURS[name]:
        check_strategy(strategy, steps=STEPS, seed=3, thorough=True)


@dataclass(frozen=True)
class Cancelling:
    """Each step takes back half of the draw before it: a strategy without any help of ours."""

    def sensitivity(self, participation_, steps):
        if not isinstance(participation_, patterns.SinglePass):
            raise Unsupported("more than one participation", "use a single pass")
        return float(np.sqrt(sum(0.25**i for i in range(steps)))) * (1 + 1e-12)

    def fresh(self, step):
        return 1.0

    def init(self, like):
        return {}

    def next(self, step, draw, state):
        noise = draw(step)
        if step:
            noise = {n: t - 0.5 * draw(step - 1)[n] for n, t in noise.items()}
        return noise, state


class Understated(Cancelling):
    """The sensitivity of the first row, and not of the column."""

    def sensitivity(self, participation_, steps):
        return super().sensitivity(participation_, steps) and 1.0


class RoundedDown(Cancelling):
    def sensitivity(self, participation_, steps):
        return super().sensitivity(participation_, steps) * (1 - 1e-6)


class AnyPattern(Cancelling):
    """The sensitivity of one participation is claimed for several."""

    def sensitivity(self, participation_, steps):
        return super().sensitivity(patterns.SinglePass(), steps)


class SampledToo(Cancelling):
    """Steps are correlated, and are composed as if they were not."""

    def sensitivity(self, participation_, steps):
        sampled = isinstance(participation_, patterns.Poisson)
        return 2.0 if sampled else super().sensitivity(participation_, steps)


class SmallStep(Cancelling):
    """The noise of one step is half of what it should be."""

    def next(self, step, draw, state):
        noise, state = super().next(step, draw, state)
        return {n: t * (0.5 if step == 7 else 1.0) for n, t in noise.items()}, state


class ReusedDraw(Cancelling):
    """Two steps have the same noise: their difference has none."""

    def next(self, step, draw, state):
        return draw(step - (step == 5)), state


class WrongType(Cancelling):
    def next(self, step, draw, state):
        noise, state = super().next(step, draw, state)
        return {n: t.half() for n, t in noise.items()}, state


class KeepsInObject(Cancelling):
    """What is remembered is kept in the object and not in the state."""

    held: dict = {}  # noqa: RUF012

    def next(self, step, draw, state):
        noise = draw(step)
        before = KeepsInObject.held.get(step - 1) if step else None
        KeepsInObject.held[step] = {n: t.clone() for n, t in noise.items()}
        if before is not None and before.keys() == noise.keys():
            noise = {n: t - 0.5 * before[n] for n, t in noise.items()}
        return noise, state


class BeginsAgain(Cancelling):
    """Without a state the past is taken to be zero."""

    def init(self, like):
        return {"past": torch.zeros(sum(t.numel() for t in like.values()))}

    def next(self, step, draw, state):
        noise = draw(step)
        names, sizes = list(noise), [t.numel() for t in noise.values()]
        flat = torch.cat([t.reshape(-1) for t in noise.values()])
        past = state.get("past", torch.zeros_like(flat)).to(flat.dtype)
        parts = (flat - 0.5 * past).split(sizes)
        made = {n: p.view(noise[n].shape) for n, p in zip(names, parts, strict=True)}
        return made, {"past": flat}


class RoundsState(BeginsAgain):
    """The state is not what the next step used."""

    def next(self, step, draw, state):
        if not state:
            raise Unsupported("a lost state", "begin again")
        made, state = super().next(step, draw, state)
        return made, {"past": state["past"].half().float()}


class NotLinear(Cancelling):
    def next(self, step, draw, state):
        noise, state = super().next(step, draw, state)
        return {n: t * t.abs().clamp(max=1.0) for n, t in noise.items()}, state


class Fresh(Cancelling):
    def fresh(self, step):
        return 5.0


class WrongMatrix(Cancelling):
    def noise_matrix(self, steps):
        return np.eye(steps) - 0.4 * np.eye(steps, k=-1)


class WrongEncoder(Cancelling):
    def encoder(self, steps):
        return np.eye(steps)


@dataclass(frozen=True)
class OtherRecurrence(Recurrent):
    """The route where the sums are makes other noise than `next`."""

    def sensitivity(self, participation_, steps):
        return 1.0

    def init(self, like):
        return {}

    def recurrence(self, step):
        return Recurrence(gain=2.0)

    def next(self, step, draw, state):
        return draw(step), state


@dataclass
class Thawed:
    """A strategy whose fields can be changed later."""

    half: float = field(default=0.5)


class ForgottenBand(Banded):
    """The last band is left out of the stream."""

    def recurrence(self, step):
        held = super().recurrence(step)
        return replace(held, weights=(0.0, *held.weights[1:]))


class NoOverlap(Banded):
    """Participations are counted as if their columns never met."""

    def sensitivity(self, participation_, steps):
        once = super().sensitivity(patterns.SinglePass(), steps)
        most = getattr(participation_, "epochs", getattr(participation_, "most", 1))
        return once * np.sqrt(most)


class PositiveInverse(InverseBanded):
    """The stream adds the last draws instead of taking them back."""

    def recurrence(self, step):
        return Recurrence(again=tuple(-d for d in self.noising_coefficient[1 : step + 1]))


WRONG = [
    (Understated(), "sensitivity is at least"),
    (RoundedDown(), "sensitivity is at least"),
    (AnyPattern(), "sensitivity is at least|independent noise"),
    (SampledToo(), "independent noise"),
    (SmallStep(), "sensitivity is at least"),
    (ReusedDraw(), "noise of its own"),
    (WrongType(), "names, shapes and number type"),
    (KeepsInObject(), "All that a run remembers"),
    (BeginsAgain(), "lost"),
    (RoundsState(), "linear combination|single precision|lost"),
    (NotLinear(), "linear combination"),
    (Fresh(), "own draws"),
    (WrongMatrix(), "matrices"),
    (WrongEncoder(), "matrices"),
    (OtherRecurrence(), "recurrence"),
    (ForgottenBand(BANDS), "sensitivity|matrices|linear combination|lost"),
    (NoOverlap(BANDS), "sensitivity is at least"),
    (PositiveInverse((1.0, -0.5)), "matrices|sensitivity"),
]


@pytest.mark.parametrize(("strategy", "property"), WRONG, ids=[type(s).__name__ for s, _ in WRONG])
def test_wrong_strategies_are_caught(strategy, property):
    with pytest.raises(ContractBroken, match=property):
        check_strategy(strategy)


def test_the_obvious_strategy_passes():
    check_strategy(Cancelling())


def test_a_strategy_that_could_be_changed_later_is_caught():
    with pytest.raises(ContractBroken, match="frozen"):
        check_strategy(Thawed())


def test_a_strategy_that_supports_no_pattern_is_caught():
    with pytest.raises(ContractBroken, match="at least one"):
        check_strategy(Cancelling(), participations=[patterns.Poisson(0.1)])


def test_a_strategy_without_a_stream_must_refuse():
    with pytest.raises(ContractBroken, match="refuses to make any"):
        check_strategy(Cancelling(), streams=False)
