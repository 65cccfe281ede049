"""Standard Gaussian tensors by address: the same (secret, stream, step) gives the same tensors, on
any number of calls.

On a CPU the bits are an AES keystream and the transform is that of Box & Muller (1958), vectorised,
and added to its target while it is in the cache: cryptographic noise for less than torch's own
costs. A GPU makes float32 noise from a cipher where it is added (:mod:`dpfy.noise.chacha`); what is
left uses the device's own generator, seeded by the address.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core import check
from dpfy.core.randomness import Randomness
from dpfy.noise.coordinate_slice import CoordinateSlice
from dpfy.noise.lattice import Lattice, lay_

CHUNK, LARGE_CHUNK = 1 << 17, 5 << 17
"""Values made at a time, for few and for many: small enough for the cache, large enough that calls
do not count (measured).
"""

KNOWN = frozenset({torch.float32, torch.float64})
"""The types that sums are made in; others are looked up."""

TAIL = 2.0**-44
"""Squares of u below which float32 noise takes more digits: one value in four million."""

_NUMPY_IS_FAST = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether NumPy has vector code for log2 and tan; else it goes value by value, and torch, slower
than that vector code, does not.
"""


def draw(
    like: Mapping[str, Tensor],
    randomness: Randomness,
    stream: str,
    step: int,
    part: CoordinateSlice | None = None,
) -> dict[str, Tensor]:
    """Independent N(0, 1) values in the shapes and on the device of `like`, for one step of one
    stream.

    A `part` says which coordinates of a larger draw these are, and they get its values; where that
    cannot be, its stream is its own.

    Guarantees: each step and stream has its own key; inside a step the parameters take consecutive,
    disjoint parts of one sequence, so no two values of a run are ever the same draw. Values are
    float64 if any parameter is, else float32. In float32 a pair of values has at most radius 8.15
    (beyond lies a probability of 3.6e-15), in float64 9.4.
    """
    device = next(iter(like.values())).device if like else torch.device("cpu")
    check.device_kind("noise", device.type)
    dtype = dtype_of(like)
    total = sum(t.numel() for t in like.values())
    if device.type == "cpu":
        flat = torch.empty(total, dtype=dtype)
        for piece, values in _placed(
            flat, _values(part or CoordinateSlice.whole(total), dtype, randomness, stream, step)
        ):
            piece.copy_(values)
    else:
        flat = torch.zeros(total, device=device, dtype=dtype)
    parts = flat.split([t.numel() for t in like.values()]) if like else ()
    if device.type != "cpu" and not _drawn_by_counter(parts, randomness, stream, step, part):
        generator = _generator(device, randomness, own_name(stream, part), step)
        for piece in flat.split(1 << 24):  # by double precision, whose tail is longer
            piece.copy_(torch.empty_like(piece, dtype=torch.float64).normal_(generator=generator))
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def _drawn_by_counter(
    parts: Sequence[Tensor],
    randomness: Randomness,
    stream: str,
    step: int,
    part: CoordinateSlice | None,
) -> bool:
    """Draw in one launch, on a GPU; False where that cannot be."""
    from dpfy.noise import chacha

    if not chacha.usable(parts):
        return False
    name, placed = by_counter(stream, part)
    chacha.draw_(parts, randomness.key(name, step, chacha.KEY_BYTES), placed)
    return True


def by_counter(stream: str, part: CoordinateSlice | None) -> tuple[str, CoordinateSlice | None]:
    """The stream that a kernel draws from, and the part of it; a part that is not in one piece of
    each tensor has a stream of its own.
    """
    return (
        (stream, part)
        if part is None or part.pieces is not None
        else (own_name(stream, part), None)
    )


def own_name(stream: str, part: CoordinateSlice | None) -> str:
    """The name of the stream of a part that cannot be drawn by its place.

    Guarantees: parts that share no coordinate have different names; under one they would get the
    same values.
    """
    return (
        stream
        if part is None or not part.size or part.size == part.total
        else f"{stream} from {part.runs[0][0]}"
    )


def dtype_of(like: Mapping[str, Tensor]) -> torch.dtype:
    """The type of the noise for tensors like these: never narrower than float32."""
    types = {t.dtype for t in like.values()}
    for dtype in types - KNOWN:
        check.number_type("a sum", dtype)
    return torch.float64 if torch.float64 in types else torch.float32


