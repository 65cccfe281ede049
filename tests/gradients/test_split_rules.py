"""Uses of parameters outside of any layer rule: exact, bounded where terms cancel, and without a
pass per example.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.per_example import outer, placed
from dpfy.gradients.per_example.embedding import EmbeddingGradient, RaggedEmbeddingGradient
from dpfy.gradients.per_example.outer import Direct
from dpfy.gradients.per_example.placed import FunctionGradient, ParameterFunction

sys.path.insert(0, str(Path(__file__).parent))
from compared import Holding, NoVmap

T, C = 4, 6
Run = Callable[["Use", Tensor], Tensor]


class Use(Holding):
    """[batch, T, C] to one loss an example, by `run` with what it holds."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.run(self, x)).flatten(1).square().sum(1)


def matrix() -> Tensor:
    return torch.randn(C, C) / 2


def attention(m: Use, x: Tensor) -> Tensor:
    query, keys, values = (
        F.linear(x, w, b) for w, b in zip(m.w.chunk(3), m.b.chunk(3), strict=True)
    )
    return F.scaled_dot_product_attention(query, keys, values)


USES: dict[str, Callable[[], Use]] = {
    "linear": lambda: Use(lambda m, x: F.linear(x, m.w, m.b), w=matrix(), b=torch.randn(C)),
    "linear of one position": lambda: Use(lambda m, x: F.linear(x[:, 0], m.w), w=matrix()),
    "matmul from the left": lambda: Use(lambda m, x: m.w @ x.mT, w=matrix()),
    "matrix with the batch in its columns": lambda: Use(
        lambda m, x: (m.w @ x[:, 0].t()).t(), w=matrix()
    ),
    "einsum": lambda: Use(lambda m, x: torch.einsum("btd,pd->bpt", x, m.w), w=matrix()),
    "einsum, positions first": lambda: Use(
        lambda m, x: torch.einsum("tbd,dp->tbp", x.transpose(0, 1), m.w).transpose(0, 1), w=matrix()
    ),
    "einsum of heads": lambda: Use(
        lambda m, x: torch.einsum("bthd,hdp->bthp", x.view(-1, T, 2, 3), m.w).flatten(2),
        w=torch.randn(2, 3, 3),
    ),
    "vector": lambda: Use(lambda m, x: x @ m.v, v=torch.randn(C)),
    "packed attention": lambda: Use(attention, w=torch.randn(3 * C, C) / 2, b=torch.randn(3 * C)),
    "negative ends": lambda: Use(
        lambda m, x: F.linear(x[..., :-1], m.w[-3:-1, :-1]) * m.w[-1, -2] + m.w[:, -1][-2],
        w=matrix(),
    ),
    "overlapping slices": lambda: Use(
        lambda m, x: F.linear(x, m.w[:4]) * F.linear(x, m.w[2:]), w=matrix()
    ),
    "learned queries": lambda: Use(
        lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), -1, -1), x, x),
        q=torch.randn(1, 3, C),
    ),
    "lora": lambda: Use(
        lambda m, x: F.linear(x, m.w + 0.5 * m.a @ m.b),
        w=matrix(),
        a=torch.randn(C, 2),
        b=torch.randn(2, C),
    ),
    "row and column scales": lambda: Use(
        lambda m, x: F.linear(x, m.w * m.s * m.t[:, None] / m.g),
        w=matrix(),
        s=torch.rand(C),
        t=torch.rand(C),
        g=torch.tensor(2.0),
    ),
    "weight norm": lambda: Use(
        lambda m, x: m.layer(x), layer=parametrizations.weight_norm(nn.Linear(C, C))
    ),
    "weight norm of the whole": lambda: Use(
        lambda m, x: m.layer(x), layer=parametrizations.weight_norm(nn.Linear(C, C), dim=None)
    ),
    "weight norm of a convolution": lambda: Use(
        lambda m, x: m.layer(x.mT),
        layer=parametrizations.weight_norm(nn.Conv1d(C, 4, 3, padding=1)),
    ),
    "spectral norm": lambda: Use(
        lambda m, x: m.layer(x), layer=parametrizations.spectral_norm(nn.Linear(C, C)).eval()
    ),
    "convolution": lambda: Use(
        lambda m, x: F.conv1d(x.mT, m.w, m.b, padding=1),
        w=torch.randn(4, C, 3) / 3,
        b=torch.randn(4),
    ),
    "depthwise convolution": lambda: Use(
        lambda m, x: F.conv1d(x.mT, m.w.tanh(), groups=C), w=torch.randn(C, 1, 3)
    ),
    "lookup": lambda: Use(
        lambda m, x: F.embedding(x.argmax(2), m.w) * x[..., :3], w=torch.randn(C, 3)
    ),
    "index": lambda: Use(lambda m, x: m.w[x.argmax(2)] * x[..., :3], w=torch.randn(C, 3)),
    "tied head": lambda: Use(
        lambda m, x: F.linear(torch.tanh(F.embedding(x.argmax(2), m.w)), m.w), w=torch.randn(C, 3)
    ),
    "bilinear": lambda: Use(lambda m, x: m.layer(x, x.flip(1)), layer=nn.Bilinear(C, C, 5)),
    "prelu": lambda: Use(lambda m, x: m.layer(x.mT), layer=nn.PReLU(C)),
    "scales at several depths": lambda: Use(
        lambda m, x: torch.sin(torch.tanh(x * m.s) * m.s) / m.s + m.s, s=torch.rand(C) + 0.5
    ),
    "batch in the third dimension": lambda: Use(
        lambda m, x: (
            m.layer(x.permute(1, 0, 2)[:, None].transpose(1, 2)[None])[0] * m.s
        ).transpose(0, 1),
        layer=nn.Linear(C, C),
        s=torch.rand(C),
    ),
}
SEVERAL = {
    "sigmoid": lambda: Use(lambda m, x: F.linear(x, torch.sigmoid(m.w)), w=matrix()),
    "a function of a depthwise convolution": USES.pop("depthwise convolution"),
}


