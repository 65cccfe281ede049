"""The contract of a clip rule: no contribution is longer than the given bound, rounding included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from dpfy.core.errors import DpfyError
from dpfy.gradients.clip import Clip
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.testing.contract import check_frozen_data, require, typed_refusals

BOUND = "A unit's multiplied gradient, with its coordinates, is at most `bound` long, exactly."
SHAPE = "`scale` gives [groups, batch] multipliers, in the type and on the device of the norms."
FINITE = "A multiplier is finite and not negative."
INVALID = "A unit whose squared norm is NaN or infinite gets the multiplier 0."
ALONE = "The multiplier of a unit depends on that unit's norms alone."
PURE = "`scale` leaves its input as it is, and the same norms get the same multipliers."
GROUPS = "`groups` gives each parameter name a group, numbered from 0 without gaps."
BESIDE = "`beside` gives a sum over units for each of `coordinates`."
SILENT = "A unit with the multiplier 0 adds nothing to the coordinates."
AFTER = "`after` gives a clip rule that keeps the contract, from what was released alone."
STATED = "`bound` is a positive L2 norm, and the same whenever it is asked for."
SUMMED = "A single unit's sum, made by an engine, is at most `bound` long."

NAMES = ("first.weight", "first.bias", "second.weight", "head.weight", "head.bias")
"""Names of parameters of a small model, for rules that group by name."""
DTYPES = (torch.float64, torch.float32)
"""Number types of squared norms. Engines hand over float64, whatever the model computes in."""


def check_clip(
    clip: Clip,
    *,
    names: Sequence[str] = NAMES,
    seed: int = 0,
    thorough: bool = False,
) -> None:
    """Check that a clip rule keeps its contract (:class:`dpfy.gradients.clip.Clip`).

    Multipliers are compared with the bound in exact arithmetic, so that an excess of one rounding
    error is found.

    Args:
        clip: The rule to check.
        names: Names of parameters that the rule can group.
        seed: Fixes the random norms.
        thorough: Try more norms, and more of the numbers next to the bound.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        A rule that passes keeps, in the settings tried:

        - multiplied gradients, over all groups, and coordinates together are at most `bound` long,
          for norms from zero to the largest number and for every norm next to the bound;
        - a unit whose norm is NaN or infinite gets the multiplier 0, and adds nothing;
        - the multiplier of a unit depends on its own norms alone, in batches of every size, the
          empty one included;
        - multipliers are finite, not negative, and of the shape and type of the norms;
        - coordinates are sums over units;
        - the rule of the next step keeps the same contract, and follows from the release alone;
        - the rule is frozen data that JSON brings back equal.

    Example:
        >>> from dpfy.gradients.clip import FlatClip
        >>> from dpfy.testing import check_clip
        >>> check_clip(FlatClip(1.0))
    """
    check_frozen_data(clip, "clip")
    _check_bound_stated(clip)
    groups = _check_groups(clip, names)
    for dtype in DTYPES:
        for kind, norms in _norms(clip, groups, dtype, seed, thorough).items():
            _check_scales(clip, norms, f"{clip!r}, {dtype}, {kind}")
        _check_alone(clip, groups, dtype, seed)
        _check_invalid(clip, groups, dtype)
        _check_beside(clip, groups, dtype, seed)
    _check_after(clip, groups, names, seed)
    _check_summed(clip, seed)


def _check_bound_stated(clip: Clip) -> None:
    with typed_refusals(STATED, repr(clip)):
        first, second = clip.bound, clip.bound
    require(first.l2 > 0 and first == second, STATED, repr(clip), f"{first!r}, then {second!r}")


def _check_groups(clip: Clip, names: Sequence[str]) -> int:
    """The number of groups of these parameters."""
    for some in (list(names), list(names)[:1]):
        where = f"{clip!r}, parameters {some}"
        with typed_refusals(GROUPS, where):
            found, again = clip.groups(some), clip.groups(some)
        require(found == again and len(found) == len(some), GROUPS, where, f"{found}, then {again}")
        require(
            all(isinstance(g, int) and g >= 0 for g in found), GROUPS, where, f"the groups {found}"
        )
    groups = clip.groups(list(names))
    # A rule may name groups that none of these parameters is in: it still has a norm for them.
    return max(groups) + 1


def _scale(clip: Clip, norms: Tensor, where: str) -> Tensor:
    """The multipliers, of the right shape and type."""
    before = norms.clone()
    with typed_refusals(SHAPE, where):
        scale = clip.scale(norms)
    same = isinstance(scale, Tensor) and scale.shape == norms.shape and scale.dtype == norms.dtype
    require(
        same and scale.device == norms.device,
        SHAPE,
        where,
        f"{tuple(scale.shape)} {scale.dtype} for {tuple(norms.shape)} {norms.dtype}",
    )
    unchanged = torch.equal(before.nan_to_num(nan=-1.0), norms.nan_to_num(nan=-1.0))
    require(unchanged, PURE, where, "the norms were overwritten")
    again = clip.scale(norms.clone())
    same = torch.equal(scale.nan_to_num(nan=-1.0), again.nan_to_num(nan=-1.0))
    require(same, PURE, where, "a second call gives other multipliers")
    return scale


def _near(value: float, dtype: torch.dtype, steps: int) -> Tensor:
    """Numbers next to `value`, on both sides, one by one."""
    below = above = torch.tensor(value, dtype=dtype)
    found = [below]
    zero, infinity = torch.zeros((), dtype=dtype), torch.tensor(math.inf, dtype=dtype)
    for _ in range(steps):
        below, above = torch.nextafter(below, zero), torch.nextafter(above, infinity)
        found += [below, above]
    return torch.stack(found)


def _norms(
    clip: Clip, groups: int, dtype: torch.dtype, seed: int, thorough: bool
) -> dict[str, Tensor]:
    """[groups, batch] squared norms of kinds that break wrong rules."""
    info = torch.finfo(dtype)
    norm = clip.bound.l2 if math.isfinite(clip.bound.l2) else 1.0
    generator = torch.Generator().manual_seed(seed)
    largest, many = min(info.max, norm**2 * 1e30), 4000 if thorough else 400

    def spread(count: int) -> Tensor:
        return torch.rand(groups, count, dtype=torch.float64, generator=generator)

    ends = [
        0.0,
        info.smallest_normal / 2,
        info.smallest_normal,
        info.eps,
        1.0,
        norm**2,
        largest,
        info.max,
    ]
    found = {
        "the ends of the number type": torch.tensor(ends, dtype=dtype).expand(groups, -1),
        "norms of all sizes": (norm**2 * 10 ** (40 * spread(many) - 20))
        .clamp(max=info.max)
        .to(dtype),
        "norms near the bound": (norm**2 * (0.9 + 0.2 * spread(many))).to(dtype),
        "one long group": (norm**2 * spread(groups) * 1e-6).to(dtype),
        "an empty batch": torch.zeros(groups, 0, dtype=dtype),
        "one unit": (norm**2 * 4 * spread(1)).to(dtype),
    }
    for group in range(groups):
        found["one long group"][group, group] = min(100 * norm**2, info.max)
    steps = 200 if thorough else 24
    for share in {1.0, 1 / groups, 0.25}:
        near = _near(min(norm**2 * share, info.max / 2), dtype, steps)
        found[f"all numbers next to {share:.3g} of the squared bound"] = near.expand(groups, -1)
    return {kind: norms.contiguous() for kind, norms in found.items()}


def _check_scales(clip: Clip, norms: Tensor, where: str) -> None:
    scale = _scale(clip, norms, where)
    wrong = scale[~((scale >= 0) & scale.isfinite())]
    require(not len(wrong), FINITE, where, f"the multiplier {wrong[:1].tolist()}")
    if math.isinf(clip.bound.l2):
        return
    most = Fraction(clip.bound.l2) ** 2
    for unit in range(norms.shape[1]):
        if not bool(norms[:, unit].isfinite().all()):
            continue
        reached = sum(
            (
                Fraction(float(s)) ** 2 * Fraction(float(n))
                for s, n in zip(scale[:, unit], norms[:, unit], strict=True)
            ),
            Fraction(0),
        )
        for value in clip.beside(scale[:, unit : unit + 1]).values():
            reached += Fraction(float(value)) ** 2
        require(
            reached <= most,
            BOUND,
            f"{where}, squared norms {norms[:, unit].tolist()}",
            f"a contribution is {math.sqrt(reached / most):.17g} times the bound long",
        )


def _check_alone(clip: Clip, groups: int, dtype: torch.dtype, seed: int) -> None:
    """The same unit beside others, at other places, in batches of other sizes."""
    generator = torch.Generator().manual_seed(seed + 1)
    norm = clip.bound.l2 if math.isfinite(clip.bound.l2) else 1.0
    tolerance = 8 * torch.finfo(dtype).eps
    spread = torch.rand(groups, 67, dtype=torch.float64, generator=generator)
    norms = (norm**2 * 10 ** (6 * spread - 3)).to(dtype)
    where = f"{clip!r}, {dtype}"
    whole = _scale(clip, norms, where)
    order = torch.randperm(67, generator=generator)
    turned = _scale(clip, norms[:, order], where)
    _require_close(turned, whole[:, order], tolerance, where, "in another order")
    for size in (1, 2, 7, 64):
        part = _scale(clip, norms[:, :size].clone(), where)
        _require_close(part, whole[:, :size], tolerance, where, f"in a batch of {size}")
    largest = math.sqrt(torch.finfo(dtype).max)
    for other in (0.0, min(1e8 * norm**2, largest), math.nan, math.inf):
        changed = norms.clone()
        changed[:, 5] = other
        kept = torch.arange(67) != 5
        found = _scale(clip, changed, where)
        _require_close(
            found[:, kept], whole[:, kept], tolerance, where, f"beside a squared norm of {other}"
        )


def _require_close(found: Tensor, due: Tensor, tolerance: float, where: str, what: str) -> None:
    wrong = ~((found - due).abs() <= tolerance * due.abs())
    seen, first = found[wrong][:1].tolist(), due[wrong][:1].tolist()
    require(not bool(wrong.any()), ALONE, where, f"{what} a multiplier is {seen}, and was {first}")


def _check_invalid(clip: Clip, groups: int, dtype: torch.dtype) -> None:
    norm = clip.bound.l2 if math.isfinite(clip.bound.l2) else 1.0
    for bad in (math.nan, math.inf):
        for batch in (1, 9):
            norms = torch.full((groups, batch), norm**2, dtype=dtype)
            norms[:, batch // 2] = bad
            where = f"{clip!r}, {dtype}, a squared norm of {bad} in a batch of {batch}"
            scale = _scale(clip, norms, where)
            seen = scale[:, batch // 2]
            require(bool((seen == 0).all()), INVALID, where, f"the multiplier {seen.tolist()}")
            alone = clip.beside(scale[:, batch // 2 : batch // 2 + 1])
            silent = all(float(value) == 0 for value in alone.values())
            require(silent, SILENT, where, f"{alone}")


def _check_beside(clip: Clip, groups: int, dtype: torch.dtype, seed: int) -> None:
    """Coordinates are named, are sums over units, and an empty batch has them too."""
    generator = torch.Generator().manual_seed(seed + 2)
    norm = clip.bound.l2 if math.isfinite(clip.bound.l2) else 1.0
    spread = torch.rand(groups, 9, dtype=torch.float64, generator=generator)
    scale = clip.scale((norm**2 * 4 * spread).to(dtype))
    scale[:, 3] = 0.0
    where = f"{clip!r}, {dtype}"
    with typed_refusals(BESIDE, where):
        whole, nothing = clip.beside(scale), clip.beside(scale[:, :0])
        each = [clip.beside(scale[:, i : i + 1]) for i in range(9)]
    for found in (whole, nothing, *each):
        names = tuple(found)
        require(names == tuple(clip.coordinates), BESIDE, where, f"{names}, not {clip.coordinates}")
    for name in whole:
        require(float(nothing[name]) == 0, BESIDE, where, f"an empty batch adds {nothing[name]}")
        require(float(each[3][name]) == 0, SILENT, where, f"it adds {each[3][name]}")
        added = sum(float(one[name]) for one in each)
        tolerance = 64 * torch.finfo(dtype).eps * sum(abs(float(one[name])) for one in each)
        require(
            abs(added - float(whole[name])) <= tolerance,
            BESIDE,
            f"{where}, {name}",
            f"{float(whole[name])} for all units, and {added} one by one",
        )


def _check_after(clip: Clip, groups: int, names: Sequence[str], seed: int) -> None:
    """Rules after releases of very different coordinates."""
    norm = clip.bound.l2 if math.isfinite(clip.bound.l2) else 1.0
    released = {name: torch.zeros(3, dtype=torch.float64) for name in names}
    for value in (0.0, 0.3, -0.3, 1e6, -1e6):
        mean = released | {
            name: torch.tensor(value * norm, dtype=torch.float64) for name in clip.coordinates
        }
        where = f"{clip!r}, released coordinates {value} times the bound"
        with typed_refusals(AFTER, where):
            after, again = clip.after(mean, 10.0), clip.after(mean, 10.0)
        require(after == again, AFTER, where, "two calls give different rules")
        kept = tuple(after.coordinates) == tuple(clip.coordinates)
        require(kept, AFTER, where, f"its coordinates are {after.coordinates}")
        if after != clip:
            check_frozen_data(after, "clip")
            _check_bound_stated(after)
            for kind, norms in _norms(after, groups, torch.float64, seed, False).items():
                _check_scales(after, norms, f"{after!r}, made by `after`, {kind}")


def _check_summed(clip: Clip, seed: int) -> None:
    """One unit through an engine, in a model whose parameters the rule can group."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict(
        {"first": torch.nn.Linear(4, 5), "second": torch.nn.Linear(5, 5, bias=False)}
    )
    model["head"] = torch.nn.Linear(5, 2)
    engine = LoopEngine()
    engine.attach(model)
    try:
        for size in (0.0, 1e-6, 1.0, 1e6):
            hidden = torch.tanh(model["first"](torch.randn(1, 4)))
            losses = model["head"](model["second"](hidden)).square().sum(1) * size
            try:
                total = engine.bounded_sum(losses, clip)
            except DpfyError as error:
                require(False, SUMMED, f"{clip!r}, a loss times {size}", str(error))
            squares = [float(t.double().square().sum()) for t in total.value.values()]
            require(
                math.sqrt(sum(squares)) <= clip.bound.l2,
                SUMMED,
                f"{clip!r}, a loss times {size}",
                f"its length is {math.sqrt(sum(squares))!r}",
            )
    finally:
        engine.detach()
