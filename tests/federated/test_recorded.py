"""Local steps as graphs: the same updates as step by step, for any cohort and any weights. On a CPU
a stand-in takes a graph's place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.randomness import Randomness
from dpfy.data.users import UserRecords
from dpfy.federated import LocalTraining, LocalUpdates
from dpfy.federated.local import RecordedSteps
from dpfy.gradients.cuda_graphs.graphs import CudaGraph
from dpfy.training.objective import Objective

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
    ),
]
LOCALS = [
    LocalTraining(5, 4, 0.3),
    LocalTraining(3, None, 0.5),
    LocalTraining(4, 2, method="fedsgd"),
]


class Repeating:
    """Does its work when it is replayed, and not before; counts how often."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.replays = work, 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class Repetitions:
    """Stands where a pool of graphs does."""

    def __init__(self) -> None:
        self.made: list[Repeating] = []

    def record(
        self, work: Callable[[], Any], device: torch.device, addresses: int
    ) -> tuple[Repeating, None]:
        self.made.append(Repeating(work))
        return self.made[-1], None


def clients(device: str, users: int = 40, most: int = 9) -> UserRecords:
    rng = np.random.default_rng(2)
    owners = np.concatenate([np.full(1 + user % most, user) for user in range(users)])
    x = torch.from_numpy(rng.normal(size=(len(owners), 1, 6, 6)))
    return dpfy.by_user((x, torch.from_numpy(rng.integers(0, 4, len(owners)))), owners, most).to(
        device
    )


def tiling(device: str) -> nn.Module:
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(27, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )
    return nn.Sequential(*layers).double().to(device)


def folding(device: str) -> nn.Module:
    torch.manual_seed(1)
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.GELU(),
        nn.Linear(8, 4),
    )
    return nn.Sequential(*layers).double().to(device)


def both(
    model: nn.Module, local: LocalTraining, device: str, loss: Any = "cross_entropy"
) -> tuple[LocalUpdates, LocalUpdates]:
    """By graphs, and client by client."""
    secret, data = Randomness.for_tests(4), clients(device)
    recorded, alone = (
        LocalUpdates(model, data, replace(local, way=way, at_once=64), Objective(loss), secret)
        for way in ("batched", "loop")
    )
    if device == "cpu":
        recorded._recorded = RecordedSteps(recorded._step, Repetitions())  # type: ignore[arg-type]
    return recorded, alone


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [tiling, folding])
@pytest.mark.parametrize("local", LOCALS, ids=str)
def test_any_cohort_at_any_weights_gets_the_updates_of_each_by_itself(device, model, local):
    net = model(device)
    recorded, alone = both(net, local, device)
    assert recorded._recorded is not None
    rng, given = np.random.default_rng(5), []
    sent = {name: p.detach().clone() for name, p in net.named_parameters()}
    kept = recorded._recorded(
        sent, torch.arange(9, device=device), *recorded._minibatches(0, np.arange(9))
    )
    copies = {name: rows.clone() for name, rows in kept.items()}
    for step, size in enumerate((30, 29, 1, 40, 30, 0, 9)):
        who = np.sort(rng.permutation(40)[:size])
        given.append((recorded(step, who), alone(step, who)))
        with torch.no_grad():  # what graphs were recorded with is not what they are to read
            for p in net.parameters():
                p.mul_(0.9)
    assert all(map(torch.equal, kept.values(), copies.values()))
    for found, expected in given:  # after all rounds: none overwrote what another had given
        for name, rows in expected.items():
            assert found[name].shape == rows.shape
            if len(rows):
                assert float((found[name] - rows).abs().max()) < 1e-9 * max(
                    1.0, float(rows.abs().max())
                )


@pytest.mark.parametrize("device", DEVICES)
def test_a_round_that_is_made_again_gives_the_same_bits(device):
    """Also as the first round of a resumed run, for which nothing is recorded yet."""
    who = np.arange(25)
    first, again = (
        both(tiling(device), LOCALS[0], device)[0],
        both(tiling(device), LOCALS[0], device)[0],
    )
    first(0, who)
    before, after = first(1, who), again(1, who)
    assert all(map(torch.equal, before.values(), after.values()))


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_poisoned_client_computes_stays_with_it(device):
    recorded, _ = both(tiling(device), LOCALS[0], device)
    who, clean = np.arange(20), both(tiling(device), LOCALS[0], device)[0]
    expected = clean(0, who)
    recorded._fields[0][19] = float("nan")  # the last, which also fills the cohort up
    found = recorded(0, who)
    assert all(torch.equal(found[name][:19], rows[:19]) for name, rows in expected.items())
    assert not all(rows[19].isfinite().all() for rows in found.values())
    recorded._fields[0][19] = clients(device).tensors[0][19]
    assert all(map(torch.equal, recorded(0, who).values(), expected.values()))  # and with its round


def test_a_graph_serves_all_cohorts_of_about_its_size():
    pool = Repetitions()
    recorded, _ = both(tiling("cpu"), LOCALS[0], "cpu")
    recorded._recorded = RecordedSteps(recorded._step, pool)  # type: ignore[arg-type]
    for step, size in enumerate((25, 31, 32, 26, 33, 40)):
        recorded(step, np.arange(size))
    assert [graph.replays for graph in pool.made] == [4 * 5, 2 * 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_losses_by_name_are_recorded_and_functions_of_the_caller_are_called(monkeypatch):
    replays, calls = [], []
    replay = CudaGraph.replay
    monkeypatch.setattr(CudaGraph, "replay", lambda graph: replays.append(graph) or replay(graph))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(len(outputs))
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    recorded, _ = both(tiling("cuda"), LOCALS[0], "cuda")
    called, _ = both(tiling("cuda"), LOCALS[0], "cuda", loss)
    mine, theirs = (updates(0, np.arange(25)) for updates in (recorded, called))
    assert len(replays) == len(calls) == 5
    assert all(float((mine[name] - theirs[name]).abs().max()) < 1e-9 for name in mine)
