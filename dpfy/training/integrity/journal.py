"""The journal of steps: before the noise of a step is made, the sum that it is for is written down.

    checkpoint/steps.jsonl (0600)   {"step": 17, "rates": [0.1], "sum": "5c0e..."}   since the last
    checkpoint, one line a step checkpoint/reached-12-18 (0600)   a checkpoint of step 12 was
    written, and the steps before 18 are in the journal

A run that was killed makes the steps since its last checkpoint again, with the same noise. That is
safe if the sums are the same bits, for then so is what is released. The journal is how a resumed
run knows: a keyed tag of a checksum of each sum, and the learning rates. At the first step that
would differ the run stops, before noise is added.

A journal or a checkpoint that was deleted, or exchanged for an earlier one, would let other sums
have the same noise. The file `reached-...` tells how far the run got. Its name says so, because a
backup that is put back beside it or over it cannot undo a renaming.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, identity_of, write_atomically
from dpfy.runs.holder import boot
from dpfy.runs.mark import PROGRESS

NAME = "steps.jsonl"
RARELY = 100
"""A step renames the file of the progress only where that takes at most this fraction of the
time.
"""
START = "start a new run"
SAME = (
    "resume with the same code, data and settings, so that it is repeated bit for bit, or start a "
    "new run"
)
GPU = (
    "some of this device's kernels add in no fixed order: torch.use_deterministic_algorithms(True) "
    "from the beginning avoids this"
)


class Journal:
    """What each step since the last checkpoint was made of.

    Guarantees: `bind` returns for each step once, in their order. After it returned for a step, no
    process that resumes this run gets it to return for that step and a sum or rates that differ, up
    to the checksum, which reads a random quarter of huge tensors. A line survives the death of the
    process at any moment; on a GPU it is written while the next step is under way, so as not to
    wait for the device. A journal or checkpoint that is missing, or older than the run got, is
    refused: to within the last lines, which the progress may lag behind by a hundred times as long
    as a renaming takes, and all lines since the last checkpoint if the machine was restarted, which
    may have lost them.
    """

    def __init__(
        self, folder: Path | None, randomness: Randomness, step: int, due: bool = False
    ) -> None:
        """In `folder`; None where another rank writes it, and only the order of the steps is kept
        here. `due`: it must be there.
        """
        self._randomness = randomness
        self.next = step
        self._file, self._writes = -1, folder is not None
        self._late: _Late | None = None
        self._made: dict[int, tuple[list[float], str]] = {}
        self._progress: UnfinishedStep | None = None
        if folder is not None:
            self._open(folder, step, due)

    def _open(self, folder: Path, step: int, due: bool) -> None:
        if due and not (folder / NAME).is_file():
            rule = (
                f"is missing: nobody can tell what the steps since the checkpoint were made of; "
                f"{START}"
            )
            raise Corrupt(f"checkpoint/{NAME}", rule)
        lines, whole = _read(folder / NAME)
        self._made = {n: line for n, line in lines.items() if n >= step}
        self._progress = UnfinishedStep.opened(folder, self._randomness, step, self._made, due)
        self._file = os.open(
            folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE_MODE
        )
        os.ftruncate(self._file, whole if self._made else 0)

    def bind(self, step: int, total: Tensor, rates: Sequence[float]) -> None:
        """Write down what `step` is about to release, by a checksum of the sum, or refuse it if it
        was made before: here, or of something else.
        """
        if step != self.next:
            raise Unsupported(f"making step {step} where step {self.next} is due", SAME)
        self.flush()
        if step in self._made:
            self._repeated(step, total, rates)
        elif not self._writes:
            pass
        elif total.device.type == "cuda":
            self._late = _Late(step, total, list(rates))
        else:
            self._write(step, int(total), rates)
        self.next = step + 1

    def flush(self) -> None:
        """Write the line that was left for later."""
        if self._late is not None:
            late, self._late = self._late, None
            self._write(late.step, late.value(), late.rates)

    def forget(self, step: int) -> None:
        """A checkpoint of `step` is on disk: what came before will not be made again."""
        self.flush()
        self._made = {n: line for n, line in self._made.items() if n >= step}
        if not self._made and self._file >= 0:
            os.ftruncate(self._file, 0)
        if self._progress is not None:
            self._progress.saved(step)

    def close(self) -> None:
        """Write what is left and let the file go. Calling it twice does no harm."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1

    def _write(self, step: int, total: int, rates: Sequence[float]) -> None:
        line = f'{{"step": {step}, "rates": {list(rates)}, "sum": "{self._tag(step, total)}"}}\n'
        if os.write(self._file, line.encode()) != len(line):
            raise OSError(f"checkpoint/{NAME}: the disk is full")
        if self._progress is not None:
            self._progress.made(step)

    def _repeated(self, step: int, total: Tensor, rates: Sequence[float]) -> None:
        made, tag = self._made[step]
        if made != list(rates):
            raise InvalidInput(
                f"resume step {step}",
                f"learning rate {_words(rates)}",
                f"it was made with {_words(made)}: {SAME}",
            )
        if tag != self._tag(step, int(total)):
            rule = f"its noise was made for a sum before: {SAME}" + (
                f" ({GPU})" if total.is_cuda else ""
            )
            raise InvalidInput(f"resume step {step}", "another sum of gradients", rule)

    def _tag(self, step: int, total: int) -> str:
        return self._randomness.tag("sum", f"{step} {total}".encode())[:32]


