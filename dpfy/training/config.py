"""The configuration of a training job: TOML sections that are frozen dataclasses. An unknown or misspelt key is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.core import check, reading
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency
from dpfy.data.config import DataConfig
from dpfy.models.config import ModelConfig
from dpfy.plan.auto import MECHANISMS
from dpfy.training.runtime import Runtime

PATHS = {("data", "dir"), ("data", "path"), ("data", "labels_path"), ("data", "test_path"), ("data", "test_labels_path"),
         ("data", "schema"), ("ledger", "path")}  # fmt: skip
LEAST, MOST = 1e-12, 1e9
"""Learning rates and clip norms beyond these make weights that are no numbers, or none that move."""
OPTIMIZERS = ("sgd", "adam", "adamw", "ftrl")


@dataclass(frozen=True)
class PrivacyConfig:
    """[privacy]: the guarantee asked for. Give `epsilon`, or `noise_multiplier` to fix the noise instead (0 trains without privacy).

    `records` is the public number of training records; it must be given for data whose size is not public knowledge already.
    `test_noise` is the noise of a billed evaluation (data.test), times what one record adds; without it, it takes about a tenth.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    noise_multiplier: float | None = None
    records: int | None = None
    adjacency: str = Adjacency.ADD_OR_REMOVE_ONE.value
    accountant: str = accounting.DEFAULT
    allow_large_delta: bool = False
    test_noise: float | None = None

    def __post_init__(self) -> None:
        if self.test_noise is not None:
            check.noise_multiplier("privacy.test_noise", check.positive("privacy.test_noise", self.test_noise))
        if self.epsilon is not None:
            check.epsilon("privacy.epsilon", self.epsilon)
        if self.noise_multiplier is not None:
            check.noise_multiplier("privacy.noise_multiplier", self.noise_multiplier)
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise InvalidInput("privacy.noise_multiplier", self.noise_multiplier, "give epsilon or noise_multiplier, not both")
        check.delta("privacy.delta", self.delta)
        if self.records is not None:
            check.integer("privacy.records", self.records, most=check.RECORDS)
        Adjacency.parse(self.adjacency)
        accounting.accountant(self.accountant)
        _flag("privacy.allow_large_delta", self.allow_large_delta)


@dataclass(frozen=True)
class TrainingConfig:
    """[training]: mechanism, batches, clipping and the update. `batch_size` is the mean of a batch; give `epochs` or `steps`.

    `bands` fixes the bands of band-mf (cyclic Poisson sampling); without it they are chosen by the least error. `noise_phases` cuts
    a dp-sgd run into phases of equal length with noise in these proportions, as in [2.0, 1.5, 1.0]; all of it is billed together.
    """

    mechanism: str = "dp-sgd"
    bands: int | None = None
    noise_phases: tuple[float, ...] | None = None
    batch_size: float | None = None
    epochs: float | None = None
    steps: int | None = None
    clip_norm: float = 1.0
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    momentum: float = 0.9
    average: float = 0.9
    loss: str = "cross_entropy"

    def __post_init__(self) -> None:
        check.one_of("training.mechanism", self.mechanism, MECHANISMS)
        if self.bands is not None:
            check.integer("training.bands", self.bands)
            if self.mechanism != "band-mf":
                raise InvalidInput("training.bands", self.bands, "goes with the mechanism band-mf")
        if self.noise_phases is not None:
            self._check_phases(self.noise_phases)
        check.one_of("training.optimizer", self.optimizer, OPTIMIZERS)
        check.one_of("training.loss", self.loss, ("cross_entropy", "squared_error"))
        if self.batch_size is not None:
            check.positive("training.batch_size", self.batch_size)
        if self.epochs is not None:
            check.positive("training.epochs", self.epochs)
        if self.steps is not None:
            check.integer("training.steps", self.steps, most=check.STEPS)
        if self.epochs is not None and self.steps is not None:
            raise InvalidInput("training.steps", self.steps, "give epochs or steps, not both")
        if MOST < check.positive_or_infinite("training.clip_norm", self.clip_norm) < math.inf:
            raise InvalidInput("training.clip_norm", self.clip_norm, f"must be at most {MOST:g}, or infinite to clip nothing")
        if not LEAST <= check.positive("training.learning_rate", self.learning_rate) <= MOST:
            rule = f"must lie between {LEAST:g} and {MOST:g}: weights are float32"
            raise InvalidInput("training.learning_rate", self.learning_rate, rule)
        check.fraction("training.momentum", self.momentum)
        check.fraction("training.average", self.average)

    def _check_phases(self, phases: tuple[float, ...]) -> None:
        if self.mechanism != "dp-sgd":
            raise InvalidInput("training.noise_phases", phases, "goes with the mechanism dp-sgd")
        if not isinstance(phases, tuple) or not phases:
            raise InvalidInput("training.noise_phases", phases, "must be a list of numbers, at least one")
        for value in phases:
            check.positive("training.noise_phases", value)


