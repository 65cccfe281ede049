"""The clip bound in floating point: one example, whatever it holds, adds at most the clip norm, by
every route.

The measure is always the same: the length of the sum over ONE example, in float64, from what the
engine handed out. Layers are given their inputs and their output gradients directly, `losses =
(layer(x) * g).sum()`, so that a test chooses what cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfy.gradients.clip import (
    AutomaticClip,
    Clip,
    FlatClip,
    GroupClip,
    PerLayerClip,
    PsacClip,
    QuantileClip,
)
from dpfy.gradients.engine import per_user
from dpfy.gradients.engines.choice import ENGINES
from dpfy.gradients.per_example import convolution, outer
from dpfy.gradients.per_example.embedding import EmbeddingGradient

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [1.0, 1e4, 1e5, 1e6]
"""How many clip norms long the parts are that nearly cancel."""

Losses = Callable[[nn.Module], Tensor]


def length(
    model: nn.Module,
    losses: Losses,
    clip: Clip,
    engine: str = "bookkeeping",
    mask: Tensor | None = None,
) -> float:
    """The length of what the engine handed out, over the bound."""
    made = ENGINES[engine]()
    made.attach(model)
    try:
        for _ in range(2):  # the first step measures layouts, the second one does not
            total = made.bounded_sum(losses(model), clip, mask)
    finally:
        made.detach()
    square = sum(float(g.double().square().sum()) for g in total.value.values())
    assert math.isfinite(square)
    return math.sqrt(square) / total.bound.l2


def opposed(shape: tuple[int, ...], size: float, gap: float, seed: int = 0) -> Tensor:
    """[2, positions, width]: pairs of positions that cancel but for a relative `gap`; the second
    example is ordinary.
    """
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(2, *shape, generator=generator)
    t[0, 1::2] = -t[0, : 2 * (shape[0] // 2) : 2] * (1 - gap)
    t[0] *= size / t[0, 0].norm()
    return t


def paired(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    """[2, positions, width]: pairs of positions that are equal, in the first example, each of
    length 1.
    """
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(2, *shape, generator=generator)
    t[0, 1::2] = t[0, : 2 * (shape[0] // 2) : 2]
    return t / t.flatten(2).norm(dim=2).view(*t.shape[:2], *[1] * (len(shape) - 1))


class Given(nn.Module):
    """A layer and what its output is multiplied by: the layer's output gradient."""

    def __init__(self, layer: nn.Module, x: Tensor, g: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.inputs, self.grads = [x], [g]

    def losses(self, model: nn.Module) -> Tensor:
        return (model(self.inputs[0]) * self.grads[0]).float().flatten(1).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def linear(positions: int, p: int, d: int, size: float, gap: float) -> Given:
    return Given(
        nn.Linear(d, p, bias=False), paired((positions, d)), opposed((positions, p), size, gap)
    )


def embedding(positions: int, size: float, gap: float) -> Given:
    index = (torch.arange(positions) // 2 % 5).expand(2, positions).contiguous()
    return Given(nn.Embedding(7, 64), index, opposed((positions, 64), size, gap))


def bag(size: float, gap: float) -> Given:
    index = torch.zeros(2, 64, dtype=torch.long)
    return Given(nn.EmbeddingBag(7, 64, mode="sum"), index, opposed((1, 64), size, gap)[:, 0])


def image(channels: int, side: int, size: float, gap: float, seed: int, equal: bool) -> Tensor:
    """[2, channels, side, side] whose two halves, top and bottom, cancel but for `gap`, or are
    equal.
    """
    half = (opposed if not equal else lambda s, *_: paired(s, seed))(
        (2, channels, side // 2, side), size, gap, seed
    )
    return half.permute(0, 2, 1, 3, 4).reshape(2, channels, side, side)


def conv(make: Callable[[], nn.Module], channels: int, side: int, size: float, gap: float) -> Given:
    layer = make()
    x = image(channels, side, 1.0, 0.0, 1, equal=True)
    y = layer(x)
    g = image(y.shape[1], y.shape[2] - y.shape[2] % 2, size, gap, 2, equal=False)
    return Given(layer, x, F.pad(g, (0, y.shape[3] - g.shape[3], 0, y.shape[2] - g.shape[2])))


ROUTES: dict[str, Callable[[float, float], Given]] = {
    "linear, one position": lambda s, gap: Given(
        nn.Linear(9, 7), torch.randn(2, 9), opposed((1, 7), s, gap)[:, 0]
    ),
    "linear, gram": lambda s, gap: linear(8, 256, 256, s, gap),
    "linear, gram, wide": lambda s, gap: linear(8, 3000, 300, s, gap),
    "linear, kept": lambda s, gap: linear(64, 16, 16, s, gap),
    "linear, products": lambda s, gap: linear(64, 32, 32, s, gap),
    "embedding": lambda s, gap: embedding(24, s, gap),
    "bag": bag,
    "1x1": lambda s, gap: conv(lambda: nn.Conv2d(8, 8, 1, bias=False), 8, 8, s, gap),
    "3x3, patches": lambda s, gap: conv(
        lambda: nn.Conv2d(3, 5, 3, padding=1, bias=False), 3, 12, s, gap
    ),
    "3x3, blocked": lambda s, gap: conv(
        lambda: nn.Conv2d(8, 8, 3, padding=1, bias=False), 8, 12, s, gap
    ),
    "3x3, gram": lambda s, gap: conv(
        lambda: nn.Conv2d(64, 64, 3, padding=1, bias=False), 64, 4, s, gap
    ),
    "groups": lambda s, gap: conv(lambda: nn.Conv2d(8, 8, 3, groups=4, bias=False), 8, 12, s, gap),
    "depthwise": lambda s, gap: conv(
        lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), 8, 12, s, gap
    ),
    "depthwise, transposed": lambda s, gap: conv(
        lambda: nn.ConvTranspose2d(8, 8, 3, groups=8, bias=False), 8, 12, s, gap
    ),
    "depthwise, few positions": lambda s, gap: conv(
        lambda: nn.Conv2d(8, 16, 5, padding=2, groups=8, bias=False), 8, 4, s, gap
    ),
    "groups, wide": lambda s, gap: conv(
        lambda: nn.Conv2d(64, 64, 3, padding=1, groups=2, bias=False), 64, 6, s, gap
    ),
    "transposed": lambda s, gap: conv(
        lambda: nn.ConvTranspose2d(8, 4, 3, bias=False), 8, 12, s, gap
    ),
    "layer norm": lambda s, gap: Given(
        nn.LayerNorm(32), paired((16, 32)), opposed((16, 32), s, gap)
    ),
    "rms norm": lambda s, gap: Given(nn.RMSNorm(32), paired((16, 32)), opposed((16, 32), s, gap)),
    "group norm": lambda s, gap: conv(lambda: nn.GroupNorm(2, 8), 8, 12, s, gap),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_what_cancels_over_positions_stays_within_the_bound(
    route: str, keep: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keep:
        monkeypatch.setattr(outer, "KEEP_ELEMENTS", 0)
        monkeypatch.setattr(convolution, "KEEP_ELEMENTS", 0)
    worst = 0.0
    for size in (1.0, 1e4, 1e6):
        for gap in (0.0, 1e-6, 1e-5, 1e-4, 3e-4, 0.1, 2.0):
            torch.manual_seed(0)
            given_ = on(device, ROUTES[route](size, gap))
            mask = torch.tensor([True, False], device=device)
            worst = max(worst, length(given_, given_.losses, FlatClip(1.0), mask=mask))
    assert 0.9 < worst <= 1.0


@pytest.mark.parametrize("route", ROUTES)
def test_how_much_is_kept_does_not_change_a_norm(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether gradients are kept depends on the size of the batch, hence on others: an example's
    multiplier must not.
    """
    if "norm" in route:
        return
    for gap in (1e-5, 1e-3, 0.1, 2.0):
        lengths = []
        for keep in (outer.KEEP_ELEMENTS, 0):
            monkeypatch.setattr(outer, "KEEP_ELEMENTS", keep)
            monkeypatch.setattr(convolution, "KEEP_ELEMENTS", keep)
            torch.manual_seed(0)
            given_ = ROUTES[route](1e5, gap)
            lengths.append(
                length(given_, given_.losses, FlatClip(1.0), mask=torch.tensor([True, False]))
            )
            monkeypatch.undo()
        assert lengths[0] == pytest.approx(lengths[1], rel=1e-2 if gap < 1e-4 else 1e-4)


def on(device: str, given_: Given) -> Given:
    given_.inputs, given_.grads = (
        [t.to(device) for t in given_.inputs],
        [t.to(device) for t in given_.grads],
    )
    return given_.to(device)


class Tied(nn.Module):
    """An embedding and the head tied to it, whose uses add `size` and -`size` * (1 - gap) times the
    same row.
    """

    def __init__(
        self, size: float, gap: float, rows: int = 11, width: int = 64, positions: int = 1
    ) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)
        self.head.weight = self.table.weight
        self.size, self.gap, self.index = (
            size,
            gap,
            torch.arange(2 * positions).view(2, positions) % rows,
        )

    def losses(self, model: nn.Module) -> Tensor:
        index = self.index.to(self.table.weight.device)
        h = self.table(index)
        still = h.detach() / h.detach()[0, 0].norm()
        picked = self.head(still).gather(2, index[..., None])[..., 0]
        return self.size * (picked - (1 - self.gap) * (h * still).sum(2)).sum(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_tied_head_whose_uses_nearly_cancel(
    engine: str, size: float, positions: int, device: str
) -> None:
    worst = 0.0
    for gap in (0.0, 1e-7, 1e-5, 1e-4, 2e-4, 2.8e-4, 4e-4, 1e-3, 0.5):
        torch.manual_seed(0)
        model = Tied(size, gap, positions=positions).to(device)
        mask = torch.tensor([True, False], device=device)
        worst = max(worst, length(model, model.losses, FlatClip(1.0), engine, mask))
    assert worst <= 1.0


class Twice(nn.Module):
    """A layer used twice with opposite gradients, or a layer and its bare weight."""

    def __init__(self, layer: nn.Module, x: Tensor, size: float, gap: float, bare: bool) -> None:
        super().__init__()
        self.layer, self.x, self.size, self.gap, self.bare = layer, x, size, gap, bare

    def losses(self, model: nn.Module) -> Tensor:
        y = self.layer(self.x)
        if self.bare:
            weight = self.layer.weight
            g = torch.ones(y.shape[1:])
            run = lambda w: torch.func.functional_call(self.layer, {"weight": w}, self.x[:1])[0]  # noqa: E731
            again = torch.autograd.functional.vjp(run, weight.detach(), g)[1]
            second = (weight * again).sum().expand(len(self.x)) * 1.0
        else:
            second = self.layer(self.x).flatten(1).sum(1)
        return self.size * (y.flatten(1).sum(1) - (1 - self.gap) * second)


@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("bare", [False, True])
def test_uses_of_one_layer_that_nearly_cancel(layer: str, bare: bool) -> None:
    torch.manual_seed(0)
    worst = 0.0
    for size in SIZES:
        for gap in (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 3e-4):
            made = (
                nn.Linear(6, 5, bias=False) if layer == "linear" else nn.Conv2d(2, 3, 3, bias=False)
            )
            x = torch.randn(2, 4, 6) if layer == "linear" else torch.randn(2, 2, 6, 6)
            model = Twice(made, x, size, gap, bare)
            worst = max(
                worst, length(model, model.losses, FlatClip(1.0), mask=torch.tensor([True, False]))
            )
    assert worst <= 1.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("outs", "clip"), [(256, 1e-3), (256, 1e-4), (256, 1e-6), (50_257, 0.01)])
@pytest.mark.parametrize("positions", [0, 4])
def test_squares_that_underflow(
    engine: str, outs: int, clip: float, positions: int, device: str
) -> None:
    """Output gradients whose squares are no float32 numbers, inputs that make up for it: the
    product is longer than the clip norm.
    """
    shape = (positions,) if positions else ()
    wide = 128
    g = torch.full((1, *shape, outs), 2e-23, device=device)
    x = torch.full((1, *shape, wide), 9e17, device=device)
    model = nn.Linear(wide, outs, bias=False).to(device)
    with torch.no_grad():
        model.weight.zero_()
    assert length(model, lambda m: (m(x) * g).flatten(1).sum(1), FlatClip(clip), engine) <= 1.0


def test_squares_that_underflow_in_a_pooled_table() -> None:
    index, g = torch.zeros(1, 4096, dtype=torch.long), torch.full((1, 4096, 64), 1e-22)
    model = nn.Embedding(3, 64)
    for clip in (1e-9, 1e-6, 1.0):
        assert length(model, lambda m: (m(index) * g).flatten(1).sum(1), FlatClip(clip)) <= 1.0


class Bare(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1)


@pytest.mark.parametrize("kind", ["equal", "random", "falling"])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_coordinates(engine: str, kind: str) -> None:
    many_coordinates(engine, kind, 10_000_019)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_hundred_million_coordinates(engine: str, device: str) -> None:
    """Needs 4 GiB."""
    many_coordinates(engine, "equal", 100_000_000, device)


def many_coordinates(engine: str, kind: str, count: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(0)
    if kind == "equal":
        x = torch.full((1, 1), 0.1).expand(1, count)
    elif kind == "random":
        x = torch.randn(1, count, generator=generator)
    else:
        x = torch.linspace(1, 1e-3, count)[None]
    x, made = x.to(device), ENGINES[engine]()
    model = Bare(count).to(device)
    made.attach(model)
    total = made.bounded_sum(model(x), FlatClip(1.0)).value["weight"]
    made.detach()
    found = math.sqrt(sum(float(part.double().square().sum()) for part in total.split(2**22)))
    assert 1 - 2e-4 < found <= 1.0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", ["equal", "random"])
def test_many_coordinates_of_a_layer(
    kind: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear with several positions, kept or not, and a convolution."""
    if not keep:
        monkeypatch.setattr(outer, "KEEP_ELEMENTS", 0)
    make = torch.ones if kind == "equal" else torch.randn
    torch.manual_seed(0)
    x, g = make(1, 30, 1500), make(1, 30, 1500)
    model = nn.Linear(1500, 1500, bias=False)
    found = length(model, lambda m: (m(x) * g).flatten(1).sum(1), FlatClip(1.0))
    assert 0.99 < found <= 1.0


RULES: dict[str, Clip] = {
    "flat": FlatClip(0.3),
    "per layer": PerLayerClip(0.3),
    "per group": GroupClip(("table", ""), (0.1, 0.2)),
    "automatic": AutomaticClip(0.3),
    "automatic, tiny gamma": AutomaticClip(0.3, gamma=1e-40),
    "psac": PsacClip(0.3),
    "psac, tiny gamma": PsacClip(0.3, gamma=1e-40),
    "quantile": QuantileClip(0.3),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_holds_where_uses_cancel_and_where_squares_underflow(
    rule: str, engine: str
) -> None:
    worst = 0.0
    for size in (1e-40, 1e-25, 1e-20, 1e-18, 1e-12, 1.0, 1e5, 1e15, 1e30):
        for gap in (0.0, 1e-6, 2.8e-4, 0.5):
            torch.manual_seed(0)
            model = Tied(size, gap)
            worst = max(
                worst, length(model, model.losses, RULES[rule], engine, torch.tensor([True, False]))
            )
    assert worst <= 1.0


def test_users_whose_records_nearly_cancel() -> None:
    worst = 0.0
    for size in SIZES:
        for gap in (0.0, 1e-7, 1e-5, 1e-4, 3e-4, 2.0):
            x, g = paired((8, 256)), opposed((8, 256), size, gap)
            model = nn.Linear(256, 256, bias=False)
            real = torch.ones(2, 8, dtype=torch.bool)

            def losses(m: nn.Module, x: Tensor = x, g: Tensor = g, real: Tensor = real) -> Tensor:
                return per_user((m(x.flatten(0, 1)) * g.flatten(0, 1)).sum(1), real)

            worst = max(
                worst, length(model, losses, FlatClip(1.0), mask=torch.tensor([True, False]))
            )
    assert 0.9 < worst <= 1.0


magnitudes = st.floats(-30, 30).map(lambda e: 10.0**e)


@settings(max_examples=100, deadline=None)
@example("linear, gram", 1e3, 1e5, 1.0, 2.8e-4, True)
@example("linear, one position", 2e-23, 10.0, 1e-3, 2.0, True)
@given(
    st.sampled_from(sorted(ROUTES)),
    magnitudes,
    st.floats(-3, 7).map(lambda e: 10.0**e),
    st.floats(-6, 6).map(lambda e: 10.0**e),
    st.floats(-9, 0.3).map(lambda e: 10.0**e),
    st.booleans(),
)
def test_any_magnitude_with_any_clip_norm(
    route: str, left: float, longer: float, clip: float, gap: float, keep: bool
) -> None:
    """Factors of any magnitude whose product is `longer` times the clip norm."""
    before = outer.KEEP_ELEMENTS, convolution.KEEP_ELEMENTS
    if not keep:
        outer.KEEP_ELEMENTS = convolution.KEEP_ELEMENTS = 0
    try:
        torch.manual_seed(0)
        given_ = ROUTES[route](left, gap)
        if given_.inputs[0].is_floating_point():
            given_.inputs[0] = (
                given_.inputs[0].double().mul(clip * longer / left).clamp(-3e38, 3e38).float()
            )
        assert (
            length(given_, given_.losses, FlatClip(clip), mask=torch.tensor([True, False])) <= 1.0
        )
    finally:
        outer.KEEP_ELEMENTS, convolution.KEEP_ELEMENTS = before


@pytest.mark.parametrize("route", [r for r in ROUTES if r not in ("bag",)])
def test_narrow_types_keep_the_bound_where_terms_cancel(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keep in (True, False):
        if not keep:
            monkeypatch.setattr(outer, "KEEP_ELEMENTS", 0)
            monkeypatch.setattr(convolution, "KEEP_ELEMENTS", 0)
        for size in (1.0, 1e3, 1e5):
            for gap in (0.0, 4e-3, 8e-3, 0.1):
                torch.manual_seed(0)
                given_ = ROUTES[route](size, gap)
                given_.inputs = [
                    t.bfloat16() if t.is_floating_point() else t for t in given_.inputs
                ]
                given_.grads = [t.bfloat16() for t in given_.grads]
                assert (
                    length(
                        given_.bfloat16(),
                        given_.losses,
                        FlatClip(1.0),
                        mask=torch.tensor([True, False]),
                    )
                    <= 1.0
                )


def test_arithmetic_that_the_user_or_the_machine_makes_coarser() -> None:
    """Denormal numbers flushed to zero, products that may run in bfloat16, models in float16."""
    before = torch.get_float32_matmul_precision()
    for coarse in ("flushed", "medium", "half"):
        torch.set_flush_denormal(coarse == "flushed")
        torch.set_float32_matmul_precision("medium" if coarse == "medium" else before)
        try:
            for route in (
                "linear, one position",
                "linear, gram",
                "linear, products",
                "embedding",
                "3x3, patches",
            ):
                for size, clip in ((1e-38, 1e-9), (1e-20, 1e-9), (1.0, 1e-3), (1e3, 1.0)):
                    for gap in (1e-5, 2.8e-4, 2.0):
                        torch.manual_seed(0)
                        given_ = ROUTES[route](size, gap)
                        if coarse == "half":
                            given_ = given_.half()
                            given_.inputs = [
                                t.half() if t.is_floating_point() else t for t in given_.inputs
                            ]
                            given_.grads = [t.half() for t in given_.grads]
                        assert (
                            length(
                                given_,
                                given_.losses,
                                FlatClip(clip),
                                mask=torch.tensor([True, False]),
                            )
                            <= 1.0
                        )
        finally:
            torch.set_flush_denormal(False)
            torch.set_float32_matmul_precision(before)


class Frames(nn.Module):
    """Two frames of each example, folded into the batch of a convolution, whose parts nearly
    cancel.
    """

    def __init__(self, size: float, gap: float) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 3, 3, bias=False)
        self.x, self.g = paired((2, 2, 6, 6)), opposed((2, 3, 4, 4), size, gap)

    def losses(self, model: nn.Module) -> Tensor:
        return (self.layer(self.x.flatten(0, 1)).unflatten(0, (2, 2)) * self.g).flatten(1).sum(1)


def test_frames_that_nearly_cancel() -> None:
    worst = 0.0
    for size in SIZES:
        for gap in (0.0, 1e-6, 1e-5, 1e-4, 3e-4, 2.0):
            model = Frames(size, gap)
            worst = max(
                worst, length(model, model.losses, FlatClip(1.0), mask=torch.tensor([True, False]))
            )
    assert 0.9 < worst <= 1.0


def test_nothing_is_lost_where_nothing_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allowance for rounding costs less than a thousandth of an ordinary example's length, by
    every route.
    """
    for keep in (True, False):
        if not keep:
            monkeypatch.setattr(outer, "KEEP_ELEMENTS", 0)
            monkeypatch.setattr(convolution, "KEEP_ELEMENTS", 0)
        for route in ROUTES:
            torch.manual_seed(0)
            given_ = ROUTES[route](100.0, 2.0)
            mask = torch.tensor([False, True])
            found = length(
                given_, lambda m, made=given_: 1e4 * made.losses(m), FlatClip(1.0), mask=mask
            )
            assert 0.999 < found <= 1.0, route


def test_rows_has_the_same_answer_by_both_routes() -> None:
    """The Gram route of tables, which other devices take, and sums of equal rows."""
    torch.manual_seed(0)
    part = EmbeddingGradient(torch.randint(0, 5, (3, 12)), torch.randn(3, 12, 8), 5)
    expected = part.per_example(slice(0, 3)).double().flatten(1).square().sum(1)
    for squares in (part.measured()[0].sum(0), part._by_gram()):
        assert torch.allclose(squares.double(), expected, rtol=2e-4)
        assert bool((squares.double() * (1 + 1e-4) >= expected).all())
