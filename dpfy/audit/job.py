"""A whole training job with canaries in it, and what it leaves for the audit: canaries.npz in the
run folder.

The private records are trained on as before, so the run is reserved and charged as before. The canaries
are synthetic: that they, and the coins that decided which of them were in, stand in the run folder
tells nothing about the private records beyond the released model.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from dpfy.audit import finished
from dpfy.audit.families import ClaimedFamily
from dpfy.audit.observation import LENGTH, claimed_curve, observe_table
from dpfy.audit.whitebox import AuditedClaim, ObservedSums, fair_coins
from dpfy.core import check, errors, settings, storage
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.settings import setting
from dpfy.core.storage import write_atomically
from dpfy.core.unit import EXAMPLE, Poisson, RandomAllocation
from dpfy.gradients.clip import FlatClip
from dpfy.models import build, features
from dpfy.models.config import LANGUAGE
from dpfy.noise.strategy import Identity
from dpfy.plan.recipe import Plan
from dpfy.runs.mark import CANARIES
from dpfy.runs.run import Run
from dpfy.training import job
from dpfy.training.config import SECTIONS, JobConfig, attempted, make
from dpfy.training.evaluation import PublicTest
from dpfy.training.fit import fit
from dpfy.training.run import TRAINING, TrainingRun, load_plan
from dpfy.training.step import Update

FILE = CANARIES
ATTACKS = ("white-box", "final-model")
MOST_CANARIES = 2**20
NOBODY = -100
"""The target of a canary that is out: its loss, and so its gradient, is exactly zero."""
LIT = 0.05
"""Share of bright pixels in a crafted image: unlike any record, and nearly orthogonal to the other
canaries.
"""


@dataclass(frozen=True, repr=False)
class Evidence:
    """What an audit of a run reads: the plan, the coins, and what the attacker saw: updates, or the
    model's answers on the canaries.
    """

    plan: Plan
    attack: str
    included: NDArray[np.bool_]
    projections: NDArray[np.float64] | None = None
    margins: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class AuditConfig:
    """[audit]: the canaries that are trained on, and who looks at them."""

    canaries: int = setting(1000, "Synthetic canaries, each in by a fair coin.")
    attack: str = setting(
        ATTACKS[0], "white-box (sees every update) or final-model (sees the released model)."
    )

    def __post_init__(self) -> None:
        check.integer("audit.canaries", self.canaries, least=10, most=MOST_CANARIES)
        check.one_of("audit.attack", self.attack, ATTACKS)


@dataclass(frozen=True)
class AuditJob(JobConfig):
    """Everything `dpfy audit train` does, as data. `privacy.records` counts no canary."""

    audit: AuditConfig = dataclasses.field(default_factory=AuditConfig)


AUDITED: dict[str, type] = SECTIONS | {"audit": AuditConfig}
"""The sections of the configuration of a run with canaries."""


def read(config: Path | None, given: Mapping[str, Any]) -> AuditJob:
    """The configuration in a file, if any, with what the command line gives over it."""
    raw = settings.read(AUDITED, config) if config else {}
    made, found = attempted(raw, given, AuditJob, AUDITED)
    errors.raise_all(found)
    assert isinstance(made, AuditJob)
    return made


def train(config: AuditJob, out: Path, *, seed: int | None = None, progress: bool = False) -> None:
    """Run the job into `out` with its canaries; those that are out by their coin are blank records.

    Guarantees: the plan, for private records and canaries together, is reserved before any data is
    read.
    """
    _train(config, out, fair_coins(config.audit.canaries, seed), seed=seed, progress=progress)


def resume(out: Path, *, progress: bool = False) -> None:
    """Go on with the unfinished run with canaries in `out`: same coins, same canaries, same
    bits.
    """
    if job.is_finished(out):
        job.finished(out)
        return
    if not (out / FILE).is_file():
        job.require_run(out)
        rule = (
            "was stopped before its canaries were stored, and nothing was released: start it again "
            "in another folder"
        )
        raise InvalidInput("run", str(out), rule)
    config = read(job.require_config(out), {})
    _train(config, out, _held(out)["included"].astype(bool), resume=True, progress=progress)


def _train(
    config: AuditJob,
    out: Path,
    included: NDArray[np.bool_],
    *,
    resume: bool = False,
    seed: int | None = None,
    progress: bool = False,
) -> None:
    if config.model.name in LANGUAGE:
        way_out = "plant dpfy.synthetic.text.copies.Canaries among the texts"
        raise Unsupported("an audit of a language model by records of noise", way_out)
    config = job.with_delta(config)
    together = dataclasses.replace(config.privacy, records=job.records_of(config) + len(included))
    plan = job.plan_of(dataclasses.replace(config, privacy=together))
    _auditable(plan)
    attack = config.audit.attack
    texts = (config.to_toml(publish=True), config.to_toml(publish=False))
    every = config.runtime.checkpoint_every
    budget = job.budget_of(config.ledger, plan.delta)
    run = Run(
        out,
        resume=resume,
        ledger=config.ledger.path,
        budget=budget,
        seed=seed,
        checkpoint_every=every,
        config=texts,
    )
    with TrainingRun(run, plan) as folder:
        data = job.load(config, plan.recipe.records - len(included))
        assert data.classes is not None
        extract = features.features(config.model) or (lambda records: records)
        model = build.build(config.model, data.features, data.classes)
        folder.tell(TRAINING, model=job.reads(data))
        if config.data.schema is not None:
            folder.write("schema.toml", job.schema_of(config))
        x, y = data.train.tensors
        runtime = config.runtime.runtime(progress)
        if not (out / FILE).is_file():
            crafts = (
                crafted(len(included), tuple(x.shape[1:]), data.classes, seed)
                if attack == "final-model"
                else None
            )
            _store(out, attack=attack, included=included, **_arrays(crafts))
        if attack == "white-box":
            observe_table(
                model,
                (extract(x), y),
                plan,
                np.where(included, LENGTH, 0.0),
                run=folder,
                optimizer=lambda wrapped: job.optimizer_of(config.training, wrapped),
                runtime=runtime,
                keep=lambda seen: _store(
                    out, attack=attack, included=included, projections=seen.astype(np.float32)
                ),
            )
            return
        held, public = _held(out), config.data.test_use == "public"
        canaries, labels = (torch.from_numpy(held[k]) for k in ("features", "labels"))
        targets = torch.where(torch.from_numpy(included), labels, NOBODY)
        fit(
            model,
            (torch.cat([extract(x), extract(canaries)]), torch.cat([y, targets])),
            plan=plan,
            optimizer=job.optimizer_of(config.training, model),
            run=folder,
            evaluation=PublicTest((extract(data.test.tensors[0]), data.test.tensors[1]))
            if public
            else None,
            runtime=runtime,
            update=Update(config.training.average),
        )


def _arrays(crafts: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    return {} if crafts is None else {"features": crafts[0].numpy(), "labels": crafts[1].numpy()}


def crafted(
    count: int, shape: tuple[int, ...], classes: int, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Synthetic canaries: images with a few bright pixels (other records: Gaussian vectors), each
    with a uniform label.
    """
    randomness = Randomness.from_os() if seed is None else Randomness.for_tests(seed)
    rng = randomness.generator("audit canaries", 0)
    values = (
        rng.random((count, *shape)) < LIT
        if len(shape) == 3
        else rng.standard_normal((count, *shape))
    )
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(
        rng.integers(classes, size=count)
    )


