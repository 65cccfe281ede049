"""Flower's SecAgg+ under plans whose noise comes in shares: the sum is exact, dropouts are
survived, nothing else is shown.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import dpfy
from dpfy.federated.shares import SharingScheme, TooFew
from dpfy.federated.shares import plan as plan_of_shares
from dpfy.integrations.flower import secure_mod
from dpfy.integrations.flower.secure import SecAggPlus
from dpfy.integrations.flower.secure_client import scheme_of, terms_of

sys.path.insert(0, str(Path(__file__).parent))
import federation
from federation import Federation, train

pytestmark = pytest.mark.filterwarnings("ignore")


def planned(clients=6, least=3, rounds=2, epsilon=8.0):
    about = {
        "clients": clients,
        "dimension": 8,
        "rounds": rounds,
        "epsilon": epsilon,
        "delta": 1e-2,
        "least": least,
    }
    return plan_of_shares(**about, clip_norm=1.0, bits=20, rotation=1)


def app(moves=lambda part: 0.05 * (part + 1), seen=None):
    made = ClientApp(mods=[secure_mod])

    @made.train()
    def fit(message, context):
        part = int(context.node_config["partition-id"])
        arrays = {
            name: Array((a.numpy() - moves(part)).astype(np.float32))
            for name, a in message.content["arrays"].items()
        }
        content = {
            "arrays": ArrayRecord(arrays),
            "metrics": MetricRecord({"loss": 1.0, "num-examples": 77}),
        }
        return Message(RecordDict(content), reply_to=message)

    return made


class Dropping(Federation):
    """Nodes that vanish at a stage of the protocol: {partition: stage}."""

    def __init__(self, app, nodes, gone=None):
        super().__init__(app, nodes)
        self.gone, self.seen, self.replies = gone or {}, [], []

    def push_messages(self, messages):
        messages = list(messages)
        self.seen += [stage_of(message) for message in messages]
        stages = {message.metadata.dst_node_id: stage_of(message) for message in messages}
        keys = super().push_messages(messages)
        self.replies += [self._replies[key][0] for key in keys]
        for key, node in zip(keys, [m.metadata.dst_node_id for m in messages], strict=True):
            if stages[node] is not None and self.gone.get(self.nodes[node]) == stages[node]:
                reply = self._replies[key][0]
                answered = Message(RecordDict(), dst_node_id=node, message_type="train")
                answered.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
                self._replies[key] = [Message(Error(0, "gone"), reply_to=answered)]
        return keys


def stage_of(message):
    held = message.content.config_records.get("secaggplus_configs")
    return None if held is None else held.get("stage")


def test_the_terms_that_clients_get_are_the_scheme():
    made = planned()
    scheme = SharingScheme(made.recipe.strategy, 1.0, made.noise_multiplier)
    assert scheme_of(terms_of(scheme, ["weight"], 3)) == scheme


def protocol_of(grid, made, folder):
    """A protocol that is ready for its first round, and the scheme of the plan."""
    scheme, protocol = (
        SharingScheme(made.recipe.strategy, 1.0, made.noise_multiplier),
        SecAggPlus(grid, 0.05),
    )
    arrays = ArrayRecord(
        {"weight": Array(np.zeros((2, 3), np.float32)), "bias": Array(np.zeros(2, np.float32))}
    )

    def content():
        return RecordDict({"arrays": arrays, "dpfy": terms_of(scheme, ["weight", "bias"], 0)})

    protocol.prepare({part: 1000 + part for part in range(6)}, content, folder)
    return protocol, scheme


@pytest.mark.parametrize(
    "gone", [{}, {1: "collect_masked_vectors"}, {4: "unmask"}, {0: "setup"}, {5: "share_keys"}]
)
def test_the_sum_is_that_of_the_messages(gone, monkeypatch, tmp_path):
    """Every client's whole numbers are seen here; the protocol must show their sum modulo 2^bits,
    to the last bit.
    """
    encoded, encode = [], SharingScheme.encode
    monkeypatch.setattr(
        SharingScheme,
        "encode",
        lambda *given: encoded.append((given[1], encode(*given))) or encoded[-1][1],
    )
    grid = Dropping(app(), 6, gone)
    protocol, scheme = protocol_of(grid, planned(), tmp_path)
    found = protocol.sum(dict.fromkeys(range(6)), bits=20, least=3, round=0)
    moves = {round(float(vector[0]) / 0.05) - 1: message for vector, message in encoded}
    assert found.survivors == {part for part in moves if gone.get(part) != "collect_masked_vectors"}
    assert len(found.survivors) == 6 - (gone != {} and gone != {4: "unmask"})
    expected = sum(int_of(moves[part]) for part in found.survivors) % (1 << 20)
    np.testing.assert_array_equal(found.total.astype(np.int64), expected)
    noise = scheme.decode(found.total, 0) - sum(0.05 * (part + 1) for part in found.survivors)
    assert 1e-3 < np.abs(noise).mean() < 20 * scheme.stddev


def int_of(message):
    return message.astype(np.int64)


def test_too_few_show_nothing(tmp_path):
    grid = Dropping(app(), 6, {0: "collect_masked_vectors", 1: "collect_masked_vectors"})
    protocol, _ = protocol_of(grid, planned(least=5), tmp_path)
    with pytest.raises(TooFew):
        protocol.sum(dict.fromkeys(range(6)), bits=20, least=5, round=0)
    assert "unmask" not in grid.seen


def test_a_client_adds_its_noise_and_sends_the_same_bits_again(tmp_path):
    grid = Dropping(app(moves=lambda part: 0.0), 6)
    protocol, _ = protocol_of(grid, planned(), tmp_path)
    first, again = (
        protocol.sum(dict.fromkeys(range(6)), bits=20, least=3, round=0).total for _ in range(2)
    )
    assert first.any()
    np.testing.assert_array_equal(first, again)


def test_terms_below_the_protocol_are_not_answered(tmp_path):
    """A server whose protocol would unmask fewer clients than its terms count on gets no update."""
    grid = Dropping(app(), 6)
    protocol, _ = protocol_of(grid, planned(least=5), tmp_path)
    with pytest.raises(TooFew):
        protocol.sum(dict.fromkeys(range(6)), bits=20, least=3, round=0)


def test_what_the_server_sees_of_a_client_is_not_its_message(monkeypatch, tmp_path):
    encoded, encode = [], SharingScheme.encode
    monkeypatch.setattr(
        SharingScheme, "encode", lambda *given: encoded.append(encode(*given)) or encoded[-1]
    )
    grid = Dropping(app(), 6)
    protocol, _ = protocol_of(grid, planned(), tmp_path)
    protocol.sum(dict.fromkeys(range(6)), bits=20, least=3, round=0)
    masked = [
        r
        for r in grid.replies
        if r.has_content() and "masked_params" in r.content.config_records["secaggplus_configs"]
    ]
    assert len(masked) == 6
    for reply in masked:
        assert set(reply.content.metric_records["fitres.num_examples"].values()) == {1}
        assert all(not record for record in reply.content.array_records.values())
        shown = np.load(
            io.BytesIO(reply.content.config_records["secaggplus_configs"]["masked_params"][1])
        )
        assert not any((shown == message).mean() > 0.5 for message in encoded)


def test_a_run_over_the_protocol_with_a_dropout(tmp_path):
    grid = Dropping(app(), 6, {2: "collect_masked_vectors"})
    made, weights = train(tmp_path / "run", grid, planned(), identity="partition-id")
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["guarantee"]["trust"] == "distributed"
    assert "seeds of 32 bits" in json.dumps(card["sections"])
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert [report.silent for report in made.reports] == [(2,), (2,)]
    start = np.concatenate([p.detach().numpy().ravel() for p in federation.model().parameters()])
    assert np.isfinite(weights).all()
    assert not np.array_equal(start, weights)


def test_a_round_that_a_killed_server_had_asked_for_is_not_asked_for_again(tmp_path):
    class Killed(BaseException):
        pass

    def push(messages):
        if any(stage_of(m) == "unmask" for m in messages):
            raise Killed

    grid = Dropping(app(), 6)
    grid.on_push = push
    with pytest.raises(Killed):
        train(tmp_path / "run", grid, planned(), identity="partition-id")
    grid = Dropping(app(), 6)
    made, _ = train(tmp_path / "run", grid, planned(), identity="partition-id")
    assert grid.seen.count("collect_masked_vectors") == 6  # of the second round alone
    assert len(made.reports) == 2
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
