"""PATE to a released student (Papernot et al. 2017, 2018), in one run folder with one charge.

    private records -> disjoint parts, a teacher of each -> noisy votes on public inputs, paid for
    in advance -> a student of the answers

What is released are the answers. The student learns from them and from public inputs, and is
post-processing. The teachers stay in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import EXAMPLE, Unit
from dpfy.models.config import ModelConfig
from dpfy.models.features import ScatteringFeatures
from dpfy.models.scattering import LEAST_SIDE
from dpfy.prediction import plan, regression
from dpfy.prediction import student as students
from dpfy.prediction.claim import (
    STUDENT_ANSWERS,
    STUDENT_MODEL,
    StudentAnswersClaim,
    VotesRelease,
)
from dpfy.prediction.diffusion import DiffusionMap
from dpfy.prediction.networks import NetworkTraining, NetworkVoters, teach_networks
from dpfy.prediction.predictor import PrivatePredictor, Voters
from dpfy.prediction.rules import Ask
from dpfy.prediction.student import Lesson, SemiSupervised, StudentLearner
from dpfy.prediction.voters import LinearVoters, checked, ridge, shards
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Run
from dpfy.training.load import ReleasedModel

BLOCK = 16
"""Records of one teacher that are mapped at a time, always as many: the rounding of others' sums
does not follow them.
"""
CHUNK = 100
SCATTERING = ModelConfig("scattering-linear")
Private = tuple[Any, Any] | Callable[[], tuple[Any, Any]]
Public = Tensor | Callable[[], Tensor]
Measured = Callable[[nn.Module], Mapping[str, Any]]
"""What may be told about the student on public records."""


@dataclass(frozen=True)
class GraphTeachers:
    """Teachers that are ridge regressions on coordinates of the public inputs' own shape
    (`diffusion`): a handful of records is enough.

    Images are scattered first. `directions` are how many coordinates they read.
    """

    directions: int = 60
    strength: float = 1.0

    def __post_init__(self) -> None:
        check.integer("teachers.directions", self.directions, most=1 << 12)
        check.positive("teachers.strength", self.strength)

    @property
    def words(self) -> str:
        """For the report."""
        return (
            f"ridge regressions on {self.directions} coordinates that were learnt from the public "
            f"inputs"
        )


Teachers = GraphTeachers | NetworkTraining


@dataclass(frozen=True, repr=False)
class Student(Released):
    """What a run leaves: the student, and the answers that were released: a class or None
    for each of `rows`.
    """

    model: nn.Module = field(repr=False)
    rows: NDArray[np.int64] = field(repr=False)
    answers: list[int | None] = field(repr=False)

    def _told(self) -> dict[str, Any]:
        answered = sum(answer is not None for answer in self.answers)
        return {"asked": len(self.answers), "answered": answered}


def student_claim(
    epsilon: float,
    delta: float,
    *,
    teachers: int,
    classes: int,
    answers: int,
    queries: int | None = None,
    threshold: float = 0.6,
    unit: Unit = EXAMPLE,
) -> StudentAnswersClaim:
    """The claim of so many answers at (epsilon, delta); with `queries`, of the confident vote.

    For records of people say `unit=Unit("user")`, and give their `owners` to `train_student`.
    """
    shape: dict[str, Any] = {
        "voters": teachers,
        "classes": classes,
        "answers": answers,
        "kind": StudentAnswersClaim,
        "unit": unit,
    }
    if queries is None:
        made = plan.gaussian(epsilon, delta, **shape)
    else:
        made = plan.confident(epsilon, delta, queries=queries, threshold=threshold, **shape)
    assert isinstance(made, StudentAnswersClaim)
    return made


def train_student(
    place: Run,
    claim: StudentAnswersClaim,
    private: Private,
    public: Public,
    *,
    teachers: Teachers | None = None,
    learner: StudentLearner | None = None,
    owners: Any = None,
    measured: Measured = lambda model: {},
    beside: VotesRelease | None = None,
) -> Student:
    """A student of private teachers, released with its report. `private` are records and classes, or
    a function that opens them.

    `public` are inputs without labels, of the same shape, or a function; `place.public_data` must
    declare them. As many of them are asked about as the claim has questions, chosen by a public
    seed. `owners` say whose each record is, or are a function that reads it: the person is then the
    unit. `beside` is
    released from the same votes, and reserved with the answers (of dpfy-lab: `VoteBill.of(claim)`,
    what the answers told about the votes at hand).

    Guarantees: all answers are reserved before a private record is read, and each is taken from
    that, durably, before its noise is drawn. Every unit is known to one teacher. What the student
    is given are public inputs and answers: so all that is released is as private as the answers. A
    run that was killed goes on with `Run(..., resume=True)`.
    """
    if not place.public_data:
        raise InvalidInput(
            "public_data",
            (),
            "must declare the public inputs that the student learns from, for its report",
        )
    if claim.unit != EXAMPLE and owners is None:
        raise InvalidInput(
            "owners",
            None,
            f"must say whose each record is: the claim protects one {claim.unit.name}",
        )
    others = () if beside is None else (beside.fitting(claim),)
    if claim.rule == regression.MEAN:
        raise InvalidInput("claim", claim.rule, "is about numbers: use train_number_student")
    if complete(place, claim, *others):
        return _loaded(place.path)
    school = _School(claim, private, public, teachers or GraphTeachers(), owners)
    with PrivatePredictor(place, claim, school.taught, beside=others) as predictor:
        answers = [answer.label for answer in predictor.answer_all(school.questions)]
        lesson = school.lesson(answers)
        model = (learner or SemiSupervised()).learn(lesson)
        shape, folder = tuple(lesson.inputs.shape[1:]), predictor.folder
        folder.write(
            STUDENT_ANSWERS, json.dumps({"rows": school.rows.tolist(), "answers": answers}).encode()
        )
        folder.write(STUDENT_MODEL, students.to_bytes(model, shape, claim.classes))
        facts = {
            "teachers": _words(school.means),
            "public_inputs": len(lesson.inputs),
            "answered": len(lesson.rows),
        }
        folder.tell(claim.name, **facts, **measured(model))
        if beside is not None:
            beside.release(folder, school.votes())
        predictor.finish()
    return _loaded(place.path)


class _School:
    """What is asked about, and by whom it is answered: opened when the claim is reserved."""

    inputs: Tensor
    known: DiffusionMap
    rows: NDArray[np.int64]
    _made: NetworkVoters | LinearVoters

    def __init__(
        self,
        claim: StudentAnswersClaim,
        private: Private,
        public: Public,
        means: Teachers,
        owners: Any,
    ) -> None:
        self.claim, self.means = claim, means
        self._private, self._public, self._owners = private, public, owners

    def taught(self, folder: RunFolder) -> Voters:
        """The teachers. What all of them share is made from public inputs alone."""
        self.inputs = _inputs(self._public() if callable(self._public) else self._public)
        if self.claim.queries > len(self.inputs):
            raise InvalidInput(
                "queries",
                self.claim.queries,
                f"must be at most the number of public inputs ({len(self.inputs)})",
            )
        self.rows = np.random.default_rng(0).permutation(len(self.inputs))[: self.claim.queries]
        x, y = self._private() if callable(self._private) else self._private
        if callable(self._owners):
            self._owners = self._owners()
        table, labels = checked(x, y, self.claim.classes)
        if table.shape[1:] != tuple(self.inputs.shape[1:]):
            raise InvalidInput(
                "public",
                f"shape {tuple(self.inputs.shape[1:])}",
                f"must be {table.shape[1:]}, as the records",
            )
        self.known = DiffusionMap(features(self.inputs))
        shape = {"voters": self.claim.voters, "classes": self.claim.classes}
        if isinstance(self.means, NetworkTraining):
            made: NetworkVoters | LinearVoters = teach_networks(
                table,
                labels,
                **shape,
                training=self.means,
                owners=self._owners,
                randomness=folder.randomness,
            )
        else:
            places = shards(len(table), self.claim.voters, folder.randomness, self._owners)
            read = _read(coordinates(self.known, table, places), self.means)
            made = ridge(read, labels, places, **shape, strength=self.means.strength)
        whose = (
            None
            if self._owners is None
            else [str(owner) for owner in np.asarray(self._owners).ravel().tolist()]
        )
        self._made = made
        return OfRecords(made, table, labels, json.dumps([_words(self.means), whose]))

    def votes(self) -> NDArray[np.int64]:
        """What teachers say about the questions: private."""
        return np.asarray(self._made.votes(self.questions))

    @property
    def questions(self) -> NDArray[np.float32]:
        """What teachers are asked about the chosen inputs."""
        if isinstance(self.means, NetworkTraining):
            return np.asarray(self.inputs[torch.from_numpy(self.rows)].flatten(1).numpy())
        return _read(self.known.own, self.means)[self.rows]

    def lesson(self, answers: list[int | None]) -> Lesson:
        """What the student is given."""
        answered = [k for k, label in enumerate(answers) if label is not None]
        labels = np.array([answers[k] for k in answered], dtype=np.int64)
        return Lesson(self.inputs, self.known.own, self.rows[answered], labels, self.claim.classes)


def load(run: Path | str) -> Any:
    """The student of a finished run (`Student`, or `NumberStudent`), its hash checked against report
    and ledger, with the answers that it learnt from.
    """
    released = ReleasedModel.read(run)
    if regression.is_released(released):
        return regression.load(run)
    model, *_ = loaded(released)
    held = storage.parsed_json(
        STUDENT_ANSWERS,
        storage.content(STUDENT_ANSWERS, released.file(STUDENT_ANSWERS), most=storage.MOST_DATA),
    )
    rows = np.array(held["rows"], dtype=np.int64)
    return Student(released.folder, model, rows, held["answers"])


def _loaded(run: Path | str) -> Student:
    found = load(run)
    assert isinstance(found, Student)
    return found


def loaded(released: ReleasedModel) -> tuple[nn.Module, tuple[int, ...], int]:
    """The student, the shape of its inputs and the number of its classes."""
    content = storage.content(STUDENT_MODEL, released.file(STUDENT_MODEL), most=storage.MOST_DATA)
    return students.of_bytes(content, STUDENT_MODEL)


def features(inputs: Tensor) -> Tensor:
    """What maps read of inputs: images of one channel scattered, by public rules; all else as it
    is, flat.
    """
    scatter = _scattering(tuple(inputs.shape[1:]))
    with torch.no_grad():
        return torch.cat([scatter(part) for part in inputs.split(CHUNK)])


def _scattering(shape: tuple[int, ...]) -> nn.Module:
    if len(shape) == students.IMAGE and shape[0] == 1 and min(shape[1:]) >= LEAST_SIDE:
        return ScatteringFeatures(SCATTERING.groups, SCATTERING.scale)
    return nn.Flatten()


@torch.no_grad()
def coordinates(
    known: DiffusionMap, table: NDArray[np.float32], places: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Coordinates of private records, in their order; `places` says whose teacher's each is.

    Guarantees: those of a record are computed beside records of its own teacher alone, in blocks of
    one size that are filled with zeros: to the last bit they do not depend on what other teachers
    know.
    """
    scatter = _scattering(table.shape[1:])
    found = np.empty((len(table), known.own.shape[1]), np.float32)
    order = np.argsort(places, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(places[order])) + 1):
        for start in range(0, len(own), BLOCK):
            rows = own[start : start + BLOCK]
            block = np.zeros((BLOCK, *table.shape[1:]), np.float32)
            block[: len(rows)] = table[rows]
            found[rows] = known.of(scatter(torch.from_numpy(block)))[: len(rows)]
    return found


