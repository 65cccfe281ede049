"""What learns from answers: kernel ridge regression on a public map of the features, in closed
form, or a network of one's own.

Learners are given public features and evidence. No label reaches them: there is none among their
arguments.

From one noisy sum of labels along public directions to a model, on public features alone.

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

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import check
from dpfy.core.errors import Unsupported
from dpfy.labels.kernel import KernelSettings, PreparedFeatures, PublicMap
from dpfy.labels.method import FORWARD

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


Reals = NDArray[np.float64]
Rows = NDArray[np.int64]
PENALTIES = tuple(4.0**power for power in range(-2, 10))
"""Of ridge regression on answers; the one that foretells held-out answers best is taken."""
AT_ONCE = 4000


class Learner(Protocol):
    """From public features and what is known of the labels of some records to a model of scores."""

    def learn(self, features: Tensor, rows: Rows, targets: Reals, correction: str) -> nn.Module:
        """A model of the records `rows`, whose targets are given in their order."""

    def chances(self, model: nn.Module, features: Tensor) -> Reals:
        """What a model says about all records: a prior, one row each."""


@dataclass
class KernelLearner:
    """Ridge regression on a kernel's directions and the principal components (`PublicMap`), its
    penalty chosen on held-out answers.

    `rules` are those of `projection`. The map and what it gives are kept for the features that were
    last seen.
    """

    settings: KernelSettings = field(default_factory=KernelSettings)
    rules: SelfTrainingRules = field(default_factory=SelfTrainingRules)
    _seen: tuple[Tensor, PreparedFeatures] | None = field(default=None, repr=False)

    def prepared(self, features: Tensor) -> PreparedFeatures:
        """What follows from the features alone."""
        if self._seen is None or self._seen[0] is not features:
            self._seen = features, PreparedFeatures.of(features, self.settings)
        return self._seen[1]

    def learn(self, features: Tensor, rows: Rows, targets: Reals, correction: str) -> nn.Module:
        """In closed form. Squared error; so `forward`, which is not linear in its targets, is for
        networks.
        """
        if correction == FORWARD:
            raise Unsupported(
                "forward correction with a kernel",
                "use correction='posterior' with rounds, or learner=Network(...)",
            )
        known = self.prepared(features)
        if not np.array_equal(rows, np.arange(len(known.rows))):
            x = known.rows[torch.from_numpy(rows)]
            known = PreparedFeatures(known.public, x, x.T @ x)
        model = KernelModel(known.public, 1, targets.shape[1])
        weights, middle = ridge_by_held_out(known, torch.from_numpy(targets).to(known.rows.dtype))
        model.student.copy_(weights)
        model.middle.copy_(middle)
        return model

    def chances(self, model: nn.Module, features: Tensor) -> Reals:
        """Scores of a regression to one-hot labels are chances, up to their error: cut to [0, 1],
        they add up to one.
        """
        assert isinstance(model, KernelModel)
        scores = model.of_rows(self.prepared(features).rows).clamp(1e-3, 1.0)
        return np.asarray((scores / scores.sum(1, keepdim=True)).double().numpy())


@torch.no_grad()
def ridge_by_held_out(known: PreparedFeatures, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and intercept of ridge regression. The penalty has the least squared error on the
    records held out.
    """
    middle, split = targets.mean(0), known.split
    centred, left = targets - middle, known.rows.T @ (targets - middle)
    truth = centred[split.held]
    goal = split.vectors.T @ (left - known.rows[split.held].T @ truth)
    errors = [
        float((split.turned @ (goal / (split.values + p)[:, None]) - truth).square().mean())
        for p in PENALTIES
    ]
    whole = known.gram.clone()
    whole.diagonal().add_(PENALTIES[int(np.argmin(errors))])
    return torch.cholesky_solve(left, torch.linalg.cholesky(whole)), middle


@dataclass(frozen=True)
class NetworkLearner:
    """A network of one's own: `make` gives a new one, from features to a score for each class; then
    plain minibatch descent.

    `augment` changes a batch of features at random, and must not look at anything else.
    """

    make: Callable[[], nn.Module]
    epochs: int = 10
    batch_size: int = 256
    learning_rate: float = 0.1
    seed: int = 0
    device: str = "cpu"
    augment: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check.integer("epochs", self.epochs)
        check.integer("batch_size", self.batch_size)
        check.positive("learning_rate", self.learning_rate)
        check.integer("seed", self.seed, least=0)

    def learn(self, features: Tensor, rows: Rows, targets: Reals, correction: str) -> nn.Module:
        """By descent with momentum, the rate falling to zero. The order of records is public: it
        follows from the seed.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self.make().to(self.device).train()
            generator = torch.Generator().manual_seed(self.seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)
            steps = self.epochs * -(-len(rows) // self.batch_size)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            goals = torch.from_numpy(targets).float()
            places = torch.from_numpy(rows)
            for _ in range(self.epochs):
                for batch in torch.randperm(len(rows), generator=generator).split(self.batch_size):
                    x = features[places[batch]].to(self.device)
                    scores = model(x if self.augment is None else self.augment(x))
                    optimizer.zero_grad()
                    loss(scores, goals[batch].to(self.device), correction).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    schedule.step()
        return model.eval()

    @torch.no_grad()
    def chances(self, model: nn.Module, features: Tensor) -> Reals:
        """Its probabilities."""
        parts = [
            model(part.to(self.device)).softmax(1).double().cpu()
            for part in features.split(AT_ONCE)
        ]
        return np.asarray(torch.cat(parts).numpy())


def loss(scores: Tensor, targets: Tensor, correction: str) -> Tensor:
    """The mean loss of a batch: cross-entropy to its targets, which need be no chances; under
    `forward` the loss of the answers.
    """
    logarithms = functional.log_softmax(scores, dim=1)
    if correction == FORWARD:
        return -torch.logsumexp(logarithms + targets.clamp(min=1e-12).log(), dim=1).mean()
    return -(targets * logarithms).sum(dim=1).mean()
