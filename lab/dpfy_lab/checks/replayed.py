"""Two runs on different data, the second one with the answers of the first one's mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dpfy.audit import replay
from dpfy_lab.selftest.mistake import Found

Pairs = Iterable[tuple[str, Any, Any, bool]]
"""Names, two data sets, and whether they have nothing in common (otherwise they are neighbours)."""


def faults(run: Callable[[Any], Any], pairs: Pairs) -> Found:
    """With the same noisy values the same is published, whatever the records are; what mechanisms
    are given of neighbours is as close as declared.
    """
    for name, one, other, strangers in pairs:
        for fault in replay.check(run, one, other):
            if not (strangers and fault.kind == "distance"):
                return f"{name}: {fault}"
    return None
