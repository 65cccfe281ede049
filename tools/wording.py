"""Words and phrases of the old style, which no page, help text or message uses: `python
tools/wording.py` lists every hit with what to write instead.

Pages are read without code, help texts are the docstrings of commands, and messages are the string
constants of dpfy/ that are sentences or parts of one. Names, keys and stored words are single words
in quotes or code, and are left alone: their bytes must not change.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

INSTEAD = {
    "bill": "charge",
    "bills": "charges",
    "billed": "charged",
    "billing": "charging",
    "rebilled": "charged again",
    "purse": "privacy budget",
    "lent": "reserved",
    "paid back": "released",
    "card": "privacy report, report",
    "cards": "privacy reports, reports",
    "noise in shares": "distributed noise",
    "at hand": "given, these",
    "begun": "started",
    "begin anew": "start again",
    "begins anew": "starts again",
    "anew": "again",
    "told": "given, distinguished, shown",
    "heard of": "known",
    "bears": "supports, carries",
    "bears out": "confirms",
    "stands on": "is in, rests on",
    "stand on": "are in, rest on",
    "stands alone": "is the only one",
    "stands as": "is",
    "stands by itself": "is separate",
    "stated": "given, declared, reported",
    "unstated": "not given",
    "mended": "fixed",
    "in words": "say what it is",
    "held to": "checked against",
    "holds good": "is true",
    "hold good": "are true",
    "nothing but": "only",
    "none but": "only",
    "as ever": "as before",
    "as good as": "almost",
    "as it were": "leave it out",
    "thus far": "so far",
    "thereof": "of it",
    "thereby": "so",
    "whereby": "by which",
    "wherein": "in which",
    "whereupon": "then",
    "hitherto": "so far",
    "henceforth": "from now on",
    "lest": "so that ... not",
    "heed": "follow",
    "heeds": "follows",
    "heeded": "followed",
    "shall": "must, will",
    "ought": "should",
    "aught": "anything",
    "naught": "nothing",
    "betimes": "early",
    "whoever": "anyone who",
    "whosoever": "anyone who",
    "save for": "except",
    "beforehand": "in advance",
    "for good": "permanently",
    "for nothing": "at no cost, without effect",
    "in vain": "without effect",
    "in place of": "instead of",
    "taken apart": "split",
    "takes apart": "splits",
    "told apart": "distinguished",
    "strays": "untracked uses",
    "snug": "padded",
    "shelf": "buffers",
    "be had": "be reached, exist",
    "is had": "exists",
    "come by": "get",
    "is met": "is found, is reached",
    "are met": "are found, are reached",
    "counts whole": "counts in full",
    "counted whole": "counted in full",
    "made good": "repaired",
    "makes good": "repairs",
    "left open": "not decided",
    "vouches": "confirms",
    "earns": "gets",
    "gives way": "changes",
    "apiece": "each",
    "thrice": "three times",
    "needs must": "must",
    "by word of": "as declared by",
    "is nobody's": "belongs to nobody",
}
"""What the old style said, and what to write."""

ALLOWED = (
    "bill of materials",
    "bills of materials",
    # Words that reports store and that are compared exactly with those of earlier versions:
    "not stated",
    "whoever knows it can remove the noise",
    "all of it: settings, scores and models are billed",
)
"""Phrases that stay: a term of the field, and stored words."""

FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1`* *$", re.M | re.S)
OLD = re.compile(
    r"(?<![\w.\-/])("
    + "|".join(re.escape(each).replace(r"\ ", r"\s+") for each in sorted(INSTEAD, key=len)[::-1])
    + r")(?![\w\-/]|\.\w|'\w)",
    re.IGNORECASE,
)


def hits(text: str) -> list[tuple[str, str]]:
    """Every old phrase of a text, with the words around it."""
    for each in ALLOWED:
        text = re.sub(each, " " * len(each), text, flags=re.I)
    return [
        (" ".join(found[1].lower().split()), text[max(0, found.start() - 45) : found.end() + 35])
        for found in OLD.finditer(text)
    ]


def pages() -> Iterator[tuple[str, str]]:
    """The prose of every page: without code, link targets and comments."""
    root = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
    for page in [*(ROOT / name for name in root), *sorted((ROOT / "docs").rglob("*.md"))]:
        text = FENCE.sub("\n", page.read_text("utf-8"))
        text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.S)
        text = re.sub(r"`[^`\n]*`|\"\w+\"", "`_`", text)
        yield str(page.relative_to(ROOT)), re.sub(r"\]\([^)]*\)", "]", text)


def messages() -> Iterator[tuple[str, str]]:
    """The text constants of dpfy/ that are sentences or parts of one, the help of its commands, and
    the words of the templates of its reports.
    """
    for path in sorted((ROOT / "dpfy").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        command = "cli" in path.parts
        yield from ((f"{_at(path)}:{line}", text) for line, text in _texts(tree, command))
    for path in sorted((ROOT / "dpfy" / "report" / "templates").iterdir()):
        text = re.sub(
            r"<style.*?</style>|<script.*?</script>", " ", path.read_text("utf-8"), flags=re.S
        )
        yield _at(path), re.sub(r"<[^>]+>|\{[{%#].*?[}%#]\}", " ", text, flags=re.S)


def _at(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _texts(tree: ast.Module, command: bool) -> Iterator[tuple[int, str]]:
    docs, parts = set(), set()
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                docs.add(id(child.value))
        if isinstance(node, ast.JoinedStr):
            parts.update(id(value) for value in node.values)
            yield (
                node.lineno,
                "".join(
                    str(value.value) if isinstance(value, ast.Constant) else " X "
                    for value in node.values
                ),
            )
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        text = node.value
        if id(node) in docs and not command:
            continue
        if id(node) not in parts and " " in text.strip():
            yield node.lineno, re.sub(r"`[^`\n]*`|\"[^\"\n]*\"|=\w+", " _ ", text)


def found() -> list[str]:
    """One line for each hit."""
    return [
        f"{place}: {word!r} (write: {INSTEAD[word]}): ...{' '.join(around.split())}..."
        for place, text in (*pages(), *messages())
        for word, around in hits(text)
    ]


def main() -> int:
    """Print every hit; the exit status is 1 where there is one."""
    lines = found()
    print("\n".join(lines) or f"none of {len(INSTEAD)} words and phrases of the old style is used")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
