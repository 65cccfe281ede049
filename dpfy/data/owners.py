"""Records with owners, read when they are drawn: a user is one row of a batch, or one record of
theirs is, however large the data is.

Who owns what is read when training opens its data, after the reservation, and nothing else of it
is. How many records a user has decides only which of them are taken: at most `most`, chosen
among that user's own.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.unit import WINDOWS, Unit, owner_columns, user_unit
from dpfy.data.batch import Batch, Draw
from dpfy.data.config import FIRST, PICKS, RANDOM, SUM, USER_LOSSES
from dpfy.data.lazy import RecordSource
from dpfy.data.records import SingleRows
from dpfy.tables import cells, shared
from dpfy.tables.table import owner_names

KEPT = b"dpfy records of a user"
"""The public key of the choice that is made once, for records that are drawn one by one."""
SECONDS = 24 * 60 * 60
"""Of a day."""
FIRST_DAY, LAST_DAY = (day.toordinal() - cells.EPOCH for day in (date.min, date.max))
"""The days, since 1970, of the years 1 to 9999."""


@dataclass(frozen=True)
class Users:
    """Whose each record is, and how a user takes part.

    Args:
        of: One whole number or word for each record, or the name of the field that has it (a key of
            a dict, a column of a Hugging Face dataset). That field is no input of the model. Where
            a record belongs to several users: a list of them for each record, an array with a
            column for each, or the names of the fields with commas between them.
        pick: Which records are used of a user with more than the plan allows: "random" or "first".
        loss: "sum" adds up the losses of a user's records, "mean" takes their mean.
        time: When each record was made: seconds since 1970, ISO dates or numpy's datetimes, or the
            name of a field. A record with no owner, or with no time where time is asked for, is
            left out.
        window: "day", "week", "month" or "year", in UTC. The unit is then what a user contributed
            within one window.

    Raises:
        InvalidInput: A value does not fit its rule, or `window` is given without `time`.

    Example:
        >>> import dpfy
        >>> dpfy.Users([1, 1, 2, 3], loss="mean").loss
        'mean'
    """

    of: object
    pick: str = RANDOM
    loss: str = SUM
    time: object = None
    window: str | None = None

    def __post_init__(self) -> None:
        check.one_of("user.pick", self.pick, PICKS)
        check.one_of("user.loss", self.loss, USER_LOSSES)
        if self.shared and (self.window is not None or self.time is not None):
            raise Unsupported("windows of records with several owners", "leave out time and window")
        if self.window is not None:
            check.one_of("user.window", self.window, WINDOWS)
        if (self.window is None) != (self.time is None):
            missing = "time" if self.time is None else "window"
            raise InvalidInput(
                f"user.{missing}", None, "must be given with the other of user.time and user.window"
            )

    def __repr__(self) -> str:
        """Names of fields, and of other things their kind: whose a record is, and when it was made,
        is private.
        """
        of, time = (
            repr(v) if v is None or isinstance(v, str) else f"<{type(v).__name__}>"
            for v in (self.of, self.time)
        )
        return (
            f"Users(of={of}, pick={self.pick!r}, loss={self.loss!r}, time={time}, "
            f"window={self.window!r})"
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The fields that are named, and are no inputs of the model."""
        of = owner_columns("user", self.of) if isinstance(self.of, str) else ()
        return (*of, *((self.time,) if isinstance(self.time, str) else ()))

    @property
    def shared(self) -> bool:
        """Whether a record may have several owners. Only the form is looked at."""
        if isinstance(self.of, str):
            return len(owner_columns("user", self.of)) > 1
        if isinstance(self.of, list | tuple):
            return len(self.of) > 0 and isinstance(self.of[0], list | tuple)
        return len(getattr(self.of, "shape", ())) == 2


