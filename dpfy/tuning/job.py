"""`dpfy tune`: a search over the fields of a training job, from its configuration to the run
folder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dpfy.core import storage
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.data.records import Records
from dpfy.data.split import split_fraction
from dpfy.models import build
from dpfy.models.config import ModelConfig
from dpfy.plan.recipe import Plan, Recipe
from dpfy.runs.folder import finish_erasure
from dpfy.runs.mark import HIDDEN, Mark, refuse_planted
from dpfy.runs.run import Run
from dpfy.training import job
from dpfy.tuning import config as configuration
from dpfy.tuning import outcome, search
from dpfy.tuning import run as search_run
from dpfy.tuning.claim import ASKED, SEARCH
from dpfy.tuning.config import SearchConfig
from dpfy.tuning.routes import PUBLIC, PUBLIC_DATA
from dpfy.tuning.run import Execution, Tuned, tune
from dpfy.tuning.search import RandomSearch, SearchEngine
from dpfy.tuning.space import Settings
from dpfy.tuning.trial import Trial

SELECTED = (
    "# The run that a search selected. Its report covers the search; trained again from this file, "
    "it is another run.\n"
)
RATE_POWER = 1.0
"""With a batch k times as large, at the same number of steps, the noise of the average is k times
smaller, and the rate k times larger.
"""
Show = Callable[[str, int | None], None]


@dataclass(frozen=True)
class JobObjective:
    """Trains a job with the settings of a trial, and scores it by its right answers. It can be
    taken to other processes.
    """

    config: SearchConfig

    def __call__(self, trial: Trial) -> float:
        """Train and score."""
        config = self.config.with_settings(trial.settings)
        config = replace(config, runtime=replace(config.runtime, device=trial.device))
        data, train, apart = prepared(config.data, config.model)
        test, validation = (
            (None, None)
            if config.data.test_use != "public"
            else halves(apart, self.config.tune.validation)
        )
        whole = train if data.owned is None else replace(data.owned, records=train)
        model, _ = job.fitted(config, data, trial.train(whole), test, trial.run)
        if self.config.score == PUBLIC:
            assert validation is not None
            return right(model, validation) / len(validation)
        return trial.count(answered(model, trial.valid(whole)))


def right(model: nn.Module, records: Records) -> int:
    """How many records a model answers right, each alone in its batch as far as the model is
    concerned.
    """
    return int(answered(model, records).sum())


@torch.no_grad()
def answered(model: nn.Module, records: Records) -> Tensor:
    """For each record whether a model answers it right; of users for each of their places, user by
    user.
    """
    device = next(model.parameters()).device
    was, (inputs, targets, *_) = model.training, records.flat
    model.eval()
    found = [
        model(x.to(device)).argmax(1) == y.to(device)
        for x, y in zip(inputs.split(1000), targets.split(1000), strict=True)
    ]
    model.train(was)
    return torch.cat(found).cpu()


def halves(records: Records, share: float) -> tuple[Records, Records]:
    """(test, validation): public records that figures are of, and those that trials are scored on;
    a fixed public split.
    """
    return split_fraction(records, share)


def prepared(data: DataConfig, model: ModelConfig) -> tuple[source.DataSource, Records, Records]:
    """The data of a job, and its records as the model reads them. Loaded once a process, extracted
    once for each kind of features.
    """
    found = _loaded(data)
    if model.name != "scattering-linear":
        return found, found.train, found.test
    return (
        found,
        *_extracted(data, ModelConfig(name=model.name, groups=model.groups, scale=model.scale)),
    )


@functools.lru_cache(maxsize=2)
def _loaded(data: DataConfig) -> source.DataSource:
    return source.load(data)


@functools.lru_cache(maxsize=8)
def _extracted(data: DataConfig, model: ModelConfig) -> tuple[Records, Records]:
    found = _loaded(data)
    return job.extracted(model, found.train), job.extracted(model, found.test)


def scaled(settings: Settings, share: float) -> Settings:
    """Settings for a part of the records: a batch that is that part of it, at a rate for the noise
    that its average then has.
    """
    found = dict(settings)
    if "training.batch_size" in found:
        found["training.batch_size"] = found["training.batch_size"] * share
    if "training.learning_rate" in found:
        found["training.learning_rate"] = found["training.learning_rate"] * share**RATE_POWER
    return found


def recipe_for(config: SearchConfig) -> Callable[[Settings, int], Recipe]:
    """What a trial of a job does to so many records."""

    def recipe(settings: Settings, records: int) -> Recipe:
        found = config.with_settings(settings)
        if found.training.batch_size is not None and found.training.batch_size > records:
            rule = f"must be at most the records that a trial trains on ({records})"
            raise InvalidInput("training.batch_size", found.training.batch_size, rule)
        return job.recipe_of(found, records)

    return recipe


def published(config: SearchConfig, settings: Settings, plan: Plan) -> dict[str, bytes]:
    """The files of the selected run beside its model: its configuration, for `dpfy train`; that of
    the search, for `dpfy tune`; and the schema of its table.
    """
    found = config.with_settings(settings)
    found = replace(
        found, privacy=replace(found.privacy, epsilon=None, noise_multiplier=plan.noise_multiplier)
    )
    files = {
        "config.toml": (SELECTED + found.to_toml(publish=True)).encode(),
        ASKED: config.to_toml(publish=True).encode(),
    }
    return files | ({"schema.toml": job.schema_of(found)} if found.data.schema is not None else {})


def run(
    config: SearchConfig,
    out: Path,
    *,
    resume: bool = False,
    seed: int | None = None,
    progress: Show = lambda what, made: None,
) -> Tuned:
    """Search, and leave the selected run in the folder `out`; or go on with the search there.

    Guarantees: those of :func:`dpfy.tuning.run.tune`; on public data, those of `dpfy train`. What
    would not fit in memory is refused before anything is reserved.
    """
    search.require_workers(config.tune.workers)
    _require_models(config)
    if config.tune.chosen == PUBLIC_DATA:
        from dpfy.tuning import public

        return public.run(config, out, resume=resume, seed=seed, progress=progress)
    engine = engine_of(config)
    work = Execution(
        config.tune.workers,
        config.tune.devices or (config.job.runtime.device,),
        config.job.runtime.checkpoint_every,
        scaled=scaled,
        publish=functools.partial(published, config),
        progress=progress,
    )
    records = job.records_of(config.job)
    terms = config.terms(records, job.asked(config.job.privacy))
    return tune(
        JobObjective(config),
        config.space,
        recipe_for(config),
        terms,
        place_of(config, out, resume, seed),
        engine=engine,
        work=work,
    )


def _require_models(config: SearchConfig) -> None:
    """Refuse models of the search that would not fit in memory, by their hidden layers alone where
    the shape of records is not public.
    """
    from dpfy.training.load import READS

    kind = config.job.data.kind
    for settings in config.space.corners(("model.name", "model.hidden")):
        model = config.with_settings(settings).model
        if kind in READS or model.name in ("linear", "mlp"):
            build.require_fits(model, *READS.get(kind, ((1,), 2)))


def engine_of(config: SearchConfig) -> SearchEngine:
    """What proposes settings."""
    if config.tune.engine == "random":
        return RandomSearch(config.space)
    raise Unsupported(
        f"the engine {config.tune.engine!r} from the command line",
        "use dpfy.integrations.optuna from Python: docs/tuning.md",
    )


def place_of(config: SearchConfig, out: Path, resume: bool, seed: int | None) -> Run:
    """Where the search lives and what it may spend."""
    found = config.job
    texts = (config.to_toml(publish=True), config.to_toml(publish=False))
    delta = job.chosen_delta(found, job.records_of(found))
    budget = job.budget_of(found.ledger, delta)
    about = found.about.rows(found.data, found.model)
    return Run(out, resume, found.ledger.path, budget, seed, texts, found.public.rows(), about)


def finished(out: Path) -> Tuned:
    """The finished search in `out`; what a crash after its end has left to erase is erased."""
    from dpfy.tuning import public

    finish_erasure(out)
    if not (out / SEARCH).is_file():
        return public.finished(out)
    outcome.same_times(out)
    return search_run.finished(out)


def stored(out: Path) -> SearchConfig:
    """The configuration of the unfinished search in `out`, kept with its secrets; of one on public
    data, beside them.
    """
    from dpfy.tuning import public

    if Mark.find(out) is None and not public.work_of(out).is_dir():
        raise InvalidInput(
            "--resume", str(out), "holds no search to resume; leave --resume out to start one"
        )
    file = public.work_of(out) / "config.toml"
    if Mark.find(out) is not None:
        refuse_planted(out)
        file = file if file.is_file() else out / HIDDEN / "config.toml"
    if not file.is_file():
        rule = (
            "was stopped before its configuration was stored, and nothing was spent: start it "
            "again without --resume"
        )
        raise InvalidInput("run", str(out), rule)
    return configuration.made(storage.toml("config", file), {}, {})