def sums(use: Use, x: Tensor, clip: float = 0.7) -> tuple[float, dict[str, str]]:
    """The distance between both engines, relative to the loop's sum; two batches, the second one
    with what the first told.
    """
    fast, slow, twin, worst = BookkeepingEngine(), LoopEngine(), copy.deepcopy(use), 0.0
    fast.attach(use)
    slow.attach(twin)
    for batch in (x, x.flip(0)[:-1] * 1.5):
        found, right = (
            e.bounded_sum(m(batch), FlatClip(clip)).value for e, m in ((fast, use), (slow, twin))
        )
        gap = math.sqrt(sum(float((found[k] - right[k]).square().sum()) for k in right))
        worst = max(worst, gap / math.sqrt(sum(float(right[k].square().sum()) for k in right)))
    routes = fast.per_example_parameters
    fast.detach()
    return worst, routes


@pytest.mark.parametrize("name", [*USES, *SEVERAL])
def test_equals_the_loop_without_a_pass_per_example(name: str) -> None:
    torch.manual_seed(0)
    use = (USES | SEVERAL)[name]().double()
    gap, routes = sums(use, torch.randn(5, T, C, dtype=torch.float64))
    assert gap < 1e-9
    assert set(routes.values()) == ({"vmap"} if name in SEVERAL else set())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_of_any_length(mode: str, padding: int | None, weighted: bool) -> None:
    if weighted and mode != "sum":
        pytest.skip("torch has weights for sums only")
    torch.manual_seed(0)
    offsets = torch.tensor(
        [0, 3, 3, 7, 8, 9, 12, 12, 13, 14]
    )  # ten bags, two of them empty, for five examples
    index, weights = (
        torch.randint(0, 7, (16,)),
        torch.rand(16, dtype=torch.float64) if weighted else None,
    )

    def run(m: Use, x: Tensor) -> Tensor:
        bags = offsets[: 2 * len(x)]
        many = int(offsets[2 * len(x)]) if 2 * len(x) < len(offsets) else len(index)
        return (
            m.layer(index[:many], bags, None if weights is None else weights[:many]).view(
                len(x), -1
            )
            * x[:, 0, :1]
        )

    use = Use(run, layer=nn.EmbeddingBag(7, 3, mode=mode, padding_idx=padding)).double()
    gap, routes = sums(use, torch.randn(5, T, C, dtype=torch.float64))
    assert gap < 1e-9
    assert not routes


