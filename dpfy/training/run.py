"""The folder of a training run: its claims are a plan, and a billed evaluation where one is asked
for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from dpfy.core import check, storage
from dpfy.core.claim import Claim, Reserved
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Permit
from dpfy.plan.claim import EvaluationClaim, ForeignBatches, TrainingClaim, read_plan
from dpfy.plan.recipe import Plan
from dpfy.runs import folder
from dpfy.runs.folder import CARD, LEDGER, ended, finish_erasure

TRAINING, EVALUATION = TrainingClaim.kind, EvaluationClaim.kind
__all__ = [
    "CARD",
    "EVALUATION",
    "LEDGER",
    "TRAINING",
    "Run",
    "TrainingRun",
    "complete",
    "ended",
    "finish_erasure",
    "load_plan",
]


@dataclass(frozen=True)
class Run(folder.Place):
    """Where a training run lives and what it may spend.

    A checkpoint is written whenever `checkpoint_every` seconds have passed (infinity: only when
    `save` is called); the bits released do not depend on it. `batches` says how batches are formed
    if not by dpfy: such a run is billed without amplification, in every ledger. `evaluation` is the
    noise multiplier of a billed evaluation on private held-out records (`dpfy.fit`), reserved and
    billed beside the plan. `beside` are the claims of other releases that are made in the same
    folder, before training.
    """

    checkpoint_every: float = 30.0
    batches: ForeignBatches | None = None
    evaluation: float | None = None
    beside: tuple[Claim, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_every != math.inf:
            check.nonnegative("checkpoint_every", self.checkpoint_every)
        if self.evaluation is not None:
            EvaluationClaim(self.evaluation)

    def claims(self, plan: Plan) -> tuple[Claim, ...]:
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


class TrainingRun(folder.RunFolder):
    """The opened folder of a run of `plan`. `part` names the part of the data that it must train
    on; None where any data will do.
    """

    run: Run
    part: str | None = None

    def __init__(self, run: Run, plan: Plan) -> None:
        self.plan = plan
        super().__init__(run, *run.claims(plan))

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
        """The right to release the counts of the evaluation, once; from now on it is billed for
        good, in every ledger.
        """
        if EVALUATION not in self.stages:
            raise InvalidInput(
                "evaluation", None, "nothing was reserved for it before the data was read"
            )
        return self.begin(EVALUATION)


def complete(run: Run, plan: Plan) -> bool:
    """Whether `run` resumes a run of `plan` that is finished; what a crash after its end has left
    to do is done now.
    """
    return folder.complete(run, *run.claims(plan))


def load_plan(place: Path) -> Plan:
    """The plan a run folder holds."""
    try:
        text = storage.content("plan.json", place / "plan.json", name="plan.json")
    except InvalidInput as problem:
        raise Corrupt("plan.json", problem.rule) from None
    return read_plan("plan.json", storage.parsed_json("plan.json", text))
