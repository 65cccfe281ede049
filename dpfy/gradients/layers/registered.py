"""Rules for layers of the user's own, and the check that holds each of them to autograd.

A registered layer runs its own forward with its parameters detached, so autograd finds nothing for
them, and what the rule says is all that they receive. A rule that is wrong would therefore train
another model than the user thinks, and one that mixes examples would break the guarantee. So the
gradients that it gives are compared with autograd's on real batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.autograd.tape import Site, Tape
from dpfy.gradients.engine import no_autocast
from dpfy.gradients.layers.rule import Found, LayerRule, RowsFirst, as_positions
from dpfy.gradients.layers.table import LAYERS, REGISTERED
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.outer import Direct, outer

Given = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""By the name of a parameter, what a rule gives for it."""

UserRule = Callable[..., Given]

_TENSOR = object()

CHECKED_EXAMPLES = 4
"""How many examples of a batch are compared with autograd: those with the largest gradients."""


def register_layer(
    kind: type[nn.Module], rule: UserRule | None = None
) -> UserRule | Callable[[UserRule], UserRule]:
    """Add the rule of a layer of your own, so that it is as fast as torch's layers are.

    Without a rule a layer is exact too, but some of its operations may need a pass for each
    example. The rule says what the layer's parameters receive from each example.

    Args:
        kind: The type of the layer. A subclass counts if it runs the very forward of `kind`; a
            layer whose children hold parameters, or some of whose parameters are computed by a
            parametrization, runs without the rule.
        rule: Takes the layer, the gradient at its output, and the tensors that it was called with,
            all with the examples in their first dimension. Gives for each trainable parameter, by
            name, either the gradient of every example, [examples, *parameter], or two factors
            [examples, ..., rows] and [examples, ..., columns]: the gradient of an example is then
            the sum over all positions between of the outer products of both, which are never
            written out. Left out, `register_layer` is a decorator.

    Returns:
        The rule; or the decorator.

    Raises:
        InvalidInput: `kind` is no layer with a forward of its own, or has a rule already.
        Unsupported: While training, at the first step: the layer gives more than one tensor, or the
            rule gives other gradients than autograd.

    Guarantees: at the first use of every layer, whenever it is called in a new way, and at its
    second, fourth, eighth use and so on, the gradients of some examples are compared with autograd's
    for those examples alone. A rule that leaves a trainable parameter out is refused at every step.
    Whatever a rule gives is clipped as any gradient is.

    Example:
        For inputs of two dimensions `flatten(1, -2)` is not needed.

        >>> import torch, dpfy
        >>> class Scaled(torch.nn.Module):
        ...     def __init__(self, ins, outs):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.randn(outs, ins) / ins**0.5)
        ...         self.scale = torch.nn.Parameter(torch.ones(outs))
        ...     def forward(self, x):
        ...         return torch.exp(self.scale) * (x @ self.weight.t())
        >>> @dpfy.register_layer(Scaled)
        ... def scaled(layer, gradient, x):
        ...     products = gradient * torch.exp(layer.scale)
        ...     outputs = x @ layer.weight.t()
        ...     return {"weight": (products, x), "scale": (products * outputs).flatten(1, -2).sum(1)}
    """
    if rule is None:
        return partial(register_layer, kind)  # type: ignore[return-value]
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InvalidInput("kind", kind, "must be a type of torch.nn.Module")
    if kind.forward is nn.Module.forward:
        raise InvalidInput("kind", kind.__name__, "must have a forward of its own")
    if kind in LAYERS or kind in REGISTERED or kind.__module__.startswith("torch."):
        raise InvalidInput("kind", kind.__name__, "must not be a layer of torch, or have a rule")
    REGISTERED[kind] = LayerRule(partial(_run, rule), _has_no_children, own=None)
    return rule


def _has_no_children(module: nn.Module) -> bool:
    """Whether all parameters are the module's own."""
    own = list(module.parameters(recurse=False))
    return len(own) == len(list(module.parameters()))