@dataclass(frozen=True, eq=False)
class OfRecords:
    """Teachers that are known again by the records they were made of: made again after a crash,
    they may differ in their last digits.

    That is enough, since noise that was drawn is never drawn again: a run that goes on begins after
    it.
    """

    made: Voters
    records: NDArray[np.float32] = field(repr=False)
    labels: NDArray[np.int64] = field(repr=False)
    settings: str

    @property
    def count(self) -> int:
        """How many there are."""
        return self.made.count

    @property
    def classes(self) -> int:
        """How many answers there are."""
        return self.made.classes

    @property
    def features(self) -> int:
        """How many numbers a question has."""
        return self.made.features

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`."""
        return self.made.asked(questions)

    def fingerprint(self) -> bytes:
        """See `predictor.Voters`."""
        whole = hashlib.blake2b(f"{self.settings} {self.records.shape}".encode())
        for part in (self.records, self.labels):
            whole.update(part.tobytes())
        return whole.digest()


def _read(own: NDArray[Any], means: GraphTeachers) -> NDArray[np.float32]:
    """What teachers read of coordinates."""
    return np.ascontiguousarray(own[:, : means.directions].astype(np.float32))


def _words(means: Teachers) -> str:
    if isinstance(means, GraphTeachers):
        return means.words
    named = means.model.name if isinstance(means.model, ModelConfig) else type(means.model).__name__
    return (
        f"networks ({named}), {means.steps} steps of {means.batch_size} records each, trained side "
        f"by side"
    )


def _inputs(public: Tensor) -> Tensor:
    found = (
        public
        if isinstance(public, Tensor)
        else torch.from_numpy(np.asarray(public, dtype=np.float32))
    )
    if (
        found.dim() < 2
        or not found.dtype.is_floating_point
        or not bool(torch.isfinite(found).all())
    ):
        raise InvalidInput(
            "public",
            f"{found.dtype} of shape {tuple(found.shape)}",
            "must be records of finite numbers, one a row",
        )
    return found.float()
