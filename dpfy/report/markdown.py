"""report.md: the card for a model's page, with the front matter that model hubs read."""

from __future__ import annotations

from typing import Any

from dpfy.report.html import contradiction, environment

NAME = "report.md"


def render(card: dict[str, Any], audit: dict[str, Any] | None = None) -> str:
    """The page in Markdown. A function of its arguments alone."""
    found = audit or card["audit"]
    return environment().get_template("report.md.j2").render(card=card, audit=found, alarm=contradiction(card, found))
