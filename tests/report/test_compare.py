"""Runs side by side: ranked where their claims are the same kind, refused with a reason where
not.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.report import compare

sys.path.insert(0, str(Path(__file__).parent))
import runs


def test_claims_of_one_kind_are_ranked(made, tmp_path):
    noisy = runs.fit(tmp_path / "noisy", runs.plain_plan(8.0))
    found = compare.compare([made("dp-sgd"), noisy, made("no-privacy")])
    assert found.ranked
    assert [row["run"] for row in found.rows] == ["noisy", "dp-sgd", "no-privacy"]
    assert found.reasons == []
    text = compare.text(found)
    assert "the strongest guarantee first" in text
    assert text.index("noisy") < text.index("dp-sgd")


def test_example_level_and_user_level_are_not_ranked(made):
    found = compare.compare([made("user-level"), made("dp-sgd")])
    assert not found.ranked
    assert [row["run"] for row in found.rows] == [
        "user-level",
        "dp-sgd",
    ]  # the order given, no order of merit
    assert any(
        reason["what"] == "unit" and "user" in reason["why"] and "example" in reason["why"]
        for reason in found.reasons
    )
    text = compare.text(found)
    assert "NOT RANKED: unit differs" in text
    assert "how to convert" in text
    assert "cannot be ranked" in compare.page(found)


def test_different_adjacencies_are_not_ranked(made):
    found = compare.compare([made("replace-one"), made("dp-sgd")])
    assert not found.ranked
    assert [reason["what"] for reason in found.reasons] == ["adjacency"]
    assert "(2e, (1 + exp(e)) d)" in found.reasons[0]["convert"]


def test_different_deltas_are_read_at_the_smaller(made, tmp_path):
    import dpfy

    plan = dpfy.dpsgd(runs.RECORDS, 30, steps=runs.STEPS).with_noise(2.0, delta=1e-5)
    strict = runs.fit(tmp_path / "strict", plan)
    found = compare.compare([made("dp-sgd"), strict])
    assert found.ranked
    assert found.delta == 1e-5
    first, second = found.rows
    assert first["epsilon_at_common_delta"] == pytest.approx(
        second["epsilon_at_common_delta"], rel=1e-6
    )  # the same mechanism
    assert any("deltas differ" in note for note in found.notes)


def test_what_is_covered_is_a_note(made):
    found = compare.compare([made("tuned"), made("dp-sgd")])
    assert found.ranked
    assert any("what is covered differs" in note for note in found.notes)


def test_bad_input_is_refused(made, tmp_path):
    with pytest.raises(InvalidInput, match="at least two"):
        compare.compare([made("dp-sgd")])
    with pytest.raises(InvalidInput, match=r"holds no privacy\.json"):
        compare.compare([made("dp-sgd"), tmp_path])
    edited = shutil.copytree(made("dp-sgd"), tmp_path / "edited")
    card = edited / "privacy.json"
    card.write_text(
        card.read_text().replace('"tier": 2', '"tier": 1').replace('"tier": 1', '"tier": 3')
    )
    with pytest.raises(Corrupt, match=r"edited: privacy\.json"):
        compare.compare([made("dp-sgd"), edited])


def test_links_in_circles_are_no_runs(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InvalidInput):
        compare.compare([tmp_path / "loop", tmp_path / "loop"])
