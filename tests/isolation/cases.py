"""What the two corpora of this folder share: tiny data, programs as users write them, how they are
run, and how far a record moves a sum.

A program is a :class:`Job`: a model, the losses of a batch, the data, and what the loop does after
a step. A :class:`Case` builds a new one each time. Cases of `mixing` ask a :class:`Now` whether
they mix at this step, so that the same code mixes at every step, late, or now and then.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpfy
from dpfy.core.errors import DpfyError
from dpfy.data.given import as_source
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Grads, trainable
from dpfy.gradients.engines.choice import choose

RECORDS, WIDTH, CLASSES, WORDS, LENGTH = 256, 6, 3, 11, 5
STEPS = 200
"""Within so many steps late and occasional mixing is to be found."""

_OTHER: dict[int, int] = {}
"""Record to the record whose content takes its place, while :func:`replaced` is entered."""


@contextmanager
def replaced(record: int, by: int) -> Iterator[None]:
    """Data made meanwhile hold the content of record `by` in the place of `record`."""
    _OTHER[record] = by
    try:
        yield
    finally:
        _OTHER.clear()


def given(*fields: Tensor) -> Any:
    """The fields, with the replaced record; one field alone as it is."""
    index = torch.arange(len(fields[0]))
    for record, by in _OTHER.items():
        index[record] = by
    return tuple(f[index] for f in fields)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def vectors(records: int = RECORDS) -> Any:
    """Vectors and classes; record 0 lies far out."""
    g = seeded()
    x = torch.randn(records, WIDTH, generator=g)
    x[0] *= 6
    return given(x, torch.randint(0, CLASSES, (records,), generator=g))


def sequences() -> Any:
    g = seeded()
    return given(
        torch.randn(RECORDS, LENGTH, WIDTH, generator=g),
        torch.randint(0, CLASSES, (RECORDS,), generator=g),
    )


def images() -> Any:
    g = seeded()
    return given(
        torch.randn(RECORDS, 2, 8, 8, generator=g),
        torch.randint(0, CLASSES, (RECORDS,), generator=g),
    )


def tokens() -> Any:
    """Tokens (3 to 10; 0 where there is none), and which of them count: at least two, and all only
    in record 0.
    """
    g = seeded()
    words = torch.randint(3, WORDS, (RECORDS, LENGTH), generator=g)
    lengths = torch.randint(2, LENGTH, (RECORDS, 1), generator=g)
    lengths[0] = LENGTH
    real = (torch.arange(LENGTH) < lengths).long()
    return given(words * real, real)


def padded() -> Any:
    """Sequences with zeros behind their end, their lengths, and classes. Every seventh record is as
    long as can be.
    """
    g = seeded()
    x, lengths = (
        torch.randn(RECORDS, LENGTH, WIDTH, generator=g),
        torch.randint(1, LENGTH, (RECORDS,), generator=g),
    )
    lengths[::7] = LENGTH
    x = x * (torch.arange(LENGTH) < lengths[:, None])[:, :, None]
    return given(x, lengths, torch.randint(0, CLASSES, (RECORDS,), generator=g))


def net(*layers: nn.Module) -> nn.Module:
    return (
        nn.Sequential(*layers)
        if layers
        else nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    )


def ce(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def plain(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ce(m(x), y)


class Apply(nn.Module):
    """A function between a body and a head."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        body: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.body = body or nn.Linear(WIDTH, 8)
        self.function = function
        self.head = head or nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.function(self.body(x)))
        return out


@dataclass
class Job:
    """A user's program. `losses` gets the model and the fields of a batch (or the dict), `after`
    the losses once the step is made.
    """

    model: nn.Module
    losses: Callable[..., Tensor]
    data: Any
    after: Callable[[Tensor], None] | None = None
    unit: Any = None
    runtime: dict[str, Any] = field(default_factory=dict)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None

    def of(self, batch: Any) -> Tensor:
        """The losses of a batch."""
        return (
            self.losses(self.model, *batch)
            if isinstance(batch, tuple | list)
            else self.losses(self.model, batch)
        )


