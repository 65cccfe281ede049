"""Checks of run folders and of what they say: a copy is no second run, and a page that was edited
does not verify. And of an event whose cost was once taken for a smaller one.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
from scipy.stats import binom, norm

import dpfy
from dpfy import accounting
from dpfy.audit.observation import Discarded
from dpfy.core import events
from dpfy.core.errors import DpfyError
from dpfy.queries import plan, run
from dpfy.queries.plan import QueryTerms
from dpfy.runs.run import Run
from dpfy.tables.schema import Schema
from dpfy_lab.checks.loop import attempt, dimension, network, plan_of
from dpfy_lab.checks.published import temporary
from dpfy_lab.checks.queries import COLUMNS, people
from dpfy_lab.selftest.mistake import Found, check


@check("copied runs")
def COPIED() -> Found:
    """A run folder that was copied while the run was under way is not gone on with: both would make
    the same noise for sums of their own.
    """
    rows, planned = 4 * np.eye(8, dimension()), plan_of(8, rate=1.0, steps=6)
    with temporary() as folder:
        with network() as model, attempt(model, rows, planned, folder) as made, suppress(Discarded):
            made.run(leave=2)
        copy = folder.parent / "copy"
        shutil.copytree(folder, copy)
        with (
            network() as model,
            suppress(DpfyError),
            attempt(model, rows, planned, copy) as again,
        ):
            again.run()
            if again.seen:
                return "a run went on in a copy of its folder"
    return None


def _edited(page: Path) -> bool:
    """Whether the page states an epsilon, which is another one now."""
    text = page.read_text()
    changed = re.sub(r"epsilon(\D{0,12})1\b", r"epsilon\g<1>0.1", text, count=1)
    page.write_text(changed)
    return changed != text


@check("report numbers")
def NUMBERS() -> Found:
    """A page that states another number than the ledger gives does not verify; one that was left
    alone does.
    """
    made = plan.plan("count()", Schema.of(COLUMNS), QueryTerms(1.0, user="who", most_records=1))
    for page in ("report.md", "report.html"):
        with temporary() as folder:
            run.answer(people(), made, Run(folder, seed=3))
            if not all(finding.holds for finding in dpfy.verify(folder)):
                return "a run that nobody changed does not verify"
            if not _edited(folder / page):
                return f"{page} states no epsilon"
            if all(finding.holds for finding in dpfy.verify(folder)):
                return f"{page} states a tenth of the epsilon, and the run verifies"
    return None


@check("truncated batches")
def TRUNCATED() -> Found:
    """Poisson batches of which at most three units are kept, of three units and of four: what is
    charged is at least what the fourth one shows where all others are alike.
    """
    units, most, rate, noise, epsilon = 3, 3, 0.95, 1.0, 1.0
    at = np.linspace(-14, 12, 60_001)
    without, with_it = np.zeros_like(at), np.zeros_like(at)
    for drawn in range(units + 1):  # of the others, who each add -1 where they are kept
        chance = binom.pmf(drawn, units, rate)
        kept = rate * min(1.0, most / (drawn + 1))
        without += chance * norm.pdf(at, -min(drawn, most), noise)
        with_it += chance * (1 - kept) * norm.pdf(at, -min(drawn, most), noise)
        with_it += chance * kept * norm.pdf(at, 1 - min(drawn, most - 1), noise)
    beyond = np.maximum(with_it - np.exp(epsilon) * without, 0.0)
    shown = float(beyond.sum() * (at[1] - at[0]))
    event = events.TruncatedPoissonGaussian(units, rate, most, noise)
    charged = accounting.curve(event, accountant="tight").delta(epsilon)
    if shown <= charged * (1 + 1e-6):
        return None
    return f"a unit shows with delta {shown:.4f} at epsilon {epsilon:g}, {charged:.4f} is charged"


CHECKS = (COPIED, NUMBERS, TRUNCATED)
