"""Mistakes in bounding contributions: the mean, the microbatch, the layer, the wrong norm, the
wrong owner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfy.audit.bench import Bug
from dpfy.core.values import Bound, Bounded

AUDIT, SENSITIVITY = "white-box audit", "sensitivity"
MICROBATCH = 4
Rows = dict[str, Any]
"""Parameter name to per-example gradients, [examples, *parameter]."""


class WrongClip:
    """An engine that has right per-example gradients and clips them by `rule(rows, norm)`: the sum,
    and the bound it states.
    """

    name = "batched"

    def __init__(self, real: Any, rule: Callable[[Rows, float], tuple[Rows, float]]) -> None:
        self.real, self.rule = real, rule

    def attach(self, model: Any) -> None:
        """Remember the model."""
        self.model = model

    def detach(self) -> None:
        """Nothing was attached."""

    def bounded_sum(self, losses: Any, clip: Any, mask: Any = None) -> Any:
        """The rule's sum over the examples."""
        import torch

        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        picks = torch.eye(len(losses), dtype=losses.dtype)
        if mask is not None:
            picks = picks[mask]
        grads = torch.autograd.grad(
            losses, list(named.values()), picks, is_grads_batched=True, allow_unused=True
        )
        rows = {
            n: p.new_zeros(len(picks), *p.shape) if g is None else g
            for (n, p), g in zip(named.items(), grads, strict=True)
        }
        total, bound = self.rule(rows, clip.bound.l2)
        return Bounded(total, Bound(bound))


def norms(rows: Rows, keep: Callable[[str], bool] = lambda name: True) -> Any:
    """Norm of each example over the tensors that `keep` accepts."""
    return sum(g.flatten(1).square().sum(1) for n, g in rows.items() if keep(n)).sqrt()  # type: ignore[attr-defined]


def weighted(rows: Rows, factor: Any) -> Rows:
    """Sum of the examples, each times its factor."""
    return {n: (g * factor.view(-1, *[1] * (g.dim() - 1))).sum(0) for n, g in rows.items()}


def shrink(size: Any, norm: float) -> Any:
    """min(1, norm / size)."""
    return (norm / size.clamp(min=1e-30)).clamp(max=1.0)


def flat(rows: Rows, norm: float) -> tuple[Rows, float]:
    """As it should be, for finite gradients."""
    return weighted(rows, shrink(norms(rows), norm)), norm


def mean(rows: Rows, norm: float) -> tuple[Rows, float]:
    """The mean is clipped, then multiplied back."""
    count = len(next(iter(rows.values())))
    average = {n: g.mean(0, keepdim=True) for n, g in rows.items()}
    return {n: g * count for n, g in weighted(average, shrink(norms(average), norm)).items()}, norm


def microbatch(rows: Rows, norm: float) -> tuple[Rows, float]:
    """Microbatches of four are summed, then clipped."""
    import torch

    sums = {n: torch.stack([part.sum(0) for part in g.split(MICROBATCH)]) for n, g in rows.items()}
    return weighted(sums, shrink(norms(sums), norm)), norm


def layers(rows: Rows, norm: float) -> tuple[Rows, float]:
    """Every tensor is clipped to the whole norm."""
    return {n: weighted({n: g}, shrink(norms({n: g}), norm))[n] for n, g in rows.items()}, norm


def no_bias(rows: Rows, norm: float) -> tuple[Rows, float]:
    """The norm forgets the biases."""
    return weighted(rows, shrink(norms(rows, lambda name: not name.endswith("bias")), norm)), norm


def two_owners(rows: Rows, norm: float) -> tuple[Rows, float]:
    """Clipped to twice the norm that the noise knows."""
    return weighted(rows, shrink(norms(rows), 2 * norm)), norm


def rounded_first(rows: Rows, norm: float) -> tuple[Rows, float]:
    """Gradients are rounded up to a lattice of 1/32 of the norm, and clipped by the norms that they
    had before.
    """
    step = norm / 32
    return weighted(
        {n: (g / step).abs().ceil() * g.sign() * step for n, g in rows.items()},
        shrink(norms(rows), norm),
    ), norm


def not_a_number(rows: Rows, norm: float) -> tuple[Rows, float]:
    """`if norm > clip: scale`, which is false for NaN."""
    import torch

    size = norms(rows)
    return weighted(rows, torch.where(size > norm, norm / size, torch.ones_like(size))), norm


def adaptive(rows: Rows, norm: float) -> tuple[Rows, float]:
    """The clip norm is the batch's median norm, found without noise."""
    size = norms(rows)
    found = float(size.median()) if len(size) else norm
    return weighted(rows, shrink(size, found)), max(found, 1e-9)


