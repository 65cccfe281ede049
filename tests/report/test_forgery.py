"""Forgery: whoever can write to a run folder cannot make `verify` accept a false number, and what
they can change stands in the verdict.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

import dpfy
from dpfy.cli import app as command
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.events import Gaussian, Repeated
from dpfy.core.ledger import Ledger
from dpfy.report import levels, prose, recompute, signature
from dpfy.report.verify import NOT_CHECKED, Verification, judge

sys.path.insert(0, str(Path(__file__).parent))
import forge
import forgeries
from forgeries import FORGERIES, NAMED, REFUSED, SAYS, STATED

import runs

LEVELS = ("nothing", "start", "completion", "signature")


class Known:
    """A finished run, and what somebody outside holds of it."""

    def __init__(self, run: Path, home: Path) -> None:
        self.run, self.home, self.key = run, home, home / "key.pem"
        ledger = Ledger.read(run / "ledger.jsonl")
        begun = next(n for n, body in enumerate(ledger.bodies) if body["type"] == "begun")
        self.heads = {"start": ledger.chain.heads[begun], "completion": ledger.head}
        signature.new_key(self.key)

    def copy(self, place: Path, level: str) -> Path:
        run = shutil.copytree(self.run, place / "run")
        if level == "signature":
            signature.sign_run(run, self.key)
        return run

    def judge(self, run: Path, level: str, **options: str) -> Verification:
        keys = [self.home / "key.pem.pub"] if level == "signature" else []
        return judge(run, keys=keys, head=self.heads.get(level), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def known(made, tmp_path_factory) -> Known:
    return Known(made("dp-sgd"), tmp_path_factory.mktemp("known"))


def unchecked(verdict: Verification) -> str:
    return "\n".join(f.detail for f in verdict.findings if f.status == NOT_CHECKED)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_refused_or_stated(known, tmp_path, name, level):
    attack, *expected = FORGERIES[name]
    run = known.copy(tmp_path, level)
    attack(run)
    verdict, due = known.judge(run, level), expected[LEVELS.index(level)]
    assert verdict.holds == (due != REFUSED), [f for f in verdict.findings if not f.holds]
    if due == REFUSED:
        return
    assert verdict.level.name == level
    if name in SAYS:
        assert SAYS[name] in unchecked(verdict)
    assert due == NAMED or level in ("nothing", "start")
    if (
        due == STATED and name not in SAYS
    ):  # all of it may be another run, or no reader is told of the line
        assert name == "a note" or (level == "nothing" and "all of it again" in verdict.level.open)


def test_there_are_enough_forgeries():
    assert len(FORGERIES) >= 60
    for name, (_, *expected) in FORGERIES.items():
        assert STATED not in expected[2:], name
        assert (NAMED in expected) <= (name in SAYS), name


@pytest.mark.parametrize("level", LEVELS)
def test_an_honest_run_reaches_the_level_that_it_should(known, tmp_path, level):
    run = known.copy(tmp_path, level)
    verdict = known.judge(run, level)
    assert verdict.holds
    assert verdict.level.name == level
    for wanted in LEVELS:
        asked = known.judge(run, level, require=wanted)
        assert asked.holds == (LEVELS.index(wanted) <= LEVELS.index(level))
        assert asked.level == verdict.level
    (run / "README.md").write_text("About this model.\n")
    assert known.judge(run, level).holds
    assert not known.judge(run, level, require="nothing").holds
    with pytest.raises(InvalidInput, match="require"):
        judge(run, require="full")


@pytest.mark.parametrize(
    "name", ["correlated", "tuned", "foreign", "user-level", "no-privacy", "shared", "converted"]
)
@pytest.mark.parametrize("version", [None, "9.9.9"])
def test_ordinary_runs_hold_whatever_version_wrote_them(made, tmp_path, name, version):
    run = shutil.copytree(made(name), tmp_path / "run")
    if version is not None:
        forgeries.edited(version=version)(run)
    verdict = judge(run)
    assert verdict.holds, [f for f in verdict.findings if not f.holds]


def test_a_sentence_in_other_words_with_the_same_numbers_holds_and_is_named(known, tmp_path):
    run = known.copy(tmp_path, "nothing")
    forgeries.reworded((("tier", "why"), lambda text: "Put otherwise. " + text))(run)
    verdict = known.judge(run, "start")
    assert verdict.holds
    assert "wording not compared (made by version 0.1.7): tier.why" in unchecked(verdict)
    assert forge.card_of(run)["statement"] in unchecked(verdict)


@pytest.mark.parametrize(
    ("name", "content"),
    [("README.md", b"# A "
                   b"model\n"), ("LICENSE", b"MIT\n"), (".gitattributes", b"* text\n"), ("plot.png", b"\x89PNG\r\n\x1a\n\0\0"),  # noqa: E501
     ("config.json", b"{}"), (".git/HEAD", b"ref\n"), (".git/objects/ab", b"\0\x01"), ("docs/page.md", b"x\n")],
)  # fmt: skip
def test_texts_and_pictures_are_named_and_not_refused(known, tmp_path, name, content):
    run = known.copy(tmp_path, "nothing")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes(content)
    verdict = known.judge(run, "completion")
    assert verdict.holds
    assert name.split("/")[0] in unchecked(verdict)


# --- levels
# ---------------------------------------------------------------------------------------------------------------------------  # noqa: E501


def held(head: str) -> signature.Signed:
    return signature.Signed("--head", {"head": head}, {})


def test_a_head_fixes_figures_only_if_every_reservation_stood_as_it_stands_now(tmp_path):
    """One that was made, given back or settled after the head was published is not fixed by it."""
    step = Gaussian(2.0)
    stops = {"stops": [[1, {"kind": "gaussian", "noise_multiplier": 2.0}], [2, None]]}
    ledger = Ledger.open(tmp_path / "ledger.jsonl")
    empty = ledger.head
    first = ledger.reserve("statistics", step, returnable=True)
    one = ledger.head
    last = ledger.reserve(
        "training", Repeated(step, 2), claim={"stops": [stops["stops"][0]]}, returnable=True
    )
    both = ledger.head

    def level(head: str) -> str:
        return levels.of_run(Ledger.read(tmp_path / "ledger.jsonl"), held(head), by_key=False).name

    assert [level(head) for head in (empty, one, both)] == ["nothing", "nothing", "start"]
    ledger.void(first, "the input was refused")
    voided = ledger.head
    assert [level(head) for head in (both, voided)] == ["nothing", "start"]
    ledger.begin(last)
    begun = ledger.head
    ledger.settle(last, made=1, billed=1)
    assert [level(head) for head in (begun, ledger.head)] == ["nothing", "start"]
    ledger.finish(last, steps=1, card="0" * 64, files={})
    assert level(ledger.head) == "completion"
    assert level(begun) == "nothing"


def test_a_valid_signature_of_a_key_that_was_not_given_is_no_level(known, tmp_path):
    run = known.copy(tmp_path, "signature")
    assert judge(run).level.name == "nothing"
    assert judge(run, head=known.heads["start"]).level.name == "start"


def test_the_ledger_of_a_data_set_has_a_level_too(made, tmp_path):
    run = made("shared")
    people = Ledger.read(run.parent / "people.jsonl")
    file = shutil.copy(people.path, tmp_path / "people.jsonl")
    shutil.copy(f"{people.path}.head", tmp_path / "people.jsonl.head")
    assert judge(file).level.name == "nothing"
    assert judge(file, head=people.chain.heads[1]).level.name == "start"
    assert judge(file, head=people.head).level.name == "completion"
    (tmp_path / "people.jsonl.head").unlink()
    assert "may have been removed" in unchecked(judge(file))
    head = Ledger.read(file).head
    Ledger.recover(file, head)
    assert "written again on somebody's word" in unchecked(judge(file))


def test_the_budget_does_not_come_back_with_lines_and_mark_removed(tmp_path):
    """A run is billed; its lines and the mark of the ledger are removed; the next run is refused
    and makes no folder.
    """
    people = tmp_path / "people.jsonl"
    runs.fit(dpfy.Run(tmp_path / "one", ledger=people), runs.plain_plan())
    (tmp_path / "people.jsonl.head").unlink()
    for kept in (1, 2, 3):
        lines = people.read_bytes().splitlines(keepends=True)[:kept]
        (tmp_path / "cut").mkdir(exist_ok=True)
        (tmp_path / "cut" / "people.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(Corrupt, match=r"has lost people\.jsonl\.head"):
            runs.fit(
                dpfy.Run(tmp_path / "two", ledger=tmp_path / "cut" / "people.jsonl"),
                runs.plain_plan(),
            )
        assert not (tmp_path / "two").exists()


def test_the_command_prints_status_and_level(known, tmp_path, capsys):
    run = known.copy(tmp_path, "nothing")

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            command.main(["verify", str(run), *arguments])
        return ended.value.code or 0, capsys.readouterr().out

    code, text = call("--head", known.heads["start"])
    assert code == 0
    assert re.search(r"^none +audit", text, re.MULTILINE)
    assert re.search(r"^not checked +model", text, re.MULTILINE)
    assert "level: head published at the start" in text
    assert "could still be forged: The reservations" in text
    code, text = call("--head", known.heads["start"], "--require", "completion", "--json")
    told = json.loads(text)
    assert (code, told["verified"], told["level"]) == (1, False, "start")
    assert {row["status"] for row in told["checks"]} == {"ok", "none", "not checked", "FAILED"}
    code, text = call("--head", known.heads["completion"], "--require", "completion", "--json")
    assert (code, json.loads(text)["level"]) == (0, "completion")
    code, text = call("--require", "everything")
    assert code == 2


# --- numbers in text
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("(0.010, 1e-12)", [0.01, 1e-12]), ("10⁻⁵ and 3.2 × "
                                            "10⁻⁶", [1e-5, 3.2e-6]), ("10^-5, 10**{-6}", [1e-5, 1e-6]),
        ("53.5% of 1,438", [0.535, 1438]), ("wrong in 1 in 200 "
                                            "cases", [0.005]), ("2 percent, .5 per cent", [0.02, 0.005]),
        ("\uff10.\uff15", [0.5]), ("1e\u22123", [1e-3]), ("\u0660.\u0665", [0.5]), ("0.\u200b5", [0.5]), ("-3 and 4-5", [-3, 4, 5]),  # noqa: E501
        ("none", []),
    ],
)  # fmt: skip
def test_every_way_to_print_a_number_is_read(text, values):
    assert [f.value for f in prose.figures(text)] == pytest.approx(values)


@pytest.mark.parametrize(
    ("said", "due", "same"),
    [
        ("2.703", "2.703", True), ("2.71", "2.703", True), ("2.7", "2.703", True), ("2.702", "2.703", False), ("2", "2.7", False),  # noqa: E501
        ("3", "2.7", False), ("1e1", "5", False), ("53.4%", "53.5%", False), ("1%", "1 in 100", True), ("1e-05", "0.00001", True),  # noqa: E501
        ("(1, 2)", "(2, 1)", False), ("1", "1 "
                                           "2", False), ("1 "
                                                         "2", "1", False), ("two of 3", "3", False), ("3", "two of 3", True),  # noqa: E501
        ("one unit of 3", "a unit of "
                          "3", True), ("", "", True), ("0", "0.0004", False), ("0.001", "0.0004", False),
    ],
)  # fmt: skip
def test_sentences_agree_if_their_numbers_do(said, due, same):
    assert (prose.contradiction(said, due) is None) == same
    assert (prose.contradiction(said, due, whole=False) is None) >= same


@pytest.mark.parametrize(
    ("said", "due", "same"),
    [
        ("1", "1 2", True),
        ("2", "1 2", True),
        ("2 1", "1 2", False),
        ("3", "1 2", False),
        ("", "1", True),
    ],
)
def test_a_description_may_state_fewer_numbers_and_no_other(said, due, same):
    assert (prose.contradiction(said, due, whole=False) is None) == same


# --- random edits of numbers
# ----------------------------------------------------------------------------------------------------------

TOKEN = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")


def other_number(token: str, dice: random.Random) -> str:
    """Another number, printed as this one is, at least 2% away."""
    for _ in range(100):
        factor = dice.choice([0.01, 0.5, 0.9, 1.1, 2.0, 10.0, 1e-6])
        value = float(token) * factor + (dice.choice([0, 1, 7]) if float(token) == 0 else 0)
        text = (
            str(round(value))
            if token.isdigit()
            else f"{value:.{len(token.partition('.')[2].partition('e')[0])}f}"
        )
        if float(text) != pytest.approx(float(token), rel=0.02, abs=1e-12):
            return text
    return token + "7"


def leaves(tree, path=()):
    for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(part, (dict, list)):
            yield from leaves(part, (*path, key))
        number = isinstance(part, (int, float)) and not isinstance(part, bool)
        if number or (
            isinstance(part, str) and TOKEN.search(part) and not re.search("[0-9a-f]{16}", part)
        ):
            yield (*path, key), part


def edited(value, dice):
    if isinstance(value, str):
        match = dice.choice(list(TOKEN.finditer(value)))
        return value[: match.start()] + other_number(match.group(), dice) + value[match.end() :]
    return type(value)(value * dice.choice([0.5, 2, 3]) + (value == 0))


def covered(card, path) -> bool:
    """Whether the verdict covers this leaf: it follows from the ledger."""
    ledger_fields = {*recompute.derived(LEDGER[0], card)} | {"files"}
    if path[0] != "sections":
        return path[0] in ledger_fields
    due = recompute.derived(LEDGER[0], card)["sections"][path[1]]
    return path[2] in due


LEDGER: list[Ledger] = []


def random_edits(known, place, count, seed):
    """Edit numbers of the card at random, as this version or another, and pass all of it off."""
    dice, seen = random.Random(seed), Counter()
    LEDGER[:] = [Ledger.read(known.run / "ledger.jsonl")]
    card = forge.card_of(known.run)
    places = [
        (path, value)
        for path, value in leaves(card)
        if path[0] not in ("digest", "ledger", "format", "files")
    ]
    for _ in range(count):
        path, value = dice.choice(places)
        run = known.copy(place, "nothing")
        try:
            forgeries.edited(
                (path, edited(value, dice)), version=dice.choice([None, forgeries.OTHER])
            )(run)
        except Exception:  # the forger's own page cannot be made of such a card
            shutil.rmtree(run)
            continue
        verdict = known.judge(run, "start")
        if covered(card, path):
            assert not verdict.holds, (seed, path, value, forge.card_of(run))
        elif verdict.holds:
            name = path[0] if path[0] != "sections" else str(path[2])
            assert name in unchecked(verdict) or path[:2] == ("provenance", "dpfy"), (path, value)
        assert not known.judge(run, "completion").holds
        seen[covered(card, path), verdict.holds] += 1
        shutil.rmtree(run)
    return seen


def test_random_edits_of_numbers_are_refused_or_named(known, tmp_path):
    seen = random_edits(known, tmp_path, 40, seed=3)
    assert seen[True, False] >= 15
    assert seen[False, True] >= 2


@pytest.mark.slow
def test_random_edits_of_numbers_are_refused_or_named_at_length(known, tmp_path):
    for seed in range(10, 20):
        random_edits(known, tmp_path, 150, seed)


@pytest.mark.parametrize("name", ["report.md", "report.html", "metrics.jsonl", "plan.json"])
def test_random_edits_of_numbers_in_other_files(known, tmp_path, name):
    """A page of another version may not state a number that neither card nor ledger gives; metrics
    may not state another epsilon.
    """
    dice = random.Random(11)
    whole = forge.card_of(known.run)
    for _ in range(8):
        run = known.copy(tmp_path, "nothing")
        forgeries.edited(version=forgeries.OTHER)(run)
        text = (run / name).read_text()
        shown = text[text.index("<h1") :] if name == "report.html" else text
        if name == "report.html":
            spots, at = (
                list(re.finditer(r">[^<>]*?(\d+\.\d+)[^<>]*<", shown)),
                len(text) - len(shown),
            )
            start, end = (place + at for place in dice.choice(spots).span(1))
        else:
            pattern = (
                r'"epsilon": ([\d.]+)'
                if name == "metrics.jsonl"
                else r"(?<![\w.])(\d+\.\d+)(?![\w.])"
            )
            start, end = dice.choice(list(re.finditer(pattern, text))).span(1)
        (run / name).write_text(text[:start] + other_number(text[start:end], dice) + text[end:])
        card = forge.card_of(run)
        if name in whole["files"]:
            card["files"][name] = forgeries.sha(run / name)
            forgeries.publish(run, card)
        forgeries.last_line(run)
        verdict = known.judge(run, "start")
        assert not verdict.holds, (name, text[start - 40 : end + 10])
        shutil.rmtree(run)
