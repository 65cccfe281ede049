"""Parameters that a module of the user's own multiplies with, adds, or spreads over the batch: scales, shifts, class tokens.

While such a module runs, an alias stands in for each of its parameters. It computes as the parameter does, and torch asks it before
every operation on it. A product with something that has a batch, a sum, an expansion: these become nodes of the tape, like layers. All
else is done with the parameter itself, in autograd's sight, and is found there like any use that no rule explains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dpfy.gradients.contributions.contribution import Direct
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.rule import Found, LayerRule, View
from dpfy.gradients.tracing.tape import BATCH_AXES, Site, Tape

IDLE = object()


@dataclass(eq=False)
class _Origin:
    """Which parameter an alias stands for, and what is known of its uses."""

    name: str
    parameter: nn.Parameter
    tape: Tape
    sites: dict[tuple[str, int], Site] = field(default_factory=dict)
    hooks: object = IDLE
    """What saved tensors went through when the module began to run; `IDLE` when it does not run."""

    def site(self, kind: str, like: Tensor) -> Site | None:
        """The site of this use; None if it is not one for the tape.

        The batch must lie before the dimensions of the parameter. And what is computed again in the backward pass must be computed
        the same way, when the module around it does not run: a part of a module that is checkpointed is left to autograd.
        """
        room = like.dim() - _own_dims(self.parameter.shape)
        if room < 1 or fused.hooks() != self.hooks:
            return None
        key = (kind, like.dim())
        if key not in self.sites:
            axes = tuple(axis for axis in BATCH_AXES if room > 1 or axis is not BATCH_AXES[1])
            self.sites[key] = Site(f"{self.name} ({kind})", (self.parameter,), fitting=axes)
        return None if self.sites[key].without_batch else self.sites[key]

    def explained(self, rows: Tensor) -> Found:
        """[batch, ..., *shape that the parameter was broadcast to] as gradients of the parameter."""
        shape = self.parameter.shape
        own = _own_dims(shape)
        fixed = rows.dim() - own
        summed = [*range(1, fixed), *[fixed + i for i, size in enumerate(shape[len(shape) - own :]) if size == 1]]
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        each = rows.sum(summed, dtype=wide) if any(rows.shape[i] > 1 for i in summed) else rows
        return [(self.parameter, Direct(each.reshape(len(rows), *shape)))]


def _own_dims(shape: torch.Size) -> int:
    """Dimensions of a parameter without ones in front."""
    return len(shape) - next((i for i, size in enumerate(shape) if size != 1), len(shape))


class Bare(Tensor):
    """An alias of a parameter. Autograd leads from it to the parameter, so that nothing is lost where torch does not ask it."""

    origin: _Origin
    _is_param = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = None if kwargs or not torch.is_grad_enabled() else RULES.get(func)
        found = None if rule is None else rule(*args)
        if found is not None:
            return found
        return func(*tree_map_only(Bare, _parameter, args), **tree_map_only(Bare, _parameter, kwargs or {}))


def _parameter(alias: Bare) -> nn.Parameter:
    return alias.origin.parameter


def _pair(a: object, b: object) -> tuple[_Origin, Tensor] | None:
    """The one alias of two factors or summands, and the other one, if that has the shape of the result."""
    alias, other = (a, b) if isinstance(a, Bare) else (b, a)
    if not isinstance(alias, Bare) or isinstance(other, Bare) or not isinstance(other, Tensor) or not other.is_floating_point():
        return None
    origin = alias.origin
    small, large = origin.parameter.shape, other.shape
    fits = len(large) >= len(small) and all(a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False))
    return (origin, other) if fits else None


def _multiplied(a: object, b: object) -> Tensor | None:
    if (pair := _pair(a, b)) is None or (site := pair[0].site("scale", pair[1])) is None:
        return None
    origin, x = pair

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: View) -> Found:
        return origin.explained(view(g * saved[0]))

    if fused.one_node():
        return fused.run(fused.scale, x, origin.tape, site, explain, (), (origin.parameter,))
    return origin.tape.tap(x * origin.parameter.detach(), site, explain, (x,))


def _added(a: object, b: object) -> Tensor | None:
    if (pair := _pair(a, b)) is None or (site := pair[0].site("shift", pair[1])) is None:
        return None
    origin, x = pair
    return origin.tape.tap(x + origin.parameter.detach(), site, lambda g, saved, view: origin.explained(view(g)), ())


def _expanded(alias: object, *sizes: Any) -> Tensor | None:
    assert isinstance(alias, Bare)
    origin = alias.origin
    spread = origin.parameter.detach().expand(*sizes)
    site = origin.site("expansion", spread)
    return None if site is None else origin.tape.tap(spread, site, lambda g, saved, view: origin.explained(view(g)), ())


RULES: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply), _multiplied),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _added),
    Tensor.expand: _expanded,
}
"""Operations on an alias that become nodes of the tape."""


def run_bare(module: nn.Module, tape: Tape, site: Site, *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with aliases for its trainable parameters."""
    forward = type(module).forward  # type: ignore[attr-defined]
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    own = module._parameters
    before = {name: p for name, p in own.items() if isinstance(p, nn.Parameter) and p.requires_grad and not isinstance(p, Bare)}
    aliases: dict[str, Any] = {}
    for name, p in before.items():
        alias = aliases[name] = p.as_subclass(Bare)
        alias.origin = site.origins.setdefault(name, _Origin(f"{site.name}.{name}", p, tape))
        alias.origin.hooks = fused.hooks()
    own.update(aliases)
    try:
        return forward(module, *args, **kwargs)
    finally:
        own.update({name: before[name] for name, alias in aliases.items() if own.get(name) is alias})
        for alias in aliases.values():
            alias.origin.hooks = IDLE


BARE = LayerRule(run_bare)


def bare_rule(module: nn.Module) -> LayerRule | None:
    """The rule for a module of the user's own with parameters of its own; None for torch's modules and those without a forward."""
    kind = type(module)
    theirs = kind.__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule)
    runs = getattr(kind, "forward", None) is not nn.Module.forward and "forward" not in vars(module)
    trained = any(p is not None and p.requires_grad for p in module._parameters.values())
    return BARE if runs and trained and not theirs else None
