"""Private prediction: voters that stay where they are, answers that are paid for, and students that learn from them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpfy.prediction import plan
from dpfy.prediction.claim import Answers
from dpfy.prediction.neighbours import NearestVoters, NeighbourVotes
from dpfy.prediction.predictor import Answer, PrivatePredictor
from dpfy.prediction.stability import StableScores
from dpfy.prediction.teaching import teach
from dpfy.prediction.voters import LinearVoters, class_means, ridge, shards

if TYPE_CHECKING:
    from dpfy.prediction.networks import NetworkTraining, NetworkVoters, teach_networks

# Names are found when first used: the claim, which verification reads, must not pay for torch.
_HOME = dict.fromkeys(("NetworkTraining", "NetworkVoters", "teach_networks"), "dpfy.prediction.networks")

__all__ = [
    "Answer",
    "Answers",
    "LinearVoters",
    "NearestVoters",
    "NeighbourVotes",
    "NetworkTraining",
    "NetworkVoters",
    "PrivatePredictor",
    "StableScores",
    "class_means",
    "plan",
    "ridge",
    "shards",
    "teach",
    "teach_networks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.prediction' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
