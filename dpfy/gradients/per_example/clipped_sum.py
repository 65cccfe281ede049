"""From contributions to the clipped sum: norms, multipliers, weighted sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfy.gradients import kernels
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import group_rows, inflate_norms, multipliers
from dpfy.gradients.kernels import grams, reductions
from dpfy.gradients.per_example.buffers import Buffers
from dpfy.gradients.per_example.contribution import Contribution, Deferred, Direct, kept
from dpfy.gradients.per_example.convolution import ConvolutionGradient
from dpfy.gradients.per_example.embedding import Pooled
from dpfy.gradients.per_example.outer import Outer
from dpfy.gradients.per_example.placed import FunctionGradient, Stacked, ViewGradient
from dpfy.gradients.per_example.rounding import as_rows, sum_dtype
from dpfy.gradients.per_example.shared import MeasuredContribution, Shared
from dpfy.gradients.per_example.sliced import Sliced, pieces_of

BLOCK_ROWS = 1024
"""More rows than this are added up by a product: the kernel goes through them one after another."""

JOIN_ELEMENTS = 2**22
"""Direct gradients up to this size are copied side by side; larger ones are worth their own
pass.
"""


def scratch_bytes(parts: Iterable[Contribution]) -> int:
    """The scratch memory that buffers for these contributions should have."""
    rests = (
        each.rest if isinstance(each, MeasuredContribution) else each
        for part in parts
        for each in pieces_of(part)
    )
    return max((rest.scratch_bytes for rest in rests if isinstance(rest, Outer)), default=0)


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
            name: _put(count, buffers.places.get(name))
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
                    [([], {name: large.pop(name)})], weights, self.params, Buffers({}), True
                )[name]
        return None

    def of(self, names: Collection[str]) -> ClippedSum:
        """What some of the parameters receive, and nothing of the others."""
        rests: Rests = [
            (
                [part for block in joined if (part := block.of(names)) is not None],
                {n: part for n, part in large.items() if n in names},
            )
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
            (
                [block.cleaned(keep) for block in joined],
                {n: part.cleaned(keep) for n, part in large.items()},
            )
            for joined, large in self.rests
        ]
        return replace(self, rests=rests)


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
    in_parts: ShardedNorms | None = None,
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
            found, [n for n in members if in_parts is None or n in in_parts.counted]
        )
        if in_parts is not None:
            other, more = _weighed(found, [n for n in members if n not in in_parts.counted])
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
    if in_parts is not None:
        squared_norms = in_parts.added(squared_norms.double().contiguous())
    dtypes = {part.dtype for part in found.values()}
    narrowest = _narrowest(dtypes | {params[name].dtype for name in found})
    squared_norms = inflate_norms(squared_norms, narrowest, any(map(_convolves, found.values())))
    scale = multipliers(
        clip, squared_norms, mask, torch.float64 if torch.float64 in dtypes else torch.float32
    )
    sound = squared_norms.amax() < math.inf  # False for NaN too, in fewer operations than isfinite
    return ClippedSum(rests, scale, squared_norms, sound, clip, params)


def _weighed(found: dict[str, Contribution], members: list[str]) -> tuple[Tensor | None, Rest]:
    """The norms of what `members` receive together, if they receive anything, and what is left to
    add up.
    """
    joined, large = _split(found, members)
    made = _measure(list(large.values()))
    parts = [norm for norm, _ in made] + _joined_norms(joined)
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


def _put(value: Tensor, place: Tensor | None) -> Tensor:
    return value if place is None else place.copy_(value)


def _rounded(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`, but never in float16, where small multipliers would underflow."""
    return weights if weights.dtype is dtype or dtype == torch.float16 else weights.to(dtype)


def _fitted(total: Tensor, like: Tensor) -> Tensor:
    """In the shape of `like`, in float32 or wider."""
    dtype = sum_dtype(like.dtype)
    total = total if total.dtype is dtype else total.to(dtype)
    return total if total.shape == like.shape else total.view(like.shape)


def _add_up(
    rests: Rests, scale: Tensor, params: Mapping[str, Tensor], buffers: Buffers, last: bool
) -> dict[str, Tensor]:
    """Weighted sums of all groups, in the shapes of the parameters, in float32 or wider."""
    sums: dict[str, Tensor] = {}
    into = buffers.places
    for (joined, large), weights in zip(rests, scale.unbind(0), strict=True):
        dtypes = {name: part.dtype for name, part in large.items()}
        narrow = {dtype: _rounded(weights, dtype) for dtype in set(dtypes.values())}
        sums |= _block_sums(
            [block for block in joined if isinstance(block, _Block)], weights, params, into
        )
        for small in joined:
            if isinstance(small, _Small):
                sums |= {
                    name: _put(total, into.get(name))
                    for name, total in small.weighted_sum(weights, params).items()
                }
        for name in list(large):
            part, place, like = (
                large.pop(name) if last else large[name],
                into.get(name),
                params[name],
            )
            if place is not None and isinstance(part, Outer | Sliced):
                sums[name] = part.sum_into(narrow[dtypes[name]], place, buffers.scratch)
                continue
            mine = narrow[dtypes[name]]
            total = (
                part.sparse_sum(mine)
                if buffers.sparse and isinstance(part, Pooled)
                else part.weighted_sum(mine)
            )
            sums[name] = _put(_fitted(total, like), place)
    return sums


