"""Batch normalisation by private statistics: released with noise, layer by layer, before training,
and frozen in it.

The statistics of every batch again, with noise at each step (Ponomareva et al. 2023, Table 5), would
be one more release for each layer and step of which the plan would have to know; see
docs/decisions.md for why it is not done.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.values import Bound, Bounded
from dpfy.data.batch import placed
from dpfy.data.given import as_source
from dpfy.data.lazy import RecordSource
from dpfy.models.batchnorm import FrozenBatchNorm
from dpfy.models.normalisation import Normalisation
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.training.objective import Objective
from dpfy.training.run import TrainingRun
from dpfy.training.validation import check_records

NAME = Normalisation.kind
WHOSE = "of the training data, released with noise (section normalisation)"
INSIDE = 1 - 2.0**-40
"""A record is cut to a little less than the bound, so that rounding stays inside."""
FLOOR, NOISES = 1e-5, 3.0
"""Variances are at least this, and at least so many standard deviations of the noise in them."""


def private_batchnorm(
    model: nn.Module, train: object, folder: TrainingRun, *, labels: str | None = None
) -> nn.Module:
    """A copy of `model` whose batch normalisation has statistics of `train`, released with noise;
    frozen from then on.

        claim = dpfy.models.Normalisation(10.0, layers=2, delta=1e-5)
        plan = dpfy.dpsgd(...).calibrate(epsilon=3.0, delta=1e-5, beside=claim.event)
        with dpfy.training.TrainingRun("runs/x", plan, beside=(claim,)) as folder:
            model = dpfy.training.private_batchnorm(model, train, folder)
            dpfy.fit(model, train, plan=plan, optimizer=..., run=folder)

    Scale and shift of the layers are weights as before.

    Guarantees: everything was reserved before the data is read. Each layer is one release under its
    permit: a record goes through the model alone, adds at most the claim's bound, and nothing if
    what it adds is no number. Made again after a crash, the same bits are released, and other sums
    are refused. `model` is left as it is.
    """
    claim = _claim(folder)
    if folder.plan.recipe.unit.most_records > 1:
        raise Unsupported(
            "private statistics where a unit owns several records",
            "use statistics of public data: dpfy.repair",
        )
    source = as_source(train)
    check_records(folder.plan.recipe, source.rows_each, len(source))
    made, calls, records = (
        copy.deepcopy(model).eval(),
        Objective(labels=labels),
        folder.plan.recipe.records,
    )
    names = _order(made, calls, source)
    if len(names) != claim.layers:
        raise InvalidInput(
            "layers",
            claim.layers,
            f"must be the number of batch normalisations that the model runs: {len(names)}",
        )
    stream = NoiseStream(
        Identity(), claim.noise_multiplier, folder.randomness, NAME, event=claim.event
    )
    for place, name in enumerate(names):
        norm = made.get_submodule(name)
        assert isinstance(norm, _BatchNorm)
        bound = claim.bound * math.sqrt(2 * norm.num_features)
        total = {"sums": _sums(made, norm, calls, source, bound)}
        folder.bind(f"{NAME} {place}", total["sums"].numpy().tobytes())
        whole = Bounded(total, Bound(bound), folder.plan.recipe.unit)
        released, _ = stream.release(whole, place, stream.init(total), folder.begin(NAME))
        _freeze(
            made, name, released.value["sums"] / records, claim.noise_multiplier * bound / records
        )
    return made.train(model.training)


def _claim(folder: TrainingRun) -> Normalisation:
    if not isinstance(folder, TrainingRun):
        raise InvalidInput(
            "folder",
            type(folder).__name__,
            "must be an opened dpfy.training.TrainingRun: what is released is reserved in it",
        )
    claim = folder.stages[NAME].reserved.claim if NAME in folder.stages else None
    if not isinstance(claim, Normalisation):
        raise InvalidInput(
            "folder",
            folder.path.name,
            "reserved no such release: give TrainingRun(run, plan, beside=(Normalisation(...),))",
        )
    return claim


class _Reached(Exception):
    """The layer was reached: what comes after it does not matter."""


@contextmanager
def _watching(layers: list[nn.Module], seen: Any) -> Iterator[None]:
    handles = [layer.register_forward_pre_hook(seen) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _order(model: nn.Module, calls: Objective, source: RecordSource) -> list[str]:
    """The names of the batch normalisations in the order in which they run, found with made-up
    records of the right shapes.
    """
    layers = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and not isinstance(m, _InstanceNorm)
    }
    ran: list[nn.Module] = []
    shapes = source.take(torch.zeros(2, dtype=torch.int64))
    for layer in layers.values():
        if layer.running_mean is None:
            raise Unsupported(
                "private statistics of a batch normalisation that keeps none",
                "set track_running_stats=True",
            )
    with _watching(list(layers.values()), lambda layer, args: ran.append(layer)):
        _call(model, calls, pytree.tree_map_only(Tensor, torch.zeros_like, shapes))
    if len(set(map(id, ran))) < len(ran):
        raise Unsupported(
            "private statistics of a batch normalisation that runs twice",
            "give each place a layer of its own",
        )
    known = {id(layer): name for name, layer in layers.items()}
    return [known[id(layer)] for layer in ran]


@torch.no_grad()
def _sums(
    model: nn.Module, norm: _BatchNorm, calls: Objective, source: RecordSource, bound: float
) -> Tensor:
    """The sum over all records of each one's means and mean squares at `norm`, cut to `bound`."""
    found: list[Tensor] = []

    def seen(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0])
        raise _Reached

    total = torch.zeros(2 * norm.num_features, dtype=torch.float64)
    with _watching([norm], seen):
        for index in range(len(source)):
            found.clear()
            try:
                _call(model, calls, source.take(torch.tensor([index])))
            except _Reached:
                total += cut(found[0], bound)
            else:
                raise Unsupported(
                    "private statistics of a batch normalisation that some records do not reach",
                    "use dpfy.repair",
                )
    return total


def cut(x: Tensor, bound: float) -> Tensor:
    """The means and mean squares of the channels of one record, x [1, C, ...], cut to length
    `bound`; zero if they are no numbers.
    """
    if len(x) != 1:
        raise Unsupported(
            f"a batch normalisation that sees {len(x)} rows of one record",
            "use statistics of public data: dpfy.repair",
        )
    values = x[0].double().flatten(1) if x.dim() > 2 else x[0].double().unsqueeze(1)
    both = torch.cat([values.mean(1), values.square().mean(1)]).cpu()
    length = float(both.norm())
    if not math.isfinite(length):
        return torch.zeros_like(both)
    return both * min(1.0, bound * INSIDE / max(length, 1e-300))


def _call(model: nn.Module, calls: Objective, batch: Any) -> None:
    inputs, named, _ = calls.parts(placed(batch, next(model.parameters()).device))
    model(*inputs, **named)


def _freeze(model: nn.Module, name: str, means: Tensor, noise: float) -> None:
    """Put a layer of these means and mean squares in the place of the one called `name`."""
    norm = model.get_submodule(name)
    assert isinstance(norm, _BatchNorm)
    mean, square = means.split(norm.num_features)
    variance = (square - mean.square()).clamp(min=max(FLOOR, NOISES * noise))
    assert norm.running_mean is not None
    norm.running_mean, norm.running_var = mean.to(norm.running_mean), variance.to(norm.running_mean)
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = FrozenBatchNorm(norm, WHOSE)
