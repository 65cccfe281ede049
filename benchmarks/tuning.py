"""What the runner of searches costs beside its trials, by processor and by the clock: `python
benchmarks/tuning.py [TRIALS]`.

Three searches by composition on made-up records: 20 trials of a training as one meets it (3,000
records of 784 numbers, 24 steps of 512), 40 shorter ones, and 1,000 trials of one step each, to see
whether later ones are slower than earlier ones. Drawing settings, permits from the ledger, folders,
their locks, the log of scores and the erasure of losers, which another thread does, count as the
runner; calibration and the card, once a search, are told apart. What torch imports for its first
training is no trial's time: a search before warms up.

The last line says from which length of a trial on the runner takes less than 5% of its time: 20
times what it takes for one trial.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import dpfy
from dpfy.runs.run import Run
from dpfy.tuning import run as searches
from dpfy.tuning.terms import SearchSettings

SHARE = 0.05
CLOCKS = {
    "processor": (time.process_time, time.thread_time),
    "clock": (time.perf_counter, time.perf_counter),
}
"""What measures everything, and what measures a trial: by processor, what other threads do
meanwhile is the runner's.
"""


def search(
    trials: int, records: int, width: int, steps: int, batch: int
) -> dict[str, dict[str, Any]]:
    """What trials and the runner take, by each clock."""
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(records, width, generator=generator),
        torch.randint(0, 10, (records,), generator=generator),
    )
    marks = list[list[list[float]]]()

    def now() -> list[list[float]]:
        return [[clock() for clock in clocks] for clocks in CLOCKS.values()]

    def objective(trial: Any) -> float:
        marks.append(now())
        net = torch.nn.Linear(width, 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=trial.settings["rate"])
        dpfy.fit(net, (x, y), plan=trial.plan, optimizer=optimizer, run=trial.run)
        marks.append(now())
        return trial.settings["rate"]

    def recipe(settings: Any, of: int) -> Any:
        return dpfy.dpsgd(of, batch, steps=steps)

    terms = SearchSettings(50.0, 1e-5, records, trials, route="composition")
    with tempfile.TemporaryDirectory() as place:
        began = now()
        searches.tune(
            objective, {"rate": "0.1..1"}, recipe, terms, Run(Path(place) / "run", seed=1)
        )
        ended = now()
    return {
        name: told([began[k], *(mark[k] for mark in marks), ended[k]])
        for k, name in enumerate(CLOCKS)
    }


def told(marks: list[list[float]]) -> dict[str, Any]:
    """What marks tell that were made before the search, at the beginning and at the end of every
    trial, and after the search.

    A round is from the beginning of a trial to that of the next one; what is not the trial itself
    is the runner.
    """
    own = [end[1] - begin[1] for begin, end in zip(marks[1:-1:2], marks[2:-1:2], strict=True)]
    rounds = [
        later[0] - begin[0] for begin, later in zip(marks[1:-1:2], marks[3:-1:2], strict=False)
    ]
    runner = [whole - trial for whole, trial in zip(rounds, own, strict=False)]
    quarter = max(1, len(runner) // 4)
    first, latest = (statistics.median(part) for part in (runner[:quarter], runner[-quarter:]))
    return {
        "trials": len(own),
        "milliseconds of a trial": round(1e3 * statistics.median(own), 2),
        "milliseconds of the runner": round(1e3 * statistics.median(runner), 2),
        "share": round(sum(runner) / sum(own[:-1]), 4),
        "last quarter over first": round(latest / first, 3),
        "seconds once a search": round(marks[-1][0] - marks[0][0] - sum(rounds) - own[-1], 2),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    search(2, 60, 2, 1, 20)
    cases = {
        "as one meets it": (20, 3000, 784, 24, 512),
        "shorter": (40, 1000, 200, 12, 250),
        "of one step": (many, 60, 2, 1, 20),
    }
    found = {}
    for name, case in cases.items():
        found[name] = search(*case)
        print(json.dumps({name: found[name]}), flush=True)
    least = {
        clock: max(case[clock]["milliseconds of the runner"] for case in found.values()) / SHARE
        for clock in CLOCKS
    }
    print(
        json.dumps(
            {
                "under 5% from so many milliseconds of a trial": {
                    clock: round(of) for clock, of in least.items()
                }
            }
        )
    )
