"""Clients as the unit of privacy: all that one of them computes on is protected together."""

from __future__ import annotations

from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Unit

CLIENT = Unit("client", protects="user")
"""One client, with all of its records, however many they are: its update is bounded as a whole."""


def check_unit(unit: Unit) -> None:
    """Refuse a plan for single examples: what is bounded, sampled and counted is a client."""
    if unit.name == "example":
        rule = (
            "a round bounds the update of a whole client: give the recipe "
            "unit=dpfy.federated.CLIENT, or the unit of by_user data"
        )
        raise InvalidInput("plan unit", unit.name, rule)
