"""Private answers in this process: teachers are made of a data set, and a call answers a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Person, single_owner
from dpfy.data.table import unlabelled
from dpfy.prediction import plan, regression
from dpfy.prediction.claim import VoteClaim
from dpfy.prediction.predictor import Prediction, PrivatePredictor
from dpfy.prediction.regression import NumberVoters
from dpfy.prediction.voters import LinearVoters, teach
from dpfy.runs.dataset import Dataset
from dpfy.runs.folder import RunFolder, held_claims
from dpfy.runs.released import Released
from dpfy.runs.run import Run
from dpfy.tables.schema import training_schema
from dpfy.training.table import read

VOTERS = 100
"""Teachers, where nothing is said."""


class Service:
    """Answers to questions about a data set, as many as were reserved. Use it as a context.

    On leaving, the run is finished and `released` holds its guarantee and report; after an error it
    stays, to go on with ``run=dpfy.Run(path, resume=True)``.

    Guarantees: those of `dpfy.prediction.PrivatePredictor`. All rows of a person make one teacher,
    so that a person changes one vote.
    """

    def __init__(
        self, data: Dataset, claim: VoteClaim, run: Run, delta_from: str, target: str | None = None
    ) -> None:
        self._data, self._claim, self._run, self._delta_from = data, claim, run, delta_from
        self._predictor: PrivatePredictor | None = None
        self.target = target
        self.schema = training_schema(data.schema) if target is None else data.schema
        self.released: Released | None = None

    def __repr__(self) -> str:
        claim = self._claim
        return f"Service({claim.answers} answers from {claim.voters} teachers, {self._run.path})"

    @property
    def classes(self) -> tuple[str, ...]:
        """What an answer may be; nothing where it is a number."""
        return self.schema.label.classes if self.target is None else ()

    def answer(self, question: Any) -> Prediction:
        """The answer to one question: the public cells of a row by name (a column that is left out
        counts as missing), or its numbers as a learner reads them (`people.width` of them).

        Raises:
            InvalidInput: It is no such row, or the service is not open.
        """
        return self.answer_all([question])[0]

    def answer_all(self, questions: Any) -> list[Prediction]:
        """Answers to several questions, in their order."""
        if self._predictor is None:
            rule = "must be open: with dpfy.serve(people, ...) as service: service.answer(x)"
            raise InvalidInput("service", "closed", rule)
        found = self._predictor.answer_all(np.stack([self._numbers(row) for row in questions]))
        if self.target is not None:
            return found
        return [
            replace(each, label=None if each.label is None else self.classes[int(each.label)])
            for each in found
        ]

    def left(self) -> dict[str, int]:
        """How many answers can still be given."""
        return {} if self._predictor is None else self._predictor.left()

    def _numbers(self, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return np.asarray(row, np.float32).reshape(-1)
        cells: dict[str, Any] = {column.name: [None] for column in self.schema.features}
        cells |= {str(name): [cell] for name, cell in row.items()}
        if self.target is not None:
            return regression.features_of(cells, self.schema, self.target, "the question")[0]
        return unlabelled(cells, self.schema, "the question").numpy()[0]

    def _taught(self, folder: RunFolder) -> LinearVoters | NumberVoters:
        """The teachers: the data is read here, when all is reserved."""
        if self.target is not None:
            rows, goals, whose = regression.opened(self._data, self.target)
            return regression.teach_numbers(
                rows,
                goals,
                voters=self._claim.voters,
                low=self._claim.low,
                high=self._claim.high,
                owners=whose,
                randomness=folder.randomness,
            )
        records, owners = read(self._data)
        x, y = (tensor.numpy() for tensor in records.tensors[:2])
        return teach(
            x,
            y,
            voters=self._claim.voters,
            classes=len(self.classes),
            owners=owners,
            randomness=folder.randomness,
        )

    def __enter__(self) -> Self:
        """Reserve all answers, then read the data and make the teachers."""
        self._predictor = PrivatePredictor(self._run, self._claim, self._taught)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Finish the run, or after an error leave it."""
        predictor, self._predictor = self._predictor, None
        if predictor is None:
            return
        try:
            if kind is None:
                predictor.folder.tell(self._claim.name, delta_from=self._delta_from)
                self.released = Released.read(predictor.finish())
        finally:
            predictor.__exit__(kind, error, trace)