def test_the_bound_of_a_bag_does_not_depend_on_longer_ones() -> None:
    index, grads = torch.randint(0, 5, (2, 9)), torch.randn(2, 9, 4)
    grads[0, 3:] = 0
    both = RaggedEmbeddingGradient(index, grads, 5, torch.tensor([3, 9])).measured()[0]
    alone = RaggedEmbeddingGradient(index[:1, :3], grads[:1, :3], 5, torch.tensor([3])).measured()[
        0
    ]
    assert float((both[:, 0] - alone[:, 0]).abs()) <= 1e-30
    plain = EmbeddingGradient(index[1:], grads[1:], 5).measured()[0]
    assert torch.allclose(both[:, 1], plain[:, 0], rtol=1e-12)


def test_what_torch_cannot_vectorise_goes_one_by_one() -> None:
    torch.manual_seed(0)
    use = Use(
        lambda m, x: NoVmap.apply(F.linear(x, m.w), m.s), s=torch.rand(C), w=matrix()
    ).double()
    gap, routes = sums(use, torch.randn(5, T, C, dtype=torch.float64))
    assert gap < 1e-9
    assert routes == {"s": "loop"}


def test_a_bad_example_in_the_first_batch_does_not_hide_where_the_examples_lie() -> None:
    """As many positions as examples, positions first: every position has a NaN of the bad example,
    and was taken for one.
    """
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(C, C), nn.Tanh(), nn.Linear(C, 1)).double(),
        torch.randn(5, 5, C, dtype=torch.float64),
    )
    bad = torch.tensor([1.0, 1.0, math.nan, 1.0, 1.0], dtype=torch.float64)
    fast, slow, keep = BookkeepingEngine(), LoopEngine(), torch.arange(5) != 2
    slow.attach(twin := copy.deepcopy(model))
    right = slow.bounded_sum(twin(x[:, keep]).squeeze(2).sum(0), FlatClip(0.3)).value
    fast.attach(model)
    found = fast.bounded_sum(model(x).squeeze(2).sum(0) * bad, FlatClip(0.3)).value
    fast.detach()
    assert all(torch.allclose(found[k], right[k], rtol=1e-9) for k in right)


def test_a_bad_example_in_the_first_batch_silences_nobody() -> None:
    """A table of as many positions as there are examples: the NaN of one is in all of its rows,
    which were taken for examples'.
    """
    use = Use(lambda m, x: x + m.table(torch.arange(T)), table=nn.Embedding(T, C)).double()
    fast, slow, keep = BookkeepingEngine(), LoopEngine(), torch.arange(T) != 1
    x, bad = torch.randn(T, T, C, dtype=torch.float64), torch.ones(T, dtype=torch.float64)
    bad[1] = math.nan
    slow.attach(twin := copy.deepcopy(use))
    right = slow.bounded_sum(twin(x[keep]), FlatClip(0.3)).value
    fast.attach(use)
    found = fast.bounded_sum(use(x) * bad, FlatClip(0.3)).value
    fast.detach()
    assert all(torch.allclose(found[k], right[k], rtol=1e-9) for k in right)


@pytest.mark.parametrize("behind", [0.0, 1.0])
def test_parameters_behind_a_gate_at_zero(behind: float) -> None:
    """Their first gradients are zero, and their rows are as many as the examples."""
    torch.manual_seed(0)
    use = Use(
        lambda m, x: x + m.g * F.linear(x, torch.sin(m.a + m.b)),
        g=torch.tensor(0.0),
        a=matrix(),
        b=matrix(),
    ).double()
    x = torch.randn(C, T, C, dtype=torch.float64)
    fast, slow = BookkeepingEngine(), LoopEngine()
    fast.attach(use)
    fast.bounded_sum(use(x), FlatClip(0.1))
    with torch.no_grad():
        use.g += 1.0
    found = fast.bounded_sum(use(x), FlatClip(0.1)).value
    fast.detach()
    slow.attach(use)
    right = slow.bounded_sum(use(x), FlatClip(0.1)).value
    assert all(torch.allclose(found[k], right[k], rtol=1e-9, atol=1e-12) for k in right)


def test_a_bad_example_spoils_nobody() -> None:
    torch.manual_seed(0)
    for name, make in USES.items():
        if name in ("lookup", "index", "tied head"):
            continue  # the place of a NaN is a row as any other
        use, x = make().double(), torch.randn(5, T, C, dtype=torch.float64)
        engine = BookkeepingEngine()
        engine.attach(use)
        right = engine.bounded_sum(use(x[[0, 1, 3, 4]]), FlatClip(0.3)).value
        x[2, 1, 1] = math.nan
        x[2, 0, 0] = math.inf
        found = engine.bounded_sum(use(x), FlatClip(0.3)).value
        engine.detach()
        assert all(torch.allclose(found[k], right[k], rtol=1e-9, atol=1e-12) for k in right), name