def unclipped(rows: Rows, norm: float) -> tuple[Rows, float]:
    """Nothing, yet."""
    return weighted(rows, norms(rows) * 0 + 1), norm


class ClipsLate:
    """A noise stream that clips the accumulated sum before it adds noise."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def init(self, like: Rows) -> Any:
        """As the real stream."""
        return self.real.init(like)

    def release(
        self, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> tuple[Any, Any]:
        """Clip, then release."""
        rows = {n: g[None] for n, g in total.value.items()}
        late = Bounded(weighted(rows, shrink(norms(rows), total.bound.l2)), total.bound, total.unit)
        return self.real.release(late, step, state, permit, into)  # type: ignore[no-any-return]


class UsesApart(WrongClip):
    """Ghost norms of each use of a layer, added up as squares, as if the uses were different
    weights.
    """

    def attach(self, model: Any) -> None:
        """Watch the calls of every linear layer."""
        from torch import nn

        super().attach(model)
        self.calls: list[tuple[Any, Any]] = []
        self.hooks = [
            m.register_forward_hook(self._see) for m in model.modules() if isinstance(m, nn.Linear)
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in getattr(self, "hooks", []):
            hook.remove()

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        self.calls.append((inputs[0].detach(), output))

    def squares(self, backs: Any) -> Any:
        """The squares of all uses, added."""
        return sum(
            a.square().sum(1) * b.square().sum(1)
            for (a, _), b in zip(self.calls, backs, strict=True)
        )

    def bounded_sum(self, losses: Any, clip: Any, mask: Any = None) -> Any:
        """Right gradients, wrong norms."""
        import torch

        if not self.calls:
            return super().bounded_sum(losses, clip, mask)
        backs = torch.autograd.grad(losses.sum(), [out for _, out in self.calls], retain_graph=True)
        squares = self.squares(backs)
        self.calls.clear()
        self.rule = lambda rows, norm: (weighted(rows, shrink(squares.sqrt(), norm)), norm)  # type: ignore[attr-defined]
        return super().bounded_sum(losses, clip, mask)


class NoAllowance(UsesApart):
    """Right norms of all uses together, inner products and all, as if float32 had no end: what
    cancels is taken for nothing.
    """

    def squares(self, backs: Any) -> Any:
        """sum over uses t, s of (input_t . input_s)(gradient_t . gradient_s)."""
        import torch

        inputs, grads = torch.stack([a for a, _ in self.calls], 1), torch.stack(list(backs), 1)
        return ((inputs @ inputs.mT) * (grads @ grads.mT)).sum((1, 2)).clamp(min=0)


def wrong(rule: Callable[[Rows, float], tuple[Rows, float]]) -> Callable[[Any], Any]:
    """A seam that puts an engine with this rule in place."""
    return lambda engine: WrongClip(engine, rule)


BUGS = (
    Bug("clip-mean", "the mean is clipped instead of each example", AUDIT, engine=wrong(mean)),
    Bug(
        "clip-microbatch",
        "clipping after summing a microbatch",
        SENSITIVITY,
        engine=wrong(microbatch),
    ),
    Bug(
        "clip-layers",
        "every layer clipped to the flat norm, billed as flat",
        SENSITIVITY,
        engine=wrong(layers),
    ),
    Bug("clip-no-bias", "the norm forgets the bias", AUDIT, engine=wrong(no_bias)),
    Bug(
        "clip-tied",
        "the norm takes two uses of a weight for two weights",
        "tied weights",
        engine=lambda e: UsesApart(e, flat),
    ),
    Bug(
        "clip-cancels",
        "the norm is blind to what float32 squares lose",
        "cancelling uses",
        engine=lambda e: NoAllowance(e, flat),
    ),
    Bug(
        "clip-late",
        "accumulation that clips after accumulating",
        SENSITIVITY,
        engine=wrong(unclipped),
        stream=ClipsLate,
    ),
    Bug(
        "clip-two-owners",
        "clipped to twice the norm that scales the noise",
        AUDIT,
        engine=wrong(two_owners),
    ),
    Bug(
        "clip-rounded-first",
        "gradients are rounded to a lattice before they are clipped",
        SENSITIVITY,
        engine=wrong(rounded_first),
    ),
    Bug("clip-nan", "a NaN example passes unclipped", "not a number", engine=wrong(not_a_number)),
    Bug(
        "clip-adaptive",
        "an adaptive clip norm computed without noise",
        "noise and data",
        engine=wrong(adaptive),
    ),
)