@dataclass(frozen=True)
class RuntimeConfig:
    """[runtime]: speed and safety knobs; none changes the guarantee."""

    engine: str = "auto"
    max_physical_batch: int | str = 4096
    pad: bool = False
    graph: bool = False
    device: str = "cpu"
    checkpoint_every: float = 30.0

    def __post_init__(self) -> None:
        _flag("runtime.pad", self.pad)
        _flag("runtime.graph", self.graph)
        check.nonnegative("runtime.checkpoint_every", self.checkpoint_every)
        self.runtime(False)

    def runtime(self, progress: bool) -> Runtime:
        """As the training loop takes it."""
        return Runtime(self.engine, self.max_physical_batch, self.pad, self.device, progress, self.graph)


@dataclass(frozen=True)
class LedgerConfig:
    """[ledger]: the ledger of the data set across runs, and its budget (both needed at the first use, the budget optional later)."""

    path: str | None = None
    budget_epsilon: float | None = None
    budget_delta: float | None = None

    def __post_init__(self) -> None:
        if self.budget_epsilon is not None:
            check.epsilon("ledger.budget_epsilon", self.budget_epsilon)
            if self.path is None:
                raise InvalidInput("ledger.budget_epsilon", self.budget_epsilon, "needs ledger.path (--ledger) to be kept in")
        if self.budget_delta is not None:
            check.delta("ledger.budget_delta", self.budget_delta)
            if self.budget_epsilon is None:
                raise InvalidInput("ledger.budget_delta", self.budget_delta, "goes with ledger.budget_epsilon")


@dataclass(frozen=True)
class JobConfig:
    """Everything `dpfy train` does, as data."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)

    def __post_init__(self) -> None:
        if self.privacy.test_noise is not None and self.data.test_use != "billed":
            raise InvalidInput("privacy.test_noise", self.privacy.test_noise, 'goes with data.test = "billed" (--test billed)')

    def to_toml(self, *, publish: bool) -> str:
        """The configuration as TOML. With `publish`, paths are cut to their last part: a run folder holds no absolute path."""
        lines = ["# Paths are shortened to their last part."] if publish else []
        for section in fields(self):
            values = getattr(self, section.name)
            lines.append(f"[{section.name}]")
            for item in fields(values):
                value = getattr(values, item.name)
                if publish and value is not None and (section.name, item.name) in PATHS:
                    value = Path(value).name
                if value is not None:
                    lines.append(f"{item.name} = {_toml(value)}")
            lines.append("")
        return "\n".join(lines)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "privacy": PrivacyConfig,
    "training": TrainingConfig,
    "runtime": RuntimeConfig,
    "ledger": LedgerConfig,
}


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, keys checked, values not yet."""
    raw = reading.toml("config", path)
    check.known_keys("", raw, SECTIONS)
    for name, section in raw.items():
        if not isinstance(section, dict):
            raise InvalidInput(name, section, f"must be a section: [{name}]")
        check.known_keys(name, section, {f.name for f in fields(SECTIONS[name])})
    return raw


def make(raw: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Any]) -> JobConfig:
    """A configuration from a file's sections and the command line's flags (``section.key``), which win."""
    merged: dict[str, dict[str, Any]] = {name: dict(raw.get(name, {})) for name in SECTIONS}
    for key, value in flags.items():
        section, _, name = key.partition(".")
        if value is not None:
            for other in EXCLUSIVE.get(key, ()):
                if flags.get(f"{section}.{other}") is None:
                    merged[section].pop(other, None)
            merged[section][name] = value
    return JobConfig(**{name: SECTIONS[name](**_listed(values)) for name, values in merged.items()})


EXCLUSIVE = {
    "privacy.epsilon": ("noise_multiplier",),
    "privacy.noise_multiplier": ("epsilon",),
    "training.epochs": ("steps",),
    "training.steps": ("epochs",),
}
"""A flag replaces its alternative in the file."""


def _listed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(name, value, "must be true or false")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)
