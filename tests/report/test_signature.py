"""Who answers for a run, and what a witness saw: signatures, and published heads of a ledger."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from dpfy.cli import app as command
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.report import signature
from dpfy.report.verify import verify

sys.path.insert(0, str(Path(__file__).parent))
import forge

import runs


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made("dp-sgd"), tmp_path / "run")


@pytest.fixture
def key(tmp_path):
    signature.new_key(tmp_path / "key.pem")
    return tmp_path / "key.pem"


def public(key):
    return key.with_name(key.name + ".pub")


def failing(run, **options):
    return {f.what: f.detail for f in verify(run, **options) if not f.holds}


def call(capsys, *arguments):
    """Exit status, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as ended:
        command.main([str(a) for a in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_a_key_is_made_for_its_owner_alone_and_never_overwritten(tmp_path):
    old = os.umask(0)
    try:
        made = signature.new_key(tmp_path / "key.pem")
    finally:
        os.umask(old)
    assert made == tmp_path / "key.pem.pub"
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(InvalidInput, match="never overwritten"):
        signature.new_key(tmp_path / "key.pem")
    (tmp_path / "other.pem.pub").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="never overwritten"):
        signature.new_key(tmp_path / "other.pem")
    with pytest.raises(InvalidInput, match="--new-key"):
        signature.new_key(tmp_path / "no" / "such" / "folder")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name in before} == before
    assert not (tmp_path / "other.pem").exists()


def test_a_signed_run_is_verified_with_its_key_and_with_no_other(run, key, tmp_path):
    assert "no signature" in failing(run, keys=[public(key)])["signed by the keys given"]
    signature.sign_run(run, key)
    assert failing(run) == {}
    assert failing(run, keys=[public(key)]) == {}
    other = signature.new_key(tmp_path / "other.pem")
    assert "no signature by other.pem.pub" in failing(run, keys=[other])["signed by the keys given"]
    assert (
        "no signature by other.pem.pub"
        in failing(run, keys=[public(key), other])["signed by the keys given"]
    )
    signature.sign_run(run, tmp_path / "other.pem")
    assert failing(run, keys=[public(key), other]) == {}


def test_a_full_rewrite_verifies_without_a_key_and_not_with_one(run, key, tmp_path):
    """What nobody signed, anybody can make: another run in the same folder is consistent, but it is
    not the one that was signed.
    """
    signature.sign_run(run, key)
    signed = (run / signature.NAME).read_bytes()
    other = runs.fit(tmp_path / "other", runs.plain_plan(20.0))
    assert failing(other) == {}
    (other / signature.NAME).write_bytes(signed)
    assert "another report" in failing(other, keys=[public(key)])["signed by the keys given"]
    assert "another report" in failing(other)["signature"]


def test_a_fact_changed_with_the_chain_made_anew_is_found_by_the_key(run, key):
    signature.sign_run(run, key)
    card = forge.card_of(run)
    card["sections"][0]["utility"]["test_accuracy"] = 0.999
    forge.conform(run, card)
    assert set(failing(run)) == {"pages say what the report says", "signature"}
    assert set(failing(run, keys=[public(key)])) == {
        "pages say what the report says",
        "signed by the keys given",
    }


def test_every_flipped_byte_of_a_signature_is_found(run, key):
    signature.sign_run(run, key)
    whole = (run / signature.NAME).read_bytes()
    for place in range(0, len(whole), 3):
        (run / signature.NAME).write_bytes(
            whole[:place] + bytes([whole[place] ^ 0x01]) + whole[place + 1 :]
        )
        assert "signed by the keys given" in failing(run, keys=[public(key)]), place
    for damage in (
        b"",
        b"[]",
        b"{}",
        b"[" * 5000,
        whole.replace(b'"signature":"', b'"signature":"zz'),
        b"\x00" * 70000,
    ):
        (run / signature.NAME).write_bytes(damage)
        assert signature.NAME in failing(run)["signature"]


def test_an_audit_attached_later_must_be_signed_again(run, key):
    signature.sign_run(run, key)
    (run / "audit.json").write_text('{"epsilon_lower": 0.01}')
    Ledger.read(run / "ledger.jsonl").attach(["audit.json"])
    assert "sign again" in failing(run, keys=[public(key)])["signed by the keys given"]
    signature.sign_run(run, key)
    assert failing(run, keys=[public(key)]) == {}


def test_keys_that_are_none_are_refused(run, key, tmp_path):
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

    with pytest.raises(InvalidInput, match="public Ed25519"):
        verify(run, keys=[key])
    public(key).chmod(0o600)
    with pytest.raises(InvalidInput, match="private Ed25519"):
        signature.sign_run(run, public(key))
    with pytest.raises(InvalidInput, match=r"--key: .* does not exist"):
        signature.sign_run(run, tmp_path / "nowhere")
    foreign = tmp_path / "ec.pem"
    content = generate_private_key(SECP256R1()).private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    )
    foreign.write_bytes(content)
    foreign.chmod(0o600)
    with pytest.raises(InvalidInput, match="private Ed25519"):
        signature.sign_run(run, foreign)
    key.chmod(0o644)
    with pytest.raises(InvalidInput, match="others than its owner"):
        signature.sign_run(run, key)
    assert not (run / signature.NAME).exists()