class UnfinishedStep:
    """How far a run got: the step of its last checkpoint, and the steps that are in its journal.
    Both are in the name of a file.
    """

    def __init__(self, folder: Path, checkpoint: int, steps: int) -> None:
        self._folder, self._checkpoint, self._steps = folder, checkpoint, steps
        self._next = 0.0

    @classmethod
    def opened(
        cls,
        folder: Path,
        randomness: Randomness,
        step: int,
        made: dict[int, tuple[list[float], str]],
        due: bool,
    ) -> UnfinishedStep:
        """That of a run whose checkpoint is of `step` and whose journal holds `made`, which must be
        as far as it got.
        """
        found = sorted(p for p in folder.iterdir() if PROGRESS.fullmatch(p.name))
        if due:
            _require_reached(found, randomness, step, made)
        steps = next(n for n in range(step, step + len(made) + 1) if n not in made)
        progress = cls(folder, step, steps)
        for old in found[1:]:
            old.unlink()
        if found:
            found[0].rename(progress.path)
        if not found or json.loads(progress.path.read_bytes())["boot"] != boot():
            _write_progress(progress.path, randomness)
        return progress

    @property
    def path(self) -> Path:
        """The file."""
        return self._folder / f"reached-{self._checkpoint}-{self._steps}"

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is on disk."""
        self._move(step, max(step, self._steps))

    def made(self, step: int) -> None:
        """`step` is in the journal."""
        if time.perf_counter() >= self._next:
            began = time.perf_counter()
            self._move(self._checkpoint, step + 1)
            self._next = began + (1 + RARELY) * (time.perf_counter() - began)

    def _move(self, checkpoint: int, steps: int) -> None:
        old, self._checkpoint, self._steps = self.path, checkpoint, steps
        try:
            os.rename(old, self.path)
        except FileNotFoundError:
            raise Corrupt(
                f"checkpoint/{old.name}", f"was taken away while the run went on; {START}"
            ) from None


def make(folder: Path, randomness: Randomness) -> None:
    """The journal of a run that has made no step, before its first checkpoint: from then on it must
    be there.
    """
    handle = os.open(
        folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, PRIVATE_MODE
    )
    os.close(handle)
    for old in [p for p in folder.iterdir() if PROGRESS.fullmatch(p.name)]:
        old.unlink()
    _write_progress(folder / "reached-0-0", randomness)


def _write_progress(path: Path, randomness: Randomness) -> None:
    """Replace the file, which knows itself and when the machine was started."""

    def content(own: str) -> bytes:
        return json.dumps({"boot": boot(), "file": randomness.tag("file", own.encode())}).encode()

    write_atomically(path, content, mode=PRIVATE_MODE)


def _require_reached(
    found: Sequence[Path],
    randomness: Randomness,
    step: int,
    made: dict[int, tuple[list[float], str]],
) -> None:
    """Refuse a checkpoint or a journal that is older than the run got."""
    if len(found) != 1 or not (name := PROGRESS.fullmatch(found[0].name)):
        told = "is missing" if not found else "is there several times: a backup was put back"
        raise Corrupt(
            "checkpoint/reached-...", f"{told}: nobody can tell how far the run got; {START}"
        )
    try:
        held = json.loads(found[0].read_bytes())
        started, own = held["boot"], held["file"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Corrupt(f"checkpoint/{found[0].name}", f"is damaged; {START}") from None
    if own != randomness.tag("file", identity_of(found[0]).encode()):
        raise Corrupt(
            f"checkpoint/{found[0].name}", f"is a copy, or was restored from one; {START}"
        )
    checkpoint, steps = (int(n) for n in name.groups())
    if step < checkpoint:
        rule = (
            f"is of step {step}, and one of step {checkpoint} was written: an older one was put in "
            f"its place; {START}"
        )
        raise Corrupt("checkpoint/state.safetensors", rule)
    restarted = started == "" or started != boot()  # what was not synced may be lost
    if not restarted and (lost := [n for n in range(step, steps) if n not in made]):
        rule = (
            f"does not hold step {lost[0]}, which was made before: lines were removed, or an older "
            f"journal was put in its place; {START}"
        )
        raise Corrupt(f"checkpoint/{NAME}", rule)


class _Late:
    """A checksum on its way from the device."""

    def __init__(self, step: int, total: Tensor, rates: list[float]) -> None:
        self.step, self.rates = step, rates
        self._here = torch.empty((), dtype=total.dtype, pin_memory=True)
        self._here.copy_(total, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(total.device))

    def value(self) -> int:
        self._there.synchronize()
        return int(self._here)


def _read(path: Path) -> tuple[dict[int, tuple[list[float], str]], int]:
    """The whole lines and their length in bytes. A last line that a crash cut short was for noise
    that was never made.
    """
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        return {
            int(row["step"]): ([float(r) for r in row["rates"]], str(row["sum"])) for row in rows
        }, len(whole)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise Corrupt(
            f"checkpoint/{NAME}", "is damaged: the run cannot be resumed; start a new one"
        ) from None


def _words(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
