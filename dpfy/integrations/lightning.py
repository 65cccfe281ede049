"""Lightning with a private loop inside: the strategy makes the steps of a plan, and `training_step`
returns one loss for each example.

    trainer = lightning.Trainer(strategy=PrivateStrategy(plan, "runs/x", val_is="public"),
    max_steps=plan.recipe.steps) trainer.fit(module, train_loader, val_loader)

What Lightning calls a batch is a logical batch of the plan: it hands around a `BatchTurn`, and the
strategy draws the records when the turn is taken. So nothing is fetched ahead, callbacks see no
record, and `global_step` counts the steps that are charged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfy.core import check, errors
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.integrations import adapter
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.training.integrity import state
from dpfy.training.loop import PrivateTraining
from dpfy.training.runtime import Runtime
from dpfy.training.schedulers import Every
from dpfy.training.step import Update
from dpfy.training.validation import NARROW

try:
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError:
    raise errors.missing("Lightning", "lightning") from None

KEPT = "dpfy"
PUBLIC = "public"
UNSET_EPOCHS = (None, -1, 1000)
"""The max_epochs of a Trainer who was not given any."""
SEARCHES = {"LearningRateFinder", "BatchSizeFinder"}
PER_EXAMPLE = (
    'return one loss for each example from training_step: compute it with reduction="none"'
)


@dataclass(frozen=True)
class BatchTurn:
    """Stands for one logical batch; the records are drawn by the strategy."""


@dataclass(frozen=True)
class BatchTurns:
    """As many turns as the plan has steps in an epoch."""

    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[BatchTurn]:
        return (BatchTurn() for _ in range(self.steps))


class PrivateStrategy(SingleDeviceStrategy):
    """A strategy for one device that trains by `plan`; `run` is where the run folder lies.

    `training_step` stays as it is, except that it returns one loss for each example (or a dict with
    them as "loss"). What it logs is withheld: it comes from private records. `val_is="public"`
    declares the validation data public; without it none is validated on. ``trainer.fit(...,
    ckpt_path=...)`` goes on with an unfinished run, to the same bits. Optimizer and schedulers of
    `configure_optimizers` are the run's: schedulers with interval "epoch" are stepped once in an
    epoch of the plan.

    Guarantees: those of :class:`PrivateTraining`. The training data is drawn by the plan alone,
    whatever sampler its loader has.
    """

    def __init__(
        self,
        plan: Plan,
        run: str | Path | Run,
        *,
        device: str | torch.device | None = None,
        runtime: Runtime | None = None,
        update: Update | None = None,
        val_is: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"), **settings)
        if val_is is not None:
            check.one_of("val_is", val_is, [PUBLIC])
        self.plan, self.update, self.val_is = plan, update, val_is
        self.run = Run.of(run)
        self.runtime = replace(runtime or Runtime(), device=str(self.root_device))
        self.training: PrivateTraining | None = None
        self._loader: Any = None
        self._others: list[Any] = []
        self._held: dict[str, Any] | None = None

    # --- what Lightning calls before it trains
    # ---------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Refuse what contradicts the plan, before anything is reserved."""
        self._loader, self._others = None, []
        if self._fitting(trainer):
            _check_trainer(trainer, self.plan)
            trainer.fit_loop.epoch_loop.max_steps = self.plan.recipe.steps
            if trainer.enable_validation and self.val_is != PUBLIC:
                rule = (
                    'say PrivateStrategy(..., val_is="public") if the validation data is public; '
                    "else give none"
                )
                raise InvalidInput("val_is", self.val_is, rule)
        super().setup(trainer)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader is kept for its data, and turns are handed out in its place; others
        pass.
        """
        trainer = self._trainer
        if not self._fitting(trainer):
            return dataloader
        training = trainer.fit_loop._combined_loader is None and not trainer.sanity_checking
        if training:
            self._loader = dataloader
        else:
            self._others.append(dataloader)
        if self._loader is not None and any(
            adapter.share_records(self._loader, other) for other in self._others
        ):
            raise InvalidInput(
                "val_dataloaders",
                "the training data",
                "must be other data: what is measured on it is published",
            )
        return BatchTurns(self._each) if training else dataloader

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Lightning's checkpoint; it must be one of a private run if training goes on from it."""
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        if self._fitting(self._trainer):
            self._held = loaded.get(KEPT)
            if self._held is None:
                raise InvalidInput(
                    "ckpt_path",
                    Path(checkpoint_path).name,
                    "is no checkpoint of a private run: load its weights before fit",
                )
            loaded["lr_schedulers"] = []  # the run restores them, from its own checkpoint
        return loaded

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizer and schedulers are restored by the run, from its own checkpoint."""
        return False

    def on_train_start(self) -> None:
        """Open the run, and make the steps that Lightning's checkpoint has and the run's own has
        not: they were made before.
        """
        assert self.lightning_module is not None
        run = replace(
            self.run, checkpoint_every=math.inf, resume=self.run.resume or self._held is not None
        )
        if self._held is not None and not Path(run.path).is_dir():
            raise InvalidInput(
                "ckpt_path",
                "a checkpoint of a private run",
                f"there is no run to resume in {run.path}",
            )
        if len(self.optimizers) != 1:
            raise Unsupported(
                f"{len(self.optimizers)} optimizers", "give one: a plan has one kind of step"
            )
        self.training = training = PrivateTraining(
            self.lightning_module,
            self.optimizers[0],
            self._loader,
            self.plan,
            run,
            runtime=self.runtime,
            update=self.update,
            scheduler=[self._scheduled(config) for config in self.lr_scheduler_configs],
        )
        training.__enter__()
        self._random = state.generators(training.device)
        self._step = training.captured(self._losses_of())
        self._batches = iter(training.batches())
        target = training.steps_done if self._held is None else int(self._held["steps"])
        if training.steps_done > target:
            rule = (
                f"is of step {target}, the run stands at {training.steps_done}: resume from its "
                f"latest checkpoint"
            )
            raise InvalidInput("ckpt_path", "an earlier checkpoint", rule)
        self._due = target
        self._hush(True)
        self._make(target)
        self._stop_at_the_end(training)

    # --- a step
    # -------------------------------------------------------------------------------------------------------------------------  # noqa: E501

    def training_step(self, turn: Any, *rest: Any) -> Tensor:
        """Make one step of the plan; what goes back to Lightning is a constant."""
        if not isinstance(turn, BatchTurn) or self.training is None:
            raise Unsupported(
                "a training batch that the plan did not draw",
                "leave reload_dataloaders_every_n_epochs and the loaders alone",
            )
        self._due = min(self._due + 1, self.plan.recipe.steps)
        self._make(self._due)
        self._stop_at_the_end(self.training)
        return torch.zeros((), device=self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Nothing: the step was made."""
        return closure_loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Take the turn; the run lets the optimizer move at the logical boundary."""
        return closure()

    def _make(self, due: int) -> None:
        """Make steps until `due` are made. What Lightning does in between, validation say, leaves
        the run's random numbers alone.
        """
        training = self.training
        assert training is not None
        state.set_generators(self._random, training.device)
        while training.steps_done < due and (batch := next(self._batches, None)) is not None:
            self._step(batch)
        self._random = state.generators(training.device)

    def _stop_at_the_end(self, training: PrivateTraining) -> None:
        if training.steps_done == training.last_step:
            self._trainer.should_stop = True

    def _losses_of(self) -> Callable[[Any], Tensor]:
        """The module's `training_step` as a function of a physical batch."""
        module: Any = self.lightning_module
        user_step, context, transferred = (
            module.training_step,
            self.precision_plugin.train_step_context,
            super().batch_to_device,
        )
        indexed, training = len(inspect.signature(user_step).parameters) > 1, self.training
        assert training is not None

        def losses(batch: Any) -> Tensor:
            batch = transferred(module._on_before_batch_transfer(batch))
            with context():
                found = (
                    user_step(batch, training.steps_done % self._each)
                    if indexed
                    else user_step(batch)
                )
            found = found["loss"] if isinstance(found, dict) else found
            if not isinstance(found, Tensor) or found.dim() != 1:
                raise InvalidInput(
                    "training_step",
                    "a scalar" if isinstance(found, Tensor) else type(found).__name__,
                    PER_EXAMPLE,
                )
            return found

        return losses

    # --- validation, checkpoints, the end
    # ---------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """What is measured on public data may be logged."""
        self._hush(False)

    def on_validation_end(self) -> None:
        """Record what was measured on public data, and give a plateau its metric."""
        training = self.training
        if training is None or self._trainer.sanity_checking or not training.boundary:
            return
        self._hush(True)
        state.set_generators(self._random, training.device)
        found = adapter.finite_metrics(self._trainer.callback_metrics)
        if found:
            training.record(source="public", **found)
        for config in self.lr_scheduler_configs:
            if not config.reduce_on_plateau:
                continue
            if (name := adapter.metric_name(str(config.monitor))) not in found:
                rule = f"must be among the metrics of the validation: {', '.join(found)}"
                raise InvalidInput("monitor", str(config.monitor), rule)
            training.schedule(source="public", **{name: found[name]})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Lightning's checkpoint, and then the run's own: where the second is missing, a resumed
        run makes its steps again.
        """
        live = self.training is not None and not self.training.folder.finished
        if self.training is not None:
            checkpoint[KEPT] = {"steps": self.training.steps_done}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if live and self.training is not None:
            state.set_generators(self._random, self.training.device)
            self.training.save()

    def on_train_end(self) -> None:
        """End the run: complete, or stopped by a callback. One that Lightning left otherwise stays
        unfinished.
        """
        training = self.training
        self._hush(False)
        if training is None or training.folder.finished:
            return
        if training.steps_done == training.last_step or self._trainer.should_stop:
            adapter.finish(training)
        training.__exit__(None, None, None)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the run as an error leaves the block of a private training."""
        self._hush(False)
        if (
            self.training is not None
            and self.training.isolation is not None
            and not self.training.folder.finished
        ):
            self.training.__exit__(type(exception), exception, exception.__traceback__)

    # --- small things
    # -----------------------------------------------------------------------------------------------------------------

    def _hush(self, wanted: bool) -> None:
        """Withhold what the module logs while it trains: in `training_step`, and of what it kept
        from there.
        """
        for name in ("log", "log_dict"):
            vars(self.lightning_module).pop(name, None)
            if wanted:
                vars(self.lightning_module)[name] = _withheld

    def _scheduled(self, config: Any) -> Any:
        """A scheduler as the run steps it. Lightning steps it no more."""
        every = config.frequency * (self._each if config.interval == "epoch" else 1)
        config.interval = "private"
        return config.scheduler if config.reduce_on_plateau else Every(config.scheduler, every)

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _each(self) -> int:
        """Steps in an epoch of the plan."""
        return adapter.steps_per_epoch(self.plan.recipe)

    @staticmethod
    def _fitting(trainer: Any) -> bool:
        return str(getattr(trainer.state.fn, "value", "")) == "fit"


