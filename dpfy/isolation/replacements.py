"""What a check puts in the place of what a step had: other records for some rows of its batch, to see
whether the others notice, and other parameters and switches, as they may be at a later step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpfy.core.randomness import Randomness
from dpfy.isolation.comparison import Replacement
from dpfy.isolation.operations import BATCH, Contents, Operation
from dpfy.isolation.program import Program

HALVES, FIELDS = 3, 3
"""Ways of replacing half of the records, and fields by which other records are chosen."""

SPREAD = 0.1
"""How far parameters are moved, relative to their size, so that a gate that starts at zero shows
what lies behind it.
"""

SWITCHES = {
    "mul",
    "mul_",
    "div",
    "div_",
    "add",
    "add_",
    "sub",
    "sub_",
    "lerp",
    "lerp_",
    "addcmul",
    "addcmul_",
}
"""Operations in which a constant 0 or 1 may be a switch."""

CANDIDATES = 32
"""Records looked at to find one that differs from the record it replaces."""


class TrainingRecords(Protocol):
    """What the check needs of the training records (:class:`dpfy.data.lazy.RecordSource`)."""

    def __len__(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All records, one tensor a field, where they are in memory; else none."""

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The tensors in memory that hold records."""

    @property
    def rows_each(self) -> int:
        """How many rows of the model a row of the batch is for."""


class Replacements:
    """The ways of replacing rows of one batch with `losses`, drawn by the run's secret."""

    def __init__(
        self,
        batch: tuple[Tensor, ...],
        losses: Tensor,
        records: TrainingRecords,
        randomness: Randomness,
        step: int,
    ) -> None:
        self.batch, self._records = batch, records
        self._losses = losses.detach()
        self._drawn = randomness, step

    @cached_property
    def _generator(self) -> torch.Generator:
        randomness, step = self._drawn
        key = randomness.key("replaced rows", step, 8)
        return torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)

    @cached_property
    def rows(self) -> Tensor:
        """Half of the rows, at random, at least one, not all."""
        count = len(self._losses)
        picked = torch.randperm(count, generator=self._generator) < max(1, count // 2)
        return picked.to(self.batch[0].device)

    @property
    def ways(self) -> int:
        """How many ways there are."""
        return HALVES + 2 * min(len(self.batch), FIELDS)

    def way(self, number: int) -> Replacement:
        """Other records in `rows`, or copies of the record with the largest or the smallest loss: a
        mean of the batch moves most.

        Further ways leave one record alone and put copies of another in all other rows: the two
        with the largest values of a field, or one in the middle and the one with the smallest. What
        the batch has most of, or only once, or what is largest in it, is then gone.
        """
        rows = self.rows
        if number == 0:
            return Replacement(self.batch, self._other_records(rows), rows)
        if number < HALVES:
            source = self._losses.argmax() if number == 1 else self._losses.argmin()
            return Replacement(self.batch, self._copies(rows, source), rows)
        sizes = _size(self.batch[(number - HALVES) // 2 % len(self.batch)])
        order = sizes.argsort(descending=(number - HALVES) % 2 == 0)
        first, second = order[:2] if (number - HALVES) % 2 == 0 else order[[len(order) // 2, 0]]
        rows = torch.arange(len(rows), device=rows.device) != first
        return Replacement(self.batch, self._copies(rows, second), rows)

    @property
    def all_but_one(self) -> Tensor:
        """All rows but the one with the middle loss: the largest may have no gradient."""
        middle = self._losses.argsort()[len(self.rows) // 2]
        return torch.arange(len(self.rows), device=self.rows.device) != middle

    def far(self, factor: float) -> Replacement:
        """Other records in the other half of the rows, their real numbers multiplied by `factor`:
        what depends on the batch by a threshold shows it.
        """
        rows = ~self.rows
        return Replacement(self.batch, self._other_records(rows, factor), rows)

    def extremes(self, factor: float) -> list[Replacement]:
        """One record alone stays, with other records in all other rows, their real numbers divided
        by `factor` where the largest stays and multiplied where the smallest does: a threshold that
        hardly a record crosses is crossed by the one that stays.
        """
        found: list[Replacement] = []
        real = [field for field in self.batch if field.is_floating_point()]
        if not real:
            return found
        sizes = _size(real[0], absolute=True)
        for stays, far in ((sizes.argmax(), 1 / factor), (sizes.argmin(), factor)):
            rows = torch.arange(len(self.rows), device=self.rows.device) != stays
            found.append(Replacement(self.batch, self._other_records(rows, far), rows))
        return found

    def _copies(self, rows: Tensor, source: Tensor) -> list[Tensor]:
        return [
            torch.where(rows.view(-1, *[1] * (mine.dim() - 1)), mine[source], mine)
            for mine in self.batch
        ]

    def _other_records(self, rows: Tensor, far: float = 1.0) -> list[Tensor]:
        """The fields of the batch with other records in `rows`, field by field: records that differ
        there, where there are any.
        """
        # Of records that are not in memory: the other rows of the batch.
        pool = self._records.tensors or self.batch
        places, found = torch.nonzero(rows).flatten(), []
        for mine, all_of_them in zip(self.batch, pool, strict=True):
            new = self._others_of(mine[places], all_of_them)
            moved = new * far if far != 1 and new.is_floating_point() else new
            found.append(mine.index_copy(0, places, moved))
        return found

    def _others_of(self, mine: Tensor, all_of_them: Tensor) -> Tensor:
        """For each row of a field the first of some records that differs from it; where none does,
        the last.
        """
        many = CANDIDATES if len(self._records) > 1 else 1
        drawn = torch.randint(len(all_of_them), (many, len(mine)), generator=self._generator)
        places = drawn.to(all_of_them.device)
        if mine.dim() == 1:
            candidates = all_of_them[places].to(mine)
            differs = candidates != mine
            differs[-1] = True
            return candidates.gather(0, differs.byte().argmax(0)[None])[0]
        new = all_of_them[places[0]].to(mine)
        for candidate in range(1, many):
            same = (new == mine).flatten(1).all(1)
            if not bool(same.any()):
                break
            again = torch.nonzero(same).flatten()
            new[again] = all_of_them[places[candidate, again.to(places.device)]].to(new)
        return new


def _size(field: Tensor, absolute: bool = False) -> Tensor:
    """One number for each row of a field: the value itself where there is one."""
    values = field.detach().reshape(len(field), -1).double().nan_to_num()
    return (values.abs() if absolute else values).sum(1)


def moved_parameters(program: Program, params: Sequence[nn.Parameter], seed: int) -> Contents:
    """Contents for the parameters' storages: every value moved at random, a parameter of zeros
    too.
    """
    found: Contents = {}
    for position, p in enumerate(t.detach() for t in params):
        storage = program.ref(p).storage
        if (
            storage in found
            or p.untyped_storage().nbytes() != p.numel() * p.element_size()
            or not p.is_contiguous()
        ):
            continue
        generator = torch.Generator().manual_seed(seed + position)
        size = p.float().square().mean().sqrt().nan_to_num(0.0, 0.0, 0.0)
        size = torch.where(size == 0, 1.0, size) * SPREAD
        step = torch.randn(p.shape, generator=generator).to(device=p.device)
        found[storage] = (p + (size * step).to(p.dtype)).untyped_storage()
    return found


def moved_constants(program: Program) -> dict[int, Any]:
    """By operation, other arguments for those that multiply or mix by 0 or 1: a switch that is off,
    and may be on at another step.
    """
    found = {}
    for operation in program.operations:
        if operation.name not in SWITCHES or not _of_batch(program, operation):
            continue
        args, kwargs = operation.arguments
        moved = (
            tuple([_half(a) for a in args]),
            {k: _half(a) if k in ("alpha", "weight", "value") else a for k, a in kwargs.items()},
        )
        if moved != (args, kwargs):
            found[id(operation)] = moved
    return found


def _of_batch(program: Program, operation: Operation) -> bool:
    """Whether real numbers of the batch are among what it takes, and what it gives."""
    real = all(r.dtype.is_floating_point for r in (*operation.outputs, *operation.written))
    return real and any(program.origin.get(r.storage, 0) & BATCH for r in operation.inputs)


def _half(value: Any) -> Any:
    return 0.5 if type(value) in (int, float) and value in (0, 1) else value


def moved_switches(program: Program, known: Collection[int]) -> Contents:
    """Contents for single numbers and flags from outside that are 0 or 1, and neither batch nor
    weight (`known`, by storage).
    """
    found: Contents = {}
    for index, storage in program.outside.items():
        if index in known or index in program.initial or program.origin.get(index, 0):
            continue
        refs = {r for o in program.operations for r in o.inputs if r.storage == index}
        if len(refs) != 1 or (ref := next(iter(refs))).shape:
            continue
        flag = ref.dtype is torch.bool
        if (flag or ref.dtype.is_floating_point) and storage.nbytes() == ref.dtype.itemsize:
            value = torch.empty(0, dtype=ref.dtype, device=ref.device).set_(
                storage, ref.offset, (), ()
            )  # type: ignore[call-overload]
            if float(value) in (0.0, 1.0):
                other = torch.full_like(value, not value if flag else 0.5)
                found[index] = other.untyped_storage()
    return found
