"""Numbers in sentences: what a text states in figures, anyone who worded it, and whether other figures
bear it out.

Wording changes from version to version, numbers do not. So a sentence that cannot be compared word
by word is compared number by number: decimal, scientific, percentages, "1 in N", powers of ten,
digits of other scripts, and numbers written as words.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

CLOSE = 5e-3
"""A number that is printed with fewer digits may differ from the other by its rounding, and by no
more than this share.
"""
RAISED = {ord(c): n for c, n in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+", strict=True)}
DASHES = dict.fromkeys(map(ord, "‐‑‒–—−﹣－"), "-")
PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?"
NUMBER = re.compile(
    rf"(?:(?P<mantissa>{PLAIN})\s*[×·*xX]\s*)?10\s*(?:\^|\*\*)\s*[({{]?(?P<power>[+-]?\d+)"
    rf"|\b1 in (?P<of>{PLAIN})"
    rf"|(?P<sign>(?<![\w.)])-)?(?P<plain>{PLAIN})(?P<percent>\s*(?:%|percent\b|per cent\b))?"
)
WORD = re.compile(
    r"\b(zero|naught|nought|nil|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    r"|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|dozen|hundred|thousand|million|billion|trillion"
    r"|half|halves|thirds?|quarters?|fifths?|tenths?|hundredths?|thousandths?|millionths?|billionths?|trillionths?|twice|thrice|double"
    r"|triple|negligible|infinitesimal)\b",
    re.IGNORECASE,
)
"""Words for numbers. "One" is an article as often as a number, and is left out."""
PAIR = re.compile(rf"\(\s*(?:[a-zεϵ]+\s*=\s*)?({PLAIN})\s*[,;]\s*(?:[a-zδ]+\s*=\s*)?({PLAIN})\s*\)")
BEFORE_PAIR = re.compile(
    r"(?:epsilon|delta|[εϵδ]|guarantee|privacy|budget)[^.()]{0,30}$", re.IGNORECASE
)
AFTER_PAIR = re.compile(r"^\W{0,3}(?:dp\b|differential|private\b)", re.IGNORECASE)
LINK = r"(?:[^\w\n|]|\b(?:is|of|at|least|most|about|only|below|under|to|be|was|by|than|less|equals?)\b){0,6}"
EPSILON = re.compile(rf"(?:\beps(?:ilon)?\b|epsilon|[εϵ]){LINK}({PLAIN})", re.IGNORECASE)
PURE = re.compile(rf"({PLAIN})[\s-]*(?:dp\b|differential)", re.IGNORECASE)


@dataclass(frozen=True)
class PrintedNumber:
    """A number as it is printed: its value, and the worth of one unit in its last place."""

    value: float
    unit: float
    text: str

    def agrees(self, other: PrintedNumber) -> bool:
        """Whether both can be the same number, one of them printed with fewer digits: rounded to
        the nearest, or up.
        """
        coarse, fine = (self, other) if self.unit > other.unit else (other, self)
        size = max(abs(self.value), abs(other.value))
        apart = coarse.value - fine.value
        if abs(apart) <= 1e-9 * size:
            return True
        return (
            coarse.unit > fine.unit
            and -0.5 * coarse.unit <= apart < coarse.unit
            and abs(apart) <= CLOSE * size
        )

    def rounds(self, other: PrintedNumber) -> bool:
        """Whether this is the other number, rounded to as many places."""
        return abs(self.value - other.value) <= 0.5 * self.unit * (1 + 1e-6)


def folded(text: str) -> str:
    """The text with one form of every digit, sign and power."""
    raised = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda found: "^" + found.group().translate(RAISED), text)
    plain = unicodedata.normalize("NFKC", raised).translate(DASHES)
    return "".join(
        str(unicodedata.digit(c)) if c.isdigit() else c
        for c in plain
        if unicodedata.category(c) not in ("Cf", "Mn")
    )


def figures(text: str) -> list[PrintedNumber]:
    """Every number in a text, in order."""
    found = []
    for match in NUMBER.finditer(folded(text)):
        if match["power"] is not None:
            mantissa = (
                _plain(match["mantissa"]) if match["mantissa"] else PrintedNumber(1.0, 0.0, "")
            )
            scale = _power(int(match["power"]))
            made = PrintedNumber(mantissa.value * scale, mantissa.unit * scale, match.group())
        elif match["of"] is not None:
            inner = _plain(match["of"])
            made = PrintedNumber(1 / inner.value if inner.value else math.inf, 0.0, match.group())
        else:
            inner = _plain(match["plain"])
            share = 0.01 if match["percent"] else 1.0
            made = PrintedNumber(
                (-1 if match["sign"] else 1) * inner.value * share,
                inner.unit * share,
                match.group().strip(),
            )
        found.append(made)
    return found


def _plain(text: str) -> PrintedNumber:
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    places = len(mantissa.partition(".")[2]) - int((exponent or "0")[:6])
    return PrintedNumber(float(text.replace(",", "")), _power(-places), text)


def _power(exponent: int) -> float:
    return float(f"1e{max(-400, min(400, exponent))}")


def words(text: str) -> Counter[str]:
    """The numbers that a text states in words."""
    return Counter(word.lower() for word in WORD.findall(folded(text)))


def contradiction(said: str, due: str, *, whole: bool = True) -> str | None:
    """What a sentence states in numbers that the same sentence in our words does not; None where
    both state the same, in the same order.

    Without `whole` it may state fewer of them: a later version may have found more to say.
    """
    mine, ours = figures(said), figures(due)
    place = 0
    for figure in mine:
        rest = range(place, len(ours) if not whole else min(place + 1, len(ours)))
        found = next((n for n in rest if figure.agrees(ours[n])), None)
        if found is None:
            given = (
                f" where the ledger gives {ours[place].text}"
                if place < len(ours)
                else ", a number that the ledger does not give"
            )
            return figure.text + given
        place = found + 1
    if whole and len(mine) != len(ours):
        return f"nothing of a number that the ledger gives: {ours[place].text}"
    extra = words(said) - words(due)
    return (
        f"a number written as a word that the ledger does not give: {next(iter(extra))}"
        if extra
        else None
    )


@dataclass(frozen=True)
class Known:
    """All figures that the ledger gives: any number, those that are an epsilon, those that are a
    delta, and numbers in words.
    """

    all: tuple[PrintedNumber, ...]
    epsilons: tuple[PrintedNumber, ...]
    deltas: tuple[PrintedNumber, ...]
    worded: frozenset[str]

    @classmethod
    def of(cls, *trees: Any, texts: Iterable[str] = ()) -> Known:
        """The figures of JSON trees, and of texts that were written from them."""
        leaves = [leaf for tree in trees for leaf in _leaves(tree, "")]
        spoken = [str(value) for _, value in leaves] + list(texts)
        every = {figure for text in spoken for figure in figures(text)}
        named = {
            kind: tuple(_figure(v) for k, v in leaves if kind in k and _is_number(v))
            for kind in ("epsilon", "delta")
        }
        return cls(
            tuple(every),
            named["epsilon"],
            named["delta"],
            frozenset(word for text in spoken for word in words(text)),
        )

    def stranger(self, text: str) -> str | None:
        """A number in the text that is none of these; None where all are known."""
        for figure in figures(text):
            if not _among(figure, self.all):
                return figure.text
        return min(set(words(text)) - self.worded, default=None)

    def misnamed(self, text: str) -> list[str]:
        """Numbers in the text that are called an epsilon, or stand in a pair (epsilon, delta), and
        are none that the ledger gives.
        """
        plain, found = folded(text), []
        for pair in PAIR.finditer(plain):
            if BEFORE_PAIR.search(plain[: pair.start()]) or AFTER_PAIR.search(plain[pair.end() :]):
                first, second = map(_plain, pair.groups())
                if not (_among(first, self.epsilons) and _among(second, self.deltas)):
                    found.append(pair.group())
        named = [*EPSILON.findall(plain), *PURE.findall(plain)]
        return found + [f"epsilon {e}" for e in named if not _among(_plain(e), self.epsilons)]


CHOSEN = {"settings", "trials", "search"}
"""Facts of a search: a setting of a trial may be called epsilon."""


def claim_in(place: str, value: Any, known: Known) -> str | None:
    """What a fact that does not come from the ledger states about privacy and the ledger does not
    give; None where it states nothing of the kind.
    """
    if isinstance(value, str):
        return next(iter(known.misnamed(value)), None)
    *above, key = place.split(".")
    if not _is_number(value) or CHOSEN & set(place.replace(".", " ").split()):
        return None
    kinds = {"epsilon": known.epsilons, "delta": known.deltas, "rho": known.all, "mu": known.all}
    kind = kinds.get(key, known.epsilons if above and "epsilon" in key.lower() else None)
    return None if kind is None or _among(_figure(value), kind) else repr(value)


def facts(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of a JSON tree, with its place."""
    return _leaves(tree, "")


