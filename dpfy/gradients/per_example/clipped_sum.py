"""From contributions to the clipped sum: norms, multipliers, weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import group_rows, inflate_norms, multipliers
from dpfy.gradients.per_example.arithmetic import put
from dpfy.gradients.per_example.contribution import Contribution
from dpfy.gradients.per_example.joined import Buffers, HeldGradients, measure
from dpfy.gradients.per_example.rounding import unit


def scratch_bytes(parts: Iterable[Contribution]) -> int:
    """The scratch memory that buffers for these contributions should have."""
    return max((part.scratch_bytes for part in parts), default=0)


@dataclass(frozen=True, repr=False)
class ClippedSum:
    """Contributions and the multiplier of every example in every clip group: all that is left is to
    add up.

    `sound` is a truth value on the device: whether every norm was finite. Where it is False only
    :meth:`cleaned` may be summed.

    Guarantees: examples that are masked out or not finite have multiplier zero in every group.
    Parameters not used count as zero.
    """

    rests: Rests
    scale: Tensor  # [groups, batch]
    squared_norms: Tensor  # [groups, batch]
    sound: Tensor
    clip: Clip
    params: Mapping[str, Tensor]

    def sums(self, last: bool = False, buffers: Buffers | None = None) -> dict[str, Tensor]:
        """The sum of multiplier times gradient, in the places of `buffers` if there is one.

        If this is the `last` use, each contribution is let go of as soon as it is added.
        """
        buffers = buffers or Buffers({})
        sums = _add_up(self.rests, self.scale, self.params, buffers, last)
        return sums | {
            name: put(count, buffers.places.get(name))
            for name, count in self.clip.beside(self.scale).items()
        }

    def held_sums(self) -> dict[str, Tensor]:
        """The sums of what is held directly, in joined tensors."""
        return _add_up(
            [(joined, {}) for joined, _ in self.rests], self.scale, self.params, Buffers({}), True
        )

    def sum_of(self, name: str) -> Tensor | None:
        """The sum of one parameter that is not among those, which is let go of; None if it has no
        contribution.
        """
        for (_, large), weights in zip(self.rests, self.scale.split(1), strict=True):
            if name in large:
                return _add_up(
                    [(HeldGradients(), {name: large.pop(name)})],
                    weights,
                    self.params,
                    Buffers({}),
                    True,
                )[name]
        return None

    def of(self, names: Collection[str]) -> ClippedSum:
        """What some of the parameters receive, and nothing of the others."""
        rests: Rests = [
            (joined.of(names), {n: part for n, part in large.items() if n in names})
            for joined, large in self.rests
        ]
        return replace(
            self, rests=rests, params={n: p for n, p in self.params.items() if n in names}
        )

    def cleaned(self) -> ClippedSum:
        """The same with exact zeros in the place of whatever examples without a finite norm
        held.
        """
        keep = self.squared_norms.isfinite().all(0)
        rests = [
            (joined.cleaned(keep), {n: part.cleaned(keep) for n, part in large.items()})
            for joined, large in self.rests
        ]
        return replace(self, rests=rests)

    def lost_to_rounding(self) -> str | None:
        """The parameter to blame, if the example with the largest upper bound of a norm is clipped
        to less than a quarter of what its norm itself would leave of it.
        """
        if not bool(self.sound):
            return None
        most = self.squared_norms.argmax(1)
        exact = self.squared_norms.clone()
        for group, ((joined, large), example) in enumerate(
            zip(self.rests, most.tolist(), strict=True)
        ):
            own = [part.squares_of(example) for part in large.values()]
            own += [norms[:, example] for norms in joined.norms()]
            exact[group, example] = sum(float(each.sum()) for each in own)
        left, kept = self.clip.scale(self.squared_norms), self.clip.scale(exact)
        for group, example in enumerate(most.tolist()):
            if exact[group, example] > 0 and 4 * left[group, example] < kept[group, example]:
                large = self.rests[group][1]  # what is held is measured as it is
                sizes = {
                    n: float(part.measured()[0][:, example].sum()) for n, part in large.items()
                }
                return max(sizes, key=sizes.__getitem__)
        return None


@dataclass(frozen=True)
class ShardedNorms:
    """Of parameters that lie in parts on several ranks, which all see the same examples: whose
    norms count on this one, and how norms are added over all of them.

    Guarantees: a parameter that several ranks hold whole is among the `counted` of one rank alone.
    """

    counted: Collection[str]
    added: Callable[[Tensor], Tensor]


def weigh(
    found: dict[str, Contribution],
    clip: Clip,
    params: Mapping[str, Tensor],
    mask: Tensor | None,
    sharded: ShardedNorms | None = None,
) -> ClippedSum:
    """Norms of all contributions and the multipliers that `clip` gives them."""
    names = list(params)
    groups = [
        [names[i] for i in members if names[i] in found] for members in group_rows(clip, names)
    ]
    norms: list[Tensor | None] = []
    rests: Rests = []
    for members in groups:
        norm, rest = _weighed(
            found, [n for n in members if sharded is None or n in sharded.counted]
        )
        if sharded is not None:
            other, more = _weighed(found, [n for n in members if n not in sharded.counted])
            norm = torch.zeros_like(other) if norm is None and other is not None else norm
            rest = rest[0] + more[0], rest[1] | more[1]
        norms.append(norm)
        rests.append(rest)
    some = next(n for n in norms if n is not None)
    squared_norms = (
        some
        if len(norms) == 1
        else torch.cat([torch.zeros_like(some) if n is None else n for n in norms])
    )
    if sharded is not None:
        squared_norms = sharded.added(squared_norms.double().contiguous())
    dtypes = {part.dtype for part in found.values()}
    narrowest = _narrowest(dtypes | {params[name].dtype for name in found})
    squared_norms = inflate_norms(
        squared_norms, narrowest, any(part.convolves for part in found.values())
    )
    scale = multipliers(
        clip, squared_norms, mask, torch.float64 if torch.float64 in dtypes else torch.float32
    )
    sound = squared_norms.amax() < math.inf  # False for NaN too, in fewer operations than isfinite
    return ClippedSum(rests, scale, squared_norms, sound, clip, params)


def _weighed(found: dict[str, Contribution], members: list[str]) -> tuple[Tensor | None, Rest]:
    """The norms of what `members` receive together, if they receive anything, and what is left to
    add up.
    """
    joined, large = HeldGradients.split(found, members)
    made = measure(list(large.values()))
    parts = [norm for norm, _ in made] + joined.norms()
    rest = joined, dict(zip(large, [rest for _, rest in made], strict=True))
    return torch.cat(parts).sum(0, keepdim=True) if parts else None, rest


class Flag:
    """A truth value on its way from the device: work that is launched after it does not delay its
    arrival.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._here = torch.empty((), dtype=torch.bool, pin_memory=cuda)
        self._event = torch.cuda.Event() if cuda else None

    def put(self, flag: Tensor) -> None:
        """Send `flag`; a value that nobody waited for is lost. As part of a graph, whenever that is
        launched.
        """
        self._here.copy_(flag, non_blocking=True)

    def mark(self, queue: torch.cuda.Stream | None = None) -> None:
        """What was put, or launched to be put, on `queue` or the current one, is what :meth:`value`
        is to wait for.
        """
        if self._event is not None:
            self._event.record(queue)

    def value(self) -> bool:
        """Wait for it."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._here)


def _rounded(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, but never in float16, where small multipliers would underflow."""
    return weights if weights.dtype is dtype or dtype == torch.float16 else weights.to(dtype)


def _add_up(
    rests: Rests, scale: Tensor, params: Mapping[str, Tensor], buffers: Buffers, last: bool
) -> dict[str, Tensor]:
    """Weighted sums of all groups, in the shapes of the parameters, in float32 or wider."""
    sums: dict[str, Tensor] = {}
    for (joined, large), weights in zip(rests, scale.unbind(0), strict=True):
        dtypes = {name: part.dtype for name, part in large.items()}
        narrow = {dtype: _rounded(weights, dtype) for dtype in set(dtypes.values())}
        sums |= joined.sums(weights, params, buffers.places)
        for name in list(large):
            part = large.pop(name) if last else large[name]
            place = buffers.places.get(name)
            sums[name] = part.add_up(narrow[dtypes[name]], params[name], place, buffers)
    return sums


Rest = tuple[HeldGradients, dict[str, Contribution]]
Rests = list[Rest]
"""For every clip group: gradients that are held directly, joined, and what is left of the other
contributions.
"""


def _narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The least precise of the types in which contributions are summed or handed out."""
    return next(iter(dtypes)) if len(dtypes) == 1 else max(dtypes, key=unit)
