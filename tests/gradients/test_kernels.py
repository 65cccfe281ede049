"""The fused kernels against plain PyTorch in float64: on a GPU, or anywhere with
``TRITON_INTERPRET=1`` and triton installed.
"""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from dpfy.gradients import kernels
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.kernels import conv2d, grams, reductions
from dpfy.gradients.per_example import convolution
from dpfy.gradients.per_example.convolution import ConvolutionGradient, Geometry
from dpfy.gradients.per_example.embedding import EmbeddingGradient
from dpfy.gradients.per_example.outer import Outer
from dpfy.gradients.per_example.rounding import Gram, GramRounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16
FLOATS = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


TILINGS_OF_NORMS = [
    conv2d.Tiling(16, 16, 16, 4, 2, "given", True),
    conv2d.Tiling(32, 16, 16, 4, 2, "channels last", False),
]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the kernels run on CPU tensors too."""
    monkeypatch.setattr(kernels, "usable", lambda t, family="": t.dtype in FLOATS)
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < tolerance


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("batch", "length", "p", "d"), [(2, 5, 7, 9), (3, 70, 33, 40), (2, 130, 16, 8)]
)
def test_gram_norms(batch: int, length: int, p: int, d: int, dtype: torch.dtype) -> None:
    lefts, rights = (
        [draw(batch, length, p, dtype=dtype) for _ in range(3)],
        [draw(batch, length, d, dtype=dtype) for _ in range(3)],
    )
    for left, right, found in zip(lefts, rights, grams.gram_estimates(lefts, rights), strict=True):
        close(found.squares, (left.double().mT @ right.double()).flatten(1).square().sum(1))
    index = torch.randint(0, 6, (batch, length), device=DEVICE)
    table = torch.zeros(batch, 6, p, dtype=torch.float64, device=DEVICE)
    table.scatter_add_(1, index[..., None].expand(batch, length, p), lefts[0].double())
    close(grams.gram_estimates([lefts[0]], [index])[0].squares, table.flatten(1).square().sum(1))


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e-12, 1e9, 1e18, 1e19, math.nan, math.inf])
@pytest.mark.parametrize("factors", [(0.0, 0.0), (2.0**-8, 0.0), (2.0**-9, 2.0**-8)])
@pytest.mark.parametrize(("layers", "parts", "batch"), [(1, 1, 3), (3, 10, 17), (2, 70, 5)])
def test_one_launch_bounds_as_the_rule_does(
    layers: int, parts: int, batch: int, factors: tuple[float, float], size: float
) -> None:
    """Where sums underflow, overflow or are not finite too; never less than the rule says, and by a
    few millionths more at most.
    """
    sums = draw(layers, 6, parts, batch).abs() * size
    sums[:, 3:5] *= size
    sums[0, 0, 0, 0] = -sums[0, 0, 0, 0]
    sums[:, :, 0, 1] = 0.0
    how = GramRounding(
        positions=70,
        left=300,
        right=520,
        terms=136,
        left_factor=factors[0],
        right_factor=factors[1],
        added=1e-5,
    )
    found = grams.upper(how, sums)
    expected = how.estimate(Gram(*sums.sum(2, dtype=torch.float64).unbind(1))).upper[0]
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    known = expected.isfinite()
    assert torch.equal(found[~known & ~expected.isnan()], expected[~known & ~expected.isnan()])
    assert (found[known] >= expected[known] * (1 - 1e-12)).all()
    assert (found[known] <= expected[known] * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_bounds_of_layers_are_those_of_their_estimates(dtype: torch.dtype) -> None:
    lefts, rights = (
        [draw(3, 70, 33, dtype=dtype) for _ in range(2)],
        [draw(3, 70, 40, dtype=dtype) for _ in range(2)],
    )
    close(grams.gram_uppers(lefts, rights), grams.gram_estimate(lefts, rights).upper[0], 1e-5)
    index = torch.randint(0, 6, (3, 70), device=DEVICE)
    close(
        grams.gram_uppers([lefts[0]], [index]),
        grams.gram_estimate([lefts[0]], [index]).upper[0],
        1e-5,
    )


@pytest.mark.gpu
def test_gram_norms_of_tensors_that_are_rounded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32, for long sequences: the same norms as with rounding inside of the kernel, however
    many layers go together.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    lefts, rights = [draw(3, 70, 33) for _ in range(5)], [draw(3, 70, 40) for _ in range(5)]
    expected = grams.gram_estimates(lefts, rights)
    monkeypatch.setattr(grams, "LONG", 70)
    for layers in (1, 2, 5):
        monkeypatch.setattr(grams, "ROUNDED_BYTES", layers * 3 * 70 * (33 + 40) * 2)
        for found, other in zip(grams.gram_estimates(lefts, rights), expected, strict=True):
            close(found.squares, other.squares, 1e-5)
            close(found.upper, other.upper, 1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "length", "width"), [(3, 1, 7), (2, 45, 130), (5, 100, 16)])
def test_position_sums(batch: int, length: int, width: int, dtype: torch.dtype) -> None:
    g, a = draw(batch, length, width, dtype=dtype), draw(batch, length, width, dtype=dtype)
    mean, rstd = draw(batch, length), draw(batch, length)
    plain, scaled = (
        g.double().sum(1),
        (g.double() * (a.double() - mean[..., None]) * rstd[..., None]).sum(1),
    )
    for shift, scale in reductions.position_sums([(g, a, rstd, mean)] * 2):
        close(shift, plain)
        close(scale, scaled)
    close(reductions.position_sums([(g,)])[0][0], plain)
    close(
        reductions.position_sums([(g, a, rstd)])[0][1],
        (g.double() * a.double() * rstd[..., None]).sum(1),
    )


def opposed(batch: int, length: int, width: int, gap: float) -> Tensor:
    """Positions in pairs that cancel but for `gap`."""
    t = draw(batch, length, width)
    t[:, 1::2] = -t[:, : 2 * (length // 2) : 2] * (1 - gap)
    return t


@pytest.mark.parametrize(("length", "p", "d"), [(8, 40, 30), (8, 600, 40), (70, 33, 40)])
@pytest.mark.parametrize("gap", [0.0, 1e-6, 1e-4, 3e-4, 1e-2])
@pytest.mark.parametrize("size", [1.0, 1e-18, 1e9])
def test_gram_estimates_are_no_less_than_what_the_sum_adds(
    length: int, p: int, d: int, gap: float, size: float
) -> None:
    """Positions that cancel, squares that underflow or overflow: the bound holds for the float32
    sum with weight 1.
    """
    if gap not in (0.0, 3e-4) and size != 1.0:
        return
    left, right = opposed(2, length, p, gap) * size, draw(2, length, d) / size
    right[:, 1::2] = right[:, : 2 * (length // 2) : 2]
    upper = grams.gram_estimates([left], [right])[0].upper[0]
    added = Outer(left, right)
    for i in range(2):
        alone = torch.zeros(2, device=DEVICE)
        alone[i] = 1.0
        assert (
            float(added.weighted_sum(alone).double().square().sum())
            <= float(upper[i]) * (1 + 2.0**-14) ** 2
        )
    index = (torch.arange(length, device=DEVICE) // 2).expand(2, length)
    upper = grams.gram_estimates([left], [index])[0].upper[0]
    table = EmbeddingGradient(index, left, length).weighted_sum(
        torch.tensor([1.0, 0.0], device=DEVICE)
    )
    assert float(table.double().square().sum()) <= float(upper[0]) * (1 + 2.0**-14) ** 2


@pytest.mark.parametrize(("length", "p", "d"), [(8, 40, 30), (70, 33, 40)])
def test_padding_with_large_gradients_does_not_clip_the_update_to_nothing(
    length: int, p: int, d: int
) -> None:
    """Positions with zero inputs and output gradients that are 1e12 times as large: the bound stays
    near the norm, and is still none too small.
    """
    for _ in range(5):
        sizes = 10.0 ** torch.empty(2, length, 1, device=DEVICE).uniform_(-3, 3)
        left, right = draw(2, length, p) * sizes, draw(2, length, d) / sizes
        left[:, length // 2 :] *= 1e12
        right[:, length // 2 :] = 0
        exact = (left.double().mT @ right.double()).flatten(1).norm(dim=1)
        for found in (
            grams.gram_estimates([left], [right])[0].upper[0],
            grams.gram_uppers([left], [right])[0],
        ):
            assert (found.sqrt() <= exact * 1.01).all()
            assert (found.sqrt() >= exact).all()


@pytest.mark.parametrize("how", [None, *TILINGS_OF_NORMS], ids=str)
def test_what_cancels_in_a_convolution_is_measured_as_it_is_added(
    how: conv2d.Tiling | None,
) -> None:
    """Norms and sums come from the same products: nothing that cancels can come between them."""
    a, g = draw(2, 8, 6, 6), draw(2, 16, 6, 6)
    a[:, :, 3:], g[:, :, 3:] = a[:, :, :3], -g[:, :, :3] * (1 - 1e-5)
    problem = conv2d.ConvProblem(a, g * 1e5, (1, 1), (1, 1), (0, 0), (1, 1))
    norms = conv2d.norms(problem, how).double().sum(0)
    for i in range(2):
        alone = torch.zeros(2, device=DEVICE)
        alone[i] = 1.0
        added = float(conv2d.weighted_sum(problem, alone, how).double().square().sum())
        assert added == pytest.approx(float(norms[i]), rel=1e-5)


def test_row_squares_that_underflow_and_long_rows() -> None:
    tiny, long = (
        torch.full((2, 50), 1e-25, device=DEVICE),
        torch.full((2, 200_000), 0.1, device=DEVICE),
    )
    found = reductions.row_squares([tiny, long])
    assert bool((found[0] >= 50 * 1e-50).all())
    assert float(found[1, 0]) == pytest.approx(200_000 * float(torch.tensor(0.1)) ** 2, rel=1e-5)


def test_row_squares() -> None:
    tensors = [draw(6, 5), draw(6, 1300), draw(9, 6).t()]
    close(
        reductions.row_squares(tensors), torch.stack([t.double().square().sum(1) for t in tensors])
    )


def test_add_rows() -> None:
    """Matrices of several widths, some of them with gaps between their rows; nothing is written
    beside the sums.
    """
    matrices = [draw(70, 5), draw(70, 130), draw(9, 70).t(), draw(70, 2, 64)[:, 1]]
    weights = torch.rand(70, device=DEVICE)
    memory = [torch.full((m.shape[1] + 1,), 7.0, device=DEVICE) for m in matrices]
    reductions.add_rows(matrices, weights, [m[:-1] for m in memory])
    for m, found in zip(matrices, memory, strict=True):
        close(found[:-1], weights.double() @ m.double())
        assert found[-1] == 7.0


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("shape", [(3, 5), (1, 4097), (70, 3, 50)])
def test_scale_rows_rounds_as_torch_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    t, weights = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype)
    found = reductions.scale_rows(t, weights, torch.empty_like(t))
    assert torch.equal(found, t * weights.view(-1, *[1] * (t.dim() - 1)))


WALKS = {
    "3x3": (20, 16, (3, 3), (1, 1), (1, 1), (1, 1), (7, 5)),
    "stride": (4, 20, (3, 2), (2, 1), (0, 1), (1, 2), (9, 8)),
    "dilation": (16, 17, (2, 3), (1, 2), (2, 1), (2, 1), (5, 11)),
    "one tap": (20, 16, (1, 1), (1, 1), (0, 0), (1, 1), (8, 8)),
    "one tap, stride": (17, 5, (1, 1), (2, 2), (0, 0), (1, 1), (9, 7)),
    "one tap, padding": (3, 5, (1, 1), (2, 1), (1, 1), (1, 1), (6, 5)),
    "5x5": (3, 1, (5, 5), (1, 1), (2, 2), (1, 1), (9, 8)),
    "positions left over": (2, 3, (3, 3), (2, 2), (0, 0), (1, 1), (10, 8)),
}
"""channels, outs, kernel, stride, padding, dilation, size"""

TILINGS = [
    conv2d.Tiling(16, 16, 16, 4, 2, "given", True),
    conv2d.Tiling(16, 32, 64, 4, 2, "given", False),
    conv2d.Tiling(32, 16, 16, 4, 2, "channels last", False),
    conv2d.Tiling(32, 32, 32, 4, 2, "channels last", True),
    conv2d.Tiling(16, 16, 32, 4, 2, "channels first", False),
]


def problem_of(
    name: str, batch: int, memory: torch.memory_format, dtype: torch.dtype
) -> tuple[conv2d.ConvProblem, Tensor]:
    """A convolution and the weight gradients of its examples in float64."""
    channels, outs, kernel, stride, padding, dilation, size = WALKS[name]
    layer = nn.Conv2d(
        channels, outs, kernel, stride, padding, dilation, bias=False, device=DEVICE
    ).double()
    a = draw(batch, channels, *size, dtype=dtype)
    g = torch.randn_like(layer(a.double())).to(dtype)
    each = [
        torch.autograd.grad(layer(a[i : i + 1].double()), layer.weight, g[i : i + 1].double())[0]
        for i in range(batch)
    ]
    a, g = a.contiguous(memory_format=memory), g.contiguous(memory_format=memory)
    return conv2d.ConvProblem(a, g, kernel, stride, padding, dilation), torch.stack(each)


@pytest.mark.parametrize(
    ("memory", "dtype"), [(torch.contiguous_format, torch.float32), (torch.channels_last, NARROW)]
)
@pytest.mark.parametrize("name", WALKS)
def test_products_of_convolutions(
    name: str, memory: torch.memory_format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, each = problem_of(name, 3, memory, dtype)
    weights = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)
    for i, how in enumerate(TILINGS):
        monkeypatch.setattr(
            conv2d, "STAGE_BYTES", 2**24 if i % 2 else 1
        )  # all examples at once, or one at a time
        monkeypatch.setattr(conv2d, "PARTIAL_BYTES", 2**24 if i > 1 else 1)
        close(conv2d.norms(problem, how).sum(0), each.flatten(1).square().sum(1))
        total = conv2d.weighted_sum(problem, weights, how)
        assert total.dtype == torch.float32
        assert total.is_contiguous()
        close(total, torch.tensordot(weights.double(), each, 1))
    close(conv2d.norms(problem).sum(0), each.flatten(1).square().sum(1))
    close(conv2d.weighted_sum(problem, weights), torch.tensordot(weights.double(), each, 1))
    for order in ("given", "channels last"):
        if problem.length <= 64:
            close(conv2d.gram_estimate(problem, order).squares, each.flatten(1).square().sum(1))
            close(
                conv2d.gram_upper(problem, order), conv2d.gram_estimate(problem, order).upper, 1e-5
            )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("how", TILINGS, ids=str)
def test_examples_without_weight_add_nothing(how: conv2d.Tiling, bad: float) -> None:
    """Bit for bit: the sum is that of the other examples, wherever the silenced one stands and
    whatever it holds.
    """
    problem, _ = problem_of("3x3", 4, torch.contiguous_format, torch.float32)
    weights = torch.tensor([0.0, 0.3, 0.0, 2.0], device=DEVICE)
    expected = conv2d.weighted_sum(problem, weights, how)
    for i in (0, 2):
        problem.grads[i] = bad
        problem.inputs[i, :, 3:] = -bad
    assert torch.equal(conv2d.weighted_sum(problem, weights, how), expected)
    found = conv2d.norms(problem, how).sum(0)
    assert found.isfinite().tolist() == [False, True, False, True]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sum_repeats_bit_for_bit_and_its_norm_is_the_measured_one(batch: int) -> None:
    """The norms and the sum come from the same products: what is clipped is what was measured."""
    problem, _ = problem_of("stride", batch, torch.contiguous_format, torch.float32)
    for how in TILINGS:
        norms = conv2d.norms(problem, how).sum(0)
        for i in range(batch):
            alone = torch.zeros(batch, device=DEVICE)
            alone[i] = 1.0
            total = conv2d.weighted_sum(problem, alone, how)
            assert torch.equal(total, conv2d.weighted_sum(problem, alone, how))
            assert abs(float(total.double().square().sum() / norms[i].double()) - 1.0) < 2e-6


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", WALKS)
def test_convolution_by_every_route(
    name: str, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, each = problem_of(name, 3, torch.contiguous_format, torch.float32)
    weight = torch.zeros(each.shape[1:], device=DEVICE)
    geometry = Geometry(problem.stride, problem.padding, problem.dilation, 1)
    part = ConvolutionGradient(problem.inputs, problem.grads, weight, geometry)
    weights = torch.tensor([0.7, 0.0, 1.3], device=DEVICE)
    monkeypatch.setattr(
        conv2d, "reduced", lambda t: reduced and DEVICE == "cpu"
    )  # on a GPU that would be TF32
    monkeypatch.setattr(convolution, "COPY_BYTES", 1)
    norms = each.flatten(1).square().sum(1)
    found = part.measured()[0].sum(0)
    assert bool((found >= norms * (1 - 2e-5)).all())  # an upper bound
    close(found, norms, 5e-4)
    close(part.weighted_sum(weights), torch.tensordot(weights.double(), each, 1))


def test_pair_sums() -> None:
    g, a = draw(3, 5, 4, 7), draw(3, 5, 4, 7)
    plain, product = reductions.pair_sums(g, a)
    close(plain, g.double().sum((2, 3)))
    close(product, (g.double() * a.double()).sum((2, 3)))


class Everything(nn.Module):
    """Every layer that has a kernel, some shapes several times."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(20, 8), nn.Embedding(6, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(3)])
        self.mixes = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.conv, self.group = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.flat, self.head = nn.Linear(32, 10), nn.Linear(10, 5)

    def forward(self, index: Tensor) -> Tensor:
        x = self.emb(index) + self.pos(torch.arange(6, device=index.device).expand(index.shape))
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            x = x + torch.tanh(mix(norm(x)))
        x = torch.relu(self.group(self.conv(x[:, None]))).mean(2).flatten(1)
        return self.head(torch.tanh(self.flat(x)))


