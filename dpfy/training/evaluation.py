"""Evaluation on held-out records: what is measured, and what of it may leave.

public     the user declares the test data public: figures are published as they are measured
charged     private counts (right, wrong, and each class taken for each class), or sums of losses up
           to a bound, with Gaussian noise, reserved in the ledger like training
withheld   nothing that was measured is written anywhere

Where a person is the unit, a charged figure counts each person once, with the mean over their
held-out records: whatever number of records someone has, they move a count by at most one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpfy.accounting.gaussian import sigma_analytic
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded
from dpfy.data.batch import Batch, leaves, placed
from dpfy.data.config import FIRST
from dpfy.data.lazy import RecordSource
from dpfy.data.owners import Owned, UserSource
from dpfy.data.records import Records
from dpfy.data.users import UserRecords
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.plan.recipe import UNIT, Recipe
from dpfy.training.objective import Objective
from dpfy.training.validation import check_owners, with_owners

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining

PUBLIC, BILLED, WITHHELD, NONE = "public", "billed", "withheld", "none"
KINDS = (
    "say what the test data is: dpfy.PublicTest(data), dpfy.PrivateTest(data) (charged, with noise), "
    "or dpfy.WithheldTest(data)"
)
STREAM = "evaluation"
BATCH = 1000
MOST_CLASSES = 50
"""A table of confused classes is kept up to this size."""
SHARE = 3.0
"""By default the counts get noise of this many times the noise that would use up the whole
guarantee: about a tenth of it.
"""
ONE_RECORD = math.nextafter(math.sqrt(2), 2)
"""What one record or one person adds: 1 to right and wrong together, and 1 to all cells of the
table of classes together. Its L2 norm, rounded up.
"""
GRID = 2.0**24
"""Shares are whole multiples of 1/GRID, so that sums over up to 2^29 records or people are exact."""
CLASSES = Objective()


@dataclass(frozen=True, eq=False)
class PublicTest:
    """Test data that you declare public: what is measured on it is published, exactly.

    Args:
        data: The records, as `fit` takes them. Rows of the training data are refused.

    Example:
        >>> import dpfy, torch
        >>> rows = torch.zeros(10, 3), torch.zeros(10, dtype=torch.int64)
        >>> evaluation = dpfy.PublicTest(rows)   # dpfy.fit(..., evaluation=evaluation)
    """

    use: ClassVar[str] = PUBLIC
    data: object = field(repr=False)

    def __post_init__(self) -> None:
        _require_data(self.data)


@dataclass(frozen=True, eq=False)
class PrivateTest:
    """Private test data: figures are released with noise, and charged to the budget.

    Args:
        data: The records, as `fit` takes them.
        user: Whose each record is, as `fit` takes it: where the plan protects a person with several
            records. Each person then counts once, with the mean over up to as many of their records
            as the plan's unit has, always the first ones.
        noise_multiplier: Gaussian noise of this many times what one record, or one person, adds. By
            default as much as takes about a tenth of the guarantee.
        bound: Release the mean loss, of which each record adds at most this much. By default counts
            of right and wrong answers, and the table of confused classes.

    Raises:
        InvalidInput: `noise_multiplier` or `bound` is not a positive number.

    Guarantees: the evaluation is reserved in the ledger beside the plan before any data is read;
        the guarantee that is printed covers both. A person with any number of records moves the
        counts as much as one record does.

    Example:
        >>> import dpfy, torch
        >>> rows = torch.zeros(10, 3), torch.zeros(10, dtype=torch.int64)
        >>> evaluation = dpfy.PrivateTest(rows, noise_multiplier=20.0)
        >>> of_people = dpfy.PrivateTest(rows, user=torch.arange(10) // 2)
    """

    use: ClassVar[str] = BILLED
    data: object = field(repr=False)
    user: object = field(default=None, repr=False, kw_only=True)
    noise_multiplier: float | None = None
    bound: float | None = None

    def __post_init__(self) -> None:
        _require_data(self.data)
        if self.noise_multiplier is not None:
            check.noise_multiplier(
                "PrivateTest.noise_multiplier",
                check.positive("PrivateTest.noise_multiplier", self.noise_multiplier),
            )
        if self.bound is not None:
            check.positive("PrivateTest.bound", self.bound)


@dataclass(frozen=True, eq=False)
class WithheldTest:
    """Private test data for the caller alone: `Result.utility` holds the figures, and nothing of
    them is written anywhere. They are no part of what the guarantee covers.

    Args:
        data: The records, as `fit` takes them. Without them nothing is measured, and the report says
            that there is test data whose figures are withheld.

    Example:
        >>> import dpfy, torch
        >>> rows = torch.zeros(10, 3), torch.zeros(10, dtype=torch.int64)
        >>> evaluation = dpfy.WithheldTest(rows)
    """

    use: ClassVar[str] = WITHHELD
    data: object = field(default=None, repr=False)


TestData = PublicTest | PrivateTest | WithheldTest


@dataclass(frozen=True)
class TestFigures:
    """What is told about the test data: how it was used, figures, and the table of classes (rows:
    true, columns: predicted).
    """

    test: str
    utility: dict[str, float]
    confusion: list[list[int]] | None = None


def _require_data(data: object) -> None:
    if data is None:
        raise InvalidInput("evaluation", None, "needs data to evaluate on")


def use_of(evaluation: object) -> str:
    """What may be told of the data of `evaluation`; none where there is nothing to evaluate on."""
    if evaluation is None:
        return NONE
    if not isinstance(evaluation, PublicTest | PrivateTest | WithheldTest):
        raise InvalidInput("evaluation", type(evaluation).__name__, KINDS)
    return evaluation.use


def by_unit(test: PrivateTest, recipe: Recipe) -> object:
    """The private test data, grouped by person where the plan protects persons.

    Raises:
        InvalidInput: The records are not grouped as the plan's unit is.

    Guarantees: which records of a person count depends on that person alone; nothing is read.
    """
    unit = recipe.unit
    data = with_owners(test.data, test.user, replace(recipe, draw=UNIT))
    if isinstance(data, Owned):
        check_owners(replace(recipe, draw=UNIT), replace(data, single=False))
        data = replace(data, users=replace(data.users, pick=FIRST), single=False)
    grouped = isinstance(data, Owned | UserRecords)
    each = data.records_each if isinstance(data, Owned | UserRecords) else 1
    if each != unit.most_records:
        rule = (
            f"one {unit.name} owns up to {unit.most_records}: say whose each held-out record is "
            f"(dpfy.PrivateTest(data, user=...))"
        )
        found = f"{each} records in a row" if grouped else "records without owners"
        raise InvalidInput("evaluation", found, rule)
    return data


def default_noise(epsilon: float, delta: float, adjacency: Adjacency) -> float:
    """The noise multiplier of the counts where none is given: they take about a tenth of the
    guarantee (epsilon, delta).
    """
    if not math.isfinite(epsilon):
        raise InvalidInput(
            "PrivateTest.noise_multiplier",
            None,
            "must be given where training itself has no finite epsilon",
        )
    return SHARE * sigma_analytic(epsilon, delta) * (2 if adjacency is Adjacency.REPLACE_ONE else 1)


@torch.no_grad()
def measure(
    training: PrivateTraining, objective: Objective, test: RecordSource | None
) -> dict[str, float]:
    """Mean loss of the averaged weights on `test`, and the share of right answers where there are
    any, exactly.
    """
    if test is None:
        return {}
    total, right, counted = 0.0, 0.0, False
    for batch in _batches(training, test):
        losses, answers = objective.evaluated(training.model, batch)
        total += float(losses.double().sum())
        if (shares := _shares(objective, answers)) is not None:
            counted, right = True, right + float(shares.sum())
    accuracy = {"test_accuracy": right / len(test)} if counted else {}
    return {"test_loss": total / len(test)} | accuracy


@torch.no_grad()
def confusion(
    training: PrivateTraining, test: RecordSource | None, objective: Objective = CLASSES
) -> list[list[int]] | None:
    """How often the averaged weights take each true class (row) of `test` for each class (column);
    None without few classes.
    """
    counts = None if test is None else _counts(training, test, objective)
    return None if counts is None or len(counts) > MOST_CLASSES else counts.tolist()


def public(training: PrivateTraining, objective: Objective, test: RecordSource) -> TestFigures:
    """The exact figures, of data that was declared public."""
    return TestFigures(
        PUBLIC, measure(training, objective, test), confusion(training, test, objective)
    )


@torch.no_grad()
def billed(
    training: PrivateTraining,
    test: RecordSource,
    objective: Objective = CLASSES,
    most: float | None = None,
) -> TestFigures:
    """Accuracy and the table of classes from noisy counts. Made again after a crash, it releases
    the same bits.

    Where a record has several answers (labels, tokens) it adds the share that is right to the one
    count and the rest to the other; a person adds the means over their records. With `most`, the
    bound of a loss, the mean loss is released instead: a record adds its loss, up to the bound, in
    parts of the bound.

    Guarantees: one release under its own permit, whose noise is that of the reservation; each
    record or person of `test` adds at most `ONE_RECORD`, whatever the model answers, and is alone
    in its batch, so that it cannot change the answers on others; the same noise never meets other
    records.
    """
    folder, noise = training.folder, training.folder.promised.evaluation
    if noise is None:
        raise InvalidInput("evaluation", BILLED, "the run reserved none before it read the data")
    table, sums = (
        _answered(training, test, objective)
        if most is None
        else (None, _bounded_losses(training, test, objective, most))
    )
    if sums is None:
        raise _no_classes()
    parts = [sums] + ([table.flatten()] if table is not None and len(table) <= MOST_CLASSES else [])
    _same_records(training, test, most)
    stream = NoiseStream(Identity(), noise, folder.randomness, STREAM)
    total = Bounded(
        {"counts": torch.cat(parts).double()}, Bound(ONE_RECORD), training.plan.recipe.unit
    )
    released, _ = stream.release(total, 0, stream.init(total.value), folder.begin_evaluation())
    counts = released.value["counts"]
    held, classes = float(counts[:2].sum()), math.isqrt(len(counts) - 2)
    accuracy = min(max(float(counts[0]) / held, 0.0), 1.0) if held >= 1 else 0.0
    error = noise * ONE_RECORD * math.hypot(1 - accuracy, accuracy) / max(held, 1.0)
    if most is not None:
        return TestFigures(
            BILLED,
            {
                "test_loss": most * (1 - accuracy),
                "test_loss_noise": most * min(error, 1.0),
                "test_loss_bound": most,
            },
        )
    cells = (
        counts[2:].round().clamp(min=0).long().view(classes, classes).tolist() if classes else None
    )
    return TestFigures(
        BILLED, {"test_accuracy": accuracy, "test_accuracy_noise": min(error, 1.0)}, cells
    )


@torch.no_grad()
def join_collectives(
    training: PrivateTraining, objective: Objective, test: RecordSource, use: str
) -> TestFigures:
    """What a rank other than 0 does while rank 0 evaluates: where it holds a part of the model it
    runs it too, and releases nothing.
    """
    if training.parallel.model_sharded and use == PUBLIC:
        public(training, objective, test)
    elif training.parallel.model_sharded:
        _answered(training, test, objective)
    return TestFigures(use, {})


@torch.no_grad()
def dry_run(
    training: PrivateTraining,
    test: RecordSource,
    objective: Objective,
    use: str,
    most: float | None = None,
) -> None:
    """Run one record through model and loss before the first step: what cannot be measured at the
    end is refused now.
    """
    device = torch.device(training.device)
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        _evaluating(training),
    ):
        batch = placed(_records(test, torch.zeros(1, dtype=torch.int64)), device)
        _, answers = objective.evaluated(training.model, batch)
    if use == BILLED and most is None and _shares(objective, answers) is None:
        raise _no_classes()


def _no_classes() -> Unsupported:
    what = "a charged evaluation of anything but classes, labels or tokens"
    return Unsupported(
        what,
        "say by dpfy.PrivateTest(data, bound=...) how much a loss may count, declare the test data "
        "public (dpfy.PublicTest), or withhold its figures (dpfy.WithheldTest)",
    )


def _same_records(training: PrivateTraining, test: RecordSource, most: float | None) -> None:
    """Refuse other test data or another bound than before a crash: the difference of the two would
    have no noise.
    """
    randomness = training.folder.randomness
    bound = "" if most is None else f" up to {most!r}"
    training.folder.bind(
        "test",
        (
            "".join(randomness.tag("test", bytes(piece)) for piece in _content(test)) + bound
        ).encode(),
    )


def _content(test: RecordSource) -> Iterator[bytes | memoryview]:
    """All that the evaluation reads, as bytes."""
    if isinstance(test, Records):
        yield from test.content()
        return
    for indices in torch.arange(len(test)).split(BATCH):
        yield from Records(leaves(test.take(indices))).content()


def _answered(
    training: PrivateTraining, test: RecordSource, objective: Objective
) -> tuple[Tensor | None, Tensor | None]:
    """The table of classes, where there are any, and how many answers are right and wrong, in
    shares of 1; each record or person alone in its batch.
    """
    table: Tensor | None = None
    right, wrong = torch.zeros(2, dtype=torch.float64)
    for batch in _batches(training, test, 1):
        answers = objective.answers(training.model, batch)
        if (cells := _cells(objective, answers)) is not None:
            share = _laid(cells.cpu().double() / len(leaves(batch)[0]))
            table = share if table is None else table + share
        elif (shares := _shares(objective, answers)) is not None:
            share = _laid(shares.double().mean().cpu())
            right, wrong = right + share, wrong + 1 - share
        else:
            return None, None
    if table is not None:
        right = table.diagonal().sum()
        wrong = table.sum() - right
    return table, torch.stack([right, wrong])


def _laid(share: Tensor) -> Tensor:
    """Shares of 1 on the grid: what one record or person adds never sums to more than 1."""
    return torch.floor(share * GRID) / GRID


def _bounded_losses(
    training: PrivateTraining, test: RecordSource, objective: Objective, most: float
) -> Tensor:
    """What is left of the bound by the losses of all records or people, and the losses, in parts of
    the bound; one that is no number counts whole.
    """
    lost = torch.zeros((), dtype=torch.float64)
    for batch in _batches(training, test, 1):
        losses, _ = objective.evaluated(training.model, batch)
        lost += _laid((losses.double() / most).nan_to_num(1.0).clamp(0, 1).mean().cpu())
    return torch.stack([len(test) - lost, lost])


def _shares(objective: Objective, answers: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """The share of right answers of each row, from 0 to 1."""
    right = objective.named.right
    shares = None if answers is None or right is None else right(*answers)
    return None if shares is None else shares.clamp(0, 1)


def _counts(training: PrivateTraining, test: RecordSource, objective: Objective) -> Tensor | None:
    """Predicted against true classes, exactly; None where there are no classes."""
    table = None
    for batch in _batches(training, test):
        part = _cells(objective, objective.answers(training.model, batch))
        if part is None:
            return None
        table = part if table is None else table + part
    return None if table is None else table.cpu()


def _cells(objective: Objective, answers: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """How often each true class (row) is taken for each class (column) in one batch; None where
    there are no classes. A target outside of the classes counts nowhere.
    """
    pairs = objective.named.pairs
    if pairs is None or answers is None or (found := pairs(*answers)) is None:
        return None
    predicted, true, classes = found
    inside = (true >= 0) & (true < classes)
    cells = torch.bincount((true * classes + predicted)[inside], minlength=classes**2)
    return cells.view(classes, classes)


def _batches(training: PrivateTraining, test: RecordSource, each: int = BATCH) -> Iterator[Batch]:
    """The batches of `test` in order, while the model holds the averaged weights and is in
    evaluation mode.
    """
    with _evaluating(training), training.averaged():
        for indices in torch.arange(len(test)).split(each):
            yield placed(_records(test, indices), training.device)


def _records(test: RecordSource, indices: Tensor) -> Batch:
    """The records at `indices`; of people their own records, without the places that hold none."""
    batch = test.take(indices)
    if not isinstance(test, UserRecords | UserSource):
        return batch
    *fields, real = batch
    kept = fields[0] if len(fields) == 1 and isinstance(fields[0], dict) else tuple(fields)
    return pytree.tree_map_only(Tensor, lambda field: field[real.to(field.device)], kept)


@contextmanager
def _evaluating(training: PrivateTraining) -> Iterator[None]:
    """The model in evaluation mode; then every module in its own mode again."""
    modes = {module: module.training for module in training.model.modules()}
    training.model.eval()
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was
