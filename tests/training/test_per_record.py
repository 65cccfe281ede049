"""Losses written for one record: no replays are made, the report says why, and a run cannot change
over to or from them.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import net, plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dpfy
from dpfy import per_record
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.isolation.schedule import CheckLevel
from dpfy.training import Result
from dpfy.training.objective import Objective


def loop(path: Path, count: int, how: str, *, resume: bool = False) -> dpfy.PrivateTraining:
    """`count` steps of a run; with `how`, its losses count as isolated by construction."""
    torch.manual_seed(0)
    model = net()
    plan = dpfy.dpsgd(small_runs.RECORDS, 12, steps=20).with_noise(1.0, delta=1e-3)
    run = dpfy.Run(path / "run", seed=1, resume=resume)
    with dpfy.PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.05), small_runs.vectors(), plan, run
    ) as training:
        assert training.isolation is not None
        if how:
            training.isolation.isolate(how)
        for x, y in training.batches():
            training.step(plain(model, x, y))
            if training.steps_done == count:
                break
    return training


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_isolated_losses_are_neither_recorded_nor_replayed_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    training = loop(tmp_path, 20, "one by one")
    assert training.isolation is not None
    checks = training.isolation.summary
    assert (checks.recorded, checks.replayed, checks.through_model) == (0, 0, 0)
    assert all(training.isolation.level_of(step) is CheckLevel.NOTHING for step in range(20))
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "isolated by construction: one by one" in json.dumps(card)


@pytest.mark.filterwarnings("ignore:run .* unfinished")
@pytest.mark.parametrize(
    ("before", "after"), [("", "one by one"), ("one by one", ""), ("one by one", "vectorised")]
)
def test_a_run_is_resumed_with_the_isolation_it_was_begun_with(
    before: str, after: str, tmp_path: Path
) -> None:
    loop(tmp_path, 5, before)
    with pytest.raises(InvalidInput, match="resume losses"):
        loop(tmp_path, 8, after, resume=True)
    assert loop(tmp_path, 8, before, resume=True).steps_done == 8


# What reaches for other records, or for an earlier step. Each is a function that makes (model,
# loss) anew.

Made = tuple[nn.Module, Any]


def entropy(model: Any, record: Any) -> Tensor:
    return F.cross_entropy(model(record[0]), record[1])


def with_term(term: Callable[[Any, Tensor], Tensor]) -> Made:
    """The usual loss and a term of the model and of the record."""
    return net(), per_record(lambda model, record: entropy(model, record) + term(model, record[0]))


def kept(change: Callable[[Tensor], Tensor], last: int = 100) -> Made:
    """What `change` makes of every record is kept, and its mean used."""
    seen: list[Tensor] = []

    def term(model: Any, x: Tensor) -> Tensor:
        found = torch.stack(seen[-last:]).mean() * x.sum() if seen else x.sum() * 0
        seen.append(change(x))
        return found

    return with_term(term)


def on_the_model() -> Made:
    def term(model: Any, x: Tensor) -> Tensor:
        before = getattr(model, "last", x)
        model.last = model[0](x)
        return (model[0](x) * before.sum()).mean()

    return with_term(term)


def forward_hook() -> Made:
    model, seen = net(), []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.append(output)
        return output - seen[0]

    model[0].register_forward_hook(hook)
    return model, per_record(entropy)


def backward_hook() -> Made:
    model = net()
    model[0].register_full_backward_hook(
        lambda module, before, after: (
            (before[0] - before[0].mean(0),) if before[0] is not None else None
        )
    )
    return model, per_record(entropy)


class OwnRule(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:  # type: ignore[override]
        return x - x.mean(0), 0


class Keeps(torch.autograd.Function):
    generate_vmap_rule = True
    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        Keeps.seen.append(x * 1)
        return x + Keeps.seen[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class KeepsGradients(torch.autograd.Function):
    generate_vmap_rule = True
    seen: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        KeepsGradients.seen.append(grad * 1)
        return grad + KeepsGradients.seen[0]


class Through(nn.Module):
    """A layer, a function, a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(small_runs.WIDTH, 8), nn.Linear(8, small_runs.CLASSES)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.body(x)))


def through(function: Callable[[Tensor], Tensor]) -> Made:
    return Through(function), per_record(entropy)


