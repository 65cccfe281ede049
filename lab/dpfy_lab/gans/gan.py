"""DP-GAN: a discriminator trained with DP-SGD on records and generated rows, and a generator that
learns from its weights.

The records meet the discriminator alone, in the pipeline of every training of this package; the
generator is post-processing (Xie et al. 2018; that many discriminator steps for one of the
generator serve best: Bie et al. 2023).

Row j of a batch is paired with generated row j, so a record more moves the records behind it to
other partners. That costs nothing, by this argument. Generated rows are drawn afresh at every step
from the run's secret, independently of the records; a row of the generator is a function of its own
random numbers alone (no layer looks across rows), so that the rows of a step are independent and of
one law, however many there are. Couple the two worlds: give every record that is in both batches
the same partner in both, and the additional record one more. In each world this has the law of what
is computed. Given the partners, each record adds one gradient, clipped to the clip norm, so the two
sums differ by what the additional record adds, and the noisy sums are as close as a Gaussian
mechanism's. The laws that are released are means over partners of such pairs, and a hockey-stick
divergence of means is at most the mean of the divergences (joint convexity). Partners are never
released, so the argument holds step by step, for every history.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dpfy.core import storage
from dpfy.core.errors import InvalidInput
from dpfy.plan.recipe import Plan, dpsgd
from dpfy.runs.run import Progress, Run
from dpfy.synthetic.claim import FACTS, TABLE
from dpfy.synthetic.counts import encoded
from dpfy.synthetic.domain import Domain
from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
from dpfy.synthetic.writing import allowed, written
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import TrainingClaims, TrainingRun, complete
from dpfy.training.runtime import Runtime
from dpfy_lab.gans.claim import GeneratedRows
from dpfy_lab.gans.tables import Discriminator, GeneratorTrainer, one_hot, seeded

BATCH, STEPS, CLIP, RATE, BETAS = 600, 1200, 1.0, 1e-3, (0.5, 0.9)
"""Of the discriminator's training: records of a step on average, steps, clip norm, and its
optimizer (Adam). Where there are fewer records than a batch all take part in every step, so that no
batch is empty: its chance is below e^-600.
"""
EVERY = 3
"""Steps of the discriminator for one of the generator."""
LESSON = 512
"""Rows in a step of the generator."""
WORDS = "a generator against a discriminator that was trained privately (DP-GAN)"


def planned(
    domain: Domain, terms: SynthesisTerms, options: SynthesisOptions
) -> tuple[Plan, GeneratedRows]:
    """The plan of the discriminator, and the claim of the rows: nothing of it depends on the
    records.
    """
    if terms.records is None:
        raise InvalidInput(
            "records",
            None,
            "must be given for dp-gan, the public number of records, of which each step takes a "
            "part",
        )
    recipe = dpsgd(terms.records, min(BATCH, terms.records), steps=STEPS, clip_norm=CLIP)
    plan = recipe.calibrate(terms.epsilon, terms.delta)
    about = {
        "unit": recipe.unit,
        "adjacency": recipe.adjacency,
        "delta": plan.delta,
        "accountant": plan.accountant,
    }
    return plan, GeneratedRows(
        str(domain),
        options.rows or terms.records,
        records=recipe.records,
        **about,  # type: ignore[arg-type]
    )


def execute(
    data: Any,
    domain: Domain,
    terms: SynthesisTerms,
    options: SynthesisOptions,
    place: Run,
    progress: Progress,
) -> Path:
    """The finished folder of a DP-GAN.

    Guarantees: the plan is reserved before `data` is opened; records are read by the noisy steps of
    the discriminator and by nothing else. A killed run begins again and makes the same steps, with
    the same noise for the same sums.
    """
    plan, claim = planned(domain, terms, options)
    run = replace(place, checkpoint_every=math.inf)
    if complete(run, plan, TrainingClaims(beside=(claim,))):
        return Path(run.path)
    with TrainingRun(run, plan, beside=(claim,)) as folder:
        progress("reading", 0.0)
        codes = torch.from_numpy(np.concatenate(list(encoded(data, domain)), axis=1).T.copy())
        if len(codes) != terms.records:
            rule = "is not the number of records in the data, which must be public to be given"
            raise InvalidInput("records", terms.records, rule)
        with seeded(folder.randomness, "discriminator"):
            discriminator = Discriminator(sum(domain.sizes))
        optimizer = torch.optim.Adam(discriminator.parameters(), lr=RATE, betas=BETAS)
        frozen_copy = copy.deepcopy(discriminator).requires_grad_(False)
        with PrivateTraining(
            discriminator, optimizer, (codes,), plan, folder, runtime=Runtime(device=options.device)
        ) as training:
            trainer = GeneratorTrainer.fresh(domain.sizes, folder.randomness, options.device)
            adversaries(training, trainer, frozen_copy.to(options.device), domain, progress)
            folder.tell(claim.name, **publish(folder, domain, trainer, claim.rows))
    return Path(run.path)


def adversaries(
    training: PrivateTraining,
    trainer: GeneratorTrainer,
    frozen_copy: Discriminator,
    domain: Domain,
    progress: Progress,
) -> None:
    """All steps of both. `frozen_copy` is a copy of the discriminator for the generator to learn
    from.
    """
    discriminator, steps, last, place = training.model, training.plan.recipe.steps, -1, 0
    for (codes,) in training.batches():
        step = training.steps_done
        last, place = (
            step,
            place + 1 if step == last else 0,
        )  # a logical batch may come in several pieces
        pairs = torch.stack(
            [one_hot(codes, domain.sizes), trainer.fakes(f"critic {place}", step, len(codes))],
            dim=1,
        )
        scores = discriminator(pairs)
        training.step(functional.softplus(-scores[:, 0]) + functional.softplus(scores[:, 1]))
        if training.boundary and step % EVERY == EVERY - 1:
            frozen_copy.load_state_dict(discriminator.state_dict())
            trainer.learn(frozen_copy, step, LESSON)
            progress("training", training.steps_done / steps)


def publish(
    folder: TrainingRun, domain: Domain, trainer: GeneratorTrainer, count: int
) -> dict[str, Any]:
    """Write the table, and what there is to say about it. Where a run stopped at its very end, what
    it wrote stands.
    """
    if folder.state.is_file() and (folder.path / FACTS).is_file():
        facts = storage.parsed_json(FACTS, storage.content(FACTS, folder.path / FACTS))
    else:
        rows = allowed(
            domain, trainer.rows(count, folder.randomness.generator("synthetic rows", 0))
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
    return {"rows_made": facts["rows"], "table": TABLE}
