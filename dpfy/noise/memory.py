"""Past noise in one tensor: all parameters side by side, one row for each value that is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from dpfy.core.errors import InvalidInput
from dpfy.noise.series import single

if TYPE_CHECKING:
    from torch import Tensor

    from dpfy.noise.strategy import Grads, State

PAST = "past"


def stack(like: Grads, depth: int) -> State:
    """`depth` rows of zeros, in the dtype in which noise is drawn.

    That is float64 if any parameter is, else float32: half-precision parameters too, for noise kept in half precision would not be
    the noise that was billed.
    """
    import torch

    dtype = torch.float64 if any(t.dtype == torch.float64 for t in like.values()) else torch.float32
    device = next(iter(like.values())).device if like else torch.device("cpu")
    return {PAST: torch.zeros((depth, sum(t.numel() for t in like.values())), dtype=dtype, device=device)}


def held(state: State, noise: Tensor, rows: int, step: int) -> Tensor:
    """The past in `state`, if it can be the one that `step` was left: `rows` rows beside each other like `noise`.

    Guarantees: a state that was lost, begun again or made for other parameters raises and names shapes only. Noise without its past would
    not be the noise that was billed.
    """
    past = state.get(PAST)
    if past is None:
        raise no_past(step, f"no tensor {PAST!r}")
    if past.shape != (rows, noise.numel()) or past.dtype != noise.dtype or past.device != noise.device:
        kept, wanted = (
            f"{tuple(shape)} {t.dtype} on {t.device}" for shape, t in ((past.shape, past), ((rows, noise.numel()), noise))
        )
        raise no_past(step, f"{kept} where it must hold {wanted}")
    return past


def no_past(step: int, found: str) -> InvalidInput:
    """The error of a noise state that is not the one of this step."""
    return InvalidInput(
        "noise state", found, f"is not what step {step} begins with: give the state that the step before returned"
    )


def grown(step: int) -> int:
    """Rows of a past that begins with one and doubles whenever it is full, at the beginning of `step`."""
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


def rounded(weights: Sequence[float], noise: Tensor) -> list[float]:
    """The weights as `noise`'s precision holds them, rounded toward zero."""
    import torch

    return list(weights) if noise.dtype == torch.float64 else [single(w) for w in weights]


def plus_weighted(noise: Tensor, past: Tensor, weights: Sequence[float], keep: int | None = None) -> Tensor:
    """noise + sum of weights[i] * past[i], the weights rounded toward zero; row `keep` of the past, if given, becomes the result.

    On the CPU a matrix-vector product, which never runs in a reduced (TF32) precision; on a GPU one kernel that reads each row once
    and writes the result once, into the row where it is kept: the result is then that row, to be read before it is written again.
    """
    import torch

    values = rounded(weights, noise)
    if noise.is_cuda:
        from dpfy.noise import kernels

        if kernels.usable(noise):
            return kernels.plus_weighted(noise, past, values, keep)
    vector = torch.tensor(values, dtype=noise.dtype, device=noise.device)
    total = torch.addmv(noise, past.t(), vector)
    if keep is not None:
        past[keep].copy_(total)
    return total


def feed_back(noise: Tensor, past: Tensor, theta: Sequence[float], omega: Sequence[float]) -> Tensor:
    """y = noise - sum of omega_j past_j, in the place of `noise`; past_j becomes theta_j past_j + y. All rounded toward zero."""
    decay, weight = rounded(theta, noise), rounded(omega, noise)
    if noise.is_cuda:
        from dpfy.noise import kernels

        if kernels.usable(noise):
            return kernels.feed_back(noise, past, decay, weight)
    for row, w in zip(past, weight, strict=True):
        noise.sub_(row, alpha=w)
    for row, t in zip(past, decay, strict=True):
        row.mul_(t).add_(noise)
    return noise