def add_(
    sums: dict[str, Tensor],
    lattice: Lattice,
    randomness: Randomness,
    stream: str,
    step: int,
    divisor: float = 1.0,
    into: Sequence[Tensor] | None = None,
    part: CoordinateSlice | None = None,
) -> None:
    """Add ``draw(sums, randomness, stream, step, part)`` to `sums`, both on `lattice`, and divide
    by `divisor`, in place; with `into`, the results are rounded to the types of these tensors and
    written there.

    All sums have the type of the noise, see :func:`dtype_of`. On a CPU no tensor of the size of the
    sums is made; the scale of the noise is rounded up. Sparse sums are replaced by dense ones.
    Guarantees: those of :func:`dpfy.noise.lattice.lay_`.
    """
    many = list(sums.values())
    if any(t.device.type != "cpu" for t in many):
        from dpfy.noise import chacha

        if chacha.usable(many):
            name, placed = by_counter(stream, part)
            chacha.add_(
                many,
                lattice,
                [randomness.key(name, step, chacha.KEY_BYTES)],
                divisor,
                into=into,
                part=placed,
            )
        else:
            add_drawn_(sums, draw(sums, randomness, stream, step, part), lattice, divisor, into)
        return
    part = part or CoordinateSlice.whole(sum([t.numel() for t in many]))
    lay_(
        many,
        _values(part, dtype_of(sums), randomness, stream, step, lattice.noise),
        lattice,
        divisor,
    )
    sums |= zip(list(sums), many, strict=True)
    put(into, many)


def add_drawn_(
    sums: dict[str, Tensor],
    noise: Mapping[str, Tensor],
    lattice: Lattice,
    divisor: float = 1.0,
    into: Sequence[Tensor] | None = None,
) -> None:
    """The same for noise at unit scale that is there already."""
    many = list(sums.values())
    lay_(many, _in_steps([noise[name] for name in sums], lattice), lattice, divisor)
    sums |= zip(list(sums), many, strict=True)
    put(into, many)


def divide_(sums: list[Tensor], divisor: float, into: Sequence[Tensor] | None = None) -> None:
    """In place, and rounded into `into` where it is given."""
    if divisor != 1:
        torch._foreach_div_(sums, divisor)
    put(into, sums)


def put(into: Sequence[Tensor] | None, sums: list[Tensor]) -> None:
    """Round `sums` into `into`, where it is given."""
    if into is not None:
        torch._foreach_copy_(list(into), sums)


def _in_steps(noise: Sequence[Tensor], lattice: Lattice) -> Iterator[Tensor]:
    """Noise at unit scale in steps of `lattice`, rounded up, a piece at a time."""
    for t in noise:
        real = np.float64 if t.dtype == torch.float64 else np.float32
        factor = float(np.nextafter(real(lattice.noise), real(math.inf)))
        for piece in t.reshape(-1).split(CHUNK if t.device.type == "cpu" else max(t.numel(), 1)):
            yield piece * factor


def _generator(
    device: torch.device, randomness: Randomness, stream: str, step: int
) -> torch.Generator:
    generator = torch.Generator(device=device)
    return generator.manual_seed(int.from_bytes(randomness.key(stream, step, 8), "little") >> 1)


