"""Typed errors. Every message is one line that names what is wrong, the value seen and the rule or
the way out.

Everything that is wrong at once: a user who mends a file should not be sent back once for each
mistake.

Packages that not every installation has: what is missing, and the one command that installs
it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from types import FrameType

INNER = frozenset(
    {"dpfy", "dpfy_lab", "torch", "lightning", "lightning_fabric", "transformers", "accelerate"}
)
"""Packages whose lines are not the caller's: dpfy, and tools that drive it."""


class DpfyError(Exception):
    """Base of every error that dpfy raises on purpose; the command line turns it into one line and
    exit status 2.

    One that is sent to another process arrives there as it was; values that cannot be sent arrive
    as text.
    """

    def __reduce__(self) -> tuple[Callable[..., DpfyError], tuple[object, ...]]:
        known = {
            name: v if isinstance(v, str | int | float | None) else _short(v)
            for name, v in vars(self).items()
        }
        return _arrived, (type(self), self.args, known)


class InvalidInput(DpfyError, ValueError):
    """A value breaks a rule. The message reads ``field: got value; rule``."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, value, rule
        super().__init__(f"{field}: got {_short(value)}; {rule}")


class Unsupported(DpfyError):
    """A combination that has no proof or no implementation here. Says what to do instead; never a
    silent fallback.
    """

    def __init__(self, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out
        super().__init__(f"{what} is not supported; {way_out}")


def warn(words: str) -> None:
    """A UserWarning that points at the line of the caller's own code."""
    level = 2
    above: FrameType | None = sys._getframe(1)
    while above is not None and str(above.f_globals.get("__name__")).partition(".")[0] in INNER:
        level, above = level + 1, above.f_back
    warnings.warn(words, stacklevel=level)


UNREADABLE = (
    DpfyError,
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a value of JSON raises that was damaged, or written by somebody else, where it is read."""


def why(problem: Exception) -> str:
    """An error in words that may be shown: those of dpfy's own, of others the type alone."""
    return str(problem) if isinstance(problem, DpfyError) else type(problem).__name__


def refusal(attempt: Callable[..., object], *arguments: object) -> str | None:
    """None if ``attempt(*arguments)`` has an answer, else why it is not supported and what to do
    instead.
    """
    try:
        attempt(*arguments)
    except Unsupported as error:
        return str(error)
    return None


class BudgetExceeded(DpfyError):
    """A reservation would spend more than the ledger's budget allows. Nothing was written and no
    data was read.
    """


class Corrupt(DpfyError):
    """A file of a run (ledger, checkpoint, report, model) is damaged, torn or belongs to another
    run.
    """

    def __init__(self, file: str, problem: str) -> None:
        self.file, self.problem = file, problem
        super().__init__(f"{file}: {problem}")


class Internal(DpfyError):
    """A result contradicts a law that it must obey (a total of one, an upper bound above a lower
    one): it is withheld, not printed.
    """

    def __init__(self, law: str, seen: str) -> None:
        self.law, self.seen = law, seen
        super().__init__(
            f"internal check failed: {law}, but {seen}; no answer is given, please report this "
            f"with the command and its values"
        )


class Busy(DpfyError):
    """Another process holds the run or the ledger."""


class Lost(DpfyError):
    """Another rank of a run failed, disagrees or is gone: nothing is released until all ranks go on
    together.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"ranks: {why}; mend it there, then start all ranks again and resume the run"
        )


def _arrived(
    kind: type[DpfyError], args: tuple[object, ...], known: dict[str, object]
) -> DpfyError:
    error = kind.__new__(kind, *args)
    vars(error).update(known)
    return error


def _short(value: object, limit: int = 80) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number with too many digits to write
        text = f"a {type(value).__name__} of thousands of digits"
    if len(text) <= limit:
        return text
    if isinstance(value, str) and value.startswith(
        ("/", "~/", "./")
    ):  # of a path the end tells most
        return "'..." + text[4 - limit :]
    return text[: limit - 3] + "..."


class UnabridgedError(InvalidInput):
    """A problem whose rule is a list that must be told whole, however long it is."""


class MultipleErrors(UnabridgedError):
    """More than one value breaks a rule. The message is one line that holds them all, numbered."""

    def __init__(self, problems: Iterable[InvalidInput]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.field, first.value, first.rule)
        told = " ".join(f"({k}) {problem}" for k, problem in enumerate(self.problems, start=1))
        self.args = (f"{len(self.problems)} problems: {told}",)


def each(problem: InvalidInput) -> tuple[InvalidInput, ...]:
    """The problems that an error holds, one by one."""
    return problem.problems if isinstance(problem, MultipleErrors) else (problem,)


def attempted(attempt: Callable[..., object], *arguments: object) -> list[InvalidInput]:
    """What is wrong with ``attempt(*arguments)``, as far as it says."""
    try:
        attempt(*arguments)
    except InvalidInput as problem:
        return list(each(problem))
    return []


def raise_all(problems: Iterable[InvalidInput]) -> None:
    """Raise nothing, the one problem itself, or all of them as one, each told once. A value that is
    wrong is not called missing too.
    """
    found = list({str(problem): problem for problem in problems}.values())
    wrong = {problem.field for problem in found if problem.value is not None}
    found = [p for p in found if p.value is not None or p.field not in wrong]
    if len(found) > 1:
        raise MultipleErrors(found)
    if found:
        raise found[0]


EXTRAS = {
    "pyarrow": "data",
    "pandas": "data",
    "transformers": "text",
    "peft": "text",
    "accelerate": "text",
    "datasets": "text",
    "lightning": "lightning",
    "flwr": "flower",
    "starlette": "serve",
    "uvicorn": "serve",
    "optuna": "optuna",
    "ray": "ray",
    "mkdocs": "docs",
}
"""Import name to the extra of dpfy that brings it; what is not here comes with dpfy itself, or
under its own name.
"""
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "PIL": "pillow",
    "dp_accounting": "dp-accounting",
    "google.protobuf": "protobuf",
    "dpfy_lab": "dpfy-lab",
}
"""Import name to the name that pip knows, where they differ."""


def way_out(module: str) -> str:
    """How to install what `import module` wants."""
    top = module.partition(".")[0]
    if top in EXTRAS:
        return f'install it: pip install "dpfy[{EXTRAS[top]}]"'
    return f"install it: pip install {DISTRIBUTIONS.get(top, top)}"


def missing(what: str, module: str) -> Unsupported:
    """The refusal of `what`, which needs a package that is not installed."""
    top = module.partition(".")[0]
    return Unsupported(f"{what} without the package {DISTRIBUTIONS.get(top, top)}", way_out(module))
