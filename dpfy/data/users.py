"""Records by user: one row per user, so that a user is sampled, bounded and protected as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Unit
from dpfy.data.records import Records, as_records


@dataclass(frozen=True)
class UserRecords(Records):
    """Row u holds the records of user u side by side: fields of shape [users, most, ...], and last which of them are real.

    A batch of B users gives fields [B, most, ...]: flatten the first two dimensions for the model, and join the losses again with
    :func:`dpfy.per_user`.

    Guarantees: places that are not real repeat a record of the same user, so that no user's row holds anything of another.
    """

    @property
    def rows_each(self) -> int:
        """How many records one user may have."""
        return self.tensors[-1].shape[1]

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The fields with one record in each row, user by user."""
        return tuple(tensor.flatten(0, 1) for tensor in self.tensors)

    @property
    def unit(self) -> Unit:
        """The unit of privacy that a recipe for these records must name."""
        return Unit("user", self.rows_each)


def by_user(records: object, users: Tensor | np.ndarray, most: int) -> UserRecords:
    """Group `records` (anything that training takes) by `users`, one whole number for each record; ids need not be consecutive.

    Of a user with more than `most` records the first ones are kept. Users are in the order of their ids.

    Guarantees: which records of a user are kept depends on that user alone; nothing is learnt from the data but who owns what.
    """
    whole, most = as_records(records), check.integer("most", most)
    owner = torch.as_tensor(users)
    if owner.dim() != 1 or owner.is_floating_point() or owner.dtype == torch.bool:
        raise InvalidInput("users", f"{owner.dtype} of shape {list(owner.shape)}", "must be one whole number for each record")
    if len(owner) != len(whole):
        raise InvalidInput("users", f"{len(owner)} numbers", f"must be one for each of the {len(whole)} records")
    _, which, counts = torch.unique(owner.cpu(), return_inverse=True, return_counts=True)
    order = torch.argsort(which, stable=True)
    first = torch.cumsum(counts, 0) - counts
    place = torch.arange(most).expand(len(counts), most)
    real = place < counts[:, None]
    rows = order[first[:, None] + torch.where(real, place, 0)]
    fields = [field.index_select(0, rows.flatten().to(field.device)).unflatten(0, rows.shape) for field in whole.tensors]
    return UserRecords((*fields, real.to(fields[0].device)))
