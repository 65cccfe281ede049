"""What every release leaves: a run folder with its privacy report. The results of all families are
this, with what they released beside it.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dpfy.core import storage
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.report import card
from dpfy.runs.folder import LEDGER

if TYPE_CHECKING:
    from dpfy.core.guarantee import Guarantee
    from dpfy.report.verify import Finding


@dataclass(frozen=True, repr=False)
class Released:
    """A finished run: its folder, and its privacy report.

        answers.run, answers.guarantee, answers.epsilon, answers.report, answers.verify()

    Args:
        run: The run folder.

    Guarantees: nothing here is private: what a result shows is what its run published.

    Example:
        >>> import dpfy
        >>> ages = {"age": [30, 41, 58]}
        >>> answers = dpfy.query(ages, "sum(age)", epsilon=1.0, delta=0, schema=[
        ...     dpfy.Number("age", 0, 100)
        ... ])
        >>> answers.epsilon <= 1.0, all(finding.holds for finding in answers.verify())
        (True, True)
    """

    run: Path

    @classmethod
    def read(cls, run: str | Path, **parts: Any) -> Self:
        """The result of a finished run, with what the family released.

        Raises:
            InvalidInput: The folder holds no finished run.
        """
        made = cls(Path(run), **parts)
        _ = made.report
        return made

    @cached_property
    def report(self) -> dict[str, Any]:
        """The privacy report (privacy.json), as it was published."""
        return report_of(self.run)

    @property
    def epsilon(self) -> float:
        """What the whole run costs at `delta`: an upper bound."""
        return _number(self.report["guarantee"]["epsilon"])

    @property
    def delta(self) -> float:
        """The delta at which `epsilon` holds."""
        return float(self.report["guarantee"]["delta"])

    @cached_property
    def guarantee(self) -> Guarantee:
        """The guarantee of everything that the run's ledger holds: a curve with all that belongs
        to it. ``guarantee.epsilon(delta)`` asks it at another delta.
        """
        from dpfy import accounting

        stated = self.report["guarantee"]
        return self._ledger().guarantee(
            accounting.accountant(stated["accountant"]),
            tuple(self.report["caveats"]),
            self.report["setting"]["model"],
        )

    @property
    def statement(self) -> str:
        """The guarantee in one sentence."""
        return str(self.report["statement"])

    def verify(self, **options: Any) -> list[Finding]:
        """Check the run as ``dpfy.verify(result.run)`` does."""
        from dpfy.report.verify import verify

        return verify(self.run, **options)

    def to_json(self) -> dict[str, Any]:
        """What was released and what it costs, as JSON."""
        stated = self.report["guarantee"]
        return {
            "run": str(self.run),
            **self._told(),
            **{key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")},
            "statement": self.statement,
        }

    def _told(self) -> dict[str, Any]:
        """What the family adds to `to_json`."""
        return {}

    def _ledger(self) -> Ledger:
        return Ledger.read(self.run / LEDGER)

    def _shown(self) -> str:
        """What was released, as text; the table of a query, say."""
        told = {k: v for k, v in self._told().items() if isinstance(v, str | int | float)}
        return "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in told.items())

    def _shown_html(self) -> str:
        return f"<pre>{html.escape(self._shown())}</pre>" if self._shown() else ""

    def _where(self) -> str:
        return f"Run: {self.run}"

    def __str__(self) -> str:
        return "\n".join(part for part in (self._shown(), self.statement, self._where()) if part)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        below = html.escape(f"{self.statement} {self._where()}")
        return f"{self._shown_html()}<p>{below}</p>"


def report_of(run: str | Path) -> dict[str, Any]:
    """The privacy report of a finished run."""
    if not isinstance(run, str | Path):
        rule = "must be the folder of a finished run, as a path"
        raise InvalidInput("run", type(run).__name__, rule)
    if not (Path(run) / card.NAME).is_file():
        there = (Path(run) / LEDGER).is_file()
        rule = "is unfinished: resume it first" if there else "holds no finished dpfy run"
        raise InvalidInput("run", str(run), rule)
    found: dict[str, Any] = storage.parsed_json(
        card.NAME, storage.content(card.NAME, Path(run) / card.NAME)
    )
    return found


def _number(value: float | str) -> float:
    """A number of a report, where infinity is a word."""
    return float(value)
