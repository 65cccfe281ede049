"""Makes the samples of this folder. Run it with the version of dpfy whose files are to be kept,
never with a later one: see README.md.

PYTHONPATH=CHECKOUT python make.py OUT
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

import dpfy
from dpfy.core.events import Gaussian, Repeated
from dpfy.gradients.clip import (
    AutomaticClip,
    Clip,
    FlatClip,
    GroupClip,
    PerLayerClip,
    PsacClip,
    QuantileClip,
)
from dpfy.noise.toeplitz import Banded
from dpfy.plan import ForeignBatches
from dpfy.plan.recipe import Plan, Recipe
from dpfy.sampling import samplers as scheduled

DELTA, NOISE = 1e-4, 2.0
PAGES = ("plain", "audited")
"""The runs that keep report.html; verify says of the others that it is not there."""


def dpfy_does(*words: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "dpfy", *map(str, words)], check=True, stdout=subprocess.DEVNULL
    )


def train(name: str, *flags: object) -> None:
    common = ("--data", "digits", "--model", "linear", "--delta", DELTA, "--batch-size", 64)
    dpfy_does(
        "train", *common, *(() if "--steps" in flags else ("--steps", 6)), *flags, "--out", name
    )


def by_command() -> None:
    train("plain", "--epsilon", 2)
    train(
        "budget",
        "--epsilon",
        1,
        "--ledger",
        "people.jsonl",
        "--budget",
        4,
        "--budget-delta",
        1e-3,
    )
    train(
        "budget-second",
        "--epsilon",
        0.5,
        "--ledger",
        "people.jsonl",
        "--budget",
        4,
        "--budget-delta",
        1e-3,
    )
    train("banded", "--mechanism", "band-mf", "--bands", 3, "--epsilon", 2, "--steps", 12)
    train("tree", "--mechanism", "tree", "--optimizer", "ftrl", "--epsilon", 4)
    train("blt", "--mechanism", "blt", "--epsilon", 4)
    train("dense", "--mechanism", "dense", "--epsilon", 4)
    train("square-root", "--mechanism", "sqrt", "--epsilon", 4)
    train("phases", "--noise-phases", "2,1.5,1", "--epsilon", 2)
    train("billed-evaluation", "--test", "billed", "--epsilon", 2)
    train("replace-one", "--adjacency", "replace-one", "--epsilon", 3)
    train("rdp", "--accountant", "rdp", "--epsilon", 3)
    train("fixed-seed", "--epsilon", 2, "--insecure-seed", 7)
    train("no-privacy", "--noise-multiplier", 0)
    train("signed", "--epsilon", 2)
    dpfy_does("sign", "--new-key", "key.pem")
    dpfy_does("sign", "signed", "--key", "key.pem")
    dpfy_does("sign", "--head", "people.jsonl", "--key", "key.pem", "--out", "people.head")
    Path("key.pem").unlink()  # nobody needs it again
    Path("key.pem.pub").rename("signed.pub")
    audit = (
        "--data",
        "digits",
        "--model",
        "linear",
        "--steps",
        6,
        "--batch-size",
        64,
        "--epsilon",
        2,
        "--canaries",
        40,
    )
    dpfy_does("audit", "train", *audit, "--out", "audited")
    interrupted()


def interrupted() -> None:
    """A run that was stopped by Ctrl-C after its first checkpoint."""
    words = (
        "--data",
        "digits",
        "--model",
        "linear",
        "--delta",
        DELTA,
        "--batch-size",
        64,
        "--steps",
        40,
        "--epsilon",
        2,
    )
    command = [
        sys.executable,
        "-m",
        "dpfy",
        "train",
        *map(str, words),
        "--insecure-seed",
        "7",
        "--checkpoint-every",
        "0",
    ]
    subprocess.run([*command, "--out", "whole"], check=True, stdout=subprocess.DEVNULL)
    child = subprocess.Popen([*command, "--out", "interrupted"])
    while not list(Path("interrupted").rglob("state.safetensors")):
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    assert child.wait() == 130
    shutil.copy("whole/model.safetensors", "interrupted.model.safetensors")
    shutil.rmtree("whole")


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10)


def plan(clip: Clip | None = None) -> Plan:
    recipe = dpfy.dpsgd(len(digits()[0]), 64, steps=6)
    return (recipe if clip is None else replace(recipe, clip=clip)).with_noise(NOISE, delta=DELTA)


def fitted(name: str, chosen: Plan) -> None:
    net = model()
    dpfy.fit(
        net, digits(), plan=chosen, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), run=name
    )


def looped(run: dpfy.Run, chosen: Plan, data: object, before: object = None) -> None:
    net = model()
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data, chosen, run
    ) as training:
        if before is not None:
            before(training)  # type: ignore[operator]
        for x, y, *real in training.batches():
            losses = torch.nn.functional.cross_entropy(
                net(x.reshape(-1, 64)), y.flatten(), reduction="none"
            )
            training.step(dpfy.per_user(losses, real[0]) if real else losses)


def by_python() -> None:
    fitted("fitted", plan())
    clips: dict[str, Clip] = {
        "per-layer": PerLayerClip(1.0),
        "automatic": AutomaticClip(1.0),
        "psac": PsacClip(1.0),
    }
    clips |= {"quantile": QuantileClip(1.0), "groups": GroupClip(("weight", "bias"), (0.8, 0.6))}
    for name, clip in clips.items():
        fitted(f"clip-{name}", plan(clip))
    many = len(digits()[0])
    samplers = {
        "fixed-order": scheduled.FixedOrderSampler(3, 2), "reshuffled": scheduled.ReshuffledSampler(3, 2),
        "bins": scheduled.BallsInBinsSampler(3, 2), "separated": scheduled.SeparatedSampler(0.05, 3, 2),
    }  # fmt: skip
    for name, sampler in samplers.items():
        strategy = Banded((1.0,)) if name == "reshuffled" else Banded((1.0, 0.5))
        how = "monte-carlo" if name == "bins" else "tight"
        fitted(
            name,
            Recipe(many, sampler, 6, FlatClip(1.0), strategy).with_noise(
                4.0, delta=DELTA, accountant=how
            ),
        )
    looped(
        dpfy.Run("foreign", batches=ForeignBatches("a loader that shuffles every epoch", 2)),
        plan(),
        digits(),
    )
    users = dpfy.by_user(digits(), np.arange(many) // 6, 6)
    recipe = dpfy.dpsgd(len(users), 20, steps=6, unit=users.unit)
    looped(dpfy.Run("users"), recipe.with_noise(NOISE, delta=1e-3), users)

    def tried(training: dpfy.PrivateTraining) -> None:
        training.folder.ledger.reserve("tuning: 3 candidates", Repeated(Gaussian(9.0), 6), 3)

    looped(dpfy.Run("tuned"), plan(), digits(), tried)


def main(out: Path) -> None:
    out.mkdir()
    os.chdir(out)
    by_command()
    by_python()
    shutil.copy("plain/privacy.json", "card.json")
    shutil.copy("budget/ledger.jsonl", "ledger.jsonl")
    for page in Path().glob("*/report.*"):
        if page.parent.name not in PAGES:
            page.unlink()
        elif page.suffix == ".html":
            page.rename(f"{page}.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
