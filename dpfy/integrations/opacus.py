"""From Opacus: the arguments of PrivacyEngine.make_private and make_private_with_epsilon,
translated. Opacus need not be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpfy import accounting
from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import Clip, FlatClip, GroupClip
from dpfy.gradients.engine import trainable
from dpfy.plan.recipe import EXACT, FLOAT, Plan, Recipe, dpsgd
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining
from dpfy.training.runtime import Runtime

ENGINES = {"hooks": "auto", "functorch": "batched", "ew": "batched", "ghost": "bookkeeping"}
"""grad_sample_mode to the engine; the answer is the same with every engine."""

ACCOUNTANTS = {"prv": accounting.DEFAULT, "rdp": "rdp"}
CLIPPING = ("flat", "per_layer")


def from_opacus(
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[object],
    records: int,
    max_grad_norm: float | Sequence[float],
    epochs: int,
    target_delta: float,
    noise_multiplier: float | None = None,
    target_epsilon: float | None = None,
    poisson_sampling: bool = True,
    clipping: str = "flat",
    batch_first: bool = True,
    loss_reduction: str = "mean",
    noise_generator: object = None,
    grad_sample_mode: str = "hooks",
    secure_mode: bool = False,
    accountant: str = "prv",
    max_physical_batch_size: int | None = None,
    scheduler: object = None,
    run: str | Path | Run | None = None,
) -> PrivateTraining:
    """A private training with the meaning and the names that Opacus gives to these arguments.

    Use it as a context (docs/from-opacus.md).

    Opacus charges the steps that were made. Here all are reserved before the data is read, so
    `epochs` and `target_delta` are part of every call. As there, an epoch has one step for each
    batch, the sampling rate is one over their number, and noise is divided by the expected batch
    size. Opacus takes these from the length of the data set, which is private. Here they follow
    from `records`, a public number.

    Args:
        module, optimizer, data_loader: As for `PrivacyEngine.make_private`.
        records: The public number of records.
        max_grad_norm: The clipping norm; with "per_layer" one for each parameter.
        epochs: How many epochs are trained.
        target_delta: The delta of the guarantee.
        noise_multiplier: As for `make_private`. Give this or `target_epsilon`.
        target_epsilon: As for `make_private_with_epsilon`.
        poisson_sampling: True. Other batches are refused.
        clipping: "flat" or "per_layer".
        batch_first: True. Other layouts are refused.
        loss_reduction: "mean".
        noise_generator: None. Noise is made from the entropy of the system.
        grad_sample_mode: "hooks", "functorch", "ew" or "ghost"; all give the same result.
        secure_mode: True asks for exact noise.
        accountant: "prv" for the tight accountant, or "rdp".
        max_physical_batch_size: What `BatchMemoryManager` takes there.
        scheduler: A torch scheduler, stepped after each step.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.

    Returns:
        The training, to be used as a context.

    Raises:
        Unsupported: An argument has no proof here.
        InvalidInput: A value does not fit its rule.

    Guarantees: the plan does not depend on the data; what has no proof here, or another meaning, is
    refused with the way out: nothing is ignored.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import dpfy
        >>> data = TensorDataset(torch.randn(100, 4), torch.randint(0, 2, (100,)))
        >>> model = torch.nn.Linear(4, 2)
        >>> training = dpfy.from_opacus(
        ...     module=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     data_loader=DataLoader(data, batch_size=20),
        ...     records=100,
        ...     max_grad_norm=1.0,
        ...     epochs=2,
        ...     target_delta=1e-5,
        ...     target_epsilon=3.0,
        ... )
        >>> training.plan.recipe.steps
        10
    """
    each = _batches(data_loader, records)
    if not poisson_sampling:
        instead = 'dpsgd(sampling="without-replacement", adjacency="replace-one")'
        raise Unsupported(
            "poisson_sampling=False",
            f"its charge is not that of Poisson batches: leave it True, or use {instead}",
        )
    if not batch_first:
        raise Unsupported("batch_first=False", "put the examples first: model(x.transpose(0, 1))")
    if loss_reduction != "mean":
        raise InvalidInput(
            "loss_reduction",
            loss_reduction,
            'noise is divided by the expected batch: use "mean" and a learning rate for it',
        )
    if noise_generator is not None:
        raise Unsupported(
            "a noise_generator of your own",
            "noise is made from the system's entropy; a test may fix it: run=Run(path, seed=...)",
        )
    clip = _clip(module, check.one_of("clipping", clipping, CLIPPING), max_grad_norm)
    base = dpsgd(
        records,
        records / each,
        steps=check.integer("epochs", epochs) * each,
        noise=EXACT if secure_mode else FLOAT,
    )
    chosen = ACCOUNTANTS[check.one_of("accountant", accountant, ACCOUNTANTS)]
    plan = _plan(replace(base, clip=clip), noise_multiplier, target_epsilon, target_delta, chosen)
    engine = ENGINES[check.one_of("grad_sample_mode", grad_sample_mode, ENGINES)]
    runtime = (
        Runtime(engine=engine)
        if max_physical_batch_size is None
        else Runtime(engine, max_physical_batch_size)
    )
    return PrivateTraining(
        module, optimizer, data_loader, plan, run, runtime=runtime, scheduler=scheduler
    )


def _batches(loader: object, records: int) -> int:
    """How many batches of the loader `records` records make."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__len__"):
        raise InvalidInput(
            "data_loader", type(loader).__name__, "must be a DataLoader of a dataset with a length"
        )
    if loader.batch_size is None:
        raise InvalidInput(
            "data_loader",
            "no batch_size",
            "must have the batch size that is expected: the plan draws the batches",
        )
    if check.integer("records", records, most=check.RECORDS) < loader.batch_size:
        raise InvalidInput(
            "records", records, f"must be at least the batch size ({loader.batch_size})"
        )
    return records // loader.batch_size if loader.drop_last else -(-records // loader.batch_size)


def _clip(module: nn.Module, clipping: str, norm: float | Sequence[float]) -> Clip:
    """Flat, or for each parameter its own norm in the order of `parameters()`, as Opacus has it."""
    if clipping == "flat":
        if not isinstance(norm, int | float):
            raise InvalidInput(
                "max_grad_norm", norm, 'must be a number; a list goes with clipping="per_layer"'
            )
        return FlatClip(norm)
    names = list(trainable(module))
    if not isinstance(norm, list | tuple) or len(norm) != len(names):
        raise InvalidInput(
            "max_grad_norm",
            norm,
            f'with clipping="per_layer" it must be a list for the {len(names)} trainable '
            f"parameters",
        )
    return GroupClip(tuple(names), tuple(norm))


def _plan(
    recipe: Recipe, noise: float | None, epsilon: float | None, delta: float, accountant: str
) -> Plan:
    if (noise is None) == (epsilon is None):
        raise InvalidInput(
            "noise_multiplier", noise, "give noise_multiplier or target_epsilon, one of them"
        )
    if epsilon is not None:
        return recipe.calibrate(epsilon, delta, accountant=accountant)
    return recipe.with_noise(noise or 0.0, delta=delta, accountant=accountant)
