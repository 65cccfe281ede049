"""Evaluation on held-out records: what is measured, and what of it may leave.

public     the user declares the test data public: figures are published as they are measured
billed     private counts (right, wrong, and each class taken for each class) with Gaussian noise, reserved in the ledger like training
withheld   nothing that was measured is written anywhere
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpfy.accounting.gaussian import sigma_analytic
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded
from dpfy.data.records import Records
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining

Loss = Callable[[Tensor, Tensor], Tensor]
PUBLIC, BILLED, WITHHELD, NONE = "public", "billed", "withheld", "none"
USES = (PUBLIC, BILLED, WITHHELD)
STREAM = "evaluation"
BATCH = 1000
MOST_CLASSES = 50
"""A table of confused classes is kept up to this size."""
SHARE = 3.0
"""By default the counts get noise of this many times the noise that would use up the whole guarantee: about a tenth of it."""
ONE_RECORD = math.nextafter(math.sqrt(2), 2)
"""What one record adds: 1 to right or wrong, and 1 to one cell of the table of classes. Its L2 norm, rounded up."""


@dataclass(frozen=True)
class Evaluation:
    """What is told about the test data: how it was used, figures, and the table of classes (rows: true, columns: predicted)."""

    test: str
    utility: dict[str, float]
    confusion: list[list[int]] | None = None


def default_noise(epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """The noise multiplier of the counts where none is given: they take about a tenth of the guarantee (epsilon, delta)."""
    if not math.isfinite(epsilon):
        raise InvalidInput("test_noise", None, "must be given where training itself has no finite epsilon")
    return SHARE * sigma_analytic(epsilon, delta) * (2 if adjacency is Adjacency.REPLACE_ONE else 1)


def check_use(test: object, use: str | None, noise: float | None) -> str:
    """How `test` may be used; withheld where nothing was declared, none where there is nothing to declare."""
    chosen = (NONE if test is None else WITHHELD) if use is None else check.one_of("test_is", use, USES)
    if test is None and chosen not in (NONE, WITHHELD):
        raise InvalidInput("test_is", chosen, "goes with test, the data to evaluate on")
    if noise is not None and chosen != BILLED:
        raise InvalidInput("test_noise", noise, 'goes with test_is="billed"')
    return chosen


@torch.no_grad()
def measure(training: PrivateTraining, loss: Loss, test: Records | None) -> dict[str, float]:
    """Mean loss and accuracy of the averaged weights on `test`, exactly; nothing if there is none."""
    if test is None:
        return {}
    total, right, counted = 0.0, 0, False
    for outputs, targets in _answers(training, test):
        total += float(loss(outputs, targets).double().sum())
        if not targets.is_floating_point() and outputs.dim() == 2:
            counted, right = True, right + int((outputs.argmax(1) == targets).sum())
    accuracy = {"test_accuracy": right / len(test)} if counted else {}
    return {"test_loss": total / len(test)} | accuracy


@torch.no_grad()
def confusion(training: PrivateTraining, test: Records | None) -> list[list[int]] | None:
    """How often the averaged weights take each true class (row) of `test` for each class (column); None without few classes."""
    counts = None if test is None else _counts(training, test)
    return None if counts is None or len(counts) > MOST_CLASSES else counts.tolist()


def public(training: PrivateTraining, loss: Loss, test: Records) -> Evaluation:
    """The exact figures, of data that was declared public."""
    return Evaluation(PUBLIC, measure(training, loss, test), confusion(training, test))


@torch.no_grad()
def billed(training: PrivateTraining, test: Records) -> Evaluation:
    """Accuracy and the table of classes from noisy counts. Made again after a crash, it releases the same bits.

    Guarantees: one release under its own permit, whose noise is that of the reservation; each record of `test` adds at most
    `ONE_RECORD`, whatever the model answers, and is alone in its batch, so that it cannot change the answers on others; the same
    noise never meets other records.
    """
    folder, noise = training.folder, training.folder.run.evaluation
    if noise is None:
        raise InvalidInput("test_is", BILLED, "the run reserved no evaluation before it read the data")
    table = _counts(training, test, each=1)
    if table is None:
        raise _no_classes()
    right = table.diagonal().sum()
    parts = [torch.stack([right, table.sum() - right])] + ([table.flatten()] if len(table) <= MOST_CLASSES else [])
    _same_records(training, test)
    stream = NoiseStream(Identity(), noise, folder.randomness, STREAM)
    total = Bounded({"counts": torch.cat(parts).double()}, Bound(ONE_RECORD), training.plan.recipe.unit)
    released, _ = stream.release(total, 0, stream.init(total.value), folder.begin_evaluation())
    counts = released.value["counts"]
    held, classes = float(counts[:2].sum()), len(table)
    accuracy = min(max(float(counts[0]) / held, 0.0), 1.0) if held >= 1 else 0.0
    error = noise * ONE_RECORD * math.hypot(1 - accuracy, accuracy) / max(held, 1.0)
    cells = counts[2:].round().clamp(min=0).long().view(classes, classes).tolist() if len(counts) > 2 else None
    return Evaluation(BILLED, {"test_accuracy": accuracy, "test_accuracy_noise": min(error, 1.0)}, cells)


@torch.no_grad()
def require_classes(training: PrivateTraining, test: Records) -> None:
    """Refuse, before the first step, what :func:`billed` could not release after the last one."""
    if _counts(training, Records(test.take(torch.zeros(1, dtype=torch.int64)))) is None:
        raise _no_classes()


def _no_classes() -> Unsupported:
    return Unsupported("a billed evaluation of anything but classes", 'declare the test data public, or test_is="withheld"')


def _same_records(training: PrivateTraining, test: Records) -> None:
    """Refuse other test data than that of an attempt before a crash: the difference of the two would have no noise."""
    randomness = training.folder.randomness
    training.folder.bind("test", "".join(randomness.tag("test", bytes(piece)) for piece in test.content()).encode())


def _counts(training: PrivateTraining, test: Records, each: int = BATCH) -> Tensor | None:
    """Predicted against true classes, exactly; None where there are no classes. A target outside of the classes counts nowhere."""
    table = None
    for outputs, targets in _answers(training, test, each):
        if targets.is_floating_point() or outputs.dim() != 2 or outputs.shape[1] < 2 or targets.shape != outputs.shape[:1]:
            return None
        classes = outputs.shape[1]
        inside = (targets >= 0) & (targets < classes)
        pairs = (targets.long() * classes + outputs.argmax(1))[inside]
        part = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
        table = part if table is None else table + part
    return None if table is None else table.cpu()


def _answers(training: PrivateTraining, test: Records, each: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    """The averaged weights' outputs on `test` with the targets, batch by batch, in evaluation mode."""
    model = training.model
    mode = model.training
    model.eval()
    try:
        with training.averaged():
            for indices in torch.arange(len(test)).split(each):
                features, targets = (t.to(training.device) for t in test.take(indices))
                yield model(features), targets
    finally:
        model.train(mode)
