"""The client's part: what leaves a device is an update of bounded norm, and nothing else."""

from __future__ import annotations

import math

import numpy as np

from dpfy.core import errors
from dpfy.core.errors import InvalidInput
from dpfy.integrations.flower import wire

try:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp.typing import ClientAppCallable
    from flwr.common.constant import ErrorCode
except ImportError:
    raise errors.missing("Flower", "flwr") from None


def private_mod(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The first mod of a client of :class:`PrivateFedAvg`: ``ClientApp(mods=[private_mod])``. Needs
    no torch.

    Guarantees: a reply holds the trained arrays, moved back to within the clip norm of those
    received where the server states one, and the weight 1. Metrics, the number of examples, other
    records, buffers, frozen weights and the texts of errors stay on the device. A server that is
    not private, an evaluation and an update that is not finite are answered by an error without
    content.
    """
    terms = msg.content.config_records.get(wire.TERMS) if msg.has_content() else None
    if terms is None or msg.metadata.message_type != MessageType.TRAIN:
        return refusal(msg, "only rounds of a private server are answered")
    if wire.NAME in terms:
        return named(msg, context, str(terms[wire.NAME]))
    sent = list(msg.content.array_records.values())
    if len(sent) != 1:
        return refusal(msg, "a round is sent with one record of arrays")
    received = {name: array.numpy() for name, array in sent[0].items()}
    shapes, clip = wire.shapes_of(sent[0]), float(terms.get(wire.CLIP, 0.0))  # type: ignore[arg-type]
    moving = [name for name in terms.get(wire.TRAINED, []) if name in received]  # type: ignore[union-attr]
    del msg.content[wire.TERMS]
    try:
        reply = call_next(msg, context)
    except Exception:
        return refusal(msg, "the client app failed")
    if reply.has_error():
        return refusal(msg, "the client app failed")
    records = list(reply.content.array_records.values())
    try:
        trained = wire.decoded(records[0] if len(records) == 1 else ArrayRecord(), shapes)
        bounded = _bounded(received, trained, moving, clip)
    except InvalidInput:
        return refusal(msg, "the update is not finite or not that of the model")
    content = {wire.ARRAYS: ArrayRecord(bounded), wire.METRICS: MetricRecord({wire.WEIGHT: 1})}
    return Message(RecordDict(content), reply_to=msg)  # type: ignore[arg-type]


def _bounded(
    received: dict[str, np.ndarray], trained: wire.Arrays, moving: list[str], clip: float
) -> dict[str, Array]:
    """`received`, with the arrays `moving` moved towards `trained`, by `clip` at most; in the types
    that were received.
    """
    with np.errstate(all="ignore"):
        moves = {name: trained[name] - received[name] for name in moving}
        norm = math.sqrt(sum(float(np.square(move).sum()) for move in moves.values()))
    if not math.isfinite(norm):
        raise InvalidInput("update", norm, "must be finite")
    share = 1.0 if clip <= 0 or norm <= clip else clip / norm
    made = {name: value.copy() for name, value in received.items()}
    for name, move in moves.items():
        made[name] = (received[name] + share * move).astype(received[name].dtype)
    return {name: Array(np.asarray(value)) for name, value in made.items()}


def named(msg: Message, context: Context, entry: str) -> Message:
    """Who this node is, by the entry of its configuration that the server asks for."""
    if entry not in context.node_config:
        return refusal(msg, "the node's configuration does not say who it is")
    name = ConfigRecord({wire.NAME: str(context.node_config[entry])})
    return Message(RecordDict({wire.TERMS: name}), reply_to=msg)


def refusal(msg: Message, reason: str) -> Message:
    """An error that says nothing of the data."""
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=msg)
