"""The reference engines: one example at a time, or one vectorised backward for many.

Every other engine is tested against them. When a backward over the batch meets NaN or infinity,
nobody can tell from it whose they are: in a shared graph zero times infinity is NaN, so one bad
example spoils the gradients of all the others. Dropping them all would let one example change the
sum by more than the bound. So the model is run again on each suspect by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import (
    Engine,
    Grads,
    added,
    attached,
    checked,
    clipped_sum,
    mapped,
    no_reentrant_checkpoints,
    tensors_in,
    trainable,
    zeros,
)
from dpfy.gradients.one_record import running
from dpfy.gradients.per_example.arithmetic import row_chunks
from dpfy.gradients.per_example.rounding import as_rows


@dataclass
class _Call:
    """One forward of the whole model: what went in, what came out, and the random state it started
    from.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Tensor
    output: Any = None


@dataclass
class SingleExample:
    """Remembers the model's calls since the last bounded sum, so that one example can be run by
    itself.
    """

    model: nn.Module
    calls: list[_Call] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    busy: bool = False

    def __post_init__(self) -> None:
        self.handles = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.calls = [], []

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not self.busy and not running():
            # Two calls are already too many to run again; older ones are let go, or unused forwards
            # would pile up.
            self.calls = [*self.calls[-1:], _Call(args, kwargs, torch.random.get_rng_state())]

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled() and not self.busy and self.calls and not running():
            self.calls[-1].output = output

    def alone(self, losses: Tensor, row: int, params: list[nn.Parameter]) -> list[Tensor]:
        """The gradient of ``losses[row]`` from a forward of that example alone; zeros if it is
        still not finite.

        The loss reaches it through its gradient at the model's output, of which only this example's
        rows are used: one, or several in a row if the examples of the output come unit by unit.
        """
        call = self._only_call()
        outputs = [t for t in tensors_in(call.output) if t.requires_grad]
        total = len(outputs[0]) if outputs and outputs[0].dim() else 0
        if not total or total % len(losses) or any(not t.dim() or len(t) != total for t in outputs):
            raise self._cannot()
        each = total // len(losses)
        own = slice(row * each, (row + 1) * each)
        pick = torch.zeros_like(losses)
        pick[row] = 1
        at_output = torch.autograd.grad(losses, outputs, pick, retain_graph=True, allow_unused=True)
        for g in at_output:
            if g is not None and any(
                bool((part.nan_to_num(0.0, 0.0, 0.0) != 0).any())
                for part in (g[: own.start], g[own.stop :])
            ):
                raise self._cannot()
        again = [t for t in tensors_in(self._run(call, own, total)) if t.requires_grad]
        pairs = [(t, g[own]) for t, g in zip(again, at_output, strict=True) if g is not None]
        grads = torch.autograd.grad(
            [t for t, _ in pairs], params, [g for _, g in pairs], allow_unused=True
        )
        made = [
            torch.zeros_like(p) if g is None else g.detach()
            for p, g in zip(params, grads, strict=True)
        ]
        return (
            made
            if all(bool(g.isfinite().all()) for g in made)
            else [torch.zeros_like(p) for p in params]
        )

    def _run(self, call: _Call, own: slice, total: int) -> Any:
        def pick(t: Tensor) -> Tensor:
            return t[own] if t.dim() and len(t) == total else t

        self.busy = True
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.random.set_rng_state(call.random)
                return self.model(*mapped(call.args, pick), **mapped(call.kwargs, pick))
        finally:
            self.busy = False

    def _only_call(self) -> _Call:
        if len(self.calls) != 1:
            raise self._cannot()
        return self.calls[0]

    def _cannot(self) -> Unsupported:
        what = (
            "a non-finite gradient where one example cannot be run by itself (several forwards, or "
            "outputs without a batch)"
        )
        return Unsupported(what, "use engine='bookkeeping', or keep the losses finite")


class Watching(Engine):
    """An engine that needs nothing of a model but its parameters, and its calls to run an example
    again by itself.
    """

    def __init__(self) -> None:
        self._params: dict[str, nn.Parameter] | None = None
        self._single: SingleExample | None = None

    def attach(self, model: nn.Module) -> None:
        """Remember the trainable parameters, and watch the model's calls."""
        self.detach()
        self._params, self._single = trainable(model), SingleExample(model)

    def detach(self) -> None:
        """Remove the hooks and forget the model."""
        if self._single is not None:
            self._single.close()
        self._params = self._single = None


