"""The parameters of an estimator in its docstring: its own, and those that it inherits.

Each class describes the parameters that it adds, as numpydoc has them; `help` of an estimator shows
all of them, without a text that is written twice.
"""

from __future__ import annotations

import inspect
import re

SECTION = re.compile(r"^([A-Z][a-z]+)\n-{3,}\n", re.MULTILINE)
ENTRY = re.compile(r"^(\w+(?:, \w+)*) : ", re.MULTILINE)
ORDER = ("Parameters", "Attributes", "Notes", "Examples")
MERGED = ("Parameters", "Attributes")


def sections(doc: str | None) -> dict[str, str]:
    """The parts of a docstring by their titles; what comes before all of them has the title ''."""
    parts = SECTION.split(inspect.cleandoc(doc or ""))
    titles = zip(parts[1::2], parts[2::2], strict=True)
    return {"": parts[0].strip(), **{title: text.strip() for title, text in titles}}


def entries(text: str) -> dict[str, str]:
    """The paragraphs of a section, by what they describe."""
    starts = [match.start() for match in ENTRY.finditer(text)]
    ends = [*starts[1:], len(text)][: len(starts)]
    found = [text[a:b].strip() for a, b in zip(starts, ends, strict=True)]
    return {entry.split(" : ")[0]: entry for entry in found}


def documented(cls: type) -> str:
    """The docstring of a class, with the parameters and attributes that it inherits."""
    own = sections(cls.__dict__.get("__doc__"))
    for title in MERGED:
        found: dict[str, str] = {}
        for kind in cls.__mro__:
            if kind.__module__.startswith(("sklearn", "builtins")):
                continue
            for name, entry in entries(
                sections(kind.__dict__.get("__doc__")).get(title, "")
            ).items():
                found.setdefault(name, entry)
        own[title] = "\n".join(found.values())
    rest = [f"{t}\n{'-' * len(t)}\n{own[t]}" for t in ORDER if own.get(t)]
    return "\n\n".join([own[""], *rest]) + "\n"
