"""`dpfy account` prints exactly one JSON object with the promised fields."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from dpfy.cli.account import account


def _run(*args: str) -> dict[str, object]:
    app = typer.Typer()
    app.command()(account)
    result = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("accountant", "low", "high"), [("pld", 0.5867, 0.5870), ("rdp", 1.21, 1.22), ("tight", 0.586786, 0.58685)]
)
def test_published_numbers(accountant: str, low: float, high: float) -> None:
    answer = _run(
        "--noise-multiplier", "1.0", "--sampling-rate", "0.005", "--steps", "200", "--delta", "1e-6", "--accountant", accountant
    )
    assert low <= float(str(answer["epsilon"])) <= high
    assert answer["accountant"] == accountant
    assert answer["adjacency"] == "add-or-remove-one"
    assert answer["delta"] == 1e-6
