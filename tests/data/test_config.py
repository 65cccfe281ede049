from __future__ import annotations

import subprocess
import sys

import pytest

from dpfy.core.errors import InvalidInput
from dpfy.data import KINDS, DataConfig
from dpfy.data.source import LOADERS


def test_every_kind_has_a_loader() -> None:
    assert set(LOADERS) == set(KINDS)


def test_a_list_from_toml_becomes_a_range() -> None:
    assert DataConfig(kind="npz", path="a", classes=2, range=[0, 2]).range == (0.0, 2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "minst"}, r"data.kind: got 'minst'; must be one of .*did you mean 'mnist'"),
        ({"kind": None}, "data.kind: got None; must be one of"),
        (
            {"kind": "csv", "path": "a.csv"},
            "data.schema: got None; must be given for kind 'csv': it is never guessed",
        ),
        ({"kind": "npz", "path": "a.npz"}, "data.classes: got None; must be given for kind 'npz'"),
        (
            {"kind": "idx", "path": "a", "classes": 10},
            "data.labels_path: got None; must be given for kind 'idx'",
        ),
        ({"kind": "embedded", "path": "a"}, "data.path: got 'a'; kind 'embedded' does not read it"),
        (
            {"kind": "csv", "path": "a", "schema": "s", "classes": 2},
            "data.classes: got 2; kind 'csv' does not read it",
        ),
        ({"kind": "text", "path": ""}, "data.path: got ''; must be a path as text"),
        ({"kind": "text", "path": 3}, "data.path: got 3; must be a path as text"),
        (
            {"kind": "text", "path": "a", "length": 1},
            "data.length: got 1; must be a whole number of at least 2",
        ),
        (
            {"kind": "digits", "test_fraction": 1.0},
            "data.test_fraction: got 1.0; must lie strictly between 0 and 1",
        ),
        (
            {"kind": "npz", "path": "a", "classes": 1},
            "data.classes: got 1; must be a whole number of at least 2",
        ),
        (
            {"kind": "npz", "path": "a", "classes": 2, "range": (1, 1)},
            "data.range: got .*low must be less than high",
        ),
        (
            {"kind": "npz", "path": "a", "classes": 2, "range": (1,)},
            "data.range: got .*must be two numbers",
        ),
        (
            {"kind": "idx", "path": "a", "labels_path": "b", "classes": 2, "test_path": "c"},
            "data.test_labels_path: got None; must be given together with test_path",
        ),
    ],
)
def test_a_bad_configuration_names_field_value_and_rule(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        DataConfig(**fields)  # type: ignore[arg-type]


def test_configurations_import_no_torch() -> None:
    code = "import sys, dpfy.data, dpfy.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