def test_engine_with_kernels_equals_the_loop() -> None:
    model = Everything().to(DEVICE)
    index, y = torch.randint(0, 20, (5, 6), device=DEVICE), torch.randint(0, 5, (5,), device=DEVICE)
    oracle = copy.deepcopy(model).double()
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(oracle)
    for clip in (FlatClip(0.3), FlatClip(math.inf)):
        expected = loop.bounded_sum(F.cross_entropy(oracle(index), y, reduction="none"), clip).value
        for _ in range(2):
            found = fast.bounded_sum(F.cross_entropy(model(index), y, reduction="none"), clip).value
        for name, g in expected.items():
            close(found[name], g, 1e-4)
    fast.detach()
    loop.detach()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    """Their tensors have the steps before the examples in memory."""
    model = kind(8, 16, num_layers=2).to(DEVICE)  # type: ignore[call-arg, arg-type]
    x, answers = draw(5, 4, 8), []
    for engine in (BookkeepingEngine(), LoopEngine()):
        engine.attach(model)
        for _ in range(2):
            answers.append(
                engine.bounded_sum(model(x)[0].square().sum((0, 2)), FlatClip(0.1)).value
            )
        engine.detach()
    for name, total in answers[-1].items():
        close(answers[1][name], total, 2e-4)
