"""Several reports side by side. Claims about different units or neighbours are not ranked: the reason
and the way to convert are given.

The forms of a report on disk: written again from privacy.json whenever asked for, an audit made
since then included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfy.core import check
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.storage import write_atomically
from dpfy.report import card as cards
from dpfy.report import figures, html_page, markdown, recompute, words
from dpfy.report.verify import load_card

CONVERT = {
    "unit": "An example-level claim becomes a user-level one only if every user owns at most k "
    "examples: account for groups of k, "
    "which multiplies epsilon by about k. Without a bound on k there is no conversion.",
    "most_records": "Units that may own different numbers of records are different units: train "
    "with the same bound.",
    "adjacency": "An add-or-remove-one claim of (e, d) gives a replace-one claim of (2e, (1 + "
    "exp(e)) d); there is no way back. Zero-out "
    "and add-or-remove-one agree for sums of clipped contributions. Account for both runs under "
    "the same adjacency.",
    "protection": "Label or prediction protection leaves other data open: it cannot be turned into "
    "full protection.",
    "setting": "A central, a distributed and a local guarantee trust different parties; the "
    "smaller epsilon is not the safer one.",
}


NO_TRAINING = "nothing was trained"


@dataclass(frozen=True)
class RunComparison:
    """The reports as rows, in the order of their guarantee where they can be ranked, and why they
    cannot where not.
    """

    rows: list[dict[str, Any]]
    ranked: bool
    delta: float
    reasons: list[dict[str, str]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {
            "ranked": self.ranked,
            "delta": self.delta,
            "reasons": self.reasons,
            "notes": self.notes,
            "runs": self.rows,
        }


def compare(places: Sequence[Path]) -> RunComparison:
    """The runs (folders or reports) side by side. Epsilons are read off at one common delta, the
    smallest that any report states.

    Guarantees: an order is given only where unit, its size, protection, adjacency and setting are
    the same in all.
    """
    if len(places) < 2:
        raise InvalidInput("runs", len(places), "must be at least two to compare")
    loaded = [(name, load(place)) for name, place in zip(_names(places), places, strict=True)]
    delta = min(card["guarantee"]["delta"] for _, card in loaded)
    rows = [_row(name, card, delta) for name, card in loaded]
    reasons = [
        {
            "what": what,
            "why": f"{what.replace('_', ' ')} differs: "
            + "; ".join(f"{r['run']}: {r[what]}" for r in rows),
        }
        | {"convert": CONVERT[what]}
        for what in CONVERT
        if len({str(row[what]) for row in rows}) > 1
    ]
    notes = [
        f"{what} differs: {'; '.join(f'{r[key_name]} {r[key]}' for r in rows)}"
        for what, key, key_name in (
            ("what is covered", "covers", "run"),
            ("the accountant", "accountant", "run"),
        )
        if len({str(row[key]) for row in rows}) > 1
    ]
    if len({card["guarantee"]["delta"] for _, card in loaded}) > 1:
        notes.append(f"deltas differ; epsilon is compared at the smallest, {delta:g}")
    if not reasons:
        rows.sort(
            key=lambda r: (
                float("inf")
                if r["epsilon_at_common_delta"] == "infinity"
                else r["epsilon_at_common_delta"]
            )
        )
    return RunComparison(rows, not reasons, delta, reasons, notes)


def load(place: Path) -> dict[str, Any]:
    """The report of a run folder, or in a report file."""
    file = place / cards.NAME if place.is_dir() else place
    if not file.is_file():
        raise InvalidInput(
            "run", str(place), "holds no privacy.json: not a finished run, nor a report"
        )
    try:
        return load_card(file)
    except Corrupt as problem:
        raise Corrupt(f"{place.name}: {problem.file}", problem.problem) from None


def _names(places: Sequence[Path]) -> list[str]:
    """The last parts of the paths, distinguished by their number where they are the same."""
    # Not Path.resolve, which raises where links go in circles.
    plain = [
        p.parent.name if p.name == cards.NAME and p.parent.name else p.name
        for p in (Path(os.path.realpath(p)) for p in places)
    ]
    return [
        name if plain.count(name) == 1 else f"{name} ({n})" for n, name in enumerate(plain, start=1)
    ]


def _row(name: str, card: dict[str, Any], delta: float) -> dict[str, Any]:
    ledger, stated = recompute.stated_ledger(card), card["guarantee"]
    bill = figures.Bill(ledger.event(), ledger.adjacency, stated["accountant"], delta)
    training = cards.section(words.raised(card), "training")
    mechanism = training.get("mechanism", {})
    same = delta == stated["delta"]
    return {
        "run": name,
        "epsilon": stated["epsilon"],
        "delta": stated["delta"],
        "epsilon_at_common_delta": stated["epsilon"]
        if same
        else number(figures.epsilon(replace(bill, delta=delta))),
        "unit": stated["unit"],
        "most_records": card["unit"]["most_records"],
        "protection": "label"
        if ledger.unit.protects == "label"
        else "prediction"
        if not ledger.unit.whole
        else "full",
        "adjacency": stated["adjacency"],
        "setting": stated["trust"],
        "tier": card["tier"]["tier"],
        "accountant": stated["accountant"],
        "covers": ", ".join(sorted({row["kind"] for row in card["accesses"]["covered"]})),
        **{
            key: mechanism.get(key, NO_TRAINING)
            for key in ("records", "noise_multiplier", "expected_batch", "steps")
        },
        "utility": training.get("utility", words.absent(NO_TRAINING)),
        "caveats": [*card["caveats"], *card["warnings"]],
    }


def page(comparison: RunComparison) -> str:
    """The comparison as one page that needs nothing else."""
    return html_page.environment().get_template("compare.html.j2").render(c=comparison)


def text(comparison: RunComparison) -> str:
    """The comparison for a terminal."""
    lines = []
    head = (
        "run",
        f"epsilon at {comparison.delta:g}",
        "unit",
        "adjacency",
        "tier",
        "covers",
        "accuracy",
    )
    table = [head]
    for row in comparison.rows:
        utility = row["utility"]
        accuracy = (
            "-"
            if words.is_absent(utility) or "test_accuracy" not in utility
            else f"{utility['test_accuracy']:.2%}"
        )
        epsilon = words.up(row["epsilon_at_common_delta"])
        table.append(
            (
                row["run"],
                epsilon,
                row["unit"],
                row["adjacency"],
                str(row["tier"]),
                row["covers"],
                accuracy,
            )
        )
    widths = [max(len(line[k]) for line in table) for k in range(len(head))]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    if comparison.ranked:
        lines.append("ranked by epsilon, the strongest guarantee first")
    for reason in comparison.reasons:
        lines += [f"NOT RANKED: {reason['why']}", f"  how to convert: {reason['convert']}"]
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)])


FORMS = ("html", "md", "json")


@dataclass(frozen=True)
class Written:
    """The text of a form, and the file it was written to."""

    text: str
    file: Path | None


def publish(run: Path, form: str) -> Written:
    """Write report.html or report.md beside the report of `run` (a folder or a report file); the JSON
    form is the report itself.

    Guarantees: a report that was edited is refused, not rendered.
    """
    check.one_of("format", form, FORMS)
    card = load(run)
    folder = run if run.is_dir() else run.parent
    if form == "json":
        return Written(cards.render(card).decode(), None)
    extra = html_page.extras(folder) if run.is_dir() else {"metrics": [], "audit": None}
    try:
        text = (
            html_page.render(card, extra)
            if form == "html"
            else markdown.render(card, extra["audit"])
        )
    except (
        Exception
    ) as problem:  # a card may fit the schema and its own digest, and still make no sense
        raise Corrupt(
            cards.NAME, f"cannot be shown ({type(problem).__name__}): run dpfy verify on it"
        ) from None
    file = folder / (html_page.NAME if form == "html" else markdown.NAME)
    write_atomically(file, text.encode())
    return Written(text, file)
