"""The sum of a table by the rows in use: the same bits as the whole table, at every stage, and
every row gets its noise.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bound, Bounded, mock_permit
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.noise import gaussian, lattice
from dpfy.noise.strategy import Identity
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import SquareRoot
from dpfy.training import batches
from dpfy.training.integrity.guard import checksum

VOCABULARY, RECORDS = 200, 120


class Bag(nn.Module):
    """Mean of token embeddings, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 3)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index).mean(1))


def tokens(rows: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(0, 40, (rows, 7), generator=generator).square().clamp(max=VOCABULARY - 1)
    return index, torch.randint(0, 3, (rows,), generator=generator)


def table(
    rows: int, width: int, used: list[int], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A sum, whole and sparse."""
    values, whole = (
        torch.randn(len(used), width, dtype=dtype),
        torch.zeros(rows, width, dtype=dtype),
    )
    whole[used] = values
    where = torch.tensor(used, dtype=torch.long)[None]
    return whole, torch.sparse_coo_tensor(
        where, values, (rows, width), is_coalesced=True, check_invariants=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("chunk", "apart"), [(2, 4), (10, 20), (34, 1 << 16), (1 << 17, 1 << 16)])
def test_on_the_lattice(monkeypatch, dtype, chunk, apart):
    """PackedShapes of noise that begin and end anywhere in a table, and in several of its rows at
    once.
    """
    monkeypatch.setattr(gaussian, "CHUNK", chunk)
    monkeypatch.setattr(gaussian, "LARGE_CHUNK", chunk)
    monkeypatch.setattr(lattice, "APART", apart)
    rng = random.Random(chunk)
    torch.manual_seed(chunk)
    for step in range(20):
        pairs = {}
        for name in range(rng.randint(1, 4)):
            rows, width = rng.randint(1, 12), rng.randint(1, 9)
            whole = torch.randn(rng.randint(0, 40), dtype=dtype)
            used = sorted(rng.sample(range(rows), rng.randint(0, rows)))
            pairs[str(name)] = (
                table(rows, width, used, dtype) if rng.random() < 0.6 else (whole, whole.clone())
            )
        dense, sparse = ({name: pair[k] for name, pair in pairs.items()} for k in (0, 1))
        on = lattice.Lattice.of(0.7, dtype, rng.random() - 0.5)
        unit = gaussian.draw(sparse, Randomness.for_tests(1), "noise", step)
        drawn = {name: t.clone() for name, t in sparse.items()}
        for sums in (dense, sparse):
            gaussian.add_(sums, on, Randomness.for_tests(1), "noise", step, 3.0)
        gaussian.add_drawn_(drawn, unit, on, 3.0)
        for name in dense:
            assert torch.equal(dense[name], sparse[name])
            torch.testing.assert_close(
                drawn[name], dense[name], rtol=0, atol=on.step / 3 * 1.001
            )  # a step, by rounding


@pytest.mark.parametrize("scale", [0.0, 1.3])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("strategy", "exact"), [(Identity(), False), (SquareRoot(), False), (Identity(), True)]
)
def test_release(strategy, exact, scale, in_place):
    whole, sparse = table(30, 4, [3, 4, 29])
    kept = sparse.to_dense().clone()
    stream = NoiseStream(
        strategy, scale, Randomness.for_tests(2), divisor=7.0, in_place=in_place, exact=exact
    )
    found = []
    for value in (whole, sparse):
        sums = {"t": value, "b": torch.ones(5)}
        found.append(
            stream.release(
                Bounded(sums, Bound(1.0)), 0, stream.init(sums), mock_permit(stream.event, 4)
            )[0].value
        )
    assert torch.equal(found[0]["t"], found[1]["t"])
    assert not found[1]["t"].is_sparse
    assert bool((found[1]["t"] != 0).all()) or not scale
    if not in_place:
        assert torch.equal(sparse.to_dense(), kept)


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_engine_says_which_rows(spoilt):
    model, (x, y) = Bag(), tokens(20)
    mask, sums = torch.arange(20) % 5 != 0, {}
    for sparse in (False, True):
        engine = BookkeepingEngine(sparse=sparse)
        engine.attach(model)
        for _ in range(2):
            losses = F.cross_entropy(model(x), y, reduction="none")
            losses = (
                losses * torch.where(torch.arange(20) == 7, torch.inf, 1.0) if spoilt else losses
            )
            sums[sparse] = engine.bounded_sum(losses, FlatClip(0.1), mask).value
        engine.detach()
    assert sums[True]["table.weight"].is_sparse
    assert sums[True]["table.weight"].is_coalesced()
    assert sums[True]["table.weight"]._nnz() < VOCABULARY / 2
    for name, total in sums[False].items():
        assert torch.equal(sums[True][name].to_dense(), total)


def trained(folder, monkeypatch, sparse: bool, most: int) -> list[Tensor]:
    torch.manual_seed(0)
    model, seen = Bag(), []
    plan = dpfy.dpsgd(RECORDS, 24, steps=6).with_noise(1.0, delta=1e-5)
    sgd, runtime = (
        torch.optim.SGD(model.parameters(), lr=0.5),
        dpfy.Runtime(max_physical_batch=most),
    )
    add = batches.GradAccumulator.add
    with monkeypatch.context() as patch:
        patch.setattr(
            batches.GradAccumulator,
            "add",
            lambda self, part, keep=True: (seen.append(part), add(self, part, keep))[1],
        )
        with dpfy.PrivateTraining(
            model, sgd, tokens(), plan, dpfy.Run(folder, seed=3), runtime=runtime
        ) as training:
            training.engine._sparse = sparse
            for x, y in training.batches():
                training.step(F.cross_entropy(model(x), y, reduction="none"))
    assert any(part["table.weight"].is_sparse for part in seen) is sparse
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("most", [4096, 5])
def test_a_run_ends_with_the_same_weights(tmp_path, monkeypatch, most):
    """Also where a logical batch has several parts, which are added up."""
    found = [trained(tmp_path / str(sparse), monkeypatch, sparse, most) for sparse in (False, True)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_checksum_sees_rows_and_places():
    _, sparse = table(30, 4, [3, 4, 29])
    other = copy.deepcopy(sparse)
    other.values()[1, 2] += 1
    _, moved = table(30, 4, [3, 5, 29])
    moved.values().copy_(sparse.values())
    assert len({int(checksum([t])) for t in (sparse, other, moved)}) == 3
    assert int(checksum([sparse])) == int(checksum([sparse.clone()]))
