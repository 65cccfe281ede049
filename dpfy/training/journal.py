"""The journal of steps: before the noise of a step is made, the sum that it is for is written down.

    checkpoint/steps.jsonl (0600)   {"step": 17, "rates": [0.1], "sum": "5c0e..."}   since the last checkpoint, one line a step

A run that was killed makes the steps since its last checkpoint again, with the same noise. That is safe if the sums are the same bits,
for then so is what is released. The journal is how a resumed run knows: a keyed tag of a checksum of each sum, and the learning
rates. At the first step that would differ the run stops, before noise is added.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.random import Randomness
from dpfy.core.storage import PRIVATE_MODE

NAME = "steps.jsonl"
SAME = "resume with the same code, data and settings, so that it is repeated bit for bit, or start a new run"
GPU = (
    "some of this device's kernels add in no fixed order: torch.use_deterministic_algorithms(True) from the beginning avoids this"
)


class Journal:
    """What each step since the last checkpoint was made of.

    Guarantees: `bind` returns for each step once, in their order. After it returned for a step, no process that resumes this run gets
    it to return for that step and a sum or rates that differ, up to the checksum, which reads a random quarter of huge tensors. A
    line survives the death of the process at any moment; on a GPU it is written while the next step is under way, so as not to wait
    for the device.
    """

    def __init__(self, folder: Path | None, randomness: Randomness, step: int) -> None:
        """In `folder`; None where another rank writes it, and only the order of the steps is kept here."""
        self._randomness = randomness
        self.next = step
        self._file, self._writes = -1, folder is not None
        self._late: _Late | None = None
        self._made: dict[int, tuple[list[float], str]] = {}
        if folder is not None:
            self._open(folder, step)

    def _open(self, folder: Path, step: int) -> None:
        lines, whole = _read(folder / NAME)
        self._made = {n: line for n, line in lines.items() if n >= step}
        self._file = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE_MODE)
        os.ftruncate(self._file, whole if self._made else 0)

    def bind(self, step: int, total: Tensor, rates: Sequence[float]) -> None:
        """Write down what `step` is about to release, by a checksum of the sum, or refuse it if it was made before: here, or of
        something else."""
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

    def _repeated(self, step: int, total: Tensor, rates: Sequence[float]) -> None:
        made, tag = self._made[step]
        if made != list(rates):
            raise InvalidInput(
                f"resume step {step}", f"learning rate {_words(rates)}", f"it was made with {_words(made)}: {SAME}"
            )
        if tag != self._tag(step, int(total)):
            rule = f"its noise was made for a sum before: {SAME}" + (f" ({GPU})" if total.is_cuda else "")
            raise InvalidInput(f"resume step {step}", "another sum of gradients", rule)

    def _tag(self, step: int, total: int) -> str:
        return self._randomness.tag("sum", f"{step} {total}".encode())[:32]


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
    """The whole lines and their length in bytes. A last line that a crash cut short was for noise that was never made."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        return {int(row["step"]): ([float(r) for r in row["rates"]], str(row["sum"])) for row in rows}, len(whole)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise Corrupt(f"checkpoint/{NAME}", "is damaged: the run cannot be resumed; start a new one") from None


def _words(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))
