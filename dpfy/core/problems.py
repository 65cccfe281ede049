"""Everything that is wrong at once: a user who mends a file should not be sent back once for each
mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dpfy.core.errors import InvalidInput


class Long(InvalidInput):
    """A problem whose rule is a list that must be told whole, however long it is."""


class Several(Long):
    """More than one value breaks a rule. The message is one line that holds them all, numbered."""

    def __init__(self, problems: Iterable[InvalidInput]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.field, first.value, first.rule)
        told = " ".join(f"({k}) {problem}" for k, problem in enumerate(self.problems, start=1))
        self.args = (f"{len(self.problems)} problems: {told}",)


def each(problem: InvalidInput) -> tuple[InvalidInput, ...]:
    """The problems that an error holds, one by one."""
    return problem.problems if isinstance(problem, Several) else (problem,)


def attempted(attempt: Callable[..., object], *arguments: object) -> list[InvalidInput]:
    """What is wrong with ``attempt(*arguments)``, as far as it says."""
    try:
        attempt(*arguments)
    except InvalidInput as problem:
        return list(each(problem))
    return []


def raise_all(problems: Iterable[InvalidInput]) -> None:
    """Raise nothing, the one problem itself, or all of them as one."""
    found = list(problems)
    if len(found) > 1:
        raise Several(found)
    if found:
        raise found[0]
