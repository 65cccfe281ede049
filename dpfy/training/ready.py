"""A job that can start: its configuration, its schema and the number of its records, with
everything that is wrong told at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfy.core import errors, settings
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.data.config import REQUIRED
from dpfy.tables.schema import training_schema
from dpfy.training import config as configuration

UNKNOWN = "the public number of records to train on, those held out (data.test_fraction) left out"


def job(path: Path | None, given: Mapping[str, Any]) -> configuration.JobConfig:
    """The configuration in the file `path`, if any, with what the command line gives
    (``section.key``) over it.

    Guarantees: no record is read; a misspelt key, a value that breaks a rule, an open place of a
    schema and a missing number of records are told together.
    """
    raw, found = settings.parsed(configuration.SECTIONS, path) if path else ({}, [])
    config, wrong = configuration.attempted(raw, given)
    found += wrong
    errors.raise_all([*found, *lacking(configuration.merged(raw, given))])
    assert config is not None
    return config


def lacking(values: settings.Raw) -> list[InvalidInput]:
    """What the values of a job leave open: places of its schema, and how many records there are."""
    found, kind = _of_schema(values["data"].get("schema")), values["data"].get("kind")
    named = isinstance(kind, str) and kind in REQUIRED and kind != "text"
    if named and "records" not in values["privacy"]:
        found.append(
            InvalidInput(
                "privacy.records", None, f"must be given for data of kind {kind!r}: {UNKNOWN}"
            )
        )
    return found


def _of_schema(given: object) -> list[InvalidInput]:
    """What is wrong with the schema that a configuration names."""
    if not isinstance(given, str) or not given or "\0" in given:
        return []
    try:
        return errors.attempted(training_schema, given)
    except Corrupt as problem:
        return [InvalidInput("data.schema", given, problem.problem)]
