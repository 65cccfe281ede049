"""Exact noise: every released value is the point of the lattice cell in which sum + Gaussian noise
lies, both real numbers.

    k = floor((sum + noise) / step)          released: (k + 1/2) step / divisor

Floating point finds k where its error cannot matter, which is nearly everywhere: the quotient is
computed in double precision with an error that is known, and where a whole number is nearer than
that, real numbers decide (:mod:`dpfy.noise.arbitrary_precision`). So k does not depend on how floating point
rounds, and the release is post-processing of the mechanism that is charged.
docs/exact-noise-training.md: the proof.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.noise import arbitrary_precision, chacha, gaussian, noise_buffers
from dpfy.noise.gaussian import Scratch
from dpfy.noise.lattice import Lattice, pieces
from dpfy.noise.schedule import NoiseTerms
from dpfy.noise.strategy import Grads, Recurrence, Recurrent, State, Strategy

ERROR = 2.0**-37
"""By how much a unit draw can be off in double precision, where its radius lies between the next
two.
"""
NEAREST, FARTHEST = 2.0**-12, 6.1
ROUNDING = 2.0**-50
"""Of a sum of a few terms, relative to its largest part."""
LARGEST = 2.0**8
"""Of noise that is remembered, at unit scale: far beyond what draws can add up to, near enough for
its rounding to be covered.
"""
STEPS, MOST_ADDED = 2**20, 2.0**-10
"""For how many steps that rounding is covered, and how much larger it may make the noise."""
CHUNK = 1 << 18


@dataclass(frozen=True)
class Draws:
    """The draws of one stream, by address, for so many values: real numbers of which floating point
    holds the first digits.

    `dtype` says which: words have 64 bits for float64, 32 for float32.
    """

    randomness: Randomness
    stream: str
    count: int
    dtype: torch.dtype = torch.float64

    def chunks(self, address: int, scale: float) -> Iterator[tuple[Tensor, NDArray[np.intp]]]:
        """`scale` times the draw of `address`, a chunk at a time, in memory that the next chunk
        overwrites; and the values in it that are not known up to `scale` times `ERROR`.
        """
        factor = None
        for scratch, length in self.words(address):
            factor = scratch.squared(scale) if factor is None else factor
            values, radius = scratch.transform(factor), scratch.radius
            unknown = np.empty(0, np.intp)
            if radius.min() < scale * NEAREST or radius.max() > scale * FARTHEST:
                pairs = np.flatnonzero((radius < scale * NEAREST) | (radius > scale * FARTHEST))
                unknown = np.concatenate([pairs, pairs + len(radius)])
            yield values[:length], unknown[unknown < length]

    def words(self, address: int, first: int = 0) -> Iterator[tuple[Scratch, int]]:
        """The words of the chunks from `first` on, each of a keystream of its own, in memory that
        the next overwrites; and how many of its values are asked for.
        """
        whole = Scratch.held(self.dtype, CHUNK)
        for chunk in range(first, -(-self.count // CHUNK)):
            left = self.count - chunk * CHUNK
            scratch = whole if left >= CHUNK else whole.part((left + 1) // 2)
            self.randomness.keystream(f"{self.stream} part {chunk}", address)(scratch.bits)
            yield scratch, min(left, CHUNK)

    def value(self, address: int, place: int) -> Decimal:
        """The value at `place` of the draw of `address`, as a real number."""
        chunk, inside = divmod(place, CHUNK)
        scratch, _ = next(self.words(address, chunk))
        return self.exactly(address, chunk, inside, scratch.integers)

    def exactly(
        self, address: int, chunk: int, inside: int, words: NDArray[np.signedinteger[Any]]
    ) -> Decimal:
        """The value that lies `inside` of a chunk with these words."""
        second, index = divmod(inside, words.shape[1])
        behind = self.randomness.key(
            f"{self.stream} digits {chunk * CHUNK + index}", address, 2 * arbitrary_precision.DIGITS
        )
        return arbitrary_precision.pair(
            int(words[0, index]), int(words[1, index]), behind, 8 * words.itemsize
        )[second]


def wide(like: Grads) -> Grads:
    """Tensors of the same shapes in double precision, as state is made for; without memory of their
    own.
    """
    return {
        name: torch.zeros((), dtype=torch.float64, device=t.device).expand(t.shape)
        for name, t in like.items()
    }


def init(strategy: Strategy, like: Grads) -> State:
    """The state before the first step: rows in double precision; draws are asked for again, and not
    kept.
    """
    return strategy.init(wide(like)) if isinstance(strategy, Recurrent) else {}


def lattice(
    scale: float, bound: float, coordinates: int, dtype: torch.dtype, terms: NoiseTerms, step: int
) -> Lattice:
    """Where the values of `step` lie.

    Guarantees: the noise is at least `scale` bounds, and covers what the rounding of remembered
    noise can add to a contribution.
    """
    added = 2.0**-50
    if terms.past is not None:
        added += 2 * scale * lost(terms.past) * math.sqrt(coordinates * STEPS)
        if not (added < MOST_ADDED and step < STEPS):
            what = (
                f"exact correlated noise of {scale:.3g} bounds on {coordinates} coordinates at "
                f"step {step}"
            )
            raise Unsupported(what, 'use independent noise, or noise="float"')
    fresh = terms.draws[0][0] if terms.past is not None or len(terms.draws) == 1 else 1.0
    return Lattice.of(math.nextafter(scale * bound * (1 + added), math.inf), dtype, 0.0, fresh)


def lost(past: Recurrence) -> float:
    """How far double precision can be from the noise that `past` adds, at unit scale and in parts
    of a step's own draw.
    """
    size = sum(map(abs, past.weights)) * (len(past.weights) + 4)
    drifted = sum(4 * abs(w) / (1 - t) for w, t in zip(past.weights, past.decay, strict=False))
    return 2.0**-53 * LARGEST * (size + drifted) * max(1.0, past.first)


def add_(
    sums: Grads,
    on: Lattice,
    terms: NoiseTerms,
    randomness: Randomness,
    stream: str,
    step: int,
    divisor: float,
    state: State,
    into: Sequence[Tensor] | None,
) -> None:
    """Release `sums` on the lattice, in place; with `into`, the results are rounded to the types of
    these tensors and written there.

    A GPU makes independent float32 noise itself; noise of other kinds for other devices is made on
    the host, and the sums travel.
    """
    many = list(sums.values())
    if any(t.device.type != "cpu" for t in many):
        if (
            terms.alone
            and chacha.triton is not None
            and all(t.is_cuda and t.dtype is torch.float32 for t in many)
        ):
            _on_gpu(
                many,
                on,
                terms.draws[0][0],
                randomness.key(stream, step, chacha.KEY_BYTES),
                divisor,
                into,
            )
            return
        here, past = ({name: t.cpu() for name, t in tensors.items()} for tensors in (sums, state))
        add_(here, on, terms, randomness, stream, step, divisor, past, None)
        for there, made in ((sums, here), (state, past)):
            for name, t in there.items():
                t.copy_(made[name])
    elif terms.alone and gaussian.dtype_of(sums) is torch.float32:
        from dpfy.noise import exact_single

        draws = Draws(randomness, stream, sum(t.numel() for t in many), torch.float32)
        exact_single.lay_(many, on, terms.draws[0], draws, divisor)
    else:
        lay_(
            sums,
            on,
            terms,
            Draws(randomness, stream, sum(t.numel() for t in many)),
            step,
            divisor,
            state,
        )
    gaussian.put(into, many)


def _on_gpu(
    many: list[Tensor],
    on: Lattice,
    gain: float,
    key: bytes,
    divisor: float,
    into: Sequence[Tensor] | None,
) -> None:
    from dpfy.noise import exact_kernel

    whole = [t.contiguous() for t in many]
    exact_kernel.add_(whole, on, gain, key, divisor, into)
    if into is None:
        for t, made in zip(many, whole, strict=True):
            if made is not t:
                t.copy_(made)


def lay_(
    sums: Grads,
    on: Lattice,
    terms: NoiseTerms,
    draws: Draws,
    step: int,
    divisor: float,
    state: State,
) -> None:
    """Turn `sums` into released values, in place; the rows of `state` move on.

    Guarantees: with t the real number (sum + noise) / step, a sum becomes (floor(t) + 1/2) steps
    over the divisor, rounded to its type; a sum that is not finite, one that is not finite. What is
    remembered is what was released less the sum.
    """
    require()
    rows = [t.view(-1) if t.is_contiguous() else t.flatten() for t in sums.values()]
    past = None if terms.past is None else _Past(terms.past, state, sums, step, on)
    error = _error(rows, terms, on)
    sizes, target, done, weight = [row.numel() for row in rows], 0, 0, on.step / divisor
    for start, noise, unknown in _noise(terms, draws, on):
        parts, lengths, target, done = pieces(rows, sizes, target, done, len(noise))
        centre = held("centre", len(noise))
        torch._foreach_copy_(torch.split_with_sizes(centre, lengths), parts)
        t = noise if past is None else past.added(noise, start)
        cells = held("cells", len(noise))
        torch.add(t, centre, alpha=1 / on.step, out=t)
        torch.floor(t, out=cells)
        torch.sub(t, cells, out=t)  # how far into the cell: between 0 and 1
        low, high = t.aminmax()
        if not (low > error and high < 1 - error and not len(unknown)):
            near = torch.nonzero(~((t > error) & (t < 1 - error))).flatten().tolist()
            _decide(cells, centre, {*near, *unknown.tolist()}, past, terms, draws, on, start)
        if past is not None:
            past.keep(start, cells, centre)
        torch._foreach_copy_(parts, torch.split_with_sizes(cells, lengths))
        for part in parts:
            part.add_(0.5).mul_(weight)  # functions of the cell alone
    for t, row in zip(sums.values(), rows, strict=True):
        if not t.is_contiguous():
            t.copy_(row.view(t.shape))


def _error(rows: Sequence[Tensor], terms: NoiseTerms, on: Lattice) -> float:
    """By how much the quotients of a step can be off, where its draws are known."""
    ends = [abs(float(end)) for row in rows if row.numel() for end in row.aminmax()]
    if not all(map(math.isfinite, ends)):
        ends = [float(row[row.isfinite()].abs().max()) for row in rows if row.isfinite().any()]
    past = 0 if terms.past is None else sum(map(abs, terms.past.weights)) * abs(terms.past.gain)
    largest = max(ends, default=0.0) / on.step + on.noise * (10 * terms.size + LARGEST * past)
    return on.noise * terms.size * ERROR + ROUNDING * (largest + 1)


def _noise(
    terms: NoiseTerms, draws: Draws, on: Lattice
) -> Iterator[tuple[int, Tensor, NDArray[np.intp]]]:
    """The sum of the draws of a step, in steps, a chunk at a time; where each begins, and the
    values in it that are not known.
    """
    streams = [
        (math.copysign(1.0, weight), draws.chunks(at, abs(weight) * on.noise))
        for weight, at in terms.draws
        if weight
    ]
    for start in range(0, draws.count, CHUNK):
        sign, stream = streams[0]
        total, unknown = next(stream)
        if len(streams) > 1 or sign < 0:
            total = torch.mul(total, sign, out=held("noise", len(total)))
        for sign, stream in streams[1:]:
            values, more = next(stream)
            total.add_(values, alpha=sign)
            unknown = np.concatenate([unknown, more])
        yield start, total, unknown


def _decide(
    cells: Tensor,
    centre: Tensor,
    places: set[int],
    past: _Past | None,
    terms: NoiseTerms,
    draws: Draws,
    on: Lattice,
    start: int,
) -> None:
    """The cells of some places, by real numbers. Places whose sums are not finite stay as they
    are.
    """
    for place in sorted(places):
        if math.isfinite(total := float(centre[place])):
            known = (total / on.step, 0.0 if past is None else float(past.before[place]))
            drawn = [
                (Decimal(w) * Decimal(on.noise), draws.value(at, start + place))
                for w, at in terms.draws
            ]
            cells[place] = arbitrary_precision.floor(known, drawn)


class _Past:
    """Noise that was released, at unit scale, in the rows of a state."""

    def __init__(
        self, recurrence: Recurrence, state: State, like: Grads, step: int, on: Lattice
    ) -> None:
        self.recurrence, self.unit = recurrence, on.noise * recurrence.gain
        self.rows = noise_buffers.held_beside(state, wide(like), len(recurrence.weights), step)
        self.weights = torch.tensor(
            [weight * self.unit for weight in recurrence.weights], dtype=torch.float64
        )  # in steps
        self.half = torch.tensor(0.5 / self.unit, dtype=torch.float64)
        self.step, self.before = on.step, held("past", 0)

    def added(self, noise: Tensor, start: int) -> Tensor:
        """`noise`, in steps, and what the past adds to it."""
        part = self.rows[:, start : start + len(noise)]
        self.before = torch.mv(part.t(), self.weights, out=held("past", len(noise)))
        return torch.add(noise, self.before, out=noise)

    def keep(self, start: int, cells: Tensor, centre: Tensor) -> None:
        """Remember what is released for these values, less their sums (`centre`, which is
        overwritten).
        """
        made = torch.sub(cells, centre, alpha=1 / self.step, out=centre)
        torch.add(self.half, made, alpha=1 / self.unit, out=made)
        rows, decay = self.rows[:, start : start + len(cells)].unbind(), self.recurrence.decay
        kept = rows if decay else [rows[self.recurrence.keep].copy_(made)]
        for row, share in zip(rows, decay, strict=False):
            torch.add(made, row, alpha=share, out=row)
        if any(
            max(map(abs, torch.stack(row.aminmax()).tolist())) >= LARGEST for row in kept
        ):  # not if not a number
            raise Unsupported(
                "exact noise that adds up to hundreds of standard deviations",
                "use another strategy",
            )


_HELD = threading.local()


def held(name: str, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Memory for a chunk, the same at every call of a thread."""
    if not hasattr(_HELD, name):
        setattr(
            _HELD, name, torch.from_numpy(gaussian.large_pages(CHUNK * dtype.itemsize)).view(dtype)
        )
    return getattr(_HELD, name)[:length]  # type: ignore[no-any-return]


@cache
def require() -> None:
    """Show on this machine, before the first release, that double precision is as near to real
    numbers as is said here.
    """
    if (gap := disagreement(Draws(Randomness(bytes(32)), "proof", 300))) > ERROR / 16:
        what = f"exact noise on this machine: its double precision is off by {gap:.1e}"
        raise Unsupported(what, 'use noise="float", and report this')


def disagreement(draws: Draws) -> float:
    """The largest distance of the draws of address 0 from real numbers, where it should be
    small.
    """
    values, unknown = next(draws.chunks(0, 1.0))
    places = np.setdiff1d(np.arange(len(values)), unknown)
    found = values[places].tolist()
    return max(
        abs(float(Decimal(v) - draws.value(0, int(place))))
        for v, place in zip(found, places, strict=True)
    )
