"""Checks of classical learners: what two neighbours tell apart, the noise of every release, and
whether minima were reached.

A fit is recorded on some records and replayed on their neighbours with the same noisy values: then
all that differs is what one record adds, and must be within the bound of its round; the number of
releases, their shapes and the model must be the same. Nothing is estimated there. The noise is
tested for its scale, with a false-alarm rate below 1e-6, and for values that have none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dpfy.audit.bench import Bench, Bug

NEIGHBOURS, NOISE, MINIMA = "neighbours of a fit", "noise of a fit", "minimum of a fit"
PROMISES = {NEIGHBOURS: "neighbours", NOISE: "noise", MINIMA: "minima"}


def kept(promise: str, bench: Bench, bug: Bug) -> str | None:
    """One kind of promise, in all cases."""
    for case, what, found, allowed in bench.fits(bug, promise):
        if not found <= allowed:
            return f"{case}: {what}: {found:.6g}, at most {allowed:.6g} is allowed"
    return None


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    name: partial(kept, promise) for name, promise in PROMISES.items()
}