def cancelling(
    name: str, size: float, gap: float
) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Two positions whose gradients cancel but for a relative `gap`, in the first of two
    examples.
    """
    x, g = torch.randn(2, 2, C), torch.randn(2, 2, C)
    x[0, 1], g[0, 1] = x[0, 0], -g[0, 0] * (1 - gap)
    g[0] *= size
    made: dict[str, Callable[[], Use]] = {
        "linear": lambda: Use(lambda m, x: F.linear(x, m.w), w=matrix()),
        "heads": lambda: Use(
            lambda m, x: torch.einsum("bthd,hdp->bthp", x.view(-1, 2, 2, 3), m.w).flatten(2),
            w=torch.randn(2, 3, 3),
        ),
        "lora": lambda: Use(
            lambda m, x: F.linear(x, m.a @ m.b), a=torch.randn(C, 2), b=torch.randn(2, C)
        ),
        "weight norm": lambda: Use(
            lambda m, x: m.layer(x), layer=parametrizations.weight_norm(nn.Linear(C, C, bias=False))
        ),
        "spectral norm": lambda: Use(
            lambda m, x: m.layer(x),
            layer=parametrizations.spectral_norm(nn.Linear(C, C, bias=False)).eval(),
        ),
        "sigmoid": SEVERAL["sigmoid"],
        "two uses": lambda: Use(
            lambda m, x: F.linear(x, m.w[:C]) + F.linear(x.flip(1), m.w[:C]), w=matrix()
        ),
        "overlapping": lambda: Use(
            lambda m, x: F.linear(x, m.w[1:]) - F.linear(x, m.w[:-1]), w=torch.randn(C + 1, C)
        ),
        "convolution": lambda: Use(
            lambda m, x: F.conv1d(x.mT, m.w.sin()).mT, w=torch.randn(C, C, 1)
        ),
        "bags": lambda: Use(
            lambda m, x: m.layer(torch.zeros(7, dtype=torch.long), torch.tensor([0, 2, 4, 5])).view(
                2, 2, C
            ),
            layer=nn.EmbeddingBag(3, C, mode="sum"),
        ),
    }
    use = made[name]()
    return (
        use,
        lambda model: (
            (use.run(use, x.to(next(use.parameters()).dtype)) * g).float().flatten(1).sum(1)
        ),
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "heads",
        "lora",
        "weight norm",
        "spectral norm",
        "sigmoid",
        "two uses",
        "overlapping",
        "convolution",
        "bags",
    ],
)
def test_what_cancels_stays_within_the_bound(
    name: str, dtype: torch.dtype, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keep:
        monkeypatch.setattr(outer, "KEEP_ELEMENTS", 0)
        monkeypatch.setattr(placed, "KEEP_ELEMENTS", 0)
    for size in (1.0, 1e3, 1e6):
        for gap in (0.0, 1e-7, 1e-5, 1e-3, 8e-3, 0.1):
            torch.manual_seed(0)
            use, losses = cancelling(name, size, gap)
            use.to(dtype)
            engine = BookkeepingEngine()
            engine.attach(use)
            for _ in range(2):
                total = engine.bounded_sum(
                    losses(use), FlatClip(1.0), torch.tensor([True, False])
                ).value
            engine.detach()
            assert sum(float(t.double().square().sum()) for t in total.values()) <= 1.0


def test_sums_through_a_function_are_of_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only some examples' gradients exist at one time."""
    torch.manual_seed(0)
    grads, matrix, weights = (
        torch.randn(7, 3, 2, dtype=torch.float64),
        torch.randn(2, 4, dtype=torch.float64),
        torch.rand(7),
    )
    expected = torch.einsum("b,boi,ik->ok", weights.double(), grads, matrix)
    for most in (1, 3 * 18, 10**6):
        monkeypatch.setattr(placed, "CHUNK_ELEMENTS", most)
        part = FunctionGradient(
            ParameterFunction(Direct(grads), lambda each: [each @ matrix], [torch.Size((3, 4))]), 0
        )
        assert len(part.below.chunks()) == {1: 7, 3 * 18: 3, 10**6: 1}[most]
        assert torch.allclose(part.weighted_sum(weights.double()), expected)
        assert torch.allclose(part.measured()[0][0], (grads @ matrix).square().sum((1, 2)))
