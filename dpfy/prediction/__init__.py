"""Private prediction: voters that stay where they are, answers that are paid for, and students that learn from them."""

from __future__ import annotations

from dpfy.prediction import plan
from dpfy.prediction.claim import Answers
from dpfy.prediction.neighbours import NearestVoters, NeighbourVotes
from dpfy.prediction.predictor import Answer, PrivatePredictor
from dpfy.prediction.stability import StableScores
from dpfy.prediction.teaching import teach
from dpfy.prediction.voters import LinearVoters, class_means, ridge, shards

__all__ = [
    "Answer",
    "Answers",
    "LinearVoters",
    "NearestVoters",
    "NeighbourVotes",
    "PrivatePredictor",
    "StableScores",
    "class_means",
    "plan",
    "ridge",
    "shards",
    "teach",
]
