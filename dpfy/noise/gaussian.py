"""Standard Gaussian tensors by address: the same (secret, stream, step) gives the same tensors, on any number of calls.

On a CPU the bits are an AES keystream and the transform is that of Box & Muller (1958), vectorised, and added to its target while it
is in the cache: cryptographic noise for less than torch's own costs. A GPU makes float32 noise from a cipher where it is added
(:mod:`dpfy.noise.chacha`); what is left uses the device's own generator, seeded by the address.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.random import Randomness

CHUNK, LARGE_CHUNK = 1 << 17, 1 << 19
"""Values made at a time, for few and for many: small enough for the cache, large enough that calls do not count (measured)."""

_NUMPY_IS_FAST = sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether NumPy has vector code for log2 and tan; else it goes value by value, and torch, slower than that vector code, does not."""


def draw(like: Mapping[str, Tensor], randomness: Randomness, stream: str, step: int) -> dict[str, Tensor]:
    """Independent N(0, 1) values in the shapes and on the device of `like`, for one step of one stream.

    Guarantees: each step and stream has its own key; inside a step the parameters take consecutive, disjoint parts of one sequence,
    so no two values of a run are ever the same draw. Values are float64 if any parameter is, else float32. In float32 a pair of
    values has at most radius 6.66 (beyond lies a probability of 2.3e-10), in float64 9.4.
    """
    device = next(iter(like.values())).device if like else torch.device("cpu")
    dtype = dtype_of(like)
    total = sum(t.numel() for t in like.values())
    if device.type == "cpu":
        flat = torch.empty(total, dtype=dtype)
        for start, values in _pairs(total, dtype, randomness.keystream(stream, step)):
            flat[start : start + len(values)] = values
    else:
        flat = torch.zeros(total, device=device, dtype=dtype)
    parts = flat.split([t.numel() for t in like.values()]) if like else ()
    if device.type != "cpu" and not _add_by_counter(parts, 1.0, randomness.key(stream, step, 32)):
        generator = torch.Generator(device=device)
        generator.manual_seed(int.from_bytes(randomness.key(stream, step, 8), "little") >> 1)
        flat.normal_(generator=generator)
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def dtype_of(like: Mapping[str, Tensor]) -> torch.dtype:
    """The type of the noise for tensors like these: never narrower than float32."""
    return torch.float64 if torch.float64 in {t.dtype for t in like.values()} else torch.float32


def add_(
    sums: Mapping[str, Tensor],
    scale: float,
    randomness: Randomness,
    stream: str,
    step: int,
    divisor: float = 1.0,
    into: Sequence[Tensor] | None = None,
) -> None:
    """Add `scale` times ``draw(sums, randomness, stream, step)`` to `sums` and divide them by `divisor`, in place; with `into`, the
    results are rounded to the types of these tensors and written there.

    All sums have the type of the noise, see :func:`dtype_of`. On a CPU no tensor of the size of the sums is made, and each part of
    them is read and written once; there the ratio of noise to sum is rounded up.
    """
    if any(t.device.type != "cpu" for t in sums.values()):
        many = list(sums.values())
        if not _add_by_counter(many, scale, randomness.key(stream, step, 32), divisor, into):
            add_and_divide_(many, list(draw(sums, randomness, stream, step).values()), scale, divisor, into)
        return
    rows = [t.view(-1) if t.is_contiguous() else t.flatten() for t in sums.values()]
    sizes = [t.numel() for t in sums.values()]
    target, done, weight = 0, 0, 1 / divisor
    for _, values in _pairs(sum(sizes), dtype_of(sums), randomness.keystream(stream, step), scale / divisor):
        used, length = 0, values.numel()
        while used < length:
            row, size = rows[target], sizes[target]
            room = min(size - done, length - used)
            part = values if room == length else values[used : used + room]
            onto = row if room == size else row[done : done + room]
            torch.add(part, onto, alpha=weight, out=onto)
            used, done = used + room, done + room
            if done == size:
                target, done = target + 1, 0
    for t, row in zip(sums.values(), rows, strict=True):
        if row.data_ptr() != t.data_ptr():
            t.copy_(row.view(t.shape))
    _put(into, list(sums.values()))


def _add_by_counter(
    sums: Sequence[Tensor], scale: float, key: bytes, divisor: float = 1.0, into: Sequence[Tensor] | None = None
) -> bool:
    """Add and divide in one launch, on a GPU; False where that cannot be."""
    from dpfy.noise import chacha

    if not chacha.usable(sums):
        return False
    chacha.add_(sums, scale, [key], divisor, into=into)
    return True


def add_and_divide_(
    sums: list[Tensor], noise: list[Tensor], scale: float, divisor: float, into: Sequence[Tensor] | None = None
) -> None:
    """(sum + scale noise) / divisor, in place, and rounded into `into` where it is given."""
    torch._foreach_add_(sums, noise, alpha=scale)
    divide_(sums, divisor, into)


