"""How to DP-fy ML (Ponomareva et al. 2023): Figures 1 to 3, the comparison of accountants and the
table of appendix C.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import dpfy
from dpfy import accounting
from dpfy.accounting import rdp, tuning
from dpfy.core import events
from dpfy.core.events import gamma_for
from dpfy.core.unit import Adjacency
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.models.build import build
from dpfy.models.config import ModelConfig
from dpfy_lab.studies import trials
from dpfy_lab.studies.guide_page import page
from dpfy_lab.studies.study import Cell, Options, Study

FIGURE_1: dict[str, Any] = {"records": 10**7, "steps": 10**4, "epsilons": [0.25, 1.0, 4.0, 16.0]}
BATCHES = (10**3, 3163, 10**4, 31623, 10**5, 316228, 10**6)
RUN: dict[str, Any] = {"records": 10**6, "batch": 5000, "noise": 1.0, "delta": 1e-6}
"""The run of footnote 19, Figure 3 and appendix C: 200 steps an epoch at rate 0.005."""
EPOCHS = (1, 2, 5, 10, 20, 50, 100)
FIGURE_3_BATCHES = (1000, 2500, 5000, 10000)
HEAT: dict[str, Any] = {"steps": 40, "noise": 20.0, "model": "linear", "data": "embedded"}
"""Figure 2 on embedded data: a linear model on the pixels, all 4,000 records in every batch."""


def cells(options: Options) -> list[Cell]:
    """Figure 1, one cell an epsilon; Figure 2, one cell a clip norm; the rest closed forms."""
    found = []
    batches = BATCHES[::2] if options.fast else BATCHES
    for epsilon in FIGURE_1["epsilons"]:
        settings = {**FIGURE_1, "epsilon": epsilon, "batches": list(batches)}
        found.append(
            Cell(f"figure1-{epsilon:g}", settings, functools.partial(batch_curve, epsilon, batches))
        )
    found.append(
        Cell(
            "figure3",
            {**RUN, "epochs": list(EPOCHS), "batches": list(FIGURE_3_BATCHES)},
            tuning_curves,
        )
    )
    found.append(Cell("accountants", RUN, accountants))
    found.append(Cell("appendix-c", RUN, appendix_c))
    powers = range(-2, 3) if options.fast else range(-3, 4)
    clips, rates = [4.0**k for k in powers], [4.0**k for k in powers]
    for kind, seeds in (("private", range(1 if options.fast else 3)), ("plain", range(1))):
        for seed, clip in itertools.product(seeds, clips):
            settings = {
                **HEAT,
                "clip": clip,
                "rates": rates,
                "private": kind == "private",
                "seed": seed,
            }
            name = f"figure2-{kind}-{clip:g}" + (f"-{seed}" if seed else "")
            found.append(Cell(name, settings, functools.partial(heat_row, settings, options)))
    return found


def batch_curve(epsilon: float, batches: tuple[int, ...]) -> dict[str, Any]:
    """Noise multiplier by batch size for one epsilon; delta is records to the power -1.1, which the
    figure does not state.
    """
    records, steps = FIGURE_1["records"], FIGURE_1["steps"]
    delta = records**-1.1
    rows = []
    for batch in batches:
        recipe = dpfy.dpsgd(records, batch, steps=steps)
        row = {
            name: recipe.calibrate(epsilon, delta, accountant=name).noise_multiplier
            for name in ("rdp", "tight")
        }
        rows.append({"batch": batch, **row})
    return {"rows": rows, "delta": delta, "diminishing": records * math.sqrt(epsilon / steps)}


def epochs_event(batch: int, epochs: int) -> events.Event:
    """`epochs` passes at the footnote's noise."""
    rate = batch / RUN["records"]
    return events.Repeated(
        events.PoissonSampled(rate, events.Gaussian(RUN["noise"])), round(epochs / rate)
    )


def tuning_curves() -> dict[str, Any]:
    """Figure 3: every trial as one more epoch, and the same for other batch sizes."""
    rows = [
        {
            "batch": batch,
            "epochs": epochs,
            "rdp": accounting.epsilon(epochs_event(batch, epochs), RUN["delta"], accountant="rdp"),
            "tight": accounting.epsilon(epochs_event(batch, epochs), RUN["delta"]),
        }
        for batch in FIGURE_3_BATCHES
        for epochs in EPOCHS
    ]
    return {"rows": rows}


