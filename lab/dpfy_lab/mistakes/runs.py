"""Mistakes of run folders, of their verification, and of one event's cost."""

from __future__ import annotations

from typing import Any

from dpfy.report import verify
from dpfy_lab.checks.runs import COPIED, NUMBERS, TRUNCATED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch


@mistake(
    "run-copied",
    "a copy of a run folder is taken for the run itself",
    COPIED,
    "dpfy.core.storage.identity",
)
def _(real: Any, handle: int) -> str:
    return "any file"


@mistake(
    "report-numbers-not-compared",
    "numbers in the pages of a run are not compared with its ledger",
    NUMBERS,
)
def _(patch: Patch) -> None:
    checks = {
        name: f for name, f in verify.CHECKS.items() if name != "pages say what the report says"
    }
    patch("dpfy.report.verify.CHECKS", checks)


@mistake(
    "truncated-as-poisson",
    "truncated Poisson batches are charged as Poisson ones where they may be as large as the data",
    TRUNCATED,
    "dpfy.accounting.rules.sampled._chance",
)
def _(real: Any, hits: int, draws: int, rate: float) -> float:
    return 0.0
