"""Distributed noise: every client adds its part of it, and nobody sees less than the sum over all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names
from dpfy.federated.shares.aggregator import MaskedSum, SecureSum, SurvivorSum, TooFew, TrustedSum
from dpfy.federated.shares.choice import choose, plan
from dpfy.federated.shares.scheme import Client, SharingScheme
from dpfy.noise.shares import Shares

if TYPE_CHECKING:
    from dpfy.federated.shares.rounds import DistributedRounds

# A client encodes without torch.
__getattr__, __dir__ = _lazy_names(__name__, {"dpfy.federated.shares.rounds": "DistributedRounds"})

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
