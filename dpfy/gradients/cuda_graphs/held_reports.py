"""What a step holds of its reports until the sums are made, and what they contribute."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dpfy.gradients.autograd.tape import LayerReport
from dpfy.gradients.clip import Clip
from dpfy.gradients.cuda_graphs import graphs
from dpfy.gradients.cuda_graphs.recorded_step import Own, nothing_made, own_parts
from dpfy.gradients.engines.bounded_sum import BoundedSum, Parts
from dpfy.gradients.per_example.clipped_sum import ClippedSum


class Worked(NamedTuple):
    """What was made of some reports: see :class:`ReportSection`."""

    own: Own
    names: list[tuple[str, ...]]
    idle: bool


class HeldReports:
    """The reports of one step, section by section.

    Guarantees: a report is held as long as some parameter that it contributes to is not done, and
    not longer, whoever does the work: the model's tensors then lie at the same places whether a
    step is repeated, recorded or done as usual.
    """

    def __init__(self, sums: BoundedSum, batch: int) -> None:
        self.sums, self.parts, self._batch = sums, Parts(), batch
        self._sections: list[tuple[list[LayerReport | None], Own, list[tuple[str, ...]]]] = []
        self._done: set[str] = set()

    def hold(self, reports: list[LayerReport], own: Own, names: list[tuple[str, ...]]) -> None:
        """Take up reports that were worked on: those whose contributions hold their tensors, and
        the contributions of the others.
        """
        kept = [report if mine is None else None for report, mine in zip(reports, own, strict=True)]
        self._sections.append((kept, own, names))

    def work(self, reports: list[LayerReport]) -> Worked:
        """Add what `reports` contribute to `parts`."""
        found = self.sums.explain(reports, self._batch)
        for name, part in (
            (name, part) for parts in found for name, uses in parts.items() for part in uses
        ):
            self.parts.setdefault(name, []).append(part)
        own = [own_parts(report, parts) for report, parts in zip(reports, found, strict=True)]
        return Worked(own, [tuple(parts) for parts in found], nothing_made(reports, found))

    def again(self) -> None:
        """What all reports that are held contribute to parameters that are not done: made anew, or
        what was left of them.
        """
        self.parts = {}
        with graphs.private_pool():
            kept = [
                report
                for reports, _, _ in self._sections
                for report in reports
                if report is not None
            ]
            made = iter(self.sums.explain(kept, self._batch))
        for mine in (mine for _, own, _ in self._sections for mine in own):
            found = (
                [(name, part) for name, uses in next(made).items() for part in uses]
                if mine is None
                else mine
            )
            for name, part in found:
                if name not in self._done:
                    self.parts.setdefault(name, []).append(part)

    def weigh(self, clip: Clip, mask: Tensor | None) -> ClippedSum:
        """Multipliers from the contributions, which are let go of but for what the sums need."""
        parts, self.parts = self.parts, {}
        return self.sums.weigh(parts, clip, mask)

    def order(self) -> list[str]:
        """The parameters by their last report."""
        uses = [name for _, _, names in self._sections for theirs in names for name in theirs]
        return list(dict.fromkeys(reversed(uses)))[::-1]

    @property
    def nbytes(self) -> int:
        """Of the tensors in all reports that are held."""
        reports = [report for kept, _, _ in self._sections for report in kept if report is not None]
        return sum({t.data_ptr(): t.nbytes for report in reports for t in report.tensors}.values())

    def release(self, names: tuple[str, ...]) -> None:
        """The sums of these parameters are made: let go of the reports that nothing else needs."""
        self._done.update(names)
        if len(self._done) == len(self.sums.params):
            self._sections.clear()
        for place, (reports, own, theirs) in enumerate(self._sections):
            left = [i for i, each in enumerate(theirs) if not self._done.issuperset(each)]
            if len(left) < len(theirs):
                self._sections[place] = (
                    [reports[i] for i in left],
                    [own[i] for i in left],
                    [theirs[i] for i in left],
                )
