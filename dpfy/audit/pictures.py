"""Checks of synthetic images, by record and replay: nothing but noisy sums tells two sets of
pictures apart.
"""

from __future__ import annotations

from collections.abc import Callable

from dpfy.audit import replay
from dpfy.audit.bench import Bench, Bug


def synthetic_images(bench: Bench, bug: Bug) -> str | None:
    """With the same noisy sums the same images are published, whatever the pictures; mechanisms are
    given what is as close as declared.
    """
    for name, run, one, other, strangers in bench.pictures(bug):
        for fault in replay.check(run, one, other):
            if not (strangers and fault.kind == "distance"):
                return f"{name}: {fault}"
    return None


def image_bills(bench: Bench, bug: Bug) -> str | None:
    """All sums together are within the claim."""
    spent, claimed = bench.picture_squares(bug)
    return None if spent <= claimed else f"sums take {spent / claimed:.2f} times what is claimed"


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "synthetic images": synthetic_images,
    "image bills": image_bills,
}
