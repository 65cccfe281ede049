"""From public features and questions to a model: one function a method.

None of them is given labels. What they know of them is what `ask` answers, and the claim has paid
for that: all else is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.labels import bins, evidence, prior, self_training, teachers
from dpfy.labels.asking import Ask
from dpfy.labels.claim import ALIBI, BINS, CLUSTERS, LP_MST, PATE_FM, PROJECTION, RR, LabelClaim
from dpfy.labels.clustering import clustered
from dpfy.labels.evidence import PLAIN, POSTERIOR, LabelLikelihood
from dpfy.labels.kernel import KernelSettings, PreparedFeatures
from dpfy.labels.learners import KernelLearner, Learner
from dpfy.labels.method import LabelMethod
from dpfy.labels.questions import (
    HALF_L2,
    BinResponse,
    Counts,
    NoisyOneHot,
    PriorResponse,
    Projection,
    Response,
)

Rows = NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class LabelSetup:
    """All that a method may know before it asks: the claim, public features, how to read answers
    and what learns.
    """

    claim: LabelClaim
    method: LabelMethod
    features: Tensor
    learner: Learner

    @property
    def records(self) -> int:
        """Public."""
        assert self.claim.records is not None
        return self.claim.records

    @property
    def epsilon(self) -> float:
        """Of a pure guarantee."""
        assert self.claim.epsilon is not None
        return self.claim.epsilon

    def parts(self) -> list[Rows]:
        """The records in as many parts as there are stages: by a permutation that follows from
        their number alone.
        """
        order = np.random.Generator(np.random.Philox(key=self.records)).permutation(self.records)
        return [np.sort(part).astype(np.int64) for part in np.array_split(order, self.claim.stages)]


def learn(setup: LabelSetup, ask: Ask) -> nn.Module:
    """The model that the method of `setup` makes of the answers."""
    return LEARN[setup.claim.method](setup, ask)


def _projection(setup: LabelSetup, ask: Ask) -> nn.Module:
    if not isinstance(setup.learner, KernelLearner):
        raise Unsupported(
            "sums of labels with a network",
            "use rr, lp-mst or alibi, whose answers a network can learn from",
        )
    known, rules = setup.learner.prepared(setup.features), setup.learner.rules
    assert setup.claim.noise_multiplier is not None
    deviation = setup.claim.noise_multiplier * HALF_L2
    classes = setup.claim.outcomes
    count = rules.directions(setup.records, deviation, classes, known.public.directions)
    matrix = known.public.directed(known.rows, count, self_training.WHITENING)
    rows = np.arange(setup.records)
    released = torch.from_numpy(
        ask(Projection(rows, setup.claim.noise_multiplier, classes, matrix.numpy()))
    )
    model = self_training.KernelModel(known.public, count, classes)
    return self_training.learn(model, known, matrix, released, (deviation, rules))


def _response(setup: LabelSetup, ask: Ask) -> nn.Module:
    rows = np.arange(setup.records)
    question = Response(rows, setup.epsilon, setup.claim.outcomes)
    return _read(setup, evidence.of_responses(question, ask(question)), rows)


def _alibi(setup: LabelSetup, ask: Ask) -> nn.Module:
    rows = np.arange(setup.records)
    question = NoisyOneHot(rows, setup.epsilon, setup.claim.outcomes)
    return _read(setup, evidence.of_noisy_one_hot(question, ask(question)), rows)


def _stages(setup: LabelSetup, ask: Ask) -> nn.Module:
    """LP-MST: each part is asked among the likeliest classes of the model that the parts before
    have taught.
    """
    found: list[LabelLikelihood] = []
    model, parts = None, setup.parts()
    for stage, rows in enumerate(parts):
        known = prior.uniform(len(rows), setup.claim.outcomes)
        if model is not None:
            known = setup.learner.chances(model, setup.features)[rows]
        question = PriorResponse(rows, setup.epsilon, *prior.ranked(known, setup.epsilon))
        found.append(evidence.of_prior_responses(question, ask(question)))
        model = _read(setup, *evidence.joined(found, parts[: stage + 1]))
    assert model is not None
    return model


def _clusters(setup: LabelSetup, ask: Ask) -> nn.Module:
    """Labels of a cluster are exchangeable: each record takes the noisy shares of its own."""
    groups = clustered(_directions(setup), setup.method.clusters)
    rows, cells = np.arange(setup.records), int(groups.max()) + 1
    counts = ask(Counts(rows, setup.epsilon, setup.claim.outcomes, groups, cells))
    shares = np.maximum(counts, 0) + 1e-3
    known = LabelLikelihood((shares / shares.sum(axis=1, keepdims=True))[groups])
    return setup.learner.learn(setup.features, rows, known.likelihood, POSTERIOR)


def _pate_fm(setup: LabelSetup, ask: Ask) -> nn.Module:
    """PATE-FM: the classes that most teachers say about some records; a student learns from these
    and from all features.

    The student begins as a teacher does, with the answers as its labels. Records whose class that
    makes sure teach the learner; in every round after the first all do, with the class that the
    learner itself gives them.
    """
    classes, noise = setup.claim.outcomes, setup.claim.noise_multiplier
    assert noise is not None
    count, asked = teachers.planned(
        setup.records, classes, noise, setup.method.teachers, setup.method.asked
    )
    known = _known(setup)
    views = teachers.PublicViews(*(_view(known, most) for most in (teachers.WEAK, teachers.STRONG)))
    about = np.sort(
        np.random.Generator(np.random.Philox(key=[setup.records, 1])).permutation(setup.records)[
            :asked
        ]
    )
    places = teachers.dealt(setup.records, count)
    rows = np.arange(setup.records)
    answers = ask(teachers.TeacherVotes(rows, noise, classes, views, places, count, about))
    scores = views.strong @ views.learnt(
        torch.from_numpy(about), torch.from_numpy(answers), classes
    )
    best = scores.topk(2, dim=1).values
    margin = (best[:, 0] - best[:, 1]).numpy()
    sure = np.flatnonzero(margin >= np.quantile(margin, teachers.UNSURE))
    model = setup.learner.learn(
        setup.features, sure, np.eye(classes)[scores.argmax(1).numpy()[sure]], PLAIN
    )
    for _ in range(setup.method.rounds):
        said = setup.learner.chances(model, setup.features).argmax(axis=1)
        model = setup.learner.learn(setup.features, rows, np.eye(classes)[said], PLAIN)
    return model


def _known(setup: LabelSetup) -> PreparedFeatures:
    """A public map of the features: that of the learner, where it has one."""
    learner = (
        setup.learner
        if isinstance(setup.learner, KernelLearner)
        else KernelLearner(KernelSettings())
    )
    return learner.prepared(setup.features)


def _view(known: PreparedFeatures, most: int) -> Tensor:
    """The first kernel directions of every record, and a constant."""
    found = known.public.directed(
        known.rows, min(most, known.public.directions), self_training.WHITENING
    )
    return torch.cat([found, torch.full((len(found), 1), 0.3, dtype=found.dtype)], dim=1)


def _directions(setup: LabelSetup) -> Tensor:
    """In which clusters are looked for: the kernel's, where a kernel learns; else the features."""
    if isinstance(setup.learner, KernelLearner):
        known = setup.learner.prepared(setup.features)
        return known.public.directed(known.rows, min(64, known.public.directions), 0.0)
    return setup.features.flatten(1)


