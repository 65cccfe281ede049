"""How the report speaks: typed absence, numbers that never round to the flattering side, events and
settings in words.

Reports of the first format, which knew training alone: their content in the places where the
present format has it.

Nothing is computed and nothing is lost: what the first format did not state is missing, and is not
compared.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from dpfy.accounting.rules import words as event_words
from dpfy.core.claim import ENTROPY, FIXED
from dpfy.core.unit import PROTECTS, Adjacency, Unit

__all__ = [
    "SETTINGS",
    "absent",
    "adjacency_meaning",
    "down",
    "event_words",
    "is_absent",
    "percent_up",
    "unit_meaning",
    "unit_row",
    "up",
]

ABSENT = "absent"

SETTINGS = {
    "central": "Central differential privacy: the data is gathered in one place, and anyone who "
    "trains is trusted to hold it and to "
    "run the mechanism correctly. What is released from there on is protected.",
    "local": "Local differential privacy: every record is randomised before it leaves its owner; "
    "nobody else needs to be trusted.",
    "shuffled": "The shuffle model: every record is randomised before it leaves its owner, and a "
    "shuffler hides whose each report is; the "
    "guarantee is about what leaves the shuffler.",
    "distributed": "Distributed differential privacy: owners add their share of the noise and a "
    "secure sum hides the parts; no "
    "single party sees data without protection.",
}


def absent(reason: str) -> dict[str, str]:
    """The statement that something is not there, and why. A report never leaves a blank."""
    return {ABSENT: reason}


def is_absent(value: Any) -> bool:
    """Whether `value` states an absence."""
    return isinstance(value, dict) and set(value) == {ABSENT}


def up(value: float | str, digits: int = 3) -> str:
    """Decimal text never below the value."""
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float | str, digits: int = 3) -> str:
    """Decimal text never above the value."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float | str, digits: int, way: str) -> str:
    if value == "infinity" or (isinstance(value, float) and math.isinf(value)):
        return "infinity"
    return str(Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=way))


def percent_up(share: float, digits: int = 1) -> str:
    """A share as a percentage never below it, without needless zeros; at most 100%."""
    text = up(min(100.0, 100 * share), digits)
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def unit_row(unit: Unit) -> dict[str, Any]:
    """The unit, for the report."""
    return {
        "name": unit.name,
        "most_records": unit.most_records,
        "meaning": unit_meaning(unit),
        "protection": unit.protects,
        "protection_words": PROTECTS[unit.protects],
        "tokens": absent("the unit is not a text of given length")
        if unit.tokens is None
        else unit.tokens,
    }


def unit_meaning(unit: Unit) -> str:
    """What one unit is for this data, in words."""
    if unit.tokens is not None and unit.protects == "record" and unit.name == "user":
        return (
            f"One {unit.name} owns at most {unit.most_records:,} texts of the training data, of each "
            f"of which at most {unit.tokens:,} tokens are read, and all of them are protected "
            f"together."
        )
    if unit.tokens is not None and unit.most_records == 1:
        length = f"One {unit.name} is a text of at most {unit.tokens:,} tokens."
        return f"{length} A person who wrote several is protected for each of them alone."
    if unit.name == "example" and unit.most_records == 1 and unit.whole:
        return (
            "One example is one record of the training data. A person with several records is "
            "protected for each of them alone; "
            "for k records together the guarantee weakens (epsilon grows about k-fold)."
        )
    if unit.protects == "label":
        return "One label is the label of one record; the record's features are not protected."
    if unit.most_records == 1 and unit.protects == "user":
        return (
            f"One {unit.name} is everything that it contributed, in however many records, and all "
            f"of it is protected together."
        )
    if unit.protects == "content":
        return (
            f"One {unit.name} is what the records hold that it owns, alone or with others, of which "
            f"at most {unit.most_records:,} are used. Who owns which record, and how many records "
            f"there are, is not protected."
        )
    if unit.protects == "window":
        return (
            f"One {unit.name} is what a user contributed within it, of which at most "
            f"{unit.most_records:,} records are used at a time. "
            "A user with several is protected for each of them alone; several together are given "
            "among the formal guarantees."
        )
    if unit.most_records == 1:
        return (
            f"One {unit.name} owns one record of the training data, and that record is protected "
            f"as a whole."
        )
    return (
        f"One {unit.name} owns at most {unit.most_records} records of the training data, and all "
        f"of them are protected together."
    )


def adjacency_meaning(adjacency: Adjacency) -> str:
    """What the guarantee compares."""
    return f"Two data sets are neighbours if {adjacency.meaning}."


FORMAT = "dpfy-privacy-card-1"
OF_SECTION = (
    "mechanism", "released", "evaluation", "steps_done", "utility", "confusion", "gradient_norms", "components", "optimizer",  # noqa: E501
)  # fmt: skip
GENERAL = (
    "statement", "guarantee", "setting", "accesses", "adjacency", "formal", "tier", "attacker", "delta", "caveats", "warnings", "ledger",  # noqa: E501
    "verification", "audit", "provenance", "files", "format", "digest",
)  # fmt: skip


def is_first(card: dict[str, Any]) -> bool:
    """Whether a report is of the first format."""
    return bool(card["format"] == FORMAT)


def raised(card: dict[str, Any]) -> dict[str, Any]:
    """A report in the layout of the present format; one that has it already as it is."""
    if not is_first(card):
        return card
    accounting, unit = card["accounting"], card["unit"]
    noise = [row for row in accounting["assumptions"] if row["what"] == "noise"]
    others = [row for row in accounting["assumptions"] if row["what"] != "noise"]
    note = accounting["sampling_note"]
    batches = {"done": note["done"], "most": note.get("most")} if "done" in note else None
    section = {name: card[name] for name in OF_SECTION} | {
        "name": "training",
        "kind": "training",
        "purpose": "training",
        "title": "Training",
        "claim": {"plan": card["plan"], "batches": batches},
        "theorem": accounting["theorem"],
        "sampling_note": note,
        "assumptions": others,
        "recorded": card["provenance"].get("recorded", "nothing by the caller"),
    }
    kept = {key: accounting[key] for key in ("accountant", "words", "without_amplification")}
    return {name: card[name] for name in GENERAL} | {
        "accounting": kept | {"assumptions": noise},
        "unit": {key: unit[key] for key in ("name", "most_records", "meaning")},
        "sections": [section],
    }


def seed_of(fixed: bool) -> str:
    """How a claim of either format names the kind of its seed."""
    return FIXED if fixed else ENTROPY
