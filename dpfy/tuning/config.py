"""The configuration of a search: a training job, with two sections more: [tune], how it is paid
for, and [search], what is searched.

[search.training]
learning_rate = "0.05..5 log"
batch_size = [256, 512, 1024]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dpfy.core import check, errors, settings, storage
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.settings import setting
from dpfy.core.unit import single_owner
from dpfy.data.config import RECORD
from dpfy.training import config as configuration
from dpfy.training import job, ready
from dpfy.training.config import JobConfig
from dpfy.tuning.routes import (
    HELD_OUT,
    LAWS,
    PRIVATE,
    PUBLIC,
    PUBLIC_DATA,
    RANDOM,
    ROUTES,
    SCORES,
    SUBSET,
)
from dpfy.tuning.search import MOST_WORKERS
from dpfy.tuning.space import Settings, Space
from dpfy.tuning.terms import AUTO, SearchSettings

SEARCHED = ("training", "model")
"""Sections whose fields may be searched."""
ENGINES = ("random", "optuna")
REFUSED = {
    "training.stopping": "trials run to their end; prune them (route composition) from Python",
    "training.patience": "trials run to their end; prune them (route composition) from Python",
    "model.seed": "a public seed is no setting: search what matters",
}


@dataclass(frozen=True)
class TuneConfig:
    """[tune]: how the search is paid for, and how it is done."""

    route: str = setting(
        AUTO,
        f"How the search is paid for: {', '.join(ROUTES)}.",
        "public where tune.public is given, else random",
    )
    trials: float = setting(20, "Trials, or their mean where their number is random.")
    law: str = setting(
        AUTO,
        f"Law of a random number of trials: {', '.join(LAWS)}.",
        "poisson where it costs little more than geometric",
    )
    score: str | None = setting(
        None,
        f"Whose records trials are scored on: {', '.join(SCORES)}.",
        "public where the test data is public, else held-out",
    )
    validation: float = setting(
        0.5,
        "Share of the public test records that trials are scored on; figures in the report are of "
        "the others.",
    )
    held_out: float = setting(
        0.1, "Share of the training records held out for scores (score held-out)."
    )
    sample: float = setting(
        0.25, "Share of the training records that a search on a subset sees (route subset)."
    )
    public: str | None = setting(
        None,
        "Public data to search on instead: a kind of data by name, or a job file whose [data] it "
        "is.",
        "none",
    )
    provenance: str | None = setting(
        None,
        "Where the public data is from, and why it is public (route public).",
        "what it is called",
    )
    engine: str = setting(
        "random",
        f"What proposes settings: {', '.join(ENGINES)} (the latter by composition, or on public "
        f"data).",
    )
    workers: int = setting(1, "Trials side by side, each in a process of its own.")
    devices: tuple[str, ...] = setting((), "Devices that trials take in turn.", "runtime.device")

    def __post_init__(self) -> None:
        check.one_of("tune.route", self.route, (AUTO, *ROUTES))
        check.positive("tune.trials", self.trials)
        check.one_of("tune.law", self.law, (AUTO, *LAWS))
        if self.score is not None:
            check.one_of("tune.score", self.score, SCORES)
        for name in ("validation", "held_out", "sample"):
            check.inside_unit(f"tune.{name}", getattr(self, name))
        for name in ("public", "provenance"):
            if getattr(self, name) is not None:
                check.one_line(f"tune.{name}", getattr(self, name), 400)
        check.one_of("tune.engine", self.engine, ENGINES)
        check.integer("tune.workers", self.workers, most=MOST_WORKERS)
        if not isinstance(self.devices, tuple | list) or not all(
            isinstance(one, str) for one in self.devices
        ):
            raise InvalidInput(
                "tune.devices",
                self.devices,
                'must be a list of devices, as in ["cuda:0", "cuda:1"]',
            )
        if self.chosen == PUBLIC_DATA and self.public is None:
            raise InvalidInput(
                "tune.public", None, "must name the public data to search on (route public)"
            )
        if self.chosen != PUBLIC_DATA and self.public is not None:
            raise InvalidInput(
                "tune.public",
                self.public,
                f"is for the route public, and the route is {self.chosen}",
            )

    @property
    def chosen(self) -> str:
        """The route."""
        if self.route != AUTO:
            return self.route
        return RANDOM if self.public is None else PUBLIC_DATA


SECTIONS: dict[str, type] = configuration.SECTIONS | {"tune": TuneConfig}
SEARCH = "search"


@dataclass(frozen=True)
class SearchConfig:
    """A job, what is searched in it, and how. `raw` are the values that the job was made of."""

    job: JobConfig
    tune: TuneConfig
    space: Space
    raw: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        for name in self.space.dimensions:
            _require_field(name)
        if self.job.privacy.noise_multiplier is not None:
            raise InvalidInput(
                "privacy.noise_multiplier",
                self.job.privacy.noise_multiplier,
                "a search is calibrated: give epsilon",
            )
        if self.job.privacy.group_size != 1:
            raise Unsupported(
                "a search for groups of units",
                "give the epsilon of one unit (privacy.group_size = 1)",
            )
        single_owner("a search", self.job.data.user)
        if self.job.data.test_use == "billed":
            raise Unsupported(
                "a charged evaluation beside a search",
                "score trials on records held out: data.test = withheld, tune.score = held-out",
            )
        if self.score == PUBLIC and self.job.data.test_use != "public":
            rule = (
                "the test records were not declared public (data.test = public): score on held-out "
                "records instead"
            )
            raise InvalidInput("tune.score", PUBLIC, rule)
        if self.job.data.draw == RECORD and (self.score == HELD_OUT or self.tune.chosen == SUBSET):
            raise Unsupported(
                "a part of the users where their records are drawn one by one",
                "draw whole users (data.draw = user), or score on training records (tune.score = "
                "training) or public test records (data.test = public)",
            )

    @property
    def score(self) -> str:
        """Whose records trials are scored on."""
        return self.tune.score or (PUBLIC if self.job.data.test_use == "public" else HELD_OUT)

    def terms(self, records: int, epsilon: float) -> SearchSettings:
        """The terms of a search on private data."""
        tune, privacy = self.tune, self.job.privacy
        check.one_of("tune.route", tune.chosen, PRIVATE)
        return SearchSettings(
            epsilon, job.chosen_delta(self.job, records), records, tune.trials, tune.chosen, tune.law,
            self.score, tune.held_out, tune.sample,
            accountant=privacy.accountant, adjacency=privacy.adjacency,
        )  # fmt: skip

    def with_settings(self, found: Settings) -> JobConfig:
        """The job with these settings."""
        return configuration.make(self.raw, found)

    def to_toml(self, *, publish: bool) -> str:
        """The whole configuration; with `publish`, paths cut to their last part."""
        shown = {f.name: getattr(self.tune, f.name) for f in fields(self.tune)}
        if publish and shown["public"] is not None:
            shown["public"] = Path(shown["public"]).name
        lines = [self.job.to_toml(publish=publish), "[tune]"]
        lines += [
            f"{name} = {settings.toml(value)}" for name, value in shown.items() if value is not None
        ]
        for section in SEARCHED:
            named = {
                k.partition(".")[2]: v
                for k, v in self.space.words().items()
                if k.startswith(f"{section}.")
            }
            if named:
                lines += [
                    "",
                    f"[{SEARCH}.{section}]",
                    *(f"{k} = {settings.toml(v)}" for k, v in named.items()),
                ]
        return "\n".join(lines) + "\n"


def _require_field(name: str) -> None:
    section, _, key = name.partition(".")
    if section not in SEARCHED or not key:
        rule = (
            f"must be a field of {' or '.join(SEARCHED)}, as in training.learning_rate: others are "
            f"no settings of a trial"
        )
        raise InvalidInput("search", name, rule)
    check.one_of(f"search.{section}", key, settings.names(SECTIONS[section]))
    if name in REFUSED:
        raise InvalidInput("search", name, REFUSED[name])


def read(path: Path | None, given: Mapping[str, Any], over: Mapping[str, Any]) -> SearchConfig:
    """The configuration in a file, with fields (``section.key``) and ranges that a command line
    gives over it.

    Guarantees: nothing misspelt is swallowed; no record is read.
    """
    whole = dict(storage.toml("config", path)) if path is not None else {}
    return made(whole, given, over)


def made(
    whole: Mapping[str, Any], given: Mapping[str, Any], over: Mapping[str, Any]
) -> SearchConfig:
    """The configuration of the tables of a file, and of what a command line gives over them."""
    searched = _flat(whole.get(SEARCH, {})) | dict(over)
    for name in over:
        _require_field(name)
    rest = {name: part for name, part in whole.items() if name != SEARCH}
    raw, found = _known(rest)
    errors.raise_all(found)
    mine = {
        key.partition(".")[2]: value
        for key, value in given.items()
        if key.startswith("tune.") and value is not None
    }
    job_given = {key: value for key, value in given.items() if not key.startswith("tune.")}
    tune, wrong = settings.built("tune", TuneConfig, _tuples(raw.pop("tune", {}) | mine), {})
    job, also = configuration.attempted(raw, job_given)
    values = configuration.merged(raw, job_given)
    errors.raise_all([*wrong, *also, *ready.lacking(values)])
    assert job is not None
    if not searched:
        raise InvalidInput(
            "search",
            None,
            "must name what is searched: a section [search.training] of the file, or --over "
            "training.learning_rate=...",
        )
    return SearchConfig(
        job, tune, Space.read(searched), {name: dict(part) for name, part in values.items()}
    )


def _known(whole: Mapping[str, Any]) -> tuple[settings.Raw, list[InvalidInput]]:
    """The sections that are known, and what is wrong with the others."""
    raw, found = {}, list[InvalidInput]()
    for name, part in whole.items():
        if wrong := errors.attempted(check.known_keys, "", [name], (*SECTIONS, SEARCH)):
            found += wrong
        elif not isinstance(part, dict):
            found.append(InvalidInput(name, part, f"must be a section: [{name}]"))
        else:
            for key in part:
                found += errors.attempted(
                    check.known_keys, name, [key], settings.names(SECTIONS[name])
                )
            raw[name] = dict(part)
    return raw, found


def _flat(part: Any) -> dict[str, Any]:
    """``{"training": {"learning_rate": ...}}`` as ``{"training.learning_rate": ...}``; dotted keys
    as they are.
    """
    if not isinstance(part, dict):
        raise InvalidInput(SEARCH, part, f"must be a section: [{SEARCH}.training]")
    found: dict[str, Any] = {}
    for name, value in part.items():
        found |= (
            {f"{name}.{key}": v for key, v in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
    return found


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
