"""Accuracy of the mechanisms at one guarantee: the same model, clip norm, grid of settings and seeds for each.

    python benchmarks/mechanisms.py --setting small --batch-size 25 --seeds 5
    python benchmarks/mechanisms.py --setting mnist --batch-size 500 --epsilon 3.14 5.30 12.26 --mechanisms dp-sgd auto \
        --momentum 0 0.9 --tuning-seeds 1 --seeds 3 --device cuda --jobs 10 --out mechanisms.jsonl

Tuning is equal and not private: each mechanism tries the same grid of learning rates, momenta and steps. Without `--tuning-seeds` every
point of the grid runs with every seed and the best mean is shown; with it the best point is found on that many seeds of its own and then
runs with the seeds of the table. What is compared is the mechanism, not a released model.

With `--out` every run is one line of that file, and runs that are in it already are not made again.
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import dpfy
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.models import build
from dpfy.models.config import ModelConfig
from dpfy.plan.auto import CalibrationTarget, RunSetting, measure, recipe_for
from dpfy.plan.recipe import Plan
from dpfy.training import Update

SETTINGS = {
    # data, model, steps, delta, clip norm, learning rates (for gradients of norm at most the clip
    # norm)
    "small": ("embedded", "mlp", 200, 1e-6, 1.0, (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)),
    "mnist": ("mnist", "lenet5", 2400, 1e-5, 1.0, (0.25, 0.5, 1.0, 2.0)),
}
MECHANISMS = ("dp-sgd", "band-mf", "blt", "tree", "sqrt", "dense", "auto")
TUNING = 1000
"""Seeds of tuning runs start here, so that none of them is in the table."""


@dataclass(frozen=True)
class Point:
    """All that a run depends on but its seed.

    `rate` is the learning rate without momentum; with momentum m the optimizer takes rate (1 - m).
    """

    setting: str
    batch_size: float
    clip_norm: float
    average: float
    mechanism: str
    epsilon: float
    steps: int
    rate: float
    momentum: float

    @property
    def plan(self) -> str:
        """The name of its plan."""
        return (
            f"{self.setting} {self.batch_size:g} {self.clip_norm:g} {self.mechanism} "
            f"{self.epsilon:g} {self.steps}"
        )


class Job(NamedTuple):
    """One run."""

    point: Point
    seed: int

    @property
    def name(self) -> str:
        """Its line in the file of results."""
        return json.dumps([*asdict(self.point).values(), self.seed])


def work(
    options: argparse.Namespace, plans: dict[str, Any], todo: multiprocessing.Queue[Any], done: Any
) -> None:
    """A process of its own: the data is loaded once, then jobs are taken until there are no
    more.
    """
    torch.set_num_threads(1)
    kind, model, *_ = SETTINGS[options.setting]
    data = source.load(DataConfig(kind), data_dir=os.environ.get("DPFY_DATA"))
    held = {name: Plan.from_json(plan) for name, plan in plans.items()}
    while (job := todo.get()) is not None:
        started = time.perf_counter()
        score = accuracy(held[job.point.plan], data, model, job, options)
        done.put((job, {"accuracy": score, "seconds": round(time.perf_counter() - started, 1)}))


def accuracy(
    plan: Plan, data: source.DataSource, model: str, job: Job, options: argparse.Namespace
) -> float:
    """Held-out accuracy of one run, with all of its bookkeeping, in a folder that is thrown
    away.
    """
    torch.manual_seed(job.seed)
    net = build.build(ModelConfig(model), data.features, data.classes or 10).to(options.device)
    momentum = job.point.momentum
    optimizer = torch.optim.SGD(
        net.parameters(), lr=job.point.rate * (1 - momentum), momentum=momentum
    )
    with tempfile.TemporaryDirectory() as folder:
        run = dpfy.Run(Path(folder) / "run", seed=job.seed, checkpoint_every=1e9)
        runtime, update = dpfy.Runtime(device=options.device), Update(job.point.average)
        result = dpfy.fit(
            net,
            data.train,
            plan=plan,
            optimizer=optimizer,
            run=run,
            evaluation=dpfy.PublicTest(data.test),
            runtime=runtime,
            update=update,
        )
    return float(result.utility["test_accuracy"])


class Results:
    """What has been measured, on disk as it comes."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.rows = path, {}
        if path is not None and path.is_file():
            self.rows = {row["job"]: row for row in map(json.loads, path.read_text().splitlines())}

    def add(self, job: Job, row: dict[str, Any]) -> None:
        """One more run."""
        self.rows[job.name] = {"job": job.name, **row}
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(self.rows[job.name]) + "\n")

    def of(self, point: Point, seeds: Iterable[int]) -> list[float]:
        """The accuracies of a point that are known."""
        jobs = (Job(point, seed) for seed in seeds)
        return [self.rows[job.name]["accuracy"] for job in jobs if job.name in self.rows]

    def make(self, jobs: list[Job], options: argparse.Namespace, plans: dict[str, Any]) -> None:
        """Run what is missing, in several processes."""
        missing = [job for job in jobs if job.name not in self.rows]
        context = multiprocessing.get_context("spawn")
        todo, done = context.Queue(), context.Queue()
        count = min(options.jobs, len(missing))
        for job in [*missing, *[None] * count]:
            todo.put(job)
        workers = [
            context.Process(target=work, args=(options, plans, todo, done), daemon=True)
            for _ in range(count)
        ]
        for worker in workers:
            worker.start()
        for position in range(len(missing)):
            job, row = _answer(done, workers)
            self.add(job, row)
            print(f"{position + 1}/{len(missing)} {job.name} {row}", file=sys.stderr, flush=True)