def divide_(sums: list[Tensor], divisor: float, into: Sequence[Tensor] | None = None) -> None:
    """In place, and rounded into `into` where it is given."""
    if divisor != 1:
        torch._foreach_div_(sums, divisor)
    _put(into, sums)


def _put(into: Sequence[Tensor] | None, sums: list[Tensor]) -> None:
    if into is not None:
        torch._foreach_copy_(list(into), sums)


def _pairs(
    count: int, dtype: torch.dtype, fill: Callable[[memoryview], None], scale: float | None = None
) -> Iterator[tuple[int, Tensor]]:
    """`count` values from a keystream as (start, values), a chunk at a time, in memory that the next chunk overwrites."""
    size = LARGE_CHUNK if count >= 4 * LARGE_CHUNK else CHUNK
    whole = _Scratch.held(dtype, size)
    factor = None if scale is None else whole.rounded_up(scale)
    for start in range(0, count, size):
        left = count - start
        scratch = whole if left >= size else whole.part((left + 1) // 2)
        fill(scratch.bits)
        values = scratch.transform(factor)
        yield start, values if left >= values.numel() else values[:left]


_HELD = threading.local()


class _Scratch:
    """Memory for some pairs r cos(2 a), r sin(2 a) with r = sqrt(-2 log u), and the views of it that NumPy and torch work on."""

    def __init__(self, integers: NDArray[Any], radius: NDArray[Any], values: NDArray[Any]) -> None:
        real, self.places = radius.dtype, 8 * integers.itemsize - 1
        self.integers, self.radius, self.values = integers.reshape(2, -1), radius, values.reshape(2, -1)
        self.bits: memoryview = integers.data.cast("B")
        self.tensors = [torch.from_numpy(a) for a in (radius, *self.values)]
        self.flat = torch.from_numpy(values)
        self.natural, self.turn = np.array(-math.log(2), real), np.array(math.pi / 2 * 2.0**-self.places, real)
        self.smallest, self.half = (torch.tensor(x, dtype=self.flat.dtype) for x in (2.0 ** (-2 * self.places - 2), 0.5))
        self.parts: dict[int, _Scratch] = {}
        self.below_one = (1 - float(np.finfo(real).eps)) * 2.0 ** (-2 * self.places)

    @classmethod
    def held(cls, dtype: torch.dtype, size: int) -> _Scratch:
        """A whole chunk, the same at every call of a thread: fresh memory costs more than the numbers that are put into it."""
        name = f"{dtype} {size}"
        if not hasattr(_HELD, name):
            whole, real = (np.int64, np.float64) if dtype == torch.float64 else (np.int32, np.float32)
            setattr(_HELD, name, cls(np.empty(size, whole), np.empty(size // 2, real), np.empty(size, real)))
        return getattr(_HELD, name)  # type: ignore[no-any-return]

    def part(self, pairs: int) -> _Scratch:
        """The beginning of the same memory. The views of a few sizes are held too: a run asks for one size at every step."""
        if pairs not in self.parts:
            if len(self.parts) >= 8:
                self.parts.clear()
            flat = (self.integers.reshape(-1)[: 2 * pairs], self.radius[:pairs], self.values.reshape(-1)[: 2 * pairs])
            self.parts[pairs] = _Scratch(*flat)
        return self.parts[pairs]

    def rounded_up(self, scale: float) -> NDArray[Any]:
        """The next number above `scale`."""
        real = self.radius.dtype.type
        return np.array(np.nextafter(real(scale), real(math.inf)))

    def transform(self, factor: NDArray[Any] | None = None) -> Tensor:
        """The values for the random bits in `bits`, times `factor` where it is given.

        u is |k| / 2^b for a signed whole number k of b = 31 or 63 bits and a sign (2^-(b+1) for k = 0): small u, which make the tail,
        keep their full precision. u is kept below 1, where a logarithm that errs could be positive, by a last digit: r is longer, never
        shorter, than the formula's. a is uniform between -pi/2 and pi/2; with t = tan(a) and w = 2 r / (1 + t^2), the pair is w - r
        and t w: one transcendental function in the place of two.
        """
        (first, second), radius, (w, t) = self.integers, self.radius, self.values
        r, w_tensor, t_tensor = self.tensors
        np.copyto(radius, first, casting="unsafe")
        torch.addcmul(self.smallest, r, r, value=self.below_one, out=r)
        _log2(radius, r)
        np.multiply(radius, self.natural, radius)
        np.sqrt(radius, radius)
        if factor is not None:
            np.multiply(radius, factor, radius)
        np.copyto(t, second, casting="unsafe")
        np.multiply(t, self.turn, t)
        _tan(t, t_tensor)
        torch.addcmul(self.half, t_tensor, t_tensor, value=0.5, out=w_tensor)
        np.divide(radius, w, w)
        np.multiply(t, w, t)
        np.subtract(w, radius, w)
        return self.flat


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
