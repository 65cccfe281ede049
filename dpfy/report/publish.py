"""The forms of a card on disk: written again from privacy.json whenever asked for, an audit made
since then included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpfy.core import check
from dpfy.core.errors import Corrupt
from dpfy.core.storage import write_atomically
from dpfy.report import card as cards
from dpfy.report import compare, html_page, markdown

FORMS = ("html", "md", "json")


@dataclass(frozen=True)
class Written:
    """The text of a form, and the file it was written to."""

    text: str
    file: Path | None


def publish(run: Path, form: str) -> Written:
    """Write report.html or report.md beside the card of `run` (a folder or a card file); the JSON
    form is the card itself.

    Guarantees: a card that was edited is refused, not rendered.
    """
    check.one_of("format", form, FORMS)
    card = compare.load(run)
    folder = run if run.is_dir() else run.parent
    if form == "json":
        return Written(cards.render(card).decode(), None)
    extra = html_page.extras(folder) if run.is_dir() else {"metrics": [], "audit": None}
    try:
        text = (
            html_page.render(card, extra)
            if form == "html"
            else markdown.render(card, extra["audit"])
        )
    except (
        Exception
    ) as problem:  # a card may fit the schema and its own digest, and still make no sense
        raise Corrupt(
            cards.NAME, f"cannot be shown ({type(problem).__name__}): run dpfy verify on it"
        ) from None
    file = folder / (html_page.NAME if form == "html" else markdown.NAME)
    write_atomically(file, text.encode())
    return Written(text, file)
