"""Per-user sums: the gradient of all of a user's records is clipped as one, by every engine,
against separate forwards.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data.users import UserRecords, by_user
from dpfy.gradients.checker import LossProbe
from dpfy.gradients.clip import AutomaticClip, Clip, FlatClip, PerLayerClip
from dpfy.gradients.engine import Engine, Grads, per_user
from dpfy.gradients.engines.choice import ENGINES

T, V = 5, 11
OWNERS = torch.tensor([7, 3, 3, 3, 9, 9, 4, 7, 9, 3, 9, 9])


@pytest.fixture(params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


class Model(nn.Module):
    """Embeddings, positions without a batch, linear, norms, a convolution, a bare scale, a tied
    head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, 6), nn.Embedding(T, 6)
        self.inner, self.norm, self.group = nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.conv, self.scale = nn.Conv1d(8, 6, 3, padding=1), nn.Parameter(torch.rand(6) + 0.5)
        self.head = nn.Linear(6, V, bias=False)
        self.head.weight = self.token.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.token(index) + self.position(torch.arange(T, device=index.device)[None])
        x = self.norm(torch.tanh(self.inner(x)))
        return self.head(self.scale * self.conv(self.group(x.mT)).mT)


def losses_of(model: nn.Module, index: Tensor) -> Tensor:
    return F.cross_entropy(model(index).mT, index.roll(-1, 1), reduction="none").mean(1)


def data(seed: int = 0) -> tuple[nn.Module, Tensor, UserRecords]:
    torch.manual_seed(seed)
    model = Model().double()
    index = torch.randint(0, V, (len(OWNERS), T))
    return model, index, by_user((index,), OWNERS, most=4)


def by_hand(
    model: nn.Module, index: Tensor, most: int, clip: Clip, reduction: str = "sum"
) -> Grads:
    """Clipped per-user gradients from a forward of each user's records alone."""
    names = [n for n, _ in model.named_parameters()]
    params = list(model.parameters())
    total = {n: torch.zeros_like(p) for n, p in zip(names, params, strict=True)}
    groups = clip.groups(names)
    for user in OWNERS.unique():
        losses = losses_of(model, index[user == OWNERS][:most])
        grads = torch.autograd.grad(losses.sum() if reduction == "sum" else losses.mean(), params)
        squares = torch.zeros(max(groups) + 1, dtype=torch.float64)
        for g, k in zip(grads, groups, strict=True):
            squares[k] += g.square().sum()
        scale = clip.scale(squares[:, None])[:, 0]
        for n, g, k in zip(names, grads, groups, strict=True):
            total[n] += scale[k] * g
    return total


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / math.sqrt(sum(float(b[k].square().sum()) for k in b))


