"""The noise stream: the only place where a bounded sum becomes a private value.

Noise and its buffers spread over several processes or devices: each keeps the past noise of its
own coordinates only.

A strategy treats every coordinate alike and by itself, so noise made for a part of the coordinates
is that part of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfy.core import check, events
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Permit
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bounded, Private
from dpfy.noise import exact, gaussian, noise_buffers, schedule
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.lattice import Lattice, with_rounding
from dpfy.noise.strategy import Grads, Recurrence, Recurrent, State, Strategy

NAME, TRAINING = "noise", "training"
"""The name of the stream of a run's training. Under one secret, two streams of one name are the
same noise.
"""
Ends = Sequence[Tensor] | None
"""Where results go instead of the place of the sums."""


@dataclass(frozen=True)
class NoiseStream:
    """Adds the noise of one step to the bounded sum of that step.

    `scale` is the noise multiplier times the strategy's sensitivity; the standard deviation is
    `scale` times the bound that the sum carries (a little more, for the rounding of sums), so there
    is one owner of the clip norm. The noise of step s is a function of (secret, name, s) alone. The
    noisy sum is divided by `divisor`, which is public, while it is at hand. With `in_place` the
    released value takes the memory of the sum, which must not be used afterwards, not even where
    the value went elsewhere; otherwise the sum is left as it is. Sparse sums, of a table of which
    few rows are in use, are released dense: every row gets noise. `part` says which coordinates of
    one contribution the sums hold, where others hold the rest (:mod:`dpfy.noise.stream`). `event` is
    all that the stream does in a whole run, which the permit must have been given for; by default
    one Gaussian release. With `exact` every released value is where real numbers would put it
    (:mod:`dpfy.noise.exact`).
    """

    strategy: Strategy
    scale: float
    randomness: Randomness
    name: str = NAME
    divisor: float = 1.0
    in_place: bool = False
    part: CoordinateSlice | None = None
    event: events.Event | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        check.nonnegative("noise scale", self.scale)
        check.positive("divisor", self.divisor)
        if self.exact:
            schedule.require(self.strategy)
        if self.event is None:
            object.__setattr__(
                self, "event", events.Gaussian(self.scale) if self.scale else events.NotPrivate()
            )

    def init(self, like: Grads) -> State:
        """The strategy's state before the first step."""
        return exact.init(self.strategy, like) if self.exact else self.strategy.init(like)

    def require_lattice(self, like: Grads, bound: float) -> None:
        """Refuse, before the first step, noise that `release` could not lay on a lattice for sums
        like these.
        """
        dtype = gaussian.dtype_of(like)
        if self.scale and math.isfinite(bound):
            self._lattice(like, bound, dtype, 0)

    def release(
        self,
        total: Bounded[Grads],
        step: int,
        state: State,
        permit: Permit,
        into: Grads | None = None,
    ) -> tuple[Private[Grads], State]:
        """The noisy sum of `step`, divided, and the state for the next one.

        With `into`, tensors of the same names and shapes, the released values are rounded to their
        types and written there, on a GPU in the pass that adds the noise.

        Guarantees: refuses a step that `permit` does not cover, a permit for another event, the
        name of training's stream for anything else in a run folder, an `into` of other names or
        shapes, and an unbounded sum unless the scale is zero (a run without privacy, charged as
        such). Every parameter gets noise at every step, also when the batch was empty. Noise is
        added in float32 or wider, before any rounding to a narrower type. With noise, every
        released value is (k + 1/2) step / divisor for a whole number k and a step that plan, shapes
        and types decide, not the data (:mod:`dpfy.noise.lattice`); what is left of the difference
        between this noise and a real Gaussian is given in docs/decisions.md, and in
        docs/exact-noise-training.md for exact noise, where it is nothing.
        """
        assert self.event is not None
        permit.check(step, self.event)
        if (
            self.part is not None
            and (held := sum([t.numel() for t in total.value.values()])) != self.part.size
        ):
            raise InvalidInput(
                "sum", f"{held} coordinates", f"this part of the release has {self.part.size}"
            )
        if self.name == NAME and permit.claim and permit.name != TRAINING:
            rule = (
                f"is that of training: give the stream the name of its claim ({permit.name}), or "
                f"both would draw the same noise"
            )
            raise InvalidInput("stream name", self.name, rule)
        if self.scale and math.isinf(total.bound.l2):
            raise Unsupported("noise on an unbounded sum", "clip with a finite norm")
        dtype = gaussian.dtype_of(total.value)
        for kind in {t.device.type for t in total.value.values()}:
            check.device_kind("a sum", kind)
        noisy = {
            n: v if self.in_place and v.dtype is dtype else v.to(dtype, copy=True)
            for n, v in total.value.items()
        }
        if self.exact or self.scale == 0:
            noisy = {n: v.to_dense() if v.is_sparse else v for n, v in noisy.items()}
        ends = None if into is None else _ends(into, noisy)
        if self.scale == 0:
            gaussian.divide_(list(noisy.values()), self.divisor, ends)
        else:
            state = self._add_(
                noisy, self._lattice(noisy, total.bound.l2, dtype, step), step, state, ends
            )
        return Private(noisy if into is None else into), state

    def _lattice(self, sums: Grads, bound: float, dtype: torch.dtype, step: int) -> Lattice:
        """Where the values of `step` will lie, a function of public things alone; and the secret
        phase at which it is met.
        """
        part = self.part
        count = (
            sum([t.numel() + 1 for t in sums.values()])
            if part is None
            else part.total + len(part.sizes)
        )
        if self.exact:
            return exact.lattice(
                self.scale, bound, count, dtype, schedule.of(self.strategy, step), step
            )
        fresh = self.strategy.fresh(step)
        drawn = int.from_bytes(self.randomness.key(f"{self.name} rounding", step, 8), "little")
        return Lattice.of(
            with_rounding(self.scale, bound, count, dtype, fresh),
            dtype,
            (drawn + 0.5) / 2**64 - 0.5,
            fresh,
        )

    def _add_(self, sums: Grads, lattice: Lattice, step: int, state: State, into: Ends) -> State:
        """Add the noise of `step` and divide: where the sums are if the step is a recurrence, else
        drawn first.
        """
        if self.exact:
            exact.add_(
                sums,
                lattice,
                schedule.of(self.strategy, step),
                self.randomness,
                self.name,
                step,
                self.divisor,
                state,
                into,
            )
            return state
        if isinstance(self.strategy, Recurrent) and self._added(
            self.strategy.recurrence(step), sums, lattice, step, state, into
        ):
            return state
        unit, state = self.strategy.next(
            step, lambda s: gaussian.draw(sums, self.randomness, self.name, s, self.part), state
        )
        gaussian.add_drawn_(sums, unit, lattice, self.divisor, into)
        return state

    def _added(
        self,
        recurrence: Recurrence,
        sums: Grads,
        lattice: Lattice,
        step: int,
        state: State,
        into: Ends,
    ) -> bool:
        """Make the noise where it is added, one pass for all; False, and nothing done, where that
        cannot be.
        """
        if recurrence.is_fresh:
            if recurrence.fresh != 1:
                lattice = Lattice(lattice.step, lattice.noise * recurrence.fresh, lattice.phase)
            gaussian.add_(
                sums, lattice, self.randomness, self.name, step, self.divisor, into, self.part
            )
            return True
        from dpfy.noise import chacha

        many = list(sums.values())
        if not chacha.usable(many):
            return False
        past = (
            noise_buffers.held_beside(state, sums, len(recurrence.weights), step)
            if recurrence.weights
            else None
        )
        if past is not None and not past.is_contiguous():
            return False
        name, part = gaussian.by_counter(self.name, self.part)
        keys = [
            self.randomness.key(name, step - back, chacha.KEY_BYTES)
            for back in range(1 + len(recurrence.again))
        ]
        chacha.add_(many, lattice, keys, self.divisor, recurrence, past, into, part)
        return True


