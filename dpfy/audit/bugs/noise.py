"""Mistakes in the noise: too little, not fresh, not everywhere, not Gaussian, not secret."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from dpfy.audit.bench import Bug
from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, Private

AUDIT, ALONE, EXACT = "white-box audit", "noise alone", "exact noise"
Grads = dict[str, Any]


class Changed:
    """A noise stream whose noise passes through `change(step, noise, total)` before it is added."""

    def __init__(self, real: Any, change: Callable[[int, Grads, Grads], Grads]) -> None:
        self.real, self.change = real, change

    def init(self, like: Grads) -> Any:
        """As the real stream."""
        return self.real.init(like)

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """The real release with its noise taken out, changed and put back."""
        apart = dataclasses.replace(self.real, divisor=1.0, in_place=False)
        released, state = apart.release(total, step, state, permit)
        noise = {name: value - total.value[name] for name, value in released.value.items()}
        changed = self.change(step, noise, total.value)
        made = {
            name: (value + changed[name]) / self.real.divisor for name, value in total.value.items()
        }
        return Private(
            made
            if into is None
            else {name: into[name].copy_(value) for name, value in made.items()}
        ), state


def changed(change: Callable[[int, Grads, Grads], Grads]) -> Callable[[Any], Any]:
    """A seam that puts a `Changed` stream in place."""
    return lambda stream: Changed(stream, change)


def scaled(factor: float) -> Callable[[Any], Any]:
    """The real stream with its scale multiplied."""
    return lambda stream: dataclasses.replace(stream, scale=stream.scale * factor)


def drawn_once(stream: Any) -> Any:
    """The first step's noise, kept and added at every step."""
    kept: Grads = {}

    def change(step: int, noise: Grads, total: Grads) -> Grads:
        kept.update({} if kept else noise)
        return kept

    return Changed(stream, change)


class SameSeed(Changed):
    """Every step asks for the noise of step 0."""

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """Step 0 again."""
        return self.real.release(total, 0, state, permit, into)  # type: ignore[no-any-return]


class ForgetsClip(Changed):
    """Noise for a clip norm of one, whatever the sum is bounded by."""

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """With another bound."""
        return self.real.release(
            Bounded(total.value, Bound(1.0), total.unit), step, state, permit, into
        )  # type: ignore[no-any-return]


class WidePermit(Changed):
    """A bill for fewer steps than are released."""

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """With a permit that was never reserved."""
        wide = rehearsal(permit.event, 10**6, permit.name)
        return self.real.release(total, step, state, wide, into)  # type: ignore[no-any-return]


class SumBeside(Changed):
    """Noise is put on the lattice, and the sum added to it as it is."""

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """The noise of an empty sum, then the sum."""
        empty = dataclasses.replace(
            total, value={name: value * 0 for name, value in total.value.items()}
        )
        released, state = dataclasses.replace(self.real, in_place=False).release(
            empty, step, state, permit
        )
        made = {
            name: z + total.value[name] / self.real.divisor for name, z in released.value.items()
        }
        return Private(
            made
            if into is None
            else {name: into[name].copy_(value) for name, value in made.items()}
        ), state


class MovesSum(Changed):
    """Exact noise on a sum that `move(sum in steps)` has changed, coordinate by coordinate."""

    def __init__(self, real: Any, move: Callable[[Any], Any]) -> None:
        self.real, self.move = real, move

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """The real release of the changed sum."""
        wide = max((value.dtype for value in total.value.values()), key=lambda kind: kind.itemsize)
        cell = self.real._lattice(total.value, total.bound.l2, wide, step).step
        moved = {name: self.move(value / cell) * cell for name, value in total.value.items()}
        return self.real.release(Bounded(moved, total.bound, total.unit), step, state, permit, into)  # type: ignore[no-any-return]


class SeedForTwo(Changed):
    """Two steps draw from one key."""

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """The noise of the even step before."""
        return self.real.release(total, step - step % 2, state, permit, into)  # type: ignore[no-any-return]


def shared(step: int, noise: Grads, total: Grads) -> Grads:
    """Tensors of equal size get the same noise."""
    first: Grads = {}
    return {name: first.setdefault(str(z.numel()), z).reshape(z.shape) for name, z in noise.items()}  # type: ignore[union-attr]


def without(left_out: Callable[[str], bool]) -> Callable[[Any], Any]:
    """No noise on the tensors whose names `left_out` accepts."""
    return changed(
        lambda step, noise, total: {n: z * 0 if left_out(n) else z for n, z in noise.items()}
    )


