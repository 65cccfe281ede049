"""What a guarantee means: the tier it belongs to, and what an attacker can do with everything that
was released.
"""

from __future__ import annotations

from typing import Any

from dpfy.accounting.meaning import TIERS
from dpfy.accounting.meaning import tier as tier_of
from dpfy.core.tradeoff import Points, Tradeoff
from dpfy.core.unit import Adjacency, Unit
from dpfy.report.words import percent_up, up

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)


def tier(epsilon: float, unit: Unit, adjacency: Adjacency) -> dict[str, Any]:
    """The tier of Ponomareva et al. 2023, section 5.2.1, and why. Tier 4 is ours: no finite
    epsilon.
    """
    number = tier_of(epsilon)
    if number == 4:
        return {
            "tier": 4,
            "name": TIERS[4],
            "why": "Epsilon is infinite: nothing hides what one unit contributed.",
        }
    rule = {1: "is at most 1", 2: "is above 1 and at most 10", 3: "is above 10"}[number]
    why = f"Epsilon {up(epsilon)} {rule}."
    if number == 3:
        why += (
            " By itself it is not enough evidence of anonymity: audit the model, or remove "
            "sensitive records first."
        )
    if not unit.whole:
        why += (
            f" The tiers are meant for all data of one person; here only one {unit.protects} is "
            f"protected."
        )
    elif unit.name == "example":
        why += (
            " The tiers are meant for one person: they apply here if no person has more than one "
            "record."
        )
    if adjacency is Adjacency.REPLACE_ONE:
        why += (
            " The tiers are meant for adding or removing a unit; replacing one is the stricter "
            "reading, so the tier holds."
        )
    return {"tier": number, "name": TIERS[number], "why": why}


def attacker(pairs: Points, unit: Unit) -> dict[str, Any]:
    """The strongest membership attack that the curve allows, in two sentences and in numbers."""
    whose = f"one {unit.name}"
    if not pairs:
        return {
            "sentences": [
                f"Nothing limits what an attacker can learn about {whose} of the training data "
                f"from what was released.",
                "Treat the released model as if it were the training data.",
            ],
            "guess_accuracy": 1.0,
            "at": [
                {"false_positive_rate": f, "true_positive_rate": 1.0} for f in FALSE_POSITIVE_RATES
            ],
        }
    accuracy = 0.5 + pairs[0][1] / 2
    rates = Tradeoff(pairs).hit_rates(FALSE_POSITIVE_RATES)
    return {
        "sentences": [
            f"Take someone who has seen everything that was released, who knows all of the "
            f"training data but one thing: whether "
            f"{whose} was in it. Tossing a coin, they would be right in 50% of cases; whatever "
            f"they do, they are right in at most "
            f"{percent_up(accuracy)} of cases.",
            f"If they want to be wrong about no more than 1 in 100 of those who were not in the "
            f"data, they recognise at most "
            f"{percent_up(rates[1])} of those who were; without seeing anything it would be 1%.",
        ],
        "guess_accuracy": accuracy,
        "at": [
            {"false_positive_rate": f, "true_positive_rate": t}
            for f, t in zip(FALSE_POSITIVE_RATES, rates, strict=True)
        ],
    }
