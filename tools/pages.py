"""What MkDocs calls while it builds the site: pages made from the code, pages of the project's
root, and every page in the navigation.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parent))

import reference

ROOT = Path(__file__).resolve().parents[1]
OF_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MORE = "More"


def on_config(config: Any, **_: Any) -> Any:
    """Put pages that the navigation does not name into its last section, and leave out those that
    are not there (yet).
    """
    there = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} | {
        "api.md",
        *OF_ROOT,
    }
    named: set[str] = set()

    def kept(entries: list[Any]) -> list[Any]:
        found: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                found += [
                    {title: pages} for title, inner in entry.items() if (pages := kept(inner))
                ]
            elif entry in there:
                named.add(entry)
                found.append(entry)
        return found

    config["nav"] = kept(config["nav"])
    if left := sorted(there - named):
        config["nav"].append({MORE: left})
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the API page and the pages of the project's root."""
    files.append(File.generated(config, "api.md", content=reference.api()))
    for name, source in OF_ROOT.items():
        files.append(
            File.generated(config, name, content=_moved((ROOT / source).read_text("utf-8")))
        )
    return files


NOTE = re.compile(r"^\*Not run here: .+\*\n+", re.M)
"""Why the test of the documentation leaves a block out: for those who read the source."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page as the site shows it: without notes for the test of its blocks. Links that leave docs/
    for the project's root lead to its pages here, and are plain text otherwise.
    """
    markdown = NOTE.sub("", markdown)
    depth = page.file.src_uri.count("/")
    up = "../" * (depth + 1)

    def moved(match: re.Match[str]) -> str:
        target = match[2].removeprefix(up)
        here = {source: name for name, source in OF_ROOT.items()} | {"README.md": "index.md"}
        if target.partition("#")[0] in here:
            return f"[{match[1]}]({'../' * depth}{here[target.partition('#')[0]]})"
        if not (ROOT / target.partition("#")[0]).exists():
            raise SystemExit(f"{page.file.src_uri}: dead link {match[2]}")
        return f"{match[1]} (`{target}`)"

    return re.sub(rf"\[([^\]]+)\]\(({re.escape(up)}[^)]+)\)", moved, markdown)


def _moved(text: str) -> str:
    """A page of the root as a page of docs/: files of the source are named, not linked."""
    text = (
        text.replace("](docs/", "](")
        .replace("](README.md)", "](index.md)")
        .replace("](CHANGELOG.md)", "](changelog.md)")
    )
    return re.sub(r"\[([^\]]+)\]\(((?:dpfy|lab)/[^)]+|pyproject\.toml)\)", _named, text)


def _named(match: re.Match[str]) -> str:
    if not (ROOT / match[2]).exists():
        raise SystemExit(f"dead link {match[2]}")
    return f"`{match[2]}`"
