"""A whole training job from its configuration: plan, reservation, data, model, training, in this
order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from dpfy import accounting
from dpfy.accounting.filters import RenyiFilter
from dpfy.accounting.user_level import of_group
from dpfy.core import check, events, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency
from dpfy.data import count, source
from dpfy.data.config import FIELDS_OF_KIND, USER, DataConfig
from dpfy.data.count import held_out
from dpfy.data.records import Records
from dpfy.data.split import stated, uncounted
from dpfy.models import build, features
from dpfy.models.config import LANGUAGE, ModelConfig
from dpfy.plan.auto import CalibrationTarget, RunSetting, recipe_for
from dpfy.plan.recipe import RECORD, UNIT, Plan, Recipe, dpsgd, with_stopping
from dpfy.report import figures, words
from dpfy.report.card import NAME as CARD
from dpfy.runs.dataset import delta_of, ledger_delta
from dpfy.runs.mark import CANARIES, HIDDEN, Mark, refuse_planted
from dpfy.runs.run import Run
from dpfy.tables.schema import training_schema
from dpfy.training import evaluation
from dpfy.training.config import (
    MOST_GROUP,
    JobConfig,
    PrivacyConfig,
    TrainingConfig,
    read_toml,
)
from dpfy.training.fit import BEFORE, Result, fit
from dpfy.training.losses import OF_CLASSES
from dpfy.training.metrics import Plateau
from dpfy.training.paperwork import LedgerConfig
from dpfy.training.parallel.read_only_run import ReadOnlyRun, opened
from dpfy.training.parallel.world import World, restarted
from dpfy.training.ready import UNKNOWN
from dpfy.training.run import TRAINING, TrainingClaims, TrainingRun, ended, finish_erasure
from dpfy.training.step import Ftrl, Update

C = TypeVar("C", bound=JobConfig)
WRITERS = 539
"""Who wrote MNIST's training images."""
RECORDS = {
    "embedded": 4_000,
    "mnist": 60_000,
    "fashion-mnist": 60_000,
    "cifar10": 50_000,
    "cifar100": 50_000,
}
WHOLE = {"digits": 1_797, "adult": 30_162, "shakespeare": 8_646}
"""Records of data sets whose size is public knowledge: those to train on, and all of them where a
share is held out.
"""
TEXT = ("text", "shakespeare")
"""Sequences of symbols, which language models read."""
DEFAULT_EPSILON = 3.0
DEFAULT_STEPS = 120


@dataclass(frozen=True)
class Outcome:
    """What a job leaves: the run folder and its report, and the time this call took."""

    run: Path
    card: dict[str, Any]
    seconds: float
    engine: str

    def group(self) -> dict[str, Any] | None:
        """The guarantee for groups of units, if the configuration asked for one: computed from the
        run's own ledger.
        """
        if not (self.run / "config.toml").is_file():
            return None
        asked = read_toml(self.run / "config.toml").get("privacy", {}).get("group_size", 1)
        size = check.integer("privacy.group_size", asked, most=MOST_GROUP)
        if size == 1:
            return None
        ledger, stated = Ledger.read(self.run / "ledger.jsonl"), self.card["guarantee"]
        event = of_group(ledger.event(), size)
        epsilon = accounting.epsilon(
            event, stated["delta"], adjacency=ledger.adjacency, accountant=stated["accountant"]
        )
        return {"size": size, "epsilon": epsilon, "delta": stated["delta"]}


def plan_of(config: JobConfig) -> Plan:
    """The plan of a job, made without a look at its data."""
    privacy, records = config.privacy, records_of(config)
    recipe, delta = recipe_of(config, records), chosen_delta(config, records)
    if privacy.noise_multiplier is not None:
        plan = recipe.with_noise(
            privacy.noise_multiplier,
            delta=delta,
            accountant=privacy.accountant,
            allow_large_delta=privacy.allow_large_delta,
        )
        _require_group(plan, privacy.group_size)
        return plan
    noise = evaluation_noise(config)
    beside = events.Nothing() if noise is None else events.Gaussian(noise)
    return recipe.calibrate(
        asked(privacy),
        delta,
        accountant=privacy.accountant,
        allow_large_delta=privacy.allow_large_delta,
        beside=beside,
        group=privacy.group_size,
    )


