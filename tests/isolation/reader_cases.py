"""Collate functions and data sets, of which some mix records and some do not, and a loop that reads
them as training does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from dpfy.core.randomness import Randomness
from dpfy.data.batch import Draw, Look
from dpfy.data.reader import Reader
from dpfy.isolation.inspection import Inspected, secret_steps

N, WIDTH = 400, 5
STEP = 0.003
"""Seconds that the steps around the reading are said to take."""

generator = torch.Generator().manual_seed(3)
X = torch.randn(N, WIDTH, generator=generator)
Y = torch.randint(0, 3, (N,), generator=generator)
WORDS = 1 + torch.randint(0, 7, (N, 12), generator=generator)
LENGTHS = 1 + torch.randint(0, 12, (N,), generator=generator)


class Plain(Dataset[Any]):
    """Vectors and classes."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": X[index].clone(),
            "label": int(Y[index]),
            "words": WORDS[index, : int(LENGTHS[index])].clone(),
        }


class Clock:
    """A step of the run."""

    step = 0


def read(
    dataset: Any,
    collate: Any = None,
    *,
    steps: int = 200,
    rows: int = 24,
    secret: int = 0,
    views: int = 1,
) -> tuple[int | None, Inspected]:
    """Read the batches of a run with Poisson sampling, each step STEP seconds long: where it was
    refused, and what was checked.
    """
    from dpfy.isolation.inspection import Mixing

    randomness = Randomness.for_tests(secret)
    due = secret_steps(steps, randomness.generator("checked batches", 0))
    reader, sampled = Reader(dataset, collate, views), np.random.default_rng(secret)
    for Clock.step in range(steps):
        indices = np.flatnonzero(sampled.random(len(dataset)) < rows / len(dataset))
        if reader.inspection._began is not None:
            reader.inspection._began -= STEP
        for lines in (reader.inspection.reading, reader.inspection.collating):
            lines._began -= STEP
        if not len(indices):
            continue
        look = Look.ALWAYS if Clock.step in due else Look.IF_NEW
        try:
            reader.read(Draw(indices, 0, randomness.key("augmentation", Clock.step, 32), look))
        except Mixing:
            return Clock.step, reader.inspection.inspected
    return None, reader.inspection.inspected


# --- collate functions that mix
# -------------------------------------------------------------------------------------------------


