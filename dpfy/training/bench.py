"""The small training configuration on which the self-test of the audit switches its bugs in,
through the real loop.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.audit.observation import observe_crash, observe_error, observe_gradients, observe_write
from dpfy.audit.user_training import observe_users
from dpfy.core import events
from dpfy.core.errors import DpfyError
from dpfy.core.guarantee import Curve
from dpfy.core.ledger_rules import rehearsal
from dpfy.core.randomness import Randomness
from dpfy.core.unit import Adjacency, user_unit
from dpfy.core.values import Bound, Bounded
from dpfy.data.lazy import RecordSource
from dpfy.data.owners import Owned, Users
from dpfy.data.records import Records
from dpfy.gradients.checker import LossProbe, check_model
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.choice import choose
from dpfy.isolation.program import Program
from dpfy.labels import bench as labels
from dpfy.local.bench import kept_answers, local_reports
from dpfy.noise.gaussian import draw
from dpfy.noise.stream import NoiseStream
from dpfy.noise.toeplitz import Banded
from dpfy.noise.tree import Tree
from dpfy.plan.recipe import EXACT, RECORD, UNIT, Plan, dpsgd
from dpfy.prediction import bench as answers
from dpfy.synthetic import bench as synthetic
from dpfy.synthetic.evolution import bench as synthetic_evolution
from dpfy.synthetic.images import bench as synthetic_images
from dpfy.training.loop import PrivateTraining

Array = NDArray[np.float64]
CORRELATED_STEPS, CORRELATED_RESUME = 12, 6

MOST_RECORDS = 4
"""Of one user."""

CLIP = 2.7
"""Not 1, or noise that forgets the clip norm could not be told from noise that knows it; above 1,
so that forgetting makes it too small.
"""


def _step_without_noise(training: Any) -> None:
    for p in training.model.parameters():
        p.grad = torch.ones_like(p)
    training.optimizer.step()


@torch.no_grad()
def _overwrite(training: Any) -> None:
    next(training.model.parameters()).fill_(1.0)


WRITES = {
    "an overwritten weight": _overwrite,
    "a step without noise": _step_without_noise,
    "a weight written through .data": lambda training: next(training.model.parameters()).data.fill_(
        1.0
    ),
    "a weight decay set to a number": lambda training: training.optimizer.param_groups[0].update(
        weight_decay=0.5
    ),
}
"""What careless loops do between two private steps."""


MIXTURES = {
    "a shape": "lambda losses, x, y: losses / (y > 0).nonzero().shape[0]",
    "a read value": "lambda losses, x, y: losses * torch.full((1,), x[:, 0].square().mean())",
}
"""Losses in which a record's part depends on the other records, as text: code of this package is
not watched, that of a user is.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class _Regrouped(Owned):
    """Records by user as a bug has them."""

    part: Any = None

    def grouped(self, base: RecordSource) -> Any:
        """What the bug makes of them."""
        return self.part(super().grouped(base))