class LoopEngine(Watching):
    """One ``autograd.grad`` for each example, clipped and added. Works for any differentiable
    model.
    """

    name = "loop"

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        params = attached(self._params)
        mask = checked(losses, mask)
        total = zeros(params, clip)
        names = list(params)
        for i in range(len(losses) if params else 0):
            if mask is None or mask[i]:
                added(
                    total,
                    clipped_sum(self._one(losses, i, list(params.values())), names, clip, None),
                )
        forget(self._single)
        return Bounded(total, clip.bound)

    def _one(self, losses: Tensor, i: int, params: list[nn.Parameter]) -> list[Tensor]:
        """The gradient of one loss, as lists of one row."""
        if (apart := getattr(losses, "apart", None)) is not None:  # each has a graph of its own
            if not apart[i].requires_grad:
                return [torch.zeros_like(p)[None] for p in params]
            with no_reentrant_checkpoints():
                own = torch.autograd.grad(apart[i], params, allow_unused=True)
            return [
                (torch.zeros_like(p) if g is None else dense(g))[None]
                for p, g in zip(params, own, strict=True)
            ]
        with no_reentrant_checkpoints():
            grads = torch.autograd.grad(losses[i], params, retain_graph=True, allow_unused=True)
        rows = [
            (torch.zeros_like(p) if g is None else dense(g))[None]
            for p, g in zip(params, grads, strict=True)
        ]
        return alone_where_needed(self._single, losses, slice(i, i + 1), params, rows)


def alone_where_needed(
    single: SingleExample | None,
    losses: Tensor,
    rows: slice,
    params: list[nn.Parameter],
    grads: list[Tensor],
) -> list[Tensor]:
    """`grads` ([rows, *parameter] each), where the examples that are not finite were run again by
    themselves.
    """
    finite = torch.stack([as_rows(g).isfinite().all(1) for g in grads]).all(0)
    if bool(finite.all()) or len(losses) == 1 or single is None:
        return grads
    for k in torch.nonzero(~finite).flatten().tolist():
        for g, again in zip(grads, single.alone(losses, rows.start + k, params), strict=True):
            g[k] = again
    return grads


def forget(single: SingleExample | None) -> None:
    """The calls before a bounded sum do not belong to the next one."""
    if single is not None:
        single.calls.clear()


def dense(grad: Tensor) -> Tensor:
    """A dense tensor for a gradient that an embedding with ``sparse=True`` may hand out sparse."""
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()


CHUNK_ELEMENTS = 2**26
"""How many per-example gradient elements may exist at once."""


class BatchedEngine(Watching):
    """Per-example gradients from one batched vector-Jacobian product a chunk of examples, then
    clipped and summed.

    Memory is bounded: at most `chunk_elements` gradient elements (but always one example) exist at
    a time.
    """

    name = "batched"

    def __init__(self, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        super().__init__()
        self._chunk_elements = chunk_elements

    def attach(self, model: nn.Module) -> None:
        """Remember the trainable parameters, and watch the model's calls."""
        self.detach()
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise Unsupported(
                    f"{name or type(module).__name__}: sparse=True in the batched engine",
                    "set sparse=False",
                )
        super().attach(model)

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        params = attached(self._params)
        mask = checked(losses, mask)
        total = zeros(params, clip)
        if not params or not len(losses):
            return Bounded(total, clip.bound)
        names, tensors = list(params), list(params.values())
        for rows in row_chunks(len(losses), sum(p.numel() for p in tensors), self._chunk_elements):
            per_unit = alone_where_needed(
                self._single, losses, rows, tensors, per_example(losses, tensors, rows)
            )
            added(total, clipped_sum(per_unit, names, clip, None if mask is None else mask[rows]))
        forget(self._single)
        return Bounded(total, clip.bound)


def per_example(losses: Tensor, tensors: list[nn.Parameter], rows: slice) -> list[Tensor]:
    """Gradients of ``losses[rows]``, one by one, stacked: a list of [rows, *parameter]. The graph
    is kept.
    """
    count = rows.stop - rows.start
    picks = torch.zeros(count, len(losses), dtype=losses.dtype, device=losses.device)
    picks[torch.arange(count), torch.arange(rows.start, rows.stop)] = 1
    try:
        with no_reentrant_checkpoints():
            grads = torch.autograd.grad(
                losses, tensors, picks, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError | Unsupported):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Unsupported(
            f"a vectorised backward through this model ({first})", "use engine='loop'"
        ) from error
    return [
        p.new_zeros(count, *p.shape) if g is None else dense(g)
        for p, g in zip(tensors, grads, strict=True)
    ]
