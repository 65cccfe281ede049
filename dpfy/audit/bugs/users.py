"""Mistakes of user-level training: records protected where a user was promised to be."""

from __future__ import annotations

from typing import Any

from dpfy.audit.bench import Bug
from dpfy.audit.bugs.clipping import unclipped, wrong
from dpfy.audit.bugs.noise import scaled

SENSITIVITY = "user sensitivity"


def each_record(join: Any) -> Any:
    """Every record's gradient is shortened to the clip norm, and the user's sum is not."""
    return lambda losses, real, sizes: join(losses * (1 / sizes.clamp(min=1.0)), real, sizes)


def batch_of_the_user(join: Any) -> Any:
    """A user's records are handed to the loop one by one, each as a unit of its own."""
    return lambda losses, real, sizes: losses


BUGS = (
    Bug(
        "user-clip-records",
        "a user's gradients are clipped record by record",
        SENSITIVITY,
        engine=wrong(unclipped),
        join=each_record,
    ),
    Bug(
        "user-records-apart",
        "a user's records are summed as units of their own",
        SENSITIVITY,
        join=batch_of_the_user,
    ),
    Bug(
        "user-noise-of-record",
        "noise for one record of a user's four",
        "user noise",
        stream=scaled(1 / 4),
    ),
)
