"""Recorded operations: run again they give the same bits, leave no trace, and say where they cannot
be run again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from dpfy.isolation.fingerprint import difference, fingerprint, joined, scaled_by_size
from dpfy.isolation.operations import BATCH, Reshaped, Variation
from dpfy.isolation.program import Program
from dpfy.isolation.recorder import OperationRecorder

MODEL = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def recorded(function: Callable[..., Tensor], *batch: Tensor) -> tuple[Program, Tensor]:
    recorder = OperationRecorder()
    recorder.program.mark(batch, BATCH)
    recorder.start()
    try:
        result = function(*batch)
    finally:
        recorder.stop()
    return recorder.program, result


def lstm(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return nn.LSTM(6, 4, batch_first=True)(x[:, None])[0]


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:3].mul_(2)
    y.view(-1)[::2].add_(1)
    torch.add(y, 1, out=y)
    y[y > 1] = 0.5
    return y.t().contiguous().relu_()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "model": lambda x: MODEL(x),
    "in place": in_place,
    "the batch in place": lambda x: x.mul_(2) + x.t().contiguous().t(),
    "dropout": lambda x: F.dropout(MODEL(x), 0.5),
    "random": lambda x: x + torch.randn_like(x) * torch.rand(()) + x[torch.randperm(len(x))],
    "own generator": lambda x: x + torch.rand(x.shape, generator=torch.Generator().manual_seed(4)),
    "index put": lambda x: torch.zeros(6, 6).index_put(
        (torch.tensor([0, 1, 1, 2]),), x[:4], accumulate=True
    ),
    "scatter": lambda x: torch.zeros(5, 6).scatter_add(0, torch.ones(5, 6, dtype=torch.long), x),
    "recurrent": lstm,
    "fourier": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "split": lambda x: torch.cat([part.exp() for part in x.unbind(1)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_run_again_they_give_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    program, result = recorded(FUNCTIONS[name], x)
    assert program.problem is None
    before, held = torch.get_rng_state(), x.clone()
    for _ in range(2):
        ref = program.ref(result)
        assert torch.equal(program.run({}, [ref]).at(ref), result)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, held)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_run_on_another_batch_they_give_what_it_would_have_given(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 6), torch.randn(5, 6).abs() + 2
    given = torch.get_rng_state()
    program, result = recorded(FUNCTIONS[name], x)
    ref = program.ref(result)
    again = program.run({program.ref(x).storage: y.clone().untyped_storage()}, [ref]).at(ref)
    torch.set_rng_state(given)
    assert torch.equal(again, FUNCTIONS[name](y))


@pytest.mark.parametrize("name", ["random", "dropout", "own generator"])
def test_run_with_another_seed_they_draw_other_numbers_and_the_same_ones_again(name: str) -> None:
    torch.manual_seed(0)
    program, result = recorded(FUNCTIONS[name], torch.randn(5, 6))
    before, ref = torch.get_rng_state(), program.ref(result)
    found = [program.run({}, [ref], Variation(seed=seed)).at(ref) for seed in (5, 5, 6)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], result)
    assert torch.equal(torch.get_rng_state(), before)


def test_values_that_python_reads_are_noted() -> None:
    def reads(x: Tensor) -> Tensor:
        F.one_hot(torch.tensor([0, 1]), 2)  # reads for itself
        bool(torch.ones(()) > 0)  # reads no record
        return x * x.mean().item() * (1 if x.sum() > 0 else 2) * max(x[0].tolist())

    program, _ = recorded(reads, torch.randn(5, 6))
    assert sum(operation.read for operation in program.operations) == 3


def test_shapes_that_change_are_an_error() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    program, result = recorded(lambda x: x[x > 0] * 2, x)
    ref = program.ref(result)
    with pytest.raises(Reshaped):
        program.run({program.ref(x).storage: torch.ones(3).untyped_storage()}, [ref])


def test_a_graph_that_was_not_seen_is_a_problem() -> None:
    unseen = MODEL(torch.randn(5, 6))
    program, _ = recorded(lambda x: x[:, :3] + unseen, torch.randn(5, 6))
    assert program.problem is not None
    assert "was not seen" in program.problem


def test_sparse_tensors_are_a_problem() -> None:
    program, _ = recorded(lambda x: x.to_sparse().to_dense(), torch.randn(5, 6))
    assert program.problem is not None


class Other(TorchDispatchMode):
    """Somebody else's mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_modes_of_others_stay() -> None:
    recorder = OperationRecorder()
    recorder.start()
    with Other() as other:
        recorder.stop()
        recorder.stop()
        assert _get_current_dispatch_mode_stack() == [other]
        torch.ones(2) + 1
    assert not _get_current_dispatch_mode_stack()


def mark_of(
    losses: Callable[[nn.Module, Tensor, Tensor], Tensor],
    rows: int,
    model: nn.Module = MODEL,
    seed: int = 0,
    lengths: list[list[int]] | None = None,
) -> str:
    generator = torch.Generator().manual_seed(seed)
    x, y = (
        torch.randn(rows, 6, generator=generator),
        torch.randint(0, 3, (rows,), generator=generator),
    )
    program, result = recorded(lambda x, y: losses(model, x, y), x, y)
    names = {program.ref(x).storage: "field 0", program.ref(y).storage: "field 1"}
    names |= {program.ref(p).storage: f"weight {name}" for name, p in model.named_parameters()}
    return fingerprint(program, len(program.operations), program.ref(result), names, rows, lengths)


