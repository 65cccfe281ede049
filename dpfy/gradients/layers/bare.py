"""Parameters that a module of the user's own multiplies with, adds, or spreads over the batch:
scales, shifts, class tokens.

While such a module runs, an alias stands in for each of its parameters; another one for rows of a
table that were looked up once for all examples, as positions are. It computes as the parameter
does, and torch asks it before every operation on it. A product with something that has a batch, a
sum, an expansion: these become nodes of the tape, like layers. All else is done with the parameter
itself, in autograd's sight, and is found there like any use that no rule explains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.layers import fused
from dpfy.gradients.layers.linear import run_linear
from dpfy.gradients.layers.normalization import run_layer_norm
from dpfy.gradients.layers.rule import Found, LayerRule, RowsFirst
from dpfy.gradients.one_record import Call, active, lowered, transformed
from dpfy.gradients.per_example.outer import Direct

IDLE = object()


Explained = Callable[[Tensor, tuple[Tensor, ...]], Found]
"""[batch, *shape] gradients of what an alias stands for, and what it was made from, to
contributions to the parameter.
"""


@dataclass(eq=False)
class _Origin:
    """What an alias stands for, how its gradients are explained, and what is known of its uses."""

    name: str
    parameter: nn.Parameter
    tape: Tape
    shape: torch.Size
    explain: Explained
    made_from: tuple[Tensor, ...] = ()
    """What `explain` reads: reported with every use, so that a recording knows where it lies."""
    sites: dict[tuple[str, int], Site] = field(default_factory=dict)
    hooks: object = IDLE
    """What saved tensors went through when the module began to run; `IDLE` when it does not run."""

    def site(self, kind: str, like: Tensor) -> Site | None:
        """The site of this use; None if it is not one for the tape.

        The batch must lie before the dimensions of the parameter. And what is computed again in the
        backward pass must be computed the same way, when the module around it does not run: a part
        of a module that is checkpointed is left to autograd.
        """
        before = like.dim() - _own_dims(self.shape)
        if before < 1 or fused.saved_tensor_hooks() != self.hooks:
            return None
        key = (kind, like.dim())
        if key not in self.sites:
            self.sites[key] = Site(f"{self.name} ({kind})", (self.parameter,), batch_dims=before)
        return None if self.sites[key].without_batch_before() else self.sites[key]

    def explained(self, rows: Tensor, saved: tuple[Tensor, ...]) -> Found:
        """[batch, ..., *shape that it was broadcast to] as contributions to the parameter."""
        own = _own_dims(self.shape)
        fixed = rows.dim() - own
        summed = [
            *range(1, fixed),
            *[fixed + i for i, size in enumerate(self.shape[len(self.shape) - own :]) if size == 1],
        ]
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        each = rows.sum(summed, dtype=wide) if any(rows.shape[i] > 1 for i in summed) else rows
        return self.explain(each.reshape(len(rows), *self.shape), saved)

    def shifted(self, output: Tensor, site: Site) -> Tensor:
        """`output`, to which what the alias stands for was added."""
        return self.tape.tap(
            output, site, lambda g, saved, view: self.explained(view(g), saved), self.made_from
        )


def _own_dims(shape: torch.Size) -> int:
    """Dimensions without ones in front."""
    return len(shape) - next((i for i, size in enumerate(shape) if size != 1), len(shape))


class Alias(Tensor):
    """Something that autograd knows, under another name. Autograd leads from it to that, so that
    nothing is lost where torch does not ask it.
    """

    origin: _Origin
    plain: Tensor
    version: int | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = (
            None
            if (kwargs and func not in LAYERS) or not torch.is_grad_enabled()
            else RULES.get(func)
        )
        if rule is not None and (found := _noted(rule, args, kwargs or {})) is not None:
            return found
        made = func(
            *tree_map_only(Alias, _plain, args), **tree_map_only(Alias, _plain, kwargs or {})
        )
        if args and isinstance(args[0], Alias) and made is _plain(args[0]):
            return args[0]  # `t.to(device)` need not do anything
        return made


@_disable_dynamo
def _noted(rule: Callable[..., Tensor | None], args: Any, kwargs: Any) -> Tensor | None:
    """Outside of compiled graphs: what a tape is told is not part of them."""
    if transformed():
        return None
    call = active()
    return rule(*args, **kwargs) if call is None else _for_each_record(call, rule, args, kwargs)


class _Unexplained(Exception):
    """No rule explains this use of an alias."""


def _for_each_record(
    call: Call, rule: Callable[..., Tensor | None], args: Any, kwargs: Any
) -> Tensor | None:
    """The same inside of a loss for one record: the rule is given what belongs to all records.

    Shapes must fit for one record: with the batch in front a parameter could meet the wrong
    dimension.
    """
    if rule in (_multiplied, _added) and (len(args) != 2 or _pair(*args) is None):
        return None
    leaves, structure = tree_flatten((args, kwargs))
    places = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and not isinstance(leaf, Alias)
    ]

    def work(batch: int, *values: Tensor) -> Tensor:
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        given, named = tree_unflatten(leaves, structure)
        if rule is _expanded:
            sizes = given[1] if len(given) == 2 and not isinstance(given[1], int) else given[1:]
            given = (given[0], batch, *sizes)
        if (made := rule(*given, **named)) is None:
            raise _Unexplained
        return made

    try:
        return lowered(call, work, *[leaves[place] for place in places])  # type: ignore[no-any-return]
    except _Unexplained:
        return None


class Bare(Alias):
    """An alias of a parameter."""

    _is_param = True


def without_alias(made: Any) -> Any:
    """What `made` stands for: a compiled graph is not to meet an alias."""
    return _plain(made) if isinstance(made, Alias) else made


def _plain(alias: Alias) -> Tensor:
    return vars(alias)["plain"]  # type: ignore[no-any-return]


def _origin(alias: Alias) -> _Origin | None:
    """What it stands for; None if it was written into since."""
    own = vars(alias)
    return (
        own["origin"] if own["version"] is None or own["plain"]._version == own["version"] else None
    )


def _alias(kind: type[Alias], plain: Tensor, origin: _Origin, version: int | None) -> Any:
    alias = plain.as_subclass(kind)
    vars(alias).update(plain=plain, origin=origin, version=version)
    return alias


def rows_alias(
    y: Tensor, tape: Tape, site: Site, weight: nn.Parameter, explain: Explained, index: Tensor
) -> Tensor:
    """An alias of rows of a table, looked up once for all examples: they meet the batch where they
    are added to it.
    """
    sites = site.origins.setdefault("rows", {})
    origin = _Origin(
        site.name, weight, tape, y.shape, explain, (index,), sites, fused.saved_tensor_hooks()
    )
    return _alias(Alias, y, origin, y._version)  # type: ignore[no-any-return]


def _pair(a: object, b: object) -> tuple[_Origin, Tensor, Tensor] | None:
    """Of two factors or summands the one alias, its value, and the other one, if that has the shape
    of the result.
    """
    alias, other = (a, b) if isinstance(a, Alias) else (b, a)
    if (
        not isinstance(alias, Alias)
        or isinstance(other, Alias)
        or not isinstance(other, Tensor)
        or not other.is_floating_point()
    ):
        return None
    origin = _origin(alias)
    small, large = _plain(alias).shape, other.shape
    fits = len(large) >= len(small) and all(
        a in (1, b) for a, b in zip(reversed(small), reversed(large), strict=False)
    )
    return (origin, _plain(alias).detach(), other) if origin is not None and fits else None


def _multiplied(a: object, b: object) -> Tensor | None:
    if (pair := _pair(a, b)) is None or (site := pair[0].site("scale", pair[2])) is None:
        return None
    origin, value, x = pair

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        return origin.explained(view(g * saved[0]), saved[1:])

    if fused.can_fuse() and not origin.made_from:
        return fused.run(fused.scale, x, origin.tape, site, explain, (), (value,))
    return origin.tape.tap(x * value, site, explain, (x, *origin.made_from))


def _added(a: object, b: object) -> Tensor | None:
    if (pair := _pair(a, b)) is None or (site := pair[0].site("shift", pair[2])) is None:
        return None
    origin, value, x = pair
    return origin.shifted(x + value, site)


def _expanded(alias: Any, *sizes: Any) -> Tensor | None:
    origin, spread = _origin(alias), _plain(alias).detach().expand(*sizes)
    site = None if origin is None else origin.site("expansion", spread)
    return None if origin is None or site is None else origin.shifted(spread, site)


def _layer(
    run: Callable[..., Tensor], x: object, own: dict[str, Any], **facts: Any
) -> Tensor | None:
    """A layer called as a function, by the rule of the layer. Its parameters are aliases of this
    module's, frozen, or not there.
    """
    origins = [_origin(p) for p in own.values() if isinstance(p, Bare)]
    frozen = [p for p in own.values() if p is not None and not isinstance(p, Bare)]
    if (
        not isinstance(x, Tensor)
        or isinstance(x, Alias)
        or x.dim() < 2
        or any(p.requires_grad for p in frozen)
    ):
        return None
    known = [
        origin
        for origin in origins
        if origin is not None and origin.hooks == fused.saved_tensor_hooks()
    ]
    if not known or len(known) < len(origins):
        return None
    first, kind = known[0], f"{run.__name__} of {', '.join(origin.name for origin in known)}"
    if (kind, x.dim()) not in first.sites:
        first.sites[kind, x.dim()] = Site(kind, tuple(origin.parameter for origin in known))
    site = first.sites[kind, x.dim()]
    if site.without_batch_before():
        return None
    parameters = {name: _plain(p) if isinstance(p, Bare) else p for name, p in own.items()}
    return run(SimpleNamespace(_parameters=parameters, **facts), first.tape, site, x)


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    return _layer(run_linear, x, {"weight": weight, "bias": bias}) if weight.dim() == 2 else None


def _layer_norm(
    x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    if weight is None or x.dim() <= len(shape):
        return None
    return _layer(
        run_layer_norm, x, {"weight": weight, "bias": bias}, normalized_shape=tuple(shape), eps=eps
    )


LAYERS: dict[Any, Callable[..., Tensor | None]] = {F.linear: _linear, F.layer_norm: _layer_norm}
"""Layers that are called as functions with a module's own parameters."""

