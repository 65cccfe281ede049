"""The contract of an engine: the sum of clipped gradients, computed one example at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfy.core.errors import DpfyError
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip, FlatClip, PerLayerClip, QuantileClip
from dpfy.gradients.engine import Engine, Grads
from dpfy.testing.contract import require, typed_refusals

SAME = "The sum is that of gradients made one example at a time, each clipped by the rule."
PLAIN = "With an infinite clipping norm the sum is the plain gradient."
NAMES = "The sum has the trainable parameters, shared ones once, and the rule's coordinates."
BOUND = "One contribution is at most the bound long, whatever the size of its gradient."
USED = "A long gradient comes out at nearly the full clipping norm: the margin is small."
MASKED = "An example whose mask is False adds exactly nothing."
INVALID = "An example with a gradient that is not finite adds nothing and spoils no other."
EMPTY = "An empty batch gives a sum of zeros."
UNTOUCHED = "Class, state, hooks and `.grad` of the model are as they were after `detach`."
REPEATED = "The same engine gives right sums step after step, with other batch sizes and weights."
IGNORED = "Calls of the model without gradients do not reach the sum."
REFUSED = "Losses that are not one a unit, or a mask of another shape, are refused."
ATTACHED = "`bounded_sum` before `attach` is refused, and `detach` may be called twice."

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelSetting:
    """A model with a batch, and how its losses are made, one an example.

    Args:
        name: What the setting is called in errors.
        make: Makes the model in double precision; the same one each time.
        inputs: [batch, ...] inputs.
        targets: [batch, ...] targets.
        losses: From model, inputs and targets to losses of shape [batch].
        tolerance: Relative distance that rounding may cause.
        rows: Whether inputs of rows can be made invalid, and multiplied, as numbers.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    losses: Losses
    tolerance: float = 1e-9
    rows: bool = True

    def __str__(self) -> str:
        return self.name


def check_engine(
    make: Callable[[], Engine],
    *,
    models: Sequence[ModelSetting] = (),
    seed: int = 0,
    thorough: bool = False,
) -> None:
    """Check that an engine keeps its contract (:class:`dpfy.gradients.engine.Engine`).

    The reference runs the model on one example at a time and clips each gradient by hand; it shares
    no code with the engines.

    Args:
        make: Makes a new engine.
        models: Your own models with batches, beside those of the suite.
        seed: Fixes weights and batches.
        thorough: More models (attention, recurrent, grouped convolution) and more clip rules.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        An engine that passes keeps, in the settings tried:

        - sums are those of the reference, also where a layer is used twice, weights are shared or
          frozen, or parameters are used without a layer;
        - one contribution is at most the bound long, for gradients of every size and number type;
        - masked examples, and examples with a gradient that is not finite, add exactly nothing;
        - names and shapes of the sum are those of the trainable parameters;
        - a model is left as it was: class, `state_dict`, attributes, hooks and `.grad`;
        - reduced losses, losses without a graph and wrong masks are refused.

    Example:
        >>> from dpfy.gradients.engines.loop import LoopEngine
        >>> from dpfy.testing import check_engine
        >>> check_engine(LoopEngine)
    """
    for setting in (*suite_models(seed, thorough), *models):
        check = _Checked(make, setting)
        check.sums(thorough)
        check.masks()
        check.empty()
        check.many_steps()
        check.untouched()
        if setting.rows:
            check.invalid()
    first = _Checked(make, next(iter(suite_models(seed))))
    first.bounds()
    first.refusals()
    first.without_gradients()


class _Reused(nn.Module):
    """A linear layer used twice, bare parameters (one a scalar), a frozen layer, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(5, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 6)
        self.head.weight = self.twice.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of six classes."""
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(F.relu_(self.first(x))))))
        return self.head(self.norm(self.frozen(hidden) * self.scale)) * self.gain


class _Images(nn.Module):
    """Convolutions, one with groups, and a norm over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False)
        self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of three classes."""
        hidden = torch.tanh(self.norm(self.grouped(torch.tanh(self.first(x)))))
        return self.head(hidden.mean((2, 3)))


class _Words(nn.Module):
    """An embedding whose table is the output layer too, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.mix = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next word at each place."""
        return torch.tanh(self.mix(self.table(x))) @ self.table.weight.T + self.bias


class _Attention(nn.Module):
    """One block with attention and a feed-forward layer that is called for every place."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.forward_layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of three classes."""
        seen, _ = self.attend(x, x, x, need_weights=False)
        return self.head((x + torch.tanh(self.forward_layer(seen))).mean(1))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss for each example."""
    return F.cross_entropy(model(x), y, reduction="none")


def cross_entropy_of_places(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the places of each example."""
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="none").mean(1)


