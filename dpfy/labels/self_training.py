"""From one noisy sum of labels along public directions to a model, on public features alone.

Three linear solves, with A the public matrix, Y the labels, R = A'Y + noise what was released and B
richer public features:

1. teach: ridge regression on A gives every record a score for each class, from A'A and R alone;
2. study: ridge regression on B to the class of the largest score. What the noise did lies along A;
   B, which is not bound to A, follows what classes have in common, and leaves much of it behind;
3. correct: what the student's scores leave of R, R - A'(scores), is regressed on A again: where the
   student went its own way, the labels bring it back.

All of it is post-processing. The rules for sizes and penalties were chosen on held-out training
images (docs/decisions.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.labels.kernel import PreparedFeatures, PublicMap

WHITENING = 0.75
"""Of the rows of A."""


@dataclass(frozen=True)
class SelfTrainingRules:
    """How sizes follow the noise: records for each direction of A, and the penalty of regressions
    on A, both in its standard deviations; and the penalty of the student. The defaults were chosen
    on held-out training images (docs/decisions.md).
    """

    records_each: float = 10.0
    penalty: float = 6.0
    student_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("records_each", "penalty", "student_penalty"):
            check.positive(f"rules.{name}", getattr(self, name))

    def directions(self, records: int, deviation: float, classes: int, most: int) -> int:
        """How many directions labels are summed along: as many as leave each so many records; two a
        class at least.
        """
        return max(1, min(most, max(2 * classes, round(records / (self.records_each * deviation)))))


class KernelModel(nn.Module):
    """Features to a score for each class: the student's weights on all coordinates of a public map,
    and its correction on some.
    """

    student: Tensor
    correction: Tensor
    middle: Tensor

    def __init__(
        self, public: PublicMap, directions: int, classes: int, whitening: float = WHITENING
    ) -> None:
        super().__init__()
        self.public, self.directions, self.whitening = public, directions, whitening
        self.register_buffer("student", torch.zeros(public.directions + public.wide, classes))
        self.register_buffer("correction", torch.zeros(directions, classes))
        self.register_buffer("middle", torch.zeros(classes))

    def forward(self, features: Tensor) -> Tensor:
        """(n, d) -> (n, classes)."""
        return self.of_rows(self.public(features.flatten(1)))

    def of_rows(self, rows: Tensor) -> Tensor:
        """The same for what the map gave."""
        scores = rows @ self.student + self.middle
        return (
            scores + self.public.directed(rows, self.directions, self.whitening) @ self.correction
        )


@torch.no_grad()
def learn(
    model: KernelModel,
    prepared: PreparedFeatures,
    matrix: Tensor,
    released: Tensor,
    noise: tuple[float, SelfTrainingRules],
) -> KernelModel:
    """The model that the released sums teach. `matrix` is A; `noise` its standard deviation, and
    the rules that follow from it.
    """
    classes, (deviation, rules) = released.shape[1], noise
    released = released.to(matrix.dtype) - matrix.sum(0)[:, None] / classes
    teacher = _factor(matrix.T @ matrix, rules.penalty * deviation)
    chosen = (matrix @ torch.cholesky_solve(released, teacher)).argmax(1)
    targets = torch.nn.functional.one_hot(chosen, classes).to(matrix.dtype) - 1 / classes
    rows = prepared.rows
    model.student.copy_(
        torch.cholesky_solve(rows.T @ targets, _factor(prepared.gram, rules.student_penalty))
    )
    left = released - matrix.T @ (rows @ model.student)
    model.correction.copy_(torch.cholesky_solve(left, teacher))
    model.middle.fill_(1 / classes)
    return model


def _factor(gram: Tensor, penalty: float) -> Tensor:
    whole = gram.clone()
    whole.diagonal().add_(penalty)
    return torch.linalg.cholesky(whole)
