"""Records by user: one row per user, so that a user is sampled, bounded and protected as a whole."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Unit
from dpfy.data.records import Records, as_records

MOST_PLACES = 1 << 28
"""Numbers that the places of all users may hold together, filled or not."""


@dataclass(frozen=True)
class UserRecords(Records):
    """Row u holds the records of user u side by side: fields of shape [users, most, ...], and last which of them are real.

    A batch of B users gives fields [B, most, ...]: flatten the first two dimensions for the model, and join the losses again with
    :func:`dpfy.per_user`.

    Guarantees: places that are not real repeat a record of the same user, so that no user's row holds anything of another.
    """

    @property
    def records_each(self) -> int:
        """How many records one user may have."""
        return self.tensors[-1].shape[1]

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The fields with one record in each row, user by user."""
        return tuple(tensor.flatten(0, 1) for tensor in self.tensors)

    def alone(self) -> Records:
        """The records one by one, without those that only fill a place."""
        *fields, real = self.tensors
        return Records(tuple(field[real] for field in fields))

    @property
    def unit(self) -> Unit:
        """The unit of privacy that a recipe for these records must name."""
        return Unit("user", self.rows_each)


def owner_words(name: str, owners: Sequence[object] | np.ndarray) -> np.ndarray:
    """Whose each record is, as words; a record without an owner is refused."""
    words = np.array([str(owner).strip() if owner is not None else "" for owner in owners])
    if (empty := np.flatnonzero(words == "")).size:
        raise InvalidInput(f"{name}, record {int(empty[0]) + 1}", "no value", "every record must have an owner")
    return words


def by_owner(records: Records, owners: np.ndarray, most: int, fraction: float | None) -> tuple[UserRecords, Records | None]:
    """(users to train on, records of users held out): a share of about `fraction` of the users, by a hash of each one's own name.

    Guarantees: whether a user is held out, and which records are kept, depends on that user alone.
    """
    names, which = np.unique(owners, return_inverse=True)
    if len(names) * most * sum(math.prod(field.shape[1:]) for field in records.tensors) > MOST_PLACES:
        raise InvalidInput(
            "data.most_records", most, f"asks for more than {MOST_PLACES} numbers to be held, with a place for each record"
        )
    users = by_user(records, which.astype(np.int64), most)
    if fraction is None:
        return users, None
    apart = torch.tensor([_place(str(name)) < fraction for name in names])
    if bool(apart.all()) or not bool(apart.any()):
        raise InvalidInput("data.test_fraction", fraction, "must leave users on both sides; give a test file instead")
    kept, held = (replace(users, tensors=users.take(part.nonzero().flatten())) for part in (~apart, apart))
    return kept, held.alone()


def _place(name: str) -> float:
    """A number in [0, 1) that belongs to a name for ever."""
    digest = hashlib.blake2b(f"dpfy split {name}".encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


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