def serve(
    data: Any,
    *,
    epsilon: float,
    answers: int,
    delta: float | None = None,
    target: str | None = None,
    queries: int | None = None,
    threshold: float = 0.6,
    voters: int = VOTERS,
    schema: Any = None,
    unit: Person | None = None,
    records: int | None = None,
    run: Run | str | Path | None = None,
) -> Service:
    """Answer questions from private records, with a guarantee for each record or person, without
    releasing a model.

        with dpfy.serve(people, epsilon=4.0, answers=200) as service:
            print(service.answer({"age": 40, "job": "nurse"}).label)

    Args:
        data: A `dpfy.Dataset` whose schema has a label, or a `target`; or what one is made of.
        epsilon, delta: What all answers together cost. Without `delta` that of the data set, or the
            one that follows from `records`.
        answers: How many questions are answered at most.
        target: A column of numbers: an answer is then a number in its public range, the mean of
            what the teachers say with noise.
        queries: Ask whether the teachers agree first, this often at most.
        threshold: The part of the teachers that must agree, with `queries`.
        voters: How many teachers; each knows its own part of the records.
        schema, unit, records: What is public about `data` where it is no Dataset.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.

    Returns:
        The service, to be used as a context.

    Raises:
        InvalidInput: A value does not fit its rule, or the schema has no label and no target is
            named.
        BudgetExceeded: The budget of the data set does not cover it.

    Guarantees: all answers are reserved before the data is read.

    Example:
        >>> import numpy as np
        >>> import dpfy
        >>> x = np.random.default_rng(0).uniform(0, 100, 600)
        >>> rows = {"age": x, "sick": np.where(x > 50, "yes", "no")}
        >>> schema = [dpfy.Number("age", 0, 100), dpfy.Label("sick", ["no", "yes"])]
        >>> people = dpfy.Dataset(rows, schema)
        >>> with dpfy.serve(people, epsilon=8.0, delta=1e-5, answers=3, voters=20) as service:
        ...     answer = service.answer({"age": 90}).label
        >>> answer in ("no", "yes")
        True
    """
    held = Dataset.of(data, schema, unit=unit, records=records)
    single_owner("teaching", None if held.unit is None else held.unit.column)
    chosen, place = held.rule(delta), held.run(run)
    shape: dict[str, Any] = {
        "voters": check.integer("voters", voters, least=2),
        "unit": held.privacy_unit,
    }
    if target is None:
        shape["classes"] = len(training_schema(held.schema).label.classes)
    else:
        shape |= dict(
            zip(("low", "high"), regression.target_of(held.schema, target).range, strict=True)
        )
    if place.resume and (Path(place.path) / "ledger.jsonl").is_file():
        claim = next(iter(held_claims(Path(place.path))), None)
        if not isinstance(claim, VoteClaim):
            raise InvalidInput("run", str(place.path), "holds no service to go on with")
        return Service(held, claim, place, chosen.origin, target)
    kind = plan.gaussian if target is None else plan.numbers
    make = partial(kind, epsilon, chosen.value, answers=answers, **shape)
    if queries is not None and target is not None:
        raise InvalidInput("queries", queries, "goes with classes: every number is answered")
    if queries is not None:
        make = partial(
            plan.confident,
            epsilon,
            chosen.value,
            queries=queries,
            answers=answers,
            threshold=threshold,
            **shape,
        )
    return Service(held, make(), place, chosen.origin, target)
