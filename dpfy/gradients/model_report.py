"""What an engine will do with a model: every layer's route, its expected cost against plain
training, and what is not supported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.core.errors import DpfyError
from dpfy.gradients.checker import check_model, probe_mixing
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import tensors_in
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.choice import choose
from dpfy.gradients.layers.table import rule_for
from dpfy.gradients.per_example import arithmetic
from dpfy.gradients.per_example.arithmetic import KEEP_ELEMENTS
from dpfy.gradients.step_cost import StepCost, sine_loss, step_cost


@dataclass(frozen=True)
class LayerView:
    """One module with parameters of its own. Costs are multiply-adds for one example; `memory`
    counts elements kept for the batch.
    """

    path: str
    kind: str
    parameters: int
    trainable: int
    positions: int
    route: str
    plain: float
    extra: float
    memory: int


@dataclass(frozen=True)
class ModelReport:
    """The whole model: engine, layers, expected ratio of time to the plain step (without noise),
    and problems found.
    """

    engine: str
    layers: tuple[LayerView, ...]
    problems: tuple[str, ...]
    per_example: dict[str, str] = field(default_factory=dict)
    """Parameters whose gradients go through a part of the graph example by example: "vmap" or
    "loop".
    """
    cost: StepCost | None = None

    @property
    def time_ratio(self) -> float:
        """Expected time of a private step over a plain one, by counted arithmetic; noise and
        launches come on top.
        """
        plain = sum(layer.plain for layer in self.layers)
        return 1.0 + sum(layer.extra for layer in self.layers) / plain if plain else 1.0

    @property
    def kept_elements(self) -> int:
        """Elements held beside what plain training holds."""
        return sum(layer.memory for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "engine": self.engine,
            "expected_time_ratio": round(self.time_ratio, 3),
            "kept_elements": self.kept_elements,
            "problems": list(self.problems),
            "per_example": dict(self.per_example),
            "measured": None if self.cost is None else self.cost.as_dict(),
            "layers": [asdict(layer) for layer in self.layers],
        }

    def table(self) -> str:
        """The inspection as text."""
        head = ("layer", "kind", "parameters", "positions", "route", "extra time")
        rows = [
            (
                v.path,
                v.kind,
                f"{v.parameters:,}",
                str(v.positions),
                v.route,
                f"{100 * v.extra / v.plain:.0f}%" if v.plain else "-",
            )
            for v in self.layers
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        lines.append(
            f"{self.engine}; expected time against plain training, without noise: "
            f"{self.time_ratio:.2f}x"
        )
        lines += [self.cost.text()] if self.cost else []
        lines += [
            _one_by_one(route, [n for n, how in self.per_example.items() if how == route])
            for route in ROUTES
        ]
        return "\n".join(
            [line for line in lines if line]
            + [f"NOT SUPPORTED: {problem}" for problem in self.problems]
        )


ROUTES = {
    "vmap": "no rule explains the operations between them and the batch, so that part of the "
    "backward pass is vectorised over the "
    "examples and costs up to the batch times as much; layers of torch, matrix products, "
    "convolutions and lookups have rules",
    "loop": "one backward pass an example through a part that torch cannot vectorise (an "
    "autograd.Function of your own, a layer of a "
    "library); write it with operations of torch, or set generate_vmap_rule on the function",
}
"""What a route costs, and how to avoid it."""


def _one_by_one(route: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"EXAMPLE BY EXAMPLE ({route}): {shown}: {ROUTES[route]}" if names else ""


def inspect(
    model: nn.Module,
    sample: Tensor | tuple[Tensor, ...],
    batch: int | None = None,
    measure: bool = False,
) -> ModelReport:
    """Look at `model` before it is trained: how each layer is computed, what it costs, and which
    problems training would have. Nothing is changed or trained.

    Args:
        model: The model.
        sample: A public or random batch of its inputs.
        batch: The physical batch to plan for, where the sample is smaller.
        measure: Time steps on the sample.

    Returns:
        The report: `table()` shows it, `problems` lists what would be refused.

    Raises:
        InvalidInput: The sample is not a batch of tensors.

    Guarantees: what :func:`check_model` or :func:`probe_mixing` would refuse is listed under
    problems, with its way out.

    Example:
        >>> import torch
        >>> import dpfy
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        >>> len(dpfy.inspect(model, torch.randn(16, 4)).problems) > 0
        True
    """
    inputs = sample if isinstance(sample, tuple) else (sample,)
    shapes, problems = _shapes(model, inputs), _problems(model, inputs)
    routes = {} if problems else _per_example(model, inputs, problems)
    views = []
    for path, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            view = _view(
                path or "(model)",
                module,
                own,
                shapes.get(path, []),
                len(inputs[0]),
                batch or len(inputs[0]),
            )
            mine = {
                routes.get(f"{path}.{name}" if path else name, "")
                for name, _ in module.named_parameters(recurse=False)
            }
            views.append(
                view
                if problems or view.route != APART
                else _by_operations(view, mine - {""}, batch or len(inputs[0]))
            )
    try:
        engine = choose(model)[1]
    except DpfyError as error:
        engine = f"no engine: {error}"
    cost = step_cost(model, inputs) if measure and not problems else None
    return ModelReport(engine, tuple(views), tuple(problems), routes, cost)


APART = "split where examples are separate"


def _by_operations(view: LayerView, routes: set[str], batch: int) -> LayerView:
    """The route of a module without a rule of its own, by what the engine did with its
    parameters.
    """
    if routes:
        return replace(view, route=f"example by example ({min(routes)})")
    return replace(view, route="by rules of its operations", extra=min(view.extra, view.plain / 3))


def _per_example(
    model: nn.Module, inputs: tuple[Tensor, ...], problems: list[str]
) -> dict[str, str]:
    """What the fast engine really does with the model, on some loss of the sample; what it refuses
    is added to `problems`.
    """
    engine, buffers = (
        BookkeepingEngine(),
        {name: b.detach().clone() for name, b in model.named_buffers()},
    )
    engine.attach(model)
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            engine.bounded_sum(sine_loss(model(*inputs)), FlatClip(1.0))
        return engine.per_example_parameters
    except DpfyError as error:
        problems.append(str(error))
        return {}
    finally:
        engine.detach()
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])


def _problems(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[str]:
    found = []
    for check in (lambda: check_model(model), lambda: probe_mixing(model, inputs)):
        try:
            check()
        except DpfyError as error:
            found.append(str(error))
    return found


def _shapes(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, list[torch.Size]]:
    """Output shapes of every call of every module that has parameters."""
    seen: dict[str, list[torch.Size]] = {}

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            shapes = [t.shape for t in tensors_in(output)]
            if isinstance(
                module, nn.MultiheadAttention
            ):  # its weights come second, and it never calls its last projection
                shapes = shapes[:1]
                seen.setdefault(f"{path}.out_proj".removeprefix("."), []).extend(shapes)
            seen.setdefault(path, []).extend(shapes)

        return hook

    handles = [
        m.register_forward_hook(watch(path))
        for path, m in model.named_modules()
        if list(m.parameters(recurse=False))
    ]
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
    return seen


def _view(
    path: str,
    module: nn.Module,
    own: list[nn.Parameter],
    shapes: list[torch.Size],
    seen: int,
    batch: int,
) -> LayerView:
    count = sum(p.numel() for p in own)
    wanted = sum(p.numel() for p in own if p.requires_grad)
    matrix = max(own, key=lambda p: p.numel())
    matrices = [matrix]
    if isinstance(
        module, nn.RNNBase
    ):  # each direction of each layer has its own; the last states are among the outputs of a call
        shapes, matrices = (
            shapes[:: 3 if module.mode == "LSTM" else 2],
            sorted((p for p in own if p.dim() > 1), key=lambda p: -p.numel()),
        )
    positions = sum(_positions(module, shape, seen) for shape in shapes)
    plain = sum((3.0 if m.dim() > 1 else 6.0) * positions * m.numel() for m in matrices)
    route, extra, memory = "frozen: no work", 0.0, 0
    if wanted and rule_for(module) is None:
        # Scales and shifts are rows of a gradient; anything larger may need a pass per example.
        each = 2.0 * positions * matrix.numel()
        route, extra = APART, each * (1 if matrix.dim() == 1 else batch)
    elif wanted:
        found = [_route(module, m, positions, batch) for m in matrices]
        route, extra, memory = (
            found[0][0],
            sum(extra for _, extra, _ in found),
            sum(memory for _, _, memory in found),
        )
    return LayerView(
        path, type(module).__name__, count, wanted, positions, route, plain, extra, memory
    )


def _positions(module: nn.Module, shape: torch.Size, batch: int) -> int:
    """Positions of one example at which the layer's weights are used."""
    # An output without a batch (positions looked up once for all examples) is one example's.
    each = shape.numel() // (1 if shape[0] == 1 else max(batch, 1))
    if isinstance(module, nn.modules.conv._ConvNd):
        return max(1, each // module.out_channels)
    return max(1, each // shape[-1]) if len(shape) > 1 else 1


def _route(
    module: nn.Module, weight: nn.Parameter, positions: int, batch: int
) -> tuple[str, float, int]:
    """The route of a layer with a row, its extra multiply-adds for one example, and the elements it
    keeps for the batch.
    """
    width = weight.numel()
    if weight.dim() == 1:
        return "direct", 2.0 * positions * width, batch * width
    rows = weight.shape[0]
    columns = width // rows
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "equal rows", float(positions**2 * columns), 0
    if positions == 1:
        return "product of norms", float(rows + columns), 0
    if isinstance(module, nn.modules.conv._ConvNd):
        elements = positions * (module.in_channels + module.out_channels)
        if (module.groups > 1 and arithmetic.grouped_kept(weight.shape[1], width, elements)) or (
            weight.is_cuda and weight.dim() < 5 and arithmetic.kept_on_gpu(width, 2 * elements)
        ):
            return "products kept", float(arithmetic.PASS_COST * width) / 4.0, batch * width
    gram, product, kept = (
        float(positions**2 * (rows + columns)),
        float(positions * width),
        batch * width <= KEEP_ELEMENTS,
    )
    if weight.is_cuda:
        if arithmetic.by_gram_on_gpu(positions, rows, columns):
            return "gram kernel", gram / 2, 0
        if arithmetic.kept_on_gpu(width, positions * (rows + columns) * weight.element_size()):
            return "products kept", 0.0, batch * width
        return "products in chunks", product, 0
    if weight.dim() > 2:
        by_gram, kept = (
            arithmetic.convolution_by_gram(positions, rows, columns),
            kept and positions >= arithmetic.KEPT_POSITIONS,
        )
    else:
        by_gram, kept = (
            arithmetic.by_gram_on_cpu(positions, rows, columns),
            kept and arithmetic.keeping_pays(positions, rows, columns),
        )
    if by_gram:
        return "gram matrices", 2 * gram, 0
    return (
        ("products kept", arithmetic.PASS_COST * width / 4.0, batch * width)
        if kept
        else ("products in chunks", product, 0)
    )
