"""A run that ends early, on a ledger of the data set, killed at every call of the operating system
around its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import small

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify

POINT, STEPS, AROUND = 2, 4, 70


def train(folder: Path) -> None:
    """Two of four steps, resumed if they were begun."""
    net = small.model()
    run = dpfy.Run(
        folder / "run",
        resume=True,
        ledger=folder / "people.jsonl",
        budget=RenyiFilter(30.0, 1e-3),
        seed=5,
    )
    plan = dpfy.dpsgd(small.RECORDS, 20, steps=STEPS, clip_norm=0.5, stopping=[POINT]).with_noise(
        2.0, delta=1e-3
    )
    dpfy.fit(
        net,
        small.data(),
        plan=plan,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        run=run,
        stop=lambda rows: True,
    )


def die_around_the_end(path: str, every: int, answer: str) -> None:
    """Kill the run before every `every`-th of its last calls; judge what it left, resume it, judge
    again. What was wrong, in `answer`.
    """
    root = Path(path)
    train(root / "first")  # its forks find every cache filled
    order = root / "order"
    assert _forked(root / "whole", None, order) == 0
    calls = order.read_text().split()
    model = (root / "whole" / "run" / "model.safetensors").read_bytes()
    deaths, killed, wrong = range(max(0, len(calls) - AROUND), len(calls), every), 0, []
    for n in deaths:
        folder = root / str(n)
        killed += os.waitstatus_to_exitcode(_forked(folder, n)) == -signal.SIGKILL
        found = _judged(folder)
        if _forked(folder, None) != 0:
            found.append("not resumed")
        elif (folder / "run" / "model.safetensors").read_bytes() != model or _settled(
            folder / "people.jsonl"
        ) != (POINT, POINT):
            found.append("another end")
        elif bad := [
            f.what for f in verify(folder / "run", ledger=folder / "people.jsonl") if not f.holds
        ]:
            found += bad
        wrong += [(n, calls[n], *found)] if found else []
    Path(answer).write_text(json.dumps({"deaths": len(deaths), "killed": killed, "wrong": wrong}))


def _judged(folder: Path) -> list[str]:
    """The data set's ledger may bill less than the plan only where the run's own has closed it."""
    own, people = (
        _settled(file) for file in (folder / "run" / "ledger.jsonl", folder / "people.jsonl")
    )
    return (
        ["the data set's ledger was settled first"] if people is not None and own != people else []
    )


def _settled(file: Path) -> tuple[int, int] | None:
    return next(iter(Ledger.read(file).settlements.values()), None) if file.is_file() else None


def _forked(folder: Path, death: int | None, order: Path | None = None) -> int:
    return small.forked(folder, lambda: train(folder), death, order)


def started(context: Any, path: Path, every: int) -> dict[str, Any]:
    """The answer of `die_around_the_end`, made in a process of its own."""
    child = context.Process(
        target=die_around_the_end, args=(str(path), every, str(path / "answer"))
    )
    child.start()
    child.join(3600)
    assert child.exitcode == 0
    found: dict[str, Any] = json.loads((path / "answer").read_text())
    return found
