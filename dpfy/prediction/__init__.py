"""Private prediction: voters that stay where they are, answers that are paid for, and students that
learn from them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpfy.prediction import plan
from dpfy.prediction.claim import AnswersClaim, StudentAnswersClaim
from dpfy.prediction.neighbours import NearestVoters, NeighbourVotes
from dpfy.prediction.predictor import Prediction, PrivatePredictor
from dpfy.prediction.stability import StableScores
from dpfy.prediction.teaching import teach
from dpfy.prediction.voters import LinearVoters, class_means, ridge, shards

if TYPE_CHECKING:
    from dpfy.prediction.networks import NetworkTraining, NetworkVoters, teach_networks
    from dpfy.prediction.pate import GraphTeachers, Student, load, student_claim, train_student
    from dpfy.prediction.student import Lesson, SemiSupervised
    from dpfy.prediction.vote_bill import VoteBill, release_vote_bill

# Names are found when first used: the claim, which verification reads, must not pay for torch.
_HOME = dict.fromkeys(
    ("NetworkTraining", "NetworkVoters", "teach_networks"), "dpfy.prediction.networks"
)
_HOME |= dict.fromkeys(
    ("Student", "GraphTeachers", "student_claim", "load", "train_student"), "dpfy.prediction.pate"
)
_HOME |= dict.fromkeys(("Lesson", "SemiSupervised"), "dpfy.prediction.student")
_HOME |= dict.fromkeys(("VoteBill", "release_vote_bill"), "dpfy.prediction.vote_bill")

__all__ = [
    "AnswersClaim",
    "GraphTeachers",
    "Lesson",
    "LinearVoters",
    "NearestVoters",
    "NeighbourVotes",
    "NetworkTraining",
    "NetworkVoters",
    "Prediction",
    "PrivatePredictor",
    "SemiSupervised",
    "StableScores",
    "Student",
    "StudentAnswersClaim",
    "VoteBill",
    "class_means",
    "load",
    "plan",
    "release_vote_bill",
    "ridge",
    "shards",
    "student_claim",
    "teach",
    "teach_networks",
    "train_student",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.prediction' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
