"""What server and clients agree on: names of records and fields, and arrays that must be those that
were sent.

The client's part: what leaves a device is an update of bounded norm, and nothing else.

The client's part of secure aggregation: its update leaves the device as whole numbers with
noise, under masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpfy.core import errors
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.federated.shares.scheme import Message as Encoded
from dpfy.federated.shares.scheme import SharingScheme
from dpfy.noise.shares import Shares

try:
    from flwr.app import ArrayRecord
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

    Guarantees: nothing is decoded whose stated shape is another, or whose bytes are more than its
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


try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
    from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod
    from flwr.clientapp.typing import ClientAppCallable
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.common.secure_aggregation.secaggplus_constants import (
        RECORD_KEY_CONFIGS,
        RECORD_KEY_STATE,
    )
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict
except ImportError:
    raise errors.missing("Flower's secure aggregation", "flwr") from None

SENT = "dpfy.sent"
MOST_BITS = 30
"""Flower's protocol keeps whole numbers in 32 bits."""


def secure_mod(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The only mod of a client whose noise comes in shares: ``ClientApp(mods=[secure_mod])``.
    Flower's SecAgg+ is inside of it.

    Guarantees: an update leaves the device clipped, in whole numbers, with this client's share of
    the noise, from its own entropy, and under the masks of the protocol; asked again for a round
    within a run it sends the same bits. Fewer survivors than the server's terms count on are not
    unmasked by this client.
    """
    if msg.metadata.message_type != MessageType.TRAIN or not msg.has_content():
        return refusal(msg, "only rounds of a private server are answered")
    terms = msg.content.config_records.get(TERMS)
    if terms is not None and NAME in terms:
        return named(msg, context, str(terms[NAME]))
    if RECORD_KEY_CONFIGS not in msg.content.config_records:
        return refusal(msg, "only rounds of a private server are answered")

    def encoded(inner: Message, ctxt: Context) -> Message:
        return _encoded(inner, ctxt, call_next)

    try:
        return secaggplus_mod(msg, context, encoded)
    except Exception:  # what it says may be of the data
        return refusal(msg, "the client app or the protocol failed")


def terms_of(scheme: SharingScheme, trainable: list[str], number: int) -> ConfigRecord:
    """What a client must know to encode its update."""
    shares = scheme.shares
    return ConfigRecord(
        {
            "dimension": shares.dimension, "clients": shares.clients, "least": shares.least, "bits": shares.bits,
            "scaled": float(shares.scaled), "law": shares.law, "rotation": str(shares.rotation), "clip": float(scheme.clip),  # noqa: E501
            "noise": float(scheme.noise_multiplier), TRAINED: trainable, "round": number,
        }
    )  # fmt: skip


def scheme_of(terms: ConfigRecord) -> SharingScheme:
    """The scheme that a server's terms state."""
    held = {
        name: terms[name] for name in ("dimension", "clients", "least", "bits", "scaled", "law")
    }
    shares = Shares(**held, rotation=int(str(terms["rotation"])))  # type: ignore[arg-type]
    return SharingScheme(shares, float(terms["clip"]), float(terms["noise"]))  # type: ignore[arg-type]


def _encoded(msg: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """What the protocol masks: the whole numbers of this client's update."""
    terms = msg.content.config_records[TERMS]
    scheme, number = scheme_of(terms), int(terms["round"])  # type: ignore[arg-type]
    agreed = context.state.config_records[RECORD_KEY_STATE]
    if (
        int(agreed["threshold"]) < scheme.shares.least
        or int(agreed["mod_range"]) != 1 << scheme.shares.bits
    ):  # type: ignore[arg-type]
        raise DpfyError("the protocol unmasks fewer clients than the bill counts on")
    message = _sent(context, number)
    if message is None:
        message = scheme.encode(
            _update(msg, context, call_next, terms), Randomness.from_os(), 0, number
        )
        context.state.config_records[SENT] = ConfigRecord(
            {"round": number, "message": message.tobytes()}
        )
    whole = scheme.centred(message).astype(np.float64) * float(
        1 << scheme.shares.bits
    )  # the protocol divides by it
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([whole]), 1, {})
    return Message(fitres_to_recorddict(result, True), reply_to=msg)


def _sent(context: Context, number: int) -> Encoded | None:
    """What this client has sent for a round already; an earlier round is refused."""
    held = context.state.config_records.get(SENT)
    if held is None or int(held["round"]) < number:  # type: ignore[arg-type]
        return None
    if int(held["round"]) > number:  # type: ignore[arg-type]
        raise InvalidInput("round", number, "is over")
    return np.frombuffer(held["message"], np.uint64)  # type: ignore[call-overload]


def _update(
    msg: Message, context: Context, call_next: ClientAppCallable, terms: ConfigRecord
) -> NDArray[np.float64]:
    """Weights received minus weights trained, as one vector."""
    (sent,) = msg.content.array_records.values()
    shapes = shapes_of(sent)
    received = decoded(sent, shapes)
    for key in (TERMS, RECORD_KEY_CONFIGS):
        del msg.content[key]
    reply = call_next(msg, context)
    records = list(reply.content.array_records.values())
    trained = decoded(records[0] if len(records) == 1 else ArrayRecord(), shapes)
    moves = [(received[name] - trained[name]).reshape(-1) for name in terms[TRAINED]]  # type: ignore[union-attr,index]
    return np.concatenate(moves)
