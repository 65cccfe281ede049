"""Verification catches every edit: one changed byte, one removed line, one exchanged file, one edited claim."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.codec import digest
from dpfy.core.errors import InvalidInput
from dpfy.report import card as cards
from dpfy.report.verify import verify


def make_run(path, noise=2.0):
    torch.manual_seed(0)
    x, y = torch.randn(100, 4), torch.randint(0, 2, (100,))
    net = nn.Linear(4, 2)
    plan = dpfy.dpsgd(100, 20, steps=5).with_noise(noise, delta=1e-3)
    dpfy.fit(net, (x, y), plan=plan, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), run=path, test=(x, y))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def failed(path):
    return [f for f in verify(path) if not f.holds]


def test_a_finished_run_is_verified(run):
    findings = verify(run)
    assert len(findings) >= 10
    assert failed(run) == []


@pytest.mark.parametrize("name", ["ledger.jsonl", "privacy.json", "model.safetensors"])
def test_any_flipped_byte_is_found_and_named(run, name):
    file = run / name
    whole = file.read_bytes()
    for place in sorted({*range(0, len(whole), max(1, len(whole) // 60)), len(whole) - 1}):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :])
        found = failed(run)
        assert found, (name, place)
        assert any(name in f.what + f.detail for f in found), (name, place, found)
    file.write_bytes(whole)
    assert failed(run) == []


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl", "model.safetensors", "ledger.jsonl"])
def test_a_missing_file_is_found_and_named(run, name):
    (run / name).unlink()
    assert any(name in f.what + f.detail for f in failed(run))


def edit(run, path, value):
    """An edit by someone who knows the format: the digest is made anew."""
    card = json.loads((run / "privacy.json").read_text())
    place = card
    for key in path[:-1]:
        place = place[key]
    assert place[path[-1]] != value
    place[path[-1]] = value
    del card["digest"]
    (run / "privacy.json").write_bytes(cards.render(card | {"digest": digest(card)}))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("guarantee", "epsilon"), 0.5, "guarantee.epsilon"),
        (("guarantee", "unit"), "user", "guarantee.unit"),
        (("guarantee", "adjacency"), "replace-one", "guarantee.adjacency"),
        (("guarantee", "delta"), 1e-9, "guarantee.delta"),
        (("mechanism", "steps"), 1, "mechanism.steps"),
        (("statement",), "Training is perfectly private.", "statement"),
        (("plan", "noise_multiplier"), 20.0, "plan"),
        (("ledger", "entries"), 2, "ledger"),
    ],
)
def test_an_edited_claim_is_found_though_the_digest_fits(run, path, value, named):
    edit(run, path, value)
    assert any(named in f.what + f.detail for f in failed(run))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("guarantee", "epsilon"), 0.5, "guarantee.epsilon"),
        (("guarantee", "epsilon_lower"), 0.1, "guarantee.epsilon_lower"),
        (("guarantee", "unit"), "user", "guarantee.unit"),
        (("guarantee", "trust"), "local", "guarantee.trust"),
        (("unit", "name"), "user", "unit"),
        (("adjacency", "name"), "replace-one", "adjacency"),
        (("formal", "training", "epsilon"), 0.5, "formal.training.epsilon"),
        (("formal", "zcdp", "rho"), 0.001, "formal.zcdp.rho"),
        (("formal", "gdp", "mu"), 0.001, "formal.gdp.mu"),
        (("formal", "curve", 0, "delta"), 0.0, "formal.curve.0.delta"),
        (("attacker", "guess_accuracy"), 0.5, "attacker.guess_accuracy"),
        (("attacker", "at", 1, "true_positive_rate"), 0.01, "attacker.at.1.true_positive_rate"),
        (("tier", "tier"), 3, "tier.tier"),
        (("delta", "share"), 0.5, "delta.share"),
        (("accounting", "without_amplification", "epsilon"), 1.0, "accounting.without_amplification.epsilon"),
        (("accounting", "assumptions", 0, "holds"), "nearly", "accounting.assumptions.0.holds"),
        (("accesses", "covered", 0, "epsilon"), 0.1, "accesses.covered.0.epsilon"),
        (("mechanism", "records"), 7, "mechanism.records"),
        (("mechanism", "expected_batch"), 99.0, "mechanism.expected_batch"),
        (("warnings",), [], "warnings"),
        (("setting", "model"), "local", "setting.model"),
    ],
    ids=lambda v: ".".join(map(str, v)) if isinstance(v, tuple) else None,
)
@pytest.mark.parametrize("alone", [False, True], ids=["run", "card"])
def test_every_derived_field_is_derived_again(run, path, value, named, alone):
    edit(run, path, value)
    assert any(named in f.what + f.detail for f in failed(run / "privacy.json" if alone else run)), failed(run)


def test_a_card_alone_is_checked_as_far_as_it_goes(run, tmp_path):
    card = shutil.copy(run / "privacy.json", tmp_path / "some-card.json")
    findings = verify(card)
    assert all(f.holds for f in findings)
    assert any("not checked" in f.what for f in findings)
    card.write_bytes(card.read_bytes().replace(b"example", b"company", 1))
    assert any("some-card.json" in f.what + f.detail for f in failed(card))


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_an_edited_page_is_found_and_a_missing_one_is_not_held_against_the_run(run, name):
    page = (run / name).read_text()
    (run / name).write_text(page.replace("example", "person", 1))
    assert any(name in f.detail for f in failed(run))
    (run / name).unlink()
    assert failed(run) == []


def test_a_card_of_another_version_is_held_to_its_numbers_not_its_words(run):
    """Wording may change from version to version."""
    edit(run, ("provenance", "dpfy"), "0.0.1")
    edit(run, ("tier", "why"), "In other words.")
    assert failed(run) == []
    edit(run, ("formal", "training", "epsilon"), 0.25)
    assert any("formal.training.epsilon" in f.detail for f in failed(run))


def test_a_removed_last_line_is_found(run):
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    assert any("ledger" in f.detail for f in failed(run))


@pytest.mark.parametrize("name", ["privacy.json", "model.safetensors", "ledger.jsonl"])
def test_a_file_of_another_run_is_found(run, tmp_path, name):
    other = make_run(tmp_path / "other", noise=20.0)
    shutil.copy(other / name, run / name)
    assert failed(run)


def test_left_over_secrets_are_found(run):
    (run / "checkpoint").mkdir()
    assert any("secrets" in f.what for f in failed(run))


def test_what_is_no_run(tmp_path):
    with pytest.raises(InvalidInput, match="is not a folder, nor a card"):
        verify(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="holds no dpfy run"):
        verify(tmp_path)


def test_a_run_without_privacy_says_so(tmp_path):
    path = make_run(tmp_path / "plain", noise=0.0)
    card = json.loads((path / "privacy.json").read_text())
    assert card["guarantee"]["epsilon"] == "infinity"
    assert "NO differential privacy" in card["statement"]
    assert failed(path) == []
