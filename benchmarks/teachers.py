"""Seconds to train 250 LeNet-5 on disjoint parts of MNIST side by side, beside one LeNet-5 on all
of it, for the same number of passes.

    python benchmarks/teachers.py --data-dir DATA                  # CPU seconds, of one thread
    python benchmarks/teachers.py --data-dir DATA --device cuda    # seconds by the clock python
    benchmarks/teachers.py                                  # made-up images of the same size: the
    time is the same

The one is trained as one usually does, by torch: SGD on minibatches drawn without replacement,
records on the device. It is measured with minibatches of every size in --one-batch, and the fastest
counts. The teachers' time is all of `teach_networks`: dealing out the records, training, weights
back in memory. Both are run once on a little beforehand. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor, nn

from dpfy.core.randomness import Randomness
from dpfy.data import source
from dpfy.data.config import DataConfig
from dpfy.models.build import build
from dpfy.models.config import ModelConfig
from dpfy.prediction.networks import NetworkTraining, NetworkVoters, teach_networks

LENET, SHAPE, CLASSES, RECORDS = ModelConfig("lenet5"), (1, 28, 28), 10, 60_000


def images(data_dir: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images with their classes: MNIST, or noise."""
    if data_dir is None:
        torch.manual_seed(0)
        return (
            torch.rand(RECORDS, *SHAPE),
            torch.randint(0, 10, (RECORDS,)),
            torch.rand(1000, *SHAPE),
            torch.randint(0, 10, (1000,)),
        )
    held = source.load(DataConfig(kind="mnist", dir=data_dir))
    return (*held.train.tensors, *held.test.tensors)  # type: ignore[return-value]


def one(x: Tensor, y: Tensor, passes: int, batch: int, rate: float, device: str) -> nn.Module:
    """One network on all records."""
    model = build(LENET, SHAPE, CLASSES).to(device)
    x, y = x.to(device), y.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(passes):
        for rows in torch.randperm(len(x), device=device).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model


def many(x: Tensor, y: Tensor, passes: int, given: argparse.Namespace) -> NetworkVoters:
    """As many networks as there are teachers, each on its own part."""
    steps = max(1, round(passes * len(x) / given.teachers / given.batch))
    training = NetworkTraining(LENET, steps, given.batch, given.rate, given.device)
    secret = Randomness.for_tests(0)
    return teach_networks(
        x.numpy(),
        y.numpy(),
        voters=given.teachers,
        classes=CLASSES,
        training=training,
        randomness=secret,
    )


def seconds(device: str) -> float:
    """By the clock on a GPU; on a CPU, which others use too, of this process."""
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Both, in one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir")
    parser.add_argument("--teachers", type=int, default=250)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--batch", type=int, default=20, help="Of a teacher.")
    parser.add_argument("--one-batch", type=int, nargs="+", default=[64, 250])
    parser.add_argument("--rate", type=float, default=0.1)
    given = parser.parse_args()
    x, y, test, truth = images(given.data_dir)
    many(x[: 40 * given.teachers], y[: 40 * given.teachers], 1, given)
    began = seconds(given.device)
    voters = many(x, y, given.passes, given)
    taken = seconds(given.device) - began
    alone = {}
    for batch in given.one_batch:
        one(x[:5000], y[:5000], 1, batch, given.rate, given.device)
        began = seconds(given.device)
        model = one(x, y, given.passes, batch, given.rate, given.device)
        alone[batch] = seconds(given.device) - began
    told = {
        "teachers": given.teachers,
        "passes": given.passes,
        "seconds_of_teachers": round(taken, 3),
        "seconds_of_one": {batch: round(found, 3) for batch, found in alone.items()},
        "times_the_one": round(taken / min(alone.values()), 3),
        "device": torch.cuda.get_device_name()
        if given.device.startswith("cuda")
        else f"cpu, {torch.get_num_threads()} threads",
    }
    if given.data_dir is not None:
        votes = torch.from_numpy(voters.votes(test[:500].flatten(1).numpy()))
        told["right_by_vote"] = round(float((votes.argmax(1) == truth[:500]).double().mean()), 4)
        told["right_of_a_teacher"] = round(
            float(votes[torch.arange(500), truth[:500]].double().mean() / given.teachers), 4
        )
        with torch.no_grad():
            told["right_of_the_one"] = round(
                float((model.cpu()(test).argmax(1) == truth).double().mean()), 4
            )
    print(json.dumps(told))


if __name__ == "__main__":
    main()
