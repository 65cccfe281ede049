"""From contributions to the clipped sum: norms, multipliers, weighted sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dpfy.gradients.clip import Clip
from dpfy.gradients.contribution import Contribution, Direct
from dpfy.gradients.engine import cautious, group_rows, silence


def combine(found: dict[str, Contribution], clip: Clip, params: Mapping[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """The sum over examples of multiplier times gradient, for every parameter in `found`; `params` are all trainable ones.

    Guarantees: examples that are masked out or not finite are left out exactly. Parameters that were not used count as zero.
    """
    names = list(params)
    groups = [[names[i] for i in members if names[i] in found] for members in group_rows(clip, names)]
    norms, rests = [], []
    for members in groups:
        small, large = _split(found, members)
        made = [part.measured() for part in large.values()]
        parts = [norm for norm, _ in made] + ([small.measured()[0]] if small is not None else [])
        norms.append(torch.cat(parts).sum(0) if parts else None)
        rests.append((small, dict(zip(large, [rest for _, rest in made], strict=True))))
    some = next(n for n in norms if n is not None)
    squared_norms = torch.stack([torch.zeros_like(some) if n is None else n for n in norms])
    squared_norms = cautious(squared_norms, _narrowest(found, params))
    scale = silence(clip.scale(squared_norms), squared_norms, mask)
    keep = squared_norms.isfinite().all(0)
    sums = _weigh(rests, scale)
    if not bool(keep.all()):
        # Asked only now, when everything is on its way: on a GPU the question waits for the norms alone.
        cleaned = [(small and small.cleaned(keep), {n: part.cleaned(keep) for n, part in large.items()}) for small, large in rests]
        sums = _weigh(cleaned, scale)
    return sums


def _weigh(rests: list[tuple[_Small | None, dict[str, Contribution]]], scale: Tensor) -> dict[str, Tensor]:
    """Weighted sums of all groups."""
    sums: dict[str, Tensor] = {}
    for (small, large), weights in zip(rests, scale, strict=True):
        if small is not None:
            sums |= small.weighted_sum(weights)
        sums |= {name: part.weighted_sum(weights) for name, part in large.items()}
    return sums


class _Small:
    """The gradients that are held directly, side by side in one matrix: one norm and one product for all of them."""

    def __init__(self, names: list[str], shapes: list[torch.Size], flat: Tensor) -> None:
        self.names, self.shapes, self.flat = names, shapes, flat

    def measured(self) -> tuple[Tensor, Contribution]:
        """[1, batch] squared norms."""
        return Direct(self.flat).measured()

    def cleaned(self, keep: Tensor) -> _Small:
        """Rows that are not kept become zero."""
        return _Small(self.names, self.shapes, Direct(self.flat).cleaned(keep).grads)

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """One vector-matrix product, cut into the parameters."""
        total = Direct(self.flat).weighted_sum(weights)
        pieces = total.split([shape.numel() for shape in self.shapes])
        return {name: piece.view(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}


def _split(found: dict[str, Contribution], members: list[str]) -> tuple[_Small | None, dict[str, Contribution]]:
    """Direct contributions joined into one matrix, and the others."""
    direct = {name: part.grads for name in members if isinstance(part := found[name], Direct)}
    others = {name: found[name] for name in members if name not in direct}
    if not direct:
        return None, others
    wide = torch.float64 if any(g.dtype == torch.float64 for g in direct.values()) else torch.float32
    flat = [g.flatten(1).to(wide) for g in direct.values()]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
    return _Small(list(direct), [g.shape[1:] for g in direct.values()], joined), others


def _narrowest(found: dict[str, Contribution], params: Mapping[str, Tensor]) -> torch.dtype:
    """The least precise dtype in which a contribution is summed or handed out."""
    dtypes = [part.dtype for part in found.values()] + [params[name].dtype for name in found]
    return max(dtypes, key=lambda d: torch.finfo(d).eps)
