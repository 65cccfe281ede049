"""The model checker: refuses what would break per-example bounds, naming the module and the way
out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm

from dpfy.core import check
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.autograd.tape import looking
from dpfy.gradients.engine import mapped, no_autocast, no_reentrant_checkpoints, tensors_in


def check_model(model: nn.Module) -> None:
    """Refuse, by reading the modules alone, what is known to mix examples or to learn statistics
    from them.

    Guarantees: returns only if no module normalises over the batch, keeps running statistics of the
    data, or is still to be initialised from data, at least one parameter is trainable, and
    everything lies on devices, and is trained in types, whose rounding is bounded.
    """
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if any(is_lazy(p) for p in (*module._parameters.values(), *module._buffers.values())):
            raise Unsupported(
                f"{where}: a lazy module", "run one public example through the model first"
            )
        if isinstance(module, _InstanceNorm):
            if module.track_running_stats:
                raise Unsupported(
                    f"{where}: running statistics of private data", "set track_running_stats=False"
                )
        elif isinstance(module, _BatchNorm):
            raise Unsupported(
                f"{where}: normalisation over the batch makes every example depend on the others",
                "dpfy.repair(model) puts GroupNorm in its place, dpfy.repair(model, statistics='of "
                "public pretraining') freezes it",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.scale_grad_by_freq:
                raise Unsupported(
                    f"{where}: scale_grad_by_freq counts over the whole batch",
                    "set scale_grad_by_freq=False",
                )
            if module.max_norm is not None:
                raise Unsupported(
                    f"{where}: max_norm rewrites the table without noise", "set max_norm=None"
                )
        if isinstance(module, _SpectralNorm) and module.n_power_iterations > 0:
            raise Unsupported(
                f"{where}: a power iteration that changes buffers in training",
                "set n_power_iterations = 0 on it (its directions then stay as they are), or use "
                "weight_norm",
            )
        for parameter_name, p in module.named_parameters(recurse=False):
            if p.requires_grad and not p.is_floating_point():
                raise Unsupported(
                    f"{where}.{parameter_name}: parameter type {p.dtype}",
                    "use real floating point parameters",
                )
            if p.requires_grad:
                check.number_type(f"{where}.{parameter_name}: a parameter that is trained", p.dtype)
        for held, t in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if t.is_meta:
                raise Unsupported(
                    f"{where}.{held}: a tensor without values (device meta)",
                    "load the weights first",
                )
            check.device_kind(f"{where}.{held}", t.device.type)
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidInput(
            "model",
            type(model).__name__,
            "must have at least one parameter with requires_grad=True",
        )


def probe_mixing(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Run the model on changed copies of `inputs` and refuse it if one example's output depends on
    another example.

    In train mode, with the random state restored: no buffer may change during forward, the same
    input must give the same output, and changing row j must not change row i of the output.
    Everything is restored before returning.

    Guarantees: raises :class:`Unsupported` naming the first module whose rows mix. The inputs are
    the only data read; use random or public ones.
    """
    batch = len(inputs[0])
    if batch < 2:
        raise InvalidInput(
            "inputs", f"batch of {batch}", "must hold at least two examples to probe for mixing"
        )
    with _restored(model):
        model.train()
        base = _watched(model, inputs, batch)
        for i, rows in enumerate((slice(0, 1), slice(batch - 1, batch))):
            changed = tuple(_changed(x, rows, batch, seed=i) for x in inputs)
            _compare(model, base, _watched(model, changed, batch), rows, batch)


@dataclass
class _Run:
    """Outputs in the order the modules finished: (path, tensor whose first dimension is the
    batch).
    """

    outputs: list[tuple[str, Tensor]] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)


def _watched(model: nn.Module, inputs: tuple[Tensor, ...], batch: int) -> _Run:
    run, handles = _Run(), []
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(_recorder(run, name, batch)))
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(0)
            run.final = [t for t in tensors_in(model(*inputs)) if t.is_floating_point()]
    finally:
        for handle in handles:
            handle.remove()
    for name, b in model.named_buffers():
        if name not in before or not torch.equal(
            torch.nan_to_num(before[name]), torch.nan_to_num(b)
        ):
            raise Unsupported(
                f"{name}: a buffer that changes in training",
                "it would carry data without noise: remove or freeze it",
            )
    return run


def _recorder(
    run: _Run, name: str, batch: int
) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
        for t in tensors_in(output):
            if t.is_floating_point() and t.dim() and len(t) == batch:
                run.outputs.append(
                    (f"{name or 'the model'} ({type(module).__name__})", t.detach().clone())
                )

    return hook