def accountants() -> dict[str, Any]:
    """Footnote 19: one and a hundred epochs, by RDP and by privacy loss distributions."""
    found: dict[str, Any] = {}
    for epochs in (1, 100):
        event = epochs_event(RUN["batch"], epochs)
        curve = accounting.curve(event)
        found[str(epochs)] = {
            "rdp": accounting.epsilon(event, RUN["delta"], accountant="rdp"),
            "tight": curve.epsilon(RUN["delta"]),
            "tight_lower": curve.epsilon_lower(RUN["delta"]),
        }
    return found


def appendix_c() -> dict[str, Any]:
    """What a hundred trials of one epoch cost, by each route of appendix C."""
    one, delta = epochs_event(RUN["batch"], 1), RUN["delta"]
    orders = np.asarray(sorted({*rdp.ORDERS, 10.3}))
    values = rdp.divergences(one, Adjacency.ADD_OR_REMOVE_ONE, tuple(orders))
    gamma = gamma_for(0.0, 100.0)

    def at_printed_order(mean: float, shape: float) -> float:
        return rdp.to_epsilon(orders, tuning.selected_at(orders, values, mean, shape, 10.3), delta)

    def below(count: int, shape: float, mean: float) -> float:
        g = gamma_for(shape, mean)
        return sum(tuning.trials_pmf(shape, g, k) for k in range(1, count))

    measures: dict[str, Callable[[], float]] = {
        "rdp one epoch": lambda: accounting.epsilon(one, delta, accountant="rdp"),
        "rdp 100 epochs": lambda: accounting.epsilon(
            epochs_event(RUN["batch"], 100), delta, accountant="rdp"
        ),
        "pld one epoch": lambda: accounting.epsilon(one, delta),
        "pld 100 epochs": lambda: accounting.epsilon(epochs_event(RUN["batch"], 100), delta),
        "exponential mechanism": lambda: tuning.exponential(100, 0.01, 100),
        "gamma, eta 0": lambda: gamma,
        "eta 0, mean 100": lambda: at_printed_order(100, 0.0),
        "P[K = 1], eta 0": lambda: tuning.trials_pmf(0.0, gamma, 1),
        "P[K < 50], eta 0": lambda: below(50, 0.0, 100),
        "eta 1, mean 100": lambda: at_printed_order(100, 1.0),
        "eta 1, mean 1000": lambda: at_printed_order(1000, 1.0),
        "P[K < 50], eta 1, mean 100": lambda: below(50, 1.0, 100),
        "P[K < 100], eta 1, mean 1000": lambda: below(100, 1.0, 1000),
        "poisson, rdp": lambda: tuning.random_trials(one, 100, math.inf, delta),
        "poisson, pld": lambda: tuning.random_trials(one, 100, math.inf, delta, tight=True),
        "eta 0, mean 100, best order": lambda: tuning.random_trials(one, 100, 0.0, delta),
        "eta 1, mean 100, best order": lambda: tuning.random_trials(one, 100, 1.0, delta),
    }
    return {name: measure() for name, measure in measures.items()}


def heat_row(settings: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """One row of Figure 2: held-out accuracy over learning rates for one clip norm."""
    source = load(DataConfig(kind=settings["data"]))
    train, test = source.train, source.test
    accuracies = []
    plan = dpfy.dpsgd(
        len(train), len(train), steps=settings["steps"], clip_norm=settings["clip"]
    ).with_noise(settings["noise"] if settings["private"] else 0.0, delta=1e-5)
    for rate in settings["rates"]:
        model = build(ModelConfig(name=settings["model"]), source.features, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        found = trials.private(
            model, optimizer, (train, test), plan, seed=settings["seed"], device=options.device
        )
        accuracies.append(found["test_accuracy"])
    return {"accuracies": accuracies, "epsilon": found["epsilon"]}


STUDY = Study(
    "guide",
    "How to DP-fy ML: figures and appendix C",
    "Ponomareva et al. 2023, How to DP-fy ML: Figures 1, 2 and 3, footnote 19 and appendix C.",
    cells,
    page,
)
