"""MWEM and independent columns: other selections for the graphical model."""

from __future__ import annotations

from dpfy.synthetic.methods import (
    GRAPHICAL,
    FittedModel,
    SynthesisMethod,
    SynthesisTask,
    adaptive,
    singles,
)


def independent(task: SynthesisTask, method: SynthesisMethod) -> FittedModel:
    """Nothing but single columns."""
    return task.fit(method.estimator, singles(task, method))


MWEM = SynthesisMethod(
    adaptive,
    GRAPHICAL,
    "multiplicative weights with a graphical model (MWEM+PGM)",
    0.5,
    0.05,
    rounds=1,
    aware=False,
)
INDEPENDENT = SynthesisMethod(independent, GRAPHICAL, "independent columns", 0.0, 1.0, rounds=0)
