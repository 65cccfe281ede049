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
    "tune privately (dpfy tune), or choose on public data of the same shape (dpfy plan compare "
    "estimators)"
)
SCALE = (
    "leave it out: give bounds or a schema, by which the estimator scales; or put a step without a "
    "state in its place"
)


def refuse(estimator: Any) -> None:
    """Refuse a fit from inside a search, a cross-validation or an ensemble, and one after a step of
    a pipeline that learns for free.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("sklearn."):
            _refuse_module(module)
            if frame.f_code.co_name in ("fit", "fit_transform", "fit_predict", "_fit"):
                _refuse_steps(frame.f_locals.get("self"), estimator)
        frame = frame.f_back


def _refuse_module(module: str) -> None:
    if not module.startswith(ONCE):
        name = ".".join(module.split(".")[:2])
        raise Unsupported(
            f"a fit inside {name}, which fits many times on the same records: each fit is a "
            f"release of its own;",
            TUNE,
        )


def _refuse_steps(caller: Any, estimator: Any) -> None:
    """Steps before the estimator in a pipeline must learn nothing, or be private themselves."""
    for name, step in getattr(caller, "steps", None) or ():
        if step is estimator:
            return
        if learns(step):
            what = (
                f"the step {name!r} ({type(step).__name__}) before a private estimator: it learns "
                f"from the records without noise, and"
            )
            raise Unsupported(what, SCALE)


def learns(step: Any) -> bool:
    """Whether a step of a pipeline takes something from the records that no noise protects."""
    if step is None or step == "passthrough" or step == "drop" or getattr(step, "private", False):
        return False
    parts = (
        getattr(step, "steps", None)
        or getattr(step, "transformers", None)
        or getattr(step, "transformer_list", None)
    )
    if parts:
        return any(learns(part[1]) for part in parts)
    try:
        from sklearn.utils import get_tags

        return bool(get_tags(step).requires_fit)
    except Exception:  # no estimator of scikit-learn: nobody knows what it does
        return True