def _ends(into: Grads, sums: Grads) -> list[Tensor]:
    """The tensors of `into` in the order of `sums`."""
    for name in into.keys() | sums.keys():
        if name not in into or name not in sums or into[name].shape != sums[name].shape:
            got = f"{list(into[name].shape)} for {name}" if name in into else f"nothing for {name}"
            raise InvalidInput(
                "into",
                got,
                f"must be {list(sums[name].shape)}" if name in sums else "there is no such sum",
            )
    return [into[name] for name in sums]


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of all coordinates, cut from the parameters laid end to end.

        shard, total = Shard(rank, ranks), ...                    # total: the bounded sum over all
        ranks stream = shard.stream(NoiseStream(strategy, scale, randomness),
        shard.part(parameters)) state = stream.init(shard.of(parameters)) private, state =
        stream.release(Bounded(shard.of(total.value), total.bound, total.unit), step, state, permit)

    Guarantees: the shards of one count are disjoint and together hold every coordinate, their sizes
    differ by at most one, and together they add to the whole sum exactly the noise that the plan
    charges (the bound is that of the whole contribution). The noise of a coordinate is the one it
    would have without shards, exact noise aside, and aside from what a GPU adds to float64 sums or
    to tensors that are held in several pieces. All shards of a run must be of the same count.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        check.integer("shard.count", self.count)
        if check.integer("shard.index", self.index, least=0) >= self.count:
            raise InvalidInput(
                "shard.index", self.index, f"must be less than the number of shards ({self.count})"
            )

    def of(self, tensors: Grads) -> Grads:
        """This shard's coordinates, flat, by the name of the parameter that they belong to; of some
        parameters it may hold none.
        """
        (first, last), start = self.bounds(sum(t.numel() for t in tensors.values())), 0
        parts = {}
        for name, t in tensors.items():
            low, high = max(first - start, 0), min(last - start, t.numel())
            parts[name] = t.reshape(-1)[low : max(low, high)]
            start += t.numel()
        return parts

    def bounds(self, total: int) -> tuple[int, int]:
        """The first of this shard's coordinates of `total`, and the one after its last."""
        return total * self.index // self.count, total * (self.index + 1) // self.count

    def part(self, tensors: Grads) -> CoordinateSlice:
        """Where its coordinates lie among all of `tensors`."""
        sizes = [t.numel() for t in tensors.values()]
        return CoordinateSlice.of([self.bounds(sum(sizes))], sizes)

    def stream(self, whole: NoiseStream, part: CoordinateSlice) -> NoiseStream:
        """The noise stream of the coordinates `part`, which only this shard holds.

        Exact noise cannot be drawn by its place among all coordinates: every shard has a stream
        with a name of its own, for under one name two shards would add the same numbers to
        different coordinates.
        """
        if self.count == 1:
            return whole
        name = f"{whole.name} shard {self.index} of {self.count}" if whole.exact else whole.name
        return replace(whole, name=name, part=part)