def ce(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y, reduction="none")


SAME: list[Callable[[nn.Module, Tensor, Tensor], Tensor]] = [
    ce,
    lambda m, x, y: torch.stack([F.cross_entropy(m(a), b) for a, b in zip(x, y, strict=True)]),
    lambda m, x, y: ce(m, F.dropout(x, 0.2), y),
    lambda m, x, y: m(x).view(len(x) * 3).view(-1, 3).square().sum(1),
    lambda m, x, y: m(torch.cat([x, x])).view(2, len(x), 3).sum((0, 2)),
    lambda m, x, y: (m(x) - torch.arange(len(x))[:, None] * 0).sum(1),
]


@pytest.mark.parametrize("losses", SAME)
def test_the_fingerprint_does_not_depend_on_the_batch(
    losses: Callable[[nn.Module, Tensor, Tensor], Tensor],
) -> None:
    first = mark_of(losses, 7)
    for rows in (2, 3, 7, 12, 31):
        assert difference(first, mark_of(losses, rows, seed=rows)) is None


OTHERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "twice": lambda m, x, y: 2 * ce(m, x, y),
    "smoothed": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1, reduction="none"),
    "shifted": lambda m, x, y: ce(m, x + 0.5, y),
    "shifted by a tensor": lambda m, x, y: ce(m, x + torch.ones(6), y),
    "another activation": lambda m, x, y: F.cross_entropy(
        m[2](torch.relu(m[0](x))), y, reduction="none"
    ),
    "another order": lambda m, x, y: F.cross_entropy(
        torch.tanh(m[2](m[0](x))), y, reduction="none"
    ),
    "flipped": lambda m, x, y: ce(m, x.flip(1), y),
    "less of it": lambda m, x, y: ce(m, F.pad(x[:, :5], (0, 1)), y),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("rows", [7, 12])
def test_the_fingerprint_tells_other_computations(name: str, rows: int) -> None:
    assert difference(mark_of(ce, 7), mark_of(OTHERS[name], rows)) is not None


def test_constants_and_sizes_count() -> None:
    def shifted(by: float, cut: int) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        return lambda m, x, y: ce(m, F.pad(x[:, :cut] * by, (0, 6 - cut)), y)

    base = mark_of(shifted(0.5, 4), 7)
    assert difference(base, mark_of(shifted(0.5, 4), 9)) is None
    for other in (shifted(0.25, 4), shifted(0.5, 5)):
        assert difference(base, mark_of(other, 7)) is not None
        assert difference(base, mark_of(other, 9)) is not None


def test_where_padding_gives_other_lengths_sizes_may_differ_and_constants_may_not() -> None:
    def padded_to(length: int, by: float = 0.5) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        return lambda m, x, y: ce(m, F.pad(x[:, :length] * by, (0, 6 - length)), y)

    base = mark_of(padded_to(4), 7, lengths=[[4], []])
    assert difference(base, mark_of(padded_to(5), 9, lengths=[[5], []])) is None
    assert difference(base, mark_of(padded_to(5), 9, lengths=[[4], []])) is not None
    assert difference(base, mark_of(padded_to(5, by=0.25), 9, lengths=[[5], []])) is not None
    both = joined(base, mark_of(padded_to(5), 9, lengths=[[5], []]))
    assert difference(both, mark_of(padded_to(3), 9, lengths=[[3], []])) is None
    assert (
        difference(mark_of(padded_to(4), 7), mark_of(padded_to(4), 7, lengths=[[4], []])) is None
    ), "of a run of before"


def test_what_varies_in_a_run_may_vary_after_a_resume() -> None:
    def scaled(by: float) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        return lambda m, x, y: ce(m, x, y) * by

    both = joined(mark_of(scaled(0.1), 7), mark_of(scaled(0.2), 9))
    assert difference(both, mark_of(scaled(0.3), 5)) is None
    assert difference(both, mark_of(ce, 5)) is not None
    skipped = joined(
        mark_of(ce, 7),
        mark_of(lambda m, x, y: F.cross_entropy(m[2](m[0](x)), y, reduction="none"), 9),
    )
    assert difference(skipped, mark_of(ce, 5)) is None
    assert "sin" in (difference(skipped, mark_of(lambda m, x, y: ce(m, x, y).sin(), 5)) or "")


def test_the_number_of_records_is_told_from_a_constant() -> None:
    assert (
        scaled_by_size(
            mark_of(lambda m, x, y: ce(m, x, y) / len(x), 7),
            mark_of(lambda m, x, y: ce(m, x, y) / len(x), 9),
        )
        == "div"
    )
    assert (
        scaled_by_size(
            mark_of(lambda m, x, y: ce(m, x, y) / 7, 7), mark_of(lambda m, x, y: ce(m, x, y) / 7, 9)
        )
        is None
    )
