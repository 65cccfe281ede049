"""Private numbers: voters that say a number in a public range, and a student that learns from noisy
means of them (PATE for regression).

Every voter is a ridge regression of its own records, on the features and on cosines of public
random projections of them. What it says is moved into the range and rounded to a public grid, so
that one unit moves the sum by at most the range. The noise is that of the sum
(`dpfy.prediction.rules.NoisyMean`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.files import DataFile
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.core.unit import EXAMPLE, Person, Unit, single_owner
from dpfy.core.values import Bound, Bounded
from dpfy.data.features import encoded
from dpfy.data.table import check_columns
from dpfy.prediction import plan
from dpfy.prediction.claim import STUDENT_ANSWERS, STUDENT_MODEL, StudentAnswersClaim
from dpfy.prediction.predictor import PrivatePredictor
from dpfy.prediction.rules import Ask
from dpfy.prediction.voters import ABOUT, NUMBERS, ridge_weights, shards
from dpfy.runs.dataset import Dataset
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Run
from dpfy.tables.columns import Number
from dpfy.tables.schema import Schema
from dpfy.tables.sources import cells_of, read_table
from dpfy.tables.table import PrivateTable, owner_names
from dpfy.training.load import ReleasedModel
from dpfy.training.predict import NOTE

META = "dpfy numbers"
MEAN = "mean"
"""The rule of numbers."""
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3)
"""Of which the student takes the best on answers that it left out: they are released."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Waves:
    """Public features: the inputs, and `count` cosines of random projections of them; a small
    `width` bends faster. Inputs are best in a public scale, about -1 to 1.
    """

    count: int = 100
    width: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        check.integer("waves.count", self.count, least=0, most=1 << 14)
        check.positive("waves.width", self.width)
        check.integer("waves.seed", self.seed, least=0)

    def of(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """The features of rows, each by itself."""
        rng = np.random.default_rng(self.seed)
        slopes = rng.normal(size=(x.shape[1], self.count)) / self.width
        turned = x.astype(np.float64) @ slopes + rng.uniform(0, 2 * math.pi, self.count)
        cosines = np.cos(turned) * math.sqrt(2 / max(1, self.count))
        return np.hstack([x, cosines]).astype(np.float32)


@dataclass(frozen=True, eq=False, repr=False)
class NumberVoters:
    """Voters that say numbers from `low` to `high`, linear in the features of `waves`: `weights`
    are [features and a constant, voters], for numbers from -1 to 1.
    """

    weights: NDArray[np.float32]
    low: float
    high: float
    waves: Waves = Waves()

    classes = plan.POINTS

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.weights.shape[1])

    @property
    def features(self) -> int:
        """How many numbers a question has."""
        return int(self.weights.shape[0]) - 1 - self.waves.count

    def places(self, questions: NDArray[Any]) -> NDArray[np.int64]:
        """Where each voter's number lies on the grid: [questions, voters].

        Guarantees: every place is on the grid, whatever the weights are.
        """
        wide = self.waves.of(questions)
        said = wide @ self.weights[:-1] + self.weights[-1]
        inside = np.clip(np.nan_to_num(said.astype(np.float64)), -1.0, 1.0)
        return np.rint((inside + 1) / 2 * (self.classes - 1)).astype(np.int64)

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`: the sum of the places."""
        moved = Bound.scalar(float(self.classes - 1))
        sums = self.places(questions).sum(axis=1)
        return [lambda bits, total=int(total): Bounded(total, moved) for total in sums]  # type: ignore[misc]

    def fingerprint(self) -> bytes:
        """See `predictor.Voters`."""
        return hashlib.blake2b(self._packed()).digest()

    def save(self, folder: Path, **about: Any) -> None:
        """Put them into a folder, readable by their owner alone: they are as private as the data
        they were made from.
        """
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        write_atomically(folder / NUMBERS, self._packed(), mode=PRIVATE_MODE)
        write_atomically(folder / ABOUT, json.dumps(about).encode(), mode=PRIVATE_MODE)

    @classmethod
    def load(cls, folder: Path) -> tuple[NumberVoters, dict[str, Any]]:
        """The voters that `save` wrote, and what was said about them."""
        about = storage.parsed_json(ABOUT, storage.content("voters", folder / ABOUT, name=ABOUT))
        content = storage.content("voters", folder / NUMBERS, most=storage.MOST_DATA, name=NUMBERS)
        held, said = _read(content, NUMBERS)
        return cls(held.numpy(), said["low"], said["high"], Waves(**said["waves"])), about

    def _packed(self) -> bytes:
        return _bytes(torch.from_numpy(self.weights), self.low, self.high, self.waves)


def teach_numbers(
    x: Any,
    y: Any,
    *,
    voters: int,
    low: float,
    high: float,
    owners: Any = None,
    waves: Waves | None = None,
    strength: float = 0.1,
    randomness: Randomness | None = None,
) -> NumberVoters:
    """Voters that say numbers from `low` to `high`: `x` are rows of numbers in a public scale, `y`
    their targets, `owners` whose each row is.

    Args:
        x, y: Private records. A row whose target is no finite number is left out; a feature that is
            none counts as 0.
        voters: How many; each knows its own part of the records.
        low, high: The public range of targets and answers. Targets outside count as its ends.
        owners: Whose each row is, by name; all rows of an owner are known to one voter.
        waves: Public features; 100 cosines where nothing is said.
        strength: How strongly weights are drawn to 0.
        randomness: Deals the records to voters; from the operating system where nothing is said.

    Returns:
        The voters: as private as the records.

    Raises:
        InvalidInput: The records are no table of numbers, or the range is empty.

    Guarantees: every unit (a row, or an owner with all of its rows) is known to one voter alone.

    Example:
        >>> import numpy as np
        >>> x = np.linspace(-1, 1, 400)[:, None]
        >>> voters = teach_numbers(x, 3 * x[:, 0], voters=10, low=-5, high=5)
        >>> voters.count, voters.features
        (10, 1)
    """
    low, high = check.interval("low, high", [low, high])
    check.positive("strength", strength)
    table, found = np.asarray(x, dtype=np.float32), np.asarray(y, dtype=np.float64)
    if table.ndim != 2 or found.shape != (len(table),):
        shapes = f"shapes {table.shape} and {found.shape}"
        raise InvalidInput("x, y", shapes, "must be rows of numbers and one target for each")
    # No cell of a private record raises an error: what is no finite number counts as 0.
    table = np.nan_to_num(table, nan=0.0, posinf=0.0, neginf=0.0)
    secret = Randomness.from_os() if randomness is None else randomness
    places, used = shards(len(table), voters, secret, owners), np.isfinite(found)
    features = waves or Waves()
    weights = np.zeros((table.shape[1] + features.count + 1, voters), np.float32)
    goal = (np.clip(found, low, high) - low) / (high - low) * 2 - 1
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places, minlength=voters))
    for voter, own in enumerate(np.split(order, ends[:-1])):
        rows = own[used[own]]
        if len(rows):
            weights[:, voter] = ridge_weights(features.of(table[rows]), goal[rows], strength)
    return NumberVoters(weights, low, high, features)


class NumberModel(nn.Module):
    """A released student: from rows of numbers to one number each, in the public range."""

    def __init__(self, weights: Tensor, low: float, high: float, waves: Waves) -> None:
        super().__init__()
        self.register_buffer("weights", weights)
        self.low, self.high, self.waves = low, high, waves

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row."""
        wide = torch.from_numpy(self.waves.of(x.detach().cpu().numpy()))
        said = (wide @ self.weights[:-1] + self.weights[-1]).clamp(-1, 1)  # type: ignore[index]
        return self.low + (said + 1) / 2 * (self.high - self.low)

    def to_bytes(self) -> bytes:
        """As safetensors."""
        assert isinstance(self.weights, Tensor)
        return _bytes(self.weights, self.low, self.high, self.waves)


@dataclass(frozen=True, repr=False)
class NumberStudent(Released):
    """What a run leaves: the student, and the numbers that were released about `rows` of the public
    inputs.
    """

    model: NumberModel = field(repr=False)
    rows: NDArray[np.int64] = field(repr=False)
    answers: list[float] = field(repr=False)


def number_claim(
    epsilon: float,
    delta: float,
    *,
    teachers: int,
    low: float,
    high: float,
    answers: int,
    unit: Unit = EXAMPLE,
) -> StudentAnswersClaim:
    """The claim of so many noisy means at (epsilon, delta), from which a student learns."""
    made = plan.numbers(
        epsilon,
        delta,
        voters=teachers,
        low=low,
        high=high,
        answers=answers,
        kind=StudentAnswersClaim,
        unit=unit,
    )
    assert isinstance(made, StudentAnswersClaim)
    return made


OpenRecords = Callable[[], tuple[Any, Any, Any]]
"""Opens the private records: rows, targets, and whose each is (or None)."""


def train_number_student(
    place: Run,
    claim: StudentAnswersClaim,
    private: OpenRecords,
    public: Any,
    *,
    waves: Waves | None = None,
    strength: float = 0.1,
    told: Mapping[str, Any] | None = None,
) -> NumberStudent:
    """A student of private teachers that predicts a number, released with its report.

    Args:
        place: The run; its `public_data` must declare the public inputs.
        claim: `number_claim(...)`.
        private: A function that opens the private records: rows, targets, owners (or None).
        public: Inputs without targets, of the same columns, or a function that opens them.
        waves, strength: As `teach_numbers` has them.
        told: Public facts for the section of the report.

    Returns:
        The student, with the answers that it learnt from.

    Raises:
        InvalidInput: Public inputs are not declared, too few, or of another shape.

    Guarantees: all answers are reserved before a private record is read. The student is given
    public inputs and answers alone, and chooses its own strength by them.
    """
    if not place.public_data:
        rule = "must declare the public inputs that the student learns from, for its report"
        raise InvalidInput("public_data", (), rule)
    if claim.rule != MEAN:
        raise InvalidInput("claim", claim.rule, "must be of numbers: number_claim(...)")
    if complete(place, claim):
        return load(place.path)
    inputs, features = np.zeros((0, 0), np.float32), waves or Waves()

    def taught(folder: RunFolder) -> NumberVoters:
        nonlocal inputs
        inputs = np.asarray(public() if callable(public) else public, np.float32)
        if inputs.ndim != 2 or len(inputs) < claim.queries or not np.isfinite(inputs).all():
            rule = f"must be at least {claim.queries} rows of finite numbers"
            raise InvalidInput("public", f"shape {inputs.shape}", rule)
        x, y, owners = private()
        if claim.unit != EXAMPLE and owners is None:
            rule = f"must say whose each record is: the claim protects one {claim.unit.name}"
            raise InvalidInput("owners", None, rule)
        made = teach_numbers(
            x,
            y,
            voters=claim.voters,
            low=claim.low,
            high=claim.high,
            owners=owners,
            waves=features,
            strength=strength,
            randomness=folder.randomness,
        )
        if made.features != inputs.shape[1]:
            rule = f"must be {made.features}, as the records"
            raise InvalidInput("public: columns", inputs.shape[1], rule)
        return made

    with PrivatePredictor(place, claim, taught) as predictor:
        rows = np.random.default_rng(0).permutation(len(inputs))[: claim.queries]
        answers = [answer.label for answer in predictor.answer_all(inputs[rows])]
        model = number_student(inputs[rows], answers, claim.low, claim.high, features)
        folder = predictor.folder
        released = {"rows": rows.tolist(), "answers": answers}
        folder.write(STUDENT_ANSWERS, json.dumps(released).encode())
        folder.write(STUDENT_MODEL, model.to_bytes())
        words = f"ridge regressions on the inputs and {features.count} cosines of them"
        facts = {"teachers": words, "public_inputs": len(inputs), "answered": len(answers)}
        folder.tell(claim.name, **facts, **(told or {}))
        predictor.finish()
    return load(place.path)


def number_student(
    inputs: NDArray[np.float32], answers: list[float], low: float, high: float, waves: Waves
) -> NumberModel:
    """A ridge regression of released answers on public inputs. Its strength is the one with the
    least error on answers that were left out one by one.
    """
    wide = np.hstack([waves.of(inputs).astype(np.float64), np.ones((len(inputs), 1))])
    goal = (np.asarray(answers, np.float64) - low) / (high - low) * 2 - 1
    u, sizes, vt = np.linalg.svd(wide, full_matrices=False)
    along, best, weights = u.T @ goal, math.inf, np.zeros(wide.shape[1])
    for strength in STRENGTHS:
        kept = sizes**2 / (sizes**2 + strength)
        left = 1 - np.minimum((u**2 * kept).sum(axis=1), 1 - 1e-9)
        error = float((((goal - u @ (kept * along)) / left) ** 2).mean())
        if error < best:
            best, weights = error, vt.T @ (sizes / (sizes**2 + strength) * along)
    return NumberModel(torch.from_numpy(weights.astype(np.float32)), low, high, waves)


def load(run: Path | str) -> NumberStudent:
    """The student of a finished run, its hash checked against report and ledger."""
    released = ReleasedModel.read(run)
    held = storage.parsed_json(
        STUDENT_ANSWERS,
        storage.content(STUDENT_ANSWERS, released.file(STUDENT_ANSWERS), most=storage.MOST_DATA),
    )
    rows = np.array(held["rows"], dtype=np.int64)
    return NumberStudent(released.folder, model_of(released), rows, held["answers"])


def model_of(released: ReleasedModel) -> NumberModel:
    """The student in a finished run."""
    content = storage.content(STUDENT_MODEL, released.file(STUDENT_MODEL), most=storage.MOST_DATA)
    held, said = _read(content, STUDENT_MODEL)
    return NumberModel(held, said["low"], said["high"], Waves(**said["waves"]))


def target_of(schema: Schema, target: str) -> Number:
    """The public column of the target; others than numbers are refused."""
    column = schema.named.get(target)
    if not isinstance(column, Number):
        rule = "must be a column of kind number in the schema, whose range is that of the answers"
        raise InvalidInput("target", target, rule)
    return column


def features_of(cells: Any, schema: Schema, target: str, name: str) -> NDArray[np.float32]:
    """The numbers of rows without their target, each row by itself from public rules."""
    columns = [c for c in schema.features if c.name != target]
    if not columns:
        raise InvalidInput("schema", "no feature", "must hold a column beside the target")
    known = {key: held for key, held in cells.items() if key in schema.names}
    check_columns(known, schema, name, frozenset(column.name for column in columns))
    return encoded(PrivateTable(known, schema), columns)


def opened(data: Dataset, target: str) -> tuple[NDArray[np.float32], Floats, Any]:
    """The private records of a data set: rows, targets (NaN where one is missing), and owners.

    Guarantees: each row is read by itself from public rules.
    """
    schema = data.schema
    single_owner("teaching", None if data.unit is None else data.unit.column)
    column = target_of(schema, target)
    cells = dict(cells_of(data.source, [each.name for each in schema.columns]))
    x = features_of(cells, schema, target, "the data set")
    y = np.asarray(column.settle(PrivateTable(cells, schema).found(target)), np.float64)
    if data.unit is None:
        return x, y, None
    if data.unit.column not in cells:
        raise InvalidInput("unit", data.unit.column, "must be a column of the data")
    names = owner_names(cells[data.unit.column])
    kept = names != ""
    return x[kept], y[kept], names[kept]


def dataset(data: str, schema: str | None, person: str | None, at_most: int | None) -> Dataset:
    """A file of private records with its schema, and the column of the person of each row."""
    if schema is None:
        raise InvalidInput("--schema", None, "must be given: it has the public range of the target")
    if person is None and at_most is None:
        return Dataset(data, schema)
    if person is None or at_most is None:
        raise InvalidInput("--person, --at-most", (person, at_most), "must be given together")
    return Dataset(data, schema, unit=Person(person, at_most=at_most))


def run(
    place: Run, claim: StudentAnswersClaim, data: Dataset, target: str, public: str
) -> NumberStudent:
    """`dpfy serve student --target`: a student of a private table, on a file of public rows.

    Guarantees: no file is read before all answers are reserved.
    """
    reads = {"kind": "table", "target": target, "schema": data.schema.to_toml().splitlines()}

    def inputs() -> NDArray[np.float32]:
        file = DataFile.given(public)
        return features_of(read_table(file), data.schema, target, file.name)

    return train_number_student(
        place, claim, lambda: opened(data, target), inputs, told={"reads": reads}
    )


@dataclass(frozen=True)
class NumberPredictions:
    """What a student says about rows: one number each."""

    values: tuple[float, ...]

    def predicted(self) -> list[float]:
        """The number for each row."""
        return list(self.values)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"records": len(self.values), "predictions": list(self.values), "note": NOTE}

    def to_csv(self) -> str:
        """As CSV."""
        return "\n".join(["prediction", *(f"{value:.6g}" for value in self.values)]) + "\n"


def predicted(released: ReleasedModel, data: Path | str) -> NumberPredictions:
    """What the student of a finished run of the command line says about the rows of a file."""
    reads = next(part for part in released.card["sections"] if part["name"] == "student").get(
        "reads"
    )
    if reads is None:
        rule = "was made by a program: load its student with dpfy.prediction.load(run).model"
        raise InvalidInput("run", str(released.folder), rule)
    schema, file = Schema.parse("\n".join(reads["schema"]), "its schema"), DataFile.given(str(data))
    x = features_of(read_table(file), schema, reads["target"], file.name)
    said = model_of(released)(torch.from_numpy(x))
    return NumberPredictions(tuple(round(float(value), 6) for value in said))


def taught_numbers(data: Dataset, target: str, voters: int) -> tuple[NumberVoters, dict[str, Any]]:
    """Voters from a data set, and what is public about them."""
    low, high = target_of(data.schema, target).range
    x, y, owners = opened(data, target)
    made = teach_numbers(x, y, voters=voters, low=low, high=high, owners=owners)
    about: dict[str, Any] = {"target": target}
    return made, about | ({} if data.unit is None else {"most_records": data.unit.at_most})


def _bytes(weights: Tensor, low: float, high: float, waves: Waves) -> bytes:
    said = {"low": low, "high": high, "waves": vars(waves)}
    return save_tensors({"weights": weights.contiguous()}, {META: json.dumps(said)})


def is_released(released: ReleasedModel) -> bool:
    """Whether a finished run holds a student of numbers."""
    section = next(part for part in released.card["sections"] if part["name"] == "student")
    return "points" in section


def _read(content: bytes, name: str) -> tuple[Tensor, dict[str, Any]]:
    try:
        size = int.from_bytes(content[:8], "little")
        said = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][META])
        return load_tensors(content)["weights"], said
    except (ValueError, KeyError, TypeError, SafetensorError):
        raise Corrupt(name, "does not hold voters or a student of numbers") from None
