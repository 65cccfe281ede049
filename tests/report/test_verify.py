"""Verification catches every edit: one changed byte, one removed line, one exchanged file, one
edited claim.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.report import recompute
from dpfy.report.verify import verify
from dpfy.training import TrainingRun

sys.path.insert(0, str(Path(__file__).parent))
import forge
import forgeries


def make_run(path, noise=2.0, batch=20):
    torch.manual_seed(0)
    x, y = torch.randn(100, 4), torch.randint(0, 2, (100,))
    net = nn.Linear(4, 2)
    plan = dpfy.dpsgd(100, batch, steps=5).with_noise(noise, delta=1e-3)
    dpfy.fit(
        net,
        (x, y),
        plan=plan,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        run=path,
        evaluation=dpfy.PublicTest((x + 1, y)),
    )
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


@pytest.mark.parametrize(
    "name", ["plan.json", "metrics.jsonl", "model.safetensors", "ledger.jsonl"]
)
def test_a_missing_file_is_found_and_named(run, name):
    (run / name).unlink()
    assert any(name in f.what + f.detail for f in failed(run))


def edit(run, path, value, *, chain=False):
    """An edit by someone who knows the format: the digest is made anew, and with `chain` the
    ledger's end as well.
    """
    card = forge.card_of(run)
    forge.put(card, path, value)
    (forge.conform if chain else forge.reseal)(run, card)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("guarantee", "epsilon"), 0.5, "guarantee.epsilon"),
        (("guarantee", "unit"), "user", "guarantee.unit"),
        (("guarantee", "adjacency"), "replace-one", "guarantee.adjacency"),
        (("guarantee", "delta"), 1e-9, "guarantee.delta"),
        (("sections", 0, "mechanism", "steps"), 1, "mechanism.steps"),
        (("statement",), "Training is perfectly private.", "statement"),
        (("sections", 0, "claim", "plan", "noise_multiplier"), 20.0, "plan"),
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
        (
            ("accounting", "without_amplification", "epsilon"),
            1.0,
            "accounting.without_amplification.epsilon",
        ),
        (("accounting", "assumptions", 0, "holds"), "nearly", "accounting.assumptions.0.holds"),
        (("sections", 0, "assumptions", 0, "holds"), "nearly", "sections.0.assumptions.0.holds"),
        (("sections", 0, "purpose"), "audit", "sections.0.purpose"),
        (("boundary", "name"), "B5", "boundary.name"),
        (("deployments", "rows", 0, "epsilon"), "1200", "deployments.rows.0.epsilon"),
        (("accesses", "covered", 0, "epsilon"), 0.1, "accesses.covered.0.epsilon"),
        (("sections", 0, "mechanism", "records"), 7, "mechanism.records"),
        (("sections", 0, "mechanism", "expected_batch"), 99.0, "mechanism.expected_batch"),
        (("warnings",), [], "warnings"),
        (("setting", "model"), "local", "setting.model"),
        (("setting", "trusted"), "Nobody must be trusted.", "setting.trusted"),
    ],
    ids=lambda v: ".".join(map(str, v)) if isinstance(v, tuple) else None,
)
@pytest.mark.parametrize("alone", [False, True], ids=["run", "card"])
def test_every_derived_field_is_derived_again(run, path, value, named, alone):
    edit(run, path, value, chain=True)
    assert any(
        named in f.what + f.detail for f in failed(run / "privacy.json" if alone else run)
    ), failed(run)


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
    """Wording may change from version to version, the numbers in a sentence may not."""
    forgeries.edited((("tier", "why"), lambda text: f"In other words: {text}"), version="0.0.1")(
        run
    )
    assert failed(run) == []
    edit(run, ("tier", "why"), "In other words.", chain=True)
    assert any("tier.why" in f.detail for f in failed(run))
    edit(run, ("formal", "training", "epsilon"), 0.25, chain=True)
    assert any("formal.training.epsilon" in f.detail for f in failed(run))


def test_a_removed_last_line_is_found(run):
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:-1]))
    assert any("are lost" in f.detail for f in failed(run))
    (run / "ledger.jsonl.head").unlink()
    assert any("does not say that the run ended" in f.detail for f in failed(run))


@pytest.mark.parametrize("name", ["privacy.json", "model.safetensors", "ledger.jsonl"])
def test_a_file_of_another_run_is_found(run, tmp_path, name):
    other = make_run(tmp_path / "other", noise=20.0)
    shutil.copy(other / name, run / name)
    assert failed(run)


def test_left_over_secrets_are_found(run):
    (run / "checkpoint").mkdir()
    assert any("secrets" in f.what for f in failed(run))


def test_what_is_no_run(tmp_path):
    with pytest.raises(InvalidInput, match="is not a folder, nor a report"):
        verify(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="holds no dpfy run"):
        verify(tmp_path)


def test_a_run_without_privacy_says_so(tmp_path):
    path = make_run(tmp_path / "plain", noise=0.0)
    card = json.loads((path / "privacy.json").read_text())
    assert card["guarantee"]["epsilon"] == "infinity"
    assert "NO differential privacy" in card["statement"]
    assert failed(path) == []


def failing(run):
    return {f.what: f.detail for f in failed(run)}


CLAIM = "report and plan state what the ledger reserves"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("delta",), 1.9e-3),
        (("recipe", "records"), 50_000),
        (("recipe", "clip", "norm"), 7.0),
        (("accountant",), "rdp"),
        (("recipe", "unit", "name"), "user"),
        (("recipe", "steps"), 1),
    ],
    ids=lambda v: ".".join(v) if isinstance(v, tuple) else None,
)
def test_the_plan_of_card_and_folder_is_the_one_reserved(run, path, value):
    """With plan.json, card, and every hash in card and ledger's end changed alike, what was
    reserved before the run tells.
    """
    plan, card = json.loads((run / "plan.json").read_text()), forge.card_of(run)
    forge.put(plan, path, value)
    (run / "plan.json").write_text(json.dumps(plan, indent=1, sort_keys=True) + "\n")
    forge.put(card, ("sections", 0, "claim", "plan"), plan)
    forge.conform(run, card)
    assert ".".join(path) in failing(run)[CLAIM]


def test_with_the_ledger_untouched_no_fact_can_be_changed(run):
    """Utility, caveats, provenance, optimizer: what only the run knows is in the card, and the
    ledger holds its hash.
    """
    ledger = (run / "ledger.jsonl").read_bytes()
    for path, value in (
        (("sections", 0, "utility", "test_accuracy"), 0.99), (("caveats",), ["none"]), (("provenance", "engine"), "magic"),  # noqa: E501
        (("sections", 0, "steps_done"), 4),
        (("sections", 0, "optimizer", "learning_rate"), 3.0),
        (("sections", 0, "components", "checked"), "everything"),
    ):  # fmt: skip
        whole = (run / "privacy.json").read_bytes()
        edit(run, path, value)
        assert (
            "privacy.json is not the report" in failing(run)["ledger and report belong together"]
        ), path
        (run / "privacy.json").write_bytes(whole)
    assert (run / "ledger.jsonl").read_bytes() == ledger
    assert failed(run) == []


def test_the_caveat_of_a_fixed_seed_cannot_be_removed(tmp_path):
    run = make_run(dpfy.Run(tmp_path / "run", seed=3)).path
    card = forge.card_of(run)
    assert failed(run) == []
    forge.conform(run, card | {"caveats": []})
    assert "caveats" in failing(run)[CLAIM]
    seeded = card["provenance"] | {
        "seed": "256 bits of operating system entropy, erased at the end of the run"
    }
    forge.conform(run, card | {"caveats": [], "provenance": seeded})
    assert "provenance.seed" in failing(run)[CLAIM]


def test_another_model_with_a_second_end_is_found(run):
    import hashlib

    (run / "model.safetensors").write_bytes(b"another model")
    second = forge.bodies_of(run / "ledger.jsonl")[-1]
    second["files"] |= {"model.safetensors": hashlib.sha256(b"another model").hexdigest()}
    forge.rechain(run / "ledger.jsonl", lambda bodies: bodies.append(second))
    assert "may follow the end" in failing(run)["ledger.jsonl"]


def test_a_void_after_the_beginning_is_found(run):
    def void(bodies):
        entry = next(b["entry"] for b in bodies if b["type"] == "begun")
        bodies.insert(-1, {"type": "void", "entry": entry, "reason": "nothing was released"})

    forge.rechain(run / "ledger.jsonl", void)
    assert "has started" in failing(run)["ledger.jsonl"]


def test_through_the_interface_nothing_of_a_finished_run_can_be_taken_back(tmp_path):
    """Neither its reservation in either ledger, nor its tuning; and no note makes it cheaper."""
    from dpfy.core.events import Gaussian

    people = tmp_path / "people.jsonl"
    run = make_run(dpfy.Run(tmp_path / "run", ledger=people)).path
    tuned = Ledger.read(people).reserve("tuning", Gaussian(3.0))
    for file in (people, run / "ledger.jsonl"):
        ledger = Ledger.read(file)
        before = ledger.event()
        for permit in [*ledger.permits(), *([tuned] if file == people else [])]:
            with pytest.raises(InvalidInput):
                ledger.void(permit, "it never happened")
        assert Ledger.read(file).event() == before
    with pytest.raises(InvalidInput):
        Ledger.read(run / "ledger.jsonl").note("sampling", done="read in order", most=1)
    assert failed(run) == []


@pytest.mark.parametrize("share", [0.99, 0.999, 1.01])
def test_an_epsilon_slightly_off_is_found(run, share):
    card = forge.card_of(run)
    card["guarantee"]["epsilon"] *= share
    forge.conform(run, card)
    assert "guarantee.epsilon" in failing(run)["every number recomputed from the ledger"]


def test_the_adjacency_of_ledger_and_plan_is_compared(run):
    forge.conform(run, forge.card_of(run), lambda bodies: bodies[0].update(adjacency="zero-out"))
    assert "adjacency" in failing(run)[CLAIM]
    forge.conform(
        run, forge.card_of(run), lambda bodies: bodies[0].update(adjacency="add-or-remove-one")
    )
    assert failed(run) == []
    forge.conform(
        run,
        forge.card_of(run),
        lambda bodies: bodies[0].update(unit={"name": "user", "most_records": 1}),
    )
    assert "unit" in failing(run)[CLAIM]


def test_the_second_opinion_is_compared_the_right_way_round():
    """RDP bounds a tight claim from above; PLD bounds a looser claim from below."""
    for accountant, name, stated, second, wrong in [
        ("tight", "rdp", 3.0, 2.9, True), ("tight", "rdp", 3.0, 3.1, False), ("pld", "rdp", 3.0, 2.9, True),
        ("rdp", "pld", 3.0, 3.1, True), ("rdp", "pld", 3.0, 2.9, False), ("rdp", "rdp", 3.0, 3.3, True), ("rdp", "rdp", 3.0, 2.0, False),  # noqa: E501
    ]:  # fmt: skip
        assert recompute._contradicts(accountant, name, stated, second) is wrong, (
            accountant,
            name,
            stated,
            second,
        )


def test_a_claim_that_a_second_accountant_contradicts_fails(run, monkeypatch):
    """If the tight accountant were wrong: twice the epsilon of RDP."""
    card = forge.card_of(run)
    card["guarantee"]["epsilon"] *= 2
    forge.conform(run, card)
    assert "rdp gives" in failing(run)["second accountant agrees"]


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_changed_line_ends_of_a_page_are_found(run, name):
    page = (run / name).read_bytes()
    (run / name).write_bytes(page.replace(b"\n", b"\r\n"))
    assert any(name in f.detail for f in failed(run))


@pytest.mark.parametrize(
    "name", ["report.html", "report.md", "config.toml", "metrics.jsonl", "plan.json"]
)
def test_a_flipped_byte_of_any_other_file_is_found(run, name):
    if not (run / name).exists():
        (run / name).write_bytes(b"added later\n")
        assert any(name in f.detail for f in failed(run))
        return
    whole = (run / name).read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        (run / name).write_bytes(whole[:place] + bytes([whole[place] ^ 0x04]) + whole[place + 1 :])
        assert any(name in f.detail for f in failed(run)), place


def test_an_audit_is_attached_and_cannot_be_changed_removed_or_slipped_in(run):
    for name, text in (
        ("audit.json", '{"epsilon_lower": 0.01}'),
        ("audit.svg", "<svg/>"),
        ("canaries.npz", "canaries"),
    ):
        (run / name).write_text(text)
        assert any(name in f.detail for f in failed(run))
        Ledger.read(run / "ledger.jsonl").attach([name])
        assert failed(run) == []
    for name in ("audit.json", "audit.svg", "canaries.npz"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole.replace(b"a", b"b").replace(b"0.01", b"0.02"))
        assert any(name in f.detail for f in failed(run)) or name == "audit.svg"
        (run / name).write_bytes(whole + b" ")
        assert any(name in f.detail for f in failed(run))
        (run / name).unlink()
        assert any(name in f.detail for f in failed(run))
        (run / name).write_bytes(whole)
    assert failed(run) == []


def test_batches_formed_elsewhere_are_billed_everywhere_and_never_less(tmp_path):
    """A bound on participation that would make the bill smaller is refused before anything is
    written.
    """
    from dpfy.plan.claim import ForeignBatches, unsampled

    people = tmp_path / "people.jsonl"
    with pytest.raises(InvalidInput, match=r"batches\.most"):
        make_run(
            TrainingRun(
                dpfy.Run(tmp_path / "cheap", ledger=people),
                dpfy.dpsgd(100, 90, steps=5).with_noise(0.5, delta=1e-3),
                batches=ForeignBatches("read in order", most=1),
            ),
            noise=0.5,
            batch=90,
        )
    assert not people.exists()
    assert not (tmp_path / "cheap").exists()
    plan = dpfy.dpsgd(100, 20, steps=5).with_noise(2.0, delta=1e-3)
    run = make_run(
        TrainingRun(
            dpfy.Run(tmp_path / "run", ledger=people),
            plan,
            batches=ForeignBatches("shuffled once", most=4),
        )
    )
    for file in (people, run.path / "ledger.jsonl"):
        assert [p.event for p in Ledger.read(file).permits()] == [unsampled(plan.event, 4)]
    assert failed(run.path) == []
    card = forge.card_of(run.path)
    assert card["guarantee"]["epsilon"] > plan.epsilon
    forge.put(card, ("sections", 0, "sampling_note"), {"done": "shuffled once", "most": 1})
    forge.conform(run.path, card)
    assert "sampling_note.most" in failing(run.path)["every number recomputed from the ledger"]


def test_a_second_reservation_of_the_same_name_is_billed_and_the_run_still_ends(tmp_path):
    import runs
    from dpfy.core.events import Gaussian

    runs._loop(
        tmp_path / "run",
        before=lambda training: training.folder.ledger.reserve("training", Gaussian(9.0)),
    )
    assert failed(tmp_path / "run") == []
    assert failed(tmp_path / "run" / "privacy.json") == []
    assert len(forge.card_of(tmp_path / "run")["accesses"]["covered"]) == 2


def test_the_end_is_that_of_the_training(run):
    def other(bodies):
        entry = "0" * 16
        bodies.insert(
            -1, {**bodies[1], "entry": entry, "name": "audit", "claim": {}, "returnable": False}
        )
        bodies[-1]["entry"] = entry

    forge.conform(run, forge.card_of(run), other)
    assert "something else ended" in failing(run)["ledger and report belong together"]


def test_the_bill_in_the_ledger_of_the_data_set_is_found_there(run, tmp_path):
    people = tmp_path / "people.jsonl"
    billed = make_run(dpfy.Run(tmp_path / "billed", ledger=people)).path
    other = make_run(dpfy.Run(tmp_path / "other", ledger=tmp_path / "others.jsonl")).path
    what = "charged in the ledger of the data set"

    def judged(place, ledger):
        return next(f for f in verify(place, ledger=ledger) if f.what == what)

    assert judged(billed, people).holds
    assert "names no entry" in judged(run, people).detail
    assert "does not hold the entry" in judged(other, people).detail
    forge.rechain(
        people, lambda bodies: bodies[1]["claim"]["claim"]["plan"].update(noise_multiplier=9.0)
    )
    assert "noise_multiplier" in judged(billed, people).detail
    forge.rechain(
        people, lambda bodies: bodies.__delitem__(slice(-2, None))
    )  # its end, and that it began
    assert "started" in judged(billed, people).detail
    assert not judged(billed, tmp_path / "nowhere.jsonl").holds
    with pytest.raises(InvalidInput, match="--ledger"):
        verify(billed / "privacy.json", ledger=people)


def test_the_end_in_the_ledger_of_the_data_set_is_that_of_this_card(tmp_path):
    people = tmp_path / "people.jsonl"
    run = make_run(dpfy.Run(tmp_path / "run", ledger=people)).path

    def judged():
        return next(
            f
            for f in verify(run, ledger=people)
            if f.what == "charged in the ledger of the data set"
        )

    assert judged().status == "ok"
    forge.rechain(people, lambda bodies: bodies[-1].update(card="0" * 64))
    assert not judged().holds
    assert "people.jsonl says that the run of entry" in judged().detail
    assert "ended with another report than privacy.json" in judged().detail
    forge.rechain(people, lambda bodies: bodies.pop())
    assert judged().status == "not checked"
    assert "does not say that the run ended" in judged().detail
