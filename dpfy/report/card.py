"""privacy.json: the guarantee of a run with everything without which it means nothing, computed from the ledger, never typed.

`claims` derives from plan and ledger all that can be derived; `build` adds what only the run can tell (utility, components,
provenance). Verification derives the claims again and compares.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfy.core.codec import digest, number
from dpfy.core.guarantee import Guarantee
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of, write_atomically
from dpfy.plan import pairs
from dpfy.plan.claim import Claim
from dpfy.plan.recipe import Plan
from dpfy.report import accesses, assumptions, evaluations, meaning, numbers, schema, words
from dpfy.report.words import absent

FORMAT = schema.FORMAT
NAME = "privacy.json"
AUDIT_FILES = ("audit.json", "audit.svg", "canaries.npz")
RUN_FILES = ("plan.json", "config.toml", "metrics.jsonl", "model.safetensors")
COVERED_FILES = (*RUN_FILES, *AUDIT_FILES)
RELEASED = "every noisy step, and so every intermediate model and average; not the last model alone"
FIXED_SEED = "fixed for a test"
NO_AUDIT = "no audit was made before the run ended; an audit made later stands in audit.json and in the report"
NO_NORMS = "gradient norms were not released: showing them would cost privacy, and no reservation pays for it"
VERIFICATION = (
    "dpfy is open source (Apache-2.0). On the run folder, dpfy verify recomputes every number above from the ledger, again with a "
    "second accountant, and checks the hashes of all files: that they agree with each other, not that whoever made them was honest. "
    "A signature (dpfy sign) says who answers for them."
)


@dataclass(frozen=True)
class RunFacts:
    """What a finished training knows about itself. What it does not know stays None and is stated as absent."""

    plan: Plan
    guarantee: Guarantee
    steps_done: int
    utility: dict[str, float]
    provenance: dict[str, str]
    optimizer: dict[str, Any] = field(default_factory=dict)
    components: dict[str, Any] | None = None
    confusion: list[list[int]] | None = None
    test: str = "none"


def build(folder: Path, run: RunFacts, ledger: Ledger) -> dict[str, Any]:
    """The card of the run in `folder`. Every number comes from the plan, the ledger or a file."""
    facts: dict[str, Any] = {
        "steps_done": run.steps_done,
        "evaluation": {"test": run.test},
        "utility": {k: number(v) for k, v in run.utility.items()} or absent(evaluations.words(run.test)),
        "confusion": run.confusion or absent("there are no classes to confuse" if run.utility else evaluations.words(run.test)),
        "gradient_norms": absent(NO_NORMS),
        "audit": absent(NO_AUDIT),
        "components": run.components or absent("the run did not describe its model"),
        "optimizer": run.optimizer or absent("the run did not describe its optimizer"),
        "provenance": run.provenance,
        "files": hashes(folder),
    }
    made = sealed(facts | claims(run.plan, ledger, facts, run.guarantee.caveats, run.guarantee.trust))
    as_read: dict[str, Any] = json.loads(render(made))  # as a reader will find it, keys in order
    return as_read


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a run that is there before its card."""
    return {name: sha256_of(folder / name) for name in COVERED_FILES if (folder / name).is_file()}


def sealed(card: dict[str, Any]) -> dict[str, Any]:
    """The card with its digest; checked against the schema."""
    whole = card | {"digest": digest(card)}
    schema.check(whole)
    return whole


