"""Accuracy of smaller models made of a private teacher, beside models without privacy:
`python benchmarks/distillation.py`.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.training.distill import Teacher, derived, distil, distil_privately, prune, quantise

EPSILON, DELTA, TEACHERS, PUBLIC = 3.0, 1e-5, 3000, 500


def network(width: int) -> nn.Module:
    """A perceptron with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Tanh(), nn.Linear(width, 10))


def plain(width: int, x: Tensor, y: Tensor, steps: int = 600) -> nn.Module:
    """The same network without privacy."""
    torch.manual_seed(0)
    model = network(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((model(x).argmax(1) == y).double().mean())


def main() -> None:
    """Print the table."""
    source = load(DataConfig())
    (x, y), (tx, ty) = (
        [tensor[torch.randperm(len(part), generator=torch.Generator().manual_seed(0))]
         for tensor in part.tensors[:2]]
        for part in (source.train, source.test)
    )  # fmt: skip
    own = x[TEACHERS:]
    public, tx, ty = tx[:PUBLIC], tx[PUBLIC:], ty[PUBLIC:]
    rows = []
    for width in (64, 16):
        found = accuracy(plain(width, x[:TEACHERS], y[:TEACHERS]), tx, ty)
        rows.append((f"{width} hidden units, no privacy", "none", found))
    with tempfile.TemporaryDirectory() as place:
        for width in (64, 16):
            torch.manual_seed(0)
            model, path = network(width), Path(place) / f"private-{width}"
            plan = dpfy.dpsgd(TEACHERS, 500, steps=150, clip_norm=1.0).calibrate(EPSILON, DELTA)
            optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
            dpfy.fit(model, (x[:TEACHERS], y[:TEACHERS]), plan=plan, optimizer=optimizer,
                     run=dpfy.Run(path, seed=0))  # fmt: skip
            name = f"{width} hidden units, private" + (" (the teacher)" if width == 64 else "")
            rows.append((name, f"{EPSILON:g}", accuracy(model, tx, ty)))
        run = Path(place) / "private-64"
        prune(run, 0.5)
        quantise(run)
        for name in ("pruned", "quantised"):
            made = derived(run, f"{name}.safetensors", network(64))
            rows.append((f"teacher {name}", f"{EPSILON:g}", accuracy(made, tx, ty)))
        torch.manual_seed(0)
        teacher, student = Teacher.of(run, network(64)), network(16)
        distil(teacher, student, public, public="500 held-out images", steps=1500)
        assert all(finding.holds for finding in dpfy.verify(run))
        rows.append(
            (f"student of {PUBLIC} public images", f"{EPSILON:g}", accuracy(student, tx, ty))
        )
        torch.manual_seed(0)
        student, path = network(16), Path(place) / "student"
        plan = dpfy.dpsgd(len(own), 200, steps=100, clip_norm=1.0).calibrate(EPSILON, 1e-4)
        optimizer = torch.optim.SGD(student.parameters(), lr=2.0, momentum=0.9)
        distil_privately(teacher, student, own, plan=plan, optimizer=optimizer,
                         run=dpfy.Run(path, seed=0))  # fmt: skip
        assert all(finding.holds for finding in dpfy.verify(path))
        rows.append((f"student of {len(own)} private images", f"{EPSILON:g} and {EPSILON:g}",
                     accuracy(student, tx, ty)))  # fmt: skip
        shutil.rmtree(run)
    print("| model | epsilon | accuracy % |\n|---|---|---|")
    for name, epsilon, found in rows:
        print(f"| {name} | {epsilon} | {found:.1f} |")


if __name__ == "__main__":
    main()
