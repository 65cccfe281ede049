"""What a seeded mistake is: names of dpfy that it replaces, and the check that must catch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from dpfy.core.errors import DpfyError
from dpfy_lab.selftest.patch import Patch, patching

Found = str | None
"""What a check returns: one line that says which promise is broken, or None."""


@dataclass(frozen=True)
class Check:
    """One promise, looked at from outside. `find` runs code of dpfy and compares what it does with
    a bound that it did not compute.

    Statistical checks have a false-alarm rate below 1e-5 (the audits: 1%). Their seeds are fixed,
    so a pass is a pass. `case` restricts a check of many cases to those whose names begin so.
    """

    name: str
    find: Callable[..., Found]
    case: str = ""

    def of(self, case: str) -> Check:
        """The same check on some cases."""
        return replace(self, case=case)

    def __call__(self) -> Found:
        """What is wrong. A typed refusal by dpfy itself counts as caught."""
        try:
            return self.find(self.case) if self.case else self.find()
        except DpfyError as refusal:
            return f"refused by the pipeline: {refusal}"


def check(name: str) -> Callable[[Callable[..., Found]], Check]:
    """Make a function a check."""
    return lambda find: Check(name, find)


@dataclass(frozen=True)
class Mistake:
    """A classic mistake. While it is switched on, dpfy makes it and claims what it always did."""

    name: str
    words: str
    caught_by: Check
    apply: Callable[[Patch], None]

    @contextmanager
    def switched_on(self) -> Iterator[Patch]:
        """A block in which dpfy makes the mistake.

        Raises:
            NoSuchTarget: A name that it replaces does not exist.
        """
        with patching() as patch:
            self.apply(patch)
            yield patch


MISTAKES: dict[str, Mistake] = {}
"""All that were imported, by name."""


def mistake(
    name: str, words: str, caught_by: Check, target: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Seed a mistake.

    Args:
        name: Of the mistake.
        words: What goes wrong.
        caught_by: The check that must catch it.
        target: The dotted name in dpfy that the decorated function replaces. The function is given
            the real one, then its arguments. Without a target, the function is given a
            :class:`Patch` and makes its replacements itself.
    """

    def seeded(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in MISTAKES:
            raise ValueError(f"two mistakes are called {name}")
        apply = (lambda patch: patch.around(target, function)) if target else function
        MISTAKES[name] = Mistake(name, words, caught_by, apply)
        return function

    return seeded
