"""privacy.json: the guarantee of a run with everything without which it means nothing, computed
from the ledger, never typed.

A general part, and a section for each claim in the folder, which the claim itself describes.
`claims` derives from the ledger all that can be derived; `build` adds what only the run can tell
(provenance, and for each section its figures). Verification derives the claims again and compares.
:mod:`dpfy.report.words` reads reports of the first format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfy.accounting.user_level import of_group
from dpfy.core import events
from dpfy.core.claim import BOUNDARIES, NO, YES, Assumption, Claim, Reserved
from dpfy.core.codec import digest, number
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.guarantee import Guarantee
from dpfy.core.ledger import Ledger
from dpfy.core.storage import sha256_of, write_atomically
from dpfy.report import figures, html_page, schema, uses, words
from dpfy.report.words import absent, is_absent

FORMAT = schema.FORMAT
NAME = "privacy.json"
WINDOWS = (2, 7, 30)
"""Of how many windows of time together the guarantee is told, where one is the unit."""
AUDIT_FILES = ("audit.json", "audit.svg", "canaries.npz")
CONFIG = "config.toml"
FIXED_SEED = "fixed for a test"
SECRET_SEED = "256 bits of operating system entropy, erased at the end of the run"
NO_AUDIT = (
    "no audit was made before the run ended; an audit made later stands in audit.json and in the "
    "report"
)
NO_PUBLIC = (
    "no public data was declared: whatever else shaped the result (pretraining, tuning, features) "
    "is not known here"
)
VERIFICATION = (
    "dpfy is open source (Apache-2.0). On the run folder, dpfy verify recomputes every number "
    "above from the ledger, again with a "
    "second accountant, and checks the hashes of all files: that they agree with each other, not "
    "that anyone who made them was honest. "
    "A signature (dpfy sign) says who answers for them."
)


@dataclass(frozen=True)
class Facts:
    """What a finished run knows about itself, beside its ledger: where and how it ran, and the
    figures of each section, by its name.

    `releases` is the number of releases that were made. `public_data` names public data that shaped
    the result: ``{"data": ..., "used_for": ..., "provenance": ...}``.
    """

    provenance: Mapping[str, str]
    releases: int
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    public_data: tuple[Mapping[str, str], ...] = ()


def build(folder: Path, run: Facts, ledger: Ledger) -> dict[str, Any]:
    """The report of the run in `folder`. Every number comes from the ledger or a file."""
    facts: dict[str, Any] = {
        "audit": absent(NO_AUDIT),
        "provenance": dict(run.provenance),
        "files": hashes(folder, ledger),
        "public_data": [dict(row) for row in run.public_data] or absent(NO_PUBLIC),
        "sections": {name: dict(told) for name, told in run.sections.items()},
    }
    due = claims(ledger, facts)
    sections = [facts["sections"].get(part["name"], {}) | part for part in due["sections"]]
    made = sealed(facts | due | {"sections": sections})
    as_read: dict[str, Any] = json.loads(render(made))  # as a reader will find it, keys in order
    return as_read


def reservations(ledger: Ledger) -> list[tuple[str, Reserved]]:
    """The claims of a run's ledger, with their names, in the order of their reservation. Bare
    accesses have none.
    """
    found = [
        (p.name, Reserved.from_json(p.claim))
        for p in ledger.permits()
        if p.claim and _is_claim(p.claim)
    ]
    if not found:
        raise Corrupt(ledger.path.name, "reserves nothing that a run claims")
    return found


def _is_claim(data: Mapping[str, Any]) -> bool:
    return "kind" in data or "plan" in data


def hashes(folder: Path, ledger: Ledger) -> dict[str, str]:
    """SHA-256 of every file of a run that is there before its report: what its claims name, its
    configuration, an audit.
    """
    return {name: sha256_of(folder / name) for name in covered(ledger) if (folder / name).is_file()}


def covered(ledger: Ledger) -> list[str]:
    """The names of all files that the run may have."""
    named = [name for _, reserved in reservations(ledger) for name in reserved.claim.artefacts]
    return list(dict.fromkeys([*named, CONFIG, *AUDIT_FILES]))


def sealed(card: dict[str, Any]) -> dict[str, Any]:
    """The report with its digest; checked against the schema."""
    whole = card | {"digest": digest(card)}
    schema.check(whole)
    return whole


def claims(ledger: Ledger, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All that follows from the ledger, given the given facts of the run: `sections` maps names to
    what each section tells.
    """
    held = reservations(ledger)
    first = held[0][1].claim
    bill = figures.Bill(ledger.event(), ledger.adjacency, first.accountant, first.delta)
    epsilon, unit = figures.epsilon(bill), ledger.unit
    caveats = tuple(dict.fromkeys(line for _, reserved in held for line in reserved.caveats))
    whole = Guarantee(
        figures.curve(bill.event, bill.adjacency, bill.accountant),
        bill.accountant,
        ledger.adjacency,
        unit,
        first.trust,
        caveats,
    )
    told = facts["sections"]
    trains = trained(ledger, told) is not None
    return {
        "format": FORMAT,
        "statement": _statement(whole, ledger, first, trains),
        "guarantee": _headline(ledger, bill, first.trust),
        "setting": {
            "model": first.trust,
            "words": words.SETTINGS[first.trust],
            "trusted": first.trusted,
        },
        "accesses": uses.table(
            ledger, bill, shared=any(reserved.shared for _, reserved in held), trains=trains
        ),
        "boundary": _boundary([reserved.claim for _, reserved in held]),
        "unit": words.unit_row(unit),
        "adjacency": {
            "name": ledger.adjacency.value,
            "meaning": words.adjacency_meaning(ledger.adjacency),
        },
        "accounting": {
            "accountant": bill.accountant,
            "words": ACCOUNTANTS.get(bill.accountant, f"the {bill.accountant} accountant"),
            "assumptions": [_noise(any(reserved.fixed_seed for _, reserved in held)).to_json()],
            "without_amplification": _without_amplification(ledger, bill),
        },
        "formal": _formal(ledger, bill, told)
        | _windows(ledger, bill, [reserved.claim for _, reserved in held]),
        "tier": figures.tier(epsilon, unit, ledger.adjacency),
        "attacker": figures.attacker(figures.points(bill), unit),
        "delta": _delta(
            first.delta, next((r.claim.records for _, r in held if r.claim.records), None)
        ),
        "deployments": html_page.table(),
        "caveats": list(caveats),
        "warnings": _warnings(held, ledger, told, epsilon, first.delta),
        "ledger": ledger.basis,
        "verification": {"words": VERIFICATION, "command": "dpfy verify RUN"},
        "sections": [
            _section(name, reserved.claim, told.get(name, {}), ledger) for name, reserved in held
        ],
    }


