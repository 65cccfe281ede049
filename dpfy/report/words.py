"""How the card speaks: typed absence, numbers that never round to the flattering side, events and settings in words."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from dpfy.core import events, participation
from dpfy.core.unit import Adjacency, Unit

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


def event_words(event: events.Event) -> str:
    """A release in words."""
    if isinstance(event, events.Repeated):
        inner = event_words(event.event)
        return inner if event.count == 1 else f"{event.count:,} times: {inner}"
    if isinstance(event, events.Composed):
        return "; then ".join(event_words(e) for e in event.events) or "nothing"
    if isinstance(event, events.PoissonSampled):
        return f"{event_words(event.event)}, on a Poisson sample at rate {event.rate:g}"
    if isinstance(event, (events.SampledWithoutReplacement, events.SampledWithReplacement)):
        kind = "without" if isinstance(event, events.SampledWithoutReplacement) else "with"
        return f"{event_words(event.event)}, on {event.sample_size:,} of {event.source_size:,} units drawn {kind} replacement"
    if isinstance(event, events.RepeatAndSelect):
        return f"the best of a random number of runs (mean {event.mean:g}) of: {event_words(event.event)}"
    return _leaf_words(event)


def _leaf_words(event: events.Event) -> str:
    if isinstance(event, events.Gaussian):
        return f"a sum with Gaussian noise of {event.noise_multiplier:.6g} times the bound on one unit"
    if isinstance(event, events.Laplace):
        return f"a sum with Laplace noise of {event.noise_multiplier:.6g} times the bound on one unit"
    if isinstance(event, events.TruncatedPoissonGaussian):
        return (
            f"a sum with Gaussian noise of {event.noise_multiplier:.6g} times the bound on one unit, on a Poisson sample at rate "
            f"{event.rate:g} of at most {event.most:,}"
        )
    if isinstance(event, events.BallsInBins):
        return f"one Gaussian release of the whole run in {len(event.gram)} secret bins, noise {event.noise_multiplier:.6g}"
    if isinstance(event, events.EpsilonDelta):
        return f"a mechanism known to be ({event.epsilon:g}, {event.delta:g})-differentially private"
    if isinstance(event, events.Zcdp):
        return f"a mechanism known to be {event.rho:g}-zCDP"
    if isinstance(event, events.NotPrivate):
        return "a release without any protection"
    if isinstance(event, events.Nothing):
        return "nothing"
    return f"a release of kind {events.CODEC.names[type(event)]}"
