"""The self-test: every seeded bug must be caught, and the code as it is must pass the same
checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dpfy.audit import checks
from dpfy.audit.bench import AS_SHIPPED, Bench, Bug
from dpfy.audit.bugs import BUGS


@dataclass(frozen=True)
class Row:
    """One bug, or the code as it is: what each check said, and how long it took."""

    bug: Bug
    said: dict[str, str | None]
    seconds: dict[str, float]

    @property
    def caught_by(self) -> list[str]:
        """The checks that raised an alarm."""
        return [name for name, words in self.said.items() if words is not None]

    @property
    def good(self) -> bool:
        """A bug is caught by its own check; the code as it is by none."""
        return self.bug.caught_by in self.caught_by if self.bug.caught_by else not self.caught_by

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "bug": self.bug.name,
            "words": self.bug.words,
            "good": self.good,
            "caught_by": self.caught_by,
            "why": {name: words for name, words in self.said.items() if words is not None},
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def examine(bench: Bench, bug: Bug, names: Iterable[str]) -> Row:
    """Run some checks on one bug."""
    said: dict[str, str | None] = {}
    seconds: dict[str, float] = {}
    for name in names:
        started = time.perf_counter()
        said[name] = checks.run(name, bench, bug)
        seconds[name] = time.perf_counter() - started
    return Row(bug, said, seconds)


def run(
    bench: Bench, *, every: bool = False, show: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """The code as it is under all checks, then each bug under its own check, or under all if
    `every`.
    """
    rows = []
    for bug in (AS_SHIPPED, *BUGS):
        names = checks.CHECKS if every or not bug.caught_by else [bug.caught_by]
        rows.append(examine(bench, bug, names))
        show(rows[-1])
    return rows
