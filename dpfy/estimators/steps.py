"""Which steps may stand before a private estimator in a pipeline: the rule, step by step.

A step must learn nothing from the records, or be private itself. Three kinds learn nothing:

- steps that treat each row by itself and have no state: `Normalizer`, `Binarizer`;
- steps whose state follows from their settings and the number of columns alone, with the settings
  that `RULES` asks for: `OneHotEncoder(categories=[...])` and others;
- functions (`FunctionTransformer`) and steps of other libraries that say of themselves that they
  need no fit. That they treat each row by itself is what the caller states, and the report says so.
  A function that mixes made-up rows is refused.

Settings under which a private cell could raise an error, print a warning or change the form of what
comes out are refused, too.

Who calls `fit`: searches and ensembles of scikit-learn fit many times on the same records, and
pipelines may learn before us.

Each fit is a release of its own, and choosing among fits by their scores is another one. So a fit
from inside scikit-learn is refused unless the caller is known to fit once: Pipeline,
ColumnTransformer, and the checks of scikit-learn itself.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from dpfy.core.errors import Unsupported
from dpfy.estimators.claim import ProofCondition

OWN_SCALES = (
    "use dpfy.estimators.PrivateScaler, or leave it out: give bounds or a schema, by which the "
    "estimator scales"
)
ALLOWED = "use a step that learns nothing (docs/estimators.md lists them)"


@dataclass(frozen=True)
class CheckedStep:
    """A step that may stand before a private estimator. `stated`: the caller states it."""

    name: str
    stated: bool = False
    private: bool = False

    def __str__(self) -> str:
        if self.private:
            return f"{self.name} (private itself, charged for itself)"
        return f"{self.name} (declared by the caller)" if self.stated else self.name


def _given(step: Any) -> Iterator[str]:
    """What encoders must be told."""
    if isinstance(step.categories, str):
        yield "categories=[...], the public list of each column"
    if step.min_frequency is not None or step.max_categories is not None:
        yield "min_frequency=None and max_categories=None: frequencies are private"


def _one_hot(step: Any) -> Iterator[str]:
    yield from _given(step)
    if step.handle_unknown != "ignore" or step.drop is not None:
        yield 'handle_unknown="ignore" and drop=None: others tell of a record by an error or a warning'
    if step.sparse_output:
        yield "sparse_output=False"


def _ordinal(step: Any) -> Iterator[str]:
    yield from _given(step)
    if step.handle_unknown != "use_encoded_value":
        yield 'handle_unknown="use_encoded_value" and unknown_value=-1: an error tells of a record'


def _imputer(step: Any) -> Iterator[str]:
    if step.strategy != "constant":
        yield 'strategy="constant" and a public fill_value'
    if step.add_indicator or not step.keep_empty_features:
        yield "add_indicator=False and keep_empty_features=True: which cells miss is private"


def _indicator(step: Any) -> Iterator[str]:
    if step.features != "all":
        yield 'features="all"'


def _projection(step: Any) -> Iterator[str]:
    if not isinstance(step.n_components, numbers.Integral):
        yield 'n_components as a number: "auto" follows from the number of records'


def _kernel(step: Any) -> Iterator[str]:
    if isinstance(step.gamma, str):
        yield "gamma as a number"


def _splines(step: Any) -> Iterator[str]:
    if isinstance(step.knots, str):
        yield "knots=[...], public places"
    if step.extrapolation == "error" or step.sparse_output:
        yield 'extrapolation="constant" and sparse_output=False'


def _nothing(step: Any) -> Iterator[str]:
    return iter(())


RULES: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "Normalizer": _nothing,
    "Binarizer": _nothing,
    "PolynomialFeatures": _nothing,
    "OneHotEncoder": _one_hot,
    "OrdinalEncoder": _ordinal,
    "SimpleImputer": _imputer,
    "MissingIndicator": _indicator,
    "SplineTransformer": _splines,
    "GaussianRandomProjection": _projection,
    "SparseRandomProjection": _projection,
    "RBFSampler": _kernel,
}
"""Steps of scikit-learn that may be used, each with the settings that it lacks."""


def checked(step: Any, name: str = "") -> list[CheckedStep]:
    """The steps within a step, all of which may stand before a private estimator.

    Args:
        step: A step of a pipeline: a transformer, a `ColumnTransformer`, a pipeline.
        name: What the pipeline calls it.

    Raises:
        Unsupported: One of them learns from the records. The message names the way out.

    Guarantees: looks at settings and made-up rows alone, never at the records.
    """
    if step is None or isinstance(step, str):  # "drop", "passthrough"
        return []
    kind = type(step).__name__
    if getattr(step, "private", False) is True:
        return [CheckedStep(kind, private=True)]
    if (inner := _inner(step, kind)) is not None:
        return [found for label, part in inner for found in checked(part, label)]
    if type(step).__module__.startswith("sklearn."):
        if kind == "FunctionTransformer":
            return [_function(step, name)]
        if kind not in RULES:
            raise _learns(name, kind, OWN_SCALES)
        if wrong := list(RULES[kind](step)):
            raise _learns(name, kind, f"give it {'; '.join(wrong)}")
        return [CheckedStep(kind)]
    if _needs_fit(step):
        raise _learns(name, kind, ALLOWED)
    return [CheckedStep(kind, stated=True)]


def _learns(name: str, kind: str, way_out: str) -> Unsupported:
    what = f"the step {name or kind!r} ({kind}) before a private estimator: it"
    return Unsupported(f"{what} learns from the records without noise, and", way_out)


def _inner(step: Any, kind: str) -> list[tuple[str, Any]] | None:
    """The steps that a step consists of."""
    if (steps := getattr(step, "steps", None)) is not None:
        return [(label, part) for label, part in steps]
    if (union := getattr(step, "transformer_list", None)) is not None:
        return [(label, part) for label, part in union]
    if (parts := getattr(step, "transformers", None)) is None:
        return None
    for label, _, chosen in parts:
        if callable(chosen) and type(chosen).__name__ != "make_column_selector":
            raise _learns(label, kind, "name the columns: a function of the table sees the records")
    return [*((p[0], p[1]) for p in parts), ("remainder", getattr(step, "remainder", None))]


def _needs_fit(step: Any) -> bool:
    """Whether a step of another library says that it learns; so does one that says nothing."""
    try:
        from sklearn.utils import get_tags

        return bool(get_tags(step).requires_fit)
    except Exception:  # whatever the step of a stranger does when it is asked
        return True


MADE_UP = 12


def _function(step: Any, name: str) -> CheckedStep:
    """A function, which the caller states to treat each row by itself."""
    if step.inverse_func is not None and step.check_inverse:
        raise _learns(name, "FunctionTransformer", "give it check_inverse=False: it may warn")
    if step.func is None:
        return CheckedStep("FunctionTransformer")
    rows: Any = np.random.default_rng(0).uniform(
        1, 2, (MADE_UP, getattr(step, "n_features_in_", 2))
    )
    try:
        if hasattr(step, "feature_names_in_"):
            import pandas

            rows = pandas.DataFrame(rows, columns=list(step.feature_names_in_))
        given = step.kw_args or {}
        whole, half = (
            np.asarray(step.func(part, **given), np.float64)
            for part in (rows, rows[: MADE_UP // 2])
        )
    except Exception:  # it is no function of such rows: nothing is known
        return CheckedStep("FunctionTransformer", stated=True)
    if len(half) != MADE_UP // 2 or not np.array_equal(whole[: len(half)], half, equal_nan=True):
        way_out = "give it a function that treats each row by itself"
        raise Unsupported(f"the step {name!r}, whose function mixes rows,", way_out)
    return CheckedStep("FunctionTransformer", stated=True)


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
    found: list[CheckedStep] = []
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


def _before(caller: Any, estimator: Any) -> list[CheckedStep]:
    """The steps that a caller fits before the estimator, all of which may stand there."""
    found: list[CheckedStep] = []
    if getattr(caller, "regressor", None) is not None:  # a TransformedTargetRegressor
        if getattr(caller, "func", None) is not None and caller.check_inverse:
            way_out = "give it check_inverse=False: it may warn"
            raise Unsupported("TransformedTargetRegressor with check_inverse=True", way_out)
        stated = [CheckedStep("a function of the target", stated=True)]
        found += stated if getattr(caller, "func", None) is not None else []
        found += checked(getattr(caller, "transformer", None), "transformer")
    for name, step in getattr(caller, "steps", None) or ():
        if step is estimator:
            break
        found += checked(step, name)
    return found
