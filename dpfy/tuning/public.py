"""A search on public data, which is free, and then one private run with the settings that it found.

Trials have the noise that the private run will have: the same batch and noise multiplier at the
same number of steps, so that what is best there is best under noise. Where the public data is
smaller than a batch, batch and noise shrink together, which leaves the noise of the average as it
is.

    OUT.search/   config.toml  scores.jsonl  trials/         while the search lasts; nothing in it
    is secret
"""

from __future__ import annotations

import functools
import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.storage import write_atomically
from dpfy.data.config import FIELDS_OF_KIND, KINDS, DataConfig
from dpfy.gradients.clip import FlatClip
from dpfy.plan.recipe import Plan, Recipe, dpsgd
from dpfy.report import card
from dpfy.runs.mark import erase_folder
from dpfy.training import job
from dpfy.training import run as runs
from dpfy.training.config import read_toml
from dpfy.training.parallel.world import World
from dpfy.tuning.claim import TRIALS, PublicTuning
from dpfy.tuning.config import SearchConfig
from dpfy.tuning.job import Show, prepared, right
from dpfy.tuning.run import Tuned
from dpfy.tuning.sealed import TrialRights, listed
from dpfy.tuning.search import RandomSearch, Search, SearchEngine, pool_of
from dpfy.tuning.space import Settings
from dpfy.tuning.trial import Trial, TrialTask

WORK, ASKED = ".search", "search.json"


@dataclass(frozen=True)
class PublicObjective:
    """Trains a job on public records, and scores it on those held out of them."""

    config: SearchConfig
    data: DataConfig

    def __call__(self, trial: Trial) -> float:
        """Train and score."""
        config = self.config.with_settings(trial.settings)
        config = replace(
            config,
            data=replace(self.data, test="withheld"),
            runtime=replace(config.runtime, device=trial.device),
        )
        data, train, validation = prepared(self.data, config.model)
        model, _ = job.fitted(config, data, train, None, trial.run)
        return right(model, validation) / len(validation)


def work_of(out: Path) -> Path:
    """Where the search of a run lies while it lasts."""
    return out.with_name(out.name + WORK)


def data_of(config: SearchConfig) -> DataConfig:
    """The public data: a kind by name, found where the job's own data is, or the [data] of a job
    file.
    """
    named = config.tune.public
    assert named is not None
    if named.endswith(".toml"):
        return DataConfig(**read_toml(Path(named)).get("data", {}))
    check.one_of("tune.public", named, KINDS)
    return DataConfig(
        kind=named,
        dir=config.job.data.dir if "dir" in FIELDS_OF_KIND[named] else None,
    )


def stand_in(plan: Plan, records: int) -> Plan:
    """The plan of a trial on so many public records that has the noise of a private plan on its
    average gradient.
    """
    recipe = plan.recipe
    if type(recipe.strategy).__name__ != "Identity" or recipe.draw != "unit":
        raise Unsupported(
            "a search on public data for correlated noise",
            "search on private data (route random), or use the mechanism dp-sgd",
        )
    share = min(1.0, records / recipe.expected_batch)
    made = dpsgd(records, recipe.expected_batch * share, steps=recipe.steps)
    made = replace(made, clip=recipe.clip)
    return made.with_noise(plan.noise_multiplier * share, delta=plan.delta, allow_large_delta=True)


def run(
    config: SearchConfig,
    out: Path,
    *,
    resume: bool = False,
    seed: int | None = None,
    engine: SearchEngine | None = None,
    progress: Show = lambda what, made: None,
) -> Tuned:
    """Search on public data, then train once on the private data with what was found, into the
    folder `out`.

    Guarantees: the private data is opened after its one run is reserved, and by that run alone.
    """
    if resume and job.is_finished(out):
        return finished(out)
    chosen = RandomSearch(config.space) if engine is None else engine
    data = data_of(config)
    if data == config.job.data:
        raise InvalidInput(
            "tune.public",
            config.tune.public,
            "is the private data itself: a search on it is not free (route random)",
        )
    work = work_of(out)
    rows, best = _searched(config, data, work, chosen, seed, progress)
    settings = listed(rows[best]["settings"])
    claim = _claim(config, settings, len(rows), chosen.name)
    progress("training on the private data", None)
    _trained(config, settings, claim, rows, best, out, resume, seed)
    erase_folder(work)
    return finished(out)


