"""What server and clients agree on: names of records and fields, and arrays that must be those that
were sent.

The client's part: what leaves a device is an update of bounded norm, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpfy.core import errors
from dpfy.core.errors import InvalidInput

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

TERMS = "dpfy"
"""The record in which a private server tells a client the terms of a round."""
CLIP, TRAINED, NAME = "clip", "trainable", "name"
"""Fields of it: the norm that the client clips its update to (0: the server alone clips), the
arrays that are trained, and the entry of the node's configuration that it must answer with, instead
of training.
"""
ARRAYS, METRICS, WEIGHT = "arrays", "metrics", "num-examples"
HEADER = 4096
"""More bytes than the header of a stored array needs."""

Arrays = dict[str, NDArray[np.float64]]


def decoded(record: ArrayRecord, like: Mapping[str, tuple[int, ...]]) -> Arrays:
    """The arrays of a record, in float64; refused unless names and shapes are those of `like`.

    Guarantees: nothing is decoded whose given shape is another, or whose bytes are more than its
    shape needs.
    """
    if list(record.keys()) != list(like):
        strange = sorted(set(record.keys()) ^ set(like))
        raise InvalidInput(
            "arrays",
            strange[0] if strange else "another order",
            "must be those that were sent, in their order",
        )
    found = {}
    for name, array in record.items():
        if tuple(array.shape) != tuple(like[name]):
            raise InvalidInput(
                name,
                f"shape {tuple(array.shape)}",
                f"must have shape {tuple(like[name])}, as it was sent",
            )
        if len(array.data) > 16 * math.prod(like[name]) + HEADER:
            raise InvalidInput(name, f"{len(array.data)} bytes", "are more than its shape needs")
        try:
            value = array.numpy()
        except Exception:
            raise InvalidInput(
                name, "bytes that are no array", "must be an array of numbers"
            ) from None
        if value.shape != tuple(like[name]) or value.dtype.kind not in "fiub":
            raise InvalidInput(
                name,
                f"{value.dtype} of shape {value.shape}",
                f"must be real numbers of shape {tuple(like[name])}",
            )
        with np.errstate(all="ignore"):
            found[name] = value.astype(np.float64)
    return found


def shapes_of(record: ArrayRecord) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays of a record."""
    return {name: tuple(array.shape) for name, array in record.items()}


def private_mod(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The first mod of a client of :class:`PrivateFedAvg`: ``ClientApp(mods=[private_mod])``. Needs
    no torch.

    Guarantees: a reply holds the trained arrays, moved back to within the clip norm of those
    received where the server states one, and the weight 1. Metrics, the number of examples, other
    records, buffers, frozen weights and the texts of errors stay on the device. A server that is
    not private, an evaluation and an update that is not finite are answered by an error without
    content.
    """
    terms = msg.content.config_records.get(TERMS) if msg.has_content() else None
    if terms is None or msg.metadata.message_type != MessageType.TRAIN:
        return refusal(msg, "only rounds of a private server are answered")
    if NAME in terms:
        return named(msg, context, str(terms[NAME]))
    sent = list(msg.content.array_records.values())
    if len(sent) != 1:
        return refusal(msg, "a round is sent with one record of arrays")
    received = {name: array.numpy() for name, array in sent[0].items()}
    shapes, clip = shapes_of(sent[0]), float(terms.get(CLIP, 0.0))  # type: ignore[arg-type]
    moving = [name for name in terms.get(TRAINED, []) if name in received]  # type: ignore[union-attr]
    del msg.content[TERMS]
    try:
        reply = call_next(msg, context)
    except Exception:
        return refusal(msg, "the client app failed")
    if reply.has_error():
        return refusal(msg, "the client app failed")
    records = list(reply.content.array_records.values())
    try:
        trained = decoded(records[0] if len(records) == 1 else ArrayRecord(), shapes)
        bounded = _bounded(received, trained, moving, clip)
    except InvalidInput:
        return refusal(msg, "the update is not finite or not that of the model")
    content = {ARRAYS: ArrayRecord(bounded), METRICS: MetricRecord({WEIGHT: 1})}
    return Message(RecordDict(content), reply_to=msg)  # type: ignore[arg-type]


def _bounded(
    received: dict[str, np.ndarray], trained: Arrays, moving: list[str], clip: float
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
    name = ConfigRecord({NAME: str(context.node_config[entry])})
    return Message(RecordDict({TERMS: name}), reply_to=msg)


def refusal(msg: Message, reason: str) -> Message:
    """An error that says nothing of the data."""
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=reason), reply_to=msg)