def test_a_later_ledger_extends_a_published_head(run, key, tmp_path):
    people = tmp_path / "people.jsonl"
    from dpfy.core.events import Gaussian

    ledger = Ledger.open(people)
    ledger.reserve("first", Gaussian(2.0))
    head = signature.sign_head(people, key)
    signature.write_new(tmp_path / "head.json", head)
    ledger.reserve("second", Gaussian(2.0))
    for seen in (head.head, str(tmp_path / "head.json")):
        assert failing(people, head=seen) == {}
    assert failing(people, head=str(tmp_path / "head.json"), keys=[public(key)]) == {}
    assert "missing" in failing(people, keys=[public(key)])["signed by the keys given"]
    forge.rechain(people, lambda bodies: bodies[1].update(uses=2))
    assert "exchanged" in failing(people, head=head.head)["ledger extends the published head"]
    (tmp_path / "head.json").write_text(
        (tmp_path / "head.json").read_text().replace(head.head, "0" * 64)
    )
    assert "not valid" in failing(people, head=str(tmp_path / "head.json"))["signature"]
    for wrong in ("0" * 63, "nothing", "G" * 64):
        with pytest.raises(InvalidInput, match="--head"):
            verify(people, head=wrong)


def test_a_head_published_during_the_run_holds_after_it(tmp_path):
    """A witness saw the reservation: another run cannot take its place."""
    seen = []
    place = tmp_path / "run"
    runs._loop(
        place,
        before=lambda training: seen.append(signature.sign_head(place / "ledger.jsonl", None).head),
    )
    assert failing(place, head=seen[0]) == {}
    other = runs.dpsgd(tmp_path / "other")
    assert "ledger extends the published head" in failing(other, head=seen[0])


def test_a_card_alone_takes_no_key(run, key):
    for options in ({"keys": [public(key)]}, {"head": "0" * 64}):
        with pytest.raises(InvalidInput, match="give the run folder"):
            verify(run / "privacy.json", **options)


def test_the_command_line(run, tmp_path, capsys):
    code, out, _ = call(capsys, "sign", "--new-key", tmp_path / "me.pem", "--json")
    assert code == 0
    assert json.loads(out) == {
        "private": str(tmp_path / "me.pem"),
        "public": str(tmp_path / "me.pem.pub"),
    }
    code, out, _ = call(capsys, "sign", run, "--key", tmp_path / "me.pem", "--json")
    assert code == 0
    assert json.loads(out)["signed"] is True
    code, out, _ = call(capsys, "verify", run, "--key", tmp_path / "me.pem.pub", "--json")
    assert (code, json.loads(out)["verified"]) == (0, True)
    code, out, _ = call(
        capsys,
        "sign",
        "--head",
        run / "ledger.jsonl",
        "--key",
        tmp_path / "me.pem",
        "--out",
        tmp_path / "h.json",
        "--json",
    )
    assert code == 0
    head = json.loads(out)["head"]
    assert call(capsys, "verify", run, "--head", head, "--json")[0] == 0
    assert (
        call(
            capsys, "verify", run, "--head", tmp_path / "h.json", "--key", tmp_path / "me.pem.pub"
        )[0]
        == 0
    )
    assert call(capsys, "verify", run, "--head", "0" * 64)[0] == 1
    assert call(capsys, "verify", run / "ledger.jsonl", "--head", head)[0] == 0
    (run / "model.safetensors").write_bytes(b"another")
    code, out, _ = call(capsys, "sign", run, "--key", tmp_path / "me.pem", "--json")
    assert (code, json.loads(out)["signed"]) == (1, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sign",), ("sign", "RUN"), ("sign", "RUN", "--new-key", "x"), ("sign", "--head", "nowhere.jsonl"),
        ("sign", "nowhere", "--key", "k"),
        ("sign", "RUN", "--key", "nowhere.pem"), ("sign", "RUN", "--key", "RUN"), ("sign", "RUN", "--key", "k", "--out", "x"),  # noqa: E501
        ("sign", "--new-key", "RUN"), ("sign", "--new-key", "/dev/full"), ("sign", "--head", "RUN/privacy.json"),
        ("verify", "RUN", "--key", "nowhere.pem"), ("verify", "RUN", "--key", "/dev/zero"), ("verify", "RUN", "--head", "x"),  # noqa: E501
        ("verify", "nowhere"), ("verify", "RUN/privacy.json", "--head", "0" * 64), ("sign", "--head", "RUN/ledger.jsonl", "--out", "RUN"),  # noqa: E501
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(run, capsys, arguments):
    before = sorted(p.name for p in run.iterdir())
    given = [a.replace("RUN", str(run)) for a in arguments]
    code, out, err = call(capsys, *given)
    assert (code, out) == (2, "")
    assert err.startswith("dpfy: ")
    assert err.count("\n") == 1
    code, out, _ = call(capsys, *given, "--json")
    assert code == 2
    assert "error" in json.loads(out)
    assert sorted(p.name for p in run.iterdir()) == before


def test_a_signature_of_a_head_is_none_of_a_run(run, key):
    """The statement says what it is about."""
    signed = signature.sign_head(run / "ledger.jsonl", key)
    (run / signature.NAME).write_bytes(signed.render())
    assert "form dpfy-run-1" in failing(run)["signature"]
    with pytest.raises(Corrupt, match="form dpfy-run-1"):
        signature.sign_run(run, key)