def recipe_of(config: JobConfig, records: int) -> Recipe:
    """What a job does to so many records, before its noise is known."""
    if (config.data.kind in TEXT) != (config.model.name in LANGUAGE):
        of_text = f"must be one of {', '.join(LANGUAGE)} for text, and only for text"
        raise InvalidInput("model.name", config.model.name, of_text)
    if config.data.kind in TEXT and config.data.test_use == evaluation.BILLED:
        rule = "must be public or withheld for text: its figures are not released with noise"
        raise InvalidInput("data.test", config.data.test, rule)
    privacy, training = config.privacy, config.training
    batch = float(records) if training.batch_size is None else training.batch_size
    steps = DEFAULT_STEPS if training.steps is None and training.epochs is None else training.steps
    plain = dpsgd(
        records,
        batch,
        epochs=training.epochs,
        steps=steps,
        sampling=training.sampling,
        adjacency=privacy.adjacency,
    )
    target = CalibrationTarget(
        asked(privacy),
        chosen_delta(config, records),
        privacy.accountant,
        privacy.allow_large_delta,
    )
    setting = RunSetting(
        records, batch, plain.steps, adjacency=privacy.adjacency, sampling=training.sampling
    )
    fixed = privacy.noise_multiplier is not None
    recipe = recipe_for(training.mechanism, setting, None if fixed else target, training.bands)
    strategy = training.schedule(recipe.steps) or recipe.strategy
    recipe = replace(
        recipe,
        strategy=strategy,
        clip=training.clip_rule(),
        unit=config.data.unit,
        noise=training.noise,
        draw=RECORD if config.data.draw == RECORD else UNIT,
    )
    return with_stopping(recipe, training.stopping)


def records_of(config: JobConfig) -> int:
    """The public number of training records of a job. The file is opened for it only where the
    count was declared public.
    """
    records = config.privacy.records
    if isinstance(records, str):
        return count.records(config.data)
    if records is None:
        records = public_records(config.data)
    if records is None:
        raise InvalidInput(
            "privacy.records",
            None,
            f"must be given for data of kind {config.data.kind!r}: {UNKNOWN}",
        )
    return records


def _require_group(plan: Plan, size: int) -> None:
    """Refuse, before anything is reserved, a group whose guarantee could not be told after the
    run.
    """
    if size > 1:
        plan.recipe.check_group(size)
        accounting.curve(
            of_group(plan.event, size), adjacency=plan.recipe.adjacency, accountant=plan.accountant
        )


def public_records(data: DataConfig) -> int | None:
    """The number of training records, where it is public knowledge."""
    if data.user is not None and data.kind == "mnist":
        return WRITERS if data.draw == USER else None
    if data.kind in RECORDS:
        return RECORDS[data.kind]
    whole = WHOLE.get(data.kind) if data.length == DataConfig.length else None
    return None if whole is None else whole - held_out(whole, data.test_fraction)


def evaluation_noise(config: JobConfig, plan: Plan | None = None) -> float | None:
    """The noise multiplier of a charged evaluation; None where none is charged. A plan of fixed noise
    says what a tenth of it is.
    """
    privacy = config.privacy
    if config.data.test_use != evaluation.BILLED:
        return None
    if privacy.test_noise is not None:
        return privacy.test_noise
    epsilon = (
        plan.epsilon
        if plan is not None and privacy.noise_multiplier is not None
        else asked(privacy)
    )
    return privacy.group_size * evaluation.default_noise(
        epsilon, chosen_delta(config, records_of(config)), Adjacency.parse(privacy.adjacency)
    )


def chosen_delta(config: JobConfig, records: int) -> float:
    """The delta of a job on so many records, by the rule of all commands."""
    return delta_of(config.privacy.delta, records, ledger_delta(config.ledger.path)).value


def with_delta(config: C) -> C:
    """The job with the delta that it has, also where none is given."""
    found = chosen_delta(config, records_of(config))
    return replace(config, privacy=replace(config.privacy, delta=found))


def asked(privacy: PrivacyConfig) -> float:
    """The epsilon to reach."""
    return DEFAULT_EPSILON if privacy.epsilon is None else privacy.epsilon


def run(
    config: JobConfig,
    out: Path,
    *,
    resume: bool = False,
    seed: int | None = None,
    progress: bool = False,
) -> Outcome:
    """Run a job into the folder `out`, or resume it there.

    Guarantees: the plan is reserved before any data is read; if the data or the model is refused,
    the reservation is given back and nothing is left behind.
    """
    if (resume or restarted()) and is_finished(out):
        return finished(out)
    refuse_canaries(out)
    config = with_delta(config)
    plan, world = plan_of(config), World.joined()
    return world.notify_on_error(
        lambda: trained(
            config,
            opened(world, run_of(config, plan, out, resume, seed), plan, promised_of(config, plan)),
            world,
            progress,
        )
    )


