"""Evaluation inside of a private Trainer: on data declared public, apart from the training data,
and without a trace in the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.integrations import adapter

PUBLIC = "public"


def require_public(trainer: Any, given: Any, asked: bool) -> None:
    """Refuse to measure while training on data that nobody declared public, and on the training
    data at any time.

    `given` is what `evaluate` was given: a data set, several by name, the name of one, or None for
    the trainer's own.
    """
    if trainer.eval_is is not None:
        check.one_of("eval_is", trainer.eval_is, [PUBLIC])
    if asked and trainer.eval_is != PUBLIC:
        rule = (
            'say eval_is="public" if the evaluation data is public: its metrics are logged; else '
            "evaluate after training"
        )
        raise InvalidInput("eval_is", trainer.eval_is, rule)
    require_apart(trainer, given)


def require_apart(trainer: Any, given: Any) -> None:
    """Refuse the training data, or a part of it."""
    held = trainer.eval_dataset
    data = (
        held.get(given)
        if isinstance(given, str) and isinstance(held, dict)
        else held
        if given is None
        else given
    )
    if any(
        adapter.share_records(trainer.train_dataset, one)
        for one in (data.values() if isinstance(data, dict) else [data])
    ):
        raise InvalidInput(
            "eval_dataset",
            "the training data",
            "must be other data: what is measured on it would be published",
        )


@contextmanager
def aside(trainer: Any) -> Iterator[None]:
    """Around a pass over other data: with the averaged weights; model, mode and torch's generators
    are left as they were.
    """
    model, training = trainer.model, trainer.training
    shadowed, modes = (
        {k: v for k, v in vars(model).items() if k == "forward"},
        {m: m.training for m in model.modules()},
    )
    running = training is not None and trainer.is_in_train
    try:
        with torch.random.fork_rng(devices=[]), training.averaged() if running else nullcontext():
            yield
    finally:
        vars(model).pop("forward", None)  # accelerate puts another in its place
        vars(model).pop("_original_forward", None)
        vars(model).update(shadowed)
        trainer.accelerator._models.clear()
        for module, mode in modes.items():
            module.training = mode