def _leaves(tree: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield f"{place}.{key}".lstrip("."), str(key)
            yield from _leaves(part, f"{place}.{key}".lstrip("."))
    elif isinstance(tree, (list, tuple)):
        for n, part in enumerate(tree):
            yield from _leaves(part, f"{place}.{n}".lstrip("."))
    else:
        yield place, tree


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _figure(value: float) -> PrintedNumber:
    """A number that is known to every digit."""
    return PrintedNumber(float(value), 0.0, repr(value))


def _among(figure: PrintedNumber, known: Iterable[PrintedNumber]) -> bool:
    return any(figure.agrees(other) for other in known)


ITEM = re.compile(r"^[\s*#>-]*\d[a-z]?(?:\s+|$)")
"""The number of an item of the page, in front of its label."""


def strange_rows(page: str, ours: str) -> list[str]:
    """Rows and lines of a page whose numbers are not those of a row with the same label, or,
    without one, of any row, of our page.

    A row is a line with ``|`` between its cells, the first of which is its label.
    """
    known, left = _rows(ours), Counter(numbers for _, numbers, _ in _rows(ours))
    labels = {label for label, _, _ in known if label}
    pairs = {(label, numbers) for label, numbers, _ in known}
    strange = []
    for label, numbers, text in _rows(page):
        fits = (label, numbers) in pairs if label in labels else left[numbers] > 0
        left[numbers] -= 1
        if not fits:
            strange.append(text)
    return strange


def _rows(page: str) -> list[tuple[str, tuple[float, ...], str]]:
    """Every line that holds numbers: its label, its numbers, and its text."""
    found = []
    for line in page.split("\n"):
        label, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        named = ITEM.sub("", label) if cells else ""
        numbers = tuple(
            figure.value
            for text in ((named, *cells) if cells else (label,))
            for figure in figures(text)
        )
        if numbers:
            found.append((" ".join(folded(named).lower().split()), numbers, " ".join(line.split())))
    return found


INLINE = {
    "a",
    "abbr",
    "b",
    "bdi",
    "code",
    "em",
    "i",
    "mark",
    "s",
    "small",
    "span",
    "strong",
    "sub",
    "sup",
    "tspan",
    "u",
    "wbr",
}
CELLS = ("td", "th")
HIDDEN = {
    "script",
    "iframe",
    "object",
    "embed",
    "link",
    "base",
    "form",
    "video",
    "canvas",
    "foreignobject",
    "template",
    "noscript",
}


class _Page(HTMLParser):
    """What a reader sees of an HTML page, and what could show more than its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.seen: list[str] = []
        self.strange: list[str] = []
        self.style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.style = tag == "style"
        if tag in HIDDEN:
            self.strange.append(f"<{tag}>")
        self.strange += [
            f"attribute {name}"
            for name, value in attrs
            if name.startswith("on") or "javascript:" in (value or "")
        ]
        self.seen += [
            f" {value} "
            for name, value in attrs
            if name in ("alt", "title", "aria-label", "content") and value
        ]
        if tag not in (*INLINE, *CELLS):
            self.seen.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.style = False
        if tag not in INLINE:
            self.seen.append("|" if tag in CELLS else "\n")

    def handle_data(self, data: str) -> None:
        if not self.style:
            self.seen.append(" ".join(data.split("\n")))
        elif (
            re.search(r"content\s*:\s*[\"'][^\"']*\w", data)
            or "\\" in data
            or "@import" in data
            or "url(" in data
        ):
            self.strange.append("a style sheet that writes text")


def page_text(page: str) -> tuple[str, list[str]]:
    """The text of an HTML page, with what in it could show something else than text."""
    read = _Page()
    read.feed(page)
    read.close()
    return "".join(read.seen), read.strange
