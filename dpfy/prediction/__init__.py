"""Private prediction: voters that stay where they are, answers that are paid for, and students that
learn from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names
from dpfy.prediction import plan
from dpfy.prediction.claim import AnswersClaim, StudentAnswersClaim
from dpfy.prediction.predictor import Prediction, PrivatePredictor
from dpfy.prediction.voters import LinearVoters, class_means, ridge, shards, teach

if TYPE_CHECKING:
    from dpfy.prediction.networks import NetworkTraining, NetworkVoters, teach_networks
    from dpfy.prediction.pate import GraphTeachers, Student, load, student_claim, train_student
    from dpfy.prediction.regression import (
        NumberStudent,
        NumberVoters,
        number_claim,
        teach_numbers,
        train_number_student,
    )
    from dpfy.prediction.student import Lesson, SemiSupervised

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.prediction.networks": "NetworkTraining NetworkVoters teach_networks",
        "dpfy.prediction.regression": "NumberStudent NumberVoters number_claim teach_numbers "
        "train_number_student",
        "dpfy.prediction.pate": "GraphTeachers Student load student_claim train_student",
        "dpfy.prediction.student": "Lesson SemiSupervised",
    },
)

__all__ = [
    "AnswersClaim",
    "GraphTeachers",
    "Lesson",
    "LinearVoters",
    "NetworkTraining",
    "NetworkVoters",
    "NumberStudent",
    "NumberVoters",
    "Prediction",
    "PrivatePredictor",
    "SemiSupervised",
    "Student",
    "StudentAnswersClaim",
    "class_means",
    "load",
    "number_claim",
    "plan",
    "ridge",
    "shards",
    "student_claim",
    "teach",
    "teach_networks",
    "teach_numbers",
    "train_number_student",
    "train_student",
]
