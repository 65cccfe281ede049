"""Flower's own accountant beside ours, for the same runs: the table of docs/flower.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr.supercore.privacy_accounting")

from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

import dpfy
from dpfy.federated import CLIENT
from dpfy.plan.claim import ForeignBatches, TrainingClaim

RUNS = {
    "3,383 clients, 120 a round, noise 1.2, 100 rounds, delta 1e-5": (3383, 120, 1.2, 100, 1e-5),
    "539 clients, 54 a round, noise 1.0, 100 rounds, delta 1e-4": (539, 54, 1.0, 100, 1e-4),
    "5 clients, 3 a round, noise 1.0, 3 rounds, delta 0.01": (5, 3, 1.0, 3, 0.01),
    "1,000 clients, all in each round, noise 4, 20 rounds, delta 1e-5": (1000, 1000, 4.0, 20, 1e-5),
}


def ours(clients, cohort, noise, rounds, delta, foreign=False):
    plan = dpfy.dpsgd(clients, cohort, steps=rounds, unit=CLIENT).with_noise(noise, delta=delta)
    claim = TrainingClaim(
        plan, ForeignBatches("clients chosen by the strategy FedAvg of Flower") if foreign else None
    )
    return dpfy.accounting.epsilon(claim.event, delta)


def theirs(clients, cohort, noise, rounds, delta, method):
    accountant = RdpAccountant(
        PrivacyConfig(delta, clients, NeighboringRelation.ADD_OR_REMOVE_ONE, method)
    )
    accountant.compose(
        GaussianPrivacyEvent(noise_multiplier=noise, sample_size=cohort, population_size=clients),
        rounds,
    )
    return accountant.get_privacy_spent().epsilon


def table() -> list[str]:
    """The rows of the page."""
    rows = []
    for name, run in RUNS.items():
        columns = (
            ours(*run), theirs(*run, SamplingMethod.POISSON), ours(*run, foreign=True), theirs(*run, SamplingMethod.NO_AMPLIFICATION)  # noqa: E501
        )  # fmt: skip
        rows.append(f"| {name} | {' | '.join(f'{epsilon:.5g}' for epsilon in columns)} |")
    return rows


def test_the_table_of_the_page():
    page = (Path(__file__).parents[3] / "docs" / "flower.md").read_text()
    for row in table():
        assert row in page, row
    assert re.search(r"1\.7075 \| 1\.98", page)


def test_ours_is_never_above_theirs_for_the_same_sampling():
    for run in RUNS.values():
        assert ours(*run) <= theirs(*run, SamplingMethod.POISSON)
        assert ours(*run, foreign=True) <= theirs(*run, SamplingMethod.NO_AMPLIFICATION)


if __name__ == "__main__":
    print("\n".join(table()))
