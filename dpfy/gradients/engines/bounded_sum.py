"""The bounded sum of one attached model, stage by stage: reports, contributions, multipliers, sums.

Nothing here knows who calls the stages: an engine runs them as the gradients come, a recorder
section by section or as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpfy.core.errors import Unsupported, warn
from dpfy.core.values import Bounded
from dpfy.gradients.autograd.tape import LayerReport, Tape, rows_first
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Grads, no_autocast, no_reentrant_checkpoints, zeros
from dpfy.gradients.kernels import with_portable_way
from dpfy.gradients.per_example.clipped_sum import ClippedSum, Flag, ShardedNorms, weigh
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.joined import Buffers, SumJob, run_jobs
from dpfy.gradients.per_example.shared import MeasuredContribution, combine_uses, overlapping

MOST_WAITING = 36
"""How many sums over positions may wait for a common launch: the tensors of normalisation layers
are held meanwhile.
"""

Parts = dict[str, list[Contribution]]
"""By parameter, what its uses contribute."""


class BoundedSum:
    """Reports to contributions (:meth:`report`, :meth:`explain`), to multipliers (:meth:`weigh`),
    to sums (:meth:`sum`).

    Guarantees: a gradient that autograd still finds for a parameter outside of `untracked` is
    refused, never left out. An example that is masked out, or whose norm is not finite, adds
    exactly zero to :meth:`total`.
    """

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params
        self.names: dict[Tensor, str] = {p: name for name, p in params.items()}
        self.tape = Tape()
        self.untracked: set[str] = set()
        """Parameters with uses that no layer rule explains: anyone who calls adds what these
        contribute.
        """
        self.seen: set[str] = set()
        self._several: set[str] = set()
        self._jobs: list[SumJob] = []
        self._batches, self._warned = 0, False

    @property
    def steady(self) -> bool:
        """Whether every batch axis is known and every use has its rule: a step then asks the device
        nothing on its way.
        """
        return not self.tape.unsettled and not self.untracked and len(self.seen) == len(self.params)

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters lie: a graph is good only as long as they stay there."""
        return tuple(p.data_ptr() for p in self.params.values())

    def identity(self) -> tuple[object, ...]:
        """All that the work on reports depends on besides the reports."""
        return (
            *self.addresses(),
            *[p.requires_grad for p in self.params.values()],
            len(self._several),
        )

    def report(
        self,
        losses: Tensor,
        receive: Callable[[LayerReport], None],
        keep: bool = False,
        weights: Tensor | None = None,
        edges: Sequence[GradientEdge] = (),
    ) -> None:
        """Run backward, to `edges` too, and hand every report to `receive`. Functions of untracked
        parameters are left alone.
        """
        with self.tape.into(receive):
            names = [name for name in self.params if name not in self.untracked]
            missed = self.backward(losses, names, keep, weights, edges)
        if missed:
            listed = ", ".join(sorted(missed))
            raise Unsupported(
                f"{listed}: a use outside of its layer that appeared after the first batch",
                "let the first batch use the parameter in every way that later ones do; slower, for "
                "models that change: engine='loop'",
            )

    def backward(
        self,
        losses: Tensor,
        names: list[str],
        keep: bool,
        weights: Tensor | None = None,
        edges: Sequence[GradientEdge] = (),
    ) -> set[str]:
        """Run backward to every tap; return the names of parameters that autograd itself still
        finds.
        """
        weights = torch.ones_like(losses) if weights is None else weights
        targets: Any = [self.tape.anchor, *[self.params[name] for name in names], *edges]
        # To wake another thread for it, and to be woken by that, takes longer than it gains.
        with torch.autograd.set_multithreading_enabled(False), no_reentrant_checkpoints():
            grads = torch.autograd.grad(
                losses, targets, weights, retain_graph=keep, allow_unused=True
            )
        return {name for name, g in zip(names, grads[1:], strict=False) if g is not None}

    def gather(
        self, losses: Tensor, parts: Parts, keep: bool = False, edges: Sequence[GradientEdge] = ()
    ) -> None:
        """Run backward, and add to `parts` what every report contributes, as it comes."""
        self._jobs.clear()
        self.report(
            losses, lambda report: self._explain(report, len(losses), parts), keep, edges=edges
        )

    def explain(self, reports: Sequence[LayerReport], batch: int) -> list[Parts]:
        """What each report contributes. Nothing waits afterwards."""
        found: list[Parts] = [{} for _ in reports]
        try:
            for report, parts in zip(reports, found, strict=True):
                self._explain(report, batch, parts)
            self._flush()
        finally:
            self._jobs.clear()
        return found

    def _explain(self, report: LayerReport, batch: int, parts: Parts) -> None:
        if report.site.without_batch:
            return
        view = rows_first(report.site, batch, report.grad)
        for p, contribution in with_portable_way(
            lambda: report.explain(report.grad, report.saved, view)
        ):
            job = contribution.sum_job
            if job is not None and (not self._jobs or self._jobs[-1] is not job):
                self._jobs.append(job)
            if p not in self.names:
                raise Unsupported(
                    f"{report.site.name} with parameters of another module",
                    "train the model that holds them, or freeze them",
                )
            self.add(self.names[p], contribution, parts)
        if len(self._jobs) >= MOST_WAITING:
            self._flush()

    def add(self, name: str, contribution: Contribution, parts: Parts) -> None:
        """Norms are taken while the layer's tensors are at hand; what is kept may be much smaller
        than they are. Not of a parameter that may have other uses: their norm would then depend on
        what was kept, and that on the batch.
        """
        if (
            not contribution.is_measured
            and self._used_once(name)
            and not any(block.waits for block in contribution.row_blocks())
        ):
            whole = contribution
            contribution = with_portable_way(lambda: MeasuredContribution.of(whole))
        parts.setdefault(name, []).append(contribution)

    def _used_once(self, name: str) -> bool:
        return name in self.seen and name not in self._several

    def _flush(self) -> None:
        """Make the sums that wait for a common launch."""
        run_jobs(self._jobs)
        self._jobs.clear()

    def weigh(
        self, parts: Parts, clip: Clip, mask: Tensor | None, sharded: ShardedNorms | None = None
    ) -> ClippedSum:
        """The multiplier of every example, from the norms of all that the parameters receive over
        all their uses.
        """
        self.seen |= set(parts)
        self._several |= {name for name, uses in parts.items() if overlapping(uses)}
        found = {name: combine_uses(uses) for name, uses in parts.items()}
        if self._jobs:
            self._flush()
        return with_portable_way(lambda: weigh(found, clip, self.params, mask, sharded))

    def look_for_lost(self, scaled: ClippedSum) -> None:
        """Warn once if most of an example is lost to the bound on rounding: looked for at the
        first, second, fourth, eighth batch and so on.
        """
        self._batches += 1
        if self._batches & (self._batches - 1) or self._warned:
            return
        name = scaled.lost_to_rounding()
        if name is not None:
            self._warned = True
            warn(
                f"{name}: what rounding may do to its gradients is far larger than they are, so clipping by "
                f"that bound leaves little but noise; use engine='loop', whose norms are those of the very "
                f"gradients that it adds, or train in float64"
            )

    def sum(
        self, scaled: ClippedSum, last: bool = False, buffers: Buffers | None = None
    ) -> Bounded[Grads]:
        """The weighted sums of the parameters of `scaled`, in their order, in `buffers` if there
        are any. See :meth:`ClippedSum.sums`.
        """
        with torch.no_grad(), no_autocast(scaled.scale.device.type):
            sums = (
                scaled.sums(last, buffers)
                if last
                else with_portable_way(lambda: scaled.sums(last, buffers))
            )
            for name in scaled.params:
                if name not in sums:
                    place = None if buffers is None else buffers.places.get(name)
                    sums[name] = (
                        zeros({name: self.params[name]}, scaled.clip)[name]
                        if place is None
                        else place.zero_()
                    )
            total = {name: sums.pop(name) for name in scaled.params} | sums
        return Bounded(total, scaled.clip.bound)

    def one_by_one(
        self, scaled: ClippedSum | None, clip: Clip, each: Callable[[str, Tensor], Tensor]
    ) -> Bounded[Grads]:
        """The bounded sum, one parameter after the other: `each` takes its sum, and what it gives
        back is kept.

        Guarantees: `each` is called for the same names in the same order whatever the batch, also
        where there is nothing to add up.
        """
        scaled = scaled if scaled is None or scaled.sound else scaled.cleaned()
        held = {} if scaled is None else scaled.held_sums()
        total: Grads = {}
        for name, p in self.params.items():
            found = held.pop(name, None) if name in held or scaled is None else scaled.sum_of(name)
            total[name] = each(name, zeros({name: p}, clip)[name] if found is None else found)
        beside = zeros(self.params, clip) if scaled is None else clip.beside(scaled.scale)
        total |= {name: each(name, beside[name]) for name in clip.coordinates}
        return Bounded(total, clip.bound)

    def total(self, scaled: ClippedSum, buffers: Buffers | None = None) -> Bounded[Grads]:
        """The bounded sum, of examples without a finite norm nothing."""
        if not scaled.sound.is_cuda:  # known already
            return self.sum(scaled if scaled.sound else scaled.cleaned(), buffers=buffers)
        flag = Flag(scaled.sound.device)
        flag.put(scaled.sound)
        flag.mark()
        total = self.sum(scaled, buffers=buffers)
        return total if flag.value() else self.sum(scaled.cleaned(), buffers=buffers)
