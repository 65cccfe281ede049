"""Check the built site: `python tools/links.py build/site`. Every link inside leads somewhere, and
nothing is fetched from outside.

Links to other sites are listed, not followed: the check needs no network and says the same every
time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
RELATIONS = {
    "stylesheet",
    "icon",
    "preload",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
    "shortcut",
}
"""What a <link> must be related as, for a browser to fetch it by itself."""


@dataclass
class Page(HTMLParser):
    """What one page links to, what a browser fetches for it, and the names inside it that can be
    linked to.
    """

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        given = {key: value or "" for key, value in attrs}
        self.names |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in FETCHED and given.get(FETCHED[tag]):
            self.fetched.append(given[FETCHED[tag]])
        if tag == "link" and RELATIONS & set(given.get("rel", "").split()):
            self.fetched.append(given.get("href", ""))

    @classmethod
    def read(cls, path: Path) -> Page:
        """The page in a file."""
        page = cls()
        page.feed(path.read_text("utf-8"))
        return page


def check(site: Path) -> tuple[list[str], list[str]]:
    """(what is wrong, links to other sites) of a built site."""
    pages = {path.resolve(): Page.read(path) for path in sorted(site.rglob("*.html"))}
    wrong: list[str] = []
    outside: set[str] = set()
    for path, page in pages.items():
        shown = path.relative_to(site.resolve())
        wrong += [
            f"{shown}: fetches {link} from outside"
            for link in page.fetched
            if urlsplit(link).netloc
        ]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                outside.add(link)
            elif problem := _problem(path, parts.path, unquote(parts.fragment), pages):
                wrong.append(f"{shown}: {link} {problem}")
    return wrong, sorted(outside)


def _problem(path: Path, target: str, name: str, pages: dict[Path, Page]) -> str:
    found = (path.parent / unquote(target)).resolve() if target else path
    found = found / "index.html" if found.is_dir() else found
    if path.name == "404.html" and target.startswith("/"):
        return ""
    if not found.is_file():
        return "leads nowhere"
    if name and found in pages and name not in pages[found].names:
        return "names no place there"
    return ""


def main(arguments: list[str]) -> int:
    """Print what is wrong, and the links to other sites."""
    wrong, outside = check(Path(arguments[0]))
    print("\n".join(wrong))
    print(f"{len(wrong)} dead links; {len(outside)} links to other sites, not followed:")
    print("\n".join(f"  {link}" for link in outside))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
