"""Damaged and hostile files of a run: every one is a check that fails or one line, never a
traceback, never "verified".
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest

from dpfy.cli import app as command
from dpfy.core.errors import Corrupt, DpfyError
from dpfy.core.ledger import Ledger
from dpfy.report import compare, signature
from dpfy.report.verify import verify
from dpfy.training.run import load_plan

sys.path.insert(0, str(Path(__file__).parent))
import forge

FILES = (
    "privacy.json",
    "ledger.jsonl",
    "ledger.jsonl.head",
    "plan.json",
    "metrics.jsonl",
    "audit.json",
    "signature.json",
    "report.md",
)
DEEP = json.loads("[" * 400 + "]" * 400)
VALUES = (
    None, True, False, -1, 0, 3, 2.5, 1e308, -1e308, 1e-320, 2**63, 10**300, "", "infinity", "\x1b[2J\x1b[32mok", "a\nok all: verified",  # noqa: E501
    "\u202e", [], {}, [[]], {"kind": "gaussian"}, {"kind": "float", "value": "nan"}, {"absent": "why"}, DEEP, "0" * 64, "0" * 16,  # noqa: E501
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """A signed run with an audit."""
    home = tmp_path_factory.mktemp("damage")
    run = shutil.copytree(made("dp-sgd"), home / "run")
    (run / "audit.json").write_text(
        '{"epsilon_lower": 0.01, "points": [{"false_positive_rate": 0.1, "true_positive_rate": '
        "0.2}]}"
    )
    Ledger.read(run / "ledger.jsonl").attach(["audit.json"])
    signature.new_key(home / "key.pem")
    signature.sign_run(run, home / "key.pem")
    assert all(f.holds for f in verify(run))
    return run


def scratch(content: bytes, dice: random.Random) -> bytes:
    """Damage that knows no format."""
    place = dice.randrange(len(content) + 1)
    part = dice.choice(
        [
            b"\x00",
            b"\xff\xfe",
            b"[" * 3000,
            b"{",
            b"NaN",
            b"1e999",
            b"9" * 5000,
            b"\r\n",
            b"\xed\xa0\x80",
            b'"',
        ]
    )
    return dice.choice(
        [
            content[:place], content[:place] + part + content[place:], content[:place] + part + content[place + len(part) :], content * 2,  # noqa: E501
            part, b"", content[:place] + content[place + 1 :], content.replace(b"0", part, 1), content.replace(b":", b":" + part, 2),  # noqa: E501
        ]
    )  # fmt: skip


def mutate(tree, dice: random.Random):
    """One value of a JSON tree replaced, dropped or doubled."""
    places = []

    def collect(node):
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(part, (dict, list)) and part is not DEEP:
                collect(part)

    collect(tree)
    node, key = dice.choice(places)
    if dice.random() < 0.15:
        del node[key]
    elif dice.random() < 0.05 and isinstance(node, list):
        node.append(node[key])
    else:
        node[key] = dice.choice(VALUES)


def damaged_card(run: Path, dice: random.Random) -> None:
    card = forge.card_of(run)
    mutate(card, dice)
    dice.choice([forge.reseal, forge.conform])(run, card)


def damaged_ledger(run: Path, dice: random.Random) -> None:
    bodies = forge.bodies_of(run / "ledger.jsonl")
    mutate(bodies, dice)
    forge.write_chain(
        run / "ledger.jsonl",
        [body if isinstance(body, dict) else {"type": body} for body in bodies],
    )


def damaged_plan(run: Path, dice: random.Random) -> None:
    plan = json.loads((run / "plan.json").read_text())
    mutate(plan, dice)
    (run / "plan.json").write_text(json.dumps(plan))
    bodies, card = forge.bodies_of(run / "ledger.jsonl"), forge.card_of(run)
    if dice.random() < 0.5:  # everywhere alike
        next(b for b in bodies if b.get("name") == "training")["claim"]["claim"]["plan"] = plan
        forge.write_chain(run / "ledger.jsonl", bodies)
        card["sections"][0]["claim"]["plan"] = plan
        forge.reseal(run, card)


def damaged_other(run: Path, dice: random.Random) -> None:
    file = run / dice.choice(("metrics.jsonl", "audit.json", "signature.json", "ledger.jsonl.head"))
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    tree = [json.loads(line) for line in lines]
    mutate(tree, dice)
    file.write_text("".join(json.dumps(row) + "\n" for row in tree))
    if file.name in ("audit.json",):
        forge.rechain(
            run / "ledger.jsonl", lambda bodies: bodies[-1]["files"].update({file.name: _sha(file)})
        )


def damaged_bytes(run: Path, dice: random.Random) -> None:
    file = run / dice.choice(FILES)
    content = file.read_bytes()
    while (new := scratch(content, dice)) == content:
        pass
    file.write_bytes(new)


def _sha(file: Path) -> str:
    import hashlib

    return hashlib.sha256(file.read_bytes()).hexdigest()


def looked_at(run: Path) -> list[str]:
    """Everything that reads a run folder. Whatever is wrong is a finding or a `DpfyError`."""
    wrong = []
    for look in (
        lambda: Ledger.read(run / "ledger.jsonl"), lambda: Ledger.open(run / "ledger.jsonl").event(), lambda: load_plan(run),  # noqa: E501
        lambda: compare.publish(run, "html"), lambda: compare.publish(run, "md"), lambda: compare.compare([run, run / "privacy.json"]),  # noqa: E501
        lambda: verify(run / "privacy.json"), lambda: signature.of_run(run),
    ):  # fmt: skip
        try:
            look()
        except DpfyError as problem:
            wrong.append(str(problem))
    return wrong


DAMAGES = (damaged_card, damaged_ledger, damaged_plan, damaged_other, damaged_bytes)


def damage_and_look(whole: Path, place: Path, count: int, seed: int) -> int:
    """Make `count` damaged copies; the number of those that were still verified, each of which must
    be the very same run.
    """
    dice, harmless = random.Random(seed), 0
    for number in range(count):
        run = place / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        damage = DAMAGES[number % len(DAMAGES)]
        damage(run, dice)
        changed = {
            p.name
            for p in whole.iterdir()
            if not (run / p.name).exists() or (run / p.name).read_bytes() != p.read_bytes()
        }
        findings = verify(run)
        if all(f.holds for f in findings):
            assert changed <= {"ledger.jsonl.head"}, (seed, number, damage.__name__, changed)
            harmless += 1
        for line in looked_at(run):
            assert "\n" not in line, (seed, number, line)
    return harmless


def test_no_damage_is_a_traceback_or_verified(whole, tmp_path):
    assert damage_and_look(whole, tmp_path, 300, seed=5) < 10


@pytest.mark.slow
def test_no_damage_is_a_traceback_or_verified_at_length(whole, tmp_path):
    assert damage_and_look(whole, tmp_path, 5000, seed=6) < 200


def shown(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        command.main([str(a) for a in arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


FALSE = "\x1b[2J\x1b[Hok     everything: holds\nrun: verified\x1b[8m"


@pytest.mark.parametrize(
    "place",
    [
        ("provenance", "dpfy"),
        ("statement",),
        ("accesses", "covered", 0, "name"),
        ("guarantee", "accountant"),
    ],
)
def test_no_string_of_a_card_reaches_the_terminal_as_a_command(whole, tmp_path, capsys, place):
    run = shutil.copytree(whole, tmp_path / "run")
    card = forge.card_of(run)
    forge.put(card, place, FALSE)
    forge.reseal(run, card)
    for arguments in (
        ("verify", run),
        ("verify", run / "privacy.json"),
        ("report", run),
        ("report", "compare", run, run),
    ):
        code, text = shown(capsys, *arguments)
        assert code != 0
        assert "\x1b" not in text
        assert "\nrun: verified" not in text
    name = shutil.copytree(run, tmp_path / "evil\x1b[2J\nrun: verified\nname")
    code, text = shown(capsys, "verify", name)
    assert code == 1
    assert "\x1b" not in text
    assert "\nrun: verified" not in text


def test_a_page_shows_names_literally():
    from dpfy.report.markdown import plain

    assert (
        plain("a|b <script>\n# [x](y) *z* _w_ `c`")
        == r"a\|b \<script\> \# \[x\](y) \*z\* \_w\_ \`c\`"
    )
    assert plain(3.5) == 3.5


def test_names_cannot_break_out_of_the_markdown_page(whole, tmp_path):
    """A page is written for a card that fits its digest, whoever made it."""
    run = shutil.copytree(whole, tmp_path / "run")
    card = forge.card_of(run)
    evil = "x | y |<img src=x onerror=alert(1)> [ok](javascript:1) **verified**"
    card["sections"][0]["optimizer"] = {"name": evil, evil: evil}
    card["provenance"]["engine"] = evil
    card["guarantee"]["accountant"] = 'tight"\nevil: true'.replace("\n", " ")
    forge.reseal(run, card)
    text = compare.publish(run, "md").text
    assert "<img" not in text.replace("\\<img", "")
    assert "[ok]" not in text
    assert "**verified**" not in text
    assert "<img" not in compare.publish(run, "html").text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 3 for line in rows)


@pytest.mark.parametrize(
    "name", ["privacy.json", "ledger.jsonl", "plan.json", "metrics.jsonl", "audit.json"]
)
def test_deep_nesting_huge_files_and_pipes(whole, tmp_path, monkeypatch, name):
    import os

    from dpfy.core import ledger, storage

    for content in (
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"body":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
    ):
        run = shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
        (run / name).write_bytes(content)
        assert any(name in f.what + f.detail for f in verify(run) if not f.holds)
        looked_at(run)
    monkeypatch.setattr(storage, "MOST_TEXT", 1000)
    monkeypatch.setattr(ledger, "MOST", 1000)
    monkeypatch.setattr(
        storage.content, "__kwdefaults__", storage.content.__kwdefaults__ | {"most": 1000}
    )
    (run / name).write_bytes(b"x" * 2000)
    assert not all(f.holds for f in _or_refused(run))
    (run / name).unlink()
    os.mkfifo(run / name)
    assert not all(f.holds for f in _or_refused(run))


def _or_refused(run):
    from dpfy.report.verify import Finding

    try:
        return verify(run)
    except DpfyError as problem:
        return [Finding("refused", False, str(problem))]


def test_a_card_with_control_characters_is_neither_written_nor_read(made):
    from dpfy.report import card as cards

    card = forge.card_of(made("dp-sgd"))
    del card["digest"]
    for bad in ("a\nb", "\x1b[0m", "\u202e"):
        with pytest.raises(Corrupt, match="cannot be printed"):
            cards.sealed(card | {"sections": [card["sections"][0] | {"utility": {bad: 1.0}}]})
