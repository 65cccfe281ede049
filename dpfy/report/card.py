"""privacy.json: the guarantee of a run with everything without which it means nothing, computed from the ledger, never typed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.core.codec import digest, number
from dpfy.core.errors import Unsupported
from dpfy.core.guarantee import Guarantee
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of, write_atomically
from dpfy.plan import pairs
from dpfy.plan.recipe import Plan

FORMAT = "dpfy-privacy-card-1"
NAME = "privacy.json"
COVERED_FILES = ("plan.json", "config.toml", "metrics.jsonl", "model.safetensors")
RELEASED = "every noisy step, and so every intermediate model and average; not the last model alone"


@dataclass(frozen=True)
class RunFacts:
    """What a finished training knows about itself."""

    plan: Plan
    guarantee: Guarantee
    steps_done: int
    utility: dict[str, float]
    provenance: dict[str, str]


def build(folder: Path, run: RunFacts, ledger: Ledger) -> dict[str, Any]:
    """The card of the run in `folder`. Every number comes from the plan, the ledger or a file."""
    plan, recipe = run.plan, run.plan.recipe
    files = {name: sha256_of(folder / name) for name in COVERED_FILES if (folder / name).is_file()}
    card: dict[str, Any] = {
        "format": FORMAT,
        "statement": run.guarantee.sentence(plan.delta),
        "guarantee": {
            "epsilon": number(run.guarantee.epsilon(plan.delta)),
            "epsilon_lower": number(run.guarantee.epsilon_lower(plan.delta)),
            "delta": plan.delta,
            "accountant": run.guarantee.accountant,
            "second_opinion": second_opinion(ledger, plan.delta, run.guarantee.accountant),
            "adjacency": recipe.adjacency.value,
            "unit": recipe.unit.name,
            "trust": run.guarantee.trust,
        },
        "mechanism": {
            "noise_multiplier": plan.noise_multiplier,
            "stddev": plan.stddev,
            "expected_batch": recipe.expected_batch,
            "records": recipe.records,
            "steps": recipe.steps,
            "theorem": pairs.find(recipe.sampler.participation, recipe.strategy).theorem,
        },
        "plan": plan.to_json(),
        "released": RELEASED,
        "steps_done": run.steps_done,
        "utility": run.utility,
        "caveats": list(run.guarantee.caveats),
        "provenance": run.provenance,
        "ledger": {"head": ledger.head, "entries": len(ledger.bodies)},
        "files": files,
    }
    return card | {"digest": digest(card)}


def second_opinion(ledger: Ledger, delta: float, first: str) -> dict[str, Any]:
    """Epsilon of the same ledger by an accountant that shares no code with the first: looser is expected, lower is an alarm."""
    name = "pld" if first == "rdp" else "rdp"
    try:
        return {"accountant": name, "epsilon": number(ledger.guarantee(accounting.accountant(name)).epsilon(delta))}
    except Unsupported as problem:
        return {"accountant": name, "epsilon": None, "reason": str(problem)}


def render(card: dict[str, Any]) -> bytes:
    """The one textual form of a card."""
    return (json.dumps(card, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write(folder: Path, run: RunFacts, ledger: Ledger) -> dict[str, Any]:
    """Build the card and write privacy.json, whole or not at all."""
    card = build(folder, run, ledger)
    write_atomically(folder / NAME, render(card))
    return card
