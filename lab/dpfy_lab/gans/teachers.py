"""PATE-GAN: teachers that each know a part of the records vote on generated rows; a student learns
from noisy votes, the generator from it.

    records -> disjoint parts, a teacher of each -> votes with noise -> a student -> the generator
    (Jordon et al. 2019)

Teachers learn to tell their own records from the generator's rows, round by round. What leaves are
the noisy counts of their votes, so the student, the generator and the rows are post-processing. The
bill does not look at the votes: a record changes one teacher, which adds at most one to each of the
counts of a round. The student is told the share of teachers, with its noise, and not only the
majority: at first no row has one.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import dpfy
from dpfy.accounting.filters import least_noise, noise_of, squares
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.prediction.voters import shards
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.run import Progress, Run, quiet
from dpfy.synthetic.claim import FACTS, TABLE
from dpfy.synthetic.columns import Codes
from dpfy.synthetic.counts import encoded
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
from dpfy.synthetic.releases import PartOfGaussian, no_binding
from dpfy.synthetic.writing import allowed, written
from dpfy_lab.gans.claim import DiscriminatorVotes
from dpfy_lab.gans.tables import Discriminator, GeneratorTrainer, one_hot, seeded

TEACHERS, ROUNDS, QUESTIONS = 300, 30, 300
"""Parts of the records, rounds, and rows on which all teachers vote in a round."""
OWN, UNITS, LESSONS, STEP = 32, 16, 10, 0.3
"""Of a teacher: records and generated rows in a step, hidden units, steps in a round, learning
rate.
"""
STUDENT_STEPS, GENERATOR_STEPS, BATCH = 20, 10, 256
"""Of a round, for the student and for the generator; and the rows that a step of theirs sees."""
WORDS = "a generator against a student of noisy votes of teachers (PATE-GAN)"


def planned(domain: Domain, terms: SynthesisTerms, options: SynthesisOptions) -> DiscriminatorVotes:
    """The claim: nothing of it depends on the records."""
    if options.rows is None:
        raise InvalidInput(
            "rows",
            None,
            "must be given for pate-gan, which does not count records: how many rows to make",
        )
    if terms.records is not None:
        raise InvalidInput(
            "records",
            terms.records,
            "must be left out for pate-gan, which has no use for it: give rows",
        )
    noise = least_noise(terms.epsilon, terms.delta, 0, 0.0, Adjacency.ADD_OR_REMOVE_ONE)
    return DiscriminatorVotes(
        noise, str(domain), TEACHERS, ROUNDS, QUESTIONS, options.rows, delta=terms.delta
    )


def execute(
    data: Any,
    domain: Domain,
    terms: SynthesisTerms,
    options: SynthesisOptions,
    place: Run,
    progress: Progress,
) -> Path:
    """The finished folder of a PATE-GAN.

    Guarantees: the votes are reserved before `data` is opened; what is published is computed from
    noisy counts and random numbers. A killed run begins again and releases the same.
    """
    claim = planned(domain, terms, options)
    if complete(place, claim):
        return Path(place.path)
    with RunFolder(place, claim) as folder:
        progress("reading", 0.0)
        codes = np.concatenate(list(encoded(data, domain)), axis=1).T
        folder.bind("records", codes.tobytes())
        school = TeacherDiscriminators.of(codes, domain.sizes, claim.teachers, folder.randomness)
        trainer = rounds(
            claim, school, folder.begin(claim.name), folder.randomness, folder.bind, progress
        )
        rows = allowed(
            domain, trainer.rows(claim.rows, folder.randomness.generator("synthetic rows", 0))
        )
        folder.write(TABLE, written(domain, rows, folder.randomness))
        facts = {
            "method": WORDS,
            "rows": len(rows),
            "columns": list(domain.names),
            "measured": 0,
            "error": {},
        }
        folder.write(FACTS, json.dumps(facts | {"model": trainer.facts()}, indent=1).encode())
        folder.tell(claim.name, rows_made=len(rows), table=TABLE)
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=claim.releases))
    return Path(place.path)


@dataclass(eq=False)
class TeacherDiscriminators:
    """All teachers side by side, each a network of one hidden layer. Sensitive: nothing of it may
    leave but its votes, with noise.

    Guarantees: what a teacher votes depends on its own part of the records, on random numbers and
    on what it was shown, which all were.
    """

    codes: Tensor
    order: Tensor
    first: Tensor
    count: Tensor
    starts: Tensor
    weights: tuple[Tensor, Tensor, Tensor]
    randomness: Randomness

    @classmethod
    def of(
        cls, codes: Codes, sizes: Sequence[int], teachers: int, randomness: Randomness
    ) -> TeacherDiscriminators:
        """Teachers that know nothing yet, with their parts of the records, which a coin of each
        record decides.
        """
        places = torch.from_numpy(shards(len(codes), teachers, randomness))
        count = torch.bincount(places, minlength=teachers)
        starts = torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()])
        with seeded(randomness, "teachers"):
            inner = 0.1 * torch.randn(teachers, sum(sizes), UNITS)
            weights = (
                inner,
                torch.zeros(teachers, UNITS),
                torch.randn(teachers, UNITS) / math.sqrt(UNITS),
            )
        first = count.cumsum(0) - count
        held = (
            torch.from_numpy(np.ascontiguousarray(codes))
            if len(codes)
            else torch.zeros((1, len(sizes)), dtype=torch.int64)
        )
        return cls(
            held, torch.argsort(places, stable=True), first, count, starts, weights, randomness
        )

    def scores(self, rows: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """What each teacher says of its own rows of cells [teachers, rows, columns]: above 0 they
        look like records.
        """
        inner, bias, outer = weights
        teachers, cells, _ = inner.shape
        index = (rows + self.starts) + cells * torch.arange(teachers).reshape(-1, 1, 1)
        hidden = torch.tanh(
            functional.embedding(index, inner.flatten(0, 1)).sum(dim=2) + bias[:, None]
        )
        return (hidden * outer[:, None]).sum(dim=2)

    def learn(self, shown: Tensor, step: int) -> None:
        """One step of every teacher: records of its own against the rows that all are shown. Who
        has no record stays as it is.
        """
        teachers = len(self.count)
        drawn = torch.from_numpy(
            self.randomness.generator("teachers' records", step).random((teachers, OWN))
        )
        place = torch.minimum(
            (drawn * self.count[:, None]).long(), (self.count - 1).clamp(min=0)[:, None]
        )
        known = (self.count > 0)[:, None]
        index = self.first[:, None] + place
        own = (
            self.codes[self.order[torch.where(known, index, 0)]]
            if len(self.order)
            else self.codes.expand(teachers, OWN, -1)
        )
        weights = tuple(w.requires_grad_() for w in self.weights)
        real, made = (
            self.scores(own, weights),
            self.scores(shown.expand(teachers, *shown.shape), weights),
        )
        losses = functional.softplus(-real).mean(dim=1) + functional.softplus(made).mean(dim=1)
        slopes = torch.autograd.grad((losses * known[:, 0]).sum(), weights)
        with torch.no_grad():
            changed = [w.detach() - STEP * slope for w, slope in zip(weights, slopes, strict=True)]
        self.weights = (changed[0], changed[1], changed[2])

    @torch.no_grad()
    def votes(self, rows: Tensor) -> np.ndarray:
        """How many teachers take each row for a record."""
        found = self.scores(rows.expand(len(self.count), *rows.shape), self.weights) > 0
        return np.asarray(found.sum(dim=0).numpy(), np.int64)


def rounds(
    claim: DiscriminatorVotes,
    school: TeacherDiscriminators,
    permit: Permit,
    randomness: Randomness,
    bind: Callable[[str, bytes], None] = no_binding,
    progress: Progress = quiet,
) -> GeneratorTrainer:
    """All rounds: teachers learn, vote with noise, a student learns from what they said, and the
    generator from the student.

    Guarantees: a record changes one teacher, so each count of a round by at most 1; all rounds
    together are within the claim.
    """
    sizes = [int(size) for size in np.diff([*school.starts.tolist(), school.weights[0].shape[1]])]
    trainer = GeneratorTrainer.fresh(sizes, randomness)
    with seeded(randomness, "student"):
        student = Discriminator(sum(sizes))
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
    noise = noise_of(squares(claim.noise_multiplier) / Fraction(claim.rounds))
    most = Bound(math.sqrt(claim.questions) * (1 + 2.0**-50), claim.questions, 1.0)
    asked: list[Tensor] = []
    said: list[Tensor] = []
    for number in range(claim.rounds):
        for step in range(number * LESSONS, (number + 1) * LESSONS):
            school.learn(
                trainer.generator.codes(randomness.generator("rows for teachers", step), OWN), step
            )
        rows = trainer.generator.codes(randomness.generator("questions", number), claim.questions)
        counts = school.votes(rows)
        bind(f"{claim.name} {number}", rows.numpy().tobytes() + counts.tobytes())
        mechanism = PartOfGaussian(noise, whole=claim.event)
        found = np.asarray(
            mechanism.release(Bounded(counts, most), permit, randomness, number).value
        )
        asked.append(one_hot(rows, sizes))
        said.append(torch.tensor(np.clip(found / claim.teachers, 0.0, 1.0), dtype=torch.float32))
        _taught(
            student,
            optimizer,
            torch.cat(asked),
            torch.cat(said),
            randomness.generator("lessons", number),
        )
        for step in range(number * GENERATOR_STEPS, (number + 1) * GENERATOR_STEPS):
            trainer.learn(student, step, BATCH)
        progress("rounds", (number + 1) / claim.rounds)
    return trainer


def _taught(
    student: Discriminator,
    optimizer: torch.optim.Optimizer,
    rows: Tensor,
    labels: Tensor,
    rng: np.random.Generator,
) -> None:
    """The student after some steps on the rows that were asked about so far."""
    for _ in range(STUDENT_STEPS):
        drawn = torch.from_numpy(rng.integers(0, len(rows), min(BATCH, len(rows))))
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(student(rows[drawn]), labels[drawn]).backward()
        optimizer.step()
