"""How the figures on held-out records came to be on the card: declared public, billed, withheld, or
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpfy.core import check, events
from dpfy.core.errors import Corrupt
from dpfy.core.ledger import Ledger
from dpfy.report import uses
from dpfy.report.words import is_absent

KIND = "evaluation"
WORDS = {
    "public": "measured on test data declared public, by the user or as part of a public data set: "
    "exact, not covered by the guarantee",
    "billed": "measured on private held-out records and released with noise; billed in the ledger, "
    "and covered by the guarantee",
    "withheld": "withheld: the held-out records were not declared public, and no release of "
    "figures on them was billed",
    "none": "no test data was given to the run",
}


def words(test: str) -> str:
    """What a reader must know about figures of this kind."""
    return WORDS[check.one_of("evaluation.test", test, WORDS)]


def row(test: str, facts: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """The card's word on its evaluation.

    Guarantees: figures stand on a card only if their data was declared public or if the ledger
    holds the bill for them.
    """
    told = [
        name for name in ("utility", "confusion") if name in facts and not is_absent(facts[name])
    ]
    if told and test not in ("public", "billed"):
        raise Corrupt("privacy.json", f"states {told[0]} though the evaluation is {test}")
    if test != "billed":
        return {"test": test, "words": words(test)}
    bills = [p.event for p in uses.of_kinds(ledger, KIND) if isinstance(p.event, events.Gaussian)]
    if not bills:
        raise Corrupt("privacy.json", "states a billed evaluation that the ledger does not hold")
    return {"test": test, "words": words(test), "noise_multiplier": bills[0].noise_multiplier}
