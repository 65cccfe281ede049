"""What the runner of searches costs beside its trials, in processor time: `python benchmarks/tuning.py [TRIALS]`.

Two searches by composition on made-up records: 1,000 trials of one step each, to see whether later ones are slower than earlier ones, and
20 trials of a training as one meets it (3,000 records of 784 numbers, 24 steps of 512), for the share. Drawing settings, permits from the
ledger, folders, checkpoints' locks, scores, their log and the erasure of losers count as the runner; calibration and the card, once a
search, are told apart.
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
from dpfy.runs.folder import Place
from dpfy.tuning import run as searches
from dpfy.tuning.terms import Terms

now = time.process_time


def search(trials: int, records: int, width: int, steps: int, batch: int) -> dict[str, Any]:
    """Seconds of each trial and of what the runner did since the one before."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(records, width, generator=generator), torch.randint(0, 10, (records,), generator=generator)
    own, between, last = list[float](), list[float](), 0.0

    def objective(trial: Any) -> float:
        nonlocal last
        began = now()
        if own:
            between.append(began - last)
        net = torch.nn.Linear(width, 10)
        dpfy.fit(
            net, (x, y), plan=trial.plan, optimizer=torch.optim.SGD(net.parameters(), lr=trial.settings["rate"]), run=trial.run
        )
        last = now()
        own.append(last - began)
        return trial.settings["rate"]

    def recipe(settings: Any, of: int) -> Any:
        return dpfy.dpsgd(of, batch, steps=steps)

    terms = Terms(50.0, 1e-5, records, trials, route="composition")
    with tempfile.TemporaryDirectory() as place:
        began = now()
        searches.tune(objective, {"rate": "0.1..1"}, recipe, terms, Place(Path(place) / "run", seed=1))
        whole = now() - began
    quarter = len(between) // 4
    first, latest = (statistics.median(part) for part in (between[:quarter], between[-quarter:]))
    return {
        "trials": len(own),
        "seconds_of_trials": round(sum(own), 3),
        "seconds_of_the_runner": round(sum(between), 3),
        "share": round(sum(between) / sum(own), 4),
        "once_a_search": round(whole - sum(own) - sum(between), 3),
        "milliseconds_between_trials": {"first quarter": round(1e3 * first, 3), "last quarter": round(1e3 * latest, 3)},
        "last_over_first": round(latest / first, 3),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(json.dumps({"as one meets it": search(20, 3000, 784, 24, 512)}))
    print(json.dumps({"small trials": search(many, 60, 2, 1, 20)}))
