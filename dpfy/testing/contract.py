"""What all contract suites share: the error that names a broken property, and simple statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from dpfy.core.codec import Codec
from dpfy.core.errors import DpfyError

DEVIATIONS = 6.0
"""Standard errors beyond which a statistic counts as wrong: a false alarm has a chance of 2e-9."""
FALSE_ALARM = 1e-9
"""The chance of a false alarm of one comparison of rates, on each side."""


class ContractBroken(AssertionError):
    """An implementation breaks a property of its interface.

    Attributes:
        property: What the interface promises, as one sentence.
        setting: The setting in which it was broken.
        seen: What was seen instead.
    """

    def __init__(self, property: str, setting: str, seen: str) -> None:
        self.property, self.setting, self.seen = property, setting, seen
        super().__init__(f"{property} Broken at {setting}: {seen}.")

    def __reduce__(self) -> tuple[type[ContractBroken], tuple[str, str, str]]:
        return type(self), (self.property, self.setting, self.seen)


def require(holds: bool, property: str, setting: str, seen: str) -> None:
    """Raise :class:`ContractBroken` unless `holds`.

    A comparison with NaN is False, so a NaN never passes.
    """
    if not holds:
        raise ContractBroken(property, setting, seen)


def require_rate(
    found: int, expected: float, trials: int, property: str, setting: str, looked_at: int = 1
) -> None:
    """Compare a count out of independent trials with its expected probability.

    Args:
        found: How often the event was seen.
        expected: Its probability.
        trials: How often it could have been seen.
        property: The property that a wrong rate breaks.
        setting: The setting, for the error.
        looked_at: Of how many counts this is the largest or the smallest.
    """
    from scipy.special import bdtr, bdtrc

    found, trials = int(found), int(trials)
    expected = min(max(expected, 0.0), 1.0)
    below = float(bdtr(found, trials, expected))
    above = float(bdtrc(found - 1, trials, expected)) if found else 1.0
    require(
        min(below, above) * looked_at > FALSE_ALARM,
        property,
        setting,
        f"a rate of {found / trials:.6g} in {trials} trials, where it must be {expected:.6g}",
    )


@contextlib.contextmanager
def typed_refusals(property: str, setting: str) -> Iterator[None]:
    """Turn an error that is no refusal of dpfy into :class:`ContractBroken`."""
    try:
        yield
    except (ContractBroken, DpfyError):
        raise
    except Exception as error:
        raise ContractBroken(property, setting, f"{type(error).__name__}: {error}") from error


def refused(attempt: Callable[[], object]) -> str | None:
    """The message with which dpfy refuses `attempt`, or None if it succeeds."""
    try:
        attempt()
    except DpfyError as error:
        return str(error)
    return None


def check_frozen_data(value: Any, what: str) -> None:
    """Check that `value` is frozen data which JSON brings back equal.

    Plans, claims and ledgers store it, so a field that changes later, or that JSON cannot hold,
    would let a report describe something else than what ran.
    """
    name = type(value).__name__
    stored = f"A {what} is a frozen dataclass of public numbers that JSON brings back equal."
    require(is_dataclass(value), stored, name, "it is no dataclass")
    require(
        value.__dataclass_params__.frozen, stored, name, "the dataclass is not frozen (frozen=True)"
    )
    table = {"checked": type(value)}
    for held in _nested(value):
        table.setdefault(type(held).__name__, type(held))
    codec = Codec(what, table)
    with typed_refusals(stored, name):
        back = codec.decode(codec.encode(value))
    require(back == value, stored, name, f"it comes back as {back!r}")
    require(hash(back) == hash(value), stored, name, "an equal object has another hash")


def _nested(value: Any) -> Iterator[Any]:
    """The dataclasses in the fields of a dataclass."""
    for field in fields(value):
        held = getattr(value, field.name)
        for part in held if isinstance(held, tuple | list) else (held,):
            if is_dataclass(part) and not isinstance(part, type):
                yield part
                yield from _nested(part)
