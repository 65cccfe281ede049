"""Searches on a Ray cluster: trials are tasks of it, and spaces are those of Ray Tune.

    tuner = PrivateTuner(
        trainable,                                                       # trainable(trial): trains
        by trial.plan in trial.run param_space={"rate": tune.loguniform(0.05, 5), "batch":
        tune.choice([256, 512])}, tune_config=tune.TuneConfig(mode="max", num_samples=20,
        max_concurrent_trials=2), recipe=lambda settings, records: dpfy.dpsgd(records,
        settings["batch"], steps=100), terms=Terms(epsilon=3, delta=1e-5, records=60_000),
    )
    found = tuner.fit("runs/tuned")

Ray Tune itself writes down every trial with its result, and shows them: with a random number of
trials nobody may see that. So trials are plain tasks here, of which Ray keeps no events, and
everything of them lies among the secrets of the run folder. The folder must be seen under the same
path by every machine of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfy.core import check, errors
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.runs.run import Run
from dpfy.tuning.run import Execution, RecipeFor, Tuned, tune
from dpfy.tuning.sealed import TrialResult
from dpfy.tuning.search import MOST_WORKERS
from dpfy.tuning.space import Dimension, FloatRange, IntegerRange, ListedValues, Space
from dpfy.tuning.terms import SearchSettings
from dpfy.tuning.trial import Trial, TrialFailed, TrialTask

try:
    import ray
    from ray.tune.search import sample
except ImportError:
    raise errors.missing("searches by Ray", "ray") from None

WAY_OUT = "use tune.uniform, tune.loguniform, tune.randint or tune.choice"


@dataclass(frozen=True)
class RayPool:
    """Makes trials as tasks of a Ray cluster, `workers` at a time, each with so many processors and
    GPUs.

    Guarantees: as those of other pools, trials depend on only themselves; which is selected
    does not depend on the cluster.
    """

    workers: int
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check.integer("workers", self.workers, most=MOST_WORKERS)

    def rows(self, tasks: Iterable[TrialTask]) -> Iterator[tuple[TrialTask, TrialResult]]:
        """As they end; no more are started ahead than there are workers."""
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        made = ray.remote(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0, enable_task_events=False
        )(_made)
        waiting, source, under_way = True, iter(tasks), dict[Any, TrialTask]()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < self.workers:
                    task = next(source, None)
                    if task is None:
                        waiting = False
                    else:
                        under_way[made.remote(task)] = task
                done, _ = ray.wait(list(under_way), num_returns=1) if under_way else ([], [])
                for reference in done:
                    yield under_way.pop(reference), _result(reference)
        finally:
            for reference in under_way:
                ray.cancel(reference, force=True)


def _made(task: TrialTask) -> TrialResult:
    return task()


def _result(reference: Any) -> TrialResult:
    try:
        found: TrialResult = ray.get(reference)
        return found
    except ray.exceptions.RayTaskError as problem:
        cause = problem.cause
        if isinstance(cause, DpfyError):
            raise cause from None
        raise TrialFailed(f"a trial failed on the cluster ({type(cause).__name__})") from None
    except ray.exceptions.RayError as problem:
        raise TrialFailed(
            f"a process of the cluster that made a trial is gone ({type(problem).__name__}); "
            f"resume the search"
        ) from None


def space_of(param_space: Mapping[str, Any]) -> Space:
    """The space of a dictionary of Ray Tune's: ranges, choices, and plain values, which are the
    same in every trial.
    """
    return Space({name: _dimension(name, given) for name, given in param_space.items()})


def _dimension(name: str, given: Any) -> Dimension:
    if isinstance(given, sample.Categorical):
        return ListedValues(tuple(given.categories))
    if isinstance(given, sample.Float | sample.Integer):
        drawn = given.get_sampler()
        log, even = isinstance(drawn, sample.LogUniform), isinstance(drawn, sample.Uniform)
        if isinstance(given, sample.Float) and (log or even):
            return FloatRange(float(given.lower), float(given.upper), log)
        if isinstance(given, sample.Integer) and even:
            return IntegerRange(
                int(given.lower), int(given.upper) - 1
            )  # Ray leaves the upper end out
    if isinstance(given, str | int | float | bool):
        return ListedValues((given,))
    what = "grid_search" if isinstance(given, dict) else type(given).__name__
    raise Unsupported(
        f"{name}: {what} in a space whose trials are drawn independently of each other", WAY_OUT
    )


@dataclass(frozen=True)
class _Signed:
    """A trainable that returns a number, or a dictionary with the metric in it."""

    trainable: Callable[[Trial], Any]
    metric: str | None
    sign: float

    def __call__(self, trial: Trial) -> float:
        found = self.trainable(trial)
        if isinstance(found, Mapping):
            if self.metric not in found:
                raise TrialFailed(
                    f"a trial's result holds no {self.metric!r}: name it in tune_config.metric"
                )
            found = found[self.metric]
        return self.sign * float(found)


@dataclass(frozen=True)
class PrivateTuner:
    """Ray Tune's Tuner, within a budget for everything. `tune_config` gives metric, mode,
    num_samples and max_concurrent_trials.

    num_samples is the number of trials, or its mean where it is random, unless `terms` say another.
    Search algorithms and schedulers look at results: those are for Optuna, by composition
    (dpfy.integrations.optuna).
    """

    trainable: Callable[[Trial], Any]
    param_space: Mapping[str, Any]
    recipe: RecipeFor
    terms: SearchSettings
    tune_config: Any = None
    cpus: float = 1.0
    gpus: float = 0.0

    def fit(self, run: Run | str | Path, *, work: Execution | None = None) -> Tuned:
        """Search, and leave the selected run in the folder `run`.

        Guarantees: those of :func:`dpfy.tuning.run.tune`.
        """
        config, terms = self.tune_config, self.terms
        for name in ("search_alg", "scheduler", "time_budget_s"):
            if getattr(config, name, None) is not None:
                way_out = (
                    "leave it out: settings are drawn at random; or use dpfy.integrations.optuna, "
                    "by composition"
                )
                raise Unsupported(
                    f"tune_config.{name}, which follows from results or their time,", way_out
                )
        mode = getattr(config, "mode", None) or "max"
        check.one_of("tune_config.mode", mode, ("max", "min"))
        samples = getattr(config, "num_samples", 1)
        if samples != 1:
            if terms.trials not in (samples, SearchSettings.trials):
                raise InvalidInput(
                    "tune_config.num_samples",
                    samples,
                    f"must be the trials of the terms ({terms.trials:g})",
                )
            terms = replace(terms, trials=samples)
        workers = getattr(config, "max_concurrent_trials", None) or 2
        objective = _Signed(
            self.trainable, getattr(config, "metric", None), 1.0 if mode == "max" else -1.0
        )
        chosen = replace(work or Execution(), pool=RayPool(workers, self.cpus, self.gpus))
        return tune(objective, space_of(self.param_space), self.recipe, terms, run, work=chosen)
