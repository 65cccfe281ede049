"""The watch over a run: at some steps it records what the user's code does with a batch, and checks that no example reaches another.

Which steps: the first with records and the one after it, the first after a resume, and one in each part of the run, chosen by the
run's secret. A refusal ends the run for good.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.random import Randomness
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.data.lazy import Source
from dpfy.gradients.checker import LossProbe, probe_call
from dpfy.gradients.engine import trainable
from dpfy.gradients.tracing.dispatch import OperationRecorder, compiled
from dpfy.gradients.tracing.fingerprint import FIELD, difference, fingerprint, joined, scaled_by_length, scaled_by_size
from dpfy.gradients.tracing.mixing import (
    APART,
    READ,
    UNREAD,
    Replacement,
    check_apart,
    check_flow,
    check_sum,
    codes,
    moved_parameters,
    observe,
)
from dpfy.gradients.tracing.program import BATCH, CARRIED, DATA, Program, Unrecordable
from dpfy.sampling.sampler import physical

PARTS, FEW_PARTS = 4, 1
"""Into how many parts of equal length a run is cut, and one of short steps; in each of them one step is checked."""

PARTS_BEFORE = (2,)
"""What runs of short steps were cut into by versions before."""

SHORT = 1 << 23
"""Steps of fewer expected rows times trained parameters are short: four checks in 1,000 of them would cost more than 1%."""

ROWS = 16
"""A checked step begins with a physical batch of this many records: enough to show mixing, and cheap."""

MEMORY = 4
"""A check holds a few times the tensors of a step: it has at most one part in so many of a full physical batch."""

FAR = 16.0
"""How far from the data records may lie that replace others in a thorough check."""

CANDIDATES = 32
"""Records looked at to find one that differs from the record it replaces."""

AS_STARTED = "must be what the run was started with: the same noise must not meet another computation"


class Kind(IntEnum):
    """What is done at a step: nothing, recording alone, a check, or a check with moved parameters as well."""

    NOTHING = 0
    RECORD = 1
    CHECK = 2
    THOROUGH = 3


@dataclass
class Checks:
    """What was checked, for the card: steps recorded, steps run again with replaced records, steps looked at through the model."""

    recorded: int = 0
    replayed: int = 0
    through_model: int = 0
    why: str = ""
    constructed: str = ""
    """How the loss of a record is computed without the other records, where that makes checks unnecessary."""

    @property
    def words(self) -> str:
        """One sentence for the card: what was looked at, and nothing more."""
        if self.constructed:
            return f"isolated by construction: {self.constructed}"
        through = f"at {self.through_model} steps the model was run on changed inputs ({self.why})"
        if self.replayed:
            said = (
                f"at {self.replayed} steps all operations from batch to losses and gradients were run again with other records in "
                "some rows: no other example's part changed"
            )
            return f"{said}; {through}" if self.through_model else said
        if self.through_model:
            return f"{through}: no other example changed; the losses were checked by their gradients alone"
        return "not checked for examples that mix: no step had a record to replace"


@dataclass
class Watch:
    """Records and checks the steps of one training. `begin` when a batch is handed out, `end` with its losses, before the sum.

    `batch` is the expected number of units in a step. With it and the number of parameters, both public, a step is long enough for all
    PARTS of a run to be checked, or not; how many there are is kept, so that a resumed run is cut as it was begun.

    Guarantees: if a checked step mixes examples, or what was kept from one step enters the next, or a resumed run computes something else
    than before, `end` raises, nothing of that step is released, and `require_sound` raises from then on. Once steps were released the
    refusal is kept in the run's folder, and a resumed run refuses too.
    """

    model: nn.Module
    engine: Any
    records: Source
    randomness: Randomness
    steps: int
    batch: float
    file: Path
    checks: Checks = field(default_factory=Checks)
    fingerprint: str | None = None
    refusal: DpfyError | None = None
    seconds: float = 0.0
    keeps: bool = True

    def __post_init__(self) -> None:
        self._done = 0
        self._step = 0
        self._pending = False
        self._kind = Kind.NOTHING
        self._expected: str | None = None
        self._isolated = False
        self._carried: dict[int, StorageWeakRef] = {}
        self._recorder: OperationRecorder | None = None
        self._probe: LossProbe | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._others: list[Tensor] = []
        work = self.batch * self.records.rows_each * sum(p.numel() for p in trainable(self.model).values())
        self._parts = PARTS if work >= SHORT else FEW_PARTS
        self._restore()
        rng = self.randomness.generator("checks", 0)
        edges = np.linspace(2, self.steps, self._parts + 1)
        picks = [int(a + rng.random() * (b - a)) for a, b in pairwise(edges)]
        self._due = {0, *[step for step in picks if 2 <= step < self.steps]}

    def isolate(self, how: str) -> None:
        """Make no checks in this process: whoever calls computes the loss of each record without the other records, as `how` says.

        A run that was begun with checks cannot go on without them, nor the other way round (`begin` refuses that).
        """
        if self._expected is not None or self._done or self.checks.constructed not in ("", how):
            raise InvalidInput("resume losses", f"isolated by construction: {how}", AS_STARTED)
        self._isolated, self._due = True, set()
        self.checks.constructed = how
        self._store(None)

    def kind(self, step: int) -> Kind:
        """What is to be done at `step`."""
        if self._isolated:
            return Kind.NOTHING
        if step in self._due or self._pending:
            return Kind.CHECK if self.checks.replayed else Kind.THOROUGH
        return Kind.RECORD if self._done < 2 or step + 1 in self._due else Kind.NOTHING

    def pieces(
        self, step: int, indices: NDArray[np.int64], most: int, row_multiple: int
    ) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
        """The physical batches of a step. One that is due for a check begins with few records, but with two rows at least.

        Guarantees: a function of the run's secret and the arguments alone, so that a resumed run cuts as before, and steps can be cut
        ahead.
        """
        if step not in self._due or row_multiple >= most > 1:
            return list(physical(indices, most, row_multiple=row_multiple))
        few = row_multiple * -(-min(ROWS, max(2, most // MEMORY)) // row_multiple)
        first = max(2, min(few if len(indices) > 2 * few else len(indices), most))
        least = max(2, row_multiple) if len(indices[:first]) == 1 else row_multiple
        return [
            *physical(indices[:first], max(2, most), row_multiple=least),
            *physical(indices[first:], most, row_multiple=row_multiple),
        ]

    def empty(self, step: int) -> None:
        """A step without records: a check that was due at it is made at the next."""
        self._pending = self._pending or step in self._due

    def begin(self, step: int, batch: tuple[Tensor, ...], first: bool) -> None:
        """Start to record, if this is the first physical batch of a step to look at; `batch` holds its tensors.

        What was begun and never ended is left.
        """
        self.close()
        if self.checks.constructed and not self._isolated:
            raise InvalidInput("resume losses", "computed from a whole batch", AS_STARTED)
        self._kind = self.kind(step) if first else Kind.NOTHING
        if self._kind is Kind.RECORD and step != 1 and step + 1 not in self._due and compiled():
            # Compiled code runs as it was written while it is recorded, and may round otherwise: a resumed run must not do so where the
            # run before it did not. Another computation is found by the journal of sums.
            self._kind = Kind.NOTHING
        if self._kind >= Kind.CHECK:
            self._pending = len(batch[0]) < 2
            self._kind = Kind.RECORD if self._pending else self._kind
        if self._kind is Kind.NOTHING:
            return
        self._step, self._batch = step, batch
        self._recorder = OperationRecorder()
        program = self._recorder.program
        program.carried = self._carried
        program.mark(batch, BATCH)
        program.mark(self.records.held, DATA)
        if self._kind >= Kind.CHECK:
            self._probe = LossProbe(self.model, self.records.rows_each)
        self._recorder.start()

    @property
    def looking(self) -> bool:
        """Whether the batch that is out is being recorded."""
        return self._recorder is not None

    def end(self, losses: Tensor, released: bool) -> None:
        """Check the recorded step. `released` says whether anything was released before it."""
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

    def close(self) -> None:
        """Stop recording. Calling it twice does no harm."""
        if self._recorder is not None:
            self._recorder.stop()
        if self._probe is not None:
            self._probe.close()
        self._recorder = self._probe = None
        self._batch, self._others = (), []

    def require_sound(self) -> None:
        """Raise the refusal again, if there was one."""
        if self.refusal is not None:
            raise self.refusal

    def _check(self, losses: Tensor) -> None:
        recorder = self._recorder
        assert recorder is not None
        recorder.stop()
        program, kind = recorder.program, self._kind
        try:
            self._examine(recorder, losses)
            self.checks.replayed += kind >= Kind.CHECK
        except Unrecordable as problem:
            self.checks.why = str(problem)
            if any(operation.read for operation in program.operations):
                raise Unsupported(READ, UNREAD) from None
            if kind >= Kind.CHECK:
                self._through_model(losses)
        self._carried = program.alive(BATCH | CARRIED)
        self.checks.recorded += 1
        self._done += 1

    def _examine(self, recorder: OperationRecorder, losses: Tensor) -> None:
        program = recorder.program
        _require_recorded(program)
        end, params = len(program.operations), list(trainable(self.model).values())
        check_flow(program, program.ref(losses), [*self.model.parameters(), *self.model.buffers()])
        if self._done < 2 or self._kind >= Kind.CHECK:
            self._compare(program, end, losses)
        if self._kind < Kind.CHECK:
            return
        rows = self._rows_to_replace(len(losses))
        weights = torch.ones_like(losses)
        recorder.start()
        try:
            seen = observe(program, losses, weights, self.engine, params)
        finally:
            recorder.stop()
        _require_recorded(program)
        if self._kind is Kind.CHECK:
            check_apart(program, seen, losses, [self._replacement(losses, rows, self._step % 3)], {})
            return
        changes = [self._replacement(losses, rows, way) for way in range(3)]
        plain = check_apart(program, seen, losses, changes, {})
        check_sum(program, seen, changes[0], plain)
        far = Replacement(self._batch, self._other_records(~rows, 1.0 if codes(program) else FAR), ~rows)
        check_apart(program, seen, losses, [far], moved_parameters(program, params, self._step))

    def _through_model(self, losses: Tensor) -> None:
        """Where no recording can be made: gradients of the losses at other examples, and the model on changed inputs."""
        assert self._probe is not None
        calls = list(self._probe.calls)
        self._probe.check(losses)
        rows = self._rows_to_replace(len(losses))
        for args, kwargs in calls:
            probe_call(self.model, args, kwargs, rows)
        self.checks.through_model += 1

    def _compare(self, program: Program, end: int, losses: Tensor) -> None:
        """The fingerprint of this step against those before it, in this process or in the one that was resumed.

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
        if self.fingerprint is not None:
            if (name := scaled_by_size(self.fingerprint, mark)) is not None:
                raise Unsupported(f"losses that depend on the number of records in the batch (in {name})", APART)
            if (name := scaled_by_length(self.fingerprint, mark)) is not None:
                raise Unsupported(f"losses that depend on the lengths of other sequences of the batch (in {name})", APART)
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
        """Other records in `rows`, or copies of the record with the largest or the smallest loss: a mean of the batch moves most."""
        fields = self._other_records(rows) if way == 0 else self._copies(rows, losses.argmax() if way == 1 else losses.argmin())
        return Replacement(self._batch, fields, rows)

    def _copies(self, rows: Tensor, source: Tensor) -> list[Tensor]:
        return [torch.where(rows.view(-1, *[1] * (mine.dim() - 1)), mine[source], mine) for mine in self._batch]

    def _other_records(self, rows: Tensor, far: float = 1.0) -> list[Tensor]:
        """The fields of the batch with other records in `rows`, field by field: records that differ there, where there are any.

        Real numbers are multiplied by `far`, so that what depends on the batch by a threshold shows it.
        """
        if not self._others:
            rng = self.randomness.generator("replacements", self._step)
            pool = self.records.tensors or self._batch  # records that are not in memory: the other rows of the batch
            self._others = [self._others_of(*pair, rng) for pair in zip(self._batch, pool, strict=True)]
        found = []
        for mine, new in zip(self._batch, self._others, strict=True):
            moved = new * far if far != 1 and new.is_floating_point() else new
            found.append(torch.where(rows.view(-1, *[1] * (new.dim() - 1)), moved, mine))
        return found

    def _others_of(self, mine: Tensor, all_of_them: Tensor, rng: np.random.Generator) -> Tensor:
        """For each row of a field the first of some records that differs from it; where none does, the last."""
        many = CANDIDATES if len(self.records) > 1 else 1
        drawn = torch.from_numpy(rng.integers(0, len(all_of_them), (CANDIDATES, len(mine)))).to(all_of_them.device)[:many]
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
        content = {"fingerprint": self.fingerprint, "refusal": refusal, "checks": asdict(self.checks), "parts": self._parts}
        write_atomically(self.file, json.dumps(content).encode(), mode=PRIVATE_MODE)

    def _restore(self) -> None:
        if not self.file.is_file():
            return
        try:
            content = json.loads(self.file.read_bytes())
            self._expected, refusal = content["fingerprint"], content["refusal"]
            self._parts = content.get("parts", PARTS)  # runs of before there were fewer for short steps
            if type(self._parts) is not int or self._parts not in (PARTS, FEW_PARTS, *PARTS_BEFORE):
                raise ValueError("parts")
            self.checks = Checks(**content["checks"])
            counts = (self.checks.recorded, self.checks.replayed, self.checks.through_model)
            if not all(type(n) is int for n in counts) or not all(
                isinstance(told, str) for told in (self.checks.why, self.checks.constructed)
            ):
                raise ValueError("counts")
            if not all(value is None or isinstance(value, str) for value in (self._expected, refusal)):
                raise ValueError("words")
            if self._expected is not None:
                joined(self._expected, self._expected)
                scaled_by_size(self._expected, self._expected)
                scaled_by_length(self._expected, self._expected)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            raise Corrupt(f"checkpoint/{self.file.name}", "is damaged: start a new run") from None
        if refusal is not None:
            raise Unsupported(f"a run that was refused ({refusal})", "start a new run")


def _require_recorded(program: Program) -> None:
    if program.problem is not None:
        raise Unrecordable(program.problem)
