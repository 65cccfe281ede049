"""Rounds of a federation under audit: the real server on clients that send given updates."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

from dpfy.audit.observation import Array, noisy_sum, watched
from dpfy.federated.rounds import PrivateRounds
from dpfy.gradients.engine import trainable
from dpfy.plan.recipe import Plan
from dpfy.runs.run import Run
from dpfy.training.loop import PrivateTraining


def observe_rounds(model: nn.Module, rows: Array, plan: Plan, seed: int | None = None) -> Array:
    """Run `plan` on clients with the updates `rows` [clients, parameters], for a model of one
    parameter tensor; the noisy sums.

    Both are in clip norms.
    """
    (weight,) = trainable(model).values()
    updates = torch.tensor(rows, dtype=weight.dtype) * plan.recipe.clip.bound.l2
    seen: list[Array] = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", seed=seed, checkpoint_every=1e9)
        rounds = PrivateRounds(
            model, torch.optim.SGD(model.parameters(), lr=0.01), plan, run, repeatable=True
        )

        def look(training: PrivateTraining) -> None:
            seen.append(noisy_sum(plan, trainable(training.model)))

        with watched(rounds, look, keep=False):
            for cohort in rounds.cohorts():
                for client in cohort.clients.tolist():
                    cohort.add(client, [updates[client].reshape(weight.shape)])
    return np.array(seen)