class TrainingBench:
    """DP-SGD on a two-layer network of 904 parameters in float64: rate 1/2, 20 steps, noise
    multiplier 1.5, clip norm 2.7.
    """

    noise_multiplier, rate, steps, delta = 1.5, 0.5, 20, 1e-5
    physical = 128

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 4)).double()
        self.curve = lru_cache(maxsize=64)(self._curve)

    @property
    def parameters(self) -> Mapping[str, slice]:
        """Where each parameter tensor lies in the flat vector."""
        places, start = {}, 0
        for name, p in self.model.named_parameters():
            places[name] = slice(start, start + p.numel())
            start += p.numel()
        return places

    def plan(
        self, records: int, noise: float, rate: float, steps: int, adjacency: Adjacency
    ) -> Plan:
        """The plan that the self-test claims."""
        recipe = dpsgd(records, rate * records, steps=steps, clip_norm=CLIP, adjacency=adjacency)
        return recipe.with_noise(noise, delta=self.delta, allow_large_delta=True)

    def _curve(self, strength: float, adjacency: Adjacency) -> Curve:
        return (
            self.plan(904, self.noise_multiplier / strength, self.rate, self.steps, adjacency)
            .guarantee()
            .curve
        )

    def updates(
        self,
        rows: Array,
        bug: Any,
        *,
        noise: float | None = None,
        rate: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        interrupt: int | None = None,
        exact: bool = False,
    ) -> Array:
        """Train on records with these gradients, the bug's parts in place; the noisy sums [steps,
        parameters] in clip norms.
        """
        chosen = self.noise_multiplier if noise is None else noise
        plan = self.plan(
            len(rows),
            chosen,
            rate or self.rate,
            self.steps if steps is None else steps,
            Adjacency.ADD_OR_REMOVE_ONE,
        )
        if exact:
            plan = dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, noise=EXACT))
        seams = bug if steps is None else dataclasses.replace(bug, steps=None)
        physical = self.physical if len(rows) > 16 else 4
        return observe_gradients(
            self.model, rows, plan, seams=seams, seed=seed, physical=physical, interrupt=interrupt
        )

    def batches(self, bug: Any, records: int, steps: int) -> NDArray[np.bool_]:
        """[steps, records]: who takes part when."""
        sampler = bug.sampler(
            self.plan(records, 1.0, self.rate, steps, Adjacency.ADD_OR_REMOVE_ONE).recipe.sampler
        )
        randomness = Randomness.for_tests(41)
        there = np.zeros((steps, records), dtype=bool)
        for step in range(steps):
            rng = randomness.generator("sampling", sampler.address(step))
            there[step, sampler.batch(step, records=records, rng=rng)] = True
        return there

    def of_users(self, owners: NDArray[np.int64], most: int, bug: Any, *, single: bool) -> Array:
        """The sum without noise over users whose records are alike, three clip norms long; or over
        the records of theirs that are used.
        """
        rows = np.zeros((len(owners), sum(p.numel() for p in self.model.parameters())))
        rows[np.arange(len(owners)), owners] = 3.0
        names, counts = np.unique(owners, return_counts=True)
        units = int(np.minimum(counts, most).sum()) if single else len(names)
        recipe = dpsgd(
            units,
            units,
            steps=1,
            clip_norm=CLIP,
            unit=user_unit(most),
            draw=RECORD if single else UNIT,
        )
        plan = recipe.with_noise(0.0, delta=self.delta, allow_large_delta=True)

        def by(records: Records) -> _Regrouped:
            return _Regrouped(records, Users(owners), most, single, bug.grouped)

        released: Array = observe_gradients(self.model, rows, plan, seams=bug, physical=64, by=by)[
            0
        ]
        return released

    def again(self, bug: Any) -> Iterator[tuple[str, list[tuple[int, Array]]]]:
        """A loop that goes on with other gradients after an error behind the noise of a step, and a
        run resumed with others.
        """
        rows = np.eye(8, sum(p.numel() for p in self.model.parameters())) * 4
        plan = self.plan(len(rows), self.noise_multiplier, 1.0, 6, Adjacency.ADD_OR_REMOVE_ONE)
        yield "an error", observe_error(self.model, (rows, -rows), plan, bug.after_error)
        yield "a crash", observe_crash(self.model, (rows, -rows), plan, bug.after_entry)

    def beside(self, bug: Any) -> Iterator[tuple[str, int]]:
        """Writes to weights and optimizer between two steps."""
        rows = np.eye(8, sum(p.numel() for p in self.model.parameters())) * 4
        plan = self.plan(len(rows), self.noise_multiplier, 1.0, 6, Adjacency.ADD_OR_REMOVE_ONE)
        for what, write in WRITES.items():
            yield what, observe_write(self.model, rows, plan, bug.after_entry, write)

    def correlated(self, bug: Any) -> Iterator[tuple[str, Array, Array]]:
        """Noise of correlated strategies as streamed, with the state saved and restored half-way,
        and as their matrices say.
        """
        strategies = {
            "banded": Banded((1.0, 0.5, 0.25)),
            "tree": Tree(restart=4),
            "completed tree": Tree("completed", restart=4, completion=True),
        }
        for name, strategy in strategies.items():
            yield name, *self._streamed(strategy, bug)

    def _streamed(self, strategy: Any, bug: Any) -> tuple[Array, Array]:
        like = {"w": torch.zeros(50, dtype=torch.float64)}
        randomness = Randomness.for_tests(42)
        permit = rehearsal(events.Gaussian(1.0), CORRELATED_STEPS)
        stream = bug.stream(NoiseStream(bug.strategy(strategy), 1.0, randomness))
        state, seen = stream.init(like), []
        for step in range(CORRELATED_STEPS):
            if step == CORRELATED_RESUME:
                state = bug.restored({k: v.clone() for k, v in state.items()}, stream.init(like))
            released, state = stream.release(Bounded(dict(like), Bound(CLIP)), step, state, permit)
            seen.append(released.value["w"].numpy() / CLIP)
        matrix = strategy.noise_matrix(CORRELATED_STEPS)
        draws = np.array(
            [draw(like, randomness, "noise", k)["w"].numpy() for k in range(matrix.shape[1])]
        )
        return np.array(seen), matrix @ draws

    def overflowing(self, bug: Any) -> tuple[Array, Array]:
        """Squared outputs overflow for one of five examples; the sum with it, and the right sum
        without it.
        """
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rest = self._sum(choose(self.model)[0], x)
        x = torch.cat([x, torch.full((1, 4), 1e300, dtype=torch.float64)])
        return self._sum(bug.engine(choose(self.model)[0]), x, 1e200), rest

    def _sum(self, engine: Any, x: Tensor, last: float = 1.0) -> Array:
        engine.attach(self.model)
        try:
            gain = torch.tensor([1.0] * (len(x) - 1) + [last], dtype=torch.float64)
            total = engine.bounded_sum(
                (self.model(x) * gain[:, None]).square().sum(1), FlatClip(CLIP)
            ).value
        finally:
            engine.detach()
        return np.concatenate([total[name].reshape(-1).numpy() for name in self.parameters])

    def reports(
        self, bug: Any
    ) -> Iterator[tuple[str, float, NDArray[np.int64], NDArray[np.int64]]]:
        """Reports of every local protocol on two values."""
        return local_reports(bug.protocol)

    def label_answers(
        self, bug: Any
    ) -> Iterator[tuple[str, float, NDArray[np.int64], NDArray[np.int64]]]:
        """Of records with one label, and with another."""
        return labels.label_answers(bug.labels)

    def labels_replayed(self, bug: Any) -> Iterator[tuple[str, bool, bool]]:
        """Answers on other labels."""
        return labels.labels_replayed(bug.labels)

    def labels_asked(self, bug: Any) -> Iterator[tuple[str, int]]:
        """Questions that a label takes part in."""
        return labels.labels_asked(bug.labels)

    def kept_answers(self, bug: Any) -> tuple[float, NDArray[np.int64], NDArray[np.int64]]:
        """What many reports from one kept answer show."""
        return kept_answers(bug.protocol)

    def votes_moved(self, bug: Any) -> int:
        """Of voters, when an owner leaves."""
        return answers.votes_moved(bug.prediction)

    def answer_bills(self, bug: Any) -> tuple[int, list[tuple[int, int]]]:
        """Of a service, over restarts."""
        return answers.answer_bills(bug.prediction)

    def checks_counted(self, bug: Any) -> tuple[int, int]:
        """Of confident votes."""
        return answers.checks_counted(bug.prediction)

    def asked_again(self, bug: Any) -> tuple[int, int]:
        """Of one question."""
        return answers.asked_again(bug.prediction)

    def bill_moved(self, bug: Any) -> tuple[float, float]:
        """Of the votes at hand."""
        return answers.bill_moved(bug.prediction)

    def bills_stated(self, bug: Any) -> tuple[int, int]:
        """Of the votes at hand."""
        return answers.bills_stated(bug.prediction)

    def cards_of_answers(self, bug: Any) -> tuple[str, str]:
        """Of two services."""
        return answers.cards(bug.prediction)

    def students(self, bug: Any) -> tuple[bytes, bytes, bool]:
        """See `Bench`."""
        return answers.students(bug.prediction)

    def fits(self, bug: Any, promise: str) -> Iterator[tuple[str, str, float, float]]:
        """Classical learners on neighbours."""
        from dpfy.estimators.bench import fits

        return fits(bug.learner, promise, bug.case)

    def syntheses(self, bug: Any) -> Iterator[tuple[str, Any, Any, Any, bool]]:
        """Syntheses of two tables each."""
        return synthetic.runs(bug.synthesis)

    def synthetic_squares(self, bug: Any) -> tuple[float, float]:
        """What the measurements of a synthesis take, and what is claimed."""
        return synthetic.spent(bug.synthesis)

    def pictures(self, bug: Any) -> Iterator[tuple[str, Any, Any, Any, bool]]:
        """Syntheses of images from two sets of pictures each."""
        return synthetic_images.runs(bug.pictures)

    def picture_squares(self, bug: Any) -> tuple[float, float]:
        """What the sums of a synthesis of images take, and what is claimed."""
        return synthetic_images.spent(bug.pictures)

    def evolutions(self, bug: Any) -> Iterator[tuple[str, Any, Any, Any, bool]]:
        """Private evolutions from two sets of records each."""
        return synthetic_evolution.runs(bug.evolution)

    def evolution_squares(self, bug: Any) -> tuple[float, float]:
        """What the rounds of a private evolution take, and what is claimed."""
        return synthetic_evolution.spent(bug.evolution)

    def users(
        self, rows: Array, owners: NDArray[np.int64], bug: Any, *, noise: float, steps: int = 1
    ) -> Array:
        """User-level training on these records, with a bug's parts in place."""
        count = len(np.unique(owners))
        recipe = dpsgd(count, count, steps=steps, clip_norm=CLIP, unit=user_unit(MOST_RECORDS))
        plan = recipe.with_noise(noise, delta=self.delta, allow_large_delta=True)
        return observe_users(self.model, rows, owners, plan, seams=bug, join=bug.join)

    def tied_contribution(self, bug: Any) -> float:
        """The contribution of one long gradient to a model that uses one layer twice, both uses
        aligned, in clip norms.
        """
        return _contribution(
            bug, _Twice().double(), torch.full((1, 6), 3.0, dtype=torch.float64), 15.0
        )

    def cancelling_contribution(self, bug: Any) -> float:
        """The same in float32 where two uses of a layer, 1e5 clip norms each, cancel but for a few
        ten-thousandths.
        """
        generator = torch.Generator().manual_seed(0)
        sizes = [
            _contribution(bug, _Opposed(gap), torch.randn(1, 64, generator=generator), 1e5 * CLIP)
            for gap in GAPS
        ]
        return max(sizes)

    def mixed(self, bug: Any) -> Iterator[tuple[str, bool]]:
        """By a count of records, taken from a shape, and by a number that C++ reads from a
        tensor.
        """
        x, y = torch.randn(64, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
        recipe = dpsgd(64, 32, steps=1, clip_norm=CLIP)
        for what, text in MIXTURES.items():
            mix = eval(text, {"__name__": "loop", "torch": torch})
            model = nn.Linear(6, 3)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            with (
                tempfile.TemporaryDirectory() as folder,
                suppress(DpfyError),
                patch.object(Program, "needed", bug.replayed(Program.needed)),
                PrivateTraining(
                    model, sgd, (x, y), recipe.with_noise(1.0, delta=1e-3), Path(folder) / "run"
                ) as training,
            ):
                for features, labels in training.batches():
                    training.step(
                        mix(
                            nn.functional.cross_entropy(model(features), labels, reduction="none"),
                            features,
                            labels,
                        )
                    )
            yield what, training.steps_done > 0

    def batchnorm_refusal(self, bug: Any) -> str | None:
        """By the model checker; and, were it not asked, by the probe of the first losses."""
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        try:
            check_model(model)
        except DpfyError as refusal:
            return f"{refusal}; without the model checker: {_probed(model)}"
        return _probed(model)


GAPS = (1e-5, 1e-4, 2e-4, 2.8e-4, 4e-4)
"""Squares of what is left of two float32 uses then sink below the rounding of the squares of the
uses themselves.
"""


def _contribution(bug: Any, model: nn.Module, x: Tensor, size: float) -> float:
    """What one example adds, in clip norms."""
    engine = bug.engine(choose(model)[0])
    engine.attach(model)
    try:
        total = engine.bounded_sum(model(x).sum(1) * size, FlatClip(CLIP)).value
    finally:
        engine.detach()
    return float(sum(g.double().square().sum() for g in total.values()) ** 0.5) / CLIP


class _Opposed(nn.Module):
    """A layer used twice on the same input, the second time with nearly the opposite sign."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.layer, self.gap = nn.Linear(64, 64, bias=False), gap
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        """The difference of two uses, each with a gradient of length about 1."""
        x = x / (8 * x.norm())
        out: Tensor = self.layer(x) - (1 - self.gap) * self.layer(x)
        return out


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        """The layer, twice."""
        out: Tensor = self.layer(self.layer(x))
        return out


def _probed(model: nn.Module) -> str | None:
    probe = LossProbe(model)
    try:
        probe.check(
            model(torch.randn(8, 6, generator=torch.Generator().manual_seed(0))).square().sum(1)
        )
    except DpfyError as refusal:
        return str(refusal)
    finally:
        probe.close()
    return None
