"""Formulas of the texts against numbers computed by hand, and their commands."""

from __future__ import annotations

import json
import math

import pytest

from dpfy.accounting import gaussian
from dpfy.cli.app import main
from dpfy.core.errors import InvalidInput
from dpfy_lab import textbook


def told(capsys, *arguments: str) -> dict:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "textbook", *arguments, "--json"])
    assert not stop.value.code
    return json.loads(capsys.readouterr().out)


def test_the_plain_conversion_of_one_gaussian(capsys):
    """1 / (2 s^2) + sqrt(2 log(1 / delta)) / s at noise 4 and delta 1e-5: 0.03125 + 1.19963."""
    rows = told(capsys, "conversions", "--noise-multiplier", "4", "--delta", "1e-5")["bounds"]
    found = {row["bound"]: row["epsilon"] for row in rows}
    assert found["Rényi, plain conversion"] == pytest.approx(1.23088, rel=2e-3)
    assert found["Rényi, plain conversion"] >= 1.23088 * (1 - 1e-6)
    assert (
        found["loss distribution"]
        < found["Rényi, optimal conversion"]
        < found["Rényi, plain conversion"]
    )


def test_compositions_of_the_guides_table(capsys):
    plan = ["--noise-multiplier", "8", "--delta", "1e-5", "--steps", "50"]
    found = [row["epsilon"] for row in told(capsys, "conversions", *plan)["bounds"]]
    assert len(found) == 5
    assert found[0] > found[2] > found[3] > found[4]


def test_the_tail_of_the_loss_by_key_results_1_and_2(capsys):
    """Noise 1, epsilon 2: delta(1) = 0.126937, over 1 - 1/e 0.200811; the loss exceeds 2 with the
    chance Phi(-1.5) = 0.0668072, and delta(2) = 0.020923 is less.
    """
    found = told(capsys, "loss", "--noise-multiplier", "1", "--epsilon", "2")
    assert found["chance_at_most"] == pytest.approx(0.200811, rel=1e-5)
    assert found["chance"] == pytest.approx(0.0668072, rel=1e-5)
    assert found["delta"] == pytest.approx(0.0209230, rel=1e-4)
    assert found["delta"] <= found["chance"] <= found["chance_at_most"]


def test_algorithm_1_by_hand(capsys):
    """T 100, delta 1e-5, epsilon 1: epsilon0 = 1 / sqrt(100 log 1e7) = 0.0249083, delta0 = 1e-7,
    sigma = sqrt(2 log 2e7) / epsilon0 = 5.79849 / 0.0249083.
    """
    plan = ["--epsilon", "1", "--delta", "1e-5", "--steps", "100"]
    rows = {row["rule"]: row for row in told(capsys, "rules", *plan)["rules"]}
    assert rows["algorithm 1"]["noise_multiplier"] == pytest.approx(232.794, rel=1e-5)
    assert rows["analytic"]["noise_multiplier"] == pytest.approx(37.30632, rel=1e-4)
    assert all(row["epsilon"] <= 1.0001 for row in rows.values())


def test_the_mean_of_250_of_10000_salaries(capsys):
    """The text prints 806 for all. For the sample delta is q delta_G(log(1 + (e^epsilon - 1) / q)),
    so that the noise is that of one Gaussian at epsilon 3.29394 and delta 4e-5.
    """
    found = told(capsys, "mean")
    assert found["stddev"] == pytest.approx(806, abs=0.5)
    by_hand = gaussian.sigma_analytic(math.log1p((math.exp(0.5) - 1) / 0.025), 4e-5)
    assert found["sampled_noise_multiplier"] == pytest.approx(by_hand, rel=1e-3)
    assert found["sampled_stddev"] == pytest.approx(4000 * by_hand, rel=1e-3)
    with pytest.raises(InvalidInput, match="sample"):
        textbook.private_mean(10, 20, 1.0, 1.0, 1e-5)


def test_rates_by_hand(capsys):
    """10,000 records and parameters, epsilon 1: 100 / 10,000, and its square."""
    found = told(capsys, "risk", "--records", "10000", "--dimension", "10000")
    assert found["convex"] == pytest.approx({"empirical": 0.01, "population": 0.02})
    assert found["strongly convex"] == pytest.approx({"empirical": 1e-4, "population": 2e-4})


def test_the_scaling_law_keeps_the_noise_per_example(capsys):
    plan = ["--noise-multiplier", "1", "--batch-size", "100", "--records", "10000"]
    rows = told(capsys, "scale", *plan, "--delta", "1e-5", "--steps", "50")["plans"]
    assert [row["noise_per_example"] for row in rows] == [0.01, 0.01]
    assert rows[1]["epsilon"] < rows[0]["epsilon"]  # which is why large batches pay


def test_laplace_against_gaussian_noise(capsys):
    """One release at (1, 1e-5): Laplace scale 1 / (1 + 2e-5), Gaussian noise 3.730632. They are
    equal where the L1 norm is 3.730632 / sqrt(2) = 2.63796 times the L2 norm.
    """
    plan = ["--dimension", "10000", "--epsilon", "1", "--delta", "1e-5"]
    found = told(capsys, "norms", *plan, "--spread", "100")
    assert found["laplace_scale"] == pytest.approx(1, abs=2e-4)
    assert found["equal_at_spread"] == pytest.approx(2.63796, rel=2e-4)
    assert found["ratio"] == pytest.approx(100 / 2.63796, rel=2e-4)
    with pytest.raises(InvalidInput, match="spread"):
        textbook.norms(4, 1.0, 1e-5, 1.0, 1, 3.0)