def plainly(items: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([item["x"] for item in items]), torch.tensor(
        [item["label"] for item in items]
    )


def mixup(x: Tensor, lam: float = 0.5) -> Tensor:
    return lam * x + (1 - lam) * x[torch.randperm(len(x))]


def after(condition: Callable[[list[Any]], bool], mix: Callable[[Tensor], Tensor] = mixup) -> Any:
    """A collate function that mixes where a condition holds."""

    def collate(items: list[Any]) -> Any:
        x, y = plainly(items)
        if condition(items):
            x = mix(x)
        return x, y

    return collate


def without_a_branch(share: Callable[[], float]) -> Any:
    """A collate function whose lines are the same whether it mixes or not; `share` is 1 where it
    does not.
    """

    def collate(items: list[Any]) -> Any:
        x, y = plainly(items)
        lam = share()
        return lam * x + (1 - lam) * x[torch.randperm(len(x))], y

    return collate


class Memory:
    """Adds the mean of the batch before."""

    def __init__(self) -> None:
        self.last = torch.zeros(WIDTH)

    def __call__(self, items: list[Any]) -> Any:
        x, y = plainly(items)
        self.last, last = x.mean(0), self.last
        return x + last, y


class Buffered:
    """Gives the same memory each time; `mixes` says whether it centres what it holds."""

    def __init__(self, mixes: bool) -> None:
        self.held, self.mixes = torch.zeros(N, WIDTH), mixes

    def __call__(self, items: list[Any]) -> Any:
        x, y = plainly(items)
        self.held[: len(x)] = x - x.mean(0) if self.mixes else x
        return self.held[: len(x)], y


own = torch.Generator().manual_seed(1)


def of_python(items: list[Any]) -> Any:
    x, y = plainly(items)
    order = list(range(len(items)))
    random.shuffle(order)
    return (x + x[order]) / 2, y


def of_numpy(items: list[Any]) -> Any:
    x, y = plainly(items)
    return x, y[torch.from_numpy(np.random.permutation(len(items)))]


def cutmix(items: list[Any]) -> Any:
    x, y = plainly(items)
    x[:, 2:] = x.flip(0)[:, 2:]
    return x, y


def in_pairs(items: list[Any]) -> Any:
    x, y = plainly(items)
    even = len(x) // 2 * 2
    x[:even] = x[:even].unflatten(0, (-1, 2)).mean(1, keepdim=True).expand(-1, 2, -1).flatten(0, 1)
    return x, y


def causal(items: list[Any]) -> Any:
    x, y = plainly(items)
    return x.cumsum(0), y


def like_the_one_before(items: list[Any]) -> Any:
    return plainly(items)[0], torch.tensor(
        [items[max(0, k - 1)]["label"] for k in range(len(items))]
    )


def imputed(items: list[Any]) -> Any:
    x, y = plainly(items)
    return torch.where(x.abs() < 0.3, x.mean(0), x), y


def by_classes(items: list[Any]) -> Any:
    x, y = plainly(items)
    weight = 1 / torch.bincount(y, minlength=3)[y]
    return x, y, weight


def large_ones(items: list[Any]) -> Any:
    x, y = plainly(items)
    lam = 1 - 0.5 * (len(items) >= 32)
    return lam * x + (1 - lam) * x.flip(0), y


def padded_and_masked(items: list[Any]) -> Any:
    words = pad_sequence([item["words"] for item in items], batch_first=True)
    hidden = torch.rand(words.shape) < 0.3
    if torch.rand(()) < 0.3:
        words = words.roll(1, 0)
    return {"words": words.masked_fill(hidden, 0)}


MIXING: dict[str, Callable[[], Any]] = {
    "centring": lambda: after(lambda items: True, lambda x: x - x.mean(0)),
    "mixup": lambda: after(lambda items: True),
    "of Python's generator": lambda: of_python,
    "of NumPy's generator": lambda: of_numpy,
    "cutmix": lambda: cutmix,
    "in pairs": lambda: in_pairs,
    "causal": lambda: causal,
    "label of the one before": lambda: like_the_one_before,
    "imputed": lambda: imputed,
    "weights by classes": lambda: by_classes,
    "sorted": lambda: lambda items: plainly(sorted(items, key=lambda item: float(item["x"][0]))),
    "divided by the number": lambda: (
        lambda items: (plainly(items)[0] / len(items), plainly(items)[1])
    ),
    "own generator": lambda: after(lambda items: bool(torch.rand((), generator=own) < 0.5)),
    "memory": Memory,
    "one buffer": lambda: Buffered(mixes=True),
    "padded, at random": lambda: padded_and_masked,
    "whole words, rolled": lambda: lambda items: whole_words(items).roll(1, 0),
    "random and causal": lambda: (
        lambda items: (plainly(items)[0] + torch.randn(len(items), WIDTH)).cumsum(0)
    ),
    "from 16 rows": lambda: after(lambda items: len(items) >= 16),
    "from 24 rows": lambda: after(lambda items: len(items) >= 24),
    "from 32 rows": lambda: after(lambda items: len(items) >= 32, lambda x: x - x.mean(0)),
    "from 32 rows without a branch": lambda: large_ones,
    "up to 18 rows": lambda: after(lambda items: len(items) <= 18),
    "p 0.1": lambda: after(lambda items: bool(torch.rand(()) < 0.1)),
    "p 0.2": lambda: after(lambda items: bool(torch.rand(()) < 0.2)),
    "p 0.25 of Python": lambda: after(lambda items: random.random() < 0.25),
    "p 0.25 without a branch": lambda: without_a_branch(
        lambda: 1 - 0.5 * float(np.random.rand() < 0.25)
    ),
    "p 0.25 from 24 rows": lambda: after(lambda items: len(items) >= 24 and random.random() < 0.25),
}


def late(start: int) -> dict[str, Callable[[], Any]]:
    """Collate functions that mix from a step on."""
    return {
        "a line": lambda: after(lambda items: Clock.step >= start),
        "a line, p 0.25": lambda: after(
            lambda items: Clock.step >= start and random.random() < 0.25
        ),
        "no branch, p 0.25": lambda: without_a_branch(
            lambda: 1 - 0.5 * (Clock.step >= start) * (random.random() < 0.25)
        ),
        "no branch": lambda: without_a_branch(lambda: 1 - 0.5 * (Clock.step >= start)),
    }


# --- collate functions that do not
# ----------------------------------------------------------------------------------------------


def padded(items: list[Any]) -> Any:
    words = pad_sequence([item["words"] for item in items], batch_first=True, padding_value=-100)
    return {
        "words": words,
        "lengths": torch.tensor([len(item["words"]) for item in items]),
        "mask": words != -100,
    }


def popped(items: list[Any]) -> Any:
    labels = torch.tensor([item.pop("label") for item in items])
    return {"labels": labels, **default_collate([{"x": item.pop("x")} for item in items])}


def in_place(items: list[Any]) -> Any:
    for item in items:
        item["x"] *= 2
    return plainly(items)


def masked_words(items: list[Any]) -> Any:
    words = pad_sequence([item["words"] for item in items], batch_first=True)
    hidden = torch.bernoulli(torch.full(words.shape, 0.15)).bool()
    labels = words.masked_fill(~hidden, -100)
    changed = torch.bernoulli(torch.full(words.shape, 0.5)).bool() & hidden
    words[changed] = torch.randint(8, words.shape)[changed]
    return {"input_ids": words, "labels": labels}


def whole_words(items: list[Any]) -> Any:
    chosen = []
    for item in items:
        places = list(range(len(item["words"])))
        random.shuffle(places)
        chosen.append(
            item["words"].index_fill(
                0, torch.tensor(places[: len(places) // 2], dtype=torch.long), 0
            )
        )
    return pad_sequence(chosen, batch_first=True)


def cropped(items: list[Any]) -> Any:
    starts = [np.random.randint(3) for _ in items]
    return torch.stack(
        [item["x"][s : s + 3] for item, s in zip(items, starts, strict=True)]
    ), plainly(items)[1]


class Counting:
    """Counts its calls."""

    calls = 0

    def __call__(self, items: list[Any]) -> Any:
        self.calls += 1
        return plainly(items)


def to_eight(items: list[Any]) -> Any:
    longest = -(-max(len(item["words"]) for item in items) // 8) * 8
    return torch.stack(
        [
            torch.nn.functional.pad(item["words"], (0, longest - len(item["words"])))
            for item in items
        ]
    )


def sometimes(items: list[Any]) -> Any:
    x, y = plainly(items)
    if torch.rand(()) < 0.05:
        x = x.flip(1)
    return x, y


def flipped(items: list[Any]) -> Any:
    return torch.stack(
        [item["x"].flip(0) if torch.rand(()) < 0.5 else item["x"] for item in items]
    ), plainly(items)[1]


ORDINARY: dict[str, Any] = {
    "plain": plainly,
    "padded": padded,
    "popped": popped,
    "in place": in_place,
    "masked words": masked_words,
    "whole words": whole_words,
    "cropped": cropped,
    "counting": Counting(),
    "to eight": to_eight,
    "sometimes": sometimes,
    "flipped": flipped,
    "noise": lambda items: (plainly(items)[0] + torch.randn(len(items), WIDTH), plainly(items)[1]),
    "noise of its length": lambda items: pad_sequence(
        [item["words"] + torch.randn(len(item["words"])) for item in items], batch_first=True
    ),
    "one buffer": Buffered(mixes=False),
    "NaN": lambda items: (plainly(items)[0].log(), plainly(items)[1]),
    "nested": lambda items: {"a": [plainly(items)[0], {"b": (plainly(items)[1],)}], "none": None},
    "hot": lambda items: torch.nn.functional.one_hot(plainly(items)[1], 3).float(),
    "arrays": lambda items: np.stack([item["x"].numpy() for item in items]),
    "first and last": lambda items: torch.stack(
        [torch.stack([item["words"][0], item["words"][-1]]) for item in items]
    ),
}


# --- data sets
# ------------------------------------------------------------------------------------------------------------------


class Held(Dataset[Any]):
    """Vectors and classes, held; `item` makes an item of the data set and a number."""

    def __init__(self, item: Callable[[Any, int], Any], **more: Any) -> None:
        self.x, self.y, self.item = X.clone(), Y.tolist(), item
        self.__dict__.update(more)

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.item(self, index)


class Around(Dataset[Any]):
    """A wrapper around another data set."""

    def __init__(self, base: Any, item: Callable[[Any, int], Any]) -> None:
        self.base, self.item = base, item

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        return self.item(self.base, index)


class Computed(Dataset[Any]):
    """Holds nothing: it stands for files with computed names."""

    def __init__(self, item: Callable[[Any, int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return self.item(self, index)

    def load(self, index: int) -> Tensor:
        return X[index].clone()


def pair(held: Any, index: int) -> Any:
    return held.x[index], held.y[index]


def with_another(held: Any, index: int) -> Any:
    other = int(torch.randint(N, ()))
    return (held.x[index] + held.x[other]) / 2, held.y[index]


def sometimes_with_another(p: float) -> Any:
    def item(held: Any, index: int) -> Any:
        x = held.x[index]
        if torch.rand(()) < p:
            x = (x + held.x[random.randrange(N)]) / 2
        return x, held.y[index]

    return item


def by_neighbours(held: Any, index: int) -> Any:
    near = held.x[max(0, index - 3) : index + 4]
    return (held.x[index] - near.mean(0)) / near.std(0), held.y[index]


def by_user(held: Any, index: int) -> Any:
    return held.x[index] - held.x[torch.tensor(held.user) == held.user[index]].mean(0), held.y[
        index
    ]


def late_item(start: int) -> Any:
    def item(held: Any, index: int) -> Any:
        x = held.x[index]
        if Clock.step >= start:
            x = x + held.x[index - 1]
        return x, held.y[index]

    return item


def last_read(held: Any, index: int) -> Any:
    x, last = held.x[index], held.state[0]
    held.state[0] = x
    return x + last, held.y[index]


def frame() -> Any:
    import pandas

    return pandas.DataFrame(
        {"a": X[:, 0].numpy(), "b": X[:, 1].numpy(), "y": Y.numpy()}, index=range(7, N + 7)
    )


class Store:
    """An object that is no data set and holds records."""

    def __init__(self) -> None:
        self.rows = [row.clone() for row in X]

    def get(self, index: int) -> Tensor:
        return self.rows[index]


class Sized:
    """Records behind an interface that is not Python's, like a file that is mapped."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        return X[index].clone()

    __slots__ = ()


def by_frame(held: Any, index: int) -> Any:
    row = held.frame.iloc[index]
    return torch.tensor([row["a"], row["b"]]), int(row["y"])


MIXED_ITEMS: dict[str, Callable[[Path], Any]] = {
    "mixup": lambda _: Held(with_another),
    "neighbours": lambda _: Held(by_neighbours),
    "a user's mean": lambda _: Held(by_user, user=[k % 40 for k in range(N)]),
    "p 0.25": lambda _: Held(sometimes_with_another(0.25)),
    "p 0.1": lambda _: Held(sometimes_with_another(0.1)),
    "in a tuple": lambda _: Held(
        lambda h, i: h.both[0][i] + h.both[0][i - 1], both=(X.clone(), Y.clone())
    ),
    "in a dict": lambda _: Held(
        lambda h, i: h.both["x"][i] + h.both["x"].mean(0), both={"x": X.numpy().copy()}
    ),
    "by number": lambda _: Held(
        lambda h, i: h.held[i] + h.held[(i + 1) % N], held={k: X[k].clone() for k in range(N)}
    ),
    "a frame": lambda _: Held(
        lambda h, i: float(by_frame(h, i)[0][0] - h.frame["a"].mean()), frame=frame()
    ),
    "an object": lambda _: Held(lambda h, i: h.store.get(i) - h.store.get(i - 1), store=Store()),
    "a sized object": lambda _: Held(lambda h, i: h.sized[i] - h.sized[i - 1], sized=Sized()),
    "of itself": lambda _: Computed(lambda c, i: c.load(i) if i == 0 else c.load(i) + c[0]),
    "the next one": lambda _: Computed(lambda c, i: c.load(i) if i % 2 else c[i + 1]),
    "around": lambda _: Around(
        Held(pair), lambda b, i: (b[i][0] + b[int(torch.randint(N, ()))][0]) / 2
    ),
    "around files": lambda _: Around(
        Computed(lambda c, i: c.load(i)), lambda b, i: (b[i] + b[i - 1]) / 2
    ),
    "a part": lambda _: Subset(Held(with_another), range(0, N, 2)),
    "two": lambda _: ConcatDataset([Held(with_another), Held(with_another)]),
    "the one before": lambda _: Held(last_read, state=[torch.zeros(WIDTH)]),
    "late": lambda _: Held(late_item(120)),
    "files": lambda folder: Held(
        lambda h, i: torch.load(h.paths[i]) + torch.load(h.paths[i - 1]), paths=stored(folder)
    ),
    "a permutation and another": lambda _: Held(
        lambda h, i: h.x[h.order[i]] + h.x[i], order=ORDER.tolist()
    ),
}

ORDER = torch.randperm(N, generator=generator)


def stored(folder: Path) -> list[str]:
    """A file for each record."""
    for index, row in enumerate(X):
        torch.save(row.clone(), folder / f"{index}.pt")
    return [str(folder / f"{index}.pt") for index in range(N)]


def cached(held: Any, index: int) -> Any:
    if index not in held.cache:
        held.cache[index] = held.x[index] * 2
    return held.cache[index]


def lazily(held: Any, index: int) -> Any:
    if held.opened is None:
        held.opened = X.numpy()
    return held.opened[index], held.y[index]


def ragged(held: Any, index: int) -> Any:
    start = held.ends[index - 1] if index else 0
    return held.flat[start : held.ends[index]].sum()


class Vocabulary:
    """A public table with items of its own."""

    def __init__(self, size: int) -> None:
        self.words = [f"word {k}" for k in range(size)]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> str:
        return self.words[index]


class Closing(Held):
    """Closes what it holds when it goes."""

    closed = False

    def __del__(self) -> None:
        type(self).closed = True


ALONE: dict[str, Callable[[Path], Any]] = {
    "held": lambda _: Held(pair),
    "augmented": lambda _: Held(
        lambda h, i: (h.x[i] + torch.randn(WIDTH) * random.random() * np.random.rand(), h.y[i])
    ),
    "computed": lambda _: Computed(lambda c, i: c.load(i)),
    "a permutation": lambda _: Held(
        lambda h, i: (h.x[h.order[i]], h.y[h.order[i]]), order=ORDER.tolist()
    ),
    "two permutations": lambda _: Held(
        lambda h, i: h.x[h.order[h.again[i]]],
        order=ORDER.tolist(),
        again=ORDER.numpy()[::-1].copy(),
    ),
    "reversed": lambda _: Held(lambda h, i: (h.x[N - 1 - i], h.y[-1 - i])),
    "a part": lambda _: Subset(Held(pair), ORDER.tolist()),
    "a part of a part": lambda _: Subset(Subset(Held(pair), ORDER.tolist()), range(300)),
    "two": lambda _: ConcatDataset([Held(pair), Held(lambda h, i: (h.x[i] * 2, h.y[i]))]),
    "around": lambda _: Around(Held(pair), lambda b, i: (b[i][0] * 2, b[i][1])),
    "around, twice": lambda _: Around(Held(pair), lambda b, i: (b[i][0] * 2, b[i][1])),
    "around, permuted": lambda _: Around(Held(pair), lambda b, i: b[int(ORDER[i])]),
    "a frame": lambda _: Held(by_frame, frame=frame()),
    "an object": lambda _: Held(lambda h, i: h.store.get(i), store=Store()),
    "a sized object": lambda _: Held(lambda h, i: h.sized[i], sized=Sized()),
    "files": lambda folder: Held(lambda h, i: torch.load(h.paths[i]), paths=stored(folder)),
    "a cache": lambda _: Held(cached, cache={}),
    "a cache in a list": lambda _: Held(
        lambda h, i: h.x[i] if h.done[i] is None else h.done[i], done=[None] * N
    ),
    "opened when it is read": lambda _: Held(lazily, opened=None),
    "ragged": lambda _: Held(
        ragged, flat=torch.randn(int(LENGTHS.sum())), ends=LENGTHS.cumsum(0).tolist()
    ),
    "a vocabulary": lambda _: Held(
        lambda h, i: (h.x[i], len(h.words[h.y[i]] + h.words[3])), words=Vocabulary(50)
    ),
    "statistics": lambda _: Held(
        lambda h, i: (h.x[i] - h.mean) / h.std, mean=torch.zeros(WIDTH), std=torch.ones(WIDTH)
    ),
    "negative": lambda _: Held(lambda h, i: h.x[i - N]),
    "itself by another number": lambda _: Computed(lambda c, i: c.load(i) if i >= 0 else c[i + N]),
    "closing": lambda _: Closing(pair),
    "list of rows": lambda _: Held(
        lambda h, i: dict(h.held[i]), held=[{"x": X[k], "y": int(Y[k])} for k in range(N)]
    ),
}