def trained(
    config: JobConfig, folder: TrainingRun | ReadOnlyRun, world: World, progress: bool
) -> Outcome:
    """Train in an opened folder."""
    plan = folder.plan
    with folder:
        data = load(config, plan.recipe.records)
        if config.data.schema is not None and isinstance(folder, TrainingRun):
            folder.write("schema.toml", schema_of(config))
        train, test = extracted(config.model, data.train), extracted(config.model, data.test)
        owned = data.owned
        _, result = fitted(
            config,
            data,
            train if owned is None else replace(owned, records=train),
            None if config.data.test_use == evaluation.WITHHELD else test,
            folder,
            progress=progress,
            world=world,
        )
    return Outcome(folder.path, _card(folder.path), result.seconds, result.engine)


def fitted(
    config: JobConfig,
    data: source.DataSource,
    train: object,
    test: Records | None,
    run: TrainingRun | ReadOnlyRun,
    *,
    progress: bool = False,
    world: World | None = None,
) -> tuple[nn.Module, Result]:
    """Train the model of a job on records that are loaded and extracted, by the plan of an opened
    folder.
    """
    assert data.classes is not None
    model = build.build(config.model, data.features, data.classes)
    run.tell(TRAINING, model=reads(data))
    result = fit(
        model,
        train,
        plan=run.plan,
        optimizer=optimizer_of(config.training, model),
        loss="tokens" if config.data.kind in TEXT else OF_CLASSES[config.training.loss],
        run=run,
        evaluation=_evaluation(config, data, test),
        runtime=config.runtime.runtime(progress),
        update=Update(config.training.average),
        stop=None
        if config.training.patience is None
        else Plateau(patience=config.training.patience),
        world=world,
    )
    return model, result


def _evaluation(
    config: JobConfig, data: source.DataSource, test: Records | None
) -> evaluation.TestData:
    """The test data of a job, as its configuration declares it; the noise of a private one was
    reserved with the folder.
    """
    if config.data.test_use == evaluation.PUBLIC:
        return evaluation.PublicTest(test)
    if config.data.test_use == evaluation.BILLED:
        return evaluation.PrivateTest(
            test if data.held is None else replace(data.held, records=test)
        )
    return evaluation.WithheldTest(test)


def schema_of(config: JobConfig) -> bytes:
    """The public schema of a job's table, as a run keeps it."""
    assert config.data.schema is not None
    return training_schema(config.data.schema).to_toml().encode()


