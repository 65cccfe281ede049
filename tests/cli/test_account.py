"""`dpfy plan account` prints exactly one JSON object with the promised fields."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from dpfy.cli.account import account
from dpfy.core.errors import DpfyError


def _run(*args: str) -> dict[str, object]:
    app = typer.Typer()
    app.command()(account)
    result = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("accountant", "low", "high"),
    [("pld", 0.5867, 0.5870), ("rdp", 1.21, 1.22), ("tight", 0.586786, 0.58685)],
)
def test_published_numbers(accountant: str, low: float, high: float) -> None:
    answer = _run(
        "--noise-multiplier",
        "1.0",
        "--sampling-rate",
        "0.005",
        "--steps",
        "200",
        "--delta",
        "1e-6",
        "--accountant",
        accountant,
    )
    assert low <= float(str(answer["epsilon"])) <= high
    assert answer["accountant"] == accountant
    assert answer["adjacency"] == "add-or-remove-one"
    assert answer["delta"] == 1e-6


REPORTS = ("--local-epsilon", "1", "--delta", "1e-6")


def test_reports_that_are_shuffled_or_checked_in() -> None:
    shuffled = _run(
        *REPORTS, "--sampling", "shuffled", "--records", "10000", "--adjacency", "replace-one"
    )
    assert shuffled["epsilon"] == pytest.approx(0.04322, rel=1e-3)
    assert shuffled["epsilon_lower"] == pytest.approx(0.0356, rel=1e-3)
    assert shuffled["local_epsilon"] == 1
    told = _run(
        *REPORTS,
        "--sampling",
        "shuffled",
        "--records",
        "10000",
        "--adjacency",
        "replace-one",
        "--answers",
        "10",
    )
    assert told["epsilon"] == pytest.approx(0.02401, rel=1e-3)
    checked = _run(
        *REPORTS, "--sampling", "check-ins", "--slots", "10000", "--sampling-rate", "0.1"
    )
    assert checked["epsilon"] == pytest.approx(0.002856, rel=1e-3)


def test_a_buffer_that_is_shuffled_amplifies_nothing_and_says_so() -> None:
    local = _run(*REPORTS, "--sampling", "buffer-shuffled", "--records", "10000")
    assert local["epsilon"] == pytest.approx(1.0, rel=1e-5)
    central = (
        "--noise-multiplier",
        "2",
        "--sampling-rate",
        "0.1",
        "--steps",
        "20",
        "--delta",
        "1e-6",
    )
    for sampling in ("buffer-shuffled", "shuffled"):
        passes = _run(*central, "--sampling", sampling)
        assert (
            passes["epsilon"]
            == _run("--noise-multiplier", "2", "--steps", "2", "--delta", "1e-6")["epsilon"]
        )
        assert any("no amplification" in line for line in passes["assumptions"])  # type: ignore[attr-defined]
    assert any("no amplification" in line and "buffer" in line for line in local["assumptions"])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--sampling", "shuffled"),
        ("--sampling", "shuffled", "--records", "100"),  # under add-or-remove-one
        ("--sampling", "check-ins"),
        ("--sampling", "poisson", "--records", "100"),
        ("--sampling", "check-ins", "--slots", "100", "--answers", "3"),
        ("--noise-multiplier", "1", "--sampling", "shuffled", "--records", "100"),
        ("--local-epsilon", "-1", "--sampling", "shuffled", "--records", "100"),
        ("--local-epsilon", "nan", "--sampling", "shuffled", "--records", "100"),
    ],
)
def test_reports_that_make_no_sense_are_refused(wrong: tuple[str, ...]) -> None:
    with pytest.raises(DpfyError):
        _run(*REPORTS, *wrong)
