"""Why a private model does not learn: a dry run on public or generated records, which takes away
noise and clipping one by one, and measures how much of an update is signal.

Nothing here may see private records: runs without noise have no guarantee.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import check
from dpfy.plan.recipe import Plan
from dpfy.training.evaluation import PublicTest
from dpfy.training.fit import fit

PROBED = 64
"""Records whose gradients are looked at one by one."""
LOST = 0.05
"""A loss of accuracy, from one rung to the next, that is worth a line."""
MANY, FEW = 0.95, 0.05
"""Shares of clipped gradients at which the clipping norm is too small, and too large."""
UNCLIPPED = 1e6
"""A clipping norm that clips nothing."""


@dataclass(frozen=True)
class Verdict:
    """One line of the checklist: what was looked at, whether it is fine, and what to do."""

    check: str
    fine: bool
    words: str


@dataclass(frozen=True)
class Diagnosis:
    """What a dry run found.

    - `plain`, `clipped`, `private`: accuracy on held-out records without clipping and noise, with
      clipping alone, and with both. `chance` is that of the most frequent class.
    - `signal`: length of the mean of clipped gradients at the start; `noise`: expected length of
      the noise on it; `parameters`: how many numbers get noise.
    - `share_clipped`: of the gradients at the start; `median_norm`: their length in the middle.
    - `alignment`: cosine between the mean of clipped gradients and the mean of the gradients.
    """

    chance: float
    plain: float
    clipped: float
    private: float
    signal: float
    noise: float
    parameters: int
    share_clipped: float
    median_norm: float
    alignment: float
    steps: int
    clip_norm: float

    @property
    def ratio(self) -> float:
        """Signal over noise of one update."""
        return self.signal / self.noise if self.noise else math.inf

    @property
    def ratio_of_run(self) -> float:
        """Signal over noise of all updates together, if they all pointed the same way."""
        return self.ratio * math.sqrt(self.steps)

    def verdicts(self) -> list[Verdict]:
        """The checklist, in the order in which to go through it."""
        learns = self.plain >= self.chance + (1 - self.chance) / 3
        after = self.plain - self.clipped
        last = self.clipped - self.private
        return [
            Verdict(
                "plain training learns",
                learns,
                f"{self.plain:.1%} on held-out records, chance is {self.chance:.1%}"
                + ("" if learns else ": look at model, labels, loss and learning rate first"),
            ),
            Verdict(
                "clipping costs little",
                after <= LOST,
                f"{self.clipped:.1%} with clipping, {self.plain:.1%} without"
                + ("" if after <= LOST else ": raise the learning rate, or take more steps"),
            ),
            Verdict(
                "noise costs little",
                last <= LOST,
                f"{self.private:.1%} with noise, {self.clipped:.1%} without"
                + (
                    ""
                    if last <= LOST
                    else ": take larger batches, train fewer parameters, or raise epsilon"
                ),
            ),
            self._clip_norm(),
            Verdict(
                "updates are more than noise",
                self.ratio_of_run >= 1,
                f"signal over noise is {self.ratio:.2g} in one update and about "
                f"{self.ratio_of_run:.2g} in {self.steps:,}"
                + ("" if self.ratio_of_run >= 1 else ": the noise hides what is learned"),
            ),
        ]

    def _clip_norm(self) -> Verdict:
        share, named = self.share_clipped, f"{self.share_clipped:.0%} of gradients are clipped"
        if share < FEW:
            rule = f": lower the clipping norm to about {self.median_norm:.2g}, for less noise"
        elif share > MANY and self.alignment < 0.9:
            rule = f": raise the clipping norm towards {self.median_norm:.2g}; their mean is bent"
        else:
            rule = ""
        words = f"{named} at norm {self.clip_norm:g}, their median is {self.median_norm:.2g}{rule}"
        return Verdict("the clipping norm fits", not rule, words)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON."""
        figures = {"ratio": self.ratio if self.noise else None}
        return {**asdict(self), **figures, "checklist": [asdict(v) for v in self.verdicts()]}

    def __str__(self) -> str:
        return "\n".join(
            f"{'ok' if verdict.fine else 'LOOK':5} {verdict.check}: {verdict.words}"
            for verdict in self.verdicts()
        )


