"""Collections of local reports: ledger, card and verification; devices with their own ledger; a
shuffler that is named, or none.
"""

from __future__ import annotations

import json
import stat

import numpy as np
import pytest

import dpfy
from dpfy.accounting.filters import RenyiFilter
from dpfy.core import events
from dpfy.core.claim import Reserved
from dpfy.core.errors import BudgetExceeded, Corrupt, InvalidInput, Unsupported
from dpfy.core.ledger import Ledger
from dpfy.core.unit import Adjacency
from dpfy.local import frequencies, means
from dpfy.local.claim import PROTOCOLS, LocalClaim, ShuffledClaim
from dpfy.local.collection import collect, simulate
from dpfy.local.device import Device
from dpfy.runs.run import Run

VALUES = np.arange(600) % 4
KARY = frequencies.KaryResponse(1.0, 4)
MADE = {
    "k-ary-response": KARY,
    "unary-encoding": frequencies.UnaryEncoding(1.0, 4),
    "rappor": frequencies.Rappor(2.0, 4, once=1.0),
    "local-hashing": frequencies.LocalHashing(1.0, 4),
    "hadamard-response": frequencies.HadamardResponse(1.0, 4),
    "laplace-mean": means.LaplaceMean(1.0, 0.0, 4.0),
    "duchi-mean": means.DuchiMean(1.0, 3),
    "priv-unit": means.PrivUnit(1.0, 3),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_claim_is_read_as_it_was_written(name):
    for claim in (
        LocalClaim("colour", MADE[name]),
        *(
            []
            if name == "rappor"
            else [ShuffledClaim("colour", MADE[name], shuffler="mix", records=600, delta=1e-6)]
        ),
    ):
        assert Reserved.from_json(json.loads(json.dumps(Reserved(claim).to_json()))).claim == claim


@pytest.mark.parametrize("name", ["k-ary-response", "rappor", "priv-unit"])
def test_a_card_of_reports_from_devices_says_that_nobody_is_trusted(tmp_path, name):
    protocol = MADE[name]
    values = np.eye(3)[VALUES % 3] if name == "priv-unit" else VALUES
    reports = [protocol.report(value) for value in values]
    made = collect(LocalClaim("colour", protocol), reports, tmp_path / "run")
    stated = made.report["guarantee"]
    assert (stated["trust"], stated["delta"], stated["unit"], stated["adjacency"]) == (
        "local",
        0.0,
        "user",
        "replace-one",
    )
    assert stated["epsilon"] == pytest.approx(protocol.epsilon, rel=1e-9)
    assert "Nobody must be trusted but one's own device" in made.report["setting"]["trusted"]
    assert "nobody trusted but the owner" in made.report["statement"]
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    section = made.report["sections"][0]
    assert section["reports"] == 600
    if name == "rappor":
        assert (section["epsilon_of_one_report"], section["epsilon_of_all_reports"]) == (1.0, 2.0)
    if name == "k-ary-response":
        truth, found = np.full(4, 0.25), made.estimate
        assert (
            np.abs(np.array(found["value"]) - truth) < 5 * np.array(found["standard_error"])
        ).all()
        assert (tmp_path / "run" / "report.md").read_text().count("Nobody must be trusted") >= 1


def test_a_simulation_is_billed_for_each_person_and_is_not_called_local(tmp_path):
    place = Run(tmp_path / "run", seed=1)
    made = simulate(LocalClaim("colour", KARY, simulated=True), VALUES, place)
    assert made.report["guarantee"]["trust"] == "central"
    assert "held every value" in made.report["setting"]["trusted"]
    assert {row["what"]: row["holds"] for row in made.report["sections"][0]["assumptions"]}[
        "device"
    ] == "no"
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    again = simulate(
        LocalClaim("colour", KARY, simulated=True),
        VALUES,
        Run(tmp_path / "run", seed=1, resume=True),
    )
    assert again.estimate == made.estimate
    with pytest.raises(InvalidInput, match="must be true where one process"):
        simulate(LocalClaim("colour", KARY), VALUES, tmp_path / "other")
    with pytest.raises(InvalidInput, match="must be false for reports of real devices"):
        collect(
            LocalClaim("colour", KARY, simulated=True), KARY.reports(VALUES), tmp_path / "other"
        )
    assert not (tmp_path / "other").exists()


def test_only_a_named_shuffler_amplifies(tmp_path):
    rows = KARY.reports(VALUES)
    claim = ShuffledClaim(
        "colour", KARY, shuffler="the mix net of the city", records=600, delta=1e-6
    )
    made = collect(claim, rows, tmp_path / "run")
    stated = made.report["guarantee"]
    assert stated["trust"] == "shuffled"
    assert stated["epsilon"] < 0.2 < KARY.epsilon
    assert stated["epsilon"] == pytest.approx(
        dpfy.accounting.epsilon(
            events.Shuffled(1.0, 600, 4), 1e-6, adjacency=Adjacency.REPLACE_ONE
        ),
        rel=1e-9,
    )
    assert "the mix net of the city" in made.report["setting"]["trusted"]
    assert "the devices of others, to randomise theirs" in made.report["setting"]["trusted"]
    assert "Provided that: the shuffler, the mix net of the city" in made.report["statement"]
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
    with pytest.raises(InvalidInput, match="must be at least 600"):
        collect(claim, rows[:599], tmp_path / "few")
    assert not (tmp_path / "few").exists()
    with pytest.raises(InvalidInput, match="shuffler"):
        ShuffledClaim("colour", KARY, shuffler="", records=600, delta=1e-6)
    with pytest.raises(Unsupported, match="Rappor behind a shuffler"):
        ShuffledClaim("colour", MADE["rappor"], shuffler="mix", records=600, delta=1e-6)
    with pytest.raises(InvalidInput, match="that somebody reports is seen"):
        LocalClaim("colour", KARY, adjacency=Adjacency.ADD_OR_REMOVE_ONE)
    simulated = ShuffledClaim("colour", KARY, True, shuffler="mix", records=600, delta=1e-6)
    assert (
        simulate(simulated, VALUES, tmp_path / "simulated").report["guarantee"]["trust"]
        == "central"
    )


def test_a_device_bills_every_report_before_it_is_made(tmp_path):
    device = Device(tmp_path, RenyiFilter(epsilon=2.5, delta=1e-9))
    assert isinstance(device.report(KARY, 2).answer, np.integer)
    device.report(MADE["unary-encoding"], 1, "fruit")
    assert device.guarantee().epsilon(0.0) == pytest.approx(2.0, rel=1e-9)
    assert "nobody trusted but the owner" in device.guarantee().sentence(
        0.0, "Reports", "all reports"
    )
    with pytest.raises(BudgetExceeded):
        device.report(KARY, 2)
    with pytest.raises(InvalidInput):
        Device(tmp_path / "fresh").report(KARY, "red")  # before anything is billed
    assert Device(tmp_path / "fresh").guarantee().epsilon(0.0) == 0
    assert len(Ledger.read(tmp_path / "ledger.jsonl").permits()) == 2


def test_a_permanent_answer_is_kept_and_billed_once(tmp_path):
    protocol = frequencies.Rappor(3.0, 64, once=2.9)
    device = Device(tmp_path)
    rows = np.array(
        [device.report(protocol, value, "colour").answer for value in (5, 5, 5, 60, 60)]
    )
    kept = json.loads((tmp_path / "permanent.json").read_text())["colour"]["row"]
    row = np.array([bit == "1" for bit in kept])
    assert stat.S_IMODE((tmp_path / "permanent.json").stat().st_mode) == 0o600
    flip = float(protocol.flips[1])
    assert (
        (rows != row).mean(axis=1) < flip + 5 * np.sqrt(flip / 64)
    ).all()  # every report is of the kept row, whatever the value
    assert device.guarantee().epsilon(0.0) == pytest.approx(3.0, rel=1e-9)
    Device(tmp_path).report(protocol, 5, "colour")
    assert len(Ledger.read(tmp_path / "ledger.jsonl").permits()) == 1
    with pytest.raises(InvalidInput, match="name another collection"):
        device.report(frequencies.Rappor(4.0, 64, once=1.0), 5, "colour")
    (tmp_path / "permanent.json").unlink()  # lost: another answer, another bill
    device.report(protocol, 5, "colour")
    assert device.guarantee().epsilon(0.0) == pytest.approx(6.0, rel=1e-9)
    (tmp_path / "permanent.json").write_text('{"colour": {"row": "01x"}}')
    with pytest.raises(Corrupt, match="permanent answers"):
        device.report(protocol, 5, "colour")
