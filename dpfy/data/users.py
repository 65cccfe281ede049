"""Records by user: one row per user, so that a user is sampled, bounded and protected as a
whole.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Unit
from dpfy.data.config import FIRST, RECORD, SUM, USER, DataConfig
from dpfy.data.lazy import LazyRecords
from dpfy.data.owners import Owned, Users
from dpfy.data.records import Records, as_records

MOST_PLACES = 1 << 28
"""Numbers that the places of all users may hold together, filled or not."""


@dataclass(frozen=True, repr=False)
class UserRecords(Records):
    """Row u holds the records of user u side by side: fields of shape [users, most, ...], and last
    which of them are real.

    A batch of B users gives fields [B, most, ...]: flatten the first two dimensions for the model,
    and join the losses again with
    :func:`dpfy.per_user`.

    Guarantees: places that are not real repeat a record of the same user, so that no user's row
    holds anything of another.
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


def by_row(config: DataConfig) -> bool:
    """Whether a user's records are the same ones at every step, so that a user is one row in
    memory.
    """
    return (
        config.pick == FIRST
        and config.draw == USER
        and config.window is None
        and config.user_loss == SUM
    )


def by_owner(
    records: Records, owners: np.ndarray, times: object, config: DataConfig, fraction: float | None
) -> tuple[Records, Owned | None, Owned | None]:
    """(records to train on, those of users held out, the former with their owners): about
    `fraction` of the users, by their own names.

    Where a user's records are always the same ones, those to train on are one row per user, and
    need no owners any more.

    Guarantees: whether a user is held out, and which records are kept, depends on that user alone.
    """
    assert config.most_records is not None
    if owners.ndim == 2:
        return _by_owners(records, owners, config, fraction)
    names, which = np.unique(owners, return_inverse=True)
    apart = (
        np.zeros(len(names), bool)
        if fraction is None
        else np.array([_place(str(name)) < fraction for name in names])
    )
    if fraction is not None and (apart.all() or not apart.any()):
        raise InvalidInput(
            "data.test_fraction",
            fraction,
            "must leave users on both sides; give a test file instead",
        )
    fixed = by_row(config)
    places = (
        len(names)
        * config.most_records
        * sum(math.prod(field.shape[1:]) for field in records.tensors)
    )
    if fixed and places > MOST_PLACES:
        rule = (
            f"asks for more than {MOST_PLACES} numbers to be held, with a place for each record "
            f"(not with data.pick = random)"
        )
        raise InvalidInput("data.most_records", config.most_records, rule)
    rows = np.flatnonzero(apart[which])
    held = None
    if len(rows):
        held = held_out(Records(records.take(torch.from_numpy(rows))), owners[rows],
                        _of(times, rows), config)  # fmt: skip
    kept = np.flatnonzero(~apart[which])
    own = Records(records.take(torch.from_numpy(kept))) if held is not None else records
    if fixed:
        return _rows(own, owners[kept], config.most_records), held, None
    users = Users(owners[kept], config.pick, config.user_loss, _of(times, kept), config.window)
    return own, held, Owned(own, users, config.most_records, config.draw == RECORD)


def _by_owners(
    records: Records, owners: np.ndarray, config: DataConfig, fraction: float | None
) -> tuple[Records, Owned | None, Owned]:
    """`by_owner` for records with several owners, of which those within the limit are left: records
    with the same owners are held out together.

    Guarantees: whether a record is held out depends on its owners alone.
    """
    assert config.most_records is not None
    sets = [" ".join(map(repr, sorted({*row} - {""}))) for row in owners.tolist()]
    part = np.array([fraction is not None and _place(text) < fraction for text in sets], bool)
    if fraction is not None and (part.all() or not part.any()):
        rule = "must leave records on both sides; give a test file instead"
        raise InvalidInput("data.test_fraction", fraction, rule)
    parts = []
    for rows in map(np.flatnonzero, (part, ~part)):
        taken = Records(records.take(torch.from_numpy(rows)))
        parts.append(
            Owned(taken, Users(owners[rows], config.pick), config.most_records, single=True)
        )
    held, owned = parts
    return as_records(owned.records), held if fraction is not None else None, owned


