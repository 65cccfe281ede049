"""What learns from answers: kernel ridge regression on a public map of the features, in closed
form, or a network of one's own.

Learners are given public features and evidence. No label reaches them: there is none among their
arguments.
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
from dpfy.labels.evidence import FORWARD
from dpfy.labels.kernel import KernelSettings, PreparedFeatures
from dpfy.labels.self_training import KernelModel, SelfTrainingRules

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
