"""One example alone: when a backward over the batch meets NaN or infinity, nobody can tell from it
whose they are.

In a shared graph zero times infinity is NaN, so one bad example spoils the gradients of all the
others. Dropping them all would let one example change the sum by more than the bound. So the model
is run again on each suspect by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpfy.core.errors import Unsupported
from dpfy.gradients.autograd.structure import mapped, tensors_in
from dpfy.gradients.one_record import running


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
