"""The schema describes every card, refuses damaged ones, and our validator agrees with the
jsonschema package.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path

import pytest

from dpfy.core.errors import Corrupt
from dpfy.report import schema

sys.path.insert(0, str(Path(__file__).parent))
import runs


def cards(made):
    return {
        name: json.loads((made(name) / "privacy.json").read_text())
        for name in (*runs.FIVE, *runs.MORE)
    }


def keywords(rule):
    """Every keyword used anywhere in the schema."""
    if isinstance(rule, list):
        return {word for part in rule for word in keywords(part)}
    if not isinstance(rule, dict):
        return set()
    found = set(rule)
    for word, part in rule.items():
        if word in ("properties", "$defs"):
            found |= {w for inner in part.values() for w in keywords(inner)}
        elif word not in ("enum", "const", "required"):
            found |= keywords(part)
    return found


def test_the_schema_is_versioned_and_uses_only_what_the_validator_knows():
    assert schema.schema()["$id"] == "dpfy:privacy-card-2"
    assert schema.schema()["properties"]["format"]["const"] == schema.FORMAT
    assert keywords(schema.schema()) <= schema.KNOWN


def test_every_card_follows_the_schema(made):
    for name, card in cards(made).items():
        assert schema.problem(card) is None, name


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("guarantee", "epsilon"), -1, "guarantee.epsilon"),
        (("guarantee", "epsilon"), "small", "guarantee.epsilon"),
        (("guarantee", "delta"), 1.5, "guarantee.delta"),
        (("guarantee", "epsilon_lower"), None, "guarantee.epsilon_lower"),
        (("guarantee", "adjacency"), "some", "guarantee.adjacency"),
        (("guarantee", "surprise"), 1, "guarantee.surprise"),
        (("accesses", "covered"), [], "accesses.covered"),
        (("audit",), {"absent": ""}, "audit"),
        (("audit",), {}, "audit"),
        (("steps_done",), 1.5, "steps_done"),
        (("steps_done",), True, "steps_done"),
        (("digest",), "abc", "digest"),
        (("attacker", "sentences"), ["one"], "attacker.sentences"),
    ],
)
def test_damage_is_named(made, path, value, named):
    card = copy.deepcopy(cards(made)["dp-sgd"])
    place = card
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(Corrupt, match=named):
        schema.check(card)


def test_a_missing_field_is_named(made):
    for field in schema.schema()["required"]:
        card = cards(made)["dp-sgd"]
        del card[field]
        assert schema.problem(card) == f"{field} is missing"


def mutate(card, dice):
    """One random change somewhere in the card."""
    places = []

    def collect(node):
        for key, part in node.items() if isinstance(node, dict) else enumerate(node):
            places.append((node, key))
            if isinstance(part, (dict, list)):
                collect(part)

    collect(card)
    node, key = dice.choice(places)
    change = dice.choice(
        ["drop", "none", "text", "negative", "big", "list", "object", "true", "absent"]
    )
    if change == "drop":
        del node[key]
    else:
        node[key] = {
            "none": None, "text": "x", "negative": -1, "big": 1e9, "list": [], "object": {}, "true": True, "absent": {"absent": "why"},  # noqa: E501
        }[change]  # fmt: skip


def test_our_validator_agrees_with_jsonschema(made):
    jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema package is not installed")
    jsonschema.Draft202012Validator.check_schema(schema.schema())
    judge = jsonschema.Draft202012Validator(schema.schema())
    whole, dice, refused = cards(made), random.Random(0), 0
    for card in whole.values():
        assert judge.is_valid(card)
    for _ in range(250):
        card = copy.deepcopy(dice.choice(list(whole.values())))
        mutate(card, dice)
        ours, theirs = schema.problem(card) is None, judge.is_valid(card)
        assert ours == theirs, (schema.problem(card), list(judge.iter_errors(card))[:1])
        refused += not ours
    assert refused > 80
