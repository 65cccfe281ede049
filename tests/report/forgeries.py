"""Forgery attempts on a finished run by someone who can write to its folder and makes every hash
and the last ledger line fit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forge
import torch

import runs
from dpfy.core.ledger import Ledger, mark_of
from dpfy.plan import ForeignBatches
from dpfy.report import card as cards
from dpfy.report import html_page, markdown
from dpfy.runs.derive import derive
from dpfy.training import TrainingRun

OTHER = "0.1.7"
"""A version string that is not ours."""
FALSE = "(0.010, 1e-12)-differentially private"

Attack = Callable[[Path], None]


def sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def last_line(run: Path, change: Callable[[dict[str, Any]], None] = lambda body: None) -> None:
    """Rewrite the end of the run so that it names every file as it is now."""
    bodies = forge.bodies_of(run / "ledger.jsonl")
    end = next(b for b in bodies if b["type"] == "finish")
    end["files"] = {name: sha(run / name) for name in end["files"] if (run / name).is_file()}
    end["card"] = sha(run / cards.NAME)
    change(end)
    forge.write_chain(run / "ledger.jsonl", bodies)


def publish(
    run: Path,
    card: dict[str, Any],
    change: Callable[[list[dict[str, Any]]], object] = lambda bodies: None,
) -> None:
    """Pass off a card: digest, ledger, the pages of that card, and the end of the run all fit."""
    forge.conform(run, card, change)
    made = forge.card_of(run)
    (run / html_page.NAME).write_text(html_page.render(made, html_page.extras(run)))
    (run / markdown.NAME).write_text(markdown.render(made))
    last_line(run)


def edited(*changes: tuple[tuple[Any, ...], Any], version: str | None = None) -> Attack:
    """Set leaves of the card, as `version` of dpfy."""

    def attack(run: Path) -> None:
        card = forge.card_of(run)
        for path, value in changes:
            tree = card
            for key in path[:-1]:
                tree = tree[key]
            tree[path[-1]] = value(tree[path[-1]]) if callable(value) else value
        if version is not None:
            card["provenance"]["dpfy"] = version
        publish(run, card)

    return attack


def reworded(*changes: tuple[tuple[Any, ...], Any]) -> Attack:
    return edited(*changes, version=OTHER)


def file(name: str, content: bytes | str) -> Attack:
    """Slip in a file."""

    def attack(run: Path) -> None:
        place = run / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())

    return attack


def replaced(name: str, change: Callable[[bytes], bytes]) -> Attack:
    """Exchange a file of the run and write the last line anew."""

    def attack(run: Path) -> None:
        (run / name).write_bytes(change((run / name).read_bytes()))
        card = forge.card_of(run)
        if name in card["files"]:
            card["files"][name] = sha(run / name)
            publish(run, card)
        last_line(run)

    return attack


def page(name: str, change: Callable[[str], str], version: str | None = OTHER) -> Attack:
    """Edit a page of a card that another version is said to have written."""

    def attack(run: Path) -> None:
        edited(version=version)(run)
        text = (run / name).read_text()
        assert change(text) != text
        (run / name).write_text(change(text))
        last_line(run)

    return attack


def attached(name: str, content: str, *, pages: bool = True) -> Attack:
    """An audit that nobody made, attached as a real one is; the pages are written again."""

    def attack(run: Path) -> None:
        (run / name).write_text(content)
        Ledger.read(run / "ledger.jsonl").attach([name])
        if pages and name == "audit.json":
            card = forge.card_of(run)
            (run / html_page.NAME).write_text(html_page.render(card, html_page.extras(run)))
            (run / markdown.NAME).write_text(markdown.render(card, html_page.extras(run)["audit"]))

    return attack


AUDIT = {
    "epsilon_lower": 0.01, "epsilon_claimed": 1.0, "share_of_claim": 0.01, "violated": False, "points": [],
    "sentence": "epsilon is at least 0.010 at delta 0.001 with 99.9% confidence (one-run, 100000 "
                "canaries): no contradiction.",
}  # fmt: skip


def raw_data(run: Path) -> None:
    """A derived file that holds the records."""
    secret = run.parent / "records.safetensors"
    from safetensors.torch import save_file

    save_file({"x": runs.data()[0]}, secret)
    derive(run, secret, of=["model.safetensors"], how="rounded to 8 bits")
    secret.unlink()


def derived_claims(run: Path) -> None:
    """A derived file whose line says what the guarantee is."""
    made = run.parent / "small.txt"
    made.write_text("weights")
    derive(run, made, of=["model.safetensors"], how=f"distilled; {FALSE}")
    made.unlink()


def other_model(run: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(3, 6), "bias": torch.ones(3)}, run / "model.safetensors")
    card = forge.card_of(run)
    card["files"]["model.safetensors"] = sha(run / "model.safetensors")
    publish(run, card)


def quieter(run: Path) -> None:
    """Every file written anew, as of a run with ten times the noise."""
    model = (run / "model.safetensors").read_bytes()
    other = runs.fit(run.parent / "quieter", runs.plain_plan(20.0))
    _take(other, run)
    (run / "model.safetensors").write_bytes(model)
    card = forge.card_of(run)
    card["files"]["model.safetensors"] = sha(run / "model.safetensors")
    publish(run, card)
    shutil.rmtree(other)


def in_the_last_line(run: Path) -> None:
    """A second model, named by the last line and by the card."""
    (run / "pytorch_model.bin").write_bytes(b"PK\x03\x04weights")
    card = forge.card_of(run)
    card["files"]["pytorch_model.bin"] = sha(run / "pytorch_model.bin")

    def name(bodies: list[dict[str, Any]]) -> None:
        bodies[-1]["files"]["pytorch_model.bin"] = sha(run / "pytorch_model.bin")

    publish(run, card, name)


def _hidden_claim() -> Attack:
    """A run that its own trainer reserved with a false sentence, finished and witnessed as any
    other.
    """

    def attack(run: Path) -> None:
        other = runs.fit(
            TrainingRun(
                run.parent / "said",
                runs.plain_plan(),
                batches=ForeignBatches(f"shuffled; {FALSE}", most=2),
            ),
            runs.plain_plan(),
        )
        _take(other.path, run)
        (run / "signature.json").unlink(missing_ok=True)
        shutil.rmtree(other.path)

    return attack


def same_plan(run: Path) -> None:
    """Every file exchanged for those of another run of the same plan."""
    other = runs.dpsgd(run.parent / "twin")
    _take(other, run)
    shutil.rmtree(other)


def _take(other: Path, run: Path) -> None:
    for made in other.iterdir():
        if made.is_file():
            shutil.copy(made, run / made.name)


def noise_in_the_reservation(run: Path) -> None:
    """The reservation itself, alone."""

    def louder(bodies: list[dict[str, Any]]) -> None:
        body = next(b for b in bodies if b["type"] == "reserve")
        body["claim"]["claim"]["plan"]["noise_multiplier"] = 20.0

    publish(run, forge.card_of(run), louder)


def voided(run: Path) -> None:
    def void(bodies: list[dict[str, Any]]) -> None:
        entry = next(b["entry"] for b in bodies if b["type"] == "begun")
        bodies.insert(-1, {"type": "void", "entry": entry, "reason": "nothing was released"})

    publish(run, forge.card_of(run), void)


def second_end(run: Path) -> None:
    bodies = forge.bodies_of(run / "ledger.jsonl")
    forge.write_chain(run / "ledger.jsonl", [*bodies, bodies[-1]])


def noted(run: Path) -> None:
    def note(bodies: list[dict[str, Any]]) -> None:
        bodies.insert(-1, {"type": "note", "kind": "guarantee", "facts": {"epsilon": 0.01}})

    publish(run, forge.card_of(run), note)


def cut(run: Path) -> None:
    """The end of the run and its mark removed."""
    bodies = forge.bodies_of(run / "ledger.jsonl")
    forge.write_chain(run / "ledger.jsonl", bodies[:-1])
    mark_of(run / "ledger.jsonl").unlink()


def no_mark(run: Path) -> None:
    mark_of(run / "ledger.jsonl").unlink()


def audit_taken_away(run: Path) -> None:
    """An audit that contradicts the claim was attached, and is removed with its line."""
    attached("audit.json", json.dumps({"epsilon_lower": 50.0, "points": []}), pages=False)(run)
    bodies = forge.bodies_of(run / "ledger.jsonl")
    forge.write_chain(run / "ledger.jsonl", bodies[:-1])
    (run / "audit.json").unlink()
    mark_of(run / "ledger.jsonl").unlink()


def metrics_epsilon(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["epsilon"] *= 0.01
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = forge.card_of(run)
    card["files"]["metrics.jsonl"] = sha(run / "metrics.jsonl")
    publish(run, card)


def metrics_accuracy(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["test_accuracy"] = 0.999
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = forge.card_of(run)
    card["files"]["metrics.jsonl"] = sha(run / "metrics.jsonl")
    publish(run, card)


def linked(run: Path) -> None:
    """A model elsewhere, under a link."""
    (run.parent / "elsewhere.bin").write_bytes(b"weights")
    (run / "extra").symlink_to(run.parent / "elsewhere.bin")


def other_signer(run: Path) -> None:
    """Signed by a key that nobody knows, over a card with another utility."""
    from dpfy.report import signature

    edited((("sections", 0, "utility", "test_accuracy"), 0.999))(run)
    (run / signature.NAME).unlink(missing_ok=True)
    signature.new_key(run.parent / "unknown.pem")
    signature.sign_run(run, run.parent / "unknown.pem")


def steps_done(run: Path) -> None:
    edited((("sections", 0, "steps_done"), 1))(run)
    last_line(run, lambda end: end.update(steps=1))


HALF = "right in at most 50.01% of cases"
TENTH = "Training is (zero point zero one, one millionth)-differentially private."
WIDE = "Training is (\uff10.\uff10\uff11\uff10, 1e\u221212)-differentially private."
SMALL = "Training is (10\u207b\u00b2, 10\u207b\u00b9\u00b2)-differentially private."

SENTENCE = ("attacker", "sentences", 0)
S = ("sections", 0)

REFUSED, STATED, NAMED = "refused", "stated", "named"
"""A check fails; verified, with a level that says that this may be forged; verified, with a line
that says "not checked" and names it.
"""

# what is forged: how, and what verify must say with nothing, with a head published at the start, at
# completion, and with a signature
SAYS = {
    "false words added to the statement, other version": "wording not compared",
    "utility": "training utility", "optimizer": "training "
                                                "optimizer", "public data invented": "public_data",
    "words of report.md, other version": "wording of report.md not "
                                         "compared", "accuracy in metrics.jsonl": "metrics.jsonl",
    "model exchanged": "model.safetensors fits the last line", "README.md": "README.md",
    "a derived file that is raw "
    "data": "records.safetensors", "an invented audit that fits itself": "audit.json",
    "an invented picture of an audit": "audit.svg", "an audit that contradicts, taken "
                                                    "away": "ledger.jsonl.head is missing",
    "the mark removed": "ledger.jsonl.head is missing", "signed by an unknown "
                                                        "key": "whose key that is",
}  # fmt: skip
"""What a line that is "not checked" must say of a forgery that a level lets pass."""

FORGERIES: dict[str, tuple[Attack, str, str, str, str]] = {
    # sentences
    "statement": (edited((("statement",), f"Training is {FALSE}.")), *[REFUSED] * 4),
    "statement, other "
    "version": (reworded((("statement",), f"Training is {FALSE}.")), *[REFUSED] * 4),
    "statement without numbers, other "
    "version": (reworded((("statement",), "Training is perfectly private.")), *[REFUSED] * 4),
    "statement in number words, other version": (reworded((("statement",), TENTH)), *[REFUSED] * 4),
    "statement in wide digits, other version": (reworded((("statement",), WIDE)), *[REFUSED] * 4),
    "statement in powers of ten, other "
    "version": (reworded((("statement",), SMALL)), *[REFUSED] * 4),
    "numbers of the statement swapped, other version": (
        reworded((("statement",), lambda text: _swapped(text))), *[REFUSED] * 4),
    "false number added to the statement, other version": (
        reworded((("statement",), lambda text: f"{text} In practice epsilon is "
                                               f"0.01.")), *[REFUSED] * 4),
    "false words added to the statement, other version": (
        reworded((("statement",), lambda text: f"{text} Nobody can learn "
                                               f"anything.")), NAMED, NAMED, REFUSED, REFUSED),
    "attacker's sentence, other "
    "version": (reworded((SENTENCE, lambda text: text.rpartition(";")[0] + "; " + HALF)), *[REFUSED] * 4),
    "attacker's sentences removed, other "
    "version": (reworded((("attacker", "sentences"), [])), *[REFUSED] * 4),
    "warnings removed, other version": (reworded((("warnings",), [])), *[REFUSED] * 4),
    "delta in words, other "
    "version": (reworded((("delta", "words"), "delta is 0.0001 times 1/n for n = "
                                              "9,000,000")), *[REFUSED] * 4),
    "tier, other version": (reworded((("tier", "why"), "Epsilon is 0.01, at most "
                                                       "1.")), *[REFUSED] * 4),
    "access in words, other version": (
        reworded((("accesses", "covered", 0, "words"), "1 time: a sum with Gaussian noise of 900 "
                                                       "times the bound")), *[REFUSED] * 4),
    "assumption in words, other version": (
        reworded(((*S, "assumptions", 0, "done"), "each unit takes part with probability "
                                                  "0.0001")), *[REFUSED] * 4),
    "what the unit is, other version": (
        reworded((("unit", "meaning"), "One example is all that a person owns, in 1000 "
                                       "records.")), *[REFUSED] * 4),
    "verification in words, other version": (
        reworded((("verification", "words"), f"Checked by 3 experts: {FALSE}.")), *[REFUSED] * 4),
    "absence in words, other version": (
        reworded((("accesses", "not_covered", 0, "absent"), "nothing is left out: epsilon is 0.01 in all")), *[REFUSED] * 4),  # noqa: E501
    # numbers of the card
    "epsilon": (edited((("guarantee", "epsilon"), 0.01)), *[REFUSED] * 4),
    "epsilon, other version": (reworded((("guarantee", "epsilon"), 0.01)), *[REFUSED] * 4),
    "epsilon of training, other "
    "version": (reworded((("formal", "training", "epsilon"), 0.01)), *[REFUSED] * 4),
    "curve": (edited((("formal", "curve", 0, "delta"), 1e-9)), *[REFUSED] * 4),
    "noise in the section": (edited(((*S, "mechanism", "noise_multiplier"), 90.0)), *[REFUSED] * 4),
    "steps done": (steps_done, *[REFUSED] * 4),
    # facts that only the run knows
    "utility": (edited(((*S, "utility", "test_accuracy"), 0.999)), STATED, STATED, REFUSED, REFUSED),
    "optimizer": (edited(((*S, "optimizer", "learning_rate"), 7.5)), STATED, STATED, REFUSED, REFUSED),
    "an epsilon among the optimizer's "
    "settings": (edited(((*S, "optimizer", "privacy"), FALSE)), *[REFUSED] * 4),
    "an epsilon among the utility": (edited(((*S, "utility", "epsilon"), 0.01)), *[REFUSED] * 4),
    "an epsilon among the utility under another "
    "name": (edited(((*S, "utility", "privacy_epsilon"), 0.01)), *[REFUSED] * 4),
    "an epsilon without a "
    "bracket": (edited((("provenance", "note"), "0.01-DP for everybody")), *[REFUSED] * 4),
    "an epsilon in short": (edited((("provenance", "note"), "budget: eps=.01")), *[REFUSED] * 4),
    "an epsilon in Greek": (edited((("provenance", "note"), "\u03b5 \u2264 0.01")), *[REFUSED] * 4),
    "a false epsilon with the true "
    "delta": (edited((("provenance", "note"), "it is (0.01, 0.001)-DP")), *[REFUSED] * 4),
    "a false delta with the true "
    "epsilon": (edited((("provenance", "note"), "it is (1.119, 1e-12)-DP")), *[REFUSED] * 4),
    "an epsilon in the "
    "provenance": (edited((("provenance", "note"), f"the run is {FALSE}")), *[REFUSED] * 4),
    "an epsilon in a field of its "
    "own": (edited(((*S, "summary"), "epsilon = 0.01 after all")), *[REFUSED] * 4),
    "an epsilon in the public data": (
        edited((("public_data",), [{"data": "ImageNet", "used_for": FALSE, "provenance": "web"}])), *[REFUSED] * 4),
    "public data invented": (
        edited((("public_data",), [{"data": "ImageNet", "used_for": "pretraining", "provenance": "web"}])),
        STATED, STATED, REFUSED, REFUSED),
    # pages
    "report.md": (page("report.md", lambda t: t.replace("# Privacy "
                                                        "report", f"# Privacy report\n\n{FALSE}"), None), *[REFUSED] * 4),  # noqa: E501
    "report.md, other "
    "version": (page("report.md", lambda t: t.replace("# Privacy "
                                                      "report", f"# Privacy report\n\n{FALSE}")), *[REFUSED] * 4),
    "report.html, other "
    "version": (page("report.html", lambda t: t.replace("</body>", f"<p>{FALSE}</p></body>")), *[REFUSED] * 4),
    "a number of report.html in pieces, other version": (
        page("report.html", lambda t: t.replace("</body>", "<p>epsilon is 0.<b>01</b></p></body>")), *[REFUSED] * 4),
    "a number of report.html by a style sheet, other version": (
        page("report.html", lambda t: t.replace("</style>", "body::before{content:'epsilon 0.01'}</style>")), *[REFUSED] * 4),  # noqa: E501
    "words of report.md, other version": (
        page("report.md", lambda t: t.replace("# Privacy "
                                              "report", "# Privacy report\n\nNothing "
                                                      "leaks.")), NAMED, NAMED, REFUSED, REFUSED),
    "epsilon in metrics.jsonl": (metrics_epsilon, *[REFUSED] * 4),
    "accuracy in metrics.jsonl": (metrics_accuracy, STATED, STATED, REFUSED, REFUSED),
    # files
    "model exchanged": (other_model, STATED, STATED, REFUSED, REFUSED),
    "model exchanged, ledger untouched": (file("model.safetensors", b"another"), *[REFUSED] * 4),
    "pytorch_model.bin": (file("pytorch_model.bin", b"PK\x03\x04weights"), *[REFUSED] * 4),
    "pytorch_model.bin in the last line": (in_the_last_line, *[REFUSED] * 4),
    "pytorch_model.bin attached as an "
    "audit": (attached("pytorch_model.bin", "weights"), *[REFUSED] * 4),
    "a dangling link for the "
    "secrets": (lambda run: (run / "checkpoint").symlink_to("nowhere"), *[REFUSED] * 4),
    "a false sentence in the reservation": (_hidden_claim(), *[REFUSED] * 4),
    "a model in text": (file("weights.pt", "1.0 2.0"), *[REFUSED] * 4),
    "pickle": (file("model.pkl", b"\x80\x04weights"), *[REFUSED] * 4),
    "a model under a harmless "
    "name": (file("notes.txt", b"PK\x03\x04\x00\x00weights"), *[REFUSED] * 4),
    "a hidden model": (file(".cache.safetensors", b"\x08\0\0\0\0\0\0\0{}      "), *[REFUSED] * 4),
    "an adapter in a "
    "folder": (file("adapter/adapter_model.safetensors", b"\x08\0\0\0\0\0\0\0{}     "
                                                         b" "), *[REFUSED] * 4),
    "a link to a model": (linked, *[REFUSED] * 4),
    "a table of records": (file("train.csv", "name,age\nann,33\n"), *[REFUSED] * 4),
    "README.md": (file("README.md", f"This model is {FALSE}.\n"), *[NAMED] * 4),
    "a derived file that is raw data": (raw_data, NAMED, NAMED, NAMED, REFUSED),
    "a derived file with an epsilon": (derived_claims, *[REFUSED] * 4),
    "an invented audit": (attached("audit.json", json.dumps(AUDIT)), *[REFUSED] * 4),
    "an invented audit that fits "
    "itself": (attached("audit.json", '{"epsilon_lower": 0.0, "points": '
                                      '[]}'), NAMED, NAMED, NAMED, REFUSED),
    "an invented picture of an "
    "audit": (attached("audit.svg", "<svg><text>epsilon "
                                    "0.01</text></svg>"), NAMED, NAMED, NAMED, REFUSED),
    "an audit that contradicts, taken away": (audit_taken_away, *[NAMED] * 4),
    "an invented audit in place": (file("audit.json", '{"epsilon_lower": 0.01}'), *[REFUSED] * 4),
    # the ledger
    "the end and the mark removed": (cut, *[REFUSED] * 4),
    "the mark removed": (no_mark, *[NAMED] * 4),
    "more noise in the reservation": (noise_in_the_reservation, *[REFUSED] * 4),
    "the reservation given back": (voided, *[REFUSED] * 4),
    "a second end": (second_end, *[REFUSED] * 4),
    "a note": (noted, STATED, STATED, REFUSED, REFUSED),
    "every file again, with more noise": (quieter, STATED, REFUSED, REFUSED, REFUSED),
    "every file of another run": (same_plan, STATED, REFUSED, REFUSED, REFUSED),
    "signed by an unknown key": (other_signer, STATED, STATED, REFUSED, REFUSED),
}  # fmt: skip


def _swapped(text: str) -> str:
    """(epsilon, delta) the other way round."""
    import re

    return re.sub(r"\(([^,()]+), ([^,()]+)\)", r"(\2, \1)", text, count=1)