def _run(
    rule: UserRule, module: nn.Module, tape: Tape, site: Site, *args: Any, **kwargs: Any
) -> Any:
    """The module's own forward with constant parameters."""
    forward = type(module).forward
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    inputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    call = _Call(rule, module, others, structure)
    with _parameters(module, lambda p: p.detach()):
        output = forward(module, *args, **kwargs)
    if not isinstance(output, Tensor):
        raise Unsupported(
            f"{site.name}: a layer with a registered rule that gives a {type(output).__name__}",
            "return one tensor, or leave the layer without a rule",
        )
    check = site.origins.setdefault("rule", RuleCheck(site.name))

    def explain(g: Tensor, saved: tuple[Tensor, ...], view: RowsFirst) -> Found:
        found = call.contributions(g, saved[: len(inputs)], view)
        check.hold(call, found, g, saved[: len(inputs)], view)
        return [(p, part) for p, part in found if p.requires_grad]

    if any(output is t for t in inputs):
        output = output.clone()
    # A rule may read what nobody knows of, so that work on its reports is never repeated blindly.
    return tape.tap(output, site, explain, inputs, facts=(object(),))


@contextmanager
def _parameters(module: nn.Module, change: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """Other tensors in the place of the parameters of `module`."""
    own: dict[str, Any] = module._parameters
    before = {name: p for name, p in own.items() if p is not None}
    own.update({name: change(p) for name, p in before.items()})
    try:
        yield
    finally:
        own.update(before)


@contextmanager
def _copy(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Copies in `dtype` in the place of the parameters and buffers of `module`."""
    held: list[dict[str, Any]] = [module._parameters, *[m._buffers for m in module.modules()]]
    before = [dict(own) for own in held]
    try:
        for own in held:
            for name, t in own.items():
                if t is not None:
                    made = _cast(t, dtype).clone()
                    own[name] = nn.Parameter(made, t.requires_grad) if own is held[0] else made
        yield
    finally:
        for own, kept in zip(held, before, strict=True):
            own.update(kept)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.detach().to(dtype) if t.is_floating_point() else t.detach()


@dataclass(frozen=True)
class _Call:
    """One call of a layer with a registered rule."""

    rule: UserRule
    module: nn.Module
    leaves: list[Any]
    """Its arguments, with `_TENSOR` for every tensor: the tape keeps those."""
    structure: TreeSpec

    def contributions(
        self, g: Tensor, inputs: Sequence[Tensor], view: RowsFirst
    ) -> list[tuple[Tensor, Contribution]]:
        """What the rule gives, for every parameter that it names."""
        rows, kind = view(g), type(self.module).__name__
        tensors = [view(t).to(g.dtype) if t.is_floating_point() else view(t) for t in inputs]
        with torch.no_grad():
            given = self.rule(self.module, rows, *tensors)
        own = self.module._parameters
        needed = {name for name, p in own.items() if p is not None and p.requires_grad}
        known = {name for name, p in own.items() if p is not None}
        if not isinstance(given, Mapping) or needed - set(given) or set(given) - known:
            names = sorted(given) if isinstance(given, Mapping) else type(given).__name__
            needs = f"must give gradients for {', '.join(sorted(needed))} and no other parameters"
            raise InvalidInput(f"what the rule of {kind} returns", names, needs)
        return [
            (p, _contribution(f"the rule of {kind} for {name!r}", value, p, len(rows)))
            for name, value in given.items()
            if (p := own[name]) is not None
        ]

    def reference(
        self, g: Tensor, inputs: Sequence[Tensor], view: RowsFirst, examples: Sequence[int]
    ) -> list[dict[str, Tensor]]:
        """Autograd's gradients of the parameters, for some examples alone."""
        tensors = iter(inputs)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        found = []
        with torch.enable_grad(), _parameters(self.module, lambda p: p.detach().requires_grad_()):
            own = {name: p for name, p in self.module._parameters.items() if p is not None}
            output = type(self.module).forward(self.module, *args, **kwargs)
            for k in examples:
                if output.shape == g.shape:
                    alone = torch.zeros_like(g)
                    view(alone)[k] = view(g)[k]
                else:  # gradients of all examples at the output of a call without a batch
                    alone = g[k]
                grads: Sequence[Tensor | None] = [None] * len(own)
                if output.requires_grad:
                    grads = torch.autograd.grad(
                        output, list(own.values()), alone, retain_graph=True, allow_unused=True
                    )
                found.append(
                    {
                        name: torch.zeros_like(p) if grad is None else grad
                        for (name, p), grad in zip(own.items(), grads, strict=True)
                    }
                )
        return found


def _contribution(
    what: str, value: Tensor | tuple[Tensor, Tensor], p: Tensor, batch: int
) -> Contribution:
    """What a rule gives for one parameter."""
    if isinstance(value, Tensor):
        if value.shape != (batch, *p.shape):
            needs = f"must have shape [examples, {', '.join(map(str, p.shape))}]"
            raise InvalidInput(what, f"shape {list(value.shape)}", needs)
        return Direct(value)
    left, right = value
    if left.dim() < 2 or right.dim() < 2 or len(left) != batch or len(right) != batch:
        raise InvalidInput(what, "two factors", "must have the examples in their first dimension")
    left, right = as_positions(left), as_positions(right)
    if (left.shape[2], right.shape[2]) != p.shape or left.shape[1] != right.shape[1]:
        sizes = f"factors of widths {left.shape[2]} and {right.shape[2]}"
        raise InvalidInput(what, sizes, f"must make a matrix of shape {list(p.shape)}")
    return outer(left, right)


@dataclass
class RuleCheck:
    """The comparison of one layer's rule with autograd."""

    name: str
    uses: int = 0
    ways: set[tuple[object, ...]] = field(default_factory=set)

    def hold(
        self,
        call: _Call,
        found: Sequence[tuple[Tensor, Contribution]],
        g: Tensor,
        inputs: Sequence[Tensor],
        view: RowsFirst,
    ) -> None:
        """Compare, if it is time to.

        Raises:
            Unsupported: The rule gives other gradients than autograd.
        """
        if g.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        way = (call.module.training, g.dtype, g.dim(), *[(t.dtype, t.dim()) for t in inputs])
        self.uses += 1
        if way in self.ways and self.uses & (self.uses - 1):
            return
        sizes = view(g).reshape(len(view(g)), -1).double().norm(dim=1).nan_to_num(0.0, 0.0, 0.0)
        examples = sizes.topk(min(CHECKED_EXAMPLES, len(sizes))).indices
        told = [int(k) for k in examples if sizes[k] > 0]
        if not told:
            return  # nothing arrives: the next use tells
        self.ways.add(way)
        if (wrong := _wrong(call, g, inputs, view, told)) is not None:
            raise Unsupported(
                f"{self.name}: its registered rule gives another gradient for {wrong!r} than "
                f"autograd",
                "correct the rule (it must use each example's own rows alone, and no random "
                "numbers), or leave the layer without one",
            )


def _wrong(
    call: _Call, g: Tensor, inputs: Sequence[Tensor], view: RowsFirst, examples: Sequence[int]
) -> str | None:
    """The name of a parameter for which rule and autograd differ. In float64, where the layer can."""

    with no_autocast(g.device.type):
        for dtype in (torch.float64, g.dtype):
            grad, tensors = _cast(g, dtype), [_cast(t, dtype) for t in inputs]
            try:
                with _copy(call.module, dtype):
                    # a forward may write into its inputs
                    expected = call.reference(grad, [t.clone() for t in tensors], view, examples)
                break
            except (RuntimeError, NotImplementedError):
                if dtype is g.dtype:
                    raise
                # else a function of the layer's own that knows one type alone
        with _copy(call.module, dtype):
            names = {id(p): name for name, p in call.module._parameters.items()}
            given = {
                names[id(p)]: [part.per_example(slice(k, k + 1))[0] for k in examples]
                for p, part in call.contributions(grad, tensors, view)
            }
    tolerance = check.number_type("a gradient", dtype).agreement
    for name, rows in given.items():
        right = [each[name] for each in expected]
        scale = max(float(each.double().norm()) for each in right)
        for mine, theirs in zip(rows, right, strict=True):
            gap = float((mine.double() - theirs.double()).norm())
            if not gap <= tolerance * max(float(theirs.double().norm()), 1e-3 * scale):
                return name
    return None
