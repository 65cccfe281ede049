"""What a verdict is worth: which lines of a ledger somebody outside has seen, and what could still
be forged beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.ledger import Ledger
from dpfy.core.ledger_rules import LedgerRules
from dpfy.report.signature import Signed


@dataclass(frozen=True)
class Level:
    """How far a run is fixed from outside: `name` for machines, `words` for people, and what could
    still have been changed.
    """

    index: int
    name: str
    words: str
    open: str

    def reaches(self, name: str) -> bool:
        """Whether this level is at least the one called `name`."""
        return self.index >= named(name).index


NOTHING = Level(
    0, "nothing", "nothing (no published head, no signature)",
    "The files agree with each other, and that is all. Anyone who can write to this folder could have "
    "written all of it again: the "
    "reservation, epsilon, the model and every other file.",
)  # fmt: skip
START = Level(
    1, "start", "head published at the start",
    "The reservations, and all that follows from them, were fixed before the run ended. Anyone who "
    "can write to this folder could still "
    "have exchanged the model, the figures that only the run knows (utility, settings of the "
    "optimizer), audits and derived files, and "
    "removed reservations that were made after the head was published.",
)  # fmt: skip
COMPLETION = Level(
    2, "completion", "head published at completion",
    "Ledger, report, model and every other file that the run named at its end are fixed. Anyone who can "
    "write to this folder could still "
    "have added or removed audits and derived files after the head was published, and rewritten "
    "pages that show them.",
)  # fmt: skip
SIGNATURE = Level(
    3, "signature", "signature of a given key",
    "The holder of the key answers for ledger, report and every file that they name. Only the holder "
    "could have changed them; files that "
    "are listed as not covered could be anyone's.",
)  # fmt: skip
LEVELS = (NOTHING, START, COMPLETION, SIGNATURE)
NAMES = tuple(level.name for level in LEVELS)


def named(name: str) -> Level:
    """The level of this name."""
    return LEVELS[NAMES.index(check.one_of("require", name, NAMES))]


def of_run(ledger: Ledger, published: Signed | None, *, by_key: bool) -> Level:
    """The level of a run whose ledger extends the published head, if there is one; `by_key`: a
    given key signed the run itself.

    Guarantees: a head fixes the figures only if every reservation stood in the ledger, as it stands
    now, when it was published. One that was given back or ended early since then, or was made since
    then, is not fixed by it.
    """
    if by_key:
        return SIGNATURE
    if published is None:
        return NOTHING
    seen = ledger.chain.heads.index(published.head) + 1
    if any(body["type"] == "finish" for body in ledger.bodies[:seen]):
        return COMPLETION
    then = LedgerRules.of(ledger.path.name, ledger.bodies[:seen]).permits()
    rows = [[(p.entry, p.event, p.uses) for p in permits] for permits in (then, ledger.permits())]
    if rows[0] == rows[1]:
        return START
    why = (
        "The head was published before every reservation stood in the ledger as it stands now, so "
        "it does not fix epsilon. "
    )
    return Level(
        0,
        NOTHING.name,
        "nothing (the published head does not cover every reservation)",
        why + NOTHING.open,
    )


def of_ledger(ledger: Ledger, published: Signed | None) -> Level:
    """The level of a ledger by itself."""
    if published is None:
        words = (
            "Anyone who can write to this ledger could have written it again, with other reservations, "
            "or removed lines at its end."
        )
        return Level(0, NOTHING.name, NOTHING.words, words)
    seen = ledger.chain.heads.index(published.head) + 1
    if seen == len(ledger.bodies):
        return Level(
            2,
            COMPLETION.name,
            "published head of the last line",
            "Every line was fixed when the head was published.",
        )
    rest = (
        f"Lines after line {seen} could have been rewritten or removed by anyone who can write to "
        f"this ledger."
    )
    return Level(
        1,
        START.name,
        f"published head of line {seen} of {len(ledger.bodies)}",
        f"The first {seen} lines are fixed. {rest}",
    )