def _searched(
    config: SearchConfig,
    data: DataConfig,
    work: Path,
    engine: SearchEngine,
    seed: int | None,
    progress: Show,
) -> tuple[list[dict[str, Any]], int]:
    """Every trial, and which one is the best."""
    found = prepared(data, config.job.model)[0]
    if found.classes is None or found.features != prepared_shape(config, found):
        raise InvalidInput(
            "tune.public",
            config.tune.public,
            f"records have shape {found.features}: they must be as those of the job",
        )
    key = _seed(work, config, seed)
    search = Search(work, pool_of(config.tune.workers))
    for number, row in search.rows.items():
        engine.tell(number, row)
    objective, source = (
        PublicObjective(config, data),
        TrialRights(None, "public", Randomness.for_tests(key)),
    )
    devices = config.tune.devices or (config.job.runtime.device,)

    def tasks() -> Any:
        for number in range(int(config.tune.trials)):
            if number not in search.rows:
                settings = engine.ask(number, np.random.default_rng([key, number]))
                plan = stand_in(_plan(config, settings), len(found.train))
                device = devices[number % len(devices)]
                yield TrialTask(
                    search.place(number),
                    number,
                    settings,
                    plan.recipe,
                    (plan,),
                    None,
                    source,
                    objective,
                    device=device,
                )

    def told(task: TrialTask, row: Any) -> None:
        engine.tell(task.number, row)
        progress("searching on public data", len(search.rows))

    best = search.made(tasks(), told)
    assert best is not None
    order = sorted(search.rows)
    made = [{"settings": dict(search.rows[n].settings), "score": _finite(search.rows[n].score), "selected": n == best,
             "at": config.space.at(search.rows[n].settings)} for n in order]  # fmt: skip
    return made, order.index(best)


def prepared_shape(config: SearchConfig, found: Any) -> tuple[int, ...]:
    """The shape of the job's own records where it is known without opening them; else that of the
    public ones.
    """
    from dpfy.training.load import READS

    return READS.get(config.job.data.kind, (found.features, 0))[0]


def _finite(score: float) -> float | None:
    return score if np.isfinite(score) else None


def _seed(work: Path, config: SearchConfig, seed: int | None) -> int:
    """The public seed of the search in `work`, which is made if it is not there, for this very
    search.
    """
    asked = {"search": config.to_toml(publish=True)}
    file = work / ASKED
    if file.is_file():
        held = storage.parsed_json(ASKED, file.read_bytes())
        if {k: held.get(k) for k in asked} != asked:
            raise InvalidInput(
                "search",
                str(work),
                "holds another search that was not finished: resume that, or remove the folder",
            )
        return int(held["seed"])
    if work.exists() and any(work.iterdir()):
        raise InvalidInput(
            "search",
            str(work),
            "is not empty and holds no search: move it away, or choose another --out",
        )
    work.mkdir(parents=True, exist_ok=True)
    key = secrets.randbits(62) if seed is None else seed
    write_atomically(work / "config.toml", config.to_toml(publish=False).encode())
    write_atomically(file, json.dumps(asked | {"seed": key}).encode())
    return key


@functools.lru_cache(maxsize=256)
def _noise(recipe: Recipe, epsilon: float, delta: float, accountant: str) -> float:
    """The noise of a recipe: settings that cost alike are calibrated once."""
    return recipe.calibrate(epsilon, delta, accountant=accountant).noise_multiplier


def _plan(config: SearchConfig, settings: Settings) -> Plan:
    """The plan of the private run with these settings."""
    found = config.with_settings(settings)
    records, privacy = job.records_of(found), found.privacy
    recipe, delta = job.recipe_of(found, records), job.chosen_delta(found, records)
    noise = _noise(
        replace(recipe, clip=FlatClip(1.0)), job.asked(privacy), delta, privacy.accountant
    )
    return Plan(recipe, noise, delta, privacy.accountant)


def _claim(config: SearchConfig, settings: Settings, trials: int, engine: str) -> PublicTuning:
    plan = _plan(config, settings)
    recipe = plan.recipe
    about = {
        "unit": recipe.unit,
        "adjacency": recipe.adjacency,
        "delta": plan.delta,
        "records": recipe.records,
    }
    named = Path(config.tune.public or "").name
    return PublicTuning(
        config.space.words(),
        trials,
        named,
        engine,
        accountant=config.job.privacy.accountant,
        **about,  # type: ignore[arg-type]
    )


def _trained(
    config: SearchConfig,
    settings: Settings,
    claim: PublicTuning,
    rows: list[dict[str, Any]],
    best: int,
    out: Path,
    resume: bool,
    seed: int | None,
) -> None:
    """The one private run, in a folder that tells of the search too."""
    found = config.with_settings(settings)
    plan = job.plan_of(found)
    row = {
        "data": claim.data,
        "used_for": f"choosing settings, by {len(rows)} trials",
        "provenance": config.tune.provenance or claim.data,
    }
    run = replace(
        job.run_of(found, plan, out, resume, seed),
        public_data=(*found.public.rows(), row),
    )
    promised = replace(job.promised_of(found, plan), beside=(claim,))
    if runs.complete(run, plan, promised):
        return
    with runs.TrainingRun(run, plan, **vars(promised)) as folder:
        folder.write(TRIALS, "".join(json.dumps(each) + "\n" for each in rows).encode())
        folder.tell(claim.name, trials=rows, settings=dict(settings), score=rows[best]["score"])
        job.trained(found, folder, World.joined(), False)


def finished(out: Path) -> Tuned:
    """The result of a search on public data that is finished."""
    made = storage.parsed_json(card.NAME, storage.content(card.NAME, out / card.NAME))
    part = card.section(made, PublicTuning.kind)
    if not part:
        raise InvalidInput("run", str(out), "holds no search")
    return Tuned(out, dict(part["settings"]))