@dataclass(frozen=True, eq=False)
class Owned:
    """Records, not read yet, of which each user has at most `most` in a batch, or with `single` in
    the data set.
    """

    records: object
    users: Users
    most: int
    single: bool = False

    def __post_init__(self) -> None:
        check.integer("most", self.most)
        if self.users.shared and not self.single:
            rule = 'draw them one by one: a plan with draw="record" and adjacency="zero-out"'
            raise Unsupported("records with several owners, grouped by user,", rule)

    def __repr__(self) -> str:
        return f"Owned({type(self.records).__name__}, at most {self.most} of one user)"

    @property
    def records_each(self) -> int:
        """How many records of one unit a row holds."""
        return 1 if self.single else self.most

    @property
    def unit(self) -> Unit:
        """The unit of privacy that a recipe for these records must name."""
        return user_unit(self.most, self.users.window, self.users.shared)

    @property
    def fields(self) -> object:
        """The records without the field that says whose they are. Nothing is read."""
        names, records = self.users.named, self.records
        if not names:
            return records
        known = (
            list(records)
            if isinstance(records, Mapping)
            else getattr(records, "column_names", None)
        )
        for name in names:
            if known is not None and name not in known:
                raise InvalidInput(
                    "user", name, f"must be a field of the records: {', '.join(map(str, known))}"
                )
        if isinstance(records, Mapping):
            return {key: field for key, field in records.items() if key not in names}
        if known is not None and hasattr(records, "remove_columns"):
            return records.remove_columns(list(names))
        if isinstance(records, tuple | np.ndarray | Tensor) or not hasattr(records, "__getitem__"):
            rule = (
                "names a field, and these records have no names: give one whole number or word for "
                "each record"
            )
            raise InvalidInput("user", names[0], rule)
        return Unnamed(records, names)

    def grouped(self, base: RecordSource) -> UserSource | KeptRecords:
        """The records of `base` by user. Here it is read who owns what.

        Guarantees: a user is one row, whatever number of records; nothing is learnt from the data
        but who owns what.
        """
        if base.rows_each != 1:
            raise Unsupported(
                "several views of a record, or records by user, with owners",
                "give single records in one view each",
            )
        if self.users.shared:
            return KeptRecords(base, np.flatnonzero(self._within_limit(len(base))), self.most)
        names, which = self.users_of(len(base))
        counts = np.bincount(which[which >= 0], minlength=len(names)).astype(np.int64)
        order = np.argsort(which, kind="stable").astype(np.int64)[np.count_nonzero(which < 0) :]
        first = np.cumsum(counts) - counts
        if not self.single:
            return UserSource(
                base, order, first, counts, self.most, self.users.pick, self.users.loss
            )
        kept = [
            order[
                start
                + chosen(
                    KEPT,
                    str(name).encode("utf-8", "surrogatepass"),
                    int(count),
                    self.most,
                    self.users.pick,
                )
            ]
            for name, start, count in zip(names, first, counts, strict=True)
        ]
        return KeptRecords(base, np.sort(np.concatenate([order[:0], *kept])), self.most)

    def users_of(self, records: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The users of so many records, in the order of their names; and which of them owns each
        record, -1 where it names nobody. Here it is read who owns what.
        """
        names, which = np.unique(self._owners(records), return_inverse=True)
        nobody = int(names.dtype.kind == "U" and "" in names[:1])
        return names[nobody:], which.astype(np.int64) - nobody

    def _within_limit(self, records: int) -> NDArray[np.bool_]:
        """Which of so many records with several owners are used: see `dpfy.tables.shared`."""
        given: Any = self.users.of
        if isinstance(given, str):
            columns = [self._column(name) for name in self.users.named]
        elif isinstance(given, list | tuple):
            columns = [*zip_longest(*map(set, given))] or [[None] * len(given)]
        else:
            columns = [*_array(given).T]
        owners = shared.numbered(columns)
        _require_length("user", owners, records)
        return shared.within_limit(owners, self.most, order_of(records, self.users.pick))

    def at(self, records: object, rows: NDArray[np.int64]) -> Owned:
        """The records that were at `rows`, which are `records` now, with their owners."""
        of, time = identities("user", self._column(self.users.of)), self.users.time
        held = None if time is None else _array(self._column(time))[rows]
        return replace(self, records=records, users=replace(self.users, of=of[rows], time=held))

    def _owners(self, records: int) -> NDArray[Any]:
        """One whole number or word for each record: its user, or its user and window of time; ""
        where it names nobody.
        """
        found = identities("user", self._column(self.users.of))
        _require_length("user", found, records)
        if self.users.window is None:
            return found
        when = windows(self._column(self.users.time), self.users.window)
        _require_length("user.time", when, records)
        return np.array(
            [
                f"{len(str(user))} {user} {window:.0f}" if user != "" and window == window else ""
                for user, window in zip(found, when, strict=True)
            ],
            str,
        )

    def _column(self, given: Any) -> Any:
        """What is given, or one field of all records."""
        if not isinstance(given, str):
            return given
        records: Any = self.records
        if isinstance(records, Mapping):
            return records[given]
        if hasattr(records, "remove_columns"):
            return list(records.with_format(None)[given])
        return [_plain(records[number][given]) for number in range(len(records))]


def order_of(records: int, pick: str) -> NDArray[np.int64] | None:
    """In which order records with several owners are taken: the same for all that have as many."""
    if pick == FIRST:
        return None
    seed = hashlib.blake2b(KEPT, digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    return rng.permutation(records)


def windows(held: Any, window: str) -> NDArray[np.float64]:
    """The number of the window of time that each record lies in; NaN where it has no time."""
    found = days(held)
    if window == "week":
        return np.floor((found + 3) / 7)  # 1970 began on a Thursday
    whole = np.where(np.isnan(found), 0, found).astype(np.int64).astype("datetime64[D]")
    unit = {"day": "D", "month": "M", "year": "Y"}[window]
    return np.where(np.isnan(found), np.nan, whole.astype(f"datetime64[{unit}]").astype(np.int64))


def days(held: Any) -> NDArray[np.float64]:
    """The day, since 1970, of seconds since then, ISO dates or datetimes; NaN where one is none, or
    lies outside of the years 1 to 9999.

    Guarantees: each is read by itself.
    """
    whole = _array(held)
    if whole.ndim != 1:
        rule = "must be seconds since 1970 or an ISO date for each record"
        raise InvalidInput("user.time", f"shape {list(whole.shape)}", rule)
    if whole.dtype.kind == "M":
        found = cells.days(whole, ())
    elif whole.dtype.kind in "iuf":
        found = np.floor(whole.astype(np.float64) / SECONDS)
    else:
        words, places = cells.distinct(whole)
        read = [_day(text) for text in words]
        found = np.array([*read, np.nan])[places]
    return np.where((found >= FIRST_DAY) & (found <= LAST_DAY), found, np.nan)


def _day(text: str) -> float:
    """The day that a word means: an ISO date, or a number of seconds."""
    seconds = cells.number(text, ("",))
    return cells.day(text) if np.isnan(seconds) else float(np.floor(seconds / SECONDS))


def _require_length(name: str, found: NDArray[Any], records: int) -> None:
    if len(found) != records:
        raise InvalidInput(
            name, f"{len(found)} values", f"must be one for each of the {records} records"
        )


def identities(name: str, held: Any) -> NDArray[Any]:
    """Whole numbers, or words, one for each record; "" where it names nobody."""
    whole = _array(held)
    if whole.ndim != 1 or whole.dtype.kind in "fcb":
        rule = "must be one whole number or word for each record"
        raise InvalidInput(name, f"{whole.dtype} of shape {list(whole.shape)}", rule)
    return whole if whole.dtype.kind in "iu" else owner_names(whole).astype(str)


def _array(held: Any) -> NDArray[Any]:
    """An array as it is; of a list one whose type its cells do not decide, but whole numbers."""
    if isinstance(held, Tensor):
        return held.detach().cpu().numpy()
    if not isinstance(held, list | tuple):
        return np.asarray(held)
    whole = np.empty(len(held), object)
    whole[:] = held
    return whole


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic) else value


class Unnamed:
    """A data set of dicts without some of their fields."""

    def __init__(self, dataset: Any, names: tuple[str, ...]) -> None:
        self.dataset, self.names = dataset, names

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[Any, Any]:
        return {key: field for key, field in self.dataset[index].items() if key not in self.names}


def chosen(key: bytes, user: bytes, count: int, most: int, pick: str) -> NDArray[np.int64]:
    """Which of a user's `count` records are taken: all, or `most` of them, in ascending order.

    Guarantees: a function of the key, the user and the number of that user's records alone; every
    set of `most` is as likely.
    """
    if count <= most or pick == FIRST:
        return np.arange(min(count, most), dtype=np.int64)
    seed = hashlib.blake2b(b"contributions\0" + user, key=key[:64], digest_size=16).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "little")))
    return np.sort(rng.choice(count, most, replace=False)).astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class DrawnRecords(SingleRows):
    """Records of another source, of which a row of a batch takes some."""

    base: RecordSource

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """None: rows are made when they are drawn."""
        return ()

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Tensors in memory that hold records."""
        return self.base.held

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """Fields with one record in each row."""
        return self.base.flat


def stored(source: RecordSource) -> tuple[Tensor, ...]:
    """All records that are in memory, one tensor a field, however they are drawn."""
    return source.base.tensors if isinstance(source, DrawnRecords) else source.tensors


@dataclass(frozen=True, eq=False)
class UserSource(DrawnRecords):
    """Row u is user u: at most `most` of their records side by side, and last which of them are
    real.

    Guarantees: places that are not real repeat a record of the same user; a batch of B users holds
    B times `most` records, however many they have; which ones is a function of the step's key and
    the user.
    """

    order: NDArray[np.int64]
    first: NDArray[np.int64]
    counts: NDArray[np.int64]
    most: int
    pick: str
    loss: str

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"UserSource(at most {self.most} records of each user)"

    @property
    def records_each(self) -> int:
        """How many records one user may have in a batch."""
        return self.most

    def to(self, device: torch.device | str) -> UserSource:
        """The same users, their records on another device."""
        return replace(self, base=self.base.to(device))

    def places(self, draw: Draw) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The record in each place of each user drawn, and whether it is real: both [users,
        most].
        """
        rows, real = (
            np.empty((len(draw.indices), self.most), np.int64),
            np.zeros((len(draw.indices), self.most), bool),
        )
        for row, user in enumerate(draw.indices):
            taken = chosen(
                draw.key,
                int(user).to_bytes(8, "little"),
                int(self.counts[user]),
                self.most,
                self.pick,
            )
            rows[row, : len(taken)] = self.order[self.first[user] + taken]
            rows[row, len(taken) :] = rows[row, 0]
            real[row, : len(taken)] = True
        return rows, real

    def read(self, draws: Iterable[Draw], device: torch.device) -> Generator[Batch]:
        """The batches of these draws, in their order."""
        waiting: deque[NDArray[np.bool_]] = deque()

        def asked() -> Generator[Draw]:
            for draw in draws:
                rows, real = self.places(draw)
                waiting.append(real)
                yield draw._replace(indices=rows.reshape(-1))

        reading = self.base.read(asked(), device)
        try:
            for batch in reading:
                yield self._joined(batch, torch.from_numpy(waiting.popleft()).to(device))
        finally:
            reading.close()

    def take(self, indices: Tensor) -> Batch:
        """The users at `indices`, with the same of their records each time."""
        same = replace(self, pick=FIRST)  # a choice by place would depend on who else is there
        rows, real = same.places(Draw(indices.cpu().numpy(), 0, bytes(32)))
        batch = self.base.take(torch.from_numpy(rows.reshape(-1)))
        found = pytree.tree_leaves(batch)[0]
        return self._joined(batch, torch.from_numpy(real).to(found.device))

    def _joined(self, batch: Batch, real: Tensor) -> Batch:
        """The fields of a flat batch user by user, and which places are real as one more field."""
        shaped = pytree.tree_map_only(Tensor, lambda field: field.unflatten(0, real.shape), batch)
        return (*shaped, real) if isinstance(shaped, tuple | list) else (shaped, real)

    def fingerprint(self, randomness: Randomness) -> str:
        """What recognises records and owners again at a resume."""
        told = (
            f"{self.most} {self.pick} {self.loss};".encode()
            + self.order.tobytes()
            + self.counts.tobytes()
        )
        return randomness.tag("owners", self.base.fingerprint(randomness).encode() + told)


@dataclass(frozen=True, eq=False)
class KeptRecords(DrawnRecords):
    """Single records, of which each user has at most `most`: all others were left out, once, by a
    choice among that user's own. `expected` is the public number that a plan is made for, where how
    many there are is told to nobody.
    """

    rows: NDArray[np.int64]
    most: int
    expected: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"KeptRecords(at most {self.most} of one user)"

    def to(self, device: torch.device | str) -> KeptRecords:
        """The same records on another device."""
        return replace(self, base=self.base.to(device))

    def read(self, draws: Iterable[Draw], device: torch.device) -> Generator[Batch]:
        """The batches of these draws, in their order."""
        return self.base.read(
            (draw._replace(indices=self.rows[draw.indices]) for draw in draws), device
        )

    def take(self, indices: Tensor) -> Batch:
        """The records at `indices`."""
        return self.base.take(torch.from_numpy(self.rows[indices.cpu().numpy()]))

    def fingerprint(self, randomness: Randomness) -> str:
        """What recognises the records kept again at a resume."""
        return randomness.tag(
            "kept",
            self.base.fingerprint(randomness).encode()
            + f"{self.most};".encode()
            + self.rows.tobytes(),
        )