def evidence(folder: Path) -> Evidence:
    """What the run in `folder` leaves for an audit; for final-model canaries, its released model is
    asked.
    """
    held = _held(folder)
    attack, included = str(held["attack"]), held["included"].astype(bool)
    if attack == "white-box" and "projections" not in held:
        raise InvalidInput(
            "run", str(folder), "is unfinished; resume it with dpfy audit train --resume"
        )
    plan = load_plan(folder)
    try:
        if attack == "white-box":
            seen = held["projections"].astype(np.float64)
            found = Evidence(plan, attack, included, projections=seen)
        else:
            seen = _margins(folder, *(torch.from_numpy(held[k]) for k in ("features", "labels")))
            found = Evidence(plan, attack, included, margins=seen)
    except (DpfyError, MemoryError):
        raise
    except (
        Exception
    ) as problem:  # damaged arrays and weights raise a dozen types from three libraries
        raise Corrupt(
            FILE,
            f"canaries, model and configuration do not fit each other ({type(problem).__name__})",
        ) from None
    rows = (plan.recipe.steps,) if attack == "white-box" else ()
    if (
        seen.shape != (*rows, *included.shape)
        or not np.isfinite(seen).all()
        or len(set(included.tolist())) != 2
    ):
        raise Corrupt(
            FILE, "holds no canaries of this run, or none that were in, or none that were out"
        )
    return found


