"""Past noise in one tensor: all parameters side by side, one row for each value that is
remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from dpfy.core.errors import InvalidInput
from dpfy.noise.series import single, single_up

if TYPE_CHECKING:
    from torch import Tensor

    from dpfy.noise.strategy import Draw, Grads, Recurrence, State

PAST = "past"


def stack(like: Grads, depth: int) -> State:
    """`depth` rows of zeros, in the dtype in which noise is drawn.

    That is float64 if any parameter is, else float32: half-precision parameters too, for noise kept
    in half precision would not be the noise that was charged.
    """
    import torch

    dtype = torch.float64 if any(t.dtype == torch.float64 for t in like.values()) else torch.float32
    device = next(iter(like.values())).device if like else torch.device("cpu")
    return {
        PAST: torch.zeros(
            (depth, sum(t.numel() for t in like.values())), dtype=dtype, device=device
        )
    }


def held(state: State, noise: Tensor, rows: int, step: int) -> Tensor:
    """The past in `state`, if it can be the one that `step` was left: `rows` rows beside each other
    like `noise`.

    Guarantees: a state that was lost, started again or made for other parameters raises and names
    shapes only. Noise without its past would not be the noise that was charged.
    """
    return held_beside(state, {"": noise}, rows, step)


def held_beside(state: State, like: Grads, rows: int, step: int) -> Tensor:
    """The same for the noise of tensors like these, which is not there yet."""
    past, first = state.get(PAST), next(iter(like.values()))
    if past is None:
        raise no_past(step, f"no tensor {PAST!r}")
    shape = (rows, sum([t.numel() for t in like.values()]))
    if past.shape != shape or past.dtype != first.dtype or past.device != first.device:
        kept, wanted = (
            f"{tuple(size)} {t.dtype} on {t.device}"
            for size, t in ((past.shape, past), (shape, first))
        )
        raise no_past(step, f"{kept} where it must hold {wanted}")
    return past


def no_past(step: int, found: str) -> InvalidInput:
    """The error of a noise state that is not the one of this step."""
    return InvalidInput(
        "noise state",
        found,
        f"is not what step {step} begins with: give the state that the step before returned",
    )


def grown(step: int) -> int:
    """Rows of a past that begins with one and doubles whenever it is full, at the beginning of
    `step`.
    """
    return 1 << max(step - 1, 0).bit_length()


def flat(noise: Grads) -> Tensor:
    """All draws as one vector: the vector they are views of where there is one, else a copy."""
    import torch

    parts = list(noise.values())
    base = parts[0]._base if parts else None
    if (
        base is not None
        and base.dim() == 1
        and base.is_contiguous()
        and all(t._base is base and t.is_contiguous() for t in parts)
    ):
        ends = list(accumulate(t.numel() for t in parts))
        places = [t.storage_offset() - base.storage_offset() for t in parts]
        if ends[-1] == base.numel() and places == [0, *ends[:-1]]:
            return base
    return torch.cat([t.reshape(-1) for t in parts])


def split(vector: Tensor, like: Grads) -> Grads:
    """Views of `vector` in the shapes of `like`. They share its memory: read them, do not write."""
    parts = vector.split([t.numel() for t in like.values()])
    return {name: part.view(t.shape) for (name, t), part in zip(like.items(), parts, strict=True)}


def doubled(past: Tensor) -> Tensor:
    """The rows, with room for as many more."""
    import torch

    return torch.cat([past, torch.zeros_like(past)])


def noise(recurrence: Recurrence, step: int, draw: Draw, state: State) -> Grads:
    """The noise of `step` at unit scale, one operation after the other: the portable route and the
    oracle of the kernel.

    Guarantees: a state that is not the step's own raises before anything is changed.
    """
    fresh = draw(step)
    y = flat(fresh)
    past = held(state, y, len(recurrence.weights), step) if recurrence.weights else None
    for back, weight in enumerate(rounded(recurrence.again, y), 1):
        y.add_(flat(draw(step - back)), alpha=weight)
    if recurrence.first != 1:
        y = y / rounded([recurrence.first], y)[0]
    if past is not None and recurrence.decay:
        y = feed_back(y, past, recurrence.weights, recurrence.decay)
    elif past is not None:
        y = plus_weighted(y, past, recurrence.weights, keep=recurrence.keep)
    if recurrence.gain != 1:
        y = y * (recurrence.gain if y.element_size() == 8 else single_up(recurrence.gain))
    return split(y, fresh)


def rounded(weights: Sequence[float], noise: Tensor) -> list[float]:
    """The weights as `noise`'s precision holds them, rounded toward zero."""
    import torch

    return list(weights) if noise.dtype == torch.float64 else [single(w) for w in weights]


def plus_weighted(
    noise: Tensor, past: Tensor, weights: Sequence[float], keep: int | None = None
) -> Tensor:
    """noise + sum of weights[i] * past[i], the weights rounded toward zero; row `keep` of the past,
    if given, becomes the result.

    On the CPU a matrix-vector product, which never runs in a reduced (TF32) precision; on a GPU one
    kernel that reads each row once and writes the result once, into the row where it is kept: the
    result is then that row, to be read before it is written again.
    """
    import torch

    values = rounded(weights, noise)
    if noise.is_cuda:
        from dpfy.noise import history_kernels

        if history_kernels.usable(noise, past):
            return history_kernels.plus_weighted(noise, past, values, keep)
    vector = torch.tensor(values, dtype=noise.dtype, device=noise.device)
    total = torch.addmv(noise, past.t(), vector)
    if keep is not None:
        past[keep].copy_(total)
    return total


def feed_back(
    noise: Tensor, past: Tensor, weights: Sequence[float], decay: Sequence[float]
) -> Tensor:
    """y = noise + sum of weights[j] past[j], in the place of `noise`; past[j] becomes decay[j]
    past[j] + y. All rounded toward zero.
    """
    for row, weight in zip(past, rounded(weights, noise), strict=True):
        noise.add_(row, alpha=weight)
    for row, kept in zip(past, rounded(decay, noise), strict=True):
        row.mul_(kept).add_(noise)
    return noise