def suite_models(seed: int, thorough: bool = False) -> Iterator[ModelSetting]:
    """The models of the suite; the first is the one of the checks of details."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def classes(count: int, *shape: int) -> Tensor:
        return torch.randint(0, count, shape, generator=generator)

    def made(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return kind().double()

        return make

    yield ModelSetting(
        "a layer used twice", made(_Reused), numbers(7, 5), classes(6, 7), cross_entropy
    )
    yield ModelSetting(
        "convolutions", made(_Images), numbers(5, 2, 6, 6), classes(3, 5), cross_entropy
    )
    yield ModelSetting(
        "a shared table", made(_Words), classes(7, 6, 4), classes(7, 6, 4),
        cross_entropy_of_places, rows=False,
    )  # fmt: skip
    if thorough:
        yield ModelSetting(
            "attention", made(_Attention), numbers(5, 3, 4), classes(3, 5), cross_entropy
        )
        yield ModelSetting(
            "dropout that drops nothing",
            made(lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.0), nn.Linear(8, 6))),
            numbers(7, 5),
            classes(6, 7),
            cross_entropy,
        )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that want a gradient, shared ones once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def one_by_one(setting: ModelSetting, model: nn.Module, clip: Clip, keep: Sequence[int]) -> Grads:
    """The clipped sum by definition: a forward and a backward pass for each example."""
    params = trainable(model)
    names = list(params)
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    coordinates: Grads = {}
    groups = clip.groups(names)
    for i in keep:
        loss = setting.losses(model, setting.inputs[i : i + 1], setting.targets[i : i + 1])
        grads = torch.autograd.grad(loss.sum(), list(params.values()), allow_unused=True)
        whole = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(params.values(), grads, strict=True)
        ]
        squares = torch.zeros(max(groups) + 1, 1, dtype=torch.float64)
        for group, g in zip(groups, whole, strict=True):
            squares[group] += g.double().square().sum()
        scale = clip.scale(squares)
        for name, group, g in zip(names, groups, whole, strict=True):
            total[name] += scale[group, 0] * g
        for name, value in clip.beside(scale).items():
            coordinates[name] = coordinates.get(name, torch.zeros(())) + value
    return total | (coordinates or clip.beside(torch.zeros(max(groups) + 1, 0)))


def _distance(found: Grads, due: Grads) -> float:
    """The relative distance of two sums."""
    off = sum(float((found[k] - due[k]).double().square().sum()) for k in due)
    return math.sqrt(off) / max(_length(due), 1e-300)


def _length(grads: Grads) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


@dataclass(frozen=True)
class _Checked:
    """An engine on one model."""

    make: Callable[[], Engine]
    setting: ModelSetting

    def where(self, detail: str) -> str:
        """The setting of an error."""
        return f"{getattr(self.make, '__name__', self.make)}, {self.setting}, {detail}"

    @property
    def batch(self) -> int:
        """The number of examples."""
        return len(self.setting.inputs)

    def run(
        self, clip: Clip, mask: Tensor | None = None, setting: ModelSetting | None = None
    ) -> Bounded[Grads]:
        """One sum by a new engine on a new model."""
        setting = setting or self.setting
        model, engine = setting.make(), self.make()
        engine.attach(model)
        try:
            losses = setting.losses(model, setting.inputs, setting.targets)
            return engine.bounded_sum(losses, clip, mask)
        finally:
            engine.detach()

    def compare(self, clip: Clip, keep: Sequence[int], found: Grads, detail: str) -> None:
        """Against the reference over the examples in `keep`."""
        due = one_by_one(self.setting, self.setting.make(), clip, keep)
        self.names(clip, found, detail)
        off = _distance(found, due)
        require(
            off <= self.setting.tolerance,
            SAME,
            self.where(detail),
            f"the sums are {off:.3g} of their length apart",
        )

    def names(self, clip: Clip, found: Grads, detail: str) -> None:
        """Of the sum."""
        params = trainable(self.setting.make())
        due = [*params, *clip.coordinates]
        require(list(found) == due, NAMES, self.where(detail), f"{list(found)}, not {due}")
        for name, p in params.items():
            require(
                found[name].shape == p.shape and not found[name].requires_grad,
                NAMES,
                self.where(f"{detail}, {name}"),
                f"the shape {tuple(found[name].shape)} for {tuple(p.shape)}",
            )

    def sums(self, thorough: bool) -> None:
        """Against the reference, for clip rules that use what an engine gives them."""
        rules: list[Clip] = [FlatClip(0.05), FlatClip(1.0), FlatClip(100.0), PerLayerClip(0.5)]
        if thorough:
            rules += [FlatClip(1e-6), QuantileClip(0.5)]
        for clip in rules:
            with typed_refusals(SAME, self.where(repr(clip))):
                found = self.run(clip)
            require(
                found.bound == clip.bound,
                BOUND,
                self.where(repr(clip)),
                f"the sum says {found.bound}, the rule {clip.bound}",
            )
            self.compare(clip, range(self.batch), found.value, repr(clip))
        model = self.setting.make()
        params = trainable(model)
        losses = self.setting.losses(model, self.setting.inputs, self.setting.targets)
        plain = torch.autograd.grad(losses.sum(), list(params.values()), allow_unused=True)
        due = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(params.items(), plain, strict=True)
        }
        off = _distance(self.run(FlatClip(math.inf)).value, due)
        require(
            off <= self.setting.tolerance,
            PLAIN,
            self.where("an infinite clipping norm"),
            f"{off:.3g} of its length apart",
        )

    def masks(self) -> None:
        """Some, and all, examples left out."""
        clip = FlatClip(0.5)
        mask = torch.arange(self.batch) % 3 != 1
        found = self.run(clip, mask).value
        self.compare(clip, torch.nonzero(mask).flatten().tolist(), found, "two of three examples")
        left = _length(self.run(clip, torch.zeros(self.batch, dtype=torch.bool)).value)
        require(left == 0, MASKED, self.where("all examples masked"), f"a length of {left!r}")

    def empty(self) -> None:
        """No example at all."""
        none = replace(
            self.setting, inputs=self.setting.inputs[:0], targets=self.setting.targets[:0]
        )
        clip = FlatClip(1.0)
        with typed_refusals(EMPTY, self.where("an empty batch")):
            found = self.run(clip, setting=none).value
        self.names(clip, found, "an empty batch")
        length = _length(found)
        require(length == 0, EMPTY, self.where("an empty batch"), f"a length of {length!r}")

    def invalid(self) -> None:
        """One example that is not finite, in its input or in its loss."""
        clip, good = FlatClip(0.5), [i for i in range(self.batch) if i != 2]
        for bad in (math.nan, math.inf, -math.inf):
            inputs = self.setting.inputs.clone()
            inputs[2].view(-1)[0] = bad
            found = self.run(clip, setting=replace(self.setting, inputs=inputs)).value
            due = one_by_one(self.setting, self.setting.make(), clip, good)
            off = _distance(found, due)
            require(
                off <= self.setting.tolerance,
                INVALID,
                self.where(f"an input of {bad}"),
                f"the sum without it is {off:.3g} of its length apart",
            )
            factor = torch.ones(self.batch, dtype=torch.float64)
            factor[2] = bad
            spoilt = replace(self.setting, losses=partial(self._scaled, factor))
            off = _distance(self.run(clip, setting=spoilt).value, due)
            require(
                off <= self.setting.tolerance,
                INVALID,
                self.where(f"a loss times {bad}"),
                f"the sum without it is {off:.3g} of its length apart",
            )

    def many_steps(self) -> None:
        """One engine, batches of several sizes, weights that change."""
        clip, model, engine = FlatClip(0.2), self.setting.make(), self.make()
        engine.attach(model)
        try:
            for step, size in enumerate((1, self.batch, 2, 0, 1, self.batch)):
                part = replace(
                    self.setting,
                    inputs=self.setting.inputs[:size],
                    targets=self.setting.targets[:size],
                )
                losses = part.losses(model, part.inputs, part.targets)
                found = engine.bounded_sum(losses, clip).value
                due = one_by_one(part, _bare_copy(self.setting, model), clip, range(size))
                off = _distance(found, due)
                require(
                    off <= self.setting.tolerance or (size == 0 and _length(found) == 0),
                    REPEATED,
                    self.where(f"step {step} with {size} examples"),
                    f"the sums are {off:.3g} of their length apart",
                )
                with torch.no_grad():
                    for p in trainable(model).values():
                        p.mul_(0.97).add_(0.01)
        finally:
            engine.detach()

    def untouched(self) -> None:
        """What a model shows before, during and after an engine has it."""
        model, engine = self.setting.make(), self.make()
        twin = copy.deepcopy(model)
        for p in trainable(model).values():
            p.grad = torch.full_like(p, 7.0)
        before = {module: set(vars(module)) for module in model.modules()}
        kind, keys = type(model), list(model.state_dict())
        where = self.where("the model")
        engine.attach(model)
        same = type(model) is kind and list(model.state_dict()) == keys
        require(same, UNTOUCHED, where, "its class or its state_dict changed in `attach`")
        losses = self.setting.losses(model, self.setting.inputs, self.setting.targets)
        alone = self.setting.losses(twin, self.setting.inputs, self.setting.targets)
        require(torch.equal(losses, alone), UNTOUCHED, where, "it computes other losses")
        engine.bounded_sum(losses, FlatClip(1.0))
        kept = all(
            p.grad is not None and torch.equal(p.grad, torch.full_like(p, 7.0))
            for p in trainable(model).values()
        )
        require(kept, UNTOUCHED, where, "a `.grad` was written to")
        engine.detach()
        with typed_refusals(ATTACHED, where):
            engine.detach()
        for module in model.modules():
            added = set(vars(module)) ^ before[module]
            require(not added, UNTOUCHED, where, f"its attributes {sorted(added)} changed")
            hooks = [
                name
                for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
                if getattr(module, name)
            ]
            require(not hooks, UNTOUCHED, where, f"{hooks} are left")
        weights = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
        require(all(torch.equal(a, b) for a, b in weights), UNTOUCHED, where, "weights changed")
        after = self.setting.losses(model, self.setting.inputs, self.setting.targets)
        after.sum().backward()

    def bounds(self) -> None:
        """One example with gradients of many sizes, in three number types."""
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for size in (0.0, 1e-30, 1e-8, 1.0, 1e3, 1e15):
                for norm in (1e-6, 0.7, 3.0):
                    one = replace(
                        self.setting,
                        make=partial(self._narrow, dtype),
                        inputs=self.setting.inputs[:1].to(dtype),
                        targets=self.setting.targets[:1],
                        losses=partial(self._scaled, torch.tensor(size, dtype=dtype)),
                    )
                    found = self.run(FlatClip(norm), setting=one).value
                    where = self.where(f"{dtype}, a loss times {size}, clipping norm {norm}")
                    length = _length(found)
                    require(length <= norm, BOUND, where, f"a length of {length!r}")
        one = replace(
            self.setting, inputs=self.setting.inputs[:1], targets=self.setting.targets[:1]
        )
        length = _length(self.run(FlatClip(1e-3), setting=one).value)
        require(length >= 1e-3 * (1 - 1e-9), USED, self.where("clipping norm 0.001"), f"{length!r}")

    def _narrow(self, dtype: torch.dtype) -> nn.Module:
        """The model in another number type."""
        return self.setting.make().to(dtype)

    def _scaled(self, factor: Tensor, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The losses times a factor."""
        return self.setting.losses(model, x, y) * factor

    def refusals(self) -> None:
        """Losses and masks that have no bounded sum."""
        model, engine = self.setting.make(), self.make()
        clip = FlatClip(1.0)
        losses = self.setting.losses(model, self.setting.inputs, self.setting.targets)
        self._refused(lambda: engine.bounded_sum(losses, clip), ATTACHED, "before `attach`")
        engine.attach(model)
        try:
            wrong: dict[str, Callable[[Tensor], Tensor]] = {
                "a mean of losses": lambda held: held.mean(),
                "losses of two dimensions": lambda held: held[:, None],
                "losses without a graph": lambda held: held.detach(),
                "whole numbers": lambda held: held.detach().long(),
            }
            for what, change in wrong.items():
                held = self.setting.losses(model, self.setting.inputs, self.setting.targets)
                self._refused(partial(_summed, engine, change, held, clip), REFUSED, what)
            held = self.setting.losses(model, self.setting.inputs, self.setting.targets)
            short = torch.ones(self.batch - 1, dtype=torch.bool)
            self._refused(
                lambda: engine.bounded_sum(held, clip, short), REFUSED, "a mask that is too short"
            )
        finally:
            engine.detach()

    def _refused(self, attempt: Callable[[], object], property: str, detail: str) -> None:
        where = self.where(detail)
        try:
            attempt()
        except DpfyError:
            return
        except Exception as error:
            require(False, property, where, f"{type(error).__name__}: {error}")
        require(False, property, where, "a sum was made")

    def without_gradients(self) -> None:
        """Evaluation between two steps."""
        clip, model, engine = FlatClip(0.5), self.setting.make(), self.make()
        engine.attach(model)
        try:
            with torch.no_grad():
                model(self.setting.inputs[:3])
                model.eval()
                model(self.setting.inputs)
            model.train()
            losses = self.setting.losses(model, self.setting.inputs, self.setting.targets)
            found = engine.bounded_sum(losses, clip).value
        finally:
            engine.detach()
        off = _distance(found, one_by_one(self.setting, model, clip, range(self.batch)))
        require(
            off <= self.setting.tolerance,
            IGNORED,
            self.where("evaluated before the step"),
            f"the sums are {off:.3g} of their length apart",
        )


def _summed(
    engine: Engine, change: Callable[[Tensor], Tensor], losses: Tensor, clip: Clip
) -> Bounded[Grads]:
    return engine.bounded_sum(change(losses), clip)


def _bare_copy(setting: ModelSetting, model: nn.Module) -> nn.Module:
    """A model of the same weights that no engine has seen."""
    twin = setting.make()
    twin.load_state_dict(model.state_dict())
    return twin
