"""The run folder as ranks other than 0 see it: rank 0 owns it, holds its lock and writes it; they
read the ledger in it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from dpfy.core.claim import Reserved
from dpfy.core.errors import Busy, Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger, Permit
from dpfy.core.randomness import Randomness
from dpfy.plan.recipe import Plan
from dpfy.runs.mark import HIDDEN
from dpfy.runs.run import Run
from dpfy.training.parallel.world import World, restarted
from dpfy.training.run import CARD, LEDGER, PLAN_ALONE, TRAINING, TrainingClaims, TrainingRun

PATIENCE = 30.0
"""Seconds to wait for the lock of a run whose processes torchrun has just ended."""


class ReadOnlyRun:
    """Of an opened run folder what a rank needs that did not open it. `randomness` came from rank
    0, over the process group.

    Guarantees: nothing here writes. A permit is one that the ledger on disk holds, for this plan;
    it opens only when rank 0 has written there, durably, that steps will be made.
    """

    part: str | None = None

    def __init__(
        self,
        run: Run,
        plan: Plan,
        randomness: Randomness,
        fresh: bool,
        promised: TrainingClaims = PLAN_ALONE,
    ) -> None:
        self.run, self.plan, self.randomness, self.fresh = run, plan, randomness, fresh
        self.promised = promised
        self.path = Path(run.path)
        self.secrets = self.path / HIDDEN
        self.state = self.secrets / "state.safetensors"
        self.in_use = False
        self.told: dict[str, dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        if not (self.path / LEDGER).is_file():
            rule = (
                "must be a folder that all ranks see, as rank 0 does: put it on a file system that "
                "they share"
            )
            raise InvalidInput("run", str(self.path), rule)
        self.ledger = Ledger.read(self.path / LEDGER)
        held = next((p for p in self.ledger.permits() if p.name == TRAINING), None)
        if held is None:
            raise Corrupt(LEDGER, "holds no reservation for training")
        self.permit: Permit = held
        self.reserved = Reserved.from_json(held.claim)
        if self.reserved.claim not in self.promised.of(self.plan):
            raise InvalidInput(
                "plan", "another plan than rank 0's", "must be the same on all ranks"
            )

    @property
    def finished(self) -> bool:
        """Whether the report is written."""
        return (self.path / CARD).is_file()

    @property
    def begun(self) -> bool:
        """Whether releases may have been made."""
        return not self.permit.closed

    def has_begun(self, *names: str) -> bool:
        """Whether steps may have been made."""
        return self.begun

    def note_begun(self) -> None:
        """Take the permit that rank 0 has opened."""
        if self.permit.closed:
            self._read()

    def begin_evaluation(self) -> Permit:
        """Refused: what is charged beside the steps is released by rank 0."""
        raise Unsupported(
            "a charged evaluation on another rank than 0", "evaluate where training.world.first"
        )

    def bind(self, name: str, content: bytes) -> None:
        """Refused, as above."""
        self.begin_evaluation()

    def tell(self, name: str, **facts: Any) -> None:
        """What is told for the report by rank 0 counts."""

    def abandon(self) -> None:
        """Rank 0 does it."""

    def __enter__(self) -> Self:
        """As an opened folder is used."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""


def taken(
    world: World,
    run: Run | TrainingRun | ReadOnlyRun,
    plan: Plan,
    promised: TrainingClaims = PLAN_ALONE,
) -> TrainingRun | ReadOnlyRun:
    """The opened folder, for one training at a time, by the plan that it was opened for: that is
    what its ledger holds.
    """
    folder = opened(world, run, plan, promised)
    if folder.plan != plan:
        raise InvalidInput(
            "plan",
            "another plan than the folder's",
            "must be the one that the folder was opened with, which is what is charged",
        )
    if folder.in_use:
        raise Busy(
            f"run {folder.path.name}: another training is using it; wait for it to end or choose "
            f"another folder"
        )
    folder.in_use = True
    return folder


def opened(
    world: World,
    run: Run | TrainingRun | ReadOnlyRun,
    plan: Plan,
    promised: TrainingClaims = PLAN_ALONE,
) -> TrainingRun | ReadOnlyRun:
    """The folder of the run: rank 0 opens it and reserves the plan; the others then follow, with
    its secret.

    Guarantees: no rank goes on before the reservation is on disk. The secret is in the memory of
    the ranks and in rank 0's folder alone.
    """
    if world.first:
        folder = _opened(run, plan, promised) if isinstance(run, Run) else run
        if isinstance(folder, ReadOnlyRun):
            raise InvalidInput("run", "a folder that rank 0 holds", "is for the other ranks")
        secret = [
            folder.randomness.secret.hex(),
            folder.randomness.fixed,
            folder.fresh,
            str(folder.path.absolute()),
        ]
        try:
            world.exchange("the opening of the run", secret if world.count > 1 else None)
        except BaseException as error:
            folder.__exit__(type(error), error, None)
            raise
        return folder
    if isinstance(run, TrainingRun):
        raise InvalidInput(
            "run", "an opened folder", "is opened by rank 0 alone; give Run(path) on every rank"
        )
    secret, fixed, fresh, path = world.exchange("the opening of the run")[0]
    if isinstance(run, ReadOnlyRun):
        return run
    return ReadOnlyRun(
        replace(run, path=path), plan, Randomness(bytes.fromhex(secret), fixed), fresh, promised
    )


def _opened(run: Run, plan: Plan, promised: TrainingClaims) -> TrainingRun:
    """Open the folder. Processes that torchrun started again resume what they began, and wait for
    those before them to be gone.
    """
    if not restarted() or not Path(run.path).is_dir():
        return TrainingRun(run, plan, **vars(promised))
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return TrainingRun(replace(run, resume=True), plan, **vars(promised))
        except Busy:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