def load(config: JobConfig, expected: int) -> source.DataSource:
    """The data of a job that trains a classifier on about `expected` records.

    Guarantees: where units come and go (add-or-remove-one), how many there are is told to nobody,
    and a number that is far off raises no error. Where their number is public, it must be the one
    that was given.
    """
    added = Adjacency.parse(config.privacy.adjacency) is Adjacency.ADD_OR_REMOVE_ONE
    owned = config.data.user is not None
    hidden = (added or config.data.shared) and (owned or public_records(config.data) is None)
    data = source.load(config.data, every_row=not added)
    if data.classes is None:
        raise InvalidInput(
            "data.kind", config.data.kind, "has no classes; this job trains classifiers"
        )
    if hidden and data.owned is None:
        return replace(data, train=uncounted(data.train, expected))
    if hidden and data.owned is not None:
        return replace(data, owned=uncounted(data.owned, expected))
    found = data.units
    if abs(found - expected) > max(1, expected // 100):
        raise InvalidInput("privacy.records", expected, _what_to_train_on(config, data, found))
    return data


def _what_to_train_on(config: JobConfig, data: source.DataSource, found: int) -> str:
    """The public number of units, for who gave another one."""
    if config.data.user is not None:
        what = f"{config.data.unit.name}s" if config.data.draw == USER else "records of users"
        return f"there are {found} {what} to train on; give --records {found}"
    split = config.data.test_path is None and "test_fraction" in FIELDS_OF_KIND[config.data.kind]
    apart = stated(data.test)
    held = (
        f" ({found + apart} less the {apart} held out by data.test_fraction = "
        f"{config.data.test_fraction:g})"
        if split
        else ""
    )
    return f"there are {found} records to train on{held}; give --records {found}"


def is_finished(out: Path) -> bool:
    """Whether `out` holds a run that ended, if need be with something left to do after a crash."""
    return ended(out)


def can_resume(out: Path) -> bool:
    """Whether `out` holds a run that was started and stored its configuration."""
    return Mark.find(out) is not None and (out / HIDDEN / "config.toml").is_file()


def finished(out: Path) -> Outcome:
    """The finished run in `out`. What a crash between the report and the end of the erasure has left
    is erased.
    """
    finish_erasure(out)
    return Outcome(out, _card(out), 0.0, BEFORE)


def stored_config(out: Path) -> dict[str, dict[str, Any]]:
    """The full configuration of the unfinished run in `out`, kept with its secrets.

    Guarantees: there is no default: a folder without a run, and a run that was stopped before it
    stored its configuration, are refused.
    """
    kept = require_config(out)
    refuse_canaries(out)
    try:
        return read_toml(kept)
    except InvalidInput:
        raise InvalidInput(
            "run", str(out), "its stored configuration is damaged; give the configuration again"
        ) from None


def refuse_canaries(out: Path) -> None:
    """Refuse a run that an audit began."""
    if (out / CANARIES).is_file():
        rule = "was started with canaries; resume it with dpfy audit train --resume"
        raise InvalidInput("run", str(out), rule)


def require_config(out: Path) -> Path:
    """Where the unfinished run in `out` keeps its full configuration.

    Raises:
        InvalidInput: There is no run, or it was stopped before it stored one.
    """
    require_run(out)
    refuse_planted(out)
    if not can_resume(out):
        rule = (
            "was stopped before its configuration was stored, and nothing was spent: start it "
            "again without --resume"
        )
        raise InvalidInput("run", str(out), rule)
    return out / HIDDEN / "config.toml"


def require_run(out: Path) -> None:
    """Refuse a folder that holds no run that was started here."""
    if Mark.find(out) is None:
        raise InvalidInput(
            "--resume", str(out), "holds no run to resume; leave --resume out to start one"
        )


def optimizer_of(training: TrainingConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer a configuration names."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=training.learning_rate, momentum=training.momentum)
    if training.optimizer == "ftrl":
        return Ftrl(parameters, lr=training.learning_rate, momentum=training.momentum)
    chosen = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[training.optimizer]
    return chosen(parameters, lr=training.learning_rate)


def budget_of(ledger: LedgerConfig, delta: float) -> RenyiFilter | None:
    """The budget a configuration sets for its data set; `delta` is that of the run, taken unless
    another is given.
    """
    if ledger.budget_epsilon is None:
        return None
    chosen = delta if ledger.budget_delta is None else ledger.budget_delta
    path = None if ledger.path is None else Path(ledger.path)
    return figures.new_budget(path, ledger.budget_epsilon, chosen, ledger.budget_approximation)


def reads(data: source.DataSource) -> dict[str, Any]:
    """What a model reads and says, for those who predict with it."""
    return {"reads": {"features": list(data.features), "classes": data.classes}}


def run_of(config: JobConfig, plan: Plan, out: Path, resume: bool, seed: int | None) -> Run:
    """Where the run of a job lives and what it may spend."""
    texts = (config.to_toml(publish=True), config.to_toml(publish=False))
    return Run(
        out,
        resume=resume,
        ledger=config.ledger.path,
        budget=budget_of(config.ledger, plan.delta),
        seed=seed,
        checkpoint_every=config.runtime.checkpoint_every,
        config=texts,
        public_data=config.public.rows(),
        about=config.about.rows(config.data, config.model),
    )


def promised_of(config: JobConfig, plan: Plan) -> TrainingClaims:
    """What a job promises beside its plan."""
    return TrainingClaims(evaluation=evaluation_noise(config, plan))


def extracted(model: ModelConfig, records: Records) -> Records:
    """The records as the trainable part of a model reads them."""
    return _extracted(records, features.features(model))


def _extracted(records: Records, extract: Any) -> Records:
    if extract is None:
        return records
    held = records.tensors[0]
    made = extract(records.flat[0])
    return replace(
        records,
        tensors=(
            made.unflatten(0, held.shape[:2]) if records.rows_each > 1 else made,
            *records.tensors[1:],
        ),
    )


def _card(out: Path) -> dict[str, Any]:
    card = storage.parsed_json(CARD, storage.content("run", out / CARD))
    if not isinstance(card, dict) or not {"guarantee", "statement", "format"} <= set(card):
        raise Corrupt(CARD, "is not a privacy report")
    return words.raised(card)
