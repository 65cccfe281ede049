"""TensorBoard, Weights & Biases, MLflow: what a private run may publish, and nothing else. The
packages are not imported here.

    log = to_tensorboard(training, SummaryWriter("logs"))
    for batch in training.batches():
        ...
        if training.boundary:
            log(accuracy=accuracy_on_public_data(model))
    log.card()                                     # after the block: what the finished run
    guarantees

Each value goes through :meth:`PrivateTraining.record` first: it must be a plain number, it stands
in the run's metrics.jsonl, its name in the report, and a loss of the batch is refused where it is
recognised. A value that was refused reaches no logger.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfy.core.errors import InvalidInput
from dpfy.report import verify, words
from dpfy.runs.folder import CARD
from dpfy.training.loop import PrivateTraining

Write = Callable[[dict[str, float], int], None]
"""(values by name, step)."""


class PublicLog:
    """Records public values of a run and hands them on. Calling it logs values at the step that was
    made last.

    Guarantees: what `write` gets was recorded by the run before; the learning rates and the
    guarantee, which are public, are added.
    """

    def __init__(
        self, training: PrivateTraining, write: Write, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._training, self._write, self._tell = training, write, tell

    def __call__(self, **values: float) -> None:
        """Log numbers that may be published, and the learning rate of the next step."""
        training = self._training
        training.record(source="public", **values)
        rates = {
            f"learning_rate_{n}" if n else "learning_rate": float(g["lr"])
            for n, g in enumerate(training.optimizer.param_groups)
        }
        self._write(
            {name: float(value) for name, value in values.items()} | rates, training.steps_done
        )

    def card(self) -> dict[str, Any]:
        """Log what the finished run guarantees, and give it back."""
        place = Path(self._training.folder.path) / CARD
        if not place.is_file():
            raise InvalidInput(
                "log.card",
                "an unfinished run",
                "call it after the block of the run, when its report is written",
            )
        card = words.raised(verify.load_card(place))
        held = card["guarantee"]
        told = {
            "epsilon": held["epsilon"],
            "delta": held["delta"],
            "unit": held["unit"],
            "steps": self._training.steps_done,
        }
        self._tell(told | {"card": json.dumps(card, sort_keys=True)})
        return told


def to_tensorboard(training: PrivateTraining, writer: Any) -> PublicLog:
    """A log that writes scalars to a SummaryWriter, and the report as text."""

    def write(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def tell(told: dict[str, Any]) -> None:
        writer.add_text(
            "privacy", json.dumps({k: v for k, v in told.items() if k != "card"}), told["steps"]
        )
        writer.flush()

    return PublicLog(training, write, tell)


def to_wandb(training: PrivateTraining, run: Any) -> PublicLog:
    """A log that writes to a run of Weights & Biases, and the guarantee to its summary. Do not use
    ``run.watch``: it logs gradients.
    """

    def tell(told: dict[str, Any]) -> None:
        run.summary.update(
            {f"privacy/{name}": value for name, value in told.items() if name != "card"}
        )

    return PublicLog(training, lambda values, step: run.log(values, step=step), tell)


def to_mlflow(training: PrivateTraining, mlflow: Any) -> PublicLog:
    """A log that writes metrics by `mlflow` (the module, or a client with its functions), and the
    report as an artefact.
    """

    def tell(told: dict[str, Any]) -> None:
        mlflow.log_metrics(
            {f"privacy_{name}": float(told[name]) for name in ("epsilon", "delta")},
            step=told["steps"],
        )
        mlflow.log_text(told["card"], CARD)

    return PublicLog(training, lambda values, step: mlflow.log_metrics(values, step=step), tell)
