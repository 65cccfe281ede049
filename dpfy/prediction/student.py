"""A student: a network that learns from public inputs, of which some have answers. Nothing private
is among its arguments.

Answers are completed first: a regression on the coordinates of the public inputs (`diffusion`)
gives every input a class, and says how sure it is. Then a network learns these classes from inputs
that are moved, turned and sheared at random. Inputs that are not sure join later, with the class
that the network itself gives them as they are, where it is confident: the consistency of FixMatch
(Sohn et al. 2020), weak view to strong view.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core import check
from dpfy.core.errors import Corrupt, InvalidInput

AT_ONCE = 500
IMAGE = 3
META = "dpfy student"
RATE, DECAY = 4e-3, 1e-3
TURN, STRETCH, SHEAR, SHIFT = 0.22, 0.12, 0.18, 0.17
"""Of an image at random, at most: radians, logarithms, and parts of half its side."""


@dataclass(frozen=True, repr=False)
class Lesson:
    """All that a student is given: public inputs, their coordinates, and the classes answered for
    some `rows` of them.
    """

    inputs: Tensor
    coordinates: NDArray[np.float64]
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    classes: int

    def completed(self) -> Tensor:
        """Scores of every input for each class, by ridge regression of the answers on the
        coordinates.
        """
        wide = np.hstack([self.coordinates, np.ones((len(self.coordinates), 1))])
        asked, goal = wide[self.rows], np.eye(self.classes)[self.labels] - 1 / self.classes
        weights = np.linalg.solve(asked.T @ asked + np.eye(wide.shape[1]), asked.T @ goal)
        return torch.from_numpy(wide @ weights)


class StudentLearner(Protocol):
    """What makes a student of a lesson."""

    def learn(self, lesson: Lesson) -> nn.Module:
        """The student, from raw inputs to a score for each class."""


@dataclass(frozen=True)
class SemiSupervised:
    """The learner described above. All its settings are public.

    `doubtful` is the part of the inputs that are left out at first, those with the smallest margin;
    from epoch `joining` on they take part where the network is `confident`. The order of inputs,
    and how they are changed, follow from the seed.
    """

    epochs: int = 30
    joining: int = 12
    batch_size: int = 64
    doubtful: float = 0.08
    confident: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "joining", "batch_size"):
            check.integer(f"student.{name}", getattr(self, name))
        check.below_one("student.doubtful", check.fraction("student.doubtful", self.doubtful))
        check.inside_unit("student.confident", self.confident)
        check.integer("student.seed", self.seed, least=0)

    def learn(self, lesson: Lesson) -> nn.Module:
        """See the head of this file."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self._learnt(lesson).eval()

    def _learnt(self, lesson: Lesson) -> nn.Module:
        inputs, shape = lesson.inputs.float(), tuple(lesson.inputs.shape[1:])
        model, changed = (
            network(shape, lesson.classes).train(),
            moved if len(shape) == IMAGE else _same,
        )
        scores = lesson.completed()
        first, margins = scores.argmax(1), _margins(scores)
        sure = margins >= margins.quantile(self.doubtful)
        goals, used, mean = first, sure, None
        steps = self.epochs * math.ceil(len(inputs) / self.batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
        rates = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=steps, pct_start=0.15
        )
        for epoch in range(1, self.epochs + 1):
            for batch in torch.randperm(len(inputs)).split(self.batch_size):
                rows = batch[used[batch]]
                if len(rows) > 1:  # a batch of one has no spread to normalise by
                    optimizer.zero_grad()
                    found = model(changed(inputs[rows]))
                    functional.cross_entropy(found, goals[rows], label_smoothing=0.05).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                rates.step()
            if epoch >= self.joining and (epoch - self.joining) % 2 == 0 and epoch < self.epochs:
                now = chances(model, inputs)
                mean = now if mean is None else (mean + now) / 2
                best, said = mean.max(1)
                goals, used = torch.where(sure, first, said), sure | (best > self.confident)
        return model


def _margins(scores: Tensor) -> Tensor:
    """By how much the best class leads."""
    best = scores.topk(2, dim=1).values
    return best[:, 0] - best[:, 1]


def _same(inputs: Tensor) -> Tensor:
    return inputs


def moved(images: Tensor) -> Tensor:
    """Images turned, stretched, sheared and shifted at random, each by itself."""

    def drawn(most: float) -> Tensor:
        return (torch.rand(len(images)) * 2 - 1) * most

    angle, size, shape = drawn(TURN), drawn(STRETCH).exp(), drawn(STRETCH / 2).exp()
    across = torch.stack(
        [angle.cos() * size * shape, drawn(SHEAR) - angle.sin() * size, drawn(SHIFT)], 1
    )
    down = torch.stack([angle.sin() * size, angle.cos() * size / shape, drawn(SHIFT)], 1)
    places = functional.affine_grid(
        torch.stack([across, down], 1), list(images.shape), align_corners=False
    )
    return functional.grid_sample(images, places, align_corners=False)


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A small network for records of this shape: convolutions for images, else dense layers."""
    check.integer("classes", classes, least=2)
    if len(shape) != IMAGE:
        width = math.prod(shape)
        return nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, classes))
    high, wide = (-(-side // 4) for side in shape[1:])
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 5, 2, 2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 40, 5, 2, 2), nn.BatchNorm2d(40), nn.ReLU(), nn.Flatten(),
        nn.Linear(40 * high * wide, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, classes),
    )  # fmt: skip


@torch.no_grad()
def chances(model: nn.Module, inputs: Tensor) -> Tensor:
    """What a model says about inputs as they are: a chance for each class. It is left in the mode
    in which it was.
    """
    before = model.training
    model.eval()
    found = torch.cat([model(part.float()).softmax(1) for part in inputs.split(AT_ONCE)])
    model.train(before)
    return found


def to_bytes(model: nn.Module, shape: tuple[int, ...], classes: int) -> bytes:
    """Weights as safetensors, with what is needed to make the network again. Networks of another
    making are not kept.
    """
    with torch.random.fork_rng(devices=[]):
        due = str(network(shape, classes))
    if type(model) is not nn.Sequential or str(model) != due:
        raise InvalidInput(
            "student", type(model).__name__, "must be a network of dpfy.prediction.student.network"
        )
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    return save_tensors(state, {META: json.dumps({"shape": shape, "classes": classes})})


def of_bytes(content: bytes, name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """The network that `to_bytes` wrote, the shape of its inputs and the number of its classes."""
    try:
        size = int.from_bytes(content[:8], "little")
        about: dict[str, Any] = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][META])
        shape, classes = tuple(about["shape"]), about["classes"]
        with torch.random.fork_rng(devices=[]):
            model = network(shape, classes)
        model.load_state_dict(load_tensors(content))
    except (ValueError, KeyError, TypeError, RuntimeError, InvalidInput, SafetensorError):
        raise Corrupt(name, "does not hold a student") from None
    return model.eval(), shape, classes