def _held(folder: Path) -> dict[str, Any]:
    """The arrays of the file of canaries."""
    if not (folder / FILE).is_file():
        raise InvalidInput(
            "run", str(folder), f"holds no {FILE}: train with canaries first (dpfy audit train)"
        )
    try:
        with np.load(folder / FILE, allow_pickle=False) as stored:
            held = dict(stored)
        check.one_of("attack", str(held["attack"]), ATTACKS)
        needed = (
            {"included"}
            if str(held["attack"]) == "white-box"
            else {"included", "features", "labels"}
        )
        if not needed <= set(held):
            raise ValueError
    except MemoryError:
        raise
    except Exception:  # a damaged archive raises a dozen types from three libraries
        raise Corrupt(FILE, "is not a file of canaries") from None
    return held


def _margins(folder: Path, canaries: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """By how much the released model's logit of each canary's label is above the log-sum-exp of the
    others.
    """
    if not (folder / "model.safetensors").is_file():
        raise InvalidInput("run", str(folder), "has no released model: the run is unfinished")
    weights = load_file(folder / "model.safetensors")
    config = make(
        {k: v for k, v in storage.toml("config", folder / "config.toml").items() if k in SECTIONS},
        {},
    )
    classes = len(next(reversed([w for w in weights.values() if w.dim() == 1])))
    model = build.build(config.model, tuple(canaries.shape[1:]), classes)
    model.load_state_dict(weights)
    model.eval()
    extract = features.features(config.model) or (lambda records: records)
    with torch.no_grad():
        logits = model(extract(canaries)).double()
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    margins: NDArray[np.float64] = (own - others).numpy()
    return margins


ADDED = (Poisson, RandomAllocation)
"""Patterns whose accounting is about adding a record."""


def _auditable(plan: Plan) -> None:
    pattern = plan.recipe.sampler.participation
    if not isinstance(pattern, ADDED) and isinstance(plan.recipe.strategy, Identity):
        raise Unsupported(
            f"auditing a training run with {pattern.words}",
            "canaries are added or left out: audit Poisson batches or random allocation, "
            "add-or-remove-one",
        )
    if not isinstance(pattern, ADDED) or not isinstance(plan.recipe.strategy, Identity):
        raise Unsupported(
            f"auditing {type(plan.recipe.strategy).__name__} noise in a training run",
            "audit DP-SGD here, and correlated noise with dpfy audit mechanism --bands",
        )
    if not isinstance(plan.recipe.clip, FlatClip):
        raise Unsupported(
            f"auditing a training run with {type(plan.recipe.clip).__name__}",
            "audit flat clipping (training.clip)",
        )
    if plan.recipe.unit != EXAMPLE:
        raise Unsupported(
            "auditing a training run on users of several records",
            "audit records: leave data.user out",
        )


def _store(folder: Path, **arrays: Any) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomically(folder / FILE, buffer.getvalue())


def audited_run(folder: Path, confidence: float = 0.95) -> tuple[dict[str, Any], Any, Any]:
    """The audit of a finished run by its canaries: what is told, the attacker's scores, and the
    claimed trade-off. It leaves audit.json and audit.svg in the folder.
    """
    seen = evidence(folder)
    verdict, others, scores, family = _judged(seen, confidence)
    answer = finished.record(verdict, others, scores, family) | {
        "run": str(folder),
        "attack": seen.attack,
    }
    finished.write(folder, {k: v for k, v in answer.items() if k != "run"}, scores, family)
    return answer, scores, family


def _judged(seen: Evidence, confidence: float) -> Any:
    plan, rate = seen.plan, seen.plan.recipe.expected_batch / seen.plan.recipe.records
    family = ClaimedFamily(claimed_curve(plan))
    claim = AuditedClaim(plan.epsilon, plan.delta, plan.noise_multiplier, rate, family)
    if seen.projections is not None:
        return *finished.by_updates(
            ObservedSums(seen.projections, seen.included), claim, confidence
        ), family
    return *finished.by_answers(seen.margins, seen.included, claim, confidence), family