Rest = tuple[list["_Block | _Small"], dict[str, Contribution]]
Rests = list[Rest]
"""For every clip group: gradients that are held directly, joined, and what is left of the other
contributions.
"""


def joins(part: Contribution) -> bool:
    """Whether the norm of `part` is better taken together with others like it, in one launch."""
    if isinstance(part, Direct):
        return kernels.usable(part.grads)
    return (
        isinstance(part, Outer)
        and kernels.usable(part.left)
        and (part.left.shape[1] == 1 or part.by_gram)
    )


def _measure(parts: list[Contribution]) -> list[tuple[Tensor, Contribution]]:
    """``measured()`` of every part, with one launch for all layers of a shape where kernels allow
    it.
    """
    if not any(isinstance(part, Sliced) for part in parts):
        return _measure_each(parts)
    made = iter(_measure_each([piece for part in parts for piece in pieces_of(part)]))
    found: list[tuple[Tensor, Contribution]] = []
    for part in parts:
        mine = [next(made) for _ in pieces_of(part)]
        if isinstance(part, Sliced):
            found.append(
                (torch.cat([norm for norm, _ in mine]), part.of([rest for _, rest in mine]))
            )
        else:
            found += mine
    return found


def _measure_each(parts: list[Contribution]) -> list[tuple[Tensor, Contribution]]:
    made: dict[int, tuple[Tensor, Contribution]] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, part in enumerate(parts):
        if not joins(part):
            made[i] = part.measured()
        elif isinstance(part, Outer) and part.left.shape[1] > 1:
            alike.setdefault((part.left.dtype, part.left.shape, part.right.shape), []).append(i)
        else:
            alike.setdefault((part.dtype,), []).append(i)
    for key, members in alike.items():
        group = [parts[i] for i in members]
        norms = _row_norms(group) if len(key) == 1 else _gram_norms(group)
        made |= {i: (norm, part) for i, norm, part in zip(members, norms, group, strict=True)}
    return [made[i] for i in range(len(parts))]


def _gram_norms(parts: list[Contribution]) -> list[Tensor]:
    outers = [part for part in parts if isinstance(part, Outer)]
    found = grams.gram_uppers([part.left for part in outers], [part.right for part in outers])
    return list(found.unsqueeze(1).unbind(0))


def _row_norms(parts: list[Contribution]) -> list[Tensor]:
    """Norms of parts with one position, all rows of all their tensors in one launch: [1, batch]
    each.
    """
    rows: list[Tensor] = []
    for part in parts:
        rows += [part.left, part.right] if isinstance(part, Outer) else [part.grads]  # type: ignore[attr-defined]
    squares = iter(reductions.row_squares([as_rows(t) for t in rows]).unbind(0))
    return [
        (next(squares) * next(squares) if isinstance(part, Outer) else next(squares))[None]
        for part in parts
    ]


class _Block:
    """Gradients that are held directly, as one launch of a kernel left them side by side."""

    def __init__(self, names: list[str], grads: Tensor) -> None:
        self.names, self.grads = names, grads  # [parameters, batch, width]

    def of(self, names: Collection[str]) -> _Block | None:
        """What belongs to `names`; itself, where that is all."""
        mine = [i for i, name in enumerate(self.names) if name in names]
        if len(mine) == len(self.names):
            return self
        return (
            _Block([self.names[i] for i in mine], torch.stack([self.grads[i] for i in mine]))
            if mine
            else None
        )

    def cleaned(self, keep: Tensor) -> _Block:
        """Rows that are not kept become zero."""
        return _Block(self.names, kept(self.grads.transpose(0, 1), keep).transpose(0, 1))


def _joined_norms(joined: list[_Block | _Small]) -> list[Tensor]:
    """[some, batch] squared norms of everything held directly; those of all blocks come from one
    launch.
    """
    rows = [
        grads for block in joined if isinstance(block, _Block) for grads in block.grads.unbind(0)
    ]
    return [small.norms() for small in joined if isinstance(small, _Small)] + (
        [reductions.row_squares(rows)] if rows else []
    )


