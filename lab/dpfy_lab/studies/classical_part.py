"""What a part of the study `classical` is: cells of its own, and sections of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpfy_lab.studies.page import Section
from dpfy_lab.studies.study import Cell, Options, Results


@dataclass(frozen=True)
class Part:
    """A part of the study. `settings` says in one sentence how its settings were chosen; names of
    its cells begin with its name.

    `sections` is given the cells of this part alone, and may find none of them.
    """

    name: str
    cells: Callable[[Options], list[Cell]]
    sections: Callable[[Results], list[Section]]
    settings: str
