"""The check of a training run: at some steps it records what the user's code does with a batch, and
checks that no example reaches another.

Which steps: the first two with records, the first after a resume, one in each part of the run,
chosen by the run's secret, more of them where time allows, and steps that call torch from places
that no checked step did. A refusal ends the run for good.
"""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.gradients.checker import LossProbe, probe_call
from dpfy.gradients.engine import trainable
from dpfy.isolation.comparison import (
    APART,
    READ,
    UNREAD,
    ExampleParts,
    Replacement,
    check_apart,
    check_flow,
    check_losses,
    check_sum,
    codes,
    observe,
)
from dpfy.isolation.fingerprint import (
    FIELD,
    changed_constants,
    comparable,
    difference,
    fingerprint,
    joined,
    scaled_by_length,
    scaled_by_size,
)
from dpfy.isolation.monitor import CallSite, Monitor
from dpfy.isolation.program import BATCH, CARRIED, DATA, Program, Unrecordable, Variation
from dpfy.isolation.recorder import OperationRecorder, compiled
from dpfy.isolation.variations import moved_constants, moved_parameters, moved_switches
from dpfy.plan.claim import NOT_CHECKED
from dpfy.sampling.samplers import physical

PARTS = 8
"""Into how many parts of equal length a run is cut; in each of them one step is checked."""

SHARE, CHANCE = 0.005, 16
"""Further steps are checked while that takes less than this share of the run's time: one step in so
many, drawn at random.
"""

WATCHING, FREE, CALL, CALLS = 0.002, 0.002, 5e-6, 6
"""The monitor sees all steps, or as many as take this share of the run's time and some seconds:
seconds a call, and calls that a step costs beside its own.
"""

EXTRA = 12
"""Steps recorded for what no check has seen, and one more for each hundred steps of the run."""

ROWS = 16
"""A checked step begins with a physical batch of this many records: enough to show mixing, and
cheap.
"""

MEMORY = 4
"""A check holds a few times the tensors of a step: it has at most one part in so many of a full
physical batch.
"""

FAR = 16.0
"""How far from the data records may lie that replace others in a thorough check."""

HALVES, FIELDS, SEEDS = 3, 3, 2
"""Ways of replacing half of the records; fields by which other records are chosen; and in how many
draws of its random operations a step is run again when all is tried.
"""

EQUAL = 3
"""After so many pairs of steps with equal constants a place that reads values in a way that cannot
be followed is not looked at again.
"""

UNTRACEABLE = (
    "losses with constants that change from step to step, in a loop that reads values of batches "
    "by float(), int() or NumPy"
)
TRACEABLE = (
    "read values with item() or tolist() after step: these numbers are followed, and may not reach "
    "a loss"
)

CANDIDATES = 32
"""Records looked at to find one that differs from the record it replaces."""

AS_STARTED = (
    "must be what the run was started with: the same noise must not meet another computation"
)


WHOLE, PART = "checked by replay", NOT_CHECKED
"""How the sentence for the report begins."""


class CheckLevel(IntEnum):
    """What is done at a step: nothing, recording alone, a check of the losses, of gradients too, or
    in other circumstances as well.
    """

    NOTHING = 0
    RECORD = 1
    LIGHT = 2
    CHECK = 3
    THOROUGH = 4


@dataclass
class CheckSummary:
    """What was checked, for the report: steps recorded, steps run again with replaced records and
    the most records in one of them, steps looked at through the model, and places of the code that
    call torch in steps that were not checked alone.
    """

    recorded: int = 0
    replayed: int = 0
    through_model: int = 0
    why: str = ""
    rows: int = 0
    unseen: int = 0
    elsewhere: int = 0
    constructed: str = ""
    """How the loss of a record is computed without the other records, where that makes checks
    unnecessary.
    """

    @property
    def words(self) -> str:
        """For the report: what was looked at, and nothing more."""
        if self.constructed:
            return f"isolated by construction: {self.constructed}"
        found = []
        if self.replayed:
            found.append(
                f"at {self.replayed} steps, with up to {self.rows} rows, the operations from batch "
                f"to losses and gradients were run again "
                "with other records in some rows: no other example's part changed"
            )
        if self.unseen:
            found.append(
                f"{self.unseen} places in the code that call torch ran at steps that were not "
                f"checked alone"
            )
        if self.elsewhere:
            found.append(
                f"at {self.elsewhere} steps the losses came from tensors whose making was not seen "
                f"(by another thread, say)"
            )
        if self.through_model:
            found.append(
                f"at {self.through_model} steps the model was run on changed inputs ({self.why}): "
                f"no other example changed; the losses "
                "were checked by their gradients alone"
            )
        if found:
            return f"{PART if self.elsewhere or self.through_model else WHOLE}: {'; '.join(found)}"
        return "not checked for examples that mix: no step had a record to replace"