def _block_sums(
    blocks: list[_Block], weights: Tensor, params: Mapping[str, Tensor], into: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Weighted sums of all blocks in one launch, where they go if they can be written there."""
    if not blocks:
        return {}
    sums: dict[str, Tensor] = {}
    for name in (name for block in blocks for name in block.names):
        place = into.get(name)
        fits = place is not None and place.dtype is torch.float32 and place.is_contiguous()
        sums[name] = (
            place
            if fits and place is not None
            else params[name].new_empty(params[name].shape, dtype=torch.float32)
        )
    reductions.add_rows(
        [grads for block in blocks for grads in block.grads.unbind(0)], weights, list(sums.values())
    )
    return {
        name: made if made is into.get(name) else _put(_fitted(made, params[name]), into.get(name))
        for name, made in sums.items()
    }


class _Small:
    """Gradients that are held directly, side by side in one matrix: one norm and one product for
    all of them.
    """

    def __init__(self, names: list[str], shapes: list[torch.Size], flat: Tensor) -> None:
        self.names, self.shapes, self.flat = names, shapes, flat

    def of(self, names: Collection[str]) -> _Small | None:
        """What belongs to `names`; itself, where that is all."""
        if all(name in names for name in self.names):
            return self
        pieces = self.flat.split([shape.numel() for shape in self.shapes], 1)
        mine = [i for i, name in enumerate(self.names) if name in names]
        own = [self.names[i] for i in mine], [self.shapes[i] for i in mine]
        return _Small(*own, torch.cat([pieces[i] for i in mine], 1)) if mine else None

    def norms(self) -> Tensor:
        """[1, batch] squared norms."""
        return Direct(self.flat).measured()[0]

    def cleaned(self, keep: Tensor) -> _Small:
        """Rows that are not kept become zero."""
        return _Small(self.names, self.shapes, Direct(self.flat).cleaned(keep).grads)

    def weighted_sum(self, weights: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One vector-matrix product, cut into the parameters."""
        total = Direct(self.flat).weighted_sum(weights)
        dtypes = {sum_dtype(params[name].dtype) for name in self.names}
        if len(dtypes) == 1:
            total = total.to(dtypes.pop())
        pieces = total.split([shape.numel() for shape in self.shapes])
        named = zip(self.names, pieces, strict=True)
        return {
            name: piece.to(sum_dtype(params[name].dtype)).view(params[name].shape)
            for name, piece in named
        }


def _split(
    found: dict[str, Contribution], members: list[str]
) -> tuple[list[_Block | _Small], dict[str, Contribution]]:
    """Direct contributions joined, and the others."""
    blocks = _blocks(found, members)
    done = {name for block in blocks for name in block.names}
    direct: dict[str, Tensor] = {}
    for name in members:
        if name in done:
            continue
        part = found[name]
        part = part.direct() if isinstance(part, Deferred) else part
        if isinstance(part, Direct) and _adds_well(part.grads):
            blocks.append(_Block([name], as_rows(part.grads)[None]))
            done.add(name)
        elif isinstance(part, Direct) and part.grads.numel() <= JOIN_ELEMENTS:
            direct[name] = part.grads
    others = {name: found[name] for name in members if name not in direct and name not in done}
    if not direct:
        return [*blocks], others
    wide = (
        torch.float64 if any(g.dtype == torch.float64 for g in direct.values()) else torch.float32
    )
    flat = [as_rows(g).to(wide) for g in direct.values()]
    joined = flat[0] if len(flat) == 1 else torch.cat(flat, 1)
    return [*blocks, _Small(list(direct), [g.shape[1:] for g in direct.values()], joined)], others


def _adds_well(grads: Tensor) -> bool:
    """Whether the kernel that adds rows, column by column, is as fast as a product of the library's
    would be.
    """
    return grads.dtype == torch.float32 and len(grads) <= BLOCK_ROWS and kernels.usable(grads)


def _blocks(found: dict[str, Contribution], members: list[str]) -> list[_Block]:
    """The launches of which every sum belongs to one of `members`: nothing need be copied
    together.
    """
    launches: dict[int, tuple[Tensor, dict[int, str]]] = {}
    for name in members:
        part = found[name]
        if isinstance(part, Deferred):
            block = part.job.result()
            launches.setdefault(id(block), (block, {}))[1][
                part.job.place * block.shape[1] + part.which
            ] = name
    whole = [
        (block.flatten(0, 1), names)
        for block, names in launches.values()
        if len(names) == len(block) * block.shape[1]
    ]
    return [_Block([names[i] for i in range(len(grads))], grads) for grads, names in whole]


def _convolves(part: Contribution) -> bool:
    """Whether the weighted sum of `part` is a convolution of the library's."""
    while isinstance(part, MeasuredContribution):
        part = part.rest
    if isinstance(part, (Shared, Stacked)):
        return any(map(_convolves, part.parts))
    if isinstance(part, FunctionGradient):
        return _convolves(part.below.part)
    return (
        _convolves(part.part)
        if isinstance(part, ViewGradient)
        else isinstance(part, ConvolutionGradient)
    )


def _narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The least precise of the types in which contributions are summed or handed out."""
    return next(iter(dtypes)) if len(dtypes) == 1 else max(dtypes, key=lambda d: torch.finfo(d).eps)