RULES: dict[Any, Callable[..., Tensor | None]] = LAYERS | {
    **dict.fromkeys(
        (torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply),
        _multiplied,
    ),
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
    before = {
        name: p
        for name, p in own.items()
        if isinstance(p, nn.Parameter) and p.requires_grad and not isinstance(p, Bare)
    }
    origins = {name: _bare_origin(site, name, p, tape) for name, p in before.items()}
    aliases: dict[str, Any] = {
        name: _alias(Bare, p, origins[name], None) for name, p in before.items()
    }
    for origin in origins.values():
        origin.hooks = fused.saved_tensor_hooks()
    own.update(aliases)
    try:
        return forward(module, *args, **kwargs)
    finally:
        own.update(
            {name: before[name] for name, alias in aliases.items() if own.get(name) is alias}
        )
        for origin in origins.values():
            origin.hooks = IDLE


def _bare_origin(site: Site, name: str, p: nn.Parameter, tape: Tape) -> _Origin:
    """What is known of the parameter; nothing if another one has taken its place."""
    known: _Origin | None = site.origins.get(name)
    if known is None or known.parameter is not p:
        known = site.origins[name] = _Origin(
            f"{site.name}.{name}", p, tape, p.shape, lambda each, _: [(p, Direct(each))]
        )
    return known


BARE = LayerRule(run_bare)


def bare_rule(module: nn.Module) -> LayerRule | None:
    """The rule for a module of the user's own with parameters of its own; None for torch's modules
    and those without a forward.
    """
    kind = type(module)
    theirs = kind.__module__.startswith("torch.") or isinstance(module, torch.jit.ScriptModule)
    runs = getattr(kind, "forward", None) is not nn.Module.forward and "forward" not in vars(module)
    trained = any(p is not None and p.requires_grad for p in module._parameters.values())
    return BARE if runs and trained and not theirs else None
