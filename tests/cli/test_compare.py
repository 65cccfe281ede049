"""`dpfy plan compare` prints tables and JSON and draws an SVG; phase files are read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dpfy.cli.account import account
from dpfy.cli.compare import app
from dpfy.core.errors import DpfyError

SETTING = [
    "--noise-multiplier",
    "1.0",
    "--sampling-rate",
    "0.005",
    "--steps",
    "200",
    "--delta",
    "1e-6",
]


def test_bounds_are_sorted_and_marked(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["bounds", *SETTING, "--plot", str(tmp_path / "bounds.svg"), "--json"],
        catch_exceptions=False,
    )
    answer = json.loads(result.stdout)
    rows = {row["accountant"]: row for row in answer["bounds"]}
    assert (
        rows["tight (lower)"]["epsilon"]
        <= rows["tight"]["epsilon"]
        < rows["rdp"]["epsilon"]
        < rows["advanced"]["epsilon"]
    )
    assert rows["central limit"]["kind"] == "approximation, no guarantee"
    assert rows["zcdp"]["epsilon"] is None
    assert "rdp" in rows["zcdp"]["why"]
    assert (tmp_path / "bounds.svg").read_text().lstrip().startswith("<?xml")


def test_bounds_as_a_table() -> None:
    result = CliRunner().invoke(app, ["bounds", *SETTING], catch_exceptions=False)
    assert "tight" in result.stdout
    assert "upper bound" in result.stdout


def test_tuning_names_the_cheapest() -> None:
    result = CliRunner().invoke(
        app, ["tuning", *SETTING, "--trials", "100", "--json"], catch_exceptions=False
    )
    answer = json.loads(result.stdout)
    assert answer["cheapest"] == answer["routes"][0]["route"]
    prices = {row["route"]: row["epsilon"] for row in answer["routes"]}
    assert not any("exponential" in name for name in prices)
    assert answer["not_a_guarantee"]["printed"] == pytest.approx(3.2369, abs=3e-4)
    assert answer["not_a_guarantee"]["note"] == "printed in the guide, not a guarantee"
    assert "epsilon" not in answer["not_a_guarantee"]
    assert prices["random trials, Poisson, tight"] == pytest.approx(2.4872, abs=2e-4)


def _account(*args: str) -> dict[str, object]:
    verb = typer.Typer()
    verb.command()(account)
    return dict(
        json.loads(CliRunner().invoke(verb, [*args, "--json"], catch_exceptions=False).stdout)
    )


def test_phases_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "phases.toml"
    file.write_text("[[phase]]\nnoise_multiplier = 1.0\nsampling_rate = 0.005\nsteps = 150\n" * 2)
    two = _account("--phases", str(file), "--delta", "1e-6")
    one = _account(
        "--noise-multiplier", "1.0", "--sampling-rate", "0.005", "--steps", "300", "--delta", "1e-6"
    )
    assert two["epsilon"] == one["epsilon"]
    assert two["phases"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[phase]]\nnoise = 1.0\n", "noise_multiplier"),
        ("[[phase]]\nsteps = 3\n", "noise_multiplier.*is needed"),
        ("[[phase]]\nnoise_multiplier = 1.0\nsteps = 1.5\n", "steps.*whole number"),
        ("[[phase]]\nnoise_multiplier = 1.0\nsampling_rate = 2\n", "sampling_rate"),
        ("phases = 3\n", "did you mean 'phase'"),
        ("[[phase]\n", "TOML"),
        ("", r"\[\[phase\]\]"),
    ],
)
def test_bad_phase_files_are_one_line_errors(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "phases.toml"
    file.write_text(text)
    with pytest.raises(DpfyError, match=message):
        _account("--phases", str(file), "--delta", "1e-6")


@pytest.mark.parametrize(
    "extra",
    [["--noise-multiplier", "0"], ["--noise-multiplier", "1", "--sampling-rate", "1.5"], []],
)
def test_bad_numbers_are_errors(extra: list[str]) -> None:
    with pytest.raises(DpfyError):
        _account(*extra, "--delta", "1e-6")