@pytest.mark.parametrize(
    "clip", [FlatClip(0.3), FlatClip(math.inf), PerLayerClip(0.5), AutomaticClip(1.0)]
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_equals_separate_forwards_of_each_user(engine: Engine, clip: Clip, reduction: str) -> None:
    model, index, grouped = data()
    expected = by_hand(copy.deepcopy(model), index, 4, clip, reduction)
    engine.attach(model)
    for _ in range(2):
        rows, real = grouped.tensors
        found = engine.bounded_sum(
            per_user(losses_of(model, rows.flatten(0, 1)), real, reduction=reduction), clip
        ).value
        assert distance(found, expected) < 1e-9
    engine.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_separate_forwards_on_a_gpu(dtype: torch.dtype) -> None:
    model, index, grouped = data()
    model.to(dtype)
    expected = by_hand(copy.deepcopy(model).double(), index, 4, FlatClip(0.3))
    fast = ENGINES["bookkeeping"]()
    fast.attach(model.cuda())
    rows, real = grouped.to("cuda").tensors
    for _ in range(2):
        found = fast.bounded_sum(
            per_user(losses_of(model, rows.flatten(0, 1)).float(), real), FlatClip(0.3)
        ).value
        cpu = {k: g.double().cpu() for k, g in found.items()}
        assert distance(cpu, expected) < (0.1 if dtype == torch.bfloat16 else 1e-3)
    fast.detach()


def test_users_in_batches_of_several_sizes(engine: Engine) -> None:
    model, index, grouped = data()
    expected = by_hand(copy.deepcopy(model), index, 4, FlatClip(0.3))
    engine.attach(model)
    for sizes in ([4], [3, 1], [2, 2], [1, 1, 2]):
        total: Grads = {}
        for users in torch.arange(4).split(sizes):
            rows, real = grouped.take(users)
            part = engine.bounded_sum(
                per_user(losses_of(model, rows.flatten(0, 1)), real), FlatClip(0.3)
            ).value
            total = {n: total[n] + g if n in total else g for n, g in part.items()}
        assert distance(total, expected) < 1e-9
    engine.detach()


def test_losses_grouped_by_index_are_exact_too(engine: Engine) -> None:
    """Without padding, in any order: slower in the fast engine, but the same."""
    model, index, _ = data()
    expected = by_hand(copy.deepcopy(model), index, 99, FlatClip(0.3))
    users = torch.unique(OWNERS, return_inverse=True)[1]
    engine.attach(model)
    for _ in range(2):
        grouped = torch.zeros(4, dtype=torch.float64).index_add(0, users, losses_of(model, index))
        assert distance(engine.bounded_sum(grouped, FlatClip(0.3)).value, expected) < 1e-9
    engine.detach()


def test_a_masked_user_and_a_user_that_is_not_finite_add_nothing(engine: Engine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(0, 3, (4, 3))
    real = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    x[1, 0, 2] = math.nan

    def run(users: list[int], mask: Tensor | None = None) -> Grads:
        engine.attach(model)
        losses = F.cross_entropy(
            model(x[users].flatten(0, 1)), y[users].flatten(), reduction="none"
        )
        found = engine.bounded_sum(per_user(losses, real[users]), FlatClip(0.3), mask).value
        engine.detach()
        return found

    expected = run([0, 2])
    assert distance(run([0, 1, 2, 3], torch.tensor([True, True, True, False])), expected) < 1e-9


def test_one_user_never_exceeds_the_bound(engine: Engine) -> None:
    model, _, grouped = data()
    engine.attach(model)
    rows, real = grouped.take(torch.tensor([0]))
    found = engine.bounded_sum(
        per_user(1e6 * losses_of(model, rows.flatten(0, 1)), real), FlatClip(0.7)
    )
    assert 0.69 < math.sqrt(sum(float(g.square().sum()) for g in found.value.values())) <= 0.7
    engine.detach()


def test_the_fast_engine_takes_no_slow_route() -> None:
    from dpfy.gradients.engines.bookkeeping import BookkeepingEngine

    model, _, grouped = data()
    engine = BookkeepingEngine()
    engine.attach(model)
    rows, real = grouped.tensors
    engine.bounded_sum(per_user(losses_of(model, rows.flatten(0, 1)), real), FlatClip(0.3))
    assert {site.name for site in engine._sites.values() if site.without_batch} == {"position"}
    assert not engine._suspects
    engine.detach()


def test_grouping_keeps_the_first_records_and_repeats_only_the_users_own() -> None:
    values = torch.arange(len(OWNERS))
    grouped = by_user((values,), OWNERS.numpy(), most=4)
    rows, real = grouped.tensors
    assert [row[keep].tolist() for row, keep in zip(rows, real, strict=True)] == [
        [1, 2, 3, 9],
        [6],
        [0, 7],
        [4, 5, 8, 10],
    ]
    assert all(
        bool((OWNERS[row] == user).all()) for row, user in zip(rows, [3, 4, 7, 9], strict=True)
    )
    assert grouped.unit == dpfy.Unit("user", 4)
    assert isinstance(grouped.to("cpu"), UserRecords)


def test_bad_input_is_refused() -> None:
    values = torch.arange(3.0)
    for users in (
        torch.tensor([1, 2]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([[1], [2], [3]]),
    ):
        with pytest.raises(InvalidInput, match="users"):
            by_user((values,), users, most=2)
    with pytest.raises(InvalidInput, match="most"):
        by_user((values,), torch.tensor([1, 1, 2]), most=0)
    real = torch.ones(2, 2, dtype=torch.bool)
    for losses in (torch.zeros(3), torch.zeros(()), torch.zeros(4, 1)):
        with pytest.raises(InvalidInput, match="losses"):
            per_user(losses, real)
    with pytest.raises(InvalidInput, match="reduction"):
        per_user(torch.zeros(4), real, reduction="max")
    with pytest.raises(InvalidInput, match="real"):
        per_user(torch.zeros(4), real.long())


def test_the_probe_looks_at_users() -> None:
    """Records of one user may depend on each other; users may not."""
    torch.manual_seed(0)
    body, x, real = nn.Linear(4, 3), torch.randn(6, 4), torch.ones(3, 2, dtype=torch.bool)

    def check(mix: int) -> None:
        probe = LossProbe(body, rows_each=2)
        out = body(x).view(-1, mix, 3)
        probe.check(per_user((out - out.mean(1, keepdim=True)).square().sum(2).flatten(), real))

    check(2)
    with pytest.raises(Unsupported, match="mix examples"):
        check(6)


@pytest.mark.parametrize("physical", [3, "auto"])
def test_training_by_user_is_the_noisy_clipped_step(tmp_path: object, physical: int | str) -> None:
    """One full-batch step of the real loop without noise equals the sum by hand."""
    model, index, grouped = data()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = by_hand(copy.deepcopy(model), index, 4, FlatClip(0.3))
    plan = dpfy.dpsgd(
        len(grouped), len(grouped), steps=1, clip_norm=0.3, unit=grouped.unit
    ).with_noise(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    runtime = dpfy.Runtime(max_physical_batch=physical)
    with dpfy.PrivateTraining(
        model, optimizer, grouped, plan, f"{tmp_path}/run", runtime=runtime
    ) as training:
        for rows, real in training.batches():
            training.step(dpfy.per_user(losses_of(model, rows.flatten(0, 1)), real))
        assert training.guarantee().unit == dpfy.Unit("user", 4)
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            before[name] - p.detach(), expected[name] / 4, rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_one_call_trains_users(tmp_path: object, name: str) -> None:
    """One full-batch step of `fit` without noise equals the sum by hand: a user's loss is the sum
    over its records.
    """
    model, index, _ = data()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = by_hand(copy.deepcopy(model), index, 4, FlatClip(0.3))
    grouped = by_user((index, index.roll(-1, 1)), OWNERS, most=4)
    plan = dpfy.dpsgd(
        len(grouped), len(grouped), steps=1, clip_norm=0.3, unit=grouped.unit
    ).with_noise(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = dpfy.fit(
        model,
        grouped,
        plan=plan,
        optimizer=optimizer,
        run=f"{tmp_path}/run",
        runtime=dpfy.Runtime(engine=name),
    )
    assert result.guarantee.unit == dpfy.Unit("user", 4)
    for key, p in model.named_parameters():
        torch.testing.assert_close(
            before[key] - p.detach(), expected[key] / 4, rtol=1e-9, atol=1e-12
        )


def test_one_call_bills_no_evaluation_of_records_without_owners(tmp_path: object) -> None:
    """Test records without owners are refused where a user may own four."""
    model, index, _ = data()
    pair = (index, index.roll(-1, 1))
    grouped = by_user(pair, OWNERS, most=4)
    plan = dpfy.dpsgd(len(grouped), 2, steps=1, unit=grouped.unit).with_noise(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for evaluation, words in (
        (dpfy.PrivateTest(pair), "say whose each held-out record is"),
        (dpfy.PublicTest(grouped), "one by one"),
    ):
        with pytest.raises((Unsupported, InvalidInput), match=words):
            dpfy.fit(
                model,
                grouped,
                plan=plan,
                optimizer=optimizer,
                run=f"{tmp_path}/run",
                evaluation=evaluation,
            )
    assert [len(field) for field in grouped.alone().tensors] == [11, 11], (
        "of the user with five records four are kept"
    )