class TrainingRecords(Protocol):
    """What the check needs of the training records (:class:`dpfy.data.lazy.RecordSource`)."""

    def __len__(self) -> int: ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All records, one tensor a field, where they are in memory; else none."""

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The tensors in memory that hold records."""

    @property
    def rows_each(self) -> int:
        """How many rows of the model a row of the batch is for."""


@dataclass
class IsolationCheck:
    """Records and checks the steps of one training. `begin` when a batch is handed out, `end` with
    its losses, before the sum, and `after` when the step is made, until the next batch is asked for
    (`pause`). `varies` says whether batches have random sizes.

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
    summary: CheckSummary = field(default_factory=CheckSummary)
    fingerprint: str | None = None
    refusal: DpfyError | None = None
    seconds: float = 0.0
    keeps: bool = True
    alone: bool = True

    def __post_init__(self) -> None:
        self._done = 0
        self._step = 0
        self._pending = False
        self._kind = CheckLevel.NOTHING
        self._expected: str | None = None
        self._isolated = False
        self._carried: dict[int, StorageWeakRef] = {}
        self._recorder: OperationRecorder | None = None
        self._probe: LossProbe | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._others: list[Tensor] = []
        self._monitor = Monitor()
        self._began = time.perf_counter()
        self._coin = random.Random(self.randomness.key("monitor", 0))
        self._cost, self._sees, self._second, self._collects = 0.0, False, False, True
        self._unseen: set[CallSite] = set()
        self._behind: set[CallSite] = set()
        self._cleared: set[CallSite] = set()
        self._equal: Counter[CallSite] = Counter()
        self._elsewhere: dict[int, StorageWeakRef] | None = None
        self._extra = 0
        self._seed = int(self.randomness.generator("checks", 1).integers(1 << 40))
        self._last: tuple[int, str] | None = None
        self._restore()
        rng = self.randomness.generator("checks", 0)
        edges = np.linspace(2, self.steps, PARTS + 1)
        picks = [int(a + rng.random() * (b - a)) for a, b in pairwise(edges)]
        self._due = {0, 1, *[step for step in picks if 2 <= step < self.steps]}
        self._cut = {1, *[step for step in picks[4::8] if 2 <= step < self.steps]}

    def isolate(self, how: str) -> None:
        """Make no checks in this process: whoever calls computes the loss of each record without
        the other records, as `how` says.

        A run that was begun with checks cannot go on without them, nor the other way round (`begin`
        refuses that).
        """
        if self._expected is not None or self._done or self.summary.constructed not in ("", how):
            raise InvalidInput("resume losses", f"isolated by construction: {how}", AS_STARTED)
        self._isolated, self._due, self._cut = True, set(), set()
        self.summary.constructed = how
        self._store(None)

    def kind(self, step: int) -> CheckLevel:
        """What is to be done at `step`."""
        if self._isolated:
            return CheckLevel.NOTHING
        if not self.summary.replayed and (step in self._due or self._pending):
            return CheckLevel.THOROUGH
        if step in self._cut:
            return CheckLevel.CHECK
        if step in self._due or self._pending:
            return CheckLevel.LIGHT
        if self._done < 2 or step + 1 in self._cut or self._suspects(step):
            return CheckLevel.RECORD
        return CheckLevel.LIGHT if self._time_left(step) else CheckLevel.NOTHING

    def _suspects(self, step: int) -> bool:
        """Whether code ran that no check has seen, and there is room for recording it."""
        return bool(self._unseen) and self._extra < EXTRA + step // 100

    def _time_left(self, step: int) -> bool:
        """Whether to look at a step beside those that are due: at a drawn one, as long as that
        takes little of the run's time.
        """
        if (
            not self.alone
            or compiled()
            or self.seconds > SHARE * (time.perf_counter() - self._began)
        ):
            return False
        return self.randomness.key("further checks", step, 1)[0] % CHANCE == 0

    def pieces(
        self, step: int, indices: NDArray[np.int64], most: int, row_multiple: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """The physical batches of a step. One that is due for a check has two rows at least; one
        whose gradients are checked begins with few records: with half of them where there are few
        anyway and as many at every step, so that two sizes are seen.

        Guarantees: a function of the run's secret and the arguments alone, so that a resumed run
        cuts as before, and steps can be cut ahead.
        """
        if step not in self._due or row_multiple >= most > 1:
            return list(physical(indices, most, row_multiple=row_multiple))
        first = most
        if step in self._cut:
            few = row_multiple * -(-min(ROWS, max(2, most // MEMORY)) // row_multiple)
            half = row_multiple * -(-max(2, -(-len(indices) // 2)) // row_multiple)
            first = few if len(indices) > 2 * few else len(indices) if self.varies else half
        first = max(2, min(first, len(indices), most))
        least = max(2, row_multiple) if len(indices[:first]) == 1 else row_multiple
        return [
            *physical(indices[:first], max(2, most), row_multiple=least),
            *physical(indices[first:], most, row_multiple=row_multiple),
        ]

    def empty(self, step: int) -> None:
        """A step without records: a check that was due at it is made at the next."""
        self._pending = self._pending or step in self._due

    def begin(self, step: int, batch: tuple[Tensor, ...], first: bool) -> None:
        """Start to record, if this is the first physical batch of a step to look at, or one of a
        step to look for something in; `batch` holds its tensors.

        What was begun and never ended is left.
        """
        if self.summary.constructed and not self._isolated:
            raise InvalidInput("resume losses", "computed from a whole batch", AS_STARTED)
        if self._recorder is not None:
            self.close()
        self._kind = (
            self.kind(step)
            if first
            else CheckLevel.RECORD
            if self._suspects(step)
            else CheckLevel.NOTHING
        )
        if (
            self._kind is CheckLevel.RECORD
            and step != 1
            and step + 1 not in self._cut
            and compiled()
        ):
            # Compiled code runs as it was written while it is recorded, and may round otherwise: a
            # resumed run must not do so where the run before it did not. Another computation is
            # found by the journal of sums.
            self._kind = CheckLevel.NOTHING
        if self._kind >= CheckLevel.LIGHT:
            self._pending = len(batch[0]) < 2
            self._kind = CheckLevel.RECORD if self._pending else self._kind
        if self._sees and not (late := self._monitor.backward) <= self._monitor.checked:
            self._behind |= late - self._monitor.checked
            self._unseen |= self._behind
        self._step, self._sees = step, self._monitored()
        if self._sees:
            self._monitor.forward(batch, recorded=self._kind is not CheckLevel.NOTHING)
        if self._kind is CheckLevel.NOTHING:
            return
        self._batch = batch
        self._recorder = OperationRecorder(self._monitor if self._sees else None)
        program = self._recorder.program
        program.carried = self._carried | self._kept()
        program.mark(batch, BATCH)
        program.mark(self.records.held, DATA)
        if self._kind >= CheckLevel.LIGHT and not self.summary.replayed:
            self._probe = LossProbe(self.model, self.records.rows_each)
        self._collects = gc.isenabled()
        # it would go through all objects of the process for those made here, which are freed at
        # once
        gc.disable()
        self._recorder.start()

    def _monitored(self) -> bool:
        """Whether the monitor sees this batch: always where steps are long, two in a row now and
        then where it would cost too much.
        """
        if not self.alone or self._isolated or compiled():
            return False
        if self._sees and not self._second:
            self._second = True  # what the batch before this one left behind is used now
            return True
        self._second = False
        if self._kind is not CheckLevel.NOTHING:
            return True
        return 2 * self._coin.random() * self._cost < FREE + WATCHING * (
            time.perf_counter() - self._began
        )

    def _kept(self) -> dict[int, StorageWeakRef]:
        """By address, the storages of tensors that the loop made of earlier batches; never those of
        weights or of this batch.
        """
        mine = [*self.model.parameters(), *self.model.buffers(), *self._batch]
        known = {t.untyped_storage()._cdata for t in mine if t.layout is torch.strided}
        storages = [t.untyped_storage() for t in self._monitor.kept() if t.layout is torch.strided]
        return {s._cdata: StorageWeakRef(s) for s in storages if s._cdata not in known}

    @property
    def recording(self) -> bool:
        """Whether the batch that is out is being recorded."""
        return self._recorder is not None

    def end(self, losses: Tensor, released: bool) -> None:
        """Check the recorded step. `released` says whether anything was released before it."""
        if self._sees:
            monitor = self._monitor
            monitor.leave()
            self._cost += CALL * (CALLS + len(monitor.now))
            if not (
                monitor.now <= monitor.checked
                and monitor.reused <= self._cleared
                and monitor.copied <= self._cleared
            ):
                self._unseen |= monitor.new | ((monitor.reused | monitor.copied) - self._cleared)
        if self._recorder is None:
            return
        started = time.perf_counter()
        try:
            self._check(losses)
        except DpfyError as refusal:
            self.refusal = refusal
            if released and isinstance(refusal, Unsupported):
                self._store(str(refusal))
            raise
        finally:
            self.close()
            self.seconds += time.perf_counter() - started

    def after(self) -> None:
        """The step is made: see what the loop does with its batch until it asks for the next."""
        if self._sees:
            self._monitor.after()

    def pause(self) -> None:
        """The loop has asked for the next batch, or ends."""
        if self._sees:
            self._monitor.leave()

    def close(self) -> None:
        """Stop recording. Calling it twice does no harm."""
        self._monitor.leave()
        if self._recorder is not None:
            self._recorder.stop()
            if self._collects:
                gc.enable()
        if self._probe is not None:
            self._probe.close()
        self._recorder = self._probe = None
        self._batch, self._others = (), []

    def require_sound(self) -> None:
        """Raise the refusal again, if there was one."""
        if self.refusal is not None:
            raise self.refusal

    def _check(self, losses: Tensor) -> None:
        recorder, monitor = self._recorder, self._monitor
        assert recorder is not None
        recorder.stop()
        program = recorder.program
        found = self._behind or self._unseen & monitor.now
        if len(losses) > 1 and (
            (self._kind is CheckLevel.RECORD and found)
            or (self._kind is CheckLevel.LIGHT and monitor.new)
        ):
            self._kind = CheckLevel.THOROUGH
        kind = self._kind
        self._extra += bool(self._unseen)
        try:
            self._examine(recorder, losses)
            if kind >= CheckLevel.LIGHT:
                self.summary.replayed += 1
                self.summary.rows = max(self.summary.rows, len(losses))
        except Unrecordable as problem:
            self.summary.why = str(problem)
            if any(operation.read for operation in program.operations):
                raise Unsupported(READ, UNREAD) from None
            if self._probe is not None:
                self._through_model(losses)
        if kind >= CheckLevel.LIGHT:
            monitor.checked |= monitor.now | monitor.backward
        self._cleared |= monitor.reused
        self._unseen -= self._cleared | monitor.checked
        self._behind -= monitor.checked
        self._carried = program.alive(BATCH | CARRIED)
        self.summary.recorded += 1
        self.summary.unseen = len(self._unseen)
        self._done += 1

    def _examine(self, recorder: OperationRecorder, losses: Tensor) -> None:
        program, kind = recorder.program, self._kind
        _require_recorded(program)
        end, params = len(program.operations), list(trainable(self.model).values())
        check_flow(program, program.ref(losses), [*self.model.parameters(), *self.model.buffers()])
        if self._done < 2 or kind >= CheckLevel.CHECK or self._unseen:
            self._compare(program, end, losses)
        self._look_elsewhere(program, losses)
        if kind < CheckLevel.LIGHT:
            return
        rows = self._rows_to_replace(len(losses))
        if kind is CheckLevel.LIGHT or not _has_room(program, losses.device):
            self._check_forward(program, losses, rows, thorough=kind is CheckLevel.THOROUGH)
            return
        weights = torch.ones_like(losses)
        recorder.start()
        try:
            seen = observe(program, losses, weights, self.engine, params)
        finally:
            recorder.stop()
        _require_recorded(program)
        change = self._replacement(losses, rows, (self._step + 1) % HALVES)
        plain = check_apart(program, seen, losses, [change])
        check_sum(program, seen, change, plain)
        if kind is CheckLevel.THOROUGH:
            self._check_forward(program, losses, rows, thorough=True)
        else:
            drawn = any(operation.random is not None for operation in program.operations)
            self._vary(
                program,
                losses,
                change,
                [Variation(seed=self._seed + SEEDS * self._step + k) for k in range(SEEDS * drawn)],
            )

    def _check_forward(
        self, program: Program, losses: Tensor, rows: Tensor, thorough: bool
    ) -> None:
        """Check the losses alone; if `thorough`, with all ways of replacing records, and with other
        weights and switches.
        """
        seen = ExampleParts.forward(program, losses)
        if not thorough:
            way = self._step % self._ways if self._step % 2 else self._step // 2 % HALVES
            check_losses(program, seen, losses, self._replacement(losses, rows, way))
            return
        check_apart(
            program,
            seen,
            losses,
            [self._replacement(losses, rows, way) for way in range(self._ways)],
        )
        known = [program.ref(t).storage for t in (*self.model.parameters(), *self._batch)]
        moved = moved_parameters(
            program, list(trainable(self.model).values()), self._step
        ) | moved_switches(program, known)
        far = Replacement(
            self._batch, self._other_records(~rows, 1.0 if codes(program) else FAR), ~rows
        )
        self._vary(program, losses, far, [Variation(moved, moved_constants(program), self._seed)])

    def _vary(
        self, program: Program, losses: Tensor, change: Replacement, variations: Sequence[Variation]
    ) -> None:
        """Check the losses in other circumstances than those of the step."""
        for variation in variations:
            with suppress(Unrecordable):  # numbers for which its operations are not made
                check_apart(
                    program, ExampleParts.forward(program, losses), losses, [change], variation
                )

    def _look_elsewhere(self, program: Program, losses: Tensor) -> None:
        """Count steps with tensors that were not there at earlier steps and that nobody saw being
        made: by another thread, say.
        """
        named = [*self.model.parameters(), *self.model.buffers(), *self.records.held]
        known = {t.untyped_storage()._cdata for t in named if t.layout is torch.strided}
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
        rows = self._rows_to_replace(len(losses))
        for args, kwargs in calls:
            probe_call(self.model, args, kwargs, rows)
        self.summary.through_model += 1

    def _compare(self, program: Program, end: int, losses: Tensor) -> None:
        """The fingerprint of this step against those before it, in this process or in the one that
        was resumed.

        A step of one row tells nothing: torch multiplies it by other operations than several.
        """
        if len(losses) < 2:
            return
        names = {program.ref(t).storage: f"{FIELD}{k}" for k, t in enumerate(self._batch)}
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        names |= {program.ref(t).storage: f"weight {name}" for name, t in named}
        lengths = [list(t.shape[1:]) for t in self._batch]
        mark = fingerprint(program, end, program.ref(losses), names, len(losses), lengths)
        if self._expected is not None:
            if (what := difference(self._expected, mark)) is not None:
                raise InvalidInput("resume losses", what, AS_STARTED)
            self.fingerprint, self._expected = self._expected, None
            return
        last, self._last = self._last, (self._step, mark)
        copied = self._monitor.copied
        if copied and last is not None and last[0] + 1 == self._step and comparable(last[1], mark):
            if (name := changed_constants(last[1], mark)) is not None:
                raise Unsupported(f"{UNTRACEABLE} (in {name})", TRACEABLE)
            self._equal.update(copied)
            self._cleared |= {site for site in copied if self._equal[site] >= EQUAL}
        if self.fingerprint is not None:
            if (name := scaled_by_size(self.fingerprint, mark)) is not None:
                raise Unsupported(
                    f"losses that depend on the number of records in the batch (in {name})", APART
                )
            if (name := scaled_by_length(self.fingerprint, mark)) is not None:
                raise Unsupported(
                    f"losses that depend on the lengths of other sequences of the batch (in "
                    f"{name})",
                    APART,
                )
            mark = joined(self.fingerprint, mark)
        if mark != self.fingerprint:
            self.fingerprint = mark
            self._store(None)

    def _rows_to_replace(self, rows: int) -> Tensor:
        """Half of the rows, at random, at least one, not all."""
        rng = self.randomness.generator("replaced rows", self._step)
        picked = np.zeros(rows, dtype=bool)
        picked[rng.permutation(rows)[: max(1, rows // 2)]] = True
        return torch.from_numpy(picked).to(self._batch[0].device)

    def _replacement(self, losses: Tensor, rows: Tensor, way: int) -> Replacement:
        """Other records in `rows`, or copies of the record with the largest or the smallest loss: a
        mean of the batch moves most.

        Further ways leave one record alone and put copies of another in all other rows: the two
        with the largest or smallest values of a field. What the batch has most of, or only once, is
        then gone.
        """
        if way == 0:
            return Replacement(self._batch, self._other_records(rows), rows)
        if way < HALVES:
            return Replacement(
                self._batch,
                self._copies(rows, losses.argmax() if way == 1 else losses.argmin()),
                rows,
            )
        sizes = _size(self._batch[(way - HALVES) // 2 % len(self._batch)])
        first, second = sizes.argsort(descending=way % 2 == 0)[:2]
        rows = torch.arange(len(rows), device=rows.device) != first
        return Replacement(self._batch, self._copies(rows, second), rows)

    @property
    def _ways(self) -> int:
        return HALVES + 2 * min(len(self._batch), FIELDS)

    def _copies(self, rows: Tensor, source: Tensor) -> list[Tensor]:
        return [
            torch.where(rows.view(-1, *[1] * (mine.dim() - 1)), mine[source], mine)
            for mine in self._batch
        ]

    def _other_records(self, rows: Tensor, far: float = 1.0) -> list[Tensor]:
        """The fields of the batch with other records in `rows`, field by field: records that differ
        there, where there are any.

        Real numbers are multiplied by `far`, so that what depends on the batch by a threshold shows
        it.
        """
        if not self._others:
            rng = self.randomness.generator("replacements", self._step)
            pool = (
                self.records.tensors or self._batch
            )  # records that are not in memory: the other rows of the batch
            self._others = [
                self._others_of(*pair, rng) for pair in zip(self._batch, pool, strict=True)
            ]
        found = []
        for mine, new in zip(self._batch, self._others, strict=True):
            moved = new * far if far != 1 and new.is_floating_point() else new
            found.append(torch.where(rows.view(-1, *[1] * (new.dim() - 1)), moved, mine))
        return found

    def _others_of(self, mine: Tensor, all_of_them: Tensor, rng: np.random.Generator) -> Tensor:
        """For each row of a field the first of some records that differs from it; where none does,
        the last.
        """
        many = CANDIDATES if len(self.records) > 1 else 1
        drawn = torch.from_numpy(rng.integers(0, len(all_of_them), (CANDIDATES, len(mine)))).to(
            all_of_them.device
        )[:many]
        if mine.dim() == 1:
            candidates = all_of_them[drawn].to(mine)
            differs = candidates != mine
            differs[-1] = True
            return candidates.gather(0, differs.byte().argmax(0)[None])[0]
        new = all_of_them[drawn[0]].to(mine)
        for candidate in range(1, many):
            same = torch.nonzero((new == mine).flatten(1).all(1)).flatten()
            if not len(same):
                break
            new[same] = all_of_them[drawn[candidate, same.to(drawn.device)]].to(new)
        return new

    def _store(self, refusal: str | None) -> None:
        """Rank 0 keeps what was seen; any rank a refusal."""
        if not self.keeps and refusal is None:
            return
        content = {
            "fingerprint": self.fingerprint,
            "refusal": refusal,
            "checks": asdict(self.summary),
        }
        write_atomically(self.file, json.dumps(content).encode(), mode=PRIVATE_MODE)

    def _restore(self) -> None:
        if not self.file.is_file():
            return
        try:
            content = json.loads(self.file.read_bytes())
            self._expected, refusal = content["fingerprint"], content["refusal"]
            self.summary = CheckSummary(**content["checks"])
            texts = {"why", "constructed"}
            if not all(
                type(value) is (str if name in texts else int)
                for name, value in asdict(self.summary).items()
            ):
                raise ValueError("counts")
            if not all(
                value is None or isinstance(value, str) for value in (self._expected, refusal)
            ):
                raise ValueError("words")
            if self._expected is not None:
                joined(self._expected, self._expected)
                scaled_by_size(self._expected, self._expected)
                scaled_by_length(self._expected, self._expected)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            raise Corrupt(f"checkpoint/{self.file.name}", "is damaged: start a new run") from None
        if refusal is not None:
            raise Unsupported(f"a run that was refused ({refusal})", "start a new run")


def _size(field: Tensor) -> Tensor:
    """One number for each row of a field: the value itself where there is one."""
    return field.detach().reshape(len(field), -1).double().nan_to_num().sum(1)


def _has_room(program: Program, device: torch.device) -> bool:
    """Whether the memory holds the activations of a backward pass twice more."""
    if device.type == "cuda":
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 3 * program.held_bytes < free


def _require_recorded(program: Program) -> None:
    if program.problem is not None:
        raise Unrecordable(program.problem)
