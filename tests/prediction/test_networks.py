"""Voters that are networks: trained as one batched model, each on its own part; one unit moves one
vote.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).parent))

from electorate import SECRET, records

from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.models.config import ModelConfig
from dpfy.prediction import PrivatePredictor, plan
from dpfy.prediction.networks import NetworkTraining, NetworkVoters, _by_voter, teach_networks
from dpfy.prediction.voters import load_voters, network_training, shards
from dpfy.runs.run import Run

X, Y = records(120, seed=3)
ASKED = records(20, seed=4)[0]
MLP = NetworkTraining(ModelConfig("mlp", hidden=(8,)), steps=12, batch_size=5, learning_rate=0.5)
VOTERS = 10


def taught(
    x=X, y=Y, training: NetworkTraining = MLP, voters: int = VOTERS, **more
) -> NetworkVoters:
    return teach_networks(
        x, y, voters=voters, classes=4, training=training, randomness=SECRET, **more
    )


def test_each_voter_is_what_a_loop_over_its_own_records_makes():
    """Also with the order of the minibatches: a permutation of its own records, gone through again
    and again.
    """
    found, places = taught(), shards(len(X), VOTERS, SECRET)
    key = np.frombuffer(SECRET.key("local", 0), dtype=np.uint64)
    for voter in (0, 3, 9):
        x, y = torch.from_numpy(X[places == voter]), torch.from_numpy(Y[places == voter])
        order = np.random.Generator(
            np.random.Philox(key=key, counter=[0, 0, 0, voter])
        ).permutation(len(x))
        weights = {name: p.detach().clone() for name, p in MLP.begun((6,), 4).named_parameters()}
        for step in range(12):
            held = {name: w.requires_grad_() for name, w in weights.items()}
            rows = order[np.arange(5 * step, 5 * step + 5) % len(x)]
            loss = nn.functional.cross_entropy(
                functional_call(found.model, held, (x[rows],)), y[rows]
            )
            moves = torch.autograd.grad(loss, list(held.values()))
            weights = {
                name: (w - 0.5 * g).detach()
                for (name, w), g in zip(held.items(), moves, strict=True)
            }
        for name, due in weights.items():
            assert found.weights[name][voter] == pytest.approx(due.numpy(), abs=1e-5)


def test_one_unit_moves_one_vote_and_changes_no_other_voter():
    whole, places = taught(), shards(len(X), VOTERS, SECRET)
    before = whole.votes(ASKED)
    assert (before.sum(axis=1) == VOTERS).all()
    assert (
        before.argmax(axis=1) == ASKED.argmax(axis=1)
    ).mean() > 0.6  # they have learnt something
    for unit in range(119, 0, -17):
        wild, label = X.copy(), Y.copy()
        wild[unit], label[unit] = 50.0, 3
        for other in (
            taught(X[:unit], Y[:unit]) if unit == 119 else taught(wild, label),
            taught(wild, label),
        ):
            assert np.abs(other.votes(ASKED) - before).sum(axis=1).max() <= 2
            same = np.arange(VOTERS) != places[unit]
            assert all(
                torch.equal(w[same], whole.weights[name][same]) for name, w in other.weights.items()
            )


def test_records_of_an_owner_are_known_to_one_voter():
    owners = np.arange(120) // 4
    whole, without = taught(owners=owners), owners != 11
    other = taught(X[without], Y[without], owners=owners[without])
    place = shards(120, VOTERS, SECRET, owners)[44]
    changed = {
        k
        for k in range(VOTERS)
        for name, w in other.weights.items()
        if not torch.equal(w[k], whole.weights[name][k])
    }
    assert changed == {place}


def test_the_shape_of_the_computation_does_not_follow_the_records():
    """With fewer records than a minibatch has places, and with voters that have none."""
    before = taught(X[:0], Y[:0])
    for count in range(1, 9):
        after, same = (
            taught(X[:count], Y[:count]),
            np.arange(VOTERS) != shards(count, VOTERS, SECRET)[-1],
        )
        assert all(
            torch.equal(w[same], before.weights[name][same]) for name, w in after.weights.items()
        )
        before = after
    for count in (0, 3, 8):
        assert _by_voter(X[:count], Y[:count], shards(count, VOTERS, SECRET), VOTERS, 5).tensors[
            0
        ].shape == (VOTERS, 5, 6)
    none = taught(X[:0], Y[:0])
    assert (none.votes(np.zeros((1, 6), np.float32))[0] == [VOTERS, 0, 0, 0]).all()


@pytest.mark.parametrize("name", ["lenet5", "tanh-cnn"])
def test_votes_are_those_of_each_network_alone(name):
    rng = np.random.default_rng(1)
    x, y = rng.random((30, 1, 28, 28)).astype(np.float32), rng.integers(0, 4, 30)
    held = taught(
        x, y, NetworkTraining(ModelConfig(name), steps=2, batch_size=4, learning_rate=0.3), voters=3
    )
    asked = rng.random((5, 784)).astype(np.float32)
    due = np.zeros((5, 4), int)
    for voter in range(3):
        scores = functional_call(
            held.model,
            {n: w[voter] for n, w in held.weights.items()},
            torch.from_numpy(asked).view(5, 1, 28, 28),
        )
        for row, said in enumerate(scores.argmax(1).tolist()):
            due[row, said] += 1
    assert (held.votes(asked) == due).all()
    assert (held.count, held.classes, held.features) == (3, 4, 784)


def test_a_module_of_ones_own_is_left_as_it_was_and_needs_no_chain():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    torch.manual_seed(0)
    model = Twice()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    held = taught(training=NetworkTraining(model, steps=3, batch_size=5))
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    assert (held.votes(ASKED).sum(axis=1) == VOTERS).all()
    with pytest.raises(Unsupported, match="by name"):
        held.save(Path("nowhere"))
    with pytest.raises(Unsupported, match="statistics"):
        taught(training=NetworkTraining(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))))


def test_networks_are_kept_as_private_files_and_answer_what_is_paid_for(tmp_path):
    held = taught()
    held.save(tmp_path / "v", labels=["a", "b", "c", "d"])
    for file in (tmp_path / "v").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600
    again, about = load_voters(tmp_path / "v")
    assert isinstance(again, NetworkVoters)
    assert about["labels"] == ["a", "b", "c", "d"]
    assert again.fingerprint() == held.fingerprint() != taught(X[:-1], Y[:-1]).fingerprint()
    claim = plan.gaussian(8.0, 1e-6, voters=VOTERS, classes=4, answers=3)
    with PrivatePredictor(Run(tmp_path / "run", seed=1), claim, again) as predictor:
        told = predictor.answer_all(ASKED[:4])
        assert [answer.label is None for answer in told] == [False, False, False, True]
    content = (tmp_path / "v" / "voters.safetensors").read_bytes()
    (tmp_path / "v" / "voters.safetensors").write_bytes(content[:-1] + b"x")
    with pytest.raises(Corrupt, match="voters"):
        load_voters(tmp_path / "v")


def test_what_cannot_be_trained_is_refused_in_one_line():
    for training, message in (
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"device": "abacus"}, "device"),
    ):
        with pytest.raises(InvalidInput, match=message):
            NetworkTraining(**training)
    with pytest.raises(InvalidInput, match="numbers to be held"):
        taught(
            np.zeros((3, 2000), np.float32),
            np.zeros(3, int),
            NetworkTraining(ModelConfig("linear"), batch_size=20_000),
        )
    with pytest.raises(Unsupported, match="scattered features"):
        taught(training=NetworkTraining(ModelConfig("scattering-linear")))
    with pytest.raises(InvalidInput, match="goes with a network"):
        network_training("class-means", {"steps": 3})
    with pytest.raises(InvalidInput, match="must be one of"):
        network_training("resnet", {})
    made = network_training("mlp", {"steps": 3})
    assert made is not None
    assert made.steps == 3
