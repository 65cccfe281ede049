"""Training over clients, each of which computes on data of its own: what is bounded is the update
that a client sends.

Everything after the bounded sum is the private training loop: noise, ledger, optimizer,
checkpoints, report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

if TYPE_CHECKING:
    from dpfy.federated.cohort import Cohort, Tally
    from dpfy.federated.local import LocalTraining, LocalUpdates
    from dpfy.federated.recipes import CLIENT, OwnTimes, check_in
    from dpfy.federated.rounds import PrivateRounds
    from dpfy.federated.simulation import VirtualClients, fit, grouped, parted

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.federated.cohort": "Cohort Tally",
        "dpfy.federated.local": "LocalTraining LocalUpdates",
        "dpfy.federated.recipes": "CLIENT OwnTimes check_in",
        "dpfy.federated.rounds": "PrivateRounds",
        "dpfy.federated.simulation": "VirtualClients fit grouped parted",
    },
)

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
