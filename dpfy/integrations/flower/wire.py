"""What server and clients agree on: names of records and fields, and arrays that must be those that
were sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpfy.core import errors
from dpfy.core.errors import InvalidInput

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
