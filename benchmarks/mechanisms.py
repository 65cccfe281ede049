"""Accuracy of the mechanisms at one guarantee: the same model, clip norm, grid of learning rates and seeds for each.

    python benchmarks/mechanisms.py --setting small --batch-size 25 --seeds 5
    python benchmarks/mechanisms.py --setting mnist --epsilon 3.41 --mechanisms dp-sgd auto

Tuning is equal and not private: each mechanism tries the same learning rates, and the best mean accuracy over the seeds is shown together
with that of all others. What is compared is the mechanism, not a released model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import dpfy
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.models import build
from dpfy.models.config import ModelConfig
from dpfy.plan.auto import Setting, Target, measure, recipe_for

SETTINGS = {
    # data, model, steps, delta, clip norm, learning rates (for gradients of norm at most the clip norm)
    "small": ("embedded", "mlp", 200, 1e-6, 1.0, (0.05, 0.1, 0.2, 0.4, 0.8)),
    "mnist": ("mnist", "lenet5", 1200, 1e-5, 1.0, (0.5,)),
}
MECHANISMS = ("dp-sgd", "band-mf", "blt", "tree", "sqrt", "dense", "auto")


def accuracy(plan: dpfy.Plan, data: source.DataSource, model: str, rate: float, momentum: float, seed: int) -> float:
    """Held-out accuracy of one run, with all of its bookkeeping, in a folder that is thrown away."""
    torch.manual_seed(seed)
    net = build.build(ModelConfig(model), data.features, data.classes or 10)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
    with tempfile.TemporaryDirectory() as folder:
        run = dpfy.Run(Path(folder) / "run", seed=seed, checkpoint_every=1e9)
        result = dpfy.fit(net, data.train, plan=plan, optimizer=optimizer, run=run, test=data.test, update=dpfy.Update(0.9))
    return float(result.utility["test_accuracy"])


def main() -> None:
    """One JSON line for each mechanism."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--batch-size", type=float, default=25)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kind, model, steps, delta, clip, rates = SETTINGS[options.setting]
    steps, clip, rates = options.steps or steps, options.clip_norm or clip, options.rates or rates
    data = source.load(DataConfig(kind), data_dir=os.environ.get("DPFY_DATA"))
    target = Target(options.epsilon, delta)
    for mechanism in options.mechanisms:
        started = time.perf_counter()
        recipe = recipe_for(mechanism, Setting(len(data.train), options.batch_size, steps, clip), target)
        plan = target.plan(recipe)
        found = {r: [accuracy(plan, data, model, r, options.momentum, seed) for seed in range(options.seeds)] for r in rates}
        best = max(found, key=lambda r: statistics.mean(found[r]))
        row = {
            "mechanism": mechanism,
            "strategy": type(recipe.strategy).__name__,
            "sampling": type(recipe.sampler).__name__,
            "batch_size": options.batch_size,
            "epsilon": plan.epsilon,
            "rmse": measure(mechanism, "", plan).rmse,
            "accuracy": statistics.mean(found[best]),
            "spread": statistics.stdev(found[best]) if options.seeds > 1 else None,
            "learning_rate": best,
            "all": {str(r): round(statistics.mean(v), 4) for r, v in found.items()},
            "seconds": round(time.perf_counter() - started, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
