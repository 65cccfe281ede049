"""How a batch of any structure becomes one loss for each of its rows: which fields go to the model,
and which are its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.batch import Batch
from dpfy.data.config import SUM
from dpfy.data.given import is_rows
from dpfy.data.lazy import RecordSource
from dpfy.data.owners import Owned, UserSource
from dpfy.data.records import Records
from dpfy.data.users import UserRecords
from dpfy.gradients.engine import per_user, per_view
from dpfy.training import losses
from dpfy.training.losses import CLASSES, LOSSES, Loss, NamedLoss
from dpfy.training.per_record import PerRecord, told

BatchLosses = Callable[[nn.Module, Batch], Tensor]
"""(model, batch) to one loss for each row."""

LABELS = ("labels", "label", "targets", "target", "y")
"""Keys that hold the targets of a dict, where the caller names none."""
WAY_OUT = "give objective=, a function of (model, batch) to one loss for each row"


@dataclass(frozen=True)
class Objective:
    """A loss by name, or of (outputs, targets), with the key of the targets in a dict; or one of
    (model, record); or `whole`, a function of (model, batch).

    A tuple's last field is the target and the model is called with all others; a dict's label key
    is the target and the model is called with the others by name. A field that is itself a tuple or
    dict is spread in the same way.
    """

    loss: str | Loss | PerRecord = "cross_entropy"
    labels: str | None = None
    whole: BatchLosses | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss, str):
            check.one_of("loss", self.loss, LOSSES)
        elif self.record is not None:
            if self.labels is not None:
                raise InvalidInput(
                    "labels",
                    self.labels,
                    "goes with a loss of (outputs, targets): one of (model, record) has the record",
                )
        elif not callable(self.loss):
            raise InvalidInput(
                "loss",
                type(self.loss).__name__,
                "must be the name of a loss or a function of (outputs, targets)",
            )
        if self.labels is not None and not isinstance(self.labels, str):
            raise InvalidInput(
                "labels", self.labels, "must be the key of the targets in a batch that is a dict"
            )
        if self.whole is not None:
            if not callable(self.whole):
                raise InvalidInput(
                    "objective", type(self.whole).__name__, "must be a function of (model, batch)"
                )
            if self.loss != "cross_entropy" or self.labels is not None:
                raise InvalidInput(
                    "objective", "a function", "needs no loss or labels: leave loss and labels out"
                )

    @property
    def record(self) -> PerRecord | None:
        """The loss, if it is one of (model, record)."""
        return told(self.loss)

    @property
    def named(self) -> NamedLoss:
        """The loss with what is known about its answers; of a function no more than that classes
        may be recognised.
        """
        if isinstance(self.loss, str):
            return LOSSES[self.loss]
        return NamedLoss(cast(Loss, self.loss), CLASSES.right, CLASSES.pairs)

    def losses_of(
        self, model: nn.Module, source: RecordSource | None = None
    ) -> Callable[[Batch], Tensor]:
        """The function of a batch that training repeats.

        For records by user a loss is the sum over a user's own records, or their mean where
        :class:`dpfy.Users` says so; for several views of a record it is the mean over them.

        The caller's functions are in its closure, where a resumed run looks for other code.
        """
        whole, loss, run, due = self.whole, self.named.loss, self._run, self._due
        record, held = self.record, () if source is None else source.held
        of_one = (
            None if record is None else record.f
        )  # here, for those who look for other code in the closure
        users, views = (
            isinstance(source, UserRecords | UserSource),
            1 if source is None else source.rows_each,
        )
        reduction = source.loss if isinstance(source, UserSource) else SUM

        def losses(batch: Batch) -> Tensor:
            real = None
            if users:
                *fields, real = batch
                batch = (
                    fields[0]
                    if len(fields) == 1 and isinstance(fields[0], Mapping)
                    else tuple(fields)
                )
            if users or views > 1:
                batch = pytree.tree_map_only(Tensor, lambda t: t.flatten(0, 1), batch)
            if record is not None and of_one is not None:
                found = record.losses(model, batch, held)
            else:
                found = loss(*due(*run(model, batch))) if whole is None else whole(model, batch)
            return (
                per_user(found, real, reduction=reduction)
                if real is not None
                else per_view(found, views)
                if views > 1
                else found
            )

        return losses

    def evaluated(
        self, model: nn.Module, batch: Batch
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The losses of a batch; and (scores, targets), unless only a function of the caller's
        knows them.
        """
        if self.record is not None:
            return self.record.losses(model, batch), None
        if self.whole is not None:
            return self.whole(model, batch), None
        outputs, targets = self._run(model, batch)
        return self.named.loss(*self._due(outputs, targets)), _answers(outputs, targets)

    def answers(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """(scores, targets) of a batch; None where only a function of the caller's knows them."""
        return (
            None
            if self.whole is not None or self.record is not None
            else _answers(*self._run(model, batch))
        )

    def _run(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        inputs, named, targets = self.parts(batch)
        return model(*inputs, **named), targets

    def _due(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """What the loss takes: one by name tensors, a function of the caller's what the model
        returned.
        """
        return (
            (scores(outputs), _tensor(targets))
            if isinstance(self.loss, str)
            else (outputs, targets)
        )

    def parts(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """(inputs by place, inputs by name, targets) of a batch."""
        if isinstance(batch, Mapping):
            key = self._key(batch)
            return (
                (),
                _by_name({name: field for name, field in batch.items() if name != key}),
                batch[key],
            )
        if self.labels is not None:
            raise InvalidInput(
                "labels",
                self.labels,
                f"is a key, but a batch is a {type(batch).__name__}: its last field is the target",
            )
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InvalidInput(
                "train",
                "one field a row",
                f"holds no targets: give (inputs, targets); else {WAY_OUT}",
            )
        *fields, targets = batch
        if len(fields) == 1 and isinstance(fields[0], Mapping):
            return (), _by_name(fields[0]), targets
        if len(fields) == 1 and isinstance(fields[0], tuple | list):
            return tuple(fields[0]), {}, targets
        return tuple(fields), {}, targets

    def _key(self, batch: Mapping[str, Any]) -> str:
        names = ", ".join(map(str, batch))
        if self.labels is not None:
            if self.labels not in batch:
                raise InvalidInput("labels", self.labels, f"must be a key of the batch: {names}")
            return self.labels
        found = [name for name in LABELS if name in batch]
        if len(found) != 1:
            rule = f'say by labels="..." which field of the batch holds the targets; else {WAY_OUT}'
            raise InvalidInput("labels", f"{len(found)} of the fields {names}", rule)
        return found[0]

    def check(self, name: str, data: object) -> None:
        """Refuse, before anything is reserved or read, data whose fields or types this objective
        cannot take.

        Looks at names, types and shapes alone, where tensors or arrays are given; what a Dataset
        holds shows at its first batch.
        """
        held = _held(data)
        if held is None or self.whole is not None or self.record is not None:
            return
        *_, targets = self.parts(held)
        if isinstance(self.loss, str) and isinstance(targets, Tensor | np.ndarray):
            kind = targets.dtype if isinstance(targets, Tensor) else _dtype(targets)
            dimensions = targets.ndim - (1 if isinstance(data, UserRecords) else 0)
            if kind is not None:
                losses.check_type(self.loss, f"{name} labels", kind, dimensions)


def _by_name(fields: Mapping[Any, Any]) -> dict[str, Any]:
    if strange := [key for key in fields if not isinstance(key, str)]:
        raise InvalidInput(
            "train", f"the key {strange[0]!r}", "fields go to the model by name: keys must be text"
        )
    return dict(fields)


def scores(outputs: Any) -> Any:
    """The tensor of scores in what a model returned: itself, or the `logits` of a Hugging Face
    output.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if (found := getattr(outputs, "logits", None)) is None and isinstance(outputs, Mapping):
        found = outputs.get("logits")
    if isinstance(found, Tensor):
        return found
    raise Unsupported(
        f"a loss by name for a model that returns {type(outputs).__name__}",
        f"return a tensor or .logits, or {WAY_OUT}",
    )


def _answers(outputs: Any, targets: Any) -> tuple[Tensor, Tensor] | None:
    try:
        return (scores(outputs), targets) if isinstance(targets, Tensor) else None
    except Unsupported:
        return None


def _tensor(targets: Any) -> Tensor:
    if not isinstance(targets, Tensor):
        raise InvalidInput(
            "labels",
            type(targets).__name__,
            f"a loss by name needs one tensor of targets; else {WAY_OUT}",
        )
    return targets


def _held(data: object) -> Batch | None:
    """The fields of data that lies in memory, as a batch holds them; None where only reading
    tells.
    """
    if isinstance(data, UserRecords):
        return data.tensors[:-1]
    if isinstance(data, Owned):
        return _held(data.fields)
    if isinstance(data, Records):
        return data.take(torch.zeros(0, dtype=torch.int64))
    if isinstance(data, TensorDataset):
        return data.tensors
    if isinstance(data, Tensor | np.ndarray):
        return (data,)
    return data if isinstance(data, tuple | list | Mapping) and not is_rows(data) else None


def _dtype(array: np.ndarray) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype=array.dtype.newbyteorder("="))).dtype
    except TypeError:
        return None
