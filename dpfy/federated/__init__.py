"""Training over clients, each of which computes on data of its own: what is bounded is the update
that a client sends.

Everything after the bounded sum is the private training loop: noise, ledger, optimizer,
checkpoints, card.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfy.federated.clients import CLIENT
    from dpfy.federated.cohort import Cohort, Tally
    from dpfy.federated.local import LocalTraining, LocalUpdates
    from dpfy.federated.participations import OwnTimes
    from dpfy.federated.recipes import check_in
    from dpfy.federated.rounds import PrivateRounds
    from dpfy.federated.simulation import fit
    from dpfy.federated.virtual import VirtualClients, grouped, parted

# Names are found when first used, so that a plan for clients can be made without torch.
_HOME = {
    "CLIENT": "dpfy.federated.clients",
    "Cohort": "dpfy.federated.cohort",
    "LocalTraining": "dpfy.federated.local",
    "LocalUpdates": "dpfy.federated.local",
    "OwnTimes": "dpfy.federated.participations",
    "PrivateRounds": "dpfy.federated.rounds",
    "Tally": "dpfy.federated.cohort",
    "VirtualClients": "dpfy.federated.virtual",
    "check_in": "dpfy.federated.recipes",
    "fit": "dpfy.federated.simulation",
    "grouped": "dpfy.federated.virtual",
    "parted": "dpfy.federated.virtual",
}

__all__ = [
    "CLIENT",
    "Cohort",
    "LocalTraining",
    "LocalUpdates",
    "OwnTimes",
    "PrivateRounds",
    "Tally",
    "VirtualClients",
    "check_in",
    "fit",
    "grouped",
    "parted",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.federated' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