def rows_in_use(step: int, noise: Grads, total: Grads) -> Grads:
    """Noise only on rows that some record of the batch has touched: the sparse-embedding
    shortcut.
    """
    return {
        n: z * (total[n].reshape(len(z), -1) != 0).any(1).reshape(-1, *[1] * (z.dim() - 1))
        for n, z in noise.items()
    }


def skip_empty(step: int, noise: Grads, total: Grads) -> Grads:
    """No noise when the batch is empty, for there is nothing to hide."""
    empty = all(bool((value == 0).all()) for value in total.values())
    return {n: z * (0 if empty else 1) for n, z in noise.items()}


def uniform(step: int, noise: Grads, total: Grads) -> Grads:
    """Uniform noise of the right variance."""
    import torch

    scale = torch.cat([z.reshape(-1) for z in noise.values()]).std().clamp(min=1e-30)
    return {
        n: (torch.special.ndtr(z / scale) - 0.5) * scale * math.sqrt(12) for n, z in noise.items()
    }


BUGS = (
    Bug("noise-half", "noise scaled by 1/2", AUDIT, stream=scaled(0.5)),
    Bug(
        "noise-root-half",
        "noise scaled by 1/sqrt(2): a variance taken for a standard deviation",
        AUDIT,
        stream=scaled(0.5**0.5),
    ),
    Bug(
        "noise-forgets-clip",
        "the noise forgets the clip norm",
        AUDIT,
        stream=lambda s: ForgetsClip(s, shared),
    ),
    Bug(
        "noise-over-batch",
        "noise scaled by 1/batch: added to the mean as if it were the sum",
        AUDIT,
        stream=scaled(1 / 256),
    ),
    Bug("noise-drawn-once", "noise drawn once and reused at every step", AUDIT, stream=drawn_once),
    Bug(
        "noise-same-seed",
        "the generator is seeded alike at every step",
        AUDIT,
        stream=lambda s: SameSeed(s, shared),
    ),
    Bug(
        "noise-shared",
        "the same noise for two parameters of equal size",
        ALONE,
        stream=changed(shared),
    ),
    Bug(
        "noise-missing-layer",
        "no noise on one layer",
        AUDIT,
        stream=without(lambda name: name.startswith("2.")),
    ),
    Bug(
        "noise-missing-bias",
        "no noise on the biases",
        AUDIT,
        stream=without(lambda name: name.endswith("bias")),
    ),
    Bug(
        "noise-rows-in-use",
        "no noise on embedding rows without tokens",
        ALONE,
        stream=changed(rows_in_use),
    ),
    Bug(
        "noise-skips-empty",
        "an empty batch is released without noise",
        ALONE,
        stream=changed(skip_empty),
    ),
    Bug(
        "noise-uniform",
        "uniform noise of the right variance billed as Gaussian",
        ALONE,
        stream=changed(uniform),
    ),
    Bug(
        "noise-off-lattice",
        "noise is added in floating point, on no lattice: some outputs are possible with a record "
        "only",
        "lattice",
        stream=changed(
            lambda step, noise, total: {n: z + 1e-3 * z.sin() for n, z in noise.items()}
        ),
    ),
    Bug(
        "noise-sum-beside",
        "noise on a lattice, added to a sum that is not",
        "lattice",
        stream=lambda s: SumBeside(s, shared),
    ),
    Bug(
        "exact-coarse",
        "the sum is rounded to a lattice that is too coarse for what one record adds",
        EXACT,
        stream=lambda s: MovesSum(s, lambda x: (x / 8).round() * 8),
    ),
    Bug(
        "exact-biased-coin",
        "the coin that rounds the sum up is biased",
        EXACT,
        stream=lambda s: MovesSum(s, lambda x: x.floor() + (x - x.floor()) ** 0.9),
    ),
    Bug(
        "exact-seed-for-two",
        "one seed for the draws of two steps",
        EXACT,
        stream=lambda s: SeedForTwo(s, shared),
    ),
    Bug(
        "noise-known-seed",
        "the noise comes from a seed that is not secret",
        "secret",
        stream=lambda s: dataclasses.replace(s, randomness=Randomness.for_tests(0)),
    ),
    Bug(
        "steps-under-counted",
        "twice as many steps are released as billed",
        AUDIT,
        stream=lambda s: WidePermit(s, shared),
        steps=40,
    ),
    Bug("steps-beyond-permit", "the loop runs on after the last billed step", "permit", steps=40),
)
