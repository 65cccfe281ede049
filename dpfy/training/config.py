"""The configuration of a training job: TOML sections that are frozen dataclasses. An unknown or
misspelt key is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.accounting.user_level import MOST_GROUP
from dpfy.core import check, errors, settings
from dpfy.core.errors import InvalidInput
from dpfy.core.settings import setting
from dpfy.core.unit import Adjacency
from dpfy.data.config import DataConfig, name_kind
from dpfy.data.count import PUBLIC
from dpfy.gradients.clip import CLIPS, LEAST_NORM, Clip
from dpfy.models.config import LANGUAGE, ModelConfig
from dpfy.noise.schedule import Schedule, equal_phases, given_phases
from dpfy.plan.auto import MECHANISMS
from dpfy.plan.recipe import FLOAT, NOISES, SAMPLINGS
from dpfy.plan.stopping import MOST_POINTS
from dpfy.tables.schema import OPEN
from dpfy.training.paperwork import PAPERWORK, Paperwork
from dpfy.training.runtime import Runtime

LEAST, MOST = 1e-12, 1e9
"""Learning rates and clip norms beyond these make weights that are no numbers, or none that
move.
"""
OPTIMIZERS = ("sgd", "adam", "adamw", "ftrl")
LOSSES = ("cross_entropy", "squared_error")
FIELDS_OF_CLIP: dict[str, dict[str, str]] = {
    "flat": {"clip_norm": "norm"},
    "per-layer": {"clip_norm": "norm"},
    "per-group": {"clip_prefixes": "prefixes", "clip_norms": "norms"},
    "automatic": {"clip_norm": "norm", "clip_gamma": "gamma"},
    "psac": {"clip_norm": "norm", "clip_gamma": "gamma"},
    "quantile": {
        "clip_norm": "norm",
        "clip_quantile": "quantile",
        "clip_rate": "learning_rate",
        "clip_count_weight": "count_weight",
    },
}
"""Which fields each clip rule reads, and what the rule calls them. A field set for a rule that
ignores it is an error.
"""


@dataclass(frozen=True)
class PrivacyConfig:
    """[privacy]: the guarantee asked for. Give `epsilon`, or `noise_multiplier` to fix the noise
    instead (0 trains without privacy).
    """

    epsilon: float | None = setting(
        None, "Epsilon to reach.", "3, unless noise_multiplier is given"
    )
    delta: float | None = setting(
        None,
        "Delta; must be below 1/records.",
        "the largest power of ten at most 1/records^1.1, at most 1e-5, or that of the budget",
    )
    noise_multiplier: float | None = setting(
        None,
        "Noise in units of the clip norm, instead of epsilon; 0 trains without privacy.",
        "the least that reaches epsilon",
    )
    records: int | str | None = setting(
        None,
        "Public number of units (records, or users) to train on, those held out left out; needed "
        "for data of your own. "
        '"public" counts the records of a table, where their exact number is public (not with '
        "add-or-remove-one).",
        "that of a public data set",
    )
    adjacency: str = setting(
        Adjacency.ADD_OR_REMOVE_ONE.value,
        f"Which change is hidden: {', '.join(a.value for a in Adjacency)}.",
    )
    accountant: str = setting(
        accounting.DEFAULT, f"How epsilon is computed: {', '.join(accounting.TABLE)}."
    )
    allow_large_delta: bool = setting(
        False, "Accept delta >= 1/records, at which a random record may be published in full."
    )
    test_noise: float | None = setting(
        None,
        'Noise of a charged evaluation (data.test = "billed"), times what one record adds.',
        "as much as takes about a tenth of the guarantee",
    )
    group_size: int = setting(
        1, "Epsilon and delta hold for any group of this many units together (of a family, say)."
    )

    def __post_init__(self) -> None:
        if self.test_noise is not None:
            check.noise_multiplier(
                "privacy.test_noise", check.positive("privacy.test_noise", self.test_noise)
            )
        if self.epsilon is not None:
            check.epsilon("privacy.epsilon", self.epsilon)
        if self.noise_multiplier is not None:
            check.noise_multiplier("privacy.noise_multiplier", self.noise_multiplier)
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise InvalidInput(
                "privacy.noise_multiplier",
                self.noise_multiplier,
                "give epsilon or noise_multiplier, not both",
            )
        if self.delta is not None:
            check.delta("privacy.delta", self.delta)
        check.one_of("privacy.adjacency", self.adjacency, [a.value for a in Adjacency])
        self._check_records()
        check.one_of("privacy.accountant", self.accountant, accounting.TABLE)
        _flag("privacy.allow_large_delta", self.allow_large_delta)
        check.integer("privacy.group_size", self.group_size, most=MOST_GROUP)

    def _check_records(self) -> None:
        if self.records == PUBLIC and self.adjacency == Adjacency.ADD_OR_REMOVE_ONE.value:
            rule = (
                "with add-or-remove-one the exact number is protected: give a public number near "
                "it, or privacy.adjacency=replace-one"
            )
            raise InvalidInput("privacy.records", self.records, rule)
        if self.records == OPEN:
            rule = (
                "is open: the public number of records to train on, those held out "
                "(data.test_fraction) left out"
            )
            raise InvalidInput("privacy.records", self.records, rule)
        if self.records is not None and self.records != PUBLIC:
            check.integer("privacy.records", self.records, most=check.RECORDS)


@dataclass(frozen=True)
class TrainingConfig:
    """[training]: mechanism, batches, clipping and the update."""

    mechanism: str = setting("dp-sgd", f"Noise and sampling: {', '.join(MECHANISMS)}.")
    sampling: str = setting(
        "poisson",
        "How dp-sgd draws its batches: poisson, without-replacement (with replace-one), "
        "random-allocation.",
    )
    bands: int | None = setting(
        None, "Bands of band-mf, with cyclic Poisson sampling.", "those with the least error"
    )
    noise_phases: tuple[float, ...] | None = setting(
        None,
        "Noise of the phases of a dp-sgd run, relative to each other, as in [2.0, 1.5, 1.0]; all "
        "is charged.",
        "constant noise",
    )
    phase_steps: tuple[int, ...] | None = setting(
        None, "Steps of each of the noise_phases.", "phases of equal length"
    )
    stopping: int | None = setting(
        None,
        "Points, equally spaced, at which the run may end early, charged for what it released.",
        "none",
    )
    patience: int | None = setting(
        None,
        "End the run when the loss on public test data did not improve at so many of these points.",
        "never",
    )
    noise: str = setting(
        FLOAT,
        "How noise is added: float, or exact (every released value is where real numbers would put "
        "it).",
    )
    batch_size: float | None = setting(None, "Mean size of a batch.", "all units")
    epochs: float | None = setting(None, "Expected passes over the data; or give steps.")
    steps: int | None = setting(None, "Noisy steps; or give epochs.", "120")
    clip: str = setting(
        "flat", f"How the gradient of one unit is bounded: {', '.join(FIELDS_OF_CLIP)}."
    )
    clip_norm: float = setting(
        1.0, "Largest gradient norm of one unit; inf clips nothing and needs noise 0."
    )
    clip_gamma: float = setting(0.01, "What keeps tiny gradients tiny (automatic, psac).")
    clip_quantile: float = setting(
        0.5, "Share of units whose gradients pass unclipped (quantile); found privately."
    )
    clip_rate: float = setting(0.2, "How fast the norm follows the quantile.")
    clip_count_weight: float = setting(
        0.2, "Length of the count of unclipped units, in clip norms (quantile)."
    )
    clip_prefixes: tuple[str, ...] | None = setting(
        None, 'Groups of parameters by prefixes of their names (per-group); "" is the rest.'
    )
    clip_norms: tuple[float, ...] | None = setting(None, "The clip norm of each group (per-group).")
    optimizer: str = setting("sgd", f"What moves the weights: {', '.join(OPTIMIZERS)}.")
    learning_rate: float = setting(0.5, "Learning rate.")
    momentum: float = setting(0.9, "Momentum of sgd and ftrl.")
    average: float = setting(
        0.9, "Decay of the average of the weights, which is released; 0 for none."
    )
    loss: str = setting("cross_entropy", f"Loss of one record: {', '.join(LOSSES)}.")

    def __post_init__(self) -> None:
        check.one_of("training.mechanism", self.mechanism, MECHANISMS)
        if (
            check.one_of("training.sampling", self.sampling, SAMPLINGS) != "poisson"
            and self.mechanism != "dp-sgd"
        ):
            raise InvalidInput("training.sampling", self.sampling, "goes with the mechanism dp-sgd")
        check.one_of("training.noise", self.noise, NOISES)
        if self.bands is not None:
            check.integer("training.bands", self.bands)
            if self.mechanism != "band-mf":
                raise InvalidInput("training.bands", self.bands, "goes with the mechanism band-mf")
        self._check_phases()
        self._check_clip()
        if self.stopping is not None:
            check.integer("training.stopping", self.stopping, most=MOST_POINTS)
        if self.patience is not None:
            check.integer("training.patience", self.patience)
        if self.patience is not None and self.stopping is None:
            raise InvalidInput(
                "training.patience",
                self.patience,
                "goes with training.stopping, the points at which a run may end",
            )
        check.one_of("training.optimizer", self.optimizer, OPTIMIZERS)
        check.one_of("training.loss", self.loss, LOSSES)
        if self.batch_size is not None:
            check.positive("training.batch_size", self.batch_size)
        if self.epochs is not None:
            check.positive("training.epochs", self.epochs)
        if self.steps is not None:
            check.integer("training.steps", self.steps, most=check.STEPS)
        if self.epochs is not None and self.steps is not None:
            raise InvalidInput("training.steps", self.steps, "give epochs or steps, not both")
        if not LEAST <= check.positive("training.learning_rate", self.learning_rate) <= MOST:
            rule = f"must lie between {LEAST:g} and {MOST:g}: weights are float32"
            raise InvalidInput("training.learning_rate", self.learning_rate, rule)
        check.fraction("training.momentum", self.momentum)
        check.fraction("training.average", self.average)

    def clip_rule(self) -> Clip:
        """The clip rule."""
        arguments = {
            theirs: getattr(self, ours) for ours, theirs in FIELDS_OF_CLIP[self.clip].items()
        }
        try:
            rule: Clip = CLIPS[self.clip](**arguments)
        except InvalidInput as problem:
            raise InvalidInput(f"training.{problem.field}", problem.value, problem.rule) from None
        return rule

    def schedule(self, steps: int) -> Schedule | None:
        """The noise schedule of a run of `steps`; None where the noise is constant."""
        if self.noise_phases is None:
            return None
        if self.phase_steps is None:
            return equal_phases(steps, self.noise_phases)
        if sum(self.phase_steps) != steps:
            raise InvalidInput(
                "training.phase_steps",
                self.phase_steps,
                f"must add up to the steps of the run ({steps})",
            )
        return given_phases(self.phase_steps, self.noise_phases)

    def _check_phases(self) -> None:
        if self.noise_phases is not None:
            if self.mechanism != "dp-sgd":
                raise InvalidInput(
                    "training.noise_phases", self.noise_phases, "goes with the mechanism dp-sgd"
                )
            object.__setattr__(
                self,
                "noise_phases",
                _numbers("training.noise_phases", self.noise_phases, check.positive),
            )
        if self.phase_steps is not None:
            if not isinstance(self.phase_steps, tuple | list) or len(self.phase_steps) != len(
                self.noise_phases or ()
            ):
                raise InvalidInput(
                    "training.phase_steps",
                    self.phase_steps,
                    "must be a list with one number for each of noise_phases",
                )
            lengths = tuple(
                check.integer("training.phase_steps", n, most=check.STEPS) for n in self.phase_steps
            )
            object.__setattr__(self, "phase_steps", lengths)

    def _check_clip(self) -> None:
        read = FIELDS_OF_CLIP[check.one_of("training.clip", self.clip, FIELDS_OF_CLIP)]
        _norm("training.clip_norm", self.clip_norm)
        check.positive("training.clip_gamma", self.clip_gamma)
        check.inside_unit("training.clip_quantile", self.clip_quantile)
        check.positive("training.clip_rate", self.clip_rate)
        check.positive("training.clip_count_weight", self.clip_count_weight)
        if self.clip_norms is not None:
            object.__setattr__(
                self, "clip_norms", _numbers("training.clip_norms", self.clip_norms, _norm)
            )
        if self.clip_prefixes is not None:
            _words("training.clip_prefixes", self.clip_prefixes)
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.startswith("clip_") and item.name not in read and value != item.default:
                rule = f"clip {self.clip!r} does not read it (it reads: {', '.join(read)})"
                raise InvalidInput(f"training.{item.name}", value, rule)
            if item.name in read and value is None:
                raise InvalidInput(
                    f"training.{item.name}", None, f"must be given for clip {self.clip!r}"
                )
        self.clip_rule()


@dataclass(frozen=True)
class RuntimeConfig:
    """[runtime]: speed and safety knobs; none changes the guarantee."""

    engine: str = setting(
        "auto", "How gradients of single units are computed: auto, bookkeeping, batched or loop."
    )
    max_physical_batch: int | str = setting(
        4096, "Largest batch in memory at once: a number, or auto."
    )
    pad: bool = setting(False, "Fill batches up to one size.")
    graph: bool = setting(False, "Capture the step as CUDA graphs.")
    device: str = setting("cpu", "cpu, cuda, ...")
    checkpoint_every: float = setting(30.0, "Seconds between checkpoints.")

    def __post_init__(self) -> None:
        _flag("runtime.pad", self.pad)
        _flag("runtime.graph", self.graph)
        check.nonnegative("runtime.checkpoint_every", self.checkpoint_every)
        try:
            self.runtime(False)
        except InvalidInput as problem:
            raise InvalidInput(f"runtime.{problem.field}", problem.value, problem.rule) from None

    def runtime(self, progress: bool) -> Runtime:
        """As the training loop takes it."""
        return Runtime(
            self.engine, self.max_physical_batch, self.pad, self.device, progress, self.graph
        )


@dataclass(frozen=True)
class JobConfig(Paperwork):
    """Everything `dpfy train` does, as data."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        zero = Adjacency.ZERO_OUT.value
        if self.data.shared and self.privacy.adjacency != zero:
            rule = (
                f"must be {zero} where a record has several owners (--set privacy.adjacency={zero})"
            )
            raise InvalidInput("privacy.adjacency", self.privacy.adjacency, rule)
        if self.training.patience is not None and self.data.test_use != "public":
            raise InvalidInput(
                "training.patience",
                self.training.patience,
                "goes with public test data (--set data.test=public)",
            )
        if self.privacy.test_noise is not None and self.data.test_use != "billed":
            raise InvalidInput(
                "privacy.test_noise",
                self.privacy.test_noise,
                'goes with data.test = "billed" (--set data.test=billed)',
            )


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "privacy": PrivacyConfig,
    "training": TrainingConfig,
    "runtime": RuntimeConfig,
    **PAPERWORK,
}


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a TOML file, keys checked, values not yet."""
    return settings.read(SECTIONS, path)


CLIP_FIELDS = tuple(f.name for f in fields(TrainingConfig) if f.name.startswith("clip_"))
DECISIVE = {
    "data.kind": tuple(settings.names(DataConfig)),
    "data.test": ("user", "most_records"),
    "model.name": tuple(settings.names(ModelConfig)),
    "training.mechanism": ("sampling", "bands", "noise_phases", "phase_steps"),
    "training.noise_phases": ("phase_steps",),
    "training.clip": CLIP_FIELDS,
    "privacy.adjacency": ("records",),
    "ledger.path": ("budget_epsilon", "budget_delta", "budget_approximation"),
    "ledger.budget_epsilon": ("budget_delta", "budget_approximation"),
}
"""Keys on which the rules of other keys depend: while one is wrong, nothing is said about those."""


def make(raw: Mapping[str, Mapping[str, Any]], flags: Mapping[str, Any]) -> JobConfig:
    """A configuration from a file's sections and what the command line gives (``section.key``),
    which wins.

    Guarantees: everything that is wrong is told at once (:class:`dpfy.core.errors.MultipleErrors`).
    """
    config, found = attempted(raw, flags)
    errors.raise_all(found)
    assert config is not None
    return config


def attempted(
    raw: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Any],
    whole: type[JobConfig] = JobConfig,
    sections: settings.Sections = SECTIONS,
) -> tuple[JobConfig | None, list[InvalidInput]]:
    """The configuration, if it is one, and everything that is wrong with it."""
    return settings.assembled(whole, sections, merged(raw, flags, sections), DECISIVE)


def merged(
    raw: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Any],
    sections: settings.Sections = SECTIONS,
) -> settings.Raw:
    """The values of a file and of flags, which win. A data file that is named without a kind is
    what its name says; the model of a table is linear, and that of text gpt-small, where none is named.
    """
    values = settings.merged(sections, raw, flags, EXCLUSIVE)
    data = values["data"]
    name_kind(data)
    if data.get("kind") in ("csv", "parquet"):
        values["model"].setdefault("name", "linear")
    if data.get("kind") in ("text", "shakespeare"):
        values["model"].setdefault("name", LANGUAGE[0])
    return values


EXCLUSIVE = {
    "privacy.epsilon": ("noise_multiplier",),
    "privacy.noise_multiplier": ("epsilon",),
    "training.epochs": ("steps",),
    "training.steps": ("epochs",),
}
"""A flag replaces its alternative in the file."""


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(name, value, "must be true or false")


def _numbers(name: str, value: object, each: Callable[[str, object], float]) -> tuple[float, ...]:
    if not isinstance(value, tuple | list) or not value:
        raise InvalidInput(
            name, value, "must be a list of numbers, at least one, as in [2.0, 1.5, 1.0]"
        )
    return tuple(each(name, v) for v in value)


def _words(name: str, value: object) -> None:
    if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
        raise InvalidInput(name, value, 'must be a list of texts, as in ["features.", ""]')


def _norm(name: str, value: object) -> float:
    norm = check.positive_or_infinite(name, value)
    if MOST < norm < math.inf:
        raise InvalidInput(name, value, f"must be at most {MOST:g}, or infinite to clip nothing")
    if norm < LEAST_NORM:
        raise InvalidInput(name, value, f"must be at least {LEAST_NORM:g}")
    return norm
