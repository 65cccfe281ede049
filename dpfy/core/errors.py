"""Typed errors. Every message is one line that names what is wrong, the value seen and the rule or
the way out.
"""

from __future__ import annotations

from collections.abc import Callable


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
    """A file of a run (ledger, checkpoint, card, model) is damaged, torn or belongs to another
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