def claims(plan: Plan, ledger: Ledger, facts: dict[str, Any], caveats: tuple[str, ...], trust: str) -> dict[str, Any]:
    """All that follows from plan and ledger, given the stated facts of the run."""
    claim = assumptions.claim_of(ledger)
    bill = numbers.Bill(ledger.event(), ledger.adjacency, plan.accountant, plan.delta)
    epsilon = numbers.epsilon(bill)
    unit, adjacency = plan.recipe.unit, plan.recipe.adjacency
    shape = numbers.curve(bill.event, bill.adjacency, bill.accountant)
    whole = Guarantee(shape, plan.accountant, ledger.adjacency, ledger.unit, trust, caveats)
    return {
        "format": FORMAT,
        "statement": _statement(whole, ledger, plan.delta),
        "guarantee": _headline(plan, bill, trust),
        "setting": {"model": trust, "words": words.SETTINGS[trust]},
        "accesses": accesses.table(ledger, bill, shared=claim.shared is not None),
        "released": RELEASED,
        "evaluation": evaluations.row(facts["evaluation"]["test"], facts, ledger),
        "unit": {
            "name": unit.name,
            "most_records": unit.most_records,
            "meaning": words.unit_meaning(unit),
            "protection": words.protection_of(unit),
            "protection_words": words.PROTECTIONS[words.protection_of(unit)],
        },
        "adjacency": {"name": adjacency.value, "meaning": words.adjacency_meaning(adjacency)},
        "accounting": _accounting(claim, ledger, bill, facts),
        "formal": _formal(ledger, bill),
        "tier": meaning.tier(epsilon, unit, adjacency),
        "attacker": meaning.attacker(numbers.points(bill), unit),
        "delta": _delta(plan),
        "mechanism": _mechanism(plan),
        "plan": plan.to_json(),
        "caveats": list(caveats),
        "warnings": _warnings(claim, ledger, facts, epsilon),
        "ledger": ledger.basis,
        "verification": {"words": VERIFICATION, "command": "dpfy verify RUN"},
    }


def _headline(plan: Plan, bill: numbers.Bill, trust: str) -> dict[str, Any]:
    lower = numbers.epsilon_lower(bill)
    return {
        "epsilon": number(numbers.epsilon(bill)),
        "epsilon_lower": absent(f"the {plan.accountant} accountant has no lower bound") if lower is None else number(lower),
        "delta": plan.delta,
        "accountant": plan.accountant,
        "adjacency": plan.recipe.adjacency.value,
        "unit": plan.recipe.unit.name,
        "trust": trust,
    }


def _accounting(claim: Claim, ledger: Ledger, bill: numbers.Bill, facts: dict[str, Any]) -> dict[str, Any]:
    plan = claim.plan
    return {
        "accountant": plan.accountant,
        "words": ACCOUNTANTS.get(plan.accountant, f"the {plan.accountant} accountant"),
        "theorem": pairs.find(plan.recipe.sampler.participation, plan.recipe.strategy).theorem,
        "assumptions": assumptions.table(claim, facts),
        "sampling_note": assumptions.stated_note(claim),
        "without_amplification": assumptions.without_amplification(ledger, bill),
    }


ACCOUNTANTS = {
    "tight": "privacy loss distributions, composed with proven upper and lower bounds on epsilon",
    "pld": "privacy loss distributions (dp-accounting)",
    "rdp": "Rényi differential privacy",
    "zcdp": "zero-concentrated differential privacy",
    "gdp": "Gaussian differential privacy",
    "advanced": "advanced composition",
    "basic": "basic composition",
    "monte-carlo": "Monte Carlo with a proven confidence, charged to delta",
}


def _statement(whole: Guarantee, ledger: Ledger, delta: float) -> str:
    """The guarantee in one sentence that names everything it pays for."""
    kinds = dict.fromkeys(accesses.kind_of(p.name) for p in ledger.permits())
    others = [f"{kind} accesses" if kind == accesses.OTHER else kind for kind in kinds if kind != "training"]
    sentence = whole.sentence(delta)
    return sentence.replace("Training satisfies", f"Training with {', '.join(others)} satisfies", 1) if others else sentence


