"""Membership inference on the model of a run, or on any module: its margins, and shadow models that
are trained here on halves of the same records.

A shadow model is an ordinary training without privacy, by the configuration of the run: its
architecture, optimizer, steps and batch size. Shadow models come in pairs; what one is trained on,
the other is not.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfy.audit import membership, whitebox
from dpfy.audit.membership import MembershipAudit
from dpfy.core import check
from dpfy.core import guarantee as tradeoffs
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.data import source
from dpfy.data.config import FIELDS_OF_KIND, KNOWN, DataConfig
from dpfy.models import build
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, quiet
from dpfy.training import job
from dpfy.training.config import JobConfig
from dpfy.training.load import ReleasedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

AT_ONCE, MOST_SHADOWS = 1000, 512
Train = Callable[[Tensor, Tensor], nn.Module]
"""Trains a model on records and classes."""
KEEP = (
    "the figures were computed from the members without noise and are no release of the run: keep "
    "them as you keep the records"
)


def margins_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> NDArray[np.float64]:
    """The margin of each record's class under a model that gives logits."""
    made = []
    with torch.no_grad():
        for part in x.split(AT_ONCE):
            made.append(model(part))
    logits = torch.cat(made)
    if logits.dim() != 2 or not 0 <= int(y.min()) <= int(y.max()) < logits.shape[1]:
        rule = f"must be [records, classes] with all of the {int(y.max()) + 1} classes seen"
        raise InvalidInput("model: scores", list(logits.shape), rule)
    return whitebox.margin(logits.double().cpu().numpy(), y.cpu().numpy())


