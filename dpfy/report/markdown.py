"""report.md: the report for a model's page, with the front matter that model hubs read."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dpfy.report.html_page import content, environment

if TYPE_CHECKING:
    import jinja2

NAME = "report.md"
SPECIAL = re.compile(r"([\\`*_\[\]<>|#~])")


def render(card: dict[str, Any], audit: dict[str, Any] | None = None) -> str:
    """The page in Markdown. A function of its arguments alone; no text of the report is read as
    markup.
    """
    return _environment().get_template("report.md.j2").render(**content(card, audit))


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return environment().overlay(finalize=plain)


def plain(value: Any) -> Any:
    """Text as Markdown shows it literally, in one line. Front matter is quoted by `tojson` and
    passes.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    line = "".join(c if c.isprintable() else " " for c in value)
    return SPECIAL.sub(r"\\\1", line)
