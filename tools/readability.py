"""How readable the documentation is: `python tools/readability.py [PAGE ...] [--long]`.

For every page: words, words in a sentence on average, the longest sentence, and the Flesch reading
ease (higher is easier). Code, tables, formulas and link targets do not count. `--long` lists the
sentences above the limit.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS, LONGEST, LEAST_FLESCH = 18, 40, 55.0
"""Words in a sentence on average, words in any sentence, and the reading ease of a guide."""

HARDER = ("benchmarks/", "notation.md", "overview.md")
"""Pages of docs/ that need not reach the reading ease: they are no guides."""

LEFT_OUT = {"decisions.md", "security.md"}
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1`* *$", re.M | re.S)
WORD = re.compile(r"[A-Za-z][A-Za-z'\-]*|\d[\d.,]*")
ENDS = re.compile(r"(?<=[.!?:;])[\"')*_]*\s+(?=[\"'(*_`\[]*[A-Z0-9`])|\n{2,}")


@dataclass(frozen=True)
class Page:
    """What was counted on a page."""

    name: str
    sentences: tuple[str, ...]

    @property
    def words(self) -> int:
        """All words."""
        return sum(len(WORD.findall(each)) for each in self.sentences)

    @property
    def average(self) -> float:
        """Words in a sentence."""
        return self.words / max(1, len(self.sentences))

    @property
    def longest(self) -> int:
        """Words of the longest sentence."""
        return max((len(WORD.findall(each)) for each in self.sentences), default=0)

    @property
    def flesch(self) -> float:
        """Reading ease: 206.835 - 1.015 words a sentence - 84.6 syllables a word (Flesch 1948)."""
        spoken = [word for each in self.sentences for word in WORD.findall(each)]
        count = sum(map(syllables, spoken))
        return 206.835 - 1.015 * self.average - 84.6 * count / max(1, len(spoken))

    @property
    def too_long(self) -> list[str]:
        """Sentences above the limit."""
        return [each for each in self.sentences if len(WORD.findall(each)) > LONGEST]


def syllables(word: str) -> int:
    """Groups of vowels, less a silent e at the end; at least one. Numbers count as one."""
    word = word.lower()
    groups = len(re.findall(r"[aeiouy]+", word))
    silent = word.endswith("e") and not word.endswith(("le", "ee")) and groups > 1
    return max(1, groups - silent)


def prose(text: str) -> str:
    """The running text of a page: without code, tables, headings, comments and targets."""
    text = FENCE.sub("\n\n", text)
    text = re.sub(r"<!--.*?-->|<[^>]+>|\$[^$\n]+\$", " ", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "Code", text)  # a name in code is one word, as it is read
    kept = []
    for line in text.splitlines():
        if re.match(r"\s*(\||#)", line):
            kept.append("")
        elif re.match(r"\s*([-*+]|\d+\.)\s", line):
            kept += ["", re.sub(r"^\s*([-*+]|\d+\.)\s+", "", line)]
        else:
            kept.append(line.strip())
    return "\n".join(kept)


def read(path: Path) -> Page:
    """Count one page."""
    parts = (" ".join(part.split()) for part in ENDS.split(prose(path.read_text("utf-8"))))
    sentences = tuple(part for part in parts if len(WORD.findall(part)) > 2)
    inside = path.is_relative_to(ROOT)
    return Page(str(path.relative_to(ROOT)) if inside else path.name, sentences)


def pages() -> list[Path]:
    """README and every page of the site that is written by hand."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in LEFT_OUT]
    return [ROOT / "README.md", *docs]


def problems(page: Page) -> list[str]:
    """What is above or below the limits."""
    found = []
    if page.average > MOST_WORDS:
        found.append(f"{page.average:.1f} words a sentence")
    if page.longest > LONGEST:
        found.append(f"a sentence of {page.longest} words")
    guide = not page.name.startswith(tuple(f"docs/{name}" for name in HARDER))
    if guide and page.flesch < LEAST_FLESCH:
        found.append(f"reading ease {page.flesch:.0f}")
    return found


def main() -> int:
    """Print one line for each page; the exit status is 1 where a page misses a limit."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("pages", nargs="*", type=Path)
    options.add_argument("--long", action="store_true", help="list sentences above the limit")
    given = options.parse_args()
    found = [read(path.resolve()) for path in given.pages or pages()]
    print(f"{'page':44} {'words':>6} {'average':>8} {'longest':>8} {'ease':>6}")
    for page in found:
        wrong = "; ".join(problems(page))
        print(
            f"{page.name:44} {page.words:6} {page.average:8.1f} {page.longest:8} "
            f"{page.flesch:6.0f}  {wrong}"
        )
        if given.long:
            for sentence in page.too_long:
                print(f"    {sentence}")
    return int(any(map(problems, found)))


if __name__ == "__main__":
    sys.exit(main())
