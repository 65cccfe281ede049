"""Sections of a configuration that no number of the training depends on: the ledger it is charged
to, and what the report says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dpfy.core import check, settings
from dpfy.core.errors import InvalidInput
from dpfy.core.settings import setting, text
from dpfy.data.config import DataConfig
from dpfy.models.config import ModelConfig

PATHS = tuple(
    ("data", name)
    for name in ("dir", "path", "labels_path", "test_path", "test_labels_path", "schema")
) + (("ledger", "path"),)
"""Fields that hold paths."""


@dataclass(frozen=True)
class LedgerConfig:
    """[ledger]: the ledger of the data set across runs, and its budget (set when the ledger is
    made, the same or none later).
    """

    path: str | None = setting(None, "Ledger of the data set, shared by all runs on it.")
    budget_epsilon: float | None = setting(
        None, "Epsilon that all runs together may spend.", "what the ledger was made with"
    )
    budget_delta: float | None = setting(
        None, "Delta of that budget.", "the delta of the run that makes the ledger"
    )
    budget_approximation: float | None = setting(
        None,
        "Part of that delta set aside for releases that may fail with a small probability.",
        "a fifth of that delta, or what the ledger was made with",
    )

    def __post_init__(self) -> None:
        if self.path is not None:
            text("ledger.path", self.path, "must be a path as text")
        if self.budget_epsilon is not None:
            check.epsilon("ledger.budget_epsilon", self.budget_epsilon)
            if self.path is None:
                raise InvalidInput(
                    "ledger.budget_epsilon",
                    self.budget_epsilon,
                    "needs ledger.path (--ledger) to be kept in",
                )
        if self.budget_delta is not None:
            check.delta("ledger.budget_delta", self.budget_delta)
            if self.budget_epsilon is None:
                raise InvalidInput(
                    "ledger.budget_delta", self.budget_delta, "goes with ledger.budget_epsilon"
                )
        if self.budget_approximation is not None and (
            check.fraction("ledger.budget_approximation", self.budget_approximation)
            and self.budget_epsilon is None
        ):
            raise InvalidInput(
                "ledger.budget_approximation",
                self.budget_approximation,
                "goes with ledger.budget_epsilon",
            )


@dataclass(frozen=True)
class PublicConfig:
    """[public]: public data that shaped the run, for its report: what it is, for what it was used,
    and where it is from.
    """

    data: str | None = setting(
        None, "Public data that was used beside the private data: a description."
    )
    used_for: str | None = setting(None, "For what: pretraining, tuning, features.")
    provenance: str | None = setting(None, "Where it is from, and why it is public.")

    def __post_init__(self) -> None:
        given = {key: getattr(self, key) for key in ("data", "used_for", "provenance")}
        for key, value in given.items():
            if value is not None:
                check.one_line(f"public.{key}", value)
        if any(given.values()) and not all(given.values()):
            missing = next(key for key, value in given.items() if value is None)
            raise InvalidInput(
                f"public.{missing}", None, "must be given with the other fields of [public]"
            )

    def rows(self) -> tuple[dict[str, str], ...]:
        """As a run takes it."""
        if self.data is None or self.used_for is None or self.provenance is None:
            return ()
        return ({"data": self.data, "used_for": self.used_for, "provenance": self.provenance},)


@dataclass(frozen=True)
class AboutConfig:
    """[about]: what the report says the run is about. All of it is published."""

    author: str | None = setting(None, "Who answers for the run.", "not stated")
    data: str | None = setting(None, "What the data is called.", "its kind")

    def __post_init__(self) -> None:
        for key in ("author", "data"):
            if (value := getattr(self, key)) is not None:
                check.one_line(f"about.{key}", value)

    def rows(self, data: DataConfig, model: ModelConfig) -> dict[str, str]:
        """As a run takes it."""
        return {"model": model.name, "data": self.data or data.kind} | (
            {} if self.author is None else {"author": self.author}
        )


PAPERWORK: dict[str, type] = {
    "ledger": LedgerConfig,
    "public": PublicConfig,
    "about": AboutConfig,
}
"""Its sections."""


@dataclass(frozen=True)
class Paperwork:
    """What every job has beside what it does."""

    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    public: PublicConfig = field(default_factory=PublicConfig)
    about: AboutConfig = field(default_factory=AboutConfig)

    def to_toml(self, *, publish: bool) -> str:
        """The configuration as TOML. With `publish`, paths are cut to their last part: a run folder
        holds no absolute path.
        """
        return settings.whole(self, PATHS if publish else ())
