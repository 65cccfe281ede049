"""What a training run promises, as its reservation in the ledger states it before any data is read.

Facts that change the bill are here and nowhere else: the whole plan, whether the seed is fixed, whether batches are formed outside of
dpfy. Verification compares card and plan with this, field by field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dpfy import accounting
from dpfy.accounting.rows import unsampled
from dpfy.core import check, events
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.plan.recipe import Plan

ENTROPY, FIXED = "entropy", "fixed"
PRACTICE = "the seed was fixed for a test: whoever knows it can remove the noise"
MOST_WORDS = 200


@dataclass(frozen=True)
class ForeignBatches:
    """Batches that are formed outside of dpfy: what is done, in words, and in how many steps one unit takes part at most, if known."""

    done: str
    most: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.done, str) or not self.done.strip() or not self.done.isprintable() or len(self.done) > MOST_WORDS:
            raise InvalidInput(
                "batches.done", self.done, f"must say in 1 to {MOST_WORDS} printable characters how batches are formed"
            )
        if self.most is not None:
            check.integer("batches.most", self.most)


@dataclass(frozen=True)
class Claim:
    """The claim of a training run. `shared` names the data set's ledger and the entry there, where the run is billed a second time.

    Guarantees: `event` is what the run must be billed for; batches formed elsewhere earn no amplification, and their bound on
    participation never makes the bill smaller than that of the batches that dpfy would draw.
    """

    plan: Plan
    fixed_seed: bool = False
    batches: ForeignBatches | None = None
    shared: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.batches is None or self.batches.most is None:
            return
        plan = self.plan
        stated = accounting.epsilon(self.event, plan.delta, adjacency=plan.recipe.adjacency, accountant=plan.accountant)
        if stated < plan.epsilon:
            rule = f"would make epsilon {stated:.3g} of {plan.epsilon:.3g}: where units take part that seldom, plan a sampler that says so"
            raise InvalidInput("batches.most", self.batches.most, rule)

    @property
    def event(self) -> events.Event:
        """What is billed."""
        return self.plan.event if self.batches is None else unsampled(self.plan.event, self.batches.most)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Conditions of the guarantee that follow from the claim."""
        return (PRACTICE,) if self.fixed_seed else ()

    def to_json(self) -> dict[str, Any]:
        """The claim as JSON; `from_json` gives an equal one."""
        batches = None if self.batches is None else {"done": self.batches.done, "most": self.batches.most}
        shared = None if self.shared is None else {"ledger": self.shared[0], "entry": self.shared[1]}
        return {"plan": self.plan.to_json(), "seed": FIXED if self.fixed_seed else ENTROPY, "batches": batches, "shared": shared}

    @classmethod
    def from_json(cls, data: Any) -> Claim:
        """The claim that `to_json` wrote; anything else is `Corrupt`."""
        try:
            check.known_keys("claim", data, ("plan", "seed", "batches", "shared"))
            batches, shared = data["batches"], data["shared"]
            return cls(
                Plan.from_json(data["plan"]),
                check.one_of("claim.seed", data["seed"], (ENTROPY, FIXED)) == FIXED,
                None if batches is None else ForeignBatches(batches["done"], batches["most"]),
                None if shared is None else (str(shared["ledger"]), str(shared["entry"])),
            )
        except (DpfyError, ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as problem:
            raise Corrupt("claim", f"cannot be read ({_words(problem)})") from None


def read_plan(file: str, data: Any) -> Plan:
    """The plan in JSON that a file holds; `Corrupt` where it is none."""
    try:
        return Plan.from_json(data)
    except (DpfyError, ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as problem:
        raise Corrupt(file, f"is not a plan ({_words(problem)})") from None


def differences(stated: Any, due: Any, place: str = "") -> list[str]:
    """Where two JSON values differ: one line a leaf, ``place: stated where due``."""
    return [f"{at or 'it'} is {a} and not {b}" for at, a, b in _apart(stated, due, place)]


def _apart(stated: Any, due: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(stated, dict) and isinstance(due, dict):
        for key in sorted(stated.keys() | due.keys()):
            yield from _apart(stated.get(key), due.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(stated, list) and isinstance(due, list) and len(stated) == len(due):
        for number, (a, b) in enumerate(zip(stated, due, strict=True)):
            yield from _apart(a, b, f"{place}.{number}")
    elif stated != due or isinstance(stated, bool) != isinstance(due, bool):
        yield place, _short(stated), _short(due)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _words(problem: Exception) -> str:
    return str(problem) if isinstance(problem, DpfyError) else type(problem).__name__
