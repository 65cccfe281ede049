"""Noise in shares: every client adds its part of it, and nobody sees less than the sum over all."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpfy.federated.shares.aggregator import MaskedSum, SecureSum, SurvivorSum, TooFew, TrustedSum
from dpfy.federated.shares.choice import choose, plan
from dpfy.federated.shares.scheme import Client, SharingScheme
from dpfy.noise.shares import Shares

if TYPE_CHECKING:
    from dpfy.federated.shares.rounds import DistributedRounds

__all__ = [
    "Client",
    "DistributedRounds",
    "MaskedSum",
    "SecureSum",
    "Shares",
    "SharingScheme",
    "SurvivorSum",
    "TooFew",
    "TrustedSum",
    "choose",
    "plan",
]


def __getattr__(name: str) -> Any:  # a client encodes without torch
    if name != "DistributedRounds":
        raise AttributeError(f"module 'dpfy.federated.shares' has no attribute {name!r}")
    return importlib.import_module("dpfy.federated.shares.rounds").DistributedRounds
