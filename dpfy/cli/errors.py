"""The boundary of the command line: however a verb ends, there is an exit status and at most one line
(one for each problem of a configuration), never a traceback.

0 is success, 1 a check that failed, 2 anything that could not be done, 130 and 143 an interruption.
A fault of the operating system, of numbers or of memory is explained in a sentence; a mistake of
ours is reported as an internal error, and DPFY_DEBUG=1 shows where it was made.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from dpfy.cli import output
from dpfy.core import errors
from dpfy.core.errors import DpfyError, InvalidInput, MultipleErrors, UnabridgedError

DEBUG = "DPFY_DEBUG"
REFUSED, INTERRUPTED = 2, 130
MOST_PROBLEMS = 1 << 16
"""Characters of a line that lists many problems."""


def run(command: Any, arguments: Sequence[str]) -> int:
    """The exit status of `command` (a click command) with `arguments`. The one line goes to
    standard error.

    Guarantees: no exception leaves it; with --json a failure is one JSON object on standard output,
    unless the answer was given.
    """
    output.OutputState.once = False
    as_json = "--json" in arguments
    try:
        with _quiet(), command.make_context("dpfy", list(arguments)) as context:
            command.invoke(context)
        return _ended(0)
    except typer.Exit as ended:
        return _ended(ended.exit_code)
    except KeyboardInterrupt as stopped:
        message = output.one_line(str(stopped) or "interrupted")
        return _refuse(
            {"type": "Interrupted", "message": message},
            as_json,
            getattr(stopped, "code", INTERRUPTED),
        )
    except BaseException as problem:
        if isinstance(problem, SystemExit | GeneratorExit):
            raise
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return _refuse(described(problem), as_json, REFUSED)


def described(problem: BaseException) -> dict[str, Any]:
    """What went wrong: type, one-line message, and for bad input its field, value and rule."""
    most = MOST_PROBLEMS if isinstance(problem, UnabridgedError) else output.MOST_LINE
    told: dict[str, Any] = {
        "type": type(problem).__name__,
        "message": output.one_line(_message(problem), most),
    }
    if isinstance(problem, MultipleErrors):
        return told | {
            "type": InvalidInput.__name__,
            "problems": [described(each) for each in problem.problems],
        }
    if isinstance(problem, InvalidInput):
        value, rule = output.one_line(_repr(problem.value), 80), output.one_line(problem.rule, most)
        return told | {
            "type": InvalidInput.__name__,
            "field": problem.field,
            "value": value,
            "rule": rule,
        }
    return told


def _message(problem: BaseException) -> str:
    if isinstance(problem, DpfyError):
        return str(problem)
    if hasattr(
        problem, "format_message"
    ):  # of the parser: a flag that does not exist, a value of another type
        return str(problem.format_message())
    if isinstance(problem, typer.Abort):
        return "interrupted"
    for kinds, words in WORDS:
        if isinstance(problem, kinds) or (_no_memory(problem) and kinds is MemoryError):
            return words(problem)
    return _ours(problem)


def _of_system(problem: BaseException) -> str:
    assert isinstance(problem, OSError)
    where = f"{problem.filename}: " if isinstance(problem.filename, str | os.PathLike) else ""
    return f"{where}{problem.strerror or problem or type(problem).__name__}"


def _not_installed(problem: BaseException) -> str:
    name = getattr(problem, "name", None) or ""
    if not isinstance(problem, ModuleNotFoundError) or name.partition(".")[0] in ("", "dpfy"):
        return _ours(problem)
    return (
        f"this needs the package {name.partition('.')[0]}, which is not installed; "
        f"{errors.way_out(name)}"
    )


def _ours(problem: BaseException) -> str:
    return (
        f"internal error: {type(problem).__name__}: {problem}; this is a mistake in dpfy "
        f"({DEBUG}=1 shows where)"
    )


WORDS: tuple[tuple[Any, Any], ...] = (
    (ImportError, _not_installed),
    (MemoryError, lambda problem: "not enough memory for this; ask for less at a time"),
    (RecursionError, lambda problem: "an input is nested too deeply"),
    (
        ArithmeticError,
        lambda problem: f"a number is too large or too small to compute with ({problem})",
    ),
    (UnicodeError, lambda problem: f"a text cannot be read or written ({problem})"),
    (OSError, _of_system),
)
"""The faults that are not ours, and how each is reported."""


def _no_memory(problem: BaseException) -> bool:
    """Whether torch or NumPy ran out of memory; torch says so with a RuntimeError."""
    return type(problem).__name__ == "OutOfMemoryError" or (
        isinstance(problem, RuntimeError) and "allocate memory" in str(problem)
    )


def _repr(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # a whole number with too many digits to write
        return type(value).__name__


def _ended(code: int) -> int:
    """The status of a verb that ended by itself, once everything it said has arrived."""
    try:
        _flush()
    except OSError as problem:
        return _refuse(
            {
                "type": "Unwritable",
                "message": f"standard output: cannot be written ({problem.strerror})",
            },
            False,
            REFUSED,
        )
    return code


def _flush() -> None:
    if sys.stdout is not None:  # None where it was closed before the start
        sys.stdout.flush()


def _refuse(error: dict[str, Any], as_json: bool, code: int) -> int:
    if as_json and not output.OutputState.once:
        with contextlib.suppress(DpfyError):
            output.tell({"error": error}, "", as_json=True)
    with contextlib.suppress(OSError):
        for line in _told(error):
            print(line, file=sys.stderr, flush=True)
    _settle()
    return code


def _told(error: dict[str, Any]) -> list[str]:
    """The line of an error; for several problems a line that counts them and one for each."""
    problems = error.get("problems", ())
    if problems:
        numbered = (f"  {k}. {each['message']}" for k, each in enumerate(problems, start=1))
        return [f"dpfy: {len(problems)} problems:", *numbered]
    return [f"dpfy: {error['message']}"] if error["message"] else []


def _settle() -> None:
    """Where standard output takes no more, let what is still buffered go nowhere: the interpreter
    would complain at its end.
    """
    try:
        _flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def _quiet() -> Any:
    """Warnings of the libraries below are not for the user of a command; -W and DPFY_DEBUG show
    them.
    """
    with warnings.catch_warnings():
        if not sys.warnoptions and not os.environ.get(DEBUG):
            warnings.simplefilter("ignore")
        yield
