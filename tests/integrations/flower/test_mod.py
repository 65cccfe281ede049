"""What leaves a client: a bounded update, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.user_config import UserConfig
from flwr.supercore.task_identity import TaskIdentity

from dpfy.integrations.flower import private_mod

SENT = {
    "a": np.ones((2, 2), np.float32),
    "n": np.array(7),
    "b": np.zeros(3),
    "mean": np.zeros(2, np.float32),
}


def answered(trained=None, clip=0.0, kind="train", terms=True, fail=None, extra=None, name=None):
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    content = {
        "arrays": ArrayRecord({k: Array(v) for k, v in SENT.items()}),
        "config": ConfigRecord({"lr": 0.1}),
    }
    if terms:
        content["dpfy"] = ConfigRecord(
            {"clip": clip, "trainable": ["a", "b"]} if name is None else {"name": name}
        )

    def app(message, context):
        assert "dpfy" not in message.content
        if fail:
            raise ValueError(fail)
        arrays = SENT | (trained or {})
        records = {"arrays": ArrayRecord({k: Array(np.asarray(v)) for k, v in arrays.items()})}
        records["metrics"] = MetricRecord({"train_loss": 0.25, "num-examples": 12345})
        return Message(RecordDict(records | (extra or {})), reply_to=message)

    message = Message(RecordDict(content), dst_node_id=3, message_type=kind)
    return private_mod(
        message, Context(0, 3, UserConfig({"partition-id": 4}), RecordDict(), UserConfig()), app
    )


def test_nothing_but_arrays_and_a_weight_of_one():
    reply = answered({"a": SENT["a"] + 1}, extra={"notes": ConfigRecord({"patient": "x"})})
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content["metrics"]) == {"num-examples": 1}
    np.testing.assert_array_equal(reply.content["arrays"]["a"].numpy(), SENT["a"] + 1)
    assert reply.content["arrays"]["a"].numpy().dtype == np.float32


def test_the_update_is_clipped_as_a_whole():
    reply = answered({"a": SENT["a"] + 3, "b": SENT["b"] - 4}, clip=0.5)
    moves = [reply.content["arrays"][k].numpy() - SENT[k] for k in ("a", "b")]
    assert np.sqrt(sum(np.square(m).sum() for m in moves)) == pytest.approx(0.5, rel=1e-6)
    assert moves[0].flat[0] / moves[1].flat[0] == pytest.approx(-3 / 4, rel=1e-5)


def test_buffers_stay_as_they_were_sent():
    """Running means of a client's records are statistics of them."""
    reply = answered({"n": np.array(8), "mean": np.full(2, 3.5, np.float32)}, clip=1.0)
    assert reply.content["arrays"]["n"].numpy() == 7
    assert not reply.content["arrays"]["mean"].numpy().any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_an_update_that_is_not_finite_is_not_sent(value):
    trained = {"b": np.full(3, value)}
    assert answered(
        trained | {"b": np.full(3, 1e200)} if value == 1e300 else trained, clip=1.0
    ).has_error()


@pytest.mark.parametrize(
    "options", [{"terms": False}, {"kind": "evaluate"}, {"kind": "query"}, {"kind": "train.other"}]
)
def test_only_rounds_of_a_private_server_are_answered(options):
    reply = answered(**options)
    assert reply.has_error()
    assert not reply.has_content()


def test_what_the_app_says_when_it_fails_stays_here():
    reply = answered(fail="no such patient: John")
    assert reply.has_error()
    assert "John" not in reply.error.reason


@pytest.mark.parametrize("trained", [{"a": np.ones((3, 3))}, {"c": np.ones(1)}])
def test_other_arrays_than_were_sent_are_an_error(trained):
    assert answered(trained).has_error()


def test_a_node_says_who_it_is_without_training():
    reply = answered(name="partition-id", fail="must not be called")
    assert dict(reply.content["dpfy"]) == {"name": "4"}
    assert answered(name="person").has_error()


def test_a_client_needs_no_torch():
    code = (
        "import sys; from dpfy.integrations.flower import private_mod; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
