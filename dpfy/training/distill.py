"""Smaller models from released ones: pruned, quantised, and students of a teacher.

Pruning, quantisation and distillation on public data are post-processing: they are derived files of
the teacher's run. A student of private records is trained with a plan of its own, whose epsilon
covers these records; its report says what covers the teacher's.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.plan.claim import TrainingClaim
from dpfy.plan.recipe import Plan
from dpfy.report.verify import verify
from dpfy.runs.derive import derive
from dpfy.runs.run import Run
from dpfy.training import weights
from dpfy.training.fit import Result, fit
from dpfy.training.load import MODEL, ReleasedModel, load
from dpfy.training.run import TrainingRun, complete

SCALE = ".scale"
"""What the scale of a quantised tensor is called, behind its name."""
AT_ONCE = 256


def prune(run: Path | str, share: float, name: str = "pruned.safetensors") -> Path:
    """Set the smallest weights of a released model to zero, and add the file to its run.

    Args:
        run: A finished run that released a model.
        share: Which part of the weights of each matrix becomes zero.
        name: Of the file in the folder.

    Returns:
        The file. `derived(run, name, model)` loads it.

    Raises:
        InvalidInput: The run is not finished, or the share is none.

    Guarantees: covered by the guarantee of the run; nothing else goes into it.
    """
    check.inside_unit("share", share)
    held = ReleasedModel.read(run).weights()
    for key, tensor in held.items():
        if tensor.dim() > 1 and tensor.is_floating_point():
            count = math.floor(share * tensor.numel())
            smallest = tensor.abs().flatten().argsort(stable=True)[:count]
            held[key] = tensor.flatten().index_fill(0, smallest, 0.0).view_as(tensor)
    return _added(run, held, name, f"the smallest {share:.0%} of each matrix set to zero")


def quantise(run: Path | str, name: str = "quantised.safetensors") -> Path:
    """Round the matrices of a released model to 8 bits, and add the file to its run.

    Args:
        run: A finished run that released a model.
        name: Of the file in the folder.

    Returns:
        The file, about a quarter as large. `derived(run, name, model)` loads it.

    Raises:
        InvalidInput: The run is not finished.

    Guarantees: covered by the guarantee of the run; nothing else goes into it.
    """
    made: dict[str, Tensor] = {}
    for key, tensor in ReleasedModel.read(run).weights().items():
        if tensor.dim() > 1 and tensor.is_floating_point():
            scale = (tensor.abs().max() / 127).clamp(min=1e-30)
            made[key] = (tensor / scale).round().to(torch.int8)
            made[key + SCALE] = scale.reshape(1)
        else:
            made[key] = tensor
    return _added(run, made, name, "matrices rounded to 8 bits, each with a scale")


def derived(run: Path | str, name: str, model: nn.Module) -> nn.Module:
    """`model` with the weights of a derived file, whose hash is compared with the ledger's.

    Args:
        run: The run that it was added to.
        name: Of the file.
        model: Gets the weights.

    Returns:
        The model.

    Raises:
        InvalidInput: The ledger knows no such file.
        Corrupt: The file is not the one that was added.
    """
    folder = Path(run)
    known = Ledger.read(folder / "ledger.jsonl").book.derived
    if name not in known:
        raise InvalidInput("name", name, "must be a derived file of the run")
    content = storage.content(name, folder / name, most=storage.MOST_DATA)
    if hashlib.sha256(content).hexdigest() != known[name]["sha256"]:
        raise Corrupt(name, "does not have the hash that the ledger has: it was changed")
    try:
        held = load_tensors(content)
    except (SafetensorError, ValueError):
        raise Corrupt(name, "is no file of weights in the safetensors format") from None
    whole = {
        key: tensor.float() * held[key + SCALE] if key + SCALE in held else tensor
        for key, tensor in held.items()
        if not key.endswith(SCALE)
    }
    weights.restore(model, whole, "is not the model of this file")
    return model


@dataclass(frozen=True, repr=False)
class Teacher:
    """A model that students learn from, with what its own report says.

    Args:
        model: The network. It is used as it is in evaluation.
        run: Its finished run; None where it has no report.
        facts: What the student's report says about it.
    """

    model: nn.Module
    run: Path | None
    facts: dict[str, Any]

    @classmethod
    def of(cls, run: Path | str, model: nn.Module | None = None) -> Teacher:
        """The released model of a finished run, which must verify. A run of ``dpfy train`` knows
        its model.

        Raises:
            InvalidInput: The run is not finished, or does not verify.
        """
        wrong = [finding.what for finding in verify(Path(run)) if not finding.holds]
        if wrong:
            raise InvalidInput("teacher", str(run), f"must verify ({wrong[0]})")
        card = ReleasedModel.read(run).card
        epsilon = card["guarantee"]["epsilon"]
        told: dict[str, Any] = {"protected": False}
        if isinstance(epsilon, float | int) and math.isfinite(epsilon):
            told = {"protected": True, "report": card["digest"]}
        return cls(load(run, model).eval(), Path(run), told)

    @classmethod
    def without_report(cls, model: nn.Module) -> Teacher:
        """A network that has no privacy report: the teacher's data are not protected."""
        return cls(model.eval(), None, {"protected": False})

    @torch.no_grad()
    def says(self, inputs: Tensor, temperature: float) -> Tensor:
        """Its probabilities for each record. Every record is shown to it alone, so that no row
        depends on another.
        """
        scores = torch.cat([self.model(row) for row in inputs.split(1)])
        return (scores / temperature).softmax(1)