def _section(name: str, claim: Claim, told: Mapping[str, Any], ledger: Ledger) -> dict[str, Any]:
    """What follows from a claim and the ledger about one section."""
    head = {"name": name, "kind": claim.kind, "purpose": claim.purpose, "claim": claim.to_json()}
    found = (
        head
        | claim.describe()
        | {"assumptions": [row.to_json() for row in claim.assumptions(told)]}
    )
    if claim.stops:
        found["ended"] = _ended(claim, ledger.settlements.get(name))
    if "evaluation" in told:
        found["evaluation"] = uses.row(told["evaluation"]["test"], told, ledger)
    elif any(key in told for key in ("utility", "confusion")):
        raise Corrupt(NAME, f"states figures in {name} and does not say on which data")
    return found


def _ended(claim: Claim, settled: tuple[int, int] | None) -> dict[str, Any]:
    """Where a release that may end early ended, and what is charged."""
    made, billed = settled or (claim.releases, claim.releases)
    return {"settled": settled is not None, "made": made, "billed": billed, "of": claim.releases}


def _boundary(held: list[Claim]) -> dict[str, str]:
    """The first boundary that any of the claims lets through: what lies behind it is protected."""
    name = min(claim.boundary for claim in held)
    rest = f"Protected from here on: {BOUNDARIES[name]}, and everything made of it."
    return {"name": name, "words": rest + " What lies before it must be kept as the data is."}


def _noise(fixed: bool) -> Assumption:
    done = (
        "the seed was fixed for a test"
        if fixed
        else "256 bits of operating system entropy, erased when the run ended"
    )
    return Assumption("noise", "nobody can predict the noise", done, NO if fixed else YES)


