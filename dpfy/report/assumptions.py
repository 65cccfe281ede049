"""What the accounting assumes, what was done, and whether they agree; and the guarantee without amplification beside it.

dpfy samples by itself, so that the two agree by construction. Who forms batches elsewhere says so before the run, by
``dpfy.Run(path, batches=dpfy.ForeignBatches("shuffled once, then read in order", most=EPOCHS))``: the reservation is then made, and
billed, without amplification, with `most` (may be left out) bounding the steps in which one unit takes part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpfy import accounting
from dpfy.core import participation
from dpfy.core.codec import number
from dpfy.core.errors import Corrupt, DpfyError
from dpfy.core.ledger import Ledger, Permit
from dpfy.plan.claim import Claim
from dpfy.report import numbers
from dpfy.report.words import absent, participation_words

TRAINING = "training"
YES, NO, NEARLY, STATED = "yes", "no", "nearly", "stated"
PUBLIC, NOTHING = "declared public", "nothing by the caller"


def training_of(ledger: Ledger) -> Permit:
    """The reservation of the run itself: the first that is called training. Others of that name are billed like any access."""
    found = next((p for p in ledger.permits() if p.name == TRAINING), None)
    if found is None:
        raise Corrupt(ledger.path.name, "reserves no training")
    return found


def claim_of(ledger: Ledger) -> Claim:
    """The claim with which the ledger of a run reserves its training."""
    return Claim.from_json(training_of(ledger).claim)


def stated_note(claim: Claim) -> dict[str, Any]:
    """Batches formed elsewhere, for the card: what it takes to compute the guarantee again from the card alone."""
    if claim.batches is None:
        return absent("batches were formed by dpfy, as the plan says")
    return {"done": claim.batches.done} | ({"most": claim.batches.most} if claim.batches.most else {})


def table(claim: Claim, facts: dict[str, Any]) -> list[dict[str, str]]:
    """Every assumption of the accounting, what was done, and whether it holds."""
    clip = claim.plan.recipe.clip.bound.l2
    noise_done = (
        "the seed was fixed for a test" if claim.fixed_seed else "256 bits of operating system entropy, erased when the run ended"
    )
    return [
        _sampling(claim),
        _row("contribution", f"one unit adds at most the clip norm {clip:g} to a step", "every unit's gradient was clipped", YES),
        _row("noise", "nobody can predict the noise", noise_done, NO if claim.fixed_seed else YES),
        _row("arithmetic", "noise is a real number drawn exactly", "noise is drawn and added in floating point", NEARLY),
        _row(
            "steps", "the number of steps was fixed before the data was read", "reserved in the ledger before the first step", YES
        ),
        *_of_the_caller(facts),
    ]


def _of_the_caller(facts: dict[str, Any]) -> list[dict[str, str]]:
    """What no library can see in somebody else's program: assumed because the caller states it, by running the program."""
    optimizer = facts.get("optimizer", {})
    began = "began with a state that the caller declared public" if optimizer.get("initial_state") == PUBLIC else "began empty"
    rows = [
        _row(
            "the caller's code",
            "nothing computed from the data reaches the model, or anything that is published, but through the noise",
            "weights, frozen weights, buffers and the optimizer's state were watched at every step, and a change that the run had not "
            "made would have ended it; what the program prints, stores or decides by looking at the data is not watched",
            STATED,
        ),
        _row(
            "the beginning",
            "initial weights and settings were chosen without the data",
            f"they were given by the caller; the optimizer {began}",
            STATED,
        ),
    ]
    if optimizer.get("projection", "none") != "none":
        assumed = "the rule that changes the weights after each step reads the weights and nothing else"
        rows.append(_row("projection", assumed, "the rule is the caller's own function", STATED))
    if (recorded := facts.get("provenance", {}).get("recorded", NOTHING)) != NOTHING:
        assumed = f"the numbers that the caller recorded may be published: {recorded}"
        rows.append(
            _row("recorded", assumed, "they stand in metrics.jsonl; losses of the batch are refused where recognised", STATED)
        )
    return rows


def _sampling(claim: Claim) -> dict[str, str]:
    planned = participation_words(claim.plan.recipe.sampler.participation)
    if claim.batches is not None:
        return _row("sampling", planned, claim.batches.done, NO)
    if numbers.amplified(claim.plan.event):
        return _row("sampling", f"{planned}, kept secret", f"{planned}; drawn by dpfy from the run's own secret", YES)
    return _row("sampling", f"nothing secret about who takes part when; {planned}", f"{planned}; formed by dpfy", YES)


def _row(what: str, assumed: str, done: str, holds: str) -> dict[str, str]:
    return {"what": what, "assumed": assumed, "done": done, "holds": holds}


def without_amplification(ledger: Ledger, bill: numbers.Bill) -> dict[str, Any]:
    """Epsilon of the whole ledger if it were known who took part in which step."""
    reserved = ledger.event()
    if not numbers.amplified(reserved):
        return absent("no amplification by sampling is claimed: the stated epsilon holds for any order of the data")
    event = numbers.unsampled(reserved)
    value, problem = None, ""
    for name in dict.fromkeys((bill.accountant, accounting.DEFAULT)):  # an accountant of sampled releases may know no others
        try:
            value = numbers.epsilon(replace(bill, event=event, accountant=name))
            break
        except DpfyError as reason:
            problem = str(reason)
    if value is None:
        return absent(f"it cannot be computed: {problem}")
    known = "if everybody knew who takes part when, and one unit took part as often as the plan allows"
    return {"epsilon": number(value), "delta": bill.delta, "words": known}


def warnings(claim: Claim) -> list[str]:
    """What a reader must know about the sampling of this run."""
    if claim.batches is not None:
        return [
            f"Batches were not drawn as the accounting would need for amplification ({claim.batches.done}). The stated epsilon is the "
            "one without amplification."
        ]
    pattern = claim.plan.recipe.sampler.participation
    if not isinstance(pattern, participation.Poisson):
        return [
            f"Batches were not Poisson samples ({participation_words(pattern)}). "
            + (
                "The accounting is made for this pattern."
                if numbers.amplified(claim.plan.event)
                else "No amplification is claimed."
            )
        ]
    return []
