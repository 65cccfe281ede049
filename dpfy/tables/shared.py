"""Records that several persons own, as a message has a sender and a receiver: which of them are
used, so that each person owns at most k of those.

Records are taken in a public order. One is used if each of its owners owns fewer than k used
records (the greedy rule of Ganesh et al. 2025, arXiv 2503.03622).

The guarantee is about what records hold: neighbouring data sets have the same records with the same
owners, and what all records of one person hold counts as nothing in one of them (zero-out). The
rule looks at owners and places alone. So it uses the same records of both, of which the person owns
at most k, and every sum moves by at most k contributions.

For adding or removing a person no such bound exists. A record less gives room to another one, which
takes it from a third, and so on without end: one person could change every record that is used.
Owners and the number of records are therefore not protected, and must not be taken from content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.tables import cells as reading

NOBODY = -1


def numbered(columns: Sequence[Any]) -> NDArray[np.int64]:
    """The owners of each record as numbers, one column each; `NOBODY` where a cell names none. The
    same word is the same person in every column.
    """
    place: dict[str, int] = {"": NOBODY}
    found = []
    for held in columns:
        words, places = reading.distinct(held)
        codes = [place.setdefault(word, len(place) - 1) for word in [*words, ""]]
        found.append(np.array(codes, np.int64)[places])
    return np.stack(found, axis=1)


def within_limit(
    owners: NDArray[np.int64], most: int, order: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Which records are used, so that each person owns at most `most` of them.

    Args:
        owners: The owners of each record, one row each; numbers below 0 are none. One that is there
            twice counts once. Records of nobody are not used.
        most: The most records of a person.
        order: In which order records are taken; by default as they are.

    Guarantees: a function of owners and order alone. Of records that keep the limit all are used,
    and so leaving some of them out changes nothing about the others.
    """
    used, kept = [0] * (int(owners.max(initial=NOBODY)) + 1), np.zeros(len(owners), bool)
    rows = owners.tolist()
    for row in range(len(rows)) if order is None else order.tolist():
        mine = {owner for owner in rows[row] if owner >= 0}
        if mine and all(used[owner] < most for owner in mine):
            kept[row] = True
            for owner in mine:
                used[owner] += 1
    return kept
