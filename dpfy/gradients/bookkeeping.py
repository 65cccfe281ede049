"""The fast engine: one backward without weight gradients, norms layer by layer, one weighted product per layer.

Book-keeping (Bu, Wang, Zha and Karypis 2023, "Differentially private optimization on large model at small cost"): the per-example
gradient of a layer is a product of its input and its output gradient, so its norm and its weighted sum need no per-example tensor.
"""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.core.values import Bounded
from dpfy.gradients.batched import chunks, per_example
from dpfy.gradients.clip import Clip
from dpfy.gradients.contribution import Contribution, Direct, Shared
from dpfy.gradients.engine import Grads, cautious, checked, group_rows, narrowest, silence, trainable, zeros
from dpfy.gradients.layers import Row, row_for
from dpfy.gradients.loop import alone_where_needed, attached, forget
from dpfy.gradients.replay import Replay
from dpfy.gradients.tape import Report, Site, Tape, rows_first, settle

STRAY_ELEMENTS = 2**24

_SITES: weakref.WeakKeyDictionary[nn.Module, tuple[Row, Tape, Site]] = weakref.WeakKeyDictionary()


def _tapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward`` while an engine is attached; a copy of the module made meanwhile runs its own forward."""
    entry = _SITES.get(module)
    if entry is None:
        return type(module).forward(module, *args, **kwargs)  # type: ignore[attr-defined]
    row, tape, site = entry
    return row.run(module, tape, site, *args, **kwargs)


class BookkeepingEngine:
    """Hooks on supported layers; any other use of a parameter is found at every step and goes through the batched route.

    Guarantees: exact for shared parameters and for modules used several times. A use that no layer row explains is never missed:
    supported layers run with constant weights, so any gradient that autograd still finds for a parameter is such a use.
    The place of the batch in each layer's tensors is measured on the first batch, never assumed.
    """

    name = "bookkeeping"

    def __init__(self) -> None:
        self._params: dict[str, nn.Parameter] | None = None
        self._names: dict[Tensor, str] = {}
        self._replay: Replay | None = None
        self._tape = Tape()
        self._sites: dict[nn.Module, Site] = {}
        self._strays: set[str] = set()

    def attach(self, model: nn.Module) -> None:
        """Patch the supported layers that have trainable parameters."""
        self.detach()
        self._params = trainable(model)
        self._names = {p: name for name, p in self._params.items()}
        self._tape, self._replay = Tape(), Replay(model)
        for name, module in model.named_modules():
            row = row_for(module)
            if row is None or not any(p.requires_grad for p in module.parameters(recurse=False)):
                continue
            site = Site(name or type(module).__name__, module)
            self._sites[module] = site
            _SITES[module] = (row, self._tape, site)
            module.forward = MethodType(_tapped, module)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Unpatch every layer and forget the model."""
        for module in list(self._sites):
            self._release(module)
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        self._params, self._names, self._strays = None, {}, set()

    def _release(self, module: nn.Module) -> None:
        self._sites.pop(module, None)
        _SITES.pop(module, None)
        vars(module).pop("forward", None)

    def bounded_sum(self, losses: Tensor, clip: Clip, mask: Tensor | None = None) -> Bounded[Grads]:
        """See :class:`dpfy.gradients.engine.Engine`."""
        params = attached(self._params)
        mask = checked(losses, mask)
        total = zeros(params)
        if not len(losses) or not params:
            return Bounded(total, clip.bound)
        with torch.no_grad(), torch.autocast(losses.device.type, enabled=False):
            found = self._contributions(losses, params)
            used = [name for name in params if name in found]
            if used:
                total |= _combine({name: found[name] for name in used}, clip, list(params), params, mask)
        forget(self._replay)
        if self._replay is not None and not self._tape.unsettled and not self._strays:
            self._replay.close()  # only strays need it, and it keeps the model's output alive
        return Bounded(total, clip.bound)

    def _contributions(self, losses: Tensor, params: dict[str, nn.Parameter]) -> dict[str, Contribution]:
        """Everything each parameter receives, joined over its uses."""
        if self._tape.unsettled:
            parts, leftover = self._first(losses, params)
        else:
            parts, leftover = self._usual(losses, params)
        for name, contribution in leftover.items():
            parts.setdefault(name, []).append(contribution)
        return {name: uses[0] if len(uses) == 1 else Shared(uses) for name, uses in parts.items()}

    def _usual(self, losses: Tensor, params: dict[str, nn.Parameter]) -> tuple[dict[str, list[Contribution]], dict[str, Contribution]]:
        """One backward, every report explained as it arrives."""
        parts: dict[str, list[Contribution]] = {}
        leftover = self._stray_gradients(losses, {name: params[name] for name in params if name in self._strays})
        with self._tape.into(lambda report: self._explain(report, len(losses), parts)):
            unexplained = self._backward(losses, {n: p for n, p in params.items() if n not in self._strays}, keep=False)
        if unexplained:
            names = ", ".join(sorted(unexplained))
            raise Unsupported(f"{names}: a use that appeared after the first batch", "use engine='batched'")
        return parts, leftover

    def _first(self, losses: Tensor, params: dict[str, nn.Parameter]) -> tuple[dict[str, list[Contribution]], dict[str, Contribution]]:
        """The first batch, and any batch that reaches a layer whose layout is not settled: look where the examples lie."""
        reports: list[Report] = []
        with self._tape.into(reports.append):
            self._strays |= self._backward(losses, params, keep=True)
        weights = torch.linspace(0.5, 2.0, len(losses), dtype=losses.dtype, device=losses.device)
        lost, again = [], iter(reports)
        with self._tape.into(lambda second: lost.extend(_settled(next(again), second, weights))):
            self._backward(losses, {}, keep=True, weights=weights)
        parts: dict[str, list[Contribution]] = {}
        for report in reports:
            if report.site not in lost:
                self._explain(report, len(losses), parts)
        leftover = self._stray_gradients(losses, {name: params[name] for name in params if name in self._strays})
        for name, grads in self._one_by_one(losses, lost).items():
            leftover[name] = Shared([leftover[name], grads]) if name in leftover else grads
        for site in lost:
            self._release(site.module)
            self._strays |= {self._names[p] for p in site.module.parameters(recurse=False) if p in self._names}
        self._tape.unsettled = not all(site.settled for site in {report.site for report in reports} - set(lost))
        return parts, leftover

    def _backward(
        self, losses: Tensor, params: dict[str, nn.Parameter], keep: bool, weights: Tensor | None = None
    ) -> set[str]:
        """Run backward to every tap; return the names of parameters that autograd itself still finds."""
        weights = torch.ones_like(losses) if weights is None else weights
        targets = [self._tape.anchor, *params.values()]
        grads = torch.autograd.grad(losses, targets, weights, retain_graph=keep, allow_unused=True)
        return {name for name, g in zip(params, grads[1:], strict=True) if g is not None}

    def _explain(self, report: Report, batch: int, parts: dict[str, list[Contribution]]) -> None:
        for p, contribution in report.explain(report.grad, report.saved, rows_first(report.site, batch)):
            parts.setdefault(self._names[p], []).append(contribution)

    def _stray_gradients(self, losses: Tensor, strays: dict[str, nn.Parameter]) -> dict[str, Contribution]:
        """Per-example gradients of the uses that no row explains, by the batched route."""
        if not strays:
            return {}
        tensors = list(strays.values())
        pieces = []
        with self._tape.muted():
            for rows in chunks(len(losses), sum(p.numel() for p in tensors), STRAY_ELEMENTS):
                grads = per_example(losses, tensors, rows)
                pieces.append(alone_where_needed(self._replay, losses, rows, tensors, grads))
        return {name: Direct(torch.cat([piece[i] for piece in pieces])) for i, name in enumerate(strays)}

    def _one_by_one(self, losses: Tensor, lost: list[Site]) -> dict[str, Contribution]:
        """Gradients of the sites in whose tensors the examples could not be told apart: one backward an example, this batch only."""
        if not lost:
            return {}
        rows: dict[str, list[Tensor]] = {}
        for i in range(len(losses)):
            sums: dict[str, Tensor] = {}

            def add(report: Report, sums: dict[str, Tensor] = sums) -> None:
                if report.site in lost:
                    for p, part in report.explain(report.grad, report.saved, lambda t: t[None]):
                        g = part.per_example(slice(0, 1))[0]
                        name = self._names[p]
                        sums[name] = sums[name] + g if name in sums else g

            pick = torch.zeros_like(losses)
            pick[i] = 1
            with self._tape.into(add):
                self._backward(losses, {}, keep=True, weights=pick)
            for name, g in sums.items():
                rows.setdefault(name, []).append(g)
        return {name: Direct(torch.stack(grads)) for name, grads in rows.items()}


