"""Every seeded mistake must be caught, and the code as it is must pass the same checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from dpfy_lab.selftest.mistake import Check, Found, Mistake

SHIPPED, SHIPPED_WORDS = "as shipped", "the code as it is"


@dataclass(frozen=True)
class SelfTestRow:
    """One mistake, or None for the code as it is: what each check found, and how long it took."""

    mistake: Mistake | None
    found: dict[str, Found]
    seconds: dict[str, float]

    @property
    def name(self) -> str:
        """Of the mistake."""
        return self.mistake.name if self.mistake else SHIPPED

    @property
    def words(self) -> str:
        """What goes wrong."""
        return self.mistake.words if self.mistake else SHIPPED_WORDS

    @property
    def caught_by(self) -> list[str]:
        """The checks that raised an alarm."""
        return [name for name, line in self.found.items() if line is not None]

    @property
    def good(self) -> bool:
        """A mistake is caught by its own check; the code as it is by none."""
        return self.mistake.caught_by.name in self.caught_by if self.mistake else not self.caught_by

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "bug": self.name,
            "words": self.words,
            "good": self.good,
            "caught_by": self.caught_by,
            "why": {name: line for name, line in self.found.items() if line is not None},
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def examine(mistake: Mistake | None, checks: Iterable[Check]) -> SelfTestRow:
    """Run some checks while one mistake is switched on."""
    found: dict[str, Found] = {}
    seconds: dict[str, float] = {}
    with mistake.switched_on() if mistake else nullcontext():
        for check in checks:
            started = time.perf_counter()
            found[check.name] = check()
            seconds[check.name] = time.perf_counter() - started
    return SelfTestRow(mistake, found, seconds)


def run(
    mistakes: Iterable[Mistake],
    checks: Iterable[Check],
    *,
    every: bool = False,
    show: Callable[[SelfTestRow], None] = lambda row: None,
) -> list[SelfTestRow]:
    """The code as it is under all checks, then each mistake under its own check, or all if `every`."""
    rows = [examine(None, checks)]
    show(rows[0])
    for mistake in mistakes:
        own = mistake.caught_by
        rest = [check for check in checks if check.name != own.name] if every else []
        rows.append(examine(mistake, [own, *rest]))
        show(rows[-1])
    return rows