@dataclass
class Now:
    """When a program mixes. The program asks once a step, with its batch or the number of its rows.

    From step `start` on, with probability `chance` at each step, only with `least` rows.
    """

    start: int = 0
    chance: float = 1.0
    least: int = 0
    asked: int = 0

    def __call__(self, rows: Any) -> bool:
        self.asked += 1
        count = rows if isinstance(rows, int) else len(rows)
        return (self.asked > self.start) & (random.random() < self.chance) & (count >= self.least)

    @property
    def step(self) -> int:
        """How many steps have asked since mixing was to begin, at least 0: for coefficients that
        grow.
        """
        self.asked += 1
        return max(0, self.asked - 1 - self.start)

    def __str__(self) -> str:
        said = [f"from {self.start / STEPS:.0%}"] if self.start else []
        said += [f"p = {self.chance}"] if self.chance < 1 else []
        said += [f"{self.least} rows or more"] if self.least else []
        return ", ".join(said) or "every step"


EVERY = Now()


def late(share: float) -> Now:
    return Now(start=int(share * STEPS))


def chance(p: float) -> Now:
    return Now(chance=p)


def least(rows: int) -> Now:
    return Now(least=rows)


@dataclass(frozen=True)
class Case:
    """A program by name. `rows` is the expected batch. `when` says at which steps it mixes; for
    ordinary cases it is empty.

    `draws` says that it draws random numbers for all rows at once: a batch with one row less then
    draws others.
    """

    name: str
    build: Callable[[Now], Job]
    rows: float = 24
    when: tuple[Now, ...] = ()
    draws: bool = False
    slow: bool = False
    fit: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a run ended: at which step it was refused and what was said; None if it ran to its
    end.
    """

    step: int | None
    said: str
    seconds: float
    checks: Any = None

    @property
    def refused(self) -> bool:
        return self.step is not None


REFUSED = re.compile(
    r"mix examples|mixing examples|Python reads|shapes depend|number of records|lengths of "
    r"other|earlier step|from the batch"
    r"|beside the batch|changed in training|cannot be checked|normalisation over the batch|collate "
    r"function by which"
    r"|behind the end of a sequence|constants that change from step to step|made of several records"
)
"""What refusals of mixing say. Any other error is a defect of the case or of dpfy."""


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def train(
    case: Case,
    path: Path,
    *,
    now: Now = EVERY,
    seed: int = 1,
    steps: int = 14,
    one_call: bool = False,
) -> Outcome:
    """Run the program as its user would: in a loop of one's own, or with `one_call` by
    `dpfy.fit`.
    """
    seed_all(seed)
    job = case.build(replace(now, asked=0))
    options = {} if job.unit is None else {"unit": job.unit}
    plan = dpfy.dpsgd(
        len(as_source(job.data)), case.rows, steps=steps, clip_norm=1.0, **options
    ).with_noise(1.0, delta=1e-3)
    sgd = torch.optim.SGD([p for p in job.model.parameters() if p.requires_grad], lr=0.05)
    more = {
        "runtime": dpfy.Runtime(**job.runtime),
        "scheduler": None if job.scheduler is None else job.scheduler(sgd),
    }
    run, started, done, training = dpfy.Run(path / "run", seed=seed), time.perf_counter(), 0, None
    try:
        if one_call:
            of: dict[str, Any] = (
                {"loss": "cross_entropy"}
                if job.losses is plain
                else {"objective": lambda m, b: job.of(b)}
            )
            dpfy.fit(job.model, job.data, plan=plan, optimizer=sgd, run=run, **of, **more)
        else:
            with dpfy.PrivateTraining(job.model, sgd, job.data, plan, run, **more) as training:
                for batch in training.batches():
                    done = training.steps_done
                    losses = job.of(batch)
                    training.step(losses)
                    if job.after is not None:
                        job.after(losses)
    except DpfyError as refusal:
        return Outcome(done, str(refusal), time.perf_counter() - started, None)
    checks = None if training is None or training.isolation is None else training.isolation.summary
    return Outcome(None, "", time.perf_counter() - started, checks)


@dataclass(frozen=True)
class Moves:
    """How far one record moves clipped sums, in units of the clip norm.

    `own`: the sum of a step that holds it; `others`: what other examples add to that step;
    `elsewhere`: steps that do not hold it.
    """

    own: float
    others: float
    elsewhere: float

    def most(self, other: Moves) -> Moves:
        """The larger of each."""
        return Moves(
            max(self.own, other.own),
            max(self.others, other.others),
            max(self.elsewhere, other.elsewhere),
        )

    @property
    def mixes(self) -> bool:
        return self.own > 1.001 or max(self.others, self.elsewhere) > LEAST_SHOWN

    @property
    def apart(self) -> bool:
        return self.own <= 1.00001 and max(self.others, self.elsewhere) <= LEAST_SHOWN


LEAST_SHOWN = 1e-4
"""Parts of other examples that move by less of the clip norm are taken for rounding."""


def sums(
    case: Case,
    norm: float,
    batches: list[list[int]],
    now: Now,
    counted: Callable[[int], bool] = lambda record: True,
) -> list[Grads]:
    """The clipped sums of some steps, by dpfy's engine and nothing around it.

    All records are in the batch, and only those `counted` in the sum.

    Weights move between steps, and not by what the data say.
    """
    seed_all(5)
    job = case.build(replace(now, asked=0))
    source = as_source(job.data)
    engine, _ = choose(job.model, job.runtime.get("engine", "auto"))
    params, found = trainable(job.model), []
    engine.attach(job.model)
    try:
        for step, indices in enumerate(batches):
            seed_all(100 + step)
            losses = job.of(source.take(torch.tensor(indices)))
            mask = torch.tensor([counted(i) for i in indices])
            found.append(
                engine.bounded_sum(losses, FlatClip(norm), None if mask.all() else mask).value
            )
            if job.after is not None:
                job.after(losses)
            g = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for p in params.values():
                    p += 0.1 * torch.randn(p.shape, generator=g).to(p)
    finally:
        engine.detach()
    return found


def gap(a: Grads, b: Grads, *more: Grads) -> float:
    """The length of the difference; with `more` of `a` and the sum of all others."""
    return (
        sum(
            float((a[k].double() - sum(part[k].double() for part in (b, *more))).square().sum())
            for k in a
        )
        ** 0.5
    )


def moves(
    case: Case,
    norms: tuple[float, ...] = (0.1, 1.0, 20.0),
    steps: int = 2,
    tried: int = 4,
    now: Now = EVERY,
) -> Moves:
    """The most that one of some records moves the sums: it is left out, not counted, alone counted,
    replaced and not counted.

    Where a program draws random numbers for all rows at once, no record is left out: one row less
    would draw others for all.
    """
    seed_all(5)
    records = len(as_source(case.build(replace(now, asked=0)).data))
    size = min(round(case.rows), records)
    order = (
        torch.randperm(records - 1, generator=seeded()) + 1
    )  # record 0, which lies far out, comes first
    index = [0, *order.tolist()]
    batches = (
        [index[k * size : (k + 1) * size] for k in range(steps)]
        if size * steps <= records
        else [index[:size]] * steps
    )
    found = Moves(0.0, 0.0, 0.0)
    picked = dict.fromkeys(
        (batches[0][0], batches[-1][-1], batches[0][-1], *batches[0][1 : max(1, tried - 2)])
    )
    for norm in norms:
        base = sums(case, norm, batches, now)
        for record in picked:
            found = found.most(_moved(case, norm, batches, now, base, record))
    return found


def _moved(
    case: Case, norm: float, batches: list[list[int]], now: Now, base: list[Grads], record: int
) -> Moves:
    """How far one record moves the sums `base`."""
    rest = sums(case, norm, batches, now, lambda i: i != record)
    alone = sums(case, norm, batches, now, lambda i: i == record)
    swapped = []
    for by in {0, batches[-1][len(batches[-1]) // 2]} - {record}:
        with replaced(record, by):
            swapped.append(sums(case, norm, batches, now, lambda i: i != record))
    gone = None
    if not case.draws and min(map(len, batches)) > 1:
        gone = sums(case, norm, [[i for i in batch if i != record] for batch in batches], now)
    own = others = elsewhere = 0.0
    for k, batch in enumerate(batches):
        if record not in batch:
            elsewhere = max(elsewhere, *(gap(base[k], other[k]) / norm for other in swapped))
            continue
        others = max(others, gap(base[k], rest[k], alone[k]) / norm)
        for other in [*swapped, *([] if gone is None else [gone])]:
            own, others = (
                max(own, gap(base[k], other[k]) / norm),
                max(others, gap(rest[k], other[k]) / norm),
            )
    return Moves(own, others, elsewhere)
