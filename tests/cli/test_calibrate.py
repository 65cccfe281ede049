"""`dpfy plan calibrate` prints exactly one JSON object with the promised fields."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from dpfy.cli.calibrate import calibrate


def _run(*args: str) -> dict[str, object]:
    app = typer.Typer()
    app.command()(calibrate)
    result = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrated_noise_reaches_the_target(accountant: str) -> None:
    answer = _run(
        "--epsilon",
        "1",
        "--delta",
        "1e-6",
        "--sampling-rate",
        "0.05",
        "--steps",
        "200",
        "--accountant",
        accountant,
    )
    assert 0.999 <= float(str(answer["epsilon"])) <= 1.0
    assert float(str(answer["noise_multiplier"])) == pytest.approx(
        {"pld": 3.1959, "rdp": 3.4256}[accountant], rel=2e-4
    )