def generated(
    features: tuple[int, ...], classes: int, count: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Made-up records with a rule that can be learned: the class is the largest of random linear
    functions of the numbers.
    """
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *features, generator=source)
    weights = torch.randn(math.prod(features), classes, generator=source)
    return x, (x.flatten(1) @ weights).argmax(1)


def diagnose(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    plan: Plan,
    *,
    learning_rate: float,
    momentum: float = 0.0,
) -> Diagnosis:
    """Train copies of a classifier with the plan, without its noise, and without its clipping too.

    Args:
        model: It is copied, and not changed.
        train: PUBLIC or generated records and their classes, as many as the plan is for.
        test: Public records to measure on.
        plan: What a private run would do.
        learning_rate, momentum: Of SGD.

    Returns:
        The accuracies, the signal and the noise of an update, and a checklist.

    Raises:
        InvalidInput: The plan is for another number of records.

    Example:
        >>> import torch, dpfy
        >>> from dpfy.training.diagnosis import diagnose, generated
        >>> x, y = generated((8,), 2, 300)
        >>> plan = dpfy.dpsgd(records=200, batch_size=50, steps=8).with_noise(1.0, delta=1e-3)
        >>> found = diagnose(
        ...     torch.nn.Linear(8, 2), (x[:200], y[:200]), (x[200:], y[200:]), plan,
        ...     learning_rate=0.5,
        ... )
        >>> len(found.verdicts())
        5
    """
    check.integer("records", plan.recipe.records, least=len(train[1]), most=len(train[1]))
    norm = plan.recipe.clip.bound.l2
    rungs = {"plain": (UNCLIPPED, 0.0), "clipped": (norm, 0.0), "private": (norm, None)}
    reached = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (clip, noise) in rungs.items():
            reached[name] = _accuracy(
                copy.deepcopy(model),
                train,
                test,
                plan if noise is None else _without(plan, clip),
                Path(folder) / name,
                learning_rate,
                momentum,
            )
    mean, clipped, norms = _gradients(copy.deepcopy(model), train, norm)
    return Diagnosis(
        chance=torch.bincount(test[1]).max().item() / len(test[1]),
        **reached,
        signal=clipped.norm().item(),
        noise=plan.stddev / plan.recipe.expected_batch * math.sqrt(len(mean)),
        parameters=len(mean),
        share_clipped=(norms > norm).double().mean().item(),
        median_norm=norms.median().item(),
        alignment=functional.cosine_similarity(mean, clipped, dim=0).item(),
        steps=plan.recipe.steps,
        clip_norm=norm,
    )


def _without(plan: Plan, clip_norm: float) -> Plan:
    """The same batches and steps, without noise."""
    from dataclasses import replace

    from dpfy.gradients.clip import FlatClip

    return replace(plan.recipe, clip=FlatClip(clip_norm)).with_noise(0.0, delta=plan.delta)


def _accuracy(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    plan: Plan,
    run: Path,
    learning_rate: float,
    momentum: float,
) -> float:
    optimizer = torch.optim.SGD(
        (p for p in model.parameters() if p.requires_grad), lr=learning_rate, momentum=momentum
    )
    fit(model, train, optimizer=optimizer, plan=plan, run=run, evaluation=PublicTest(test))
    with torch.no_grad():
        right = model.eval()(test[0]).argmax(1) == test[1]
    return right.double().mean().item()


def _gradients(
    model: nn.Module, records: tuple[Tensor, Tensor], norm: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some records: the mean gradient, the mean of the clipped ones, and their lengths."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for x, y in zip(records[0][:PROBED], records[1][:PROBED], strict=True):
        loss = functional.cross_entropy(model(x[None]), y[None])
        found = torch.autograd.grad(loss, trained)
        rows.append(torch.cat([part.detach().flatten() for part in found]))
    each = torch.stack(rows)
    norms = each.norm(dim=1)
    clipped = each * (norm / norms.clamp(min=norm))[:, None]
    return each.mean(0), clipped.mean(0), norms
