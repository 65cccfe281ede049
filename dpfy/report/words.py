"""How the card speaks: typed absence, numbers that never round to the flattering side, events and settings in words."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from dpfy.accounting.rows import words as event_words
from dpfy.core import participation
from dpfy.core.unit import Adjacency, Unit

__all__ = [
    "PROTECTIONS",
    "SETTINGS",
    "absent",
    "adjacency_meaning",
    "down",
    "event_words",
    "is_absent",
    "participation_words",
    "percent_up",
    "protection_of",
    "unit_meaning",
    "up",
]

ABSENT = "absent"

SETTINGS = {
    "central": "Central differential privacy: the data is gathered in one place, and whoever trains is trusted to hold it and to "
    "run the mechanism correctly. What is released from there on is protected.",
    "local": "Local differential privacy: every record is randomised before it leaves its owner; nobody else needs to be trusted.",
    "distributed": "Distributed differential privacy: owners add their share of the noise and a secure sum hides the parts; no "
    "single party sees data without protection.",
}

PROTECTIONS = {
    "full": "Features and labels are both protected.",
    "label": "Only the labels are protected; the features are treated as public.",
    "prediction": "Only what is predicted is protected; the model itself must not be released.",
}


def absent(reason: str) -> dict[str, str]:
    """The statement that something is not there, and why. A card never leaves a blank."""
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


def protection_of(unit: Unit) -> str:
    """What of a unit's data is protected, by the unit's name: labels only, predictions only, or all of it."""
    return unit.name if unit.name in ("label", "prediction") else "full"


def unit_meaning(unit: Unit) -> str:
    """What one unit is for this data, in words."""
    if unit.name == "example" and unit.most_records == 1:
        return (
            "One example is one record of the training data. A person with several records is protected for each of them alone; "
            "for k records together the guarantee weakens (epsilon grows about k-fold)."
        )
    if unit.name == "label":
        return "One label is the label of one record; the record's features are not protected."
    if unit.most_records == 1:
        return f"One {unit.name} owns one record of the training data, and that record is protected as a whole."
    return (
        f"One {unit.name} owns at most {unit.most_records} records of the training data, and all of them are protected together."
    )


def adjacency_meaning(adjacency: Adjacency) -> str:
    """What the guarantee compares."""
    return f"Two data sets are neighbours if {adjacency.meaning}."


def participation_words(pattern: participation.Participation) -> str:
    """How units take part in steps."""
    if isinstance(pattern, participation.Poisson):
        if pattern.rate == 1:
            return "every unit takes part in every step (full batch)"
        return f"Poisson sampling: at every step each unit takes part independently with probability {pattern.rate:g}"
    if isinstance(pattern, participation.SinglePass):
        return "a single pass: each unit takes part at most once"
    if isinstance(pattern, participation.FixedOrder):
        return f"a fixed order: each unit takes part every {pattern.steps_per_epoch} steps, at most {pattern.epochs} times"
    if isinstance(pattern, participation.Reshuffled):
        return f"shuffled epochs: each unit takes part once in {pattern.steps_per_epoch} steps, {pattern.epochs} times"
    if isinstance(pattern, participation.Separated):
        return f"participations at least {pattern.separation} steps apart, at most {pattern.most} of them"
    if isinstance(pattern, participation.CyclicPoisson):
        return (
            f"cyclic Poisson sampling: in its turn, every {pattern.cycle} steps, each unit takes part with probability "
            f"{pattern.rate:g}"
        )
    return f"balls in bins: each unit falls secretly into one of {pattern.bins} batches, each used {pattern.epochs} times"
