"""The check of a training run: at some steps it records what the user's code does with a batch, and
checks that no example reaches another.

Which steps: the first two with records, the first after a resume, one in each part of the run,
chosen by the run's secret, more of them where time allows, and steps that call torch from places
that no checked step did. A refusal ends the run permanently.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.gradients.checker import LossProbe, probe_call
from dpfy.isolation.comparison import READ, UNREAD, check_flow
from dpfy.isolation.fingerprint import FIELD, fingerprint
from dpfy.isolation.monitored_steps import MonitoredSteps
from dpfy.isolation.operations import BATCH, CARRIED, DATA, Unrecordable
from dpfy.isolation.program import Program, addresses
from dpfy.isolation.recorder import OperationRecorder, compiled
from dpfy.isolation.replacements import Replacements, TrainingRecords
from dpfy.isolation.run_fingerprint import AS_STARTED, RunFingerprint
from dpfy.isolation.schedule import CheckBudget, CheckLevel, CheckSchedule, Stopwatch
from dpfy.isolation.step_check import StepCheck, require_recorded
from dpfy.isolation.summary import CheckFile, CheckSummary

FIRST = 2
"""Steps at the beginning that are recorded, with two physical batches each where there are two."""

OPERATION = 5e-5
"""What recording one operation takes, in seconds, in the forward pass."""


@dataclass
class IsolationCheck:
    """Records and checks the steps of one training. `begin` when a batch is handed out, `end` with
    its losses, before the sum, and `after` when the step is made, until the next batch is asked for
    (`pause`).

    Args:
        model: The model that is trained.
        engine: The engine that sums its clipped gradients.
        records: The training records.
        randomness: The run's secret.
        steps: How many steps the run has.
        file: Where to keep the fingerprint, a refusal and what was checked.
        varies: Whether batches have random sizes.
        keeps: Whether this process writes the file; any process writes a refusal.
        alone: Whether this is the only process of the run. Of several, all check the same steps.

    Guarantees: if a checked step mixes examples, or what was kept from one step enters the next, or
    a resumed run computes something else than before, `end` raises, nothing of that step is
    released, and `require_sound` raises from then on. Once steps were released the refusal is kept
    in the run's folder, and a resumed run refuses too.
    """

    model: nn.Module
    engine: Any
    records: TrainingRecords
    randomness: Randomness
    steps: int
    file: Path
    varies: bool
    keeps: bool = True
    alone: bool = True
    summary: CheckSummary = field(default_factory=CheckSummary)
    refusal: DpfyError | None = None

    def __post_init__(self) -> None:
        self._file = CheckFile(self.file)
        expected, self.summary = self._file.restore()
        self.fingerprint = RunFingerprint(expected)
        self.schedule = CheckSchedule(self.steps, self.randomness, self.varies)
        self.level = CheckLevel.NOTHING
        self.budget = CheckBudget(self.schedule)
        self.monitored = MonitoredSteps(self.steps, self.randomness, self.budget)
        self._seed = int(self.randomness.generator("checks", 1).integers(1 << 40))
        self._done = self._step = self._place = 0
        self._looked = self._follow = -1
        self._next_look = -1
        self._pending = self._isolated = False
        self._begun = 0.0
        self._carried: dict[int, StorageWeakRef] = {}
        self._elsewhere: dict[int, StorageWeakRef] | None = None
        self._recorder: OperationRecorder | None = None
        self._probe: LossProbe | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._weights: set[int] = set()
        self._shapes: list[torch.Size] | None = None
        self._collects = True

    def isolate(self, how: str) -> None:
        """Make no checks in this process: anyone who calls computes the loss of each record without
        the other records, as `how` says.

        A run that was started with checks cannot go on without them, nor the other way round (`begin`
        refuses that).
        """
        begun = self.fingerprint.expected is not None or self._done
        if begun or self.summary.constructed not in ("", how):
            raise InvalidInput("resume losses", f"isolated by construction: {how}", AS_STARTED)
        self._isolated = True
        self.schedule.clear()
        self.monitored.stop()
        self.summary.constructed = how
        self._store(None)

    def level_of(self, step: int) -> CheckLevel:
        """What is to be done at `step`."""
        due, cut = self.schedule.due, self.schedule.cut
        if self._isolated:
            return CheckLevel.NOTHING
        if not self.summary.replayed and (step in due or self._pending):
            return CheckLevel.THOROUGH
        if step in cut:
            return CheckLevel.CHECK
        if step in due or self._pending:
            return CheckLevel.LIGHT
        follows = self._done < FIRST or step == self._follow
        if follows or step + 1 in cut or self.monitored.suspects(step):
            return CheckLevel.RECORD
        further = self.schedule.further(step, self.budget)
        return CheckLevel.LIGHT if further and self.alone and not compiled() else CheckLevel.NOTHING

    def pieces(
        self, step: int, indices: NDArray[np.int64], most: int, row_multiple: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """The physical batches of a step (:meth:`CheckSchedule.pieces`)."""
        return self.schedule.pieces(step, indices, most, row_multiple)

    def empty(self, step: int) -> None:
        """A step without records: a check that was due at it is made at the next."""
        self._pending = self._pending or step in self.schedule.due
        self._next_look = -1 if self._pending else self._next_look

    def begin(self, step: int, batch: tuple[Tensor, ...], first: bool) -> None:
        """Start to record, if this is the first physical batch of a step to look at, or one of a
        step to look for something in; `batch` holds its tensors.

        What was started and never ended is left.
        """
        # Steps between those to look at pass here: they must cost nothing.
        monitored = self.monitored
        due = monitored.due()
        if step < self._next_look and self._recorder is None:
            if not due:
                self.level = CheckLevel.NOTHING
                return
            if not (monitored.unseen or compiled()):
                self.level = CheckLevel.NOTHING
                monitored.begin(step, batch, recorded=False)
                return
        if self.summary.constructed and not self._isolated:
            raise InvalidInput("resume losses", "computed from a whole batch", AS_STARTED)
        if self._recorder is not None:
            self.close()
        self._step, self._place = step, 0 if first else self._place + 1
        self.level = self._level_now(step)
        if self.level >= CheckLevel.LIGHT:
            self._pending = len(batch[0]) < 2
            self.level = CheckLevel.RECORD if self._pending else self.level
        # the second physical batch of a step that was recorded among the first
        early = self._done < FIRST or (self._done == FIRST and self._looked >= step)
        early = early or self._follow > step
        waiting = (early and not self._isolated) or self._pending
        self._next_look = -1 if waiting else self.schedule.next_look(step)
        if not self.alone or self._isolated or compiled():
            monitored.stop()
        else:
            recorded = self.level is not CheckLevel.NOTHING
            monitored.begin(step, batch, recorded)
        if self.level is not CheckLevel.NOTHING:
            self._record(batch)

    def _level_now(self, step: int) -> CheckLevel:
        """What is to be done with a physical batch of `step`."""
        if self._place:
            second = self._place == 1 and self._looked == step and self._done <= FIRST
            wanted = (second and self.alone and not compiled()) or self.monitored.suspects(step)
            return CheckLevel.RECORD if wanted else CheckLevel.NOTHING
        level = self.level_of(step)
        needed = step == 1 or step + 1 in self.schedule.cut
        if level is CheckLevel.RECORD and not needed and compiled():
            # Compiled code runs as it was written while it is recorded, and may round otherwise: a
            # resumed run must not do so where the run before it did not. Another computation is
            # found by the journal of sums.
            return CheckLevel.NOTHING
        return level

    def _record(self, batch: tuple[Tensor, ...]) -> None:
        """Record until `end`."""
        watch, self._batch = Stopwatch(), batch
        monitored = self.monitored
        self._recorder = OperationRecorder(monitored.monitor if monitored.active else None)
        program = self._recorder.program
        self._weights = addresses([*self.model.parameters(), *self.model.buffers()])
        program.carried = self._carried | monitored.kept(self._weights | addresses(batch))
        program.mark(batch, BATCH)
        program.mark(self.records.held, DATA)
        if self.level >= CheckLevel.LIGHT and not self.summary.replayed:
            self._probe = LossProbe(self.model, self.records.rows_each)
        self._collects = gc.isenabled()
        # it would go through all objects of the process for those made here, which are freed at
        # once
        gc.disable()
        self._recorder.start()
        self._begun = watch.seconds

    @property
    def recording(self) -> bool:
        """Whether the batch that is out is being recorded."""
        return self._recorder is not None

    def end(self, losses: Tensor, released: bool) -> None:
        """Check the recorded step. `released` says whether anything was released before it."""
        if self.monitored.active:
            self.monitored.end(recorded=self._recorder is not None)
        if self._recorder is None:
            return
        watch, operations = Stopwatch(), len(self._recorder.program.operations)
        try:
            self._check(losses)
        except DpfyError as refusal:
            self.refuse(refusal, released)
            raise
        finally:
            self.close()
            self.budget.add_check(self._begun + OPERATION * operations + watch.seconds)

    def refuse(self, refusal: DpfyError, released: bool) -> None:
        """End the run permanently; once something was `released`, for processes that resume it too."""
        self.refusal = refusal
        if released and isinstance(refusal, Unsupported):
            self._store(str(refusal))

    def after(self) -> None:
        """The step is made: see what the loop does with its batch until it asks for the next."""
        if self.monitored.active:
            self.monitored.monitor.after()

    def pause(self) -> None:
        """The loop has asked for the next batch, or ends."""
        if self.monitored.active:
            self.monitored.monitor.leave()

    def close(self) -> None:
        """Stop recording. Calling it twice does no harm."""
        self.monitored.monitor.leave()
        if self._recorder is not None:
            self._recorder.stop()
            if self._collects:
                gc.enable()
        if self._probe is not None:
            self._probe.close()
        self._recorder = self._probe = None
        self._batch = ()

    def require_sound(self) -> None:
        """Raise the refusal again, if there was one."""
        if self.refusal is not None:
            raise self.refusal

    def _check(self, losses: Tensor) -> None:
        recorder, monitored = self._recorder, self.monitored
        assert recorder is not None
        recorder.stop()
        program = recorder.program
        if len(losses) > 1 and (
            (self.level is CheckLevel.RECORD and monitored.found())
            or (self.level is CheckLevel.LIGHT and monitored.monitor.new)
        ):
            self.level = CheckLevel.THOROUGH
            # what new code leaves behind is used at the next step
            self._follow, self._next_look = self._step + 1, -1
            # new code may use what was read before, and never used
            self.fingerprint.unsettle()
            monitored.reopen()
        elif self.level >= CheckLevel.LIGHT and monitored.monitor.copied:
            # constants of the next step are compared with those of this one
            self._follow, self._next_look = self._step + 1, -1
        monitored.charge()
        try:
            self._examine(recorder, losses)
            if self.level >= CheckLevel.LIGHT:
                self.summary.rows = max(self.summary.rows, len(losses))
        except Unrecordable as problem:
            self.summary.why = str(problem)
            if any(operation.read for operation in program.operations):
                raise Unsupported(READ, UNREAD) from None
            if self._probe is not None:
                self._through_model(losses)
        settled = self.fingerprint.settled(monitored.monitor.copied)
        monitored.recorded(self.level >= CheckLevel.LIGHT, settled)
        shapes = [t.shape[1:] for t in self._batch]
        self.summary.padded += shapes != (self._shapes or shapes)
        self._shapes = shapes
        self._carried = program.alive(BATCH | CARRIED)
        self.summary.recorded += 1
        self.summary.unseen = len(monitored.unseen)
        if self._place == 0:
            self._done, self._looked = self._done + 1, self._step

    def _examine(self, recorder: OperationRecorder, losses: Tensor) -> None:
        """Check where the losses come from, what the run computes, and that examples do not mix."""
        program, level = recorder.program, self.level
        require_recorded(program)
        check_flow(program, program.ref(losses), self._weights)
        early = self._done < FIRST or self._place
        follows = self._step in (self._follow, self._follow - 1)
        if early or follows or level >= CheckLevel.CHECK or self.monitored.unseen:
            self._compare(program, losses)
        self._look_elsewhere(program, losses)
        if level >= CheckLevel.LIGHT:
            args = recorder, losses, self._replacements(losses), self.model, self.engine
            if StepCheck(*args, self._step, self._seed).run(level):
                self.summary.replayed += 1
            else:
                self.summary.proven += 1

    def _replacements(self, losses: Tensor) -> Replacements:
        return Replacements(self._batch, losses, self.records, self.randomness, self._step)

    def _look_elsewhere(self, program: Program, losses: Tensor) -> None:
        """Count steps with tensors that were not there at earlier steps and that nobody saw being
        made: by another thread, say.
        """
        known = self._weights | addresses(self.records.held)
        found = program.from_elsewhere(program.ref(losses), known)
        if self._elsewhere is not None and any(
            a not in self._elsewhere or self._elsewhere[a].expired() for a in found
        ):
            self.summary.elsewhere += 1
        self._elsewhere = (self._elsewhere or {}) | found

    def _through_model(self, losses: Tensor) -> None:
        """Where no recording can be made: gradients of the losses at other examples, and the model
        on changed inputs.
        """
        assert self._probe is not None
        calls = list(self._probe.calls)
        self._probe.check(losses)
        rows = self._replacements(losses).rows
        for args, kwargs in calls:
            probe_call(self.model, args, kwargs, rows)
        self.summary.through_model += 1

    def _compare(self, program: Program, losses: Tensor) -> None:
        """The fingerprint of this step against those before it.

        A step of one row tells nothing: torch multiplies it by other operations than several.
        """
        if len(losses) < 2:
            return
        names = {program.ref(t).storage: f"{FIELD}{k}" for k, t in enumerate(self._batch)}
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        names |= {program.ref(t).storage: f"weight {name}" for name, t in named}
        lengths = [list(t.shape[1:]) for t in self._batch]
        end = len(program.operations)
        mark = fingerprint(program, end, program.ref(losses), names, len(losses), lengths)
        if self.fingerprint.compare(self._step, mark, self.monitored.monitor.copied):
            self._store(None)

    def _store(self, refusal: str | None) -> None:
        """Rank 0 keeps what was seen; any rank a refusal."""
        if self.keeps or refusal is not None:
            self._file.store(self.fingerprint.value, refusal, self.summary)
