"""Private rounds under Flower: billed before a message leaves, bounded whatever comes back, resumed
to the bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

import dpfy
from dpfy import accounting
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.federated import CLIENT, PrivateRounds
from dpfy.integrations.flower import PrivateFedAvg
from dpfy.report import verify as verification

sys.path.insert(0, str(Path(__file__).parent))
import federation
from federation import Federation, client_app, plan, train

pytestmark = pytest.mark.filterwarnings("ignore")


def epsilon_of(folder) -> float:
    return json.loads((folder / "privacy.json").read_text())["guarantee"]["epsilon"]


def verified(folder) -> bool:
    return all(f.holds for f in verification.verify(folder))


def changed(reply: Message, change) -> Message:
    """The reply with its arrays put through `change`."""
    arrays = {name: Array(change(a.numpy())) for name, a in reply.content["arrays"].items()}
    return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=_answered(reply))


def _answered(reply: Message) -> Message:
    message = Message(RecordDict(), dst_node_id=reply.metadata.src_node_id, message_type="train")
    message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return message


def by_hand(folder, planned, update_of):
    """The same rounds without Flower."""
    net = federation.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with PrivateRounds(net, optimizer, planned, dpfy.Run(folder, seed=7), device="cpu") as rounds:
        for cohort in rounds.cohorts():
            for client in cohort.clients:
                moved = update_of(int(client), cohort.step + 1)
                if moved is not None:
                    cohort.add(int(client), [-torch.full_like(p, moved) for p in net.parameters()])
    return np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])


def test_the_rounds_are_those_of_the_private_loop(tmp_path):
    planned = plan(expected=3, rounds=4, clip=5.0, noise=0.5)
    _, weights = train(tmp_path / "flower", planned=planned)
    expected = by_hand(tmp_path / "hand", planned, lambda client, number: 0.1 * (client + 1))
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    assert verified(tmp_path / "flower")
    assert "client" in json.dumps(
        json.loads((tmp_path / "flower" / "privacy.json").read_text())["guarantee"]
    )


def test_the_plan_is_in_the_ledger_before_a_message_leaves(tmp_path):
    seen = []
    grid = Federation(client_app(), 5)

    def look(messages):
        permits = Ledger.read(tmp_path / "people.jsonl").permits()
        seen.append([p.name.split()[0] for p in permits])

    grid.on_push = look
    made = federation.strategy(tmp_path / "run", plan())
    made.run = dpfy.Run(tmp_path / "run", seed=7, ledger=tmp_path / "people.jsonl")
    made.start(grid, ArrayRecord(made.model.state_dict()), timeout=0.05)
    assert seen == [["training"]] * 3


@pytest.mark.parametrize("lost", [False, True])
def test_the_federated_tutorial_is_billed_tightly(tmp_path, lost):
    """3,383 clients, 120 a round, noise 1.2, 100 rounds, delta 1e-5: billed whole before the first
    message, whoever answers.
    """
    planned = plan(3383, 120, rounds=100, noise=1.2, delta=1e-5)
    made = federation.strategy(tmp_path / "run", planned)
    grid = Federation(client_app(), 3383, meddle=(lambda part, reply: []) if lost else None)
    grid.on_push = stop_after(grid, 2)
    with pytest.raises(KeyboardInterrupt):
        made.start(grid, ArrayRecord(made.model.state_dict()), timeout=0.01)
    reserved = Ledger.read(tmp_path / "run" / "ledger.jsonl").event()
    assert accounting.epsilon(reserved, 1e-5) == pytest.approx(1.7075, abs=1e-3)
    assert 150 <= len(grid.asked) <= 350


@pytest.mark.slow
def test_the_federated_tutorial_in_full(tmp_path):
    planned = plan(3383, 120, rounds=100, noise=1.2, delta=1e-5)
    made, _ = train(tmp_path / "run", planned=planned)
    assert epsilon_of(tmp_path / "run") == pytest.approx(1.7075, abs=1e-3)
    assert verified(tmp_path / "run")
    assert not any(report.troubles for report in made.reports)


def stop_after(grid, rounds):
    made = []

    def push(messages):
        made.append(1)
        if len(made) > rounds:
            raise KeyboardInterrupt

    return push


def test_who_is_chosen_by_flower_is_billed_without_amplification(tmp_path):
    planned = plan(20, 4, rounds=3)
    train(tmp_path / "ours", planned=planned)
    chosen = FedAvg(
        fraction_train=0.2, fraction_evaluate=0.0, min_train_nodes=4, min_available_nodes=4
    )
    theirs, _ = train(tmp_path / "theirs", planned=planned, sampling=chosen)
    assert all(len(report.drawn) == 4 for report in theirs.reports)
    train(tmp_path / "all", planned=plan(20, 20, rounds=3))
    assert epsilon_of(tmp_path / "theirs") == pytest.approx(epsilon_of(tmp_path / "all"), rel=1e-3)
    assert epsilon_of(tmp_path / "ours") < 0.8 * epsilon_of(tmp_path / "theirs")
    assert "chosen by the strategy FedAvg" in (tmp_path / "theirs" / "privacy.json").read_text()
    assert verified(tmp_path / "theirs")


def test_weights_by_the_number_of_examples_do_not_exist(tmp_path):
    sent = []
    grid = Federation(client_app(), 5, meddle=lambda part, reply: sent.append(reply) or [reply])
    train(tmp_path / "run", grid)
    for reply in sent:
        assert set(reply.content) == {"arrays", "metrics"}
        assert dict(reply.content["metrics"]) == {"num-examples": 1}


def norm_of_update(weights) -> float:
    start = np.concatenate([p.detach().numpy().ravel() for p in federation.model().parameters()])
    return float(np.linalg.norm(weights - start))


HUGE = {
    "huge": lambda a: (a + 1e10).astype(np.float32),
    "beyond float32": lambda a: a.astype(np.float64) + 1e300,
    "nan": lambda a: a * np.float32("nan"),
    "infinite": lambda a: a + np.float32("inf"),
}


@pytest.mark.parametrize("kind", HUGE)
def test_hostile_updates_are_bounded(tmp_path, kind):
    """One of five clients sends nonsense, past its mod: the model moves no further than without it,
    by more than clip / cohort.
    """
    planned = plan(rounds=1, noise=1e-3, delta=0.01)

    def meddle(part, reply):
        return [changed(reply, HUGE[kind]) if part == 2 else reply]

    grid = Federation(client_app(move=lambda part, number: 0.0), 5, meddle)
    made, weights = train(tmp_path / "run", grid, planned)
    assert norm_of_update(weights) < 1 / 5 + 0.01
    assert made.reports[0].unusable == (() if kind == "huge" else (2,))


def wrong(reply, arrays):
    return Message(
        RecordDict({"arrays": ArrayRecord({k: Array(v) for k, v in arrays.items()})}),
        reply_to=_answered(reply),
    )


STRANGE = {
    "another shape": lambda r: wrong(
        r, {"weight": np.zeros((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    ),
    "another name": lambda r: wrong(
        r, {"weights": np.zeros((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
    ),
    "one array less": lambda r: wrong(r, {"weight": np.zeros((2, 3), np.float32)}),
    "one array more": lambda r: wrong(
        r, {k: a.numpy() for k, a in r.content["arrays"].items()} | {"more": np.zeros(1)}
    ),
    "other order": lambda r: wrong(
        r, {"bias": np.zeros(2, np.float32), "weight": np.zeros((2, 3), np.float32)}
    ),
    "text": lambda r: wrong(r, {"weight": np.full((2, 3), "x"), "bias": np.zeros(2, np.float32)}),
    "complex": lambda r: wrong(r, {"weight": np.full((2, 3), 1j), "bias": np.zeros(2, np.float32)}),
    "a lie about its shape": lambda r: _lying(r, (3, 2)),
    "a lie about its size": lambda r: _lying(r, (200, 300)),
    "no arrays": lambda r: Message(
        RecordDict({"metrics": MetricRecord({"a": 1})}), reply_to=_answered(r)
    ),
    "two records": lambda r: Message(
        RecordDict({"arrays": r.content["arrays"], "again": r.content["arrays"]}),
        reply_to=_answered(r),
    ),
}


def _lying(reply, shape):
    bomb = Array(np.zeros(shape))
    bomb = Array(dtype="float32", shape=(2, 3), stype="numpy.ndarray", data=bomb.data)
    record = ArrayRecord({"weight": bomb, "bias": Array(np.zeros(2, np.float32))})
    return Message(RecordDict({"arrays": record}), reply_to=_answered(reply))


@pytest.mark.parametrize("kind", STRANGE)
def test_an_update_of_another_shape_is_refused_and_counts_as_zero(tmp_path, kind):
    planned = plan(rounds=1, clip=5.0, noise=0.1)
    grid = Federation(
        client_app(), 5, lambda part, reply: [STRANGE[kind](reply) if part == 1 else reply]
    )
    made, weights = train(tmp_path / "run", grid, planned)
    assert list(made.reports[0].refused) == [1]
    expected = by_hand(
        tmp_path / "hand", planned, lambda client, _: None if client == 1 else 0.1 * (client + 1)
    )
    np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_lost_and_repeated_replies_count_as_zero_and_once(tmp_path):
    planned = plan(rounds=2, clip=5.0, noise=0.1)

    def meddle(part, reply):
        return {
            0: [],
            1: [reply, reply, reply],
            2: [Message(Error(0, "gone"), reply_to=_answered(reply))],
        }.get(part, [reply])

    made, weights = train(tmp_path / "run", Federation(client_app(), 5, meddle), planned)
    expected = by_hand(
        tmp_path / "hand",
        planned,
        lambda client, _: None if client in (0, 2) else 0.1 * (client + 1),
    )
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    for report in made.reports:
        assert (report.silent, report.repeated, list(report.failed)) == ((0,), [1, 1], [2])
        assert report.troubles == ("silent", "failed", "repeated")


def test_a_reply_of_a_node_that_was_not_asked_is_nothing(tmp_path):
    planned = plan(rounds=1, clip=5.0, noise=0.1)
    grid = Federation(client_app(), 5)

    def meddle(part, reply):
        forged = changed(reply, lambda a: a + np.float32(4))
        forged.metadata.__dict__["_src_node_id"] = 999
        return [forged, reply]

    grid.meddle = meddle
    made, weights = train(tmp_path / "run", grid, planned)
    assert made.reports[0].strange == 5
    expected = by_hand(tmp_path / "hand", planned, lambda client, _: 0.1 * (client + 1))
    np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_one_person_with_two_nodes_is_one_client(tmp_path):
    grid = Federation(client_app(), 5)
    grid.nodes |= {2000: 3, 2001: 3}
    made, _ = train(tmp_path / "run", grid, identity="partition-id")
    asked = [node for node in grid.asked if node in (1003, 2000, 2001)]
    assert len(asked) == len(made.reports) == 3


def test_more_nodes_than_the_plan_counts_are_turned_away(tmp_path):
    grid = Federation(client_app(), 8)
    made, _ = train(tmp_path / "run", grid, plan(5, 5))
    assert set(grid.asked) == {1000, 1001, 1002, 1003, 1004}
    assert len(made._population.turned_away) == 3


def test_clients_that_are_not_connected_are_absent_and_billed(tmp_path):
    made, _ = train(tmp_path / "few", Federation(client_app(), 2), plan(5, 5))
    assert made.reports[0].absent == (2, 3, 4)
    train(tmp_path / "all", planned=plan(5, 5))
    assert epsilon_of(tmp_path / "few") == epsilon_of(tmp_path / "all")


class Killed(BaseException):
    """As a killed process: nothing is cleaned up."""


def test_a_killed_server_goes_on_to_the_same_bits(tmp_path):
    """Stopped when each message of each round leaves, in turn; numbers of clients, cohorts, sums
    and noise are what they were.
    """
    planned = plan(8, 4, rounds=6)
    _, undisturbed = train(tmp_path / "whole", planned=planned, identity="partition-id")
    for turn in range(20):
        grid, made = (
            Federation(client_app(), 8),
            federation.strategy(tmp_path / "cut", planned, identity="partition-id"),
        )
        grid.nodes = {
            node + 10 * turn: part for node, part in grid.nodes.items()
        }  # nodes come back under other numbers
        grid.on_push = _killing(1 + turn % 3)
        try:
            result = made.start(grid, ArrayRecord(federation.model().state_dict()), timeout=0.05)
        except Killed:
            continue
        break
    else:
        pytest.fail("the run did not end")
    assert turn >= 3
    np.testing.assert_array_equal(
        undisturbed, np.concatenate([a.numpy().ravel() for a in result.arrays.values()])
    )
    assert verified(tmp_path / "cut")
    assert epsilon_of(tmp_path / "cut") == epsilon_of(tmp_path / "whole")


def _killing(at):
    pushed = []

    def push(messages):
        pushed.append(1)
        if len(pushed) > at:
            raise Killed

    return push


def test_a_client_keeps_its_number_when_others_come(tmp_path):
    """Two of five are there before the server is killed, and come later in the order of names."""
    grid, planned = Federation(client_app(), 5), plan(5, 5, rounds=2)
    grid.nodes = {1003: 3, 1004: 4}
    grid.on_push = _killing(1)
    with pytest.raises(Killed):
        train(tmp_path / "run", grid, planned, identity="partition-id")
    made, _ = train(tmp_path / "run", Federation(client_app(), 5), planned, identity="partition-id")
    assert made._population.numbers == {"3": 0, "4": 1, "0": 2, "1": 3, "2": 4}


def test_connected_clients_are_not_asked_unless_they_were_drawn(tmp_path):
    made, _ = train(tmp_path / "run", planned=plan(40, 4, rounds=3))
    assert sum(len(report.drawn) for report in made.reports) < 40


def test_evaluation_on_clients_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="public data"):
        train(tmp_path / "run", start={"evaluate_config": ConfigRecord()})
    assert (
        list(
            federation.strategy(tmp_path / "x").configure_evaluate(
                1, ArrayRecord(), ConfigRecord(), None
            )
        )
        == []
    )


def test_other_rounds_than_planned_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="rounds of the plan"):
        train(tmp_path / "run", start={"num_rounds": 4})
    with pytest.raises(Unsupported, match="call start"):
        federation.strategy(tmp_path / "x").aggregate_train(1, [])


def test_a_plan_for_examples_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="client"):
        train(tmp_path / "run", planned=dpfy.dpsgd(5, 5, steps=1).with_noise(1.0, delta=0.01))


class WithBuffers(torch.nn.Module):
    """A frozen weight, and buffers of whole numbers and of truths beside a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear, self.frozen = (
            torch.nn.Linear(2, 1),
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
        )
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.linear(x * self.frozen * self.mask)


def test_only_what_is_trained_is_taken_from_clients(tmp_path):
    """Clients change everything that they are sent; with the default timeout of Flower, a whole
    number.
    """
    net = WithBuffers()
    made = PrivateFedAvg(net, plan(3, 3, rounds=1), tmp_path / "run", device="cpu")
    result = made.start(Federation(client_app(), 3), ArrayRecord(net.state_dict()), timeout=3600)
    assert not made.reports[0].troubles
    released = result.arrays.to_torch_state_dict()
    assert released["count"] == 7
    assert released["frozen"].tolist() == [1, 1]
    assert released["mask"].tolist() == [True, False]


def test_evaluate_fn_sees_each_model(tmp_path):
    seen = []
    train(tmp_path / "run", start={"evaluate_fn": lambda number, arrays: seen.append(number)})
    assert seen == [0, 1, 2, 3]


def test_no_client_is_named_in_the_folder_that_is_published(tmp_path):
    train(tmp_path / "run", identity="partition-id")
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert CLIENT.name == "client"