def distil(
    teacher: Teacher,
    student: nn.Module,
    inputs: Tensor,
    *,
    public: str,
    steps: int = 500,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    temperature: float = 2.0,
    seed: int = 0,
    name: str = "student.safetensors",
) -> Path:
    """Teach a student on public inputs what a released teacher says about them, and add it to the
    teacher's run.

    Args:
        teacher: `Teacher.of(run)`.
        student: Any network with the same inputs and classes. It is trained here, without noise.
        inputs: Public records, without labels.
        public: Which data they are, and where they are from.
        steps, batch_size, learning_rate: Of Adam.
        temperature: Divides the scores of both, so that small probabilities count.
        seed: Orders the records.
        name: Of the file in the teacher's folder.

    Returns:
        The file. `derived(run, name, model)` loads it.

    Raises:
        InvalidInput: The teacher has no report, or a setting does not fit its rule.

    Guarantees: covered by the guarantee of the teacher: the student sees public inputs and a
    released model. That the inputs and the student's first weights are public is your word.
    """
    if teacher.run is None:
        rule = "must have a report: the teacher's data are not protected, nor by any student"
        raise InvalidInput("teacher", "no report", rule)
    check.one_line("public", public)
    check.positive("temperature", temperature)
    for key, value in (("steps", steps), ("batch_size", batch_size)):
        check.integer(key, value)
    home = teacher.run
    teacher = Teacher.of(home, teacher.model)  # as it was released, whatever became of it
    goals = teacher.says(inputs, temperature)
    generator = torch.Generator().manual_seed(check.integer("seed", seed, least=0))
    optimizer = torch.optim.Adam(student.parameters(), lr=learning_rate)
    student.train()
    for _ in range(steps):
        rows = torch.randint(len(inputs), (batch_size,), generator=generator)
        optimizer.zero_grad()
        _soft(student(inputs[rows]) / temperature, goals[rows]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    student.eval()
    how = f"distilled into {type(student).__name__}: {steps} steps at temperature {temperature:g}"
    return _added(home, weights.plain(student), name, how, public)


def distil_privately(
    teacher: Teacher,
    student: nn.Module,
    inputs: Tensor,
    *,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    temperature: float = 2.0,
    run: Run | Path | str | None = None,
    **more: Any,
) -> Result:
    """Teach a student on private inputs what a teacher says about them, by a plan of its own.

    Args:
        teacher: `Teacher.of(run)`, or `Teacher.without_report(model)`.
        student: The network that is trained.
        inputs: Private records, without labels.
        plan: What is done to them, and with how much noise.
        optimizer: Of the student's parameters.
        temperature: Divides the scores of both.
        run: The student's run.
        more: Other arguments of `dpfy.fit`.

    Returns:
        The result, as of `dpfy.fit`. Its report says that its epsilon covers `inputs` alone, and
        what covers the teacher's data.

    Raises:
        InvalidInput: A setting does not fit its rule.

    Guarantees: the plan's, for the records in `inputs`. What the teacher says about a record depends
    on that record and the teacher alone. A person whose records are in both data sets is covered
    by both epsilons together: keep one ledger for them.
    """
    check.positive("temperature", temperature)
    place = Run.of(run)
    if teacher.run is not None:  # as it was released, whatever became of it
        teacher = Teacher.of(teacher.run, teacher.model)

    def loss(scores: Tensor, goals: Tensor) -> Tensor:
        return _soft(scores / temperature, goals)

    terms: dict[str, Any] = {"plan": plan, "optimizer": optimizer, "loss": loss, **more}
    if complete(place, plan):
        return fit(student, (inputs, teacher.says(inputs, temperature)), run=place, **terms)
    with TrainingRun(place, plan) as folder:
        folder.tell(TrainingClaim.kind, teacher=teacher.facts)
        return fit(student, (inputs, teacher.says(inputs, temperature)), run=folder, **terms)


def _soft(scores: Tensor, goals: Tensor) -> Tensor:
    """The cross-entropy of each row with probabilities."""
    return functional.cross_entropy(scores, goals, reduction="none")


def _added(
    run: Path | str, held: dict[str, Tensor], name: str, how: str, public: str = "none"
) -> Path:
    content = save_tensors({key: tensor.contiguous() for key, tensor in held.items()})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "made.safetensors"
        file.write_bytes(content)
        return derive(Path(run), file, of=[MODEL], how=how, public=public, name=name)