def _bins(setup: LabelSetup, ask: Ask) -> nn.Module:
    """RR-on-bins: the first part is asked in bins for equal shares, the next in bins for the shares
    that the answers before suggest.
    """
    assert setup.method.span is not None
    points = np.linspace(*setup.method.span, setup.claim.outcomes)
    mass, targets, asked = np.full(len(points), 1 / len(points)), np.empty((setup.records, 1)), []
    for rows in setup.parts():
        found = bins.optimal(points, mass, setup.epsilon)
        answers = ask(BinResponse(rows, setup.epsilon, found.bin_of, found.count))
        targets[rows, 0] = found.unbiased(setup.epsilon)[answers]
        asked.append(bins.seen(found, answers, setup.epsilon))
        mass = bins.estimated(asked, len(points))
    return setup.learner.learn(setup.features, np.arange(setup.records), targets, "plain")


def _read(setup: LabelSetup, known: LabelLikelihood, rows: Rows) -> nn.Module:
    """A model of the evidence; learnt again with the prior of the one before, as often as the
    method says.
    """
    targets, correction = known.targets(setup.method.corrected), setup.method.corrected
    model = setup.learner.learn(setup.features, rows, targets, correction)
    for _ in range(setup.method.rounds - 1):
        expected = setup.learner.chances(model, setup.features)[rows]
        model = setup.learner.learn(
            setup.features, rows, known.targets(POSTERIOR, expected), POSTERIOR
        )
    return model


LEARN: Mapping[str, Callable[[LabelSetup, Ask], nn.Module]] = {
    RR: _response,
    LP_MST: _stages,
    ALIBI: _alibi,
    BINS: _bins,
    CLUSTERS: _clusters,
    PROJECTION: _projection,
    PATE_FM: _pate_fm,
}
