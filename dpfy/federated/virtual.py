"""Virtual clients (Xu et al. 2022): small users joined in fixed groups, large ones cut into parts.
The unit of privacy changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfy.core import check
from dpfy.core.unit import Unit
from dpfy.data.records import Records, as_records
from dpfy.data.users import UserRecords, by_user


@dataclass(frozen=True, repr=False)
class VirtualClients(UserRecords):
    """Records by virtual client. `unit` is what a plan for them must name; a user's records lie in
    at most `parts` of them.

    A plan that shall hold for whole users is calibrated for groups: ``recipe.calibrate(epsilon,
    delta, group=clients.parts)``.
    """

    name: str = "virtual client"
    parts: int = 1

    @property
    def unit(self) -> Unit:
        """One virtual client, by its full name."""
        return Unit(self.name, self.rows_each)


def grouped(
    records: object, users: Tensor | np.ndarray, most: int, *, together: int
) -> VirtualClients:
    """Clients of up to `together` users each, in the order of their numbers; each user gives at
    most `most` records.

    Guarantees: a user is in one group, so that what is promised to the group holds for each user in
    it. Who is grouped with whom follows from the numbers alone: give numbers that are public and do
    not depend on the records.
    """
    check.integer("together", together)
    names, which = np.unique(_numbers(users), return_inverse=True)
    kept = np.flatnonzero(_places(which) < check.integer("most", most))
    count = min(together, len(names))
    made = by_user(_rows(records, kept), which[kept] // together, most * together)
    assert isinstance(made, UserRecords)
    return VirtualClients(made.tensors, name=f"virtual client (a group of up to {count} users)")


def parted(records: object, users: Tensor | np.ndarray, most: int, *, parts: int) -> VirtualClients:
    """Clients that are one of up to `parts` parts of a user, of at most `most` records each: a
    user's records are dealt out in turn.

    Guarantees: holds for one part. All of a user's parts together have the guarantee of a group of
    `parts` units.
    """
    check.integer("parts", parts)
    _, which = np.unique(_numbers(users), return_inverse=True)
    turn = _places(which)
    made = by_user(
        _rows(records, np.arange(len(which))),
        which * parts + turn % parts,
        check.integer("most", most),
    )
    assert isinstance(made, UserRecords)
    return VirtualClients(
        made.tensors, name=f"virtual client (one of up to {parts} parts of a user)", parts=parts
    )


def _numbers(users: Tensor | np.ndarray) -> np.ndarray:
    return users.cpu().numpy() if isinstance(users, Tensor) else np.asarray(users)


def _places(which: np.ndarray) -> np.ndarray:
    """For each record, how many of its user come before it."""
    order = np.argsort(which, kind="stable")
    counts = np.bincount(which)
    places = np.empty(len(which), np.int64)
    places[order] = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places


def _rows(records: object, kept: np.ndarray) -> object:
    return Records(as_records(records).take(torch.from_numpy(kept)))
