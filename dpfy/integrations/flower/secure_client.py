"""The client's part of secure aggregation: its update leaves the device as whole numbers with
noise, under masks.
"""

from __future__ import annotations

import numpy as np

from dpfy.core import errors
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.federated.shares.scheme import Message as Encoded
from dpfy.federated.shares.scheme import SharingScheme
from dpfy.integrations.flower import mods
from dpfy.integrations.flower.mods import named, refusal
from dpfy.noise.shares import Shares

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
    terms = msg.content.config_records.get(mods.TERMS)
    if terms is not None and mods.NAME in terms:
        return named(msg, context, str(terms[mods.NAME]))
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
            "noise": float(scheme.noise_multiplier), mods.TRAINED: trainable, "round": number,
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
    terms = msg.content.config_records[mods.TERMS]
    scheme, number = scheme_of(terms), int(terms["round"])  # type: ignore[arg-type]
    agreed = context.state.config_records[RECORD_KEY_STATE]
    if (
        int(agreed["threshold"]) < scheme.shares.least
        or int(agreed["mod_range"]) != 1 << scheme.shares.bits
    ):  # type: ignore[arg-type]
        raise DpfyError("the protocol unmasks fewer clients than the charge counts on")
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
) -> mods.NDArray[np.float64]:
    """Weights received minus weights trained, as one vector."""
    (sent,) = msg.content.array_records.values()
    shapes = mods.shapes_of(sent)
    received = mods.decoded(sent, shapes)
    for key in (mods.TERMS, RECORD_KEY_CONFIGS):
        del msg.content[key]
    reply = call_next(msg, context)
    records = list(reply.content.array_records.values())
    trained = mods.decoded(records[0] if len(records) == 1 else ArrayRecord(), shapes)
    moves = [(received[name] - trained[name]).reshape(-1) for name in terms[mods.TRAINED]]  # type: ignore[union-attr,index]
    return np.concatenate(moves)
