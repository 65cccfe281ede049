"""From public features and questions to a model: one function a method.

None of them is given labels. What they know of them is what `ask` answers, and the claim has paid
for that: all else is post-processing.

Where labels and questions meet: the one place that holds labels, once, under the permit of their
claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor, nn

from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.labels import learners, method, priors, teachers
from dpfy.labels.claim import (
    ALIBI,
    ANSWERS,
    BINS,
    CLUSTERS,
    LP_MST,
    PATE_FM,
    PROJECTION,
    RR,
    LabelClaim,
)
from dpfy.labels.kernel import KernelSettings, PreparedFeatures
from dpfy.labels.learners import KernelLearner, Learner
from dpfy.labels.method import PLAIN, POSTERIOR, LabelLikelihood, LabelMethod
from dpfy.labels.priors import clustered
from dpfy.labels.questions import (
    HALF_L2,
    BinResponse,
    Counts,
    NoisyOneHot,
    PriorResponse,
    Projection,
    Question,
    Response,
    SealedLabels,
)
from dpfy.runs.folder import RunFolder

Ask = Callable[[Question], NDArray[Any]]
"""All that a method is given of labels: a question in, its answers out."""


class LabelQuestions:
    """Asks the labels of an opened run what its claim allows, and keeps the answers in its folder.

    Guarantees: a question costs what the claim reserved for it, or is refused before a label is
    read. Each label answers one question, once; answers that the folder holds already, after a
    crash, are taken from there, and their labels are not read again. What the noise of a step meets
    is bound before it is made.
    """

    def __init__(self, folder: RunFolder, claim: LabelClaim, labels: SealedLabels) -> None:
        self._folder, self.claim, self._labels = folder, claim, labels
        self.asked = 0
        self._held = self._found()

    def __call__(self, question: Question) -> NDArray[Any]:
        """The answers to the next question."""
        step, name = self.asked, self.claim.name
        if step >= self.claim.releases:
            raise InvalidInput(
                "question", step + 1, f"is one more than was reserved ({self.claim.releases})"
            )
        if question.event != self.claim.event:
            raise InvalidInput(
                "question",
                repr(question.event),
                f"must cost what was reserved, {self.claim.event!r}",
            )
        self.asked = step + 1
        if f"answers.{step}" in self._held:
            if not np.array_equal(self._held[f"rows.{step}"], question.rows):
                raise InvalidInput(
                    "resume labels",
                    f"question {step + 1}",
                    "must be asked of the records it was asked of before",
                )
            return self._held[f"answers.{step}"]
        labels = self._labels.take(question.rows)
        self._folder.bind(f"{name} {step}", question.public() + labels.tobytes())
        permit = self._folder.begin(name)
        found = np.ascontiguousarray(question.answer(labels, permit, self._folder.randomness, step))
        self._held |= {
            f"answers.{step}": found,
            f"rows.{step}": np.ascontiguousarray(question.rows),
        }
        self._folder.write(ANSWERS, save(self._held))
        return found

    def _found(self) -> dict[str, NDArray[Any]]:
        """What was answered before a crash."""
        file = self._folder.path / ANSWERS
        if not file.is_file():
            return {}
        try:
            return dict(load(storage.content(ANSWERS, file, most=storage.MOST_DATA)))
        except InvalidInput:
            raise
        except Exception:  # the reader raises types of its own
            raise Corrupt(ANSWERS, "does not hold answers: the run cannot be resumed") from None


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
    matrix = known.public.directed(known.rows, count, learners.WHITENING)
    rows = np.arange(setup.records)
    released = torch.from_numpy(
        ask(Projection(rows, setup.claim.noise_multiplier, classes, matrix.numpy()))
    )
    model = learners.KernelModel(known.public, count, classes)
    return learners.learn(model, known, matrix, released, (deviation, rules))


def _response(setup: LabelSetup, ask: Ask) -> nn.Module:
    rows = np.arange(setup.records)
    question = Response(rows, setup.epsilon, setup.claim.outcomes)
    return _read(setup, method.of_responses(question, ask(question)), rows)


def _alibi(setup: LabelSetup, ask: Ask) -> nn.Module:
    rows = np.arange(setup.records)
    question = NoisyOneHot(rows, setup.epsilon, setup.claim.outcomes)
    return _read(setup, method.of_noisy_one_hot(question, ask(question)), rows)


def _stages(setup: LabelSetup, ask: Ask) -> nn.Module:
    """LP-MST: each part is asked among the likeliest classes of the model that the parts before
    have taught.
    """
    found: list[LabelLikelihood] = []
    model, parts = None, setup.parts()
    for stage, rows in enumerate(parts):
        known = priors.uniform(len(rows), setup.claim.outcomes)
        if model is not None:
            known = setup.learner.chances(model, setup.features)[rows]
        question = PriorResponse(rows, setup.epsilon, *priors.ranked(known, setup.epsilon))
        found.append(method.of_prior_responses(question, ask(question)))
        model = _read(setup, *method.joined(found, parts[: stage + 1]))
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
        known.rows, min(most, known.public.directions), learners.WHITENING
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
        found = priors.optimal(points, mass, setup.epsilon)
        answers = ask(BinResponse(rows, setup.epsilon, found.bin_of, found.count))
        targets[rows, 0] = found.unbiased(setup.epsilon)[answers]
        asked.append(priors.seen(found, answers, setup.epsilon))
        mass = priors.estimated(asked, len(points))
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
