"""The folder of a training run: its claims are a plan, and a charged evaluation where one is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpfy.core import storage
from dpfy.core.claim import Claim, Reserved
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Permit
from dpfy.plan.claim import EvaluationClaim, ForeignBatches, TrainingClaim, read_plan
from dpfy.plan.recipe import Plan
from dpfy.runs import folder
from dpfy.runs.folder import CARD, LEDGER, ended, finish_erasure
from dpfy.runs.run import Run

TRAINING, EVALUATION = TrainingClaim.kind, EvaluationClaim.kind
__all__ = [
    "CARD",
    "EVALUATION",
    "LEDGER",
    "TRAINING",
    "TrainingClaims",
    "TrainingRun",
    "complete",
    "ended",
    "finish_erasure",
    "load_plan",
]


@dataclass(frozen=True)
class TrainingClaims:
    """What a training run promises beside the steps of its plan.

    `batches` says how batches are formed if not by dpfy: such a run is charged without
    amplification, in every ledger. `evaluation` is the noise multiplier of a charged evaluation on
    private held-out records (`dpfy.fit`). `beside` are the claims of other releases that are made
    in the same folder, before training.
    """

    batches: ForeignBatches | None = None
    evaluation: float | None = None
    beside: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        if self.evaluation is not None:
            EvaluationClaim(self.evaluation)

    def of(self, plan: Plan) -> tuple[Claim, ...]:
        """All that a run of `plan` promises; training first."""
        held: list[Claim] = [TrainingClaim(plan, self.batches), *self.beside]
        if self.evaluation is not None:
            about = {
                "unit": plan.recipe.unit,
                "adjacency": plan.recipe.adjacency,
                "delta": plan.delta,
            }
            held.append(EvaluationClaim(self.evaluation, accountant=plan.accountant, **about))  # type: ignore[arg-type]
        return tuple(held)


PLAN_ALONE = TrainingClaims()


class TrainingRun(folder.RunFolder):
    """The opened folder of a run of `plan`. `part` names the part of the data that it must train
    on; None where any data will do. `promised` is what the run promises beside the plan.
    """

    part: str | None = None
    promised: TrainingClaims = PLAN_ALONE

    def __init__(
        self,
        run: Run | Path | str | None,
        plan: Plan,
        *,
        batches: ForeignBatches | None = None,
        evaluation: float | None = None,
        beside: Sequence[Claim] = (),
    ) -> None:
        self.plan = plan
        self.promised = TrainingClaims(batches, evaluation, tuple(beside))
        super().__init__(Run.of(run), *self.promised.of(plan))

    @property
    def reserved(self) -> Reserved:
        """Training as the ledger states it."""
        return self.stages[TRAINING].reserved

    @property
    def permit(self) -> Permit:
        """The right to make the plan's steps; closed until `note_begun`."""
        return self.stages[TRAINING].permit

    def note_begun(self) -> None:
        """Write down, before the first release, that steps will be made."""
        self.begin(TRAINING)

    def begin_evaluation(self) -> Permit:
        """The right to release the counts of the evaluation, once; from now on it is charged for
        good, in every ledger.
        """
        if EVALUATION not in self.stages:
            raise InvalidInput(
                "evaluation", None, "nothing was reserved for it before the data was read"
            )
        return self.begin(EVALUATION)


def complete(run: Run, plan: Plan, promised: TrainingClaims = PLAN_ALONE) -> bool:
    """Whether `run` resumes a run of `plan` that is finished; what a crash after its end has left
    to do is done now.
    """
    return folder.complete(run, *promised.of(plan))


def load_plan(place: Path) -> Plan:
    """The plan a run folder holds."""
    try:
        text = storage.content("plan.json", place / "plan.json", name="plan.json")
    except InvalidInput as problem:
        raise Corrupt("plan.json", problem.rule) from None
    return read_plan("plan.json", storage.parsed_json("plan.json", text))
