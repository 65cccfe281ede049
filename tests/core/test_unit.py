"""What a unit protects is a field of its own, not a name; what came later is left out of JSON while
it says nothing.
"""

from __future__ import annotations

import json

import pytest

import dpfy
from dpfy.core.codec import Codec
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.unit import PROTECTS, Unit
from dpfy.plan.recipe import Plan


@pytest.mark.parametrize(
    "unit",
    [
        Unit("label", protects="label"),
        Unit("label"),
        Unit(" Labels "),
        Unit(protects="prediction"),
        Unit("prediction"),
    ],
)
def test_plain_dp_sgd_cannot_call_itself_label_private(unit):
    recipe = dpfy.dpsgd(1000, 100, steps=3, unit=unit)
    for plan in (lambda: recipe.calibrate(3.0, 1e-5), lambda: recipe.with_noise(1.0, delta=1e-5)):
        with pytest.raises(Unsupported, match="call the unit an example"):
            plan()


@pytest.mark.parametrize("covered", ["label", "prediction"])
def test_nor_can_a_plan_that_was_typed_or_read(covered):
    typed = dpfy.dpsgd(1000, 100, steps=3, unit=Unit("person", protects=covered))
    with pytest.raises(Unsupported, match="call the unit an example"):
        Plan(typed, 1.0, 1e-5)
    told = dpfy.dpsgd(1000, 100, steps=3, unit=Unit("person")).with_noise(1.0, delta=1e-5).to_json()
    told["recipe"]["unit"]["protects"] = covered
    with pytest.raises(Unsupported, match="call the unit an example"):
        Plan.from_json(told)


@pytest.mark.parametrize(
    "unit",
    [
        Unit(),
        Unit("user", 4),
        Unit("user", 4, protects="user"),
        Unit("day", 9, protects="window"),
        Unit(tokens=64),
    ],
)
def test_json_goes_both_ways(unit):
    codec = Codec("unit", {"unit": Unit})
    assert codec.decode(json.loads(json.dumps(codec.encode(unit)))) == unit
    assert Unit(**unit.to_json()) == unit
    plan = dpfy.dpsgd(1000, 100, steps=3, unit=unit).with_noise(1.0, delta=1e-5)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_units_of_earlier_versions_are_written_as_they_were():
    assert Unit("user", 4).to_json() == {"name": "user", "most_records": 4}
    assert Codec("unit", {"unit": Unit}).encode(Unit()) == {
        "kind": "unit",
        "name": "example",
        "most_records": 1,
    }
    assert Codec("unit", {"unit": Unit}).decode(
        {"kind": "unit", "name": "user", "most_records": 4}
    ) == Unit("user", 4)


def test_what_a_unit_may_not_be():
    for wrong in ({"protects": "everything"}, {"tokens": 0}, {"tokens": True}, {"most_records": 0}):
        with pytest.raises(InvalidInput, match="unit"):
            Unit(**wrong)
    assert set(PROTECTS) == {"record", "label", "prediction", "user", "window", "content"}


def test_the_card_tells_the_length_of_a_text(tmp_path):
    import torch

    plan = dpfy.dpsgd(100, 20, steps=2, unit=Unit(tokens=64)).with_noise(2.0, delta=1e-3)
    net, data = torch.nn.Linear(4, 2), (torch.randn(100, 4), torch.randint(0, 2, (100,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    public = ({"data": "CIFAR-10", "used_for": "pretraining", "provenance": "published 2009"},)
    dpfy.fit(
        net,
        data,
        plan=plan,
        optimizer=optimizer,
        run=dpfy.Run(tmp_path / "run", public_data=public),
    )
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["unit"]["tokens"] == 64
    assert "at most 64 tokens" in card["unit"]["meaning"]
    assert card["public_data"] == list(public)
    for page in ("report.html", "report.md"):
        assert "CIFAR" in (tmp_path / "run" / page).read_text()
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert all(f.holds for f in dpfy.verify(tmp_path / "run" / "privacy.json"))
    with pytest.raises(InvalidInput, match="public_data"):
        dpfy.Run(tmp_path / "x", public_data=({"data": "x", "used_for": "y"},))