class Counts(nn.Module):
    """A buffer that follows the data: written, or put in its place."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.body, self.write = nn.Linear(small_runs.WIDTH, small_runs.CLASSES), write
        self.register_buffer("mean", torch.zeros(small_runs.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.write:
            self.mean.mul_(0.9).add_(x.detach())
        else:
            self.mean = x.detach() * 0.9
        return self.body(x)


class Packs(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self) -> None:
        super().__init__(lambda t: t - t.mean() if t.is_floating_point() else t, lambda t: t)


def packed() -> Made:
    def loss(model: Any, record: Any) -> Tensor:
        with Packs():
            return entropy(model, record)

    return net(), per_record(loss)


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def moded() -> Made:
    def loss(model: Any, record: Any) -> Tensor:
        with Sees():
            return entropy(model, record)

    return net(), per_record(loss)


def operation() -> Made:
    if not hasattr(torch.ops, "dpfy_tests") or not hasattr(torch.ops.dpfy_tests, "centred"):

        @torch.library.custom_op("dpfy_tests::centred", mutates_args=())
        def centred(x: Tensor) -> Tensor:
            return x.clone()

        centred.register_vmap(lambda info, dims, x: (x - x.mean(0), 0))
    return through(lambda x: torch.ops.dpfy_tests.centred(x.detach()) + x)


def threaded() -> Made:
    seen: list[Tensor] = []

    def term(model: Any, x: Tensor) -> Tensor:
        worker = threading.Thread(target=lambda: seen.append(x.mean()))
        worker.start()
        worker.join()
        return seen[0] * x.sum()

    return with_term(term)


def read(how: Callable[[Tensor], Any]) -> Made:
    """A number that Python reads from the record."""

    def term(model: Any, x: Tensor) -> Tensor:
        how(x)
        return x.sum() * 0

    return with_term(term)


REFUSED: dict[str, Callable[[], Made]] = {
    "kept in a list": lambda: kept(lambda x: x),
    "kept, detached": lambda: kept(lambda x: x.detach() * 2),
    "kept as a parameter": lambda: kept(lambda x: nn.Parameter(x, requires_grad=False)),
    "kept, the last alone": lambda: kept(lambda x: x.mean(), last=1),
    "kept as a view": lambda: kept(lambda x: x[:1].T),
    "kept in a gradient transform": lambda: with_term(
        (
            lambda seen: (
                lambda model, x: torch.func.grad(
                    lambda z: seen.append(z * 1) or (z * seen[0]).sum()
                )(x).sum()
            )
        )([])
    ),
    "kept on the model": on_the_model,
    "kept by a hook": forward_hook,
    "kept by a function's forward": lambda: through(Keeps.apply),
    "kept by a function's backward": lambda: through(KeepsGradients.apply),
    "hook on an activation": lambda: through(
        lambda h: (h.register_hook(lambda g: g - g.mean(0)), h)[1]
    ),
    "function with a rule of its own": lambda: through(OwnRule.apply),
    "operation with a rule of its own": operation,
    "buffer written": lambda: (Counts(True), per_record(entropy)),
    "buffer replaced": lambda: (Counts(False), per_record(entropy)),
    "saved tensors changed": packed,
    "dispatch mode": moded,
    "checkpoint": lambda: through(lambda h: checkpoint(torch.tanh, h, use_reentrant=False)),
    "reentrant checkpoint": lambda: through(
        lambda h: checkpoint(torch.tanh, h, use_reentrant=True)
    ),
    "another thread": threaded,
    "the data set": lambda: with_term(lambda model, x: (x - DATA[0].mean(0)).sum()),
    "a view of the data set": lambda: with_term(lambda model, x: x @ DATA[0][3:4].squeeze(0)),
    "the batch, from a frame": lambda: with_term(lambda model, x: x @ frames("leaves")[0].mean(0)),
    "the batch, from torch's inside": lambda: with_term(
        lambda model, x: x @ torch._C._functorch.get_unwrapped(x).mean(0)
    ),
    "item": lambda: read(lambda x: x.sum().item()),
    "float": lambda: read(lambda x: float(x.sum())),
    "numpy": lambda: read(lambda x: x.detach().numpy()),
    "tolist": lambda: read(lambda x: x.tolist()),
    "repr": lambda: read(repr),
    "formatted": lambda: read(lambda x: f"{x}"),
    "printed number": lambda: read(lambda x: f"{x.sum():.3f}"),
    "pickle": lambda: read(pickle.dumps),
    "storage": lambda: read(lambda x: x.untyped_storage()),
    "pointer": lambda: read(lambda x: x.data_ptr()),
    "branch": lambda: read(lambda x: 1 if x.sum() > 0 else 2),
    "count": lambda: read(lambda x: (x > 0).nonzero().shape[0]),
    "selected": lambda: read(lambda x: x[x > 0].sum()),
    "length": lambda: read(lambda x: torch.arange(x.abs().max())),
    "scalar in C++": lambda: read(lambda x: torch.full((2,), x.sum())),
    "equal": lambda: read(lambda x: torch.equal(x, x + 1)),
    "close": lambda: read(lambda x: torch.allclose(x, x + 1)),
    "written outside": lambda: read(lambda x: torch.zeros(small_runs.WIDTH).copy_(x)),
    "scripted": lambda: through(torch.jit.script(scripted)),
    "resized into the neighbours": lambda: read(lambda x: x.clone().resize_(2 * small_runs.WIDTH)),
    "resized by its operation": lambda: read(
        lambda x: torch.ops.aten.resize_(x.clone(), [2 * small_runs.WIDTH])
    ),
    "another shape of its memory": lambda: read(
        lambda x: torch._reshape_alias_copy(x, (2 * small_runs.WIDTH,), (1,))
    ),
    "operation of a compiler": lambda: read(
        lambda x: torch.ops.inductor._reinterpret_tensor(x, (2 * small_runs.WIDTH,), (1,))
    ),
    "neighbours in memory": lambda: read(lambda x: x.as_strided((2 * small_runs.WIDTH,), (1,))),
}

DATA = small_runs.vectors()


def frames(name: str) -> Any:
    """A local variable of that name of whoever called."""
    frame = sys._getframe()
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_locals[name]


def fitted(path: Path, made: Made, steps: int = 6, **options: Any) -> Result:
    model, loss = made
    plan = dpfy.dpsgd(small_runs.RECORDS, 24, steps=steps).with_noise(1.0, delta=1e-3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    run = options.pop("run", None) or dpfy.Run(path / "run", seed=5)
    return dpfy.fit(
        model, options.pop("data", DATA), plan=plan, optimizer=sgd, loss=loss, run=run, **options
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_reaches_for_more_than_its_record_is_refused(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    Keeps.seen.clear()
    KeepsGradients.seen.clear()
    with pytest.raises((Unsupported, InvalidInput)) as refusal:
        fitted(tmp_path, REFUSED[name]())
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "privacy.json").exists()


class Experts(nn.Module):
    """A mixture of experts that routes with `nonzero`: each position goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(small_runs.WIDTH, 3), nn.Linear(8, small_runs.CLASSES)
        self.experts = nn.ModuleList(nn.Linear(small_runs.WIDTH, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(-1)
        chosen, out = gate.argmax(-1), x.new_zeros(len(x), 8)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero().squeeze(1)
            if len(where):
                out = out.index_add(0, where, gate[where, i, None] * expert(x[where]))
        return self.head(out.tanh()).mean(0)


class CountsPositions(nn.Module):
    """Things that a record may do with its own: masks, lengths, sorting, gradients of itself,
    caches without data.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(small_runs.WIDTH, 8), nn.Linear(8, small_runs.CLASSES)
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        mask = self.cache.setdefault(len(x), torch.ones(len(x), len(x)).tril())
        h = self.body(x).relu_()
        h = (mask @ h).sort(0).values.cumsum(0) / (x.sum(-1, keepdim=True) > 0).sum().clamp(min=1)
        return self.head(torch.where(h > 0, h, h * 0.1).mean(0))


def slope(model: Any, record: Any) -> Tensor:
    """A loss with the gradient of the model at the record."""
    steep = torch.func.grad(lambda x: model(x).square().sum())(record[0])
    return entropy(model, record) + 0.01 * steep.square().sum()


class Doubles(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


def scripted(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.5 * x).tanh()


def counting() -> Made:
    calls = [0]

    def loss(model: Any, record: Any) -> Tensor:
        calls[0] += 1
        return entropy(model, record)

    return net(), loss


def as_dict(model: Any, record: Any) -> Tensor:
    return F.cross_entropy(model(record["x"][None]), record["y"][None])


HARMLESS: dict[str, tuple[Callable[[], Made], Any]] = {
    "plain": (lambda: (net(), per_record(entropy)), DATA),
    "by its names": (lambda: (net(), lambda model, record: entropy(model, record)), DATA),
    "a dict": (lambda: (net(), per_record(as_dict)), {"x": DATA[0], "y": DATA[1]}),
    "one field": (lambda: (net(), per_record(lambda m, r: m(r[0]).square().mean())), DATA[0]),
    "length of the record": (lambda: with_term(lambda m, x: x.sum() / len(x) / x.shape[0]), DATA),
    "dropout": (lambda: (net(nn.Linear(small_runs.WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, small_runs.CLASSES)), per_record(entropy)), DATA),  # noqa: E501
    "noise": (lambda: with_term(lambda m, x: (x + torch.randn(x.shape)).square().mean() * torch.rand(())), DATA),
    "positions": (lambda: (CountsPositions(), per_record(entropy)), small_runs.sequences()),
    "own gradient": (lambda: (net(), per_record(slope)), DATA),
    "a function of autograd": (lambda: through(Doubles.apply), DATA),
    "a counter": (counting, DATA),
    "backward hook": (backward_hook, DATA),
    "compiled": (lambda: (Through(torch.compile(torch.tanh)), per_record(entropy)), DATA),
    "scripted, one by one": (
        lambda: (Through(torch.jit.script(scripted)), per_record(entropy, vectorised=False)), DATA
    ),
    "several "
    "tensors": (lambda: through(lambda h: torch.cat([*h.chunk(2, -1)][::-1], -1).split(4, -1)[0].repeat(2)), DATA),
    "experts, one by "
    "one": (lambda: (Experts(), per_record(entropy, vectorised=False)), small_runs.sequences()),
    "read, one by one": (
        lambda: (net(), per_record(lambda m, r: entropy(m, r) * (2 if r[0].sum().item() > 0 else 1), vectorised=False)), DATA  # noqa: E501
    ),
    "checkpoint, one by one": (
        lambda: (Through(lambda h: checkpoint(torch.tanh, h, use_reentrant=False)), per_record(entropy, vectorised=False)), DATA  # noqa: E501
    ),
    "dropout, one by one": (
        lambda: (net(nn.Linear(small_runs.WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, small_runs.CLASSES)), per_record(entropy, vectorised=False)),  # noqa: E501
        DATA,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HARMLESS)
def test_a_loss_of_its_record_alone_trains(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, data = HARMLESS[name]
    result = fitted(tmp_path, make(), data=data)
    told = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert "isolated by construction" in json.dumps(told)
    assert "run again with other records" not in json.dumps(told)
    assert all(finding.holds for finding in dpfy.verify(result.run))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HARMLESS)
def test_no_record_moves_the_clipped_sum_further_than_the_bound(name: str) -> None:
    """Measured: another record in a row that does not count changes nothing, and one that counts
    adds at most the bound.
    """
    torch.manual_seed(0)
    make, data = HARMLESS[name]
    model, loss = make()
    aim, clip, rows = Objective(loss), FlatClip(0.5), 7
    assert aim.record is not None
    engine = BookkeepingEngine() if aim.record.vectorised else LoopEngine()
    engine.attach(model)
    losses_of = aim.losses_of(model)

    def total(batch: Any, mask: Tensor) -> Tensor:
        torch.manual_seed(1)
        value = engine.bounded_sum(losses_of(batch), clip, mask).value
        return torch.cat([value[name].to_dense().double().flatten() for name in sorted(value)])

    most = 0.0
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        picked = torch.randperm(small_runs.RECORDS, generator=g)[:rows]
        batch = pytree.tree_map(
            lambda t, picked=picked: t[picked], data if not isinstance(data, Tensor) else (data,)
        )
        row, counts = seed % rows, torch.arange(rows) != seed % rows

        def other(t: Tensor, row: int = row) -> Tensor:
            t = t.clone()
            t[row] = t[row] * 50 if t.is_floating_point() else (t[row] + 1) % small_runs.CLASSES
            return t

        without = total(batch, counts)
        assert torch.allclose(
            without, total(pytree.tree_map(other, batch), counts), rtol=1e-4, atol=1e-5
        )
        moved = total(pytree.tree_map(other, batch), torch.ones(rows, dtype=torch.bool)) - without
        most = max(most, float(moved.norm()))
    assert 0 < most <= 0.5 * (1 + 1e-4)


SLOW_REFUSED: dict[str, Callable[[], Made]] = {
    "kept in a list": lambda: kept(lambda x: x),
    "kept on the model": on_the_model,
    "the data set": lambda: with_term(lambda model, x: (x - DATA[0].mean(0)).sum()),
    "a running mean that Python read": lambda: with_term(
        (
            lambda seen: (
                lambda model, x: (seen.append(x.mean().item()), x.sum() * sum(seen) / len(seen))[1]
            )
        )([])
    ),
    "the loss before": lambda: with_term(
        (
            lambda last: (
                lambda model, x: (
                    last.append(entropy(model, (x, torch.tensor(0))).item()),
                    x.sum() * last[-2],
                )[1]
            )
        )([1.0])
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SLOW_REFUSED)
def test_one_by_one_what_is_kept_is_refused_too(name: str, tmp_path: Path) -> None:
    model, loss = SLOW_REFUSED[name]()
    with pytest.raises(Unsupported, match=r"kept|before it|data set"):
        fitted(tmp_path, (model, per_record(loss.f, vectorised=False)))


def test_experts_are_refused_with_the_way_that_trains_them(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="vectorised=False"):
        fitted(tmp_path, (Experts(), per_record(entropy)), data=small_runs.sequences())


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_a_resumed_run_releases_the_same_and_refuses_another_loss(tmp_path: Path) -> None:
    def interrupted(path: Path, first: Any, second: Any) -> Result:
        class Ends(Exception):
            pass

        def fourth(*_: Any) -> None:
            steps.append(1)
            if len(steps) == 4:
                raise Ends

        steps: list[int] = []
        plan = dpfy.dpsgd(small_runs.RECORDS, 24, steps=6).with_noise(1.0, delta=1e-3)
        torch.manual_seed(0)
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        sgd.register_step_pre_hook(fourth)
        with pytest.raises(Ends):
            dpfy.fit(
                model,
                DATA,
                plan=plan,
                optimizer=sgd,
                loss=first,
                run=dpfy.Run(path / "run", seed=5, checkpoint_every=0),
            )
        torch.manual_seed(0)
        model = net()
        found = fitted(path, (model, second), run=dpfy.Run(path / "run", seed=5, resume=True))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return found

    weights: list[Tensor] = []
    torch.manual_seed(0)
    whole = net()
    fitted(tmp_path / "whole", (whole, per_record(entropy)))
    interrupted(tmp_path / "parts", per_record(entropy), per_record(entropy))
    assert torch.equal(weights[0], torch.cat([p.detach().flatten() for p in whole.parameters()]))
    for number, other in enumerate(
        (
            per_record(lambda m, r: 2 * entropy(m, r)),
            per_record(entropy, vectorised=False),
            "cross_entropy",
        )
    ):
        with pytest.raises(InvalidInput, match="resume"):
            interrupted(tmp_path / str(number), per_record(entropy), other)


def test_users_and_views_are_made_of_rows(tmp_path: Path) -> None:
    owners = torch.arange(small_runs.RECORDS) // 4
    plan = dpfy.dpsgd(24, 6, steps=4, unit=dpfy.Unit("user", 3)).with_noise(1.0, delta=1e-3)
    weights = []
    for loss in ("cross_entropy", per_record(entropy)):
        torch.manual_seed(0)
        model = net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        name = "names" if loss == "cross_entropy" else "records"
        dpfy.fit(
            model,
            DATA,
            plan=plan,
            optimizer=sgd,
            loss=loss,
            user=owners,
            run=dpfy.Run(tmp_path / name, seed=1),
        )
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return small_runs.RECORDS

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return DATA[0][i], DATA[1][i]


def test_data_sets_are_taken_and_collate_functions_are_not(tmp_path: Path) -> None:
    fitted(tmp_path, (net(), per_record(entropy)), data=Rows())
    collated = dpfy.lazy(Rows(), collate=torch.utils.data.default_collate)
    with pytest.raises(Unsupported, match="collate"):
        fitted(tmp_path / "collated", (net(), per_record(entropy)), data=collated)
    assert not (tmp_path / "collated").exists()


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (per_record(lambda m, r: m(r[0])), "loss"),
        (per_record(lambda m, r: 1.0), "loss"),
        (per_record(lambda m, r: r[1]), "loss"),
        (per_record(lambda m, r: F.cross_entropy(m(r[0]), r[1] + 3)), "record"),
        (per_record(lambda m, r: F.cross_entropy(m(r[0]), r[1] + 3), vectorised=False), "record"),
    ],
)
def test_what_is_no_loss_of_one_record_is_refused_in_one_line(
    loss: Any, field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}") as refusal:
        fitted(tmp_path, (net(), loss))
    assert "\n" not in str(refusal.value)


def test_per_record_is_a_decorator_and_takes_functions_alone() -> None:
    made = per_record(vectorised=False)(entropy)
    assert (made.f, made.vectorised) == (entropy, False)
    for wrong in ("mse", net(), per_record(entropy)):
        with pytest.raises(InvalidInput, match="loss"):
            per_record(wrong)  # type: ignore[call-overload]
    assert Objective(lambda outputs, targets: outputs).record is None
    with pytest.raises(InvalidInput, match="labels"):
        Objective(per_record(entropy), "labels")
    with pytest.raises(InvalidInput, match="engine"):
        per_record(entropy, vectorised=False).check(net(), DATA, "bookkeeping", graph=False)
    with pytest.raises(Unsupported, match="graph"):
        per_record(entropy).check(net(), DATA, "auto", graph=True)