def _answer(done: Any, workers: list[Any]) -> tuple[Job, dict[str, Any]]:
    """The next finished job; a process that died ends the whole."""
    while done.empty():
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a run failed; its error is above")
        time.sleep(0.05)
    return done.get()  # type: ignore[no-any-return]


def grid(options: argparse.Namespace) -> Iterator[list[Point]]:
    """For each mechanism and guarantee, the points that are tried."""
    _, _, steps, _, clip, rates = SETTINGS[options.setting]
    fixed = (options.setting, options.batch_size, options.clip_norm or clip, options.average)
    tried = list(
        itertools.product(options.steps or [steps], options.rates or rates, options.momentum)
    )
    for epsilon, mechanism in itertools.product(options.epsilon, options.mechanisms):
        yield [Point(*fixed, mechanism, epsilon, *values) for values in tried]


def make_plans(
    points: Iterable[Point], options: argparse.Namespace, records: int
) -> dict[str, Any]:
    """Every plan that is needed; those in the file `--plans` are not computed again."""
    delta = SETTINGS[options.setting][3]
    file = options.plans
    plans = json.loads(file.read_text()) if file and file.is_file() else {}
    for point in points:
        if point.plan not in plans:
            target = CalibrationTarget(point.epsilon, delta)
            setting = RunSetting(records, point.batch_size, point.steps, point.clip_norm)
            plans[point.plan] = target.plan(recipe_for(point.mechanism, setting, target)).to_json()
    if file:
        file.write_text(json.dumps(plans) + "\n")
    return plans


def row(
    points: list[Point], best: Point, results: Results, options: argparse.Namespace, plan: Plan
) -> dict[str, Any]:
    """One line of the table."""
    found = results.of(best, range(options.seeds))
    tried = (
        range(TUNING, TUNING + options.tuning_seeds)
        if options.tuning_seeds
        else range(options.seeds)
    )
    strategy = plan.recipe.strategy
    return {
        "mechanism": best.mechanism,
        "strategy": type(strategy).__name__,
        "bands": len(strategy.coefficient) if hasattr(strategy, "coefficient") else None,
        "sampling": type(plan.recipe.sampler).__name__,
        "batch_size": options.batch_size,
        "epsilon": plan.epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "rmse": measure(best.mechanism, "", plan).rmse,
        "accuracy": statistics.mean(found),
        "spread": statistics.stdev(found) if len(found) > 1 else None,
        "steps": best.steps,
        "learning_rate": best.rate,
        "momentum": best.momentum,
        "all": {
            f"{p.steps} {p.rate:g} {p.momentum:g}": round(statistics.mean(results.of(p, tried)), 4)
            for p in points
        },
    }


def main() -> None:
    """One JSON line for each mechanism and guarantee."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", choices=SETTINGS, default="small")
    parser.add_argument("--batch-size", type=float, default=25)
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0])
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--steps", nargs="+", type=int)
    parser.add_argument("--momentum", nargs="+", type=float, default=[0.0])
    parser.add_argument("--clip-norm", type=float)
    parser.add_argument("--average", type=float, default=0.9)
    parser.add_argument("--tuning-seeds", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument(
        "--out", type=Path, help="file of results, one line a run; runs in it are not made again"
    )
    parser.add_argument(
        "--plans", type=Path, help="file of plans; plans in it are not calibrated again"
    )
    parser.add_argument("--only-plans", action="store_true")
    options = parser.parse_args()
    records = len(
        source.load(
            DataConfig(SETTINGS[options.setting][0]), data_dir=os.environ.get("DPFY_DATA")
        ).train
    )
    groups = list(grid(options))
    plans = make_plans(itertools.chain(*groups), options, records)
    if options.only_plans:
        return
    results, seeds = Results(options.out), range(options.seeds)
    tuning = range(TUNING, TUNING + options.tuning_seeds) if options.tuning_seeds else seeds
    results.make(
        [Job(point, seed) for seed in tuning for points in groups for point in points],
        options,
        plans,
    )
    best = [max(points, key=lambda p: statistics.mean(results.of(p, tuning))) for points in groups]
    results.make([Job(point, seed) for seed in seeds for point in best], options, plans)
    for points, point in zip(groups, best, strict=True):
        print(
            json.dumps(row(points, point, results, options, Plan.from_json(plans[point.plan]))),
            flush=True,
        )


if __name__ == "__main__":
    main()