def train_shadows(
    train: Train,
    x: Tensor,
    y: Tensor,
    count: int,
    *,
    seconds: float = math.inf,
    seed: int = 0,
    progress: Progress = quiet,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Margins on `count` shadow models and which records each was trained on, both [models,
    records]. A pair that would end after `seconds` is not started; the first one always is.
    """
    started = time.monotonic()
    check.integer("shadows", count, least=2, most=MOST_SHADOWS)
    if count % 2:
        raise InvalidInput("shadows", count, "must be even: shadow models come in pairs")
    made, trained = [], []
    for place in range(0, count, 2):
        used = time.monotonic() - started
        if place and used + 2 * used / place > seconds:
            break
        rng = Randomness.for_tests(seed).generator("shadow half", place)
        half = np.zeros(len(x), dtype=bool)
        half[rng.permutation(len(x))[: len(x) // 2]] = True
        for number, chosen in enumerate((half, ~half)):
            progress(f"shadow model {place + number + 1} of {count}", (place + number) / count)
            rows = torch.from_numpy(np.flatnonzero(chosen))
            start = Randomness.for_tests(seed).key("shadow start", place + number, 6)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(start, "big"))
                made.append(margins_of(train(x[rows], y[rows]).eval(), x, y))
            trained.append(chosen)
    return np.stack(made), np.stack(trained)


def attack_model(
    model: Callable[[Tensor], Tensor],
    members: tuple[Tensor, Tensor],
    others: tuple[Tensor, Tensor],
    *,
    train: Train | None = None,
    shadows: int = 0,
    seconds: float = math.inf,
    random: bool = False,
    delta: float = 1e-5,
    confidence: float = 0.95,
    progress: Progress = quiet,
    **claim: Any,
) -> MembershipAudit:
    """Membership inference on any classifier.

    Args:
        model: From records to logits; a module in evaluation mode, or a forward function of a model
            that others trained.
        members: Records that were trained on, and their classes.
        others: Records that were not.
        train: Trains a shadow model on records and classes; needed with `shadows`.
        shadows: Number of shadow models, an even number; 0 leaves out the attacks that need them.
        seconds: Fewer shadow models are trained where they would take longer.
        random: Whether each record was made a member by a fair coin of its own.
        delta: The delta of the bound.
        confidence: Of all limits of one kind together.
        progress: Told how far it is.
        claim: `claimed` and `most` of :func:`dpfy.audit.membership.attack`.

    Returns:
        The attacks, the strongest first.

    Raises:
        InvalidInput: Shapes or classes do not fit, or there are too few records.

    Example:
        >>> import torch
        >>> from dpfy.audit import shadows
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(200, 5), torch.randint(2, (200,))
        >>> net = torch.nn.Linear(5, 2)
        >>> found = shadows.attack_model(net, (x[:100], y[:100]), (x[100:], y[100:]))
        >>> found.members, found.others
        (100, 100)
    """
    _require_alike(members, others)
    x, y = torch.cat([members[0], others[0]]), torch.cat([members[1], others[1]])
    included = np.arange(len(x)) < len(members[0])
    progress("scores of the model")
    seen = margins_of(model, x, y)
    pairs = None
    if shadows:
        if train is None:
            raise InvalidInput("train", None, "must be given: shadow models need a training")
        pairs = train_shadows(train, x, y, shadows, seconds=seconds, progress=progress)
    progress("attacks")
    return membership.attack(
        seen,
        included,
        records=x.reshape(len(x), -1).numpy(),
        labels=y.numpy(),
        shadows=pairs,
        random=random,
        delta=delta,
        confidence=confidence,
        **claim,
    )


def _require_alike(members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]) -> None:
    for name, (x, y) in (("members", members), ("others", others)):
        if len(x) != len(y) or y.dim() != 1 or y.is_floating_point():
            raise InvalidInput(
                name, list(y.shape), f"must have one class for each of {len(x)} records"
            )
        if len(x) < membership.LEAST:
            raise InvalidInput(name, len(x), f"must be at least {membership.LEAST} records")
    if members[0].shape[1:] != others[0].shape[1:]:
        rule = f"must have the shape of the members, {list(members[0].shape[1:])}"
        raise InvalidInput("others: record", list(others[0].shape[1:]), rule)


@dataclasses.dataclass(frozen=True)
class AttackedRun:
    """The model of a finished run of `dpfy train`, with records that were trained on and records
    that were not.

    Args:
        run: The run folder.
        members: A file of records that were trained on; None for the run's own, where its data set
            is a public one.
        others: A file of records that were not.
    """

    run: Path
    members: str | None = None
    others: str | None = None

    @cached_property
    def released(self) -> ReleasedModel:
        """The run, its hashes checked."""
        return ReleasedModel.read(self.run)

    @cached_property
    def config(self) -> JobConfig:
        """The configuration of the run."""
        config = self.released.config()
        if "length" in FIELDS_OF_KIND[config.data.kind]:
            way_out = "plant canaries among the texts (dpfy.synthetic.text.copies.Canaries)"
            raise Unsupported("membership inference on a language model", way_out)
        if (self.members is None) != (self.others is None):
            missing = "--members" if self.members is None else "--others"
            raise InvalidInput(missing, None, "must be given: an attack needs members and others")
        if self.members is None and config.data.kind not in KNOWN:
            rule = (
                "must be given, with --others: the run does not keep its records. Or plant canaries: "
                "dpfy audit train"
            )
            raise InvalidInput("--members", None, rule)
        return config

    @property
    def public(self) -> bool:
        """Whether the records are a public data set, so that figures on them may be published."""
        return self.members is None and self.config.data.kind in KNOWN

    def data(self) -> source.DataSource:
        """Members as records to train on, others as records held out."""
        config = self.config.data
        if self.members is None:
            return source.load(dataclasses.replace(config, user=None, most_records=None))
        fields: dict[str, Any] = {"path": self.members, "test_path": self.others}
        if config.schema is not None:
            fields["schema"] = str(self.released.file("schema.toml"))
        kept = {name: getattr(config, name) for name in ("classes", "range", "names", "size")}
        kind = config.kind if "test_path" in FIELDS_OF_KIND[config.kind] else "npz"
        if kind != config.kind:
            way_out = "give the arrays to dpfy.audit.shadows.attack_model"
            raise Unsupported(f"files of members for data of kind {config.kind!r}", way_out)
        made = DataConfig(kind=kind, test="withheld", **kept, **fields)
        return source.load(made)

    def train(self, classes: int, features: tuple[int, ...]) -> Train:
        """An ordinary training by the run's configuration, without noise and clipping."""
        config, records = self.config, job.records_of(self.config)
        recipe = job.recipe_of(config, records)
        share = min(1.0, recipe.expected_batch / records)

        def train(x: Tensor, y: Tensor) -> nn.Module:
            model = build.build(config.model, features, classes)
            optimizer = job.optimizer_of(config.training, model)
            batch = max(1, round(share * len(x)))
            for _ in range(recipe.steps):
                rows = torch.randint(len(x), (batch,))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            return model

        return train

    def attack(
        self,
        shadows: int = 0,
        *,
        seconds: float = math.inf,
        random: bool = False,
        confidence: float = 0.95,
        progress: Progress = quiet,
    ) -> MembershipAudit:
        """Attack it; see :func:`attack_model`."""
        config = self.config
        progress("records")
        data = self.data()
        shape, classes = self.released.reads()
        if data.classes != classes or tuple(data.features) != tuple(shape):
            rule = f"must be what the model reads: {list(shape)} numbers, {classes} classes"
            raise InvalidInput("members", f"{list(data.features)} numbers", rule)
        parts = [job.extracted(config.model, part).tensors for part in (data.train, data.test)]
        head = self.released.into(build.build(config.model, shape, classes)).eval()
        guarantee = Released.read(self.run)
        allowed = tradeoffs.of_curve(guarantee.guarantee.curve.delta)
        return attack_model(
            head,
            (parts[0][0], parts[0][1]),
            (parts[1][0], parts[1][1]),
            train=self.train(classes, shape),
            shadows=shadows,
            seconds=seconds,
            random=random,
            delta=guarantee.delta,
            confidence=confidence,
            progress=progress,
            claimed=guarantee.epsilon,
            most=allowed.hit_rate,
        )
