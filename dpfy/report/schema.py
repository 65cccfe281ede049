"""The schema of privacy.json, shipped with the package and versioned, and a validator of the part
of JSON Schema that it uses.

Written here because a run must be able to end on a machine that has only torch; the tests
hold it against the jsonschema package, on whole reports and on damaged ones.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from importlib import resources
from typing import Any

from dpfy.core.errors import Corrupt

FORMAT = "dpfy-privacy-card-2"
FORMATS = {"dpfy-privacy-card-1": "privacy-card-1.json", FORMAT: "privacy-card-2.json"}
"""Every format that is understood, and its schema."""

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
KNOWN = {"$schema", "$id", "$defs", "$ref", "title", "description", "type", "properties", "required", "additionalProperties",  # noqa: E501
         "items", "minItems", "maxItems", "enum", "const", "pattern", "minLength", "minimum", "maximum", "exclusiveMinimum",  # noqa: E501
         "exclusiveMaximum", "anyOf"}  # fmt: skip
"""The keywords understood; the schema uses no other, and a test says so."""


@lru_cache(maxsize=4)
def schema(format: str = FORMAT) -> dict[str, Any]:
    """The JSON Schema of a format."""
    text = resources.files("dpfy.report").joinpath("schema", FORMATS[format]).read_text()
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def check(card: Any) -> None:
    """Raise `Corrupt`, naming the field, if `card` does not follow the schema."""
    found = problem(card)
    if found:
        raise Corrupt("privacy.json", found)


def problem(card: Any) -> str | None:
    """The first thing in `card` that the schema does not allow, with its field; None if there is
    none.
    """
    known = schema(
        card["format"] if isinstance(card, dict) and card.get("format") in FORMATS else FORMAT
    )
    found = _first(card, known, "", known["$defs"]) or _unprintable(card, "")
    return f"{found[0] or 'the report'} {found[1]}" if found else None


Problem = tuple[str, str] | None


def _unprintable(value: Any, place: str) -> Problem:
    """Text that would do something to a terminal or a page instead of being read: no report holds
    any.
    """
    if isinstance(value, str):
        return None if value.isprintable() else (place, "holds characters that cannot be printed")
    if isinstance(value, dict):
        parts = [(key, f"{place} (a name)".strip()) for key in value]
        parts += [(part, f"{place}.{key}".lstrip(".")) for key, part in value.items()]
    else:
        parts = (
            [(part, f"{place}.{n}") for n, part in enumerate(value)]
            if isinstance(value, list)
            else []
        )
    return next((found for part, at in parts if (found := _unprintable(part, at))), None)


def _first(value: Any, rule: Any, place: str, known: dict[str, Any]) -> Problem:
    if rule is True or rule is False:
        return None if rule else (place, "is not allowed")
    if "$ref" in rule:
        return _first(value, known[rule["$ref"].removeprefix("#/$defs/")], place, known)
    if "anyOf" in rule:
        found = [_first(value, option, place, known) for option in rule["anyOf"]]
        if all(found):
            return max((f for f in found if f), key=lambda f: len(f[0]))
    kind = rule.get("type")
    if kind and not _is(value, kind):
        return place, f"must be of type {kind}"
    if "const" in rule and not _equal(value, rule["const"]):
        return place, f"must be {rule['const']!r}"
    if "enum" in rule and not any(_equal(value, allowed) for allowed in rule["enum"]):
        return place, f"must be one of {', '.join(map(str, rule['enum']))}"
    for test in (_text, _number, _object, _array):
        if found_here := test(value, rule, place, known):
            return found_here
    return None


def _equal(value: Any, allowed: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind]) or (
        kind == "integer" and isinstance(value, float) and value.is_integer()
    )


def _text(value: Any, rule: dict[str, Any], place: str, known: dict[str, Any]) -> Problem:
    if not isinstance(value, str):
        return None
    if "pattern" in rule and not re.search(rule["pattern"], value):
        return place, f"must match {rule['pattern']}"
    return (place, "must not be empty") if len(value) < rule.get("minLength", 0) else None


def _number(value: Any, rule: dict[str, Any], place: str, known: dict[str, Any]) -> Problem:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    bounds = (
        ("minimum", "at least", lambda v, b: v >= b),
        ("maximum", "at most", lambda v, b: v <= b),
        ("exclusiveMinimum", "above", lambda v, b: v > b),
        ("exclusiveMaximum", "below", lambda v, b: v < b),
    )
    for name, words, holds in bounds:
        if name in rule and not holds(value, rule[name]):
            return place, f"must be {words} {rule[name]}"
    return None


def _object(value: Any, rule: dict[str, Any], place: str, known: dict[str, Any]) -> Problem:
    if not isinstance(value, dict):
        return None
    for name in rule.get("required", ()):
        if name not in value:
            return f"{place}.{name}".lstrip("."), "is missing"
    fields, rest = rule.get("properties", {}), rule.get("additionalProperties", True)
    for name, part in value.items():
        if found := _first(part, fields.get(name, rest), f"{place}.{name}".lstrip("."), known):
            return found
    return None


def _array(value: Any, rule: dict[str, Any], place: str, known: dict[str, Any]) -> Problem:
    if not isinstance(value, list):
        return None
    if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", len(value)):
        return (
            place,
            f"must have {rule.get('minItems', 0)} to {rule.get('maxItems', 'any number of')} items",
        )
    for n, part in enumerate(value):
        if found := _first(part, rule.get("items", True), f"{place}.{n}", known):
            return found
    return None