def _formal(ledger: Ledger, bill: numbers.Bill) -> dict[str, Any]:
    """The guarantee in every form: training alone, with tuning, as (epsilon, delta), rho-zCDP, mu-GDP and as a curve."""
    training = numbers.epsilon(bill.of(accesses.event_of_kinds(ledger, "training")))
    held: dict[str, Any] = {"training": {"epsilon": number(training), "delta": bill.delta}}
    if accesses.of_kinds(ledger, "tuning"):
        both = numbers.epsilon(bill.of(accesses.event_of_kinds(ledger, "training", "tuning")))
        held["with_tuning"] = {"epsilon": number(both), "delta": bill.delta}
    else:
        held["with_tuning"] = absent("the ledger holds no tuning; if there was any on the private data, it is not covered")
    ratio, epsilon = numbers.gaussian_ratio(bill.event, bill.adjacency), numbers.epsilon(bill)
    why = "not every release is Gaussian, or nothing protects it: no finite value is known here"
    note = ", at every epsilon; sampling cannot make it smaller" if numbers.amplified(bill.event) else ""
    held["zcdp"] = absent(why) if ratio is None else {"rho": ratio**2 / 2, "words": f"rho-zCDP{note}"}
    held["gdp"] = absent(why) if ratio is None else {"mu": ratio, "words": f"mu-GDP{note}"}
    if math.isinf(epsilon) or epsilon <= 0:
        held["gdp_equal"] = absent("epsilon is infinite or zero")
    else:
        held["gdp_equal"] = {
            "mu": numbers.gaussian_equal(epsilon, bill.delta),
            "words": "the Gaussian mechanism with the same epsilon at the stated delta: a comparison, not a claim",
        }
    curve = [{"epsilon": e, "delta": d} for e, d in numbers.points(bill)]
    held["curve"] = curve or absent("epsilon is infinite")
    return held


def _delta(plan: Plan) -> dict[str, Any]:
    records = plan.recipe.records
    below = plan.delta * records < 1
    return {
        "value": plan.delta,
        "one_over_records": 1 / records,
        "share": plan.delta * records,
        "words": f"delta is {plan.delta * records:.3g} times 1/n for n = {records:,}"
        + ("" if below else ": at this size a mechanism may publish a random record in full and still be called private"),
    }


def _mechanism(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    encoded = plan.to_json()["recipe"]
    return {
        "noise_multiplier": plan.noise_multiplier,
        "stddev": plan.stddev,
        "clip_norm": number(recipe.clip.bound.l2),
        "expected_batch": recipe.expected_batch,
        "records": recipe.records,
        "steps": recipe.steps,
        "epochs": recipe.steps * recipe.expected_batch / recipe.records,
        "sampling": encoded["sampler"],
        "sampling_words": words.participation_words(recipe.sampler.participation),
        "strategy": encoded["strategy"]["kind"],
        "noise_on_average": plan.stddev / recipe.expected_batch,
        "theorem": pairs.find(recipe.sampler.participation, recipe.strategy).theorem,
    }


def _warnings(claim: Claim, ledger: Ledger, facts: dict[str, Any], epsilon: float) -> list[str]:
    """What a reader must not overlook, most serious first."""
    found, plan = [], claim.plan
    if math.isinf(epsilon):
        found.append("There is no differential privacy guarantee.")
    elif epsilon > 10:
        found.append("Epsilon is above 10: the formal guarantee alone is no evidence of anonymity.")
    if plan.delta * plan.recipe.records >= 1:
        found.append("Delta is not below one over the number of records.")
    found += assumptions.warnings(claim)
    if not accesses.of_kinds(ledger, "tuning"):
        found.append("Tuning is not covered: if the private data guided any choice before this run, the true cost is higher.")
    if facts["steps_done"] < plan.recipe.steps:
        found.append(f"The run ended after {facts['steps_done']} of {plan.recipe.steps} steps; all of them are billed.")
    return found


def render(card: dict[str, Any]) -> bytes:
    """The one textual form of a card."""
    return (json.dumps(card, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_pages(folder: Path, card: dict[str, Any]) -> dict[str, str]:
    """Write report.html and report.md beside the card that will come; their hashes.

    Guarantees: the pages are functions of card and metrics: written again after a crash, they are the same.
    """
    from dpfy.report import html, markdown

    pages = {html.NAME: html.render(card, html.extras(folder)).encode(), markdown.NAME: markdown.render(card).encode()}
    for name, content in pages.items():
        write_atomically(folder / name, content)
    return {name: sha256_of(folder / name) for name in pages}
