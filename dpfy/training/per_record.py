"""Losses written for one record, `f(model, record)`: isolated by construction, where losses of a
batch must be checked for mixing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.batch import Batch
from dpfy.data.lazy import LazyRecords
from dpfy.data.owners import Owned, UserSource
from dpfy.gradients.record_losses import RowLoss, losses_of_rows, losses_one_by_one
from dpfy.training.parallel.dtensor import local

PARAMETERS = ["model", "record"]
"""A function with parameters of these names is one of a record; those of (outputs, targets) are
called anything else.
"""


@dataclass(frozen=True)
class PerRecord:
    """A function of (model, record) to the loss of that record, and whether torch maps it over the
    records of a batch.
    """

    f: RowLoss
    vectorised: bool = True

    @property
    def words(self) -> str:
        """What the report says about it."""
        if self.vectorised:
            return (
                "the loss is a function of one record, which torch mapped over the records; no "
                "check by replay was needed"
            )
        return (
            "the loss is a function of one record, which was called for one record after the "
            "other; numbers that Python read were not "
            "followed, but of each batch one record was computed again after the others, with the "
            "same loss"
        )

    def losses(self, model: nn.Module, batch: Batch, held: Iterable[Tensor] = ()) -> Tensor:
        """One loss for each row of `batch`. `held` is memory that `f` must not read: the data
        set.
        """
        if self.vectorised:
            return losses_of_rows(self.f, model, batch, held)
        apart = losses_one_by_one(self.f, model, batch, held)
        losses = torch.stack(apart)
        vars(losses)["apart"] = apart  # for the engine "loop": their graphs have nothing in common
        return losses

    def check(self, model: nn.Module, train: object, engine: str, graph: bool) -> None:
        """Refuse, before anything is reserved, what would let one record reach another, or cannot
        be computed so.
        """
        if collates(train):
            rule = (
                "leave it out and give records of equal shape (padded in the data set), or give "
                "objective= instead"
            )
            raise Unsupported(
                "a collate function, which sees other records, with a loss for one record", rule
            )
        if any(local(p) is not p for p in model.parameters()):
            raise Unsupported(
                "a model in parts on several ranks with a loss for one record",
                "give objective= instead",
            )
        if graph:
            raise Unsupported("a CUDA graph of a loss for one record", "leave graph=True out")
        if not self.vectorised and engine not in ("auto", "loop"):
            raise InvalidInput(
                "engine", engine, 'must be "loop" for dpfy.per_record(f, vectorised=False)'
            )
        if not self.vectorised and (
            isinstance(train, Owned)
            or getattr(train, "records_each", 1) * getattr(train, "rows_each", 1) > 1
        ):
            what = "dpfy.per_record(f, vectorised=False) where a unit has several rows"
            raise Unsupported(what, "leave vectorised=False out, or give objective= instead")


def collates(train: object) -> bool:
    """Whether a function of the caller's joins records to batches."""
    if isinstance(train, Owned):
        return collates(train.fields)
    if isinstance(train, UserSource):
        return collates(train.base)
    return isinstance(train, LazyRecords) and train.collate is not None


@overload
def per_record(f: RowLoss, *, vectorised: bool = True) -> PerRecord: ...


@overload
def per_record(f: None = None, *, vectorised: bool = True) -> Callable[[RowLoss], PerRecord]: ...


def per_record(
    f: RowLoss | None = None, *, vectorised: bool = True
) -> PerRecord | Callable[[RowLoss], PerRecord]:
    """A loss for :func:`dpfy.fit` that is written for one record.

        @dpfy.per_record
        def loss(model, record):
            x, y = record
            return F.cross_entropy(model(x), y)

    A record is what one row of the data is: a tuple of its fields, or a dict, without a dimension
    for the batch. The result is one number. A function whose parameters are called model and record
    is taken so also without this decorator.

    Args:
        f: The loss. It is called once for a whole batch, and torch maps it over the records: it can
            neither read numbers of a record in Python nor depend on them in its control flow.
        vectorised: False calls `f` for one record after the other. It may then read numbers, and
            is slower.

    Returns:
        The loss, or without `f` a decorator.

    Raises:
        InvalidInput: `f` is not a function.

    Guarantees: no other record can reach a record's loss through tensors: `f` is given none, and
    what it keeps for its next call is refused. In :func:`dpfy.fit` such losses need no checks by
    replay.

    Example:
        >>> import torch
        >>> import dpfy
        >>> @dpfy.per_record
        ... def loss(model, record):
        ...     x, y = record
        ...     return (model(x) - y).square().sum()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = dpfy.dpsgd(records=50, batch_size=10, steps=2).calibrate(3.0, 1e-5)
        >>> data = (torch.randn(50, 2), torch.randn(50, 1))
        >>> dpfy.fit(model, data, optimizer=optimizer, plan=plan, loss=loss).epsilon <= 3.0
        True
    """
    if f is None:
        return lambda g: PerRecord(g, vectorised)
    if not callable(f) or isinstance(f, PerRecord | nn.Module):
        raise InvalidInput(
            "loss", type(f).__name__, "must be a function of (model, record) to one number"
        )
    return PerRecord(f, vectorised)


def told(loss: Any) -> PerRecord | None:
    """`loss` as one of a record, if that is what it is."""
    if isinstance(loss, PerRecord):
        return loss
    if isinstance(loss, str | nn.Module) or not callable(loss):
        return None
    try:
        names = list(inspect.signature(loss).parameters)
    except (ValueError, TypeError):
        return None
    return PerRecord(loss) if names[:2] == PARAMETERS else None
