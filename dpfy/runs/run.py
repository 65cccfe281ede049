"""Where a run lives and what it may spend: one type for every family, accepted wherever `run=` is.

How a family tells what it is doing: one function, the same for all.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import LedgerBudget

ABOUT = ("model", "data", "author")


def fresh_path() -> Path:
    """A new folder under runs/ for a run that was not given one."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class Run:
    """Where a run lives and what it may spend. Every family takes one as `run=`, or a path, or None.

        run = dpfy.Run("runs/x", resume=True, checkpoint_every=30, about={"author": "me"})

    Args:
        path: The run folder: new or empty, or with `resume` that of the run to go on with.
        resume: Go on with the unfinished run in the folder.
        ledger: The ledger of the data set, which all runs on it share.
        budget: The budget of that ledger: created with it, or equal to what it has.
        seed: Fixes all randomness for a test. Such a run protects nothing, and its report says so.
        config: The configuration as text: in the form to publish, and in full. The full text is
            kept with the secrets until the run ends, so that the run can be resumed from it.
        public_data: The public data that shapes the result: one
            ``{"data": ..., "used_for": ..., "provenance": ...}`` each.
        about: For the report, in words that may be published: which `data` it is, who the `author`
            is, and what the `model` is called.
        checkpoint_every: Seconds between two checkpoints of a training run; infinity writes one
            only when `save` is called. What is released does not depend on it.

    Raises:
        InvalidInput: A value does not fit its rule, or a budget is given without a ledger.

    Example:
        >>> import dpfy
        >>> run = dpfy.Run("runs/x", about={"author": "me"})
        >>> run.path, run.resume
        ('runs/x', False)
    """

    path: Path | str = field(default_factory=fresh_path)
    resume: bool = False
    ledger: Path | str | None = None
    budget: LedgerBudget | None = None
    seed: int | None = None
    config: tuple[str, str] | None = field(default=None, repr=False)
    public_data: tuple[Mapping[str, str], ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    checkpoint_every: float = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | Path):
            raise InvalidInput(
                "run",
                type(self.path).__name__,
                "must be a path, a dpfy.Run, or None for a new folder",
            )
        if self.budget is not None and self.ledger is None:
            raise InvalidInput(
                "budget",
                self.budget.to_json(),
                "needs a ledger to be kept in (Run(ledger=...), --ledger PATH)",
            )
        check.known_keys("about", self.about, ABOUT)
        for key, said in self.about.items():
            check.one_line(f"about.{key}", said)
        for row in self.public_data:
            check.known_keys("public_data", row, ("data", "used_for", "provenance"))
            for key in ("data", "used_for", "provenance"):
                check.one_line(f"public_data.{key}", row.get(key))
        if self.checkpoint_every != math.inf:
            check.nonnegative("checkpoint_every", self.checkpoint_every)

    @classmethod
    def of(cls, given: Run | Path | str | None, **terms: Any) -> Run:
        """The run that a caller means: a path is that folder, None a new one under runs/.

        Args:
            given: What the caller gave as `run=`.
            terms: Fields for a run that does not state them itself: `ledger`, `budget`, `seed`.

        Returns:
            The run, with the terms.

        Raises:
            InvalidInput: It is none of these, or it states other terms than those of the data set.
        """
        run = given if isinstance(given, Run) else cls() if given is None else cls(given)
        added = {}
        for name, value in terms.items():
            held = getattr(run, name)
            if value is None or held == value:
                continue
            if name == "ledger" and held is not None and Path(held) == Path(value):
                continue
            if held is not None:
                raise InvalidInput(
                    f"run.{name}",
                    str(held),
                    f"must be left out, or be that of the data set: {value}",
                )
            added[name] = value
        return replace(run, **added) if added else run


class Progress(Protocol):
    """What a caller gives as `progress=`.

    dpfy.query(people, "count()", epsilon=1.0, progress=lambda what, share=None: print(what))
    """

    def __call__(self, what: str, share: float | None = None) -> None:
        """Be told.

        Args:
            what: What is being done, in words.
            share: Which share of it is done, from 0 to 1; None where nobody knows, or where it
                would tell something of the data.
        """


def quiet(what: str, share: float | None = None) -> None:
    """Show nothing."""
