"""Hugging Face's Trainer with a private loop inside: the same script, the same arguments, and a
plan.

    trainer = PrivateTrainer(model=model, args=args, train_dataset=train, data_collator=collator,
    plan=plan) trainer.train()

The run is level 2 (:class:`dpfy.PrivateTraining`); Trainer keeps what it is good at: optimizer and
scheduler of its arguments, callbacks, evaluation, logging, saving. Nothing of a training batch is
logged: no loss, no norm, no count of tokens.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core import errors
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.given import lazy
from dpfy.data.lazy import LazyRecords
from dpfy.integrations import adapter, trainer
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import complete
from dpfy.training.runtime import Runtime
from dpfy.training.step import Update

try:
    from transformers import Trainer, TrainerState
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import SaveStrategy, TrainOutput
except ImportError:
    raise errors.missing("the Hugging Face Trainer", "transformers") from None

KEPT = "trainer"


class PrivateTrainer(Trainer):
    """A Trainer whose training is private: `plan` says how, `run` where the run folder lies (beside
    `output_dir` by default).

    The plan decides batches, steps and clipping; per_device_train_batch_size is the most examples
    at once. `eval_is="public"` declares the evaluation data public: without it nothing is evaluated
    while training. ``train(resume_from_checkpoint=True)`` goes on with an unfinished run, to the
    same bits. A callback that stops training ends the run, charged as the plan says. A loss of your
    own: override `compute_losses`, or give a compute_loss_func, which return one loss for each
    example.

    Guarantees: those of :class:`PrivateTraining`. What is logged, saved and pushed is a function of
    the released weights, the arguments and data that was declared public. max_grad_norm is not
    applied: the plan's clip norm bounds each example.
    """

    model: Any
    args: Any
    optimizer: Any

    def __init__(
        self,
        *given: Any,
        plan: Plan,
        run: str | Path | Run | None = None,
        runtime: Runtime | None = None,
        update: Update | None = None,
        eval_is: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*given, **settings)
        trainer.check(self.args, plan)
        if (
            type(self).compute_loss is not Trainer.compute_loss
            or type(self).training_step is not PrivateTrainer.training_step
        ):
            raise Unsupported(
                "a compute_loss or training_step of your own",
                "override compute_losses(model, inputs): one loss for each example",
            )
        self.plan, self.update, self.eval_is = plan, update, eval_is
        self.runtime = trainer.runtime(self.args, runtime)
        beside = f"{os.path.abspath(self.args.output_dir)}-dpfy"
        self.private_run = Run.of(beside if run is None else run)
        self.training: PrivateTraining | None = None
        self._computing = False
        self.args.restore_callback_states_from_checkpoint = (
            True  # a resumed run repeats what callbacks do
        )
        self._require_apart()
        asked = (
            str(getattr(self.args.eval_strategy, "value", self.args.eval_strategy)) != "no"
            or self.args.eval_on_start
        )
        trainer.require_public(self, None, asked)

    def compute_losses(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """One loss for each example of a physical batch, from the model's logits;
        compute_loss_func(outputs, labels) where it was given.
        """
        fields, labels = trainer.inputs_for(model, inputs)
        mixed = (
            torch.autocast(self.args.device.type, dtype=torch.bfloat16)
            if self.args.bf16
            else nullcontext()
        )
        with mixed:
            outputs = model(**fields)
        if self.compute_loss_func is not None:
            return self.compute_loss_func(outputs, labels.get("labels", labels))
        return trainer.of_model(model)(outputs, labels)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: object = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train by the plan; a finished run leaves model, report and reports in the run folder, and
        the report in the model report.
        """
        if trial is not None:
            raise Unsupported(
                "hyperparameter search inside of a private run",
                "each trial is a release: make a run for each of them",
            )
        trainer.check(self.args, self.plan)
        run = self._run_for(resume_from_checkpoint)
        started = time.time()
        if self.args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                self.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
            )
        if complete(run, self.plan):
            raise InvalidInput(
                "resume_from_checkpoint",
                str(run.path),
                "is a finished run: load its model (dpfy.load), or begin another",
            )
        self.is_in_train = True
        try:
            with self._private(run) as self.training:
                self._loop(self.training, ignore_keys_for_eval)
                adapter.finish(self.training)
                epsilon = self.training.guarantee().epsilon(self.plan.delta)
        finally:
            self.is_in_train = False
        return self._finished(started, epsilon)

    def training_step(self, *given: Any, **settings: Any) -> Tensor:
        """Refused: the run computes gradients, example by example."""
        raise Unsupported(
            "training_step in private training", "call train(): the run clips, sums and adds noise"
        )

    def evaluate(self, eval_dataset: Any = None, *given: Any, **settings: Any) -> dict[str, float]:
        """Trainer's, with the averaged weights; the model and torch's generators are left as they
        were.
        """
        trainer.require_public(self, eval_dataset, self.is_in_train)
        with trainer.aside(self):
            return super().evaluate(eval_dataset, *given, **settings)

    def predict(self, test_dataset: Any, *given: Any, **settings: Any) -> Any:
        """Trainer's, as `evaluate`; while training on other data than the run's."""
        if self.is_in_train:
            trainer.require_apart(self, test_dataset)
        with trainer.aside(self):
            return super().predict(test_dataset, *given, **settings)

    def log(self, logs: dict[str, float], *given: Any, **settings: Any) -> None:
        """Trainer's. What is logged while losses are computed is withheld; a loss of the batch is
        refused where it is recognised.
        """
        if self._computing:
            words = (
                f"log({next(iter(logs), '')!r}) is withheld: where losses are computed it comes "
                f"from private records"
            )
            errors.warn(f"{words}; log in an evaluation")
            return
        if self.training is not None:
            self.training.require_public(
                {adapter.metric_name(k): v for k, v in logs.items() if isinstance(v, int | float)}
            )
        super().log(logs, *given, **settings)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's, with the privacy of a finished run in its model report."""
        super().save_model(output_dir, _internal_call)
        self._describe(output_dir)

    def create_model_card(self, *given: Any, **settings: Any) -> None:
        """Trainer's, with the privacy of a finished run."""
        super().create_model_card(*given, **settings)
        self._describe(self.args.output_dir)

    def _loop(self, training: PrivateTraining, ignore: list[str] | None) -> None:
        """The private loop, with Trainer's callbacks, evaluation, logging and saving at the logical
        boundaries.
        """
        self._begin(training)
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start and training.steps_done == 0:
            self._measured(ignore, first=True)
        self.model.train()
        step = training.captured(lambda batch: self.compute_losses(self.model, batch))
        fresh = True
        for batch in training.batches():
            if fresh:
                self._opened(training.steps_done)
                self._rate = self._get_learning_rate()
            self._computing = True
            try:
                step(batch)
            finally:
                self._computing = False
            fresh = training.boundary
            if not fresh:
                self.control = self.callback_handler.on_substep_end(
                    self.args, self.state, self.control
                )
                continue
            self._reached(training.steps_done, ignore)
            if self.control.should_training_stop:
                return
        self._reached(training.steps_done, ignore)

    def _begin(self, training: PrivateTraining) -> None:
        """Trainer's own state: fresh, or as the checkpoint kept it."""
        steps, handler = self.plan.recipe.steps, self.callback_handler
        exported: list[Any] = [
            c for c in [*handler.callbacks, self.control] if isinstance(c, ExportableState)
        ]
        self.state = TrainerState(stateful_callbacks=exported)
        if KEPT in training.kept:
            self.state = TrainerState(**training.kept[KEPT])
            self._load_callback_state()
            self.control.should_log = self.control.should_evaluate = self.control.should_save = (
                False
            )
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, steps)
        epochs = adapter.epoch_count(self.plan.recipe)
        self.state.init_training_references(self, steps, epochs, None)
        self.state.global_step = training.steps_done
        self._last_save, self._logged, self._rate = time.monotonic(), training.steps_done, 0.0
        handler.model, handler.optimizer, handler.lr_scheduler = (
            self.model,
            self.optimizer,
            self.lr_scheduler,
        )
        handler.train_dataloader = None

    def _opened(self, done: int) -> None:
        if done % self._each == 0:
            self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)

    def _reached(self, done: int, ignore: list[str] | None) -> None:
        """What Trainer does after a step, for each step since it did it last: a step without
        records has no batch of its own.
        """
        while self.state.global_step < done:
            self.state.global_step += 1
            self.state.epoch = adapter.epoch_at(self.plan.recipe, self.state.global_step)
            self.control = self.callback_handler.on_optimizer_step(
                self.args, self.state, self.control
            )
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._answered(ignore)
            if (
                self.state.global_step % self._each == 0
                or self.state.global_step == self.plan.recipe.steps
            ):
                self.control = self.callback_handler.on_epoch_end(
                    self.args, self.state, self.control
                )
                self._answered(ignore)
        self.control.should_epoch_stop = False

    def _answered(self, ignore: list[str] | None) -> None:
        """Log, evaluate and save where the callbacks ask for it."""
        if self.control.should_log and self.state.global_step > self._logged:
            self._logged = self.state.global_step
            self.log({"learning_rate": self._rate})
        self.control.should_log = False
        if self.control.should_evaluate:
            better = self._measured(ignore)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = better
        self.control.should_evaluate = False
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
            self._keep()
        elif time.monotonic() - self._last_save >= self.private_run.checkpoint_every:
            self._keep()
        self.control.should_save = False

    def _measured(self, ignore: list[str] | None, first: bool = False) -> bool:
        """Evaluate, record what came out, and give a plateau its metric. Whether it was the best so
        far.
        """
        assert self.training is not None
        found = self.evaluate(ignore_keys=ignore)
        wanted = str(self.args.metric_for_best_model or "loss")
        metric = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        timings = ("_runtime", "_per_second", "epoch", "_time")
        public = adapter.finite_metrics(
            {name: value for name, value in found.items() if not name.endswith(timings)}
        )
        if public:
            self.training.record(source="public", **public)
        if self.training.schedules.waiting and not first:
            if metric not in found:
                raise InvalidInput(
                    "metric_for_best_model",
                    wanted,
                    f"must be among the metrics of the evaluation: {', '.join(found)}",
                )
            self.training.schedule(
                source="public", **{adapter.metric_name(metric): float(found[metric])}
            )
        return bool(self._determine_best_metric(metrics=found, trial=None))

    def _keep(self) -> None:
        """A checkpoint of the run, with Trainer's state in it: both are of the same step."""
        assert self.training is not None
        held = asdict(self.state)
        exported = [
            c
            for c in [*self.callback_handler.callbacks, self.control]
            if isinstance(c, ExportableState)
        ]
        held["stateful_callbacks"] = {type(c).__name__: c.state() for c in exported}
        self.training.kept[KEPT] = held
        self.training.save()
        self._last_save = time.monotonic()

    def _private(self, run: Run) -> PrivateTraining:
        """The run, with Trainer's optimizer and scheduler: made again, so that a resumed run makes
        the same.
        """
        if self._created_lr_scheduler:
            self.optimizer, self.lr_scheduler, self._created_lr_scheduler = None, None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=self.plan.recipe.steps)
        own = replace(run, checkpoint_every=math.inf)
        return PrivateTraining(
            self.model,
            self.optimizer,
            self._records(),
            self.plan,
            own,
            runtime=self.runtime,
            update=self.update,
            scheduler=self.lr_scheduler,
        )

    def _records(self) -> object:
        """The training data with the collator, columns that the model does not take left out, as
        Trainer does.
        """
        if self.train_dataset is None:
            raise InvalidInput("train_dataset", None, "must be given")
        collate, data = self.data_collator, self.train_dataset
        if type(data).__module__.split(".")[0] == "datasets":
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        if isinstance(data, list | tuple):
            return LazyRecords(data, _Plain(collate), self.args.dataloader_num_workers)
        return lazy(data, collate=_Plain(collate), workers=self.args.dataloader_num_workers)

    def _run_for(self, resume: str | bool | None) -> Run:
        """The run to begin, or to go on with."""
        folder = Path(self.private_run.path)
        if not resume:
            return self.private_run
        if (
            isinstance(resume, str)
            and Path(resume).resolve().parent != Path(self.args.output_dir).resolve()
        ):
            raise InvalidInput(
                "resume_from_checkpoint",
                resume,
                "must be True, or a checkpoint of this run in output_dir",
            )
        if not folder.is_dir():
            raise InvalidInput(
                "resume_from_checkpoint", str(resume), f"there is no run to resume in {folder}"
            )
        return replace(self.private_run, resume=True)

    def _finished(self, started: float, epsilon: float) -> TrainOutput:
        """What Trainer does at the end. The training loss is private: None stands for it."""
        seconds = time.time() - started
        metrics = {
            "train_runtime": round(seconds, 4),
            "train_steps_per_second": round(self.state.global_step / max(seconds, 1e-9), 3),
        }
        metrics |= {"epsilon": epsilon, "delta": self.plan.delta}
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, None, metrics)  # type: ignore[arg-type]

    def _describe(self, output_dir: str | None) -> None:
        if self.training is not None and self.args.should_save:
            trainer.describe(
                Path(output_dir or self.args.output_dir), Path(self.private_run.path), self.model
            )

    def _require_apart(self) -> None:
        """The run's folder holds secrets while it lasts: it must not lie where Trainer uploads
        from.
        """
        if (
            Path(self.private_run.path)
            .resolve()
            .is_relative_to(Path(self.args.output_dir).resolve())
        ):
            raise InvalidInput(
                "run",
                str(self.private_run.path),
                "must lie outside of output_dir, which is saved and pushed while the run has "
                "secrets",
            )

    @property
    def _each(self) -> int:
        """Steps in what Trainer calls an epoch."""
        return adapter.steps_per_epoch(self.plan.recipe)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """They are in the run's own checkpoint."""

    _save_scaler = _save_rng_state = _save_optimizer_and_scheduler


class _Plain:
    """A collator whose batches are plain dicts of tensors."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        return {
            name: field for name, field in dict(self._collate(items)).items() if field is not None
        }
