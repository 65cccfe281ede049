"""Who calls `fit`: searches and ensembles of scikit-learn fit many times on the same records, and
pipelines may learn before us.

Each fit is a release of its own, and choosing among fits by their scores is another one. So a fit
from inside scikit-learn is refused unless the caller is known to fit once: Pipeline,
ColumnTransformer, and the checks of scikit-learn itself.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from dpfy.core.errors import Unsupported
from dpfy.estimators import steps
from dpfy.estimators.claim import ProofCondition

ONCE = (
    "sklearn.base",
    "sklearn.pipeline",
    "sklearn.compose",
    "sklearn.utils",
    "sklearn._config",
    "sklearn.tests",
)
"""Modules of scikit-learn that may stand between a caller and a fit: none of them fits twice, or
looks at the result.
"""
TUNE = (
    "dpfy.tune(estimator, space, (X, y), epsilon=...) searches within one budget, and dpfy plan "
    "compare estimators chooses on public data of the same shape"
)
FITS = ("fit", "fit_transform", "fit_predict", "_fit")


def allowed(estimator: Any) -> tuple[ProofCondition, ...]:
    """Refuse a fit from inside a search, a cross-validation or an ensemble, and one after a step of
    a pipeline that learns without noise.

    Returns:
        What the proof needs of the steps before the fit; nothing where there are none.
    """
    found: list[steps.CheckedStep] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("sklearn."):
            _refuse_module(module)
            if frame.f_code.co_name in FITS:
                found = [*_before(frame.f_locals.get("self"), estimator), *found]
        frame = frame.f_back
    if not found:
        return ()
    names = ", ".join(dict.fromkeys(map(str, found)))
    return (
        ProofCondition(
            "steps before the fit",
            "they treat each row by itself and learn nothing, or are private themselves",
            names if len(names) <= 300 else names[:297] + "...",
            stated=any(step.stated for step in found),
        ),
    )


def _refuse_module(module: str) -> None:
    if not module.startswith(ONCE):
        name = ".".join(module.split(".")[:2])
        raise Unsupported(
            f"a fit inside {name}, which fits many times on the same records: each fit is a "
            f"release of its own;",
            TUNE,
        )


def _before(caller: Any, estimator: Any) -> list[steps.CheckedStep]:
    """The steps that a caller fits before the estimator, all of which may stand there."""
    found: list[steps.CheckedStep] = []
    if getattr(caller, "regressor", None) is not None:  # a TransformedTargetRegressor
        if getattr(caller, "func", None) is not None and caller.check_inverse:
            way_out = "give it check_inverse=False: it may warn"
            raise Unsupported("TransformedTargetRegressor with check_inverse=True", way_out)
        stated = [steps.CheckedStep("a function of the target", stated=True)]
        found += stated if getattr(caller, "func", None) is not None else []
        found += steps.checked(getattr(caller, "transformer", None), "transformer")
    for name, step in getattr(caller, "steps", None) or ():
        if step is estimator:
            break
        found += steps.checked(step, name)
    return found