def _settled(first: Report, second: Report, weights: Tensor) -> list[Site]:
    """The site, if the two passes show no place for the examples in it; else nothing."""
    assert first.site is second.site
    return [] if settle(first.site, first.grad, second.grad, weights) else [first.site]


def _combine(
    found: dict[str, Contribution], clip: Clip, names: list[str], params: dict[str, nn.Parameter], mask: Tensor | None
) -> Grads:
    """Norms, multipliers, weighted sums."""
    groups = group_rows(clip, names)
    squares = {name: c.squared_norm() for name, c in found.items()}
    some = next(iter(squares.values()))
    stacked = [[squares[names[i]] for i in members if names[i] in squares] for members in groups]
    squared_norms = torch.stack([torch.stack(s).sum(0) if s else torch.zeros_like(some) for s in stacked])
    squared_norms = cautious(squared_norms, narrowest(params))
    scale = silence(clip.scale(squared_norms), squared_norms, mask)
    keep = squared_norms.isfinite().all(0)
    if not bool(keep.all()):
        found = {name: c.cleaned(keep) for name, c in found.items()}
    sums: Grads = {}
    for members, weights in zip(groups, scale, strict=True):
        for name in (names[i] for i in members if names[i] in found):
            sums[name] = found[name].weighted_sum(weights).to(params[name].dtype).view(params[name].shape)
    return sums
