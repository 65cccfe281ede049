"""Level one: train in one call, with a progress bar and a finished run folder at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfy import accounting
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.guarantee import Guarantee
from dpfy.core.ledger import Ledger
from dpfy.data.batch import Batch
from dpfy.data.given import admitted, as_source
from dpfy.data.lazy import LazyRecords, RecordSource
from dpfy.data.owners import Owned
from dpfy.data.users import UserRecords
from dpfy.plan.recipe import Plan
from dpfy.report.words import is_absent
from dpfy.runs.dataset import Dataset
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run, quiet
from dpfy.training import metrics
from dpfy.training.evaluation import (
    PUBLIC,
    WITHHELD,
    PrivateTest,
    TestData,
    TestFigures,
    billed,
    by_unit,
    default_noise,
    dry_run,
    join_collectives,
    measure,
    public,
    use_of,
)
from dpfy.training.integrity import overlap
from dpfy.training.load import ReleasedModel
from dpfy.training.loop import PrivateTraining
from dpfy.training.losses import Loss
from dpfy.training.metrics import Rule, check_rule, spent
from dpfy.training.objective import BatchLosses, Objective
from dpfy.training.parallel.read_only_run import ReadOnlyRun, opened
from dpfy.training.parallel.world import World
from dpfy.training.per_record import PerRecord
from dpfy.training.run import TRAINING, TrainingClaims, TrainingRun, complete
from dpfy.training.runtime import Runtime
from dpfy.training.step import Update, adopt
from dpfy.training.table import PlanTerms, planned, published, records_of
from dpfy.training.validation import check_parts, check_trained, with_owners

BEFORE = "finished before"


@dataclass(frozen=True, repr=False)
class Result(Released):
    """A finished training: its run, how well the released model does on the test data, and how long
    it took. The result is called as the model is.

    Args:
        run: The run folder.
        model: The model with the released weights.
        utility: What was measured on the test data.
        steps: How many noisy steps were made.
        seconds: How long it took.
        engine: What computed the clipped sums.
    """

    model: nn.Module = field(repr=False)
    utility: dict[str, float]
    steps: int
    seconds: float
    engine: str
    _guarantee: Guarantee = field(repr=False)
    _delta: float

    @property
    def guarantee(self) -> Guarantee:  # type: ignore[override]
        """The guarantee of everything that the run's ledger holds."""
        return self._guarantee

    @property
    def epsilon(self) -> float:
        """What the whole run costs at `delta`: an upper bound."""
        return self._guarantee.epsilon(self._delta)

    @property
    def delta(self) -> float:
        """The delta at which `epsilon` holds."""
        return self._delta

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives."""
        return self.model(*inputs, **named)

    def _told(self) -> dict[str, Any]:
        return {**self.utility, "steps": self.steps, "seconds": self.seconds, "engine": self.engine}


def fit(
    model: nn.Module,
    train: object,
    *,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: float | None = None,
    clip_norm: float = 1.0,
    records: int | None = None,
    loss: str | Loss | PerRecord = "cross_entropy",
    labels: str | None = None,
    user: object = None,
    objective: BatchLosses | None = None,
    run: str | Path | Run | TrainingRun | ReadOnlyRun | None = None,
    evaluation: TestData | None = None,
    runtime: Runtime | None = None,
    update: Update | None = None,
    scheduler: object = None,
    stop: Rule | None = None,
    world: World | None = None,
    progress: Progress = quiet,
) -> Result:
    """Train `model` privately on `train` and leave a verified run folder.

    Afterwards the model has the released weights.

        net = dpfy.fit(net, people, optimizer=opt, epsilon=3.0, epochs=10, batch_size=256)

    Give a `plan`, or what it is made of: `epsilon`, `delta`, `epochs` or `steps`, `batch_size` and
    `clip_norm`. Where the number of units is not public it is counted first, in a run of its own,
    with a twentieth of epsilon.

    Batches are tuples or dicts. The last field of a tuple is the target and the others go to the
    model. Of a dict the field `labels` is the target (by default the one called labels, label,
    targets, target or y) and the others go to the model by name.

    A finished run that is resumed returns its result and gives the model the released weights.

    Args:
        model: Your model.
        train: A `dpfy.Dataset`, or records in any form that training reads.
        optimizer: Any optimizer of the parameters of the model.
        plan: What is done to the data, and with how much noise.
        epsilon, delta, epochs, steps, batch_size, clip_norm: What the plan is made of, without one.
        records: The public number of units.
        loss: The name of a loss ("cross_entropy", "mse", "l1", "huber", "bce", "multi_label",
            "tokens", "next_token"; outputs with `.logits` are understood), a function of (outputs,
            targets) to one loss for each row, or a function of (model, record) to the loss of one
            record, which cannot see any other (:func:`dpfy.per_record`).
        labels: The field of a dict that is the target.
        user: Whose each record is: a whole number or word for each, the name of the field that has
            it, or :class:`dpfy.Users`. The unit of the plan says how many records of a user are
            used (``unit=dpfy.Unit("user", 8)``). Users are then sampled, clipped and protected as a
            whole.
            Records grouped before (:func:`dpfy.by_user`) need no `user`.
        objective: Instead of `loss`, a function of (model, batch) to one loss for each row.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.
        evaluation: The test data, and what is published about it. :class:`dpfy.PublicTest`
            publishes exact figures. :class:`dpfy.PrivateTest` has private records: counts of right
            and wrong answers, or a bounded mean loss, are released with noise and charged beside
            the plan.
            :class:`dpfy.WithheldTest` writes nothing: `Result.utility` is for the caller alone, and
            no part of what the guarantee covers.
        runtime: How a step is computed.
        update: What becomes of the noisy gradient.
        scheduler: A torch scheduler, stepped after each step.
        stop: Ends the run early, where the plan has points for that (``dpfy.dpsgd(...,
            stopping=5)``): a function of the metrics of every point so far that returns True to end
            the run (:class:`dpfy.training.Plateau`). It must look at public figures
            and released values only.
        world: The processes that train together.
        progress: Called with what is being done, and which share of it
            (:class:`dpfy.runs.run.Progress`).

    Returns:
        The result: `model`, `epsilon`, `guarantee`, `utility` and the run folder.

    Raises:
        InvalidInput: An argument does not fit its rule.
        Unsupported: The model or the loss mixes examples, or has a part that no rule covers.
        BudgetExceeded: The ledger of the data set has too little left.

    Guarantees: those of :class:`PrivateTraining`. Where the plan protects persons, each person
    counts once in the evaluation, and who owns what is read after the reservation. The guarantee
    printed covers training and evaluation.

    Example:
        >>> import torch
        >>> import dpfy
        >>> x, y = torch.randn(100, 4), torch.randint(0, 2, (100,))
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> result = dpfy.fit(
        ...     model, (x, y), optimizer=optimizer, records=100, epsilon=3.0, delta=1e-5, steps=3,
        ...     batch_size=20,
        ... )
        >>> result.epsilon <= 3.0
        True
    """
    terms = PlanTerms(epsilon, delta, epochs, steps, batch_size, clip_norm)
    if isinstance(train, Dataset) or plan is None:
        held = Dataset.of(train, records=records)
        given_run = run if isinstance(run, TrainingRun | ReadOnlyRun) else held.run(run)
        rest: dict[str, Any] = {
            "optimizer": optimizer,
            "loss": loss,
            "labels": labels,
            "user": user,
            "objective": objective,
            "evaluation": evaluation,
            "runtime": runtime,
            "update": update,
            "scheduler": scheduler,
            "stop": stop,
            "world": world,
            "progress": progress,
        }
        return _fit_dataset(model, held, plan, terms, given_run, rest)
    terms.refuse()
    check_parts(model, optimizer, plan)
    check_rule(stop, plan)
    train = with_owners(train, user, plan.recipe)
    aim = Objective(loss, labels, objective)
    aim.check("train", train)
    runtime = runtime or Runtime()
    if aim.record is not None:
        aim.record.check(model, admitted(train), runtime.engine, runtime.graph)
        runtime = runtime if aim.record.vectorised else replace(runtime, engine="loop")
    use, test = use_of(evaluation), None if evaluation is None else evaluation.data
    charged = isinstance(evaluation, PrivateTest)
    if isinstance(evaluation, PrivateTest):
        test = by_unit(evaluation, plan.recipe)
    aim.check("evaluation", test)
    given = (
        None if test is None else admitted(test)
    )  # read below, where all that is charged is reserved
    if (isinstance(given, UserRecords | Owned) and not charged) or (
        isinstance(given, LazyRecords) and given.rows_each > 1
    ):
        raise InvalidInput(
            "evaluation",
            "several records or views a row",
            "must be records one by one (UserRecords.alone gives a user's)",
        )
    started, bound, noise = time.monotonic(), None, None
    if isinstance(evaluation, PrivateTest):
        bound, noise = evaluation.bound, _billed(run, plan, evaluation.noise_multiplier)
    asked = run if isinstance(run, TrainingRun | ReadOnlyRun) else Run.of(run)
    world = World.joined() if world is None else world
    if (
        done := world.rank0_first(
            "what was finished before", lambda: finished(model, asked, plan, noise)
        )
    ) is not None:
        return done
    training = PrivateTraining(
        model,
        optimizer,
        train,
        plan,
        asked,
        runtime=runtime,
        update=update,
        scheduler=scheduler,
        world=world,
        evaluation=noise,
    )
    if training.schedules.waiting:
        raise Unsupported(
            "ReduceLROnPlateau in fit",
            "use PrivateTraining, and training.schedule(source=..., metric=...) where it is "
            "measured",
        )
    with training:
        held_out = None if given is None else as_source(given)
        if held_out is not None:
            if use == PUBLIC:
                overlap.require_apart(
                    "evaluation", training.records, held_out, training.folder.randomness
                )
            dry_run(training, held_out, aim, use, bound)
        model.train()
        noted = metrics.last_step(training.folder.path)
        if aim.record is not None and training.isolation is not None:
            training.isolation.isolate(aim.record.words)
        step = training.captured(aim.losses_of(model, training.records))
        for batch in _noting(training, noted, aim, held_out if use == PUBLIC else None, stop):
            step(batch)
            progress("training", training.steps_done / plan.recipe.steps)
        found = _evaluated(training, aim, held_out, use, bound)
        utility = world.broadcast_object("the evaluation", lambda: found.utility) or measure(
            training, aim, held_out
        )
        return ended(training, found, utility, model, started)


def ended(
    training: PrivateTraining,
    found: TestFigures,
    utility: dict[str, float],
    model: nn.Module,
    started: float,
) -> Result:
    """The result of a training whose steps are done: its run ends with what was measured, and the
    model gets the weights that are released.
    """
    folder = training.finish_measured(found.utility, found.confusion, found.test)
    guarantee = training.guarantee()
    adopt(training.average, training.model)
    seconds = time.monotonic() - started
    steps, engine = training.steps_done, training.engine_reason
    delta = training.plan.delta
    return Result(folder, model, utility, steps, seconds, engine, guarantee, delta)


def _fit_dataset(
    model: nn.Module,
    data: Dataset,
    plan: Plan | None,
    terms: PlanTerms,
    run: Run | TrainingRun | ReadOnlyRun,
    rest: dict[str, Any],
) -> Result:
    """`fit` on a data set: its plan, where none is given; then its records, which are read when all
    is reserved.
    """
    check_trained(model, rest["optimizer"])
    world = rest["world"] = World.joined() if rest["world"] is None else rest["world"]
    told: dict[str, Any] = {}
    if plan is not None:
        terms.refuse()
    elif isinstance(run, TrainingRun | ReadOnlyRun):
        plan = run.plan
    else:
        asked = run
        plan, told = world.broadcast_object("the plan", lambda: planned(data, terms, asked))
    check_parts(model, rest["optimizer"], plan)
    lazy = not data.described and isinstance(admitted(data.source), LazyRecords | Owned)
    if lazy or rest["user"] is not None:
        return fit(model, data.source, plan=plan, run=run, **rest)
    evaluation, noise = rest["evaluation"], None
    if isinstance(run, Run):
        if isinstance(evaluation, PrivateTest):
            noise = _billed(run, plan, evaluation.noise_multiplier)
        done = world.rank0_first(
            "what was finished before", lambda: finished(model, run, plan, noise)
        )
        if done is not None:
            return done
    folder = opened(world, run, plan, TrainingClaims(evaluation=noise))
    with folder:
        schema = published(data)
        if schema is not None and isinstance(folder, TrainingRun):
            folder.write("schema.toml", schema.to_toml().encode())
        folder.tell(TRAINING, **told)
        return fit(model, records_of(data, plan), plan=plan, run=folder, **rest)


def _billed(
    run: str | Path | Run | TrainingRun | ReadOnlyRun | None, plan: Plan, noise: float | None
) -> float | None:
    """The noise of the evaluation, to be reserved before the data is read; None where the opened
    folder has reserved it.
    """
    if isinstance(run, TrainingRun | ReadOnlyRun):
        if run.promised.evaluation is None:
            raise InvalidInput(
                "run",
                "a folder without a charged evaluation",
                "give evaluation= when the folder is opened: TrainingRun(run, plan, evaluation=...)",
            )
        return None
    if noise is None:
        return default_noise(plan.epsilon, plan.delta, plan.recipe.adjacency)
    return noise


def _evaluated(
    training: PrivateTraining,
    aim: Objective,
    test: RecordSource | None,
    use: str,
    most: float | None,
) -> TestFigures:
    """What is told about the released model on `test`."""
    if test is None or use == WITHHELD:
        return TestFigures(use, {})
    if not training.world.first:
        return join_collectives(training, aim, test, use)
    return public(training, aim, test) if use == PUBLIC else billed(training, test, aim, most)


def finished(
    model: nn.Module, run: object, plan: Plan, evaluation: float | None = None
) -> Result | None:
    """The result of a run that is resumed though it is finished, and the model with its released
    weights; None if it goes on.
    """
    if not isinstance(run, Run) or not complete(run, plan, TrainingClaims(evaluation=evaluation)):
        return None
    folder = Path(run.path)
    released = ReleasedModel.read(folder)
    released.into(model)
    card, ledger, told = released.card, Ledger.read(folder / "ledger.jsonl"), released.told
    guarantee = ledger.guarantee(
        accounting.accountant(plan.accountant), tuple(card["caveats"]), card["setting"]["model"]
    )
    utility = {} if is_absent(told["utility"]) else told["utility"]
    return Result(folder, model, utility, told["steps_done"], 0.0, BEFORE, guarantee, plan.delta)


def _noting(
    training: PrivateTraining,
    noted: int,
    aim: Objective,
    test: RecordSource | None,
    stop: Rule | None,
) -> Iterator[Batch]:
    """The batches; between steps, the marked ones leave a row in metrics.jsonl, also where a crash
    lost it, and `stop` is asked.
    """
    plan = training.plan
    points = () if plan.recipe.stopping is None or stop is None else plan.recipe.stopping.early
    epsilons = spent(plan) | {point: plan.epsilon_after(point) for point in points}
    asked = 0

    def ends() -> bool:
        """Leave the row of this step, once; whether the rule ends the run here."""
        nonlocal noted, asked
        done = training.steps_done
        if done > noted:
            if done in epsilons:
                training._note(epsilon=epsilons[done], **measure(training, aim, test))
            noted = done
        if (
            stop is None
            or done not in points
            or done <= asked
            or training.last_step < plan.recipe.steps
        ):
            return False
        asked = done
        rows = metrics.rows(training.folder.path)
        return bool(
            training.world.broadcast_object(
                "the end of the run", lambda: bool(stop([r for r in rows if r["step"] in points]))
            )
        )

    if ends():
        return
    for batch in training.batches():
        yield batch
        if ends():
            return
    ends()