def held_out(records: Records, owners: np.ndarray, times: object, config: DataConfig) -> Owned:
    """Records that are held out, with their owners: of each user the first ones, at most as many as
    are used in training.
    """
    assert config.most_records is not None
    numbered = Records((*records.tensors, torch.arange(len(records))))
    *fields, place = _rows(numbered, owners, config.most_records).alone().tensors
    rows = place.numpy()
    users = Users(owners[rows], FIRST, SUM, _of(times, rows), config.window)
    return Owned(Records(tuple(fields)), users, config.most_records)


def _of(times: object, rows: np.ndarray) -> object:
    """The times of these rows, where there are any."""
    return None if times is None else [times[k] for k in rows]  # type: ignore[index]


def _rows(records: Records, owners: np.ndarray, most: int) -> UserRecords:
    """One row for each user, of the first `most` of their records."""
    users = by_user(records, np.unique(owners, return_inverse=True)[1].astype(np.int64), most)
    assert isinstance(users, UserRecords)
    return users


def _place(name: str) -> float:
    """A number in [0, 1) that belongs to a name for ever."""
    digest = hashlib.blake2b(
        f"dpfy split {name}".encode("utf-8", "surrogatepass"), digest_size=7
    ).digest()
    return int.from_bytes(digest, "big") / 2**56


def by_user(records: object, users: Tensor | np.ndarray | Users, most: int) -> UserRecords | Owned:
    """Group records by user, so that training samples and clips users as a whole.

    Users are in the order of their ids. With :class:`dpfy.Users`, nothing is read before training
    opens the data, and the records of a user are taken as it says. Data that is not in memory is
    read in the same way.

    Args:
        records: Anything that training takes.
        users: One whole number for each record (ids need not be consecutive), or `dpfy.Users`.
        most: The most records of a user that are used. The first ones are kept.

    Returns:
        The records, one user a row.

    Raises:
        InvalidInput: There is not one user for each record, or `most` is no positive whole number.

    Guarantees: which records of a user are kept depends on that user alone; nothing is learnt from
    the data but who owns what.

    Example:
        >>> import torch
        >>> import dpfy
        >>> x, y = torch.randn(6, 3), torch.zeros(6, dtype=torch.long)
        >>> grouped = dpfy.by_user((x, y), torch.tensor([7, 7, 7, 9, 9, 4]), most=2)
        >>> grouped.unit.most_records
        2
    """
    most = check.integer("most", most)
    if isinstance(users, Users) or isinstance(records, LazyRecords):
        return Owned(records, users if isinstance(users, Users) else Users(users, FIRST), most)
    whole = as_records(records)
    owner = torch.as_tensor(users)
    if owner.dim() != 1 or owner.is_floating_point() or owner.dtype == torch.bool:
        raise InvalidInput(
            "users",
            f"{owner.dtype} of shape {list(owner.shape)}",
            "must be one whole number for each record",
        )
    if len(owner) != len(whole):
        raise InvalidInput(
            "users", f"{len(owner)} numbers", f"must be one for each of the {len(whole)} records"
        )
    _, which, counts = torch.unique(owner.cpu(), return_inverse=True, return_counts=True)
    order = torch.argsort(which, stable=True)
    first = torch.cumsum(counts, 0) - counts
    place = torch.arange(most).expand(len(counts), most)
    real = place < counts[:, None]
    rows = order[first[:, None] + torch.where(real, place, 0)]
    fields = [
        field.index_select(0, rows.flatten().to(field.device)).unflatten(0, rows.shape)
        for field in whole.tensors
    ]
    return UserRecords((*fields, real.to(fields[0].device)))
