"""Private prediction: voters that stay where they are, answers that are paid for, and students that
learn from them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpfy.prediction import plan
from dpfy.prediction.claim import Answers, StudentAnswers
from dpfy.prediction.neighbours import NearestVoters, NeighbourVotes
from dpfy.prediction.predictor import Answer, PrivatePredictor
from dpfy.prediction.stability import StableScores
from dpfy.prediction.teaching import teach
from dpfy.prediction.voters import LinearVoters, class_means, ridge, shards

if TYPE_CHECKING:
    from dpfy.prediction.networks import NetworkTraining, NetworkVoters, teach_networks
    from dpfy.prediction.pate import Graduate, GraphTeachers, claimed, graduate, train_student
    from dpfy.prediction.student import Lesson, SemiSupervised
    from dpfy.prediction.vote_bill import VoteBill, sanitised

# Names are found when first used: the claim, which verification reads, must not pay for torch.
_HOME = dict.fromkeys(
    ("NetworkTraining", "NetworkVoters", "teach_networks"), "dpfy.prediction.networks"
)
_HOME |= dict.fromkeys(
    ("Graduate", "GraphTeachers", "claimed", "graduate", "train_student"), "dpfy.prediction.pate"
)
_HOME |= dict.fromkeys(("Lesson", "SemiSupervised"), "dpfy.prediction.student")
_HOME |= dict.fromkeys(("VoteBill", "sanitised"), "dpfy.prediction.vote_bill")

__all__ = [
    "Answer",
    "Answers",
    "Graduate",
    "GraphTeachers",
    "Lesson",
    "LinearVoters",
    "NearestVoters",
    "NeighbourVotes",
    "NetworkTraining",
    "NetworkVoters",
    "PrivatePredictor",
    "SemiSupervised",
    "StableScores",
    "StudentAnswers",
    "VoteBill",
    "claimed",
    "class_means",
    "graduate",
    "plan",
    "ridge",
    "sanitised",
    "shards",
    "teach",
    "teach_networks",
    "train_student",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.prediction' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
