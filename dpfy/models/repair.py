"""Model repair: a copy of a model in which whatever private training refuses by name is replaced by
what it takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.models.batchnorm import FrozenBatchNorm, PublicBatchNorm, WithPublicRecords

MOST_GROUPS = 32
LEAST_CHANNELS = 8
"""In a group, where a layer may see channels without places: of a channel alone nothing is left."""


class Repaired(NamedTuple):
    """A model that private training takes, and what was replaced in it, one line each."""

    model: nn.Module
    replaced: tuple[str, ...]


def repair(model: nn.Module, *, statistics: str | None = None, public: Any = None) -> Repaired:
    """A copy of `model` that private training takes. Make the optimizer afterwards.

    Batch normalisation (1d, 2d, 3d, synchronised) becomes group normalisation of the same scale and
    shift. Instance normalisation loses its running statistics. Embeddings lose `max_norm` and
    `scale_grad_by_freq`. Spectral normalisation keeps the directions that it has.

    Args:
        model: The model. It is left as it is.
        statistics: Keeps the running statistics of batch normalisation, permanently. The text says
            where they come from: they must be public (of pretraining on public data, say).
        public: Records of public data as the model takes them. At every step, the statistics of
            batch normalisation are those of these records; `statistics` says what they are.

    Returns:
        The copy, and what was replaced in it.

    Raises:
        InvalidInput: `model` is no module, or `public` is given without `statistics`.
        Unsupported: The model is compiled, or has layers whose shapes are not known yet.

    Guarantees: weights are the same values under the same names; the report lists what was
    replaced, and the text of `statistics` as the caller's.

    Example:
        >>> import torch
        >>> import dpfy
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> private = dpfy.repair(model).model
        >>> type(private[1]).__name__
        'GroupNorm'
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput("model", type(model).__name__, "must be a torch.nn.Module")
    if type(model).__name__ == "OptimizedModule":
        raise Unsupported("repairing a compiled model", "repair it first, then compile it")
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise Unsupported(
            "repairing a lazy module", "run one public example through the model first"
        )
    if statistics is not None:
        check.one_line("statistics", statistics)
    if public is not None and statistics is None:
        raise InvalidInput(
            "statistics",
            None,
            "must say what the public records are: it is in the report",
        )
    made: dict[int, nn.Module] = {}
    lines: list[str] = []

    def swapped(name: str, module: nn.Module) -> nn.Module:
        if id(module) not in made:
            before = getattr(module, "replaces", None)
            new = made[id(module)] = _replaced(name, module, statistics, public is not None)
            if new is not module or getattr(new, "replaces", None) != before:
                lines.append(f"{name or 'the model'}: {words(new)}")
        return made[id(module)]

    whole = _walked(copy.deepcopy(model), "", swapped)
    if public is not None and lines:
        whole = WithPublicRecords(whole, public)
    return Repaired(whole, tuple(lines))


def _walked(
    module: nn.Module, name: str, swapped: Callable[[str, nn.Module], nn.Module]
) -> nn.Module:
    """`module` with all that is in it swapped, outermost first."""
    new = swapped(name, module)
    for key, child in list(new._modules.items()):
        if child is not None:
            new._modules[key] = _walked(child, f"{name}.{key}".lstrip("."), swapped)
    return new


def _replaced(name: str, module: nn.Module, statistics: str | None, public: bool) -> nn.Module:
    """What stands in for one module; itself where it is taken as it is, or could be changed."""
    where = f"{name or 'the model'} ({type(module).__name__})"
    if isinstance(module, _InstanceNorm):
        return _without_statistics(module)
    if isinstance(module, _BatchNorm):
        if statistics is None:
            return _group_norm(module, where)
        return PublicBatchNorm(module, statistics) if public else _frozen(module, statistics, where)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
        module.max_norm is not None or module.scale_grad_by_freq
    ):
        said = [
            name
            for name, on in (
                ("max_norm", module.max_norm),
                ("scale_grad_by_freq", module.scale_grad_by_freq),
            )
            if on
        ]
        module.max_norm, module.scale_grad_by_freq = None, False
        module.replaces = f"{type(module).__name__} with {' and '.join(said)}"  # type: ignore[assignment]
    if isinstance(module, _SpectralNorm) and module.n_power_iterations > 0:
        module.n_power_iterations = 0
        module.replaces = "spectral normalisation with power iterations"  # type: ignore[assignment]
    return module


def words(module: nn.Module) -> str:
    """What a module replaces, for the report."""
    said = getattr(module, "statistics", None)
    return f"{module.replaces} by {type(module).__name__}" + (
        "" if said is None else f" (statistics: {said})"
    )


def statistics(model: nn.Module) -> list[str]:
    """Whose statistics the layers of `model` normalise by, as the caller said."""
    return sorted(
        {m.statistics for m in model.modules() if isinstance(m, FrozenBatchNorm | PublicBatchNorm)}
    )


def _group_norm(norm: _BatchNorm, where: str) -> nn.GroupNorm:
    """GroupNorm with the largest number of groups, at most 32, that divides the channels; with
    several channels in a group where there may be nothing else to normalise over.
    """
    channels = norm.num_features
    flat = isinstance(norm, nn.BatchNorm1d)
    if flat and channels == 1:
        raise Unsupported(
            f"{where}: of one number alone, normalisation within an example leaves nothing; it",
            "remove the layer",
        )
    most = min(MOST_GROUPS, max(1, channels // LEAST_CHANNELS) if flat else channels)
    groups = max(k for k in range(1, most + 1) if channels % k == 0)
    made = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    made.replaces = type(norm).__name__  # type: ignore[assignment]  # the card says which layers were replaced
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)


def _frozen(norm: _BatchNorm, statistics: str, where: str) -> FrozenBatchNorm:
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        raise Unsupported(
            f"{where}: keeping statistics that it does not have",
            "leave statistics= out: it becomes GroupNorm",
        )
    if not bool(mean.any()) and bool((variance == 1).all()):
        rule = "load the pretrained weights before, or leave statistics= out: it becomes GroupNorm"
        raise Unsupported(f"{where}: keeping statistics of nothing (means 0, variances 1)", rule)
    if not bool(
        torch.isfinite(mean).all() & torch.isfinite(variance).all() & (variance >= 0).all()
    ):
        raise Unsupported(
            f"{where}: keeping statistics that are no numbers", "load the pretrained weights again"
        )
    return FrozenBatchNorm(norm, statistics)


def _without_statistics(norm: _InstanceNorm) -> nn.Module:
    if not norm.track_running_stats:
        return norm
    made = type(norm)(norm.num_features, norm.eps, affine=norm.affine, track_running_stats=False)
    made.replaces = f"{type(norm).__name__} with running statistics"  # type: ignore[assignment]
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)
