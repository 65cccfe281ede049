"""Accelerate with a private loop inside: one line of a script changes, and the loss is one for each
example.

    accelerator = PrivateAccelerator(plan=plan, run="runs/x")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        accelerator.backward(losses)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.end_training()

`backward` hands the losses to the run, which clips, sums, adds noise and lets optimizer and
scheduler move where a logical batch ends; `optimizer.step` and `scheduler.step` of the script then
have nothing left to do.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from dpfy.core import errors
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.integrations import adapter
from dpfy.integrations.adapter import LossTotals
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining
from dpfy.training.runtime import Runtime
from dpfy.training.schedulers import waits
from dpfy.training.step import Update
from dpfy.training.validation import NARROW

try:
    from accelerate import Accelerator
except ImportError:
    raise errors.missing("Accelerate", "accelerate") from None


class PrivateAccelerator(Accelerator):
    """An Accelerator whose training is private: `plan` says how, `run` where the run folder lies.

    `prepare` takes the model, its optimizer and the training data (the first loader given with
    them); the scheduler with them or later. The loader gives physical batches, an epoch of the plan
    at a time, the last with the steps that are left; its length is the number of steps in an epoch.
    The run is entered when the first batch is asked for and ends with the last step of the plan,
    after `epochs` passes, or, where the plan may end early, with `end_training` after a `break`.
    `load_state`, or ``Run(path, resume=True)``, goes on with an unfinished run, to the same bits.

    Guarantees: those of :class:`PrivateTraining`. `log` publishes what the caller says is public,
    as `PrivateTraining.record` does.
    """

    def __init__(
        self,
        *given: Any,
        plan: Plan,
        run: str | Path | Run,
        runtime: Runtime | None = None,
        update: Update | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*given, **settings)
        if self.num_processes > 1:
            raise Unsupported(
                "PrivateAccelerator with several processes", "use PrivateTraining under torchrun"
            )
        if self.mixed_precision not in ("no", "bf16"):
            raise Unsupported(
                f"mixed_precision={self.mixed_precision!r}", f"{NARROW}: mixed_precision='bf16'"
            )
        adapter.check_accumulation(
            "gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            "runtime=Runtime(max_physical_batch=...)",
        )
        self.plan, self.update = plan, update
        self.run = Run.of(run)
        self.runtime = replace(runtime or Runtime(), device=str(self.device))
        self.training: PrivateTraining | None = None
        self._model: nn.Module | None = None
        self._moving: torch.optim.Optimizer | None = None
        self._train: object = None
        self._rules: list[LRScheduler] = []
        self._others: list[DataLoader[Any]] = []
        self._totals, self._epoch_totals = LossTotals(), LossTotals()

    def prepare(self, *given: Any, **settings: Any) -> Any:
        """What was given, in its order: model, optimizer, training loader and scheduler for the
        run, all else as Accelerate does it.
        """
        whole = any(isinstance(part, nn.Module) for part in given)
        if whole and self._model is not None:
            raise Unsupported(
                "a second model in a private run", "prepare one; others can be used as they are"
            )
        made = tuple(self._taken(part, whole) for part in given)
        if self._train is not None and any(
            adapter.share_records(self._train, other) for other in self._others
        ):
            raise InvalidInput(
                "prepare",
                "the training data",
                "must be other data: what is measured on it is logged",
            )
        return made if len(made) > 1 else made[0]

    def backward(self, loss: Tensor, **settings: Any) -> None:
        """Hand one loss for each example to the run; at the end of a logical batch the optimizer
        moves.
        """
        if not isinstance(loss, Tensor) or loss.dim() != 1:
            raise InvalidInput(
                "backward",
                "a scalar",
                'takes one loss for each example: compute it with reduction="none"',
            )
        training, total = self._live(), loss.detach().sum(dtype=torch.float64)
        for totals in (self._totals, self._epoch_totals):
            totals.add(total, max(1, len(loss)))
        training.step(loss)

    @property
    def epochs(self) -> int:
        """Passes over the loader that make all steps of the plan."""
        return adapter.epoch_count(self.plan.recipe)

    @property
    def sync_gradients(self) -> bool:
        """Whether the last `backward` ended a logical batch."""
        return self.training is not None and self.training.boundary

    def accumulate(self, *models: Any) -> AbstractContextManager[Any]:
        """Nothing to do: the run accumulates."""
        return nullcontext()

    no_sync = accumulate

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Tensor:
        """Nothing: the plan's clip norm bounds each example. Norms of gradients are private: not a
        number is given back.
        """
        errors.warn(
            "clip_grad_norm_: the plan's clip norm bounds each example; the noisy mean is not "
            "clipped again"
        )
        return torch.tensor(math.nan)

    clip_grad_value_ = clip_grad_norm_

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Record public numbers in the run and give them to the trackers. A loss of the batch is
        refused where it is recognised.
        """
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise InvalidInput(
                    f"log {name}",
                    type(value).__name__,
                    "must be a plain number that may be published",
                )
        if self.training is not None:
            self.training.require_public(values)
        for name, value in values.items():
            for totals in (self._totals, self._epoch_totals):
                totals.check(f"log {name}", float(value), adapter.steps_per_epoch(self.plan.recipe))
        if self.training is not None and not self.training.folder.finished:
            self.training.record(source="public", **values)
        super().log(values, step=step, log_kwargs=log_kwargs or {})

    def save_state(self, output_dir: str | None = None, **settings: Any) -> Any:
        """Accelerate's own for registered objects, and a checkpoint of the run in its folder."""
        made = super().save_state(output_dir, **settings)
        if self.training is not None and not self.training.folder.finished:
            self.training.save()
        return made

    def load_state(self, input_dir: str | None = None, **settings: Any) -> None:
        """Go on with the run: it stands where its own checkpoint is, wherever in the loop that
        was.
        """
        if self.training is not None:
            raise InvalidInput(
                "load_state", "a run that has started", "load before the first batch is asked for"
            )
        if not Path(self.run.path).is_dir():
            raise InvalidInput(
                "load_state", str(input_dir), f"there is no run to resume in {self.run.path}"
            )
        super().load_state(input_dir, **settings)
        self.run = replace(self.run, resume=True)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader as it is: a resumed run knows where it stands."""
        return dataloader

    def end_training(self) -> None:
        """End a run that may end early, charged up to the next point of its plan. Any other that is
        not complete is left, to be resumed.
        """
        training = self.training
        if training is not None and not training.folder.finished:
            if training.plan.recipe.stopping is not None and training.steps_done:
                self._finish(training)
            else:
                done, whole = training.steps_done, adapter.steps_per_epoch(self.plan.recipe)
                if done and done % whole == 0:
                    words = (
                        f"run {self.run.path}: after {done} of {self.plan.recipe.steps} steps: the "
                        f"plan is {self.epochs} passes over the loader (accelerator.epochs)"
                    )
                    errors.warn(words)
                training.__exit__(None, None, None)
                self.training = None
        super().end_training()

    def _taken(self, part: Any, whole: bool) -> Any:
        if isinstance(part, nn.Module):
            self._model = super().prepare_model(part, evaluation_mode=True)
            return self._model
        if isinstance(part, torch.optim.Optimizer):
            self._moving = part
            return _Moved(part)
        if isinstance(part, LRScheduler):
            self._rules.append(part)
            return _Scheduled(self, part)
        if whole and isinstance(part, DataLoader) and self._train is None:
            self._train = part
            return _Epochs(self)
        if isinstance(part, DataLoader):
            self._others.append(part)
        return super().prepare(part)

    def _live(self) -> PrivateTraining:
        if self.training is None:
            raise InvalidInput(
                "backward", "no run", "follows a batch of the prepared training loader"
            )
        return self.training

    def _opened(self) -> PrivateTraining:
        """The run, entered."""
        if self.training is None:
            if self._model is None or self._moving is None or self._train is None:
                raise InvalidInput(
                    "prepare",
                    "not all of a run",
                    "give model, optimizer and training loader: prepare(model, optimizer, loader)",
                )
            self.training = PrivateTraining(
                self._model,
                self._moving,
                self._train,
                self.plan,
                self.run,
                runtime=self.runtime,
                update=self.update,
                scheduler=self._rules,
            )
            self.training.__enter__()
            self._batches = iter(self.training.batches())
        return self.training

    def _epoch(self) -> Iterator[Any]:
        """The physical batches of an epoch of the plan, or of what is left of it. After the last
        step of all the run is finished.
        """
        training, steps = self._opened(), self.plan.recipe.steps
        if training.folder.finished:
            return
        each, self._epoch_totals = adapter.steps_per_epoch(self.plan.recipe), LossTotals()
        end = min(steps, (training.steps_done // each + 1) * each)
        while training.steps_done < end and (batch := next(self._batches, None)) is not None:
            yield batch
        if training.steps_done == training.last_step:
            self._finish(training)

    def _finish(self, training: PrivateTraining) -> None:
        adapter.finish(training)
        training.__exit__(None, None, None)


class _Epochs:
    """The training loader of a private run."""

    def __init__(self, accelerator: PrivateAccelerator) -> None:
        self._accelerator = accelerator

    def __len__(self) -> int:
        return adapter.steps_per_epoch(self._accelerator.plan.recipe)

    def __iter__(self) -> Iterator[Any]:
        return self._accelerator._epoch()


class _Moved(torch.optim.Optimizer):
    """The run's optimizer in the caller's hands: it can be looked at, and is moved by the run."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the run's optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the run's optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the run's optimizer."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """That of the run's optimizer."""
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: the run has moved it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: there are no gradients."""


class _Scheduled:
    """The run's scheduler in the caller's hands: it can be looked at, and is stepped by the run; a
    plateau by its metric.
    """

    def __init__(self, accelerator: PrivateAccelerator, scheduler: LRScheduler) -> None:
        self._accelerator, self.scheduler = accelerator, scheduler

    def step(self, *metric: float) -> None:
        """Nothing, but for a plateau: it is given its public metric, which the run records."""
        if metric and waits(self.scheduler):
            training = self._accelerator._live()
            if not training.folder.finished:
                training.schedule(source="public", metric=float(metric[0]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)
