"""Sequences of several lengths, packed: each example goes its own length, and lengths of others
reach no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.isolation import small_runs
from tests.isolation.small_runs import CLASSES, RECORDS, WIDTH, ce
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

import dpfy
from dpfy.core.errors import Unsupported
from dpfy.isolation.comparison import ExampleParts, Replacement, check_apart
from dpfy.isolation.operations import BATCH
from dpfy.isolation.recorder import OperationRecorder

LONGEST = 16


def data() -> tuple[Tensor, Tensor, Tensor]:
    g = small_runs.seeded()
    x = torch.randn(RECORDS, LONGEST, WIDTH, generator=g)
    lengths = 1 + (LONGEST * torch.rand(RECORDS, generator=g) ** 3).long()  # a few are long
    return x, lengths, torch.randint(0, CLASSES, (RECORDS,), generator=g)


class Reader(nn.Module):
    """A recurrent layer over packed sequences; `pool` makes one row of each from (outputs, last
    states, lengths).
    """

    def __init__(self, pool: Callable[..., Tensor], kind: str = "LSTM", **settings: Any) -> None:
        super().__init__()
        self.inner, self.pool = getattr(nn, kind)(WIDTH, 4, batch_first=True, **settings), pool
        self.head = nn.Linear(4 * (2 if settings.get("bidirectional") else 1), CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        outputs, last = self.inner(
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        )
        state = last[0] if isinstance(last, tuple) else last
        out: Tensor = self.head(self.pool(outputs, state.transpose(0, 1).flatten(1)))
        return out


def last(outputs: Any, state: Tensor) -> Tensor:
    return state


def picked(outputs: Any, state: Tensor) -> Tensor:
    padded, lengths = pad_packed_sequence(outputs, batch_first=True)
    return padded[torch.arange(len(padded)), lengths - 1]


def masked(outputs: Any, state: Tensor) -> Tensor:
    padded, lengths = pad_packed_sequence(outputs, batch_first=True)
    exists = torch.arange(padded.shape[1]) < lengths[:, None]
    return torch.where(exists[..., None], padded, 0.0).sum(1) / lengths[:, None]


def plain(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    return ce(model(x, lengths), y)


ACCEPTED: dict[str, tuple[nn.Module, small_runs.Losses]] = {
    "last state": (Reader(last), plain),
    "both ways": (Reader(last, "GRU", bidirectional=True), plain),
    "last output": (Reader(picked, "RNN"), plain),
    "masked mean": (Reader(masked), plain),
    "divided by its own length": (Reader(last), lambda m, x, n, y: plain(m, x, n, y) / n),
    "lengths from the data": (
        Reader(last),
        lambda m, x, n, y: plain(m, x, (x[:, :, 0] > -9).sum(1), y),
    ),
}


@pytest.mark.parametrize("engine", ["auto", pytest.param("loop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ACCEPTED)
def test_packed_sequences_train(name: str, engine: str, tmp_path: Path) -> None:
    model, losses = ACCEPTED[name]
    training = small_runs.train(tmp_path, model, losses, data(), engine=engine)
    assert training.isolation is not None
    assert training.isolation.summary.replayed
    assert not training.isolation.summary.through_model, training.isolation.summary.why


def sorted_by_hand(model: Any, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
    n, order = n.sort(descending=True)
    _, (state, _) = model.inner(pack_padded_sequence(x[order], n, batch_first=True))
    return ce(model.head(state[0] / n[:, None])[order.argsort()], y)


def test_sequences_sorted_by_the_caller(tmp_path: Path) -> None:
    small_runs.train(tmp_path, Reader(last), sorted_by_hand, data())


def by_all(model: Any, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
    return plain(model, x, n, y) * len(y) / len(packed.data)


def by_given_back(model: Any, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
    _, lengths = pad_packed_sequence(
        pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False), batch_first=True
    )
    return plain(model, x, n, y) / lengths.sum()


def longest(outputs: Any, state: Tensor) -> Tensor:
    return state / len(outputs.batch_sizes)


def sums(outputs: Any, state: Tensor) -> Tensor:
    return state - outputs.data.mean(0)


def average(outputs: Any, state: Tensor) -> Tensor:
    return pad_packed_sequence(outputs, batch_first=True)[0].mean(1)


REFUSED: dict[str, tuple[nn.Module, small_runs.Losses]] = {
    "divided by all lengths": (Reader(last), lambda m, x, n, y: plain(m, x, n, y) / n.sum()),
    "divided by the longest": (Reader(last), lambda m, x, n, y: plain(m, x, n, y) / n.max()),
    "divided by the number of steps": (Reader(last), by_all),
    "divided by lengths that came back": (Reader(last), by_given_back),
    "divided by the longest in the model": (Reader(longest), plain),
    "a mean over all rows": (Reader(sums), plain),
    "a mean over the padding": (Reader(average), plain),
    "an example longer than it is": (
        Reader(last),
        lambda m, x, n, y: plain(m, x, n.max().expand_as(n).clone(), y),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_lengths_of_others_are_refused(name: str, tmp_path: Path) -> None:
    model, losses = REFUSED[name]
    with pytest.raises(Unsupported) as refused:
        small_runs.train(tmp_path, model, losses, data())
    assert "\n" not in str(refused.value)
    assert any(
        word in str(refused.value) for word in ("mix", "lengths of other", "torch.where", "depend")
    )


def test_the_longest_is_told_where_the_replaced_record_is_as_long() -> None:
    """The lengths that a check puts in are short too, so that the longest becomes another."""
    torch.manual_seed(0)
    x, n, y = torch.randn(4, 5, WIDTH), torch.tensor([5, 2, 3, 2]), torch.tensor([0, 1, 0, 1])
    rows = torch.tensor([True, False, False, False])
    model = Reader(last)
    for divisor, allowed in ((lambda: n.max(), False), (lambda: 5, True)):
        recorder = OperationRecorder()
        recorder.program.mark((x, n, y), BATCH)
        recorder.start()
        losses = plain(model, x, n, y) / divisor()
        recorder.stop()
        program = recorder.program
        change = Replacement((x, n, y), [x + rows[:, None, None], n, y], rows)
        with nullcontext() if allowed else pytest.raises(Unsupported, match="mix"):
            check_apart(program, ExampleParts.forward(program, losses), losses, [change])


def test_padding_while_recorded_is_torchs_own() -> None:
    """Outputs, lengths and gradients, to the bit."""
    x, n, _ = data()
    for batch_first, total in ((True, None), (False, LONGEST + 2)):
        found = []
        for recorded in (False, True):
            leaf = x[:8].clone().requires_grad_()
            recorder = OperationRecorder()
            if recorded:
                recorder.start()
            packed = pack_padded_sequence(leaf, n[:8], batch_first=True, enforce_sorted=False)
            padded, lengths = pad_packed_sequence(packed, batch_first, 0.5, total)
            padded.sin().sum().backward()
            recorder.stop()
            found.append((padded.detach(), lengths, leaf.grad, padded.stride()))
        assert all(
            a == b if isinstance(a, tuple) else torch.equal(a, b)
            for a, b in zip(*found, strict=True)
        )


class Sentences(Dataset):
    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        g = torch.Generator().manual_seed(index)
        return torch.randn(1 + index % LONGEST, WIDTH, generator=g), index % CLASSES


def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    words = [words for words, _ in items]
    return (
        pad_sequence(words, batch_first=True),
        torch.tensor([len(w) for w in words]),
        torch.tensor([y for _, y in items]),
    )


class Stop(Exception):
    """The process dies here."""


def test_lengths_of_the_callers_collate_and_a_resumed_run(tmp_path: Path) -> None:
    def run(path: Path, die: int | None = None) -> bytes:
        torch.manual_seed(0)
        model = Reader(masked)
        plan = dpfy.dpsgd(RECORDS, 12, steps=6, clip_norm=1.0).with_noise(1.0, delta=1e-3)
        adam = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = DataLoader(Sentences(), batch_size=12, collate_fn=collate)
        mine = dpfy.Run(path, seed=1, resume=True, checkpoint_every=0.0)
        with dpfy.PrivateTraining(
            model, adam, loader, plan, mine, runtime=dpfy.Runtime(max_physical_batch=8)
        ) as training:
            for batch in training.batches():
                training.step(plain(model, *batch))
                if training.steps_done == die:
                    raise Stop
        return (path / "model.safetensors").read_bytes()

    whole = run(tmp_path / "whole")
    for die in (1, 4):
        with pytest.raises(Stop):
            run(tmp_path / "cut", die)
    assert run(tmp_path / "cut") == whole
