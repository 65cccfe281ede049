"""Configurations as words and as TOML: what is written is read back the same, whatever it holds."""

from __future__ import annotations

import random
import tomllib
from dataclasses import dataclass, field

import pytest

from dpfy.core import settings, storage
from dpfy.core.errors import InvalidInput
from dpfy.core.settings import setting


@dataclass(frozen=True)
class Left:
    """A section."""

    name: str = setting("a", "A name.")
    size: int | str = setting(3, "A size, or auto.")
    many: tuple[str, ...] = setting((), "Names.")
    rate: float | None = setting(None, "A rate.", "the best")


@dataclass(frozen=True)
class Whole:
    """A configuration."""

    left: Left = field(default_factory=Left)


SECTIONS = {"left": Left}
HOSTILE = [
    '"',
    "\\",
    "a\nb",
    "\t\x01\x7f\x80",
    "'",
    '"""',
    "😀",
    "\u2028",
    "[x]\ny = 1",
    "#",
    "=",
    " ",
    "true",
    "1979-05-27",
    "inf",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_any_text_is_written_and_read_back(name):
    config = Whole(Left(name=name, many=(name, "b")))
    read = tomllib.loads(settings.commented(config))["left"]
    assert read["name"] == name
    assert read["many"] == [name, "b"]
    word = f"left.name={settings.toml(name)}"
    assert settings.assigned(SECTIONS, [word], {}) == {"left.name": name}


def test_random_texts_and_numbers():
    rng = random.Random(7)
    for _ in range(500):
        name = "".join(
            chr(
                rng.choice(
                    [
                        rng.randrange(1, 256),
                        rng.randrange(0x20, 0xD800),
                        rng.randrange(0x10000, 0x110000),
                    ]
                )
            )
            for _ in range(6)
        )
        for value in (
            name,
            rng.randrange(-(10**20), 10**20),
            rng.gauss(0, 1) * 10.0 ** rng.randrange(-300, 300),
            rng.random() < 0.5,
        ):
            assert tomllib.loads(f"v = {settings.toml(value)}")["v"] == value


def test_words_are_values_where_the_field_takes_them():
    def given(word: str):
        return next(iter(settings.assigned(SECTIONS, [word], {}).values()))

    assert given("left.size=64") == 64
    assert given("left.size=auto") == "auto"
    assert given("left.size=true") == "true"
    assert given("left.name=64") == "64"
    assert given("left.name=a=b") == "a=b"
    assert given("left.rate=1e-5") == 1e-5
    assert given("left.rate=x") == "x"
    assert given('left.many=["a", "b"]') == ["a", "b"]
    assert given(" left.rate =2") == 2
    assert given("left.rate=1\n[x]") == "1\n[x]"
    assert given("left.rate=" + "[" * 5000) == "[" * 5000


def test_what_is_not_given_is_a_comment_with_its_default():
    shown = settings.commented(Whole())
    assert "# A rate. Default: the best.\n# rate =" in shown
    assert '# A name. Default: "a".\nname = "a"' in shown
    assert settings.as_json(Whole()) == {"left": {"name": "a", "size": 3, "many": (), "rate": None}}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("left.nmae=x", "did you mean 'name'"),
        ("lefd.name=x", "did you mean 'left'"),
        ("name=x", "--set left.name=..."),
        ("left.name=", "1 to"),
    ],
)
def test_refusals_name_the_nearest(word, said):
    with pytest.raises(InvalidInput) as refusal:
        settings.assigned(SECTIONS, [word], {})
    assert said in str(refusal.value)


def test_a_flag_that_was_not_given_is_no_gift():
    assert settings.assigned(SECTIONS, ["left.name=x"], {"left.name": None}) == {"left.name": "x"}
    with pytest.raises(InvalidInput, match="given twice"):
        settings.assigned(SECTIONS, ["left.name=x"], {"left.name": "y"})


@pytest.mark.parametrize(
    "number", ["0x" + "f" * 4000, "9" * 400, "[1, {a = 0b1" + "0" * 20_000 + "}]"]
)
def test_a_number_that_can_be_written_nowhere_is_refused_where_it_is_read(number):
    with pytest.raises(InvalidInput, match=r"whole number of more than 300 digits"):
        storage.parsed_toml("config", "job.toml", f"steps = {number}")