def _check_trainer(trainer: Any, plan: Plan) -> None:
    """Refuse settings of a Trainer that contradict the plan, in one line."""
    steps, precision = plan.recipe.steps, str(trainer.precision)
    wrong = {
        "gradient_clip_val": (
            trainer.gradient_clip_val,
            (None, 0, 0.0),
            "the plan's clip norm bounds each example: leave it out",
        ),
        "overfit_batches": (
            trainer.overfit_batches,
            (0, 0.0),
            "the plan draws the batches: leave it out",
        ),
        "limit_train_batches": (
            trainer.limit_train_batches,
            (1.0,),
            "the plan has its steps: leave it out",
        ),
        "max_steps": (
            trainer.max_steps,
            (-1, steps),
            f"the plan has {steps} steps: give max_steps={steps}",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            (0,),
            "a run has one set of records: leave it out",
        ),
    }
    for name, (value, allowed, rule) in wrong.items():
        if value not in allowed:
            raise InvalidInput(name, value, rule)
    if trainer.max_epochs not in UNSET_EPOCHS:
        adapter.check_epochs("max_epochs", trainer.max_epochs, plan.recipe)
    adapter.check_accumulation(
        "accumulate_grad_batches",
        trainer.accumulate_grad_batches,
        "runtime=Runtime(max_physical_batch=...)",
    )
    if precision.startswith("16"):
        raise Unsupported(
            f"precision={precision!r}", f'{NARROW}; in Lightning precision="bf16-mixed"'
        )
    for callback in trainer.callbacks:
        if found := {kind.__name__ for kind in type(callback).__mro__} & SEARCHES:
            raise Unsupported(
                f"{found.pop()} in private training",
                "what it tries on the data has no charge: choose on public data",
            )
    if not trainer.lightning_module.automatic_optimization:
        raise Unsupported(
            "manual optimization", "leave automatic_optimization True: the run makes the steps"
        )


def _withheld(*given: Any, **settings: Any) -> None:
    """What stands for self.log while the run trains."""
    name = given[0] if given and isinstance(given[0], str) else "log_dict"
    errors.warn(
        f"self.log({name!r}) is withheld: while training it comes from private records; log in "
        f"validation_step"
    )