def _compare(model: nn.Module, base: _Run, other: _Run, rows: slice, batch: int) -> None:
    """Refuse if a row outside `rows` differs in the final output; name the first module where it
    does.
    """
    for t in base.final:
        if not t.dim() or len(t) != batch:
            rule = (
                f"must return tensors whose first dimension is the batch ({batch}): one output per "
                f"example"
            )
            raise InvalidInput("model output", f"shape {list(t.shape)}", rule)
    if not any(_mixed(a, b, rows) for a, b in zip(base.final, other.final, strict=True)):
        return
    pairs = zip(base.outputs, other.outputs, strict=False)
    guilty = next((name for (name, a), (_, b) in pairs if _mixed(a, b, rows)), "the model")
    raise Unsupported(
        f"{guilty}: mixing examples of a batch (changing one row of the input changed other rows)",
        "make every example's output depend on that example alone (GroupNorm or LayerNorm instead "
        "of batch statistics)",
    )


def probe_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Tensor
) -> None:
    """Run the model again as it was called, and with the inputs of the examples in `rows` replaced
    by those of others.

    For steps that cannot be recorded. Modes are left as they are; buffers and torch's generators
    are put back.

    Guarantees: raises :class:`Unsupported` if an output of an example that was not replaced
    changes. Where it changes by so little that rounding may be the reason (experts multiply the
    tokens of all examples at once, and how many these are decides how sums are rounded), the model
    is run in float64 too, where that can be, and may differ there by the roundings of parts that
    compute in float32.
    """
    batch = len(rows)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def change(t: Tensor) -> Tensor:
        if not t.dim() or not len(t) or len(t) % batch:
            return t
        own = rows.repeat_interleave(len(t) // batch).view(-1, *[1] * (t.dim() - 1))
        other = t.roll(len(t) // batch, 0)
        return torch.where(own, 2 * other + 1 if t.is_floating_point() else other, t)

    def outputs(changed: bool, wide: bool) -> list[Tensor]:
        given: tuple[Any, dict[str, Any]] = (args, kwargs)
        if changed:
            given = mapped(args, change), mapped(kwargs, change)
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(0)
            if wide:
                tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
                held = {name: _in_float64(t) for name, t in tensors.items()}
                given = mapped(given[0], _in_float64), mapped(given[1], _in_float64)
                with no_autocast(device.type):
                    result = torch.func.functional_call(model, held, *given)
            else:
                result = model(*given[0], **given[1])
        return [
            t
            for t in tensors_in(result)
            if t.is_floating_point() and t.dim() and len(t) and len(t) % batch == 0
        ]

    def gap(wide: bool) -> float:
        """The largest change of a number, relative to the largest number of its output."""
        found = 0.0
        for a, b in zip(outputs(False, wide), outputs(True, wide), strict=False):
            if a.shape != b.shape:
                return math.inf
            kept = ~rows.repeat_interleave(len(a) // batch)
            left, right = (t[kept].double().nan_to_num() for t in (a, b))
            if not torch.equal(left, right):
                size = left.abs().amax().clamp(min=1e-30)
                found = max(found, float((left - right).abs().amax() / size))
        return found

    with _restored(model):
        if (first := gap(False)) > 0 and not _explained(first, gap, _narrowest(model)):
            raise Unsupported(
                "the model: mixing examples of a batch (changing some rows of its input "
                "changed others of its output)",
                "make every example's output depend on that example alone (GroupNorm or "
                "LayerNorm instead of batch statistics)",
            )


ROUNDED, ALONE = 1000, 64
"""Last places by which rounding may move an output of a model: where the same is seen in float64,
and where that cannot be run.
"""


def _explained(first: float, gap: Callable[[bool], float], dtype: torch.dtype) -> bool:
    """Whether rounding in `dtype` may be all that changed the outputs by `first`."""
    places = first / torch.finfo(dtype).eps
    if places > ROUNDED:
        return False
    try:
        return gap(True) <= 4 * torch.finfo(torch.float32).eps
    except RuntimeError:  # an operation that does not exist in float64
        return places <= ALONE


def _in_float64(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _narrowest(model: nn.Module) -> torch.dtype:
    types = {p.dtype for p in model.parameters() if p.dtype.is_floating_point and p.itemsize > 1}
    types |= {torch.bfloat16} if torch.is_autocast_enabled("cpu") else set()
    types |= {torch.bfloat16} if torch.is_autocast_enabled("cuda") else set()
    return max(types, key=lambda dtype: torch.finfo(dtype).eps)


def _mixed(a: Tensor, b: Tensor, rows: slice) -> bool:
    if a.shape != b.shape:
        return True
    keep = torch.ones(len(a), dtype=torch.bool, device=a.device)
    keep[rows] = False
    left, right = a[keep].double(), b[keep].double()
    size = left.abs().amax().clamp(min=1e-30) if left.numel() else left.new_ones(())
    return bool(((left - right).abs() > ROUNDED * torch.finfo(a.dtype).eps * size).any())


def _changed(x: Tensor, rows: slice, batch: int, seed: int) -> Tensor:
    """`x` with `rows` replaced: floats by fresh noise of larger size, integers by another row or a
    rolled one.
    """
    if not x.dim() or len(x) != batch:
        return x
    generator = torch.Generator().manual_seed(seed)
    y = x.clone()
    if x.is_floating_point():
        spread = x.detach().abs().mean().clamp(min=1.0).item()
        y[rows] = (3 * spread * torch.randn(x[rows].shape, generator=generator)).to(x)
    else:
        y[rows] = x[rows].roll(1, -1) if x.dim() > 1 else x.roll(1, 0)[rows]
        if torch.equal(y, x):
            y[rows] = (
                x.amin() if not torch.equal(x[rows], x.amin().expand_as(x[rows])) else x.amax()
            )
    return y


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put modes and buffers back, whatever happens. A buffer that nobody wrote to is not written
    to here either: torch counts writes.
    """
    modes = {m: m.training for m in model.modules()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    versions = {name: b._version for name, b in model.named_buffers()}
    try:
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode
        with torch.no_grad():
            for name, b in model.named_buffers():
                if name not in buffers:
                    continue
                same = torch.equal(b.nan_to_num(), buffers[name].nan_to_num())
                if b._version != versions[name] or not same:  # BatchNorm's writes are not counted
                    b.copy_(buffers[name])


class LossProbe:
    """Checks, once, in a user's own loop, that each loss depends on its own example alone.

    Attach it to the model before the first forward; call :meth:`check` with the losses of the first
    batch; it removes itself. The check looks through autograd at the first floating point tensor of
    the batch that the losses depend on: the input of the model where that is floating point, else
    the first activation whose first dimension is the batch. A unit may own several consecutive rows
    of that dimension.

    Guarantees: raises :class:`Unsupported` if the gradient of a combination of losses at row j is
    not that of loss j alone.
    """

    def __init__(self, model: nn.Module, rows_each: int = 1) -> None:
        self._watch: list[Tensor] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._rows_each = rows_each
        self._handles = [m.register_forward_hook(self._see) for m in model.modules()]
        self._handles.append(model.register_forward_pre_hook(self._enter, with_kwargs=True))

    def _enter(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        self._watch.clear()
        self.calls = [*self.calls[-1:], (args, kwargs)]

    def _see(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._watch += [
            t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad and t.dim()
        ]

    def close(self) -> None:
        """Remove the hooks. Calling it twice does no harm."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._watch, self.calls = [], [], []

    def check(self, losses: Tensor) -> None:
        """Raise if the losses mix examples; then remove the probe. The graph of `losses` stays
        usable.
        """
        batch = len(losses)
        watched = [t for t in self._watch if len(t) == batch * self._rows_each]
        self.close()
        if batch < 2 or not watched:
            return
        weights = _probe_weights(losses)
        with looking(), no_reentrant_checkpoints():
            plain = torch.autograd.grad(
                losses, watched, torch.ones_like(losses), retain_graph=True, allow_unused=True
            )
            tilted = torch.autograd.grad(
                losses, watched, weights, retain_graph=True, allow_unused=True
            )
        for a, b in zip(plain, tilted, strict=True):
            if a is None or b is None:
                continue
            rows = a.reshape(batch, -1).double()
            gap = (b.reshape(batch, -1).double() - weights.double()[:, None] * rows).norm(dim=1)
            # Weights are powers of two: where a row is one example's alone, its gradient is
            # multiplied exactly.
            rounding = 16 * torch.finfo(torch.promote_types(a.dtype, torch.float32)).eps
            if bool((gap > rounding * rows.norm(dim=1)).any()):
                raise Unsupported(
                    "losses that mix examples (the loss of one example depends on another example)",
                    "return one loss per unit computed from that unit alone; no batch statistics, "
                    "no contrast between examples",
                )


def _probe_weights(losses: Tensor) -> Tensor:
    """Different weights for different losses, all powers of two: multiplying by them is exact in
    every precision.
    """
    generator = torch.Generator().manual_seed(len(losses))
    exponents = torch.randperm(len(losses), generator=generator) % 8
    return torch.exp2(exponents.to(torch.float64)).to(losses)