def _values(
    part: CoordinateSlice,
    dtype: torch.dtype,
    randomness: Randomness,
    stream: str,
    step: int,
    scale: float | None = None,
) -> Iterator[Tensor]:
    """The values of `part`, in pieces, in memory that the next chunk overwrites.

    A chunk is made whole, or not at all: which values it holds depends on its place and on the
    number of all coordinates.
    """
    size = LARGE_CHUNK if part.total > CHUNK else CHUNK
    whole = Scratch.held(dtype, size)
    factor = None if scale is None else whole.squared(scale)
    made, fill, values = -1, None, whole.flat
    for first, last in part.runs:
        while first < last:
            chunk, inside = divmod(first, size)
            if chunk != made:
                left = part.total - chunk * size
                scratch = whole if left >= size else whole.part((left + 1) // 2)
                if fill is None or chunk != made + 1:
                    fill = randomness.keystream(stream, step, chunk * size * values.itemsize)
                fill(scratch.bits)
                made, values = chunk, scratch.transform(factor)
            stop = min(inside + last - first, size)
            yield values if stop - inside == len(values) else values[inside:stop]
            first += stop - inside


def _placed(flat: Tensor, pieces: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece with its place in `flat`, one after the other."""
    start = 0
    for piece in pieces:
        yield flat[start : start + len(piece)], piece
        start += len(piece)


_HELD = threading.local()

PAGE = 1 << 21
"""Bytes of a large page of memory."""


def large_pages(size: int) -> NDArray[np.uint8]:
    """`size` bytes in large pages where the system has them: NumPy asks for them if a piece has 4
    MiB.
    """
    whole = np.empty(max(size + PAGE, 1 << 22), np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + size]


class Scratch:
    """Memory for some pairs r cos(2 a), r sin(2 a) with r = sqrt(-2 log u), and the views of it
    that NumPy and torch work on.

    The values lie where the random bits were, so that less of the cache is needed.
    """

    def __init__(self, integers: NDArray[Any], radius: NDArray[Any]) -> None:
        real, self.places = radius.dtype, 8 * integers.itemsize - 1
        self.integers, self.radius, self.values = (
            integers.reshape(2, -1),
            radius,
            integers.view(real).reshape(2, -1),
        )
        self.arrays = (*self.integers, radius, *self.values)
        self.bits: memoryview = integers.data.cast("B")
        self.tensors = [torch.from_numpy(a) for a in (radius, *self.values)]
        self.flat = torch.from_numpy(integers.view(real))
        self.natural, self.turn = (
            np.array(-math.log(2), real),
            np.array(math.pi / 2 * 2.0**-self.places, real),
        )
        self.smallest, self.half = (
            torch.tensor(x, dtype=self.flat.dtype) for x in (2.0 ** (-2 * self.places - 2), 0.5)
        )
        self.parts: dict[int, Scratch] = {}
        self.below_one = (1 - float(np.finfo(real).eps)) * 2.0 ** (-2 * self.places)

    @classmethod
    def held(cls, dtype: torch.dtype, size: int) -> Scratch:
        """A whole chunk, the same at every call of a thread: fresh memory costs more than the
        numbers that are put into it.
        """
        name = f"{dtype} {size}"
        if not hasattr(_HELD, name):
            whole, real = (
                (np.int64, np.float64) if dtype == torch.float64 else (np.int32, np.float32)
            )
            memory = large_pages(3 * size // 2 * np.dtype(real).itemsize)
            setattr(
                _HELD,
                name,
                cls(
                    memory[: len(memory) // 3 * 2].view(whole),
                    memory[len(memory) // 3 * 2 :].view(real),
                ),
            )
        return getattr(_HELD, name)  # type: ignore[no-any-return]

    def part(self, pairs: int) -> Scratch:
        """The beginning of the same memory. The views of a few sizes are held too: a run asks for
        one size at every step.
        """
        if pairs not in self.parts:
            if len(self.parts) >= 8:
                self.parts.clear()
            self.parts[pairs] = Scratch(self.integers.reshape(-1)[: 2 * pairs], self.radius[:pairs])
        return self.parts[pairs]

    def squared(self, scale: float) -> NDArray[Any]:
        """What turns binary logarithms of u^2 into squares of radii times `scale`: rounded to more
        noise, not less.
        """
        return _squared(self.radius.dtype, scale)

    def _go_on(self, where: NDArray[np.intp]) -> None:
        """Squares of u with 16 more digits, the last of the second word, where there are so few
        that the tail would show them.

        The first word is a float32 number by now, exactly: it is small.
        """
        first, second = (
            self.values[0][where].astype(np.float64),
            self.integers[1][where].astype(np.int64),
        )
        self.radius[where] = ((first + ((second & 0xFFFF) + 0.5) / 2**16) / 2**self.places) ** 2

    def transform(self, factor: NDArray[Any] | None = None) -> Tensor:
        """The values for the random bits in `bits`, which they overwrite; with a `factor` of
        :meth:`squared`, times its scale.

        u is |k| / 2^b for a signed whole number k of b = 31 or 63 bits and a sign (2^-(b+1) for k =
        0): small u, which make the tail, keep their full precision, and below 2^-22 have more of it
        in float32. u is kept below 1, where a logarithm that errs could be positive, by a last
        digit: r is longer, never shorter, than the formula's. a is uniform between -pi/2 and pi/2;
        with t = tan(a) and w = 2 r / (1 + t^2), the pair is w - r and t w: one transcendental
        function in the place of two.
        """
        first, second, radius, w, t = self.arrays
        r, w_tensor, t_tensor = self.tensors
        np.copyto(
            w, first, casting="unsafe"
        )  # w is the memory of the first words, t of the second: numbers of the same size
        torch.addcmul(self.smallest, w_tensor, w_tensor, value=self.below_one, out=r)
        if self.places < 32 and np.minimum.reduce(radius) < TAIL:
            self._go_on(np.flatnonzero(radius < TAIL))
        _log2(radius, r)
        np.multiply(radius, self.natural if factor is None else factor, radius)
        np.sqrt(radius, radius)
        np.copyto(t, second, casting="unsafe")
        np.multiply(t, self.turn, t)
        _tan(t, t_tensor)
        torch.addcmul(self.half, t_tensor, t_tensor, value=0.5, out=w_tensor)
        np.divide(radius, w, w)
        np.multiply(t, w, t)
        np.subtract(w, radius, w)
        return self.flat


@lru_cache(maxsize=64)
def _squared(real: np.dtype[Any], scale: float) -> NDArray[Any]:
    """The same at every step of a run."""
    exact, more = -math.log(2) * scale**2, real.type(-math.inf)
    found = np.array(np.nextafter(np.nextafter(real.type(exact), more), more))
    found.setflags(write=False)
    return found


def _log2(array: NDArray[Any], tensor: Tensor) -> None:
    """In place; `array` and `tensor` are the same memory."""
    if _NUMPY_IS_FAST:
        np.log2(array, array)
    else:
        tensor.log2_()


def _tan(array: NDArray[Any], tensor: Tensor) -> None:
    if _NUMPY_IS_FAST:
        np.tan(array, array)
    else:
        tensor.tan_()