def _headline(ledger: Ledger, bill: figures.Bill, trust: str) -> dict[str, Any]:
    lower = figures.epsilon_lower(bill)
    return {
        "epsilon": number(figures.epsilon(bill)),
        "epsilon_lower": absent(f"the {bill.accountant} accountant has no lower bound")
        if lower is None
        else number(lower),
        "delta": bill.delta,
        "accountant": bill.accountant,
        "adjacency": ledger.adjacency.value,
        "unit": ledger.unit.name,
        "trust": trust,
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


def trained(ledger: Ledger, told: Mapping[str, Any]) -> events.Event | None:
    """Training alone: what is reserved for it, and what of a search is the training that it ends
    with; None where nothing is trained.
    """
    own = [
        events.Repeated(permit.event, permit.uses) for permit in uses.of_kinds(ledger, "training")
    ]
    within = [reserved.claim.trained(told.get(name, {})) for name, reserved in reservations(ledger)]
    found = [*own, *(event for event in within if event is not None)]
    return events.Composed(tuple(found)) if found else None


def _statement(whole: Guarantee, ledger: Ledger, first: Claim, trains: bool) -> str:
    """The guarantee in one sentence that names everything it pays for."""
    kinds = list(
        dict.fromkeys(
            [*(["training"] if trains else []), *(uses.kind_of(p) for p in ledger.permits())]
        )
    )
    named = [f"{kind} accesses" if kind == uses.OTHER else kind for kind in kinds]
    if "training" in named:
        others = [kind for kind in named if kind != "training"]
        return whole.sentence(
            first.delta, f"Training with {', '.join(others)}" if others else "Training"
        )
    what = f"What was released ({', '.join(named)})"
    return whole.sentence(
        first.delta, what, "every release", "curator", first.instead if len(kinds) == 1 else ""
    )


def _without_amplification(ledger: Ledger, bill: figures.Bill) -> dict[str, Any]:
    """Epsilon of the whole ledger if it were known who took part in which step."""
    if not figures.amplified(bill.event):
        return absent(
            "no amplification by sampling is claimed: the given epsilon holds for any order of "
            "the data"
        )
    value, problem = figures.unamplified(bill)
    if value is None:
        return absent(f"it cannot be computed: {problem}")
    known = (
        "if everybody knew who takes part when, and one unit took part as often as the plan allows"
    )
    return {"epsilon": number(value), "delta": bill.delta, "words": known}


def _formal(ledger: Ledger, bill: figures.Bill, told: Mapping[str, Any]) -> dict[str, Any]:
    """The guarantee in every form: training alone, with tuning, as (epsilon, delta), rho-zCDP,
    mu-GDP and as a curve.
    """
    held: dict[str, Any] = {"training": absent("nothing was trained")}
    if (alone := trained(ledger, told)) is not None:
        training = figures.epsilon(bill.of(alone))
        held["training"] = {"epsilon": number(training), "delta": bill.delta}
    if uses.of_kinds(ledger, "tuning"):
        both = figures.epsilon(bill.of(uses.event_of_kinds(ledger, "training", "tuning")))
        held["with_tuning"] = {"epsilon": number(both), "delta": bill.delta}
    else:
        held["with_tuning"] = absent(
            "the ledger holds no tuning; if there was any on the private data, it is not covered"
        )
    ratio, epsilon = figures.gaussian_ratio(bill.event, bill.adjacency), figures.epsilon(bill)
    why = "not every release is Gaussian, or nothing protects it: no finite value is known here"
    note = (
        ", at every epsilon; sampling cannot make it smaller"
        if figures.amplified(bill.event)
        else ""
    )
    held["zcdp"] = (
        absent(why) if ratio is None else {"rho": ratio**2 / 2, "words": f"rho-zCDP{note}"}
    )
    held["gdp"] = absent(why) if ratio is None else {"mu": ratio, "words": f"mu-GDP{note}"}
    if math.isinf(epsilon) or epsilon <= 0:
        held["gdp_equal"] = absent("epsilon is infinite or zero")
    elif bill.delta == 0:
        held["gdp_equal"] = absent("a pure guarantee has no equal Gaussian mechanism")
    else:
        held["gdp_equal"] = {
            "mu": figures.gaussian_equal(epsilon, bill.delta),
            "words": "the Gaussian mechanism with the same epsilon at the given delta: a "
            "comparison, not a claim",
        }
    curve = [{"epsilon": e, "delta": d} for e, d in figures.points(bill)]
    held["curve"] = curve or absent("epsilon is infinite")
    return held


def _windows(ledger: Ledger, bill: figures.Bill, held: list[Claim]) -> dict[str, Any]:
    """Where the unit is a window of a user's time: what holds for several of them together, and so
    for a user of so many.
    """
    if ledger.unit.protects != "window":
        return {}
    said = (
        f"all that a user contributed in so many windows of time, where one {ledger.unit.name} is "
        f"the unit"
    )
    rows = []
    try:
        for claim in held:
            claim.check_group(max(WINDOWS))
        for size in WINDOWS:
            epsilon = figures.epsilon(bill.of(of_group(bill.event, size)))
            rows.append({"windows": size, "epsilon": number(epsilon)})
    except Unsupported as problem:
        return {
            "several_windows": absent(
                f"the guarantee of several windows together is not known: {problem}"
            )
        }
    return {"several_windows": {"words": said, "delta": bill.delta, "rows": rows}}


def _delta(delta: float, records: int | None) -> dict[str, Any]:
    if delta == 0:
        return {
            "value": 0.0,
            "words": "delta is 0: the guarantee is pure, and holds without exception",
        }
    if records is None:
        return {
            "value": delta,
            "words": "the number of units is not public: it must be far below 1/delta for the "
            "guarantee to mean much",
        }
    below = delta * records < 1
    return {
        "value": delta,
        "one_over_records": 1 / records,
        "share": delta * records,
        "words": f"delta is {delta * records:.3g} times 1/n for n = {records:,}"
        + (
            ""
            if below
            else ": at this size a mechanism may publish a random record in full and still be "
            "called private"
        ),
    }


def _warnings(
    held: list[tuple[str, Reserved]],
    ledger: Ledger,
    told: Mapping[str, Any],
    epsilon: float,
    delta: float,
) -> list[str]:
    """What a reader must not overlook, most serious first."""
    found = []
    if math.isinf(epsilon):
        found.append("There is no differential privacy guarantee.")
    elif epsilon > 10:
        found.append("Epsilon is above 10: the formal guarantee alone is no evidence of anonymity.")
    if any(reserved.claim.records and delta * reserved.claim.records >= 1 for _, reserved in held):
        found.append("Delta is not below one over the number of records.")
    parts = [(reserved.claim, told.get(name, {})) for name, reserved in held]
    found += dict.fromkeys(line for claim, facts in parts for line in claim.warnings(facts))
    if uses.of_kinds(ledger, "training") and not uses.of_kinds(ledger, "tuning"):
        found.append(
            "Tuning is not covered: if the private data guided any choice before this run, the "
            "true cost is higher."
        )
    return found


def render(card: dict[str, Any]) -> bytes:
    """The one textual form of a report."""
    return (json.dumps(card, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_pages(folder: Path, card: dict[str, Any]) -> dict[str, str]:
    """Write report.html and report.md beside the report that will come; their hashes.

    Guarantees: the pages are functions of report and metrics: written again after a crash, they are
    the same.
    """
    from dpfy.report import html_page, markdown

    pages = {
        html_page.NAME: html_page.render(card, html_page.extras(folder)).encode(),
        markdown.NAME: markdown.render(card).encode(),
    }
    for name, content in pages.items():
        write_atomically(folder / name, content)
    return {name: sha256_of(folder / name) for name in pages}


def section(card: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The first section of this kind; empty where there is none."""
    return next((dict(part) for part in card["sections"] if part["kind"] == kind), {})


def require_a_trial(card: Mapping[str, Any], run: Path) -> None:
    """Refuse to read a model from a search that made no trial.

    Raises:
        InvalidInput: The random number of trials that was drawn is 0.
    """
    if any(is_absent(part.get("settings")) for part in card["sections"]):
        rule = (
            "released no model, since no trial was made: the number of trials that was drawn is 0; "
            "search again, with more trials on average"
        )
        raise InvalidInput("run", str(run), rule)


def trained_section(card: Mapping[str, Any]) -> dict[str, Any]:
    """The section that tells how the released model was trained: of training, or of a search that
    ended with it; empty without one.
    """
    return next(
        (
            dict(part)
            for part in card["sections"]
            if part["kind"] == "training" or "mechanism" in part
        ),
        {},
    )
