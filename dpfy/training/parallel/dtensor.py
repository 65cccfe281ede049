"""Tensors that are spread over ranks (torch's DTensor), and the part of each that this rank
holds.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local(t: Tensor) -> Tensor:
    """The part of `t` that lies here; a plain tensor itself."""
    return getattr(t, "_local_tensor", t)


def spread_like(part: Tensor, like: Tensor) -> Tensor:
    """`part` as the part that lies here of a tensor that is spread as `like` is; itself, where
    `like` is plain or of another shape.
    """
    if local(like) is like or part.shape != local(like).shape:
        return part
    from torch.distributed.tensor import DTensor

    whole: Any = like
    return DTensor(
        part.to(local(like).device), whole._spec, requires_grad=False
    )  # as torch's own sharding does, for less


def full(t: Tensor) -> Tensor:
    """All of `t`, from all ranks, which must ask for it together; a plain tensor itself."""
    return t if local(t) is t else t.full_tensor()  # type: ignore[attr-defined, no-any-return]
