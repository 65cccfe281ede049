"""Cards of the first format, which knew training alone: their content in the places where the
present format has it.

Nothing is computed and nothing is lost: what the first format did not state is missing, and is not
compared.
"""

from __future__ import annotations

from typing import Any

from dpfy.core.claim import ENTROPY, FIXED

FORMAT = "dpfy-privacy-card-1"
OF_SECTION = (
    "mechanism", "released", "evaluation", "steps_done", "utility", "confusion", "gradient_norms", "components", "optimizer",  # noqa: E501
)  # fmt: skip
GENERAL = (
    "statement", "guarantee", "setting", "accesses", "adjacency", "formal", "tier", "attacker", "delta", "caveats", "warnings", "ledger",  # noqa: E501
    "verification", "audit", "provenance", "files", "format", "digest",
)  # fmt: skip


def is_first(card: dict[str, Any]) -> bool:
    """Whether a card is of the first format."""
    return bool(card["format"] == FORMAT)


def raised(card: dict[str, Any]) -> dict[str, Any]:
    """A card in the layout of the present format; one that has it already as it is."""
    if not is_first(card):
        return card
    accounting, unit = card["accounting"], card["unit"]
    noise = [row for row in accounting["assumptions"] if row["what"] == "noise"]
    others = [row for row in accounting["assumptions"] if row["what"] != "noise"]
    note = accounting["sampling_note"]
    batches = {"done": note["done"], "most": note.get("most")} if "done" in note else None
    section = {name: card[name] for name in OF_SECTION} | {
        "name": "training",
        "kind": "training",
        "purpose": "training",
        "title": "Training",
        "claim": {"plan": card["plan"], "batches": batches},
        "theorem": accounting["theorem"],
        "sampling_note": note,
        "assumptions": others,
        "recorded": card["provenance"].get("recorded", "nothing by the caller"),
    }
    kept = {key: accounting[key] for key in ("accountant", "words", "without_amplification")}
    return {name: card[name] for name in GENERAL} | {
        "accounting": kept | {"assumptions": noise},
        "unit": {key: unit[key] for key in ("name", "most_records", "meaning")},
        "sections": [section],
    }


def seed_of(fixed: bool) -> str:
    """How a claim of either format names the kind of its seed."""
    return FIXED if fixed else ENTROPY
