"""Checks of synthetic text, by record and replay of the training's noisy sums: nothing else tells two
sets of texts apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpfy.core.values import Private
from dpfy.plan.recipe import dpsgd
from dpfy.runs.folder import LEDGER
from dpfy.runs.run import Run
from dpfy.synthetic.text import run
from dpfy_lab.checks.published import in_folder, temporary
from dpfy_lab.selftest.mistake import Found, check
from dpfy_lab.selftest.patch import patching

Grads = dict[str, Tensor]
EPSILON, DELTA, RECORDS, BATCH, SEED, SIGMAS = 4.0, 1e-3, 24, 12, 19, 6.0
OPTIONS = run.TextOptions(texts=6, length=8, batch_size=BATCH, epochs=2.0)
STEPS = 4


@dataclass
class TextTape:
    """The sums of a training and what was released of them; with `before`, what an earlier training
    released is released again.
    """

    before: list[Grads] = field(default_factory=list)
    sums: list[Grads] = field(default_factory=list)
    released: list[Grads] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)


@contextmanager
def recorded(tape: TextTape) -> Iterator[None]:
    """Every noisy sum of a training goes through the tape."""

    def release(
        real: Any, self: Any, total: Any, step: int, state: Any, permit: Any, into: Any = None
    ) -> Any:
        tape.sums.append({n: t.detach().clone() * 1.0 for n, t in total.value.items()})
        tape.bounds.append(total.bound.l2)
        found, state = real(self, total, step, state, permit, into)
        if len(tape.released) < len(tape.before):
            kept = tape.before[len(tape.released)]
            if into is None:
                found = Private({n: t.clone() for n, t in kept.items()})
            else:
                for n, t in kept.items():
                    into[n].copy_(t)
        tape.released.append({n: t.detach().clone() for n, t in found.value.items()})
        return found, state

    with patching() as patch:
        patch.around("dpfy.noise.stream.NoiseStream.release", release)
        yield


def texts(first: str, count: int = RECORDS) -> list[str]:
    """Notes of one kind, and one that is another."""
    return [first, *(f"note {k % 5} of {k}" for k in range(count - 1))]


def written(private: Sequence[str], tape: TextTape) -> dict[str, bytes]:
    """All that is published of synthetic text from these texts."""
    terms = run.TextTerms(EPSILON, DELTA, RECORDS)

    def make(place: Run) -> object:
        with torch.random.fork_rng(devices=[]), recorded(tape):
            return run.synthesize_text(list(private), terms=terms, run=place, options=OPTIONS)

    return in_folder(make, SEED)


@check("synthetic text")
def REPLAYED() -> Found:
    """With the same noisy sums the same texts and weights are published, whatever the private texts
    are; one text, replaced, moves a sum by at most two clipping norms.
    """
    first = TextTape()
    some = written(texts("note 0"), first)
    if len(first.released) != STEPS:
        return f"{len(first.released)} noisy sums were released, {STEPS} are charged"
    for what, private, neighbours in (
        ("one text is another", texts("\x00\x7f" * 200), True),
        ("other texts", [f"\u00e9{k}!" * 9 for k in range(RECORDS)], False),
    ):
        again = TextTape(before=first.released)
        other = written(private, again)
        for step, (one, two) in enumerate(zip(first.sums, again.sums, strict=True)):
            apart = math.sqrt(sum(float((one[n] - two[n]).square().sum()) for n in one))
            if neighbours and not apart <= 2 * OPTIONS.clip_norm * (1 + 1e-3):
                return f"{what}: the sum of step {step} moves by {apart:.3f} clip norms, not 2"
        if different := [n for n in sorted(some | other) if some.get(n) != other.get(n)]:
            return f"{what}: {', '.join(different)} differ although every noisy sum was the same"
    return None


@check("text noise")
def NOISE() -> Found:
    """The noise of every step is that of the plan for what was asked, in every tensor."""
    recipe = dpsgd(RECORDS, BATCH, epochs=OPTIONS.epochs, clip_norm=OPTIONS.clip_norm)
    least, tape = recipe.calibrate(EPSILON, DELTA).noise_multiplier, TextTape()
    written(texts("note 0"), tape)
    for released, total in zip(tape.released, tape.sums, strict=True):
        for name, value in released.items():
            noise = (value.double() * BATCH - total[name].double()).reshape(-1)
            spread = float(noise.square().mean().sqrt()) / OPTIONS.clip_norm
            if spread < least * (1 - SIGMAS / math.sqrt(2 * noise.numel())):
                return f"{name}: noise of {spread:.3f} clip norms, where {least:.3f} are charged"
    return None


@check("text order")
def ORDER() -> Found:
    """The training is reserved in the ledger before the texts are read."""
    said: list[bool] = []
    with temporary() as folder:

        def read() -> list[str]:
            lines = (folder / LEDGER).read_text().splitlines() if folder.exists() else []
            said.append(any(json.loads(line)["body"]["type"] == "reserve" for line in lines))
            return texts("note 0")

        with torch.random.fork_rng(devices=[]):
            terms = run.TextTerms(EPSILON, DELTA, RECORDS)
            place = Run(folder, seed=SEED)
            run.synthesize_text(read, terms=terms, run=place, options=OPTIONS)
    return None if said and all(said) else "texts were read before the training was reserved"


CHECKS = (REPLAYED, NOISE, ORDER)
