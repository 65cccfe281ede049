"""The contribution of a user, or of a record seen in several views: losses joined before the
gradient is clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput


def per_user(losses: Tensor, real: Tensor, *, reduction: str = "sum") -> Tensor:
    """One loss per user, [users], from one loss per record, [users * most] (or [users, most]), user
    by user; `real` is [users, most].

    `reduction` "sum" gives the gradient of the user's whole data, "mean" that of an average record
    of the user. Hand the result to any engine, or to `PrivateTraining.step`: the user's gradient is
    then clipped as a whole, however many records it comes from.

    Guarantees: places that are not real add exactly zero to the loss and to its gradient (as long
    as the losses there are finite), and the loss of a user depends on that user's records alone if
    each record's loss does.
    """
    check.one_of("reduction", reduction, ["sum", "mean"])
    if real.dim() != 2 or real.dtype != torch.bool:
        raise InvalidInput(
            "real",
            f"{real.dtype} of shape {list(real.shape)}",
            "must be true or false for [users, most]",
        )
    if losses.numel() != real.numel() or losses.shape not in (real.shape, (real.numel(),)):
        rule = (
            f"must hold one loss for each of the {real.numel()} records of the batch: use "
            f"reduction='none'"
        )
        raise InvalidInput("losses", f"shape {list(losses.shape)}", rule)
    kept = torch.where(
        real, losses.view(real.shape), torch.zeros((), dtype=losses.dtype, device=losses.device)
    )
    return kept.sum(1) if reduction == "sum" else kept.sum(1) / real.sum(1).clamp(min=1)


def per_view(losses: Tensor, views: int) -> Tensor:
    """One loss per example, [examples], the mean over its `views`, from one loss per view,
    [examples * views] (or [examples, views]).

    Augmentation multiplicity (De et al. 2022): the gradient of an example is the mean over its
    views, clipped once, so that more views cost time but no privacy. `dpfy.lazy(..., views=k)`
    gives such batches; flatten their first two dimensions for the model.

    Guarantees: the loss of an example depends on its own views alone if each view's loss does.
    """
    check.integer("views", views)
    if (
        losses.dim() not in (1, 2)
        or losses.numel() % views
        or (losses.dim() == 2 and losses.shape[1] != views)
    ):
        rule = (
            f"must hold one loss for each of the {views} views of each example: use "
            f"reduction='none'"
        )
        raise InvalidInput("losses", f"shape {list(losses.shape)}", rule)
    return losses.reshape(-1, views).mean(1)
