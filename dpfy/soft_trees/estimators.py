"""Soft trees as estimators: public columns as for all classical learners, then DP-SGD as for all models.

The run folder is one of training: plan, ledger, model, card. What is public about columns, target and shape stands beside the weights, so
that `dpfy.estimators.load` finds it again.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as arrays_of

from dpfy.core import check
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.estimators import refits
from dpfy.estimators.columns import described
from dpfy.estimators.estimator import PrivateClassifier, PrivateEstimator, PrivateRegressor, Public
from dpfy.estimators.explanation import Explanation
from dpfy.estimators.fitting import Release
from dpfy.estimators.linear.design import Layout
from dpfy.estimators.records import Records
from dpfy.estimators.target import Classes, Range
from dpfy.plan.recipe import Plan, dpsgd
from dpfy.runs.folder import Place
from dpfy.soft_trees.module import SoftTrees, scores
from dpfy.training.fit import fit
from dpfy.training.run import Run

Floats = NDArray[np.float64]
MODEL = "model.safetensors"
LEAST_BATCH = 256


@dataclass(kw_only=True, eq=False, repr=False)
class SoftTree(PrivateEstimator, abstract=True):
    """What soft trees have in common.

    n_estimators:   how many trees, whose leaves add up.
    max_depth:      of each tree.
    epochs:         expected passes over the records.
    batch_size:     records of a step, on average; None for a fifth of them, and at least 256.
    learning_rate:  of Adam.
    clip_norm:      to which the gradient of each record is shortened.
    structure:      the public seed of the weights that training begins with.

    DP-SGD needs a public number of records: give `records=`, a round number within 1% of the truth, or hide a record that is replaced
    (`adjacency="replace-one"`), where the number is public anyway. Ranges are not bought: give a schema or bounds.
    """

    n_estimators: int = 10
    max_depth: int = 3
    epochs: float = 10.0
    batch_size: float | None = None
    learning_rate: float = 0.03
    clip_norm: float = 1.0
    structure: int = 0

    LOSS: ClassVar[str] = "cross_entropy"

    def _outputs(self, data: Records) -> int:
        """Scores of a row."""
        raise NotImplementedError(type(self).__name__)

    def _aims(self, data: Records) -> torch.Tensor:
        """Targets as the loss wants them."""
        raise NotImplementedError(type(self).__name__)

    def fit(self, X: Any, y: Any = None) -> Any:
        """Train on private records.

        Guarantees: those of `dpfy.fit`: the plan is reserved before the first step and covers all of them. Whatever is refused is refused
        before, and spends nothing.
        """
        refits.refuse(self)
        public = self._public(X, y)
        self._check(public)
        data = self._read(X, y, public)
        plan = self._plan(public, data.size)
        facts = self._facts(X, data, public.form) | {"trees": self.n_estimators, "depth": self.max_depth}
        rows = torch.from_numpy(_rows(data).astype(np.float32))
        model = SoftTrees(
            rows.shape[1], self._outputs(data), self.n_estimators, self.max_depth, self.structure, json.dumps(facts).encode()
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        with tempfile.TemporaryDirectory(prefix="dpfy-fit-") as elsewhere:
            run = self._run(Path(elsewhere) / "run", public)
            fit(model, (rows, self._aims(data)), plan=plan, optimizer=optimizer, loss=self.LOSS, run=run)
            self._be(_release(Path(run.path), keep_path=self.run is not None))
        return self

    def _check(self, public: Public) -> None:
        """Refuse parameters that are none."""
        check.integer("n_estimators", self.n_estimators, most=10_000)
        check.integer("max_depth", self.max_depth, most=12)
        check.integer("structure", self.structure, least=0)
        for name in ("epochs", "learning_rate", "clip_norm"):
            check.positive(name, getattr(self, name))
        if self.batch_size is not None:
            check.positive("batch_size", self.batch_size)
        if public.open:
            raise InvalidInput("bounds", None, "must be given for every number and for the target: soft trees buy no ranges")
        if public.terms.records is None and not public.terms.replaced:
            rule = 'must be the public number of records that DP-SGD plans with; or hide a replaced one (adjacency="replace-one")'
            raise InvalidInput("records", None, rule)

    def _plan(self, public: Public, size: int) -> Plan:
        """The plan: public, where the number of records is."""
        terms = public.terms
        records = size if terms.records is None else terms.records
        batch = min(records, max(LEAST_BATCH, records / 5)) if self.batch_size is None else self.batch_size
        if batch > records:
            raise InvalidInput("batch_size", self.batch_size, f"must be at most the number of records, {records}")
        steps = max(1, math.ceil(self.epochs * records / batch))
        recipe = dpsgd(records, batch, steps=steps, clip_norm=self.clip_norm, adjacency=terms.adjacency)
        return recipe.calibrate(terms.epsilon, terms.delta, accountant=terms.accountant)

    def _run(self, elsewhere: Path, public: Public) -> Run:
        """The folder that the caller named, or a temporary one; its card says what is public about the columns."""
        place = self._place() or Place(elsewhere, **self._elsewhere())
        run = place if isinstance(place, Run) else Run(**{f.name: getattr(place, f.name) for f in fields(Place)})
        held = public.columns.columns
        which = f"{len(held)} columns {described(held).rpartition(' ')[2]}"  # a hash of all that is public about them
        told = [{"data": which, "used_for": "ranges and categories", "provenance": "stated by the caller"}]
        if isinstance(public.target, Classes) and public.target.stated:
            said = "the caller stated that the labels that occur in y are public"
            told.append({"data": "the labels that occur in y", "used_for": "the list of classes", "provenance": said})
        return replace(run, about={"model": type(self).__name__, **run.about}, public_data=(*run.public_data, *told))

    def _be(self, release: Release) -> None:
        """Be what was released."""
        facts, arrays = _model(release)
        if facts.get("estimator") != type(self).__name__:
            raise Corrupt(MODEL, f"holds {facts.get('estimator')}, not {type(self).__name__}")
        self._know(release, facts)
        self._shape = int(facts["trees"]), int(facts["depth"])
        self._weights = {name: value.astype(np.float64) for name, value in arrays.items()}

    def explain(self) -> Explanation:
        """How much the splits of all trees look at each feature: the norm of its weights, largest first."""
        names = Layout(self._columns, constant=False).names
        norms = np.sqrt((self._weights["splits.weight"] ** 2).sum(axis=0))
        rows = sorted(zip(names, norms.tolist(), strict=True), key=lambda row: -row[1])
        return Explanation(("feature", "norm of its weights"), tuple(rows), "weights are noisy, and began at random")

    def _scores(self, given: Records) -> Floats:
        return scores(_rows(given), self._weights, *self._shape)


@dataclass(kw_only=True, eq=False, repr=False)
class SoftTreeClassifier(PrivateClassifier, SoftTree, abstract=True):
    """An ensemble of soft trees for classes (Hazimeh et al. 2020), trained by DP-SGD."""

    def _outputs(self, data: Records) -> int:
        return data.classes

    def _aims(self, data: Records) -> torch.Tensor:
        return torch.from_numpy(np.asarray(data.labels, np.int64))

    def _log_joint(self, given: Records) -> Floats:
        return self._scores(given)


@dataclass(kw_only=True, eq=False, repr=False)
class SoftTreeRegressor(PrivateRegressor, SoftTree, abstract=True):
    """An ensemble of soft trees for numbers (Hazimeh et al. 2020), trained by DP-SGD."""

    LOSS: ClassVar[str] = "mse"

    def _outputs(self, data: Records) -> int:
        return 1

    def _aims(self, data: Records) -> torch.Tensor:
        aim, values = data.numeric
        return torch.from_numpy(((values - aim.middle) / aim.half)[:, None].astype(np.float32))

    def predict(self, X: Any) -> Floats:
        """The expected value of each row, within the public range of the target."""
        given, aim = self._given(X), self._aim
        assert isinstance(aim, Range)
        return np.clip(self._scores(given)[:, 0] * aim.half + aim.middle, aim.low, aim.high)


def _rows(data: Records) -> Floats:
    """Numbers on their scales and one-hot categories."""
    layout = Layout(data.columns, constant=False)
    found = layout.rows(data, layout.largest)
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found)


def _release(folder: Path, keep_path: bool) -> Release:
    """All files of a finished run."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}
    return Release(files, folder if keep_path else None)


def _model(release: Release) -> tuple[dict[str, Any], Mapping[str, NDArray[Any]]]:
    """What the file of the model says, and its weights."""
    try:
        arrays = arrays_of(release.files[MODEL])
        facts = json.loads(arrays.pop("facts").tobytes())
        return dict(facts), arrays
    except (SafetensorError, KeyError, ValueError, TypeError):
        raise Corrupt(MODEL, "holds no soft trees") from None


def loaded(run: Path) -> Any:
    """The fitted estimator of a finished run folder."""
    from dpfy.training.load import Released

    Released.read(run).file(MODEL)  # the hash is what the card states
    release = _release(run, keep_path=True)
    facts, _ = _model(release)
    kinds = {kind.__name__: kind for kind in (SoftTreeClassifier, SoftTreeRegressor)}
    if facts.get("estimator") not in kinds:
        raise Corrupt(MODEL, f"holds an estimator that is not known: {facts.get('estimator')!r}")
    made = kinds[str(facts["estimator"])]()
    made._be(release)
    return made
