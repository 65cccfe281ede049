"""The guard: what a run may change is changed by the run alone. Weights, buffers, optimizer and
shape of the model are watched.

Every tensor of torch counts the writes to it. Between two steps nobody but the run writes, so the
counters must stand still; buffers and frozen weights stand still for the whole run. Writes that
pass by the counters (through ``.data``, or a NumPy view) are found by checksums: at the first
steps, at the last, at others drawn from the run's secret, and at as many more as half a percent of
the time allows. At every step a few values of each trained weight are compared, where the processor
can read them: a write over the whole of a weight is found at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, cycle
from operator import is_
from types import MappingProxyType

import torch
from torch import Tensor, nn

from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.gradients.engine import trainable
from dpfy.training.parallel.dtensor import local

LARGE = 1 << 14
"""Tensors of so many values are summed where they lie; smaller ones are copied together first."""

WORD = 8
HUGE, BLOCK, PARTS = 1 << 20, 1 << 12, 4
"""Of tensors of so many values, a checksum in parts takes one block of values in four."""


def checksum(tensors: Iterable[Tensor], part: int | None = None) -> Tensor:
    """One number (int64, on the device of one of them) that changes when a bit of one of them does.
    0.2 ns a float32 on one core.

    Guarantees: the same values in the same order give the same number, wherever they lie in memory;
    one value changed gives another number. 64-bit words that change places are not distinguished. With
    `part`, only every fourth block of huge tensors is read, from block `part` on.
    """
    together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sums: list[Tensor] = []
    for t in _plain(tensors):
        if t.numel() < LARGE:
            together.setdefault((t.dtype, t.device), []).append(t)
        else:
            flat, many = t.detach().reshape(-1), max(1, WORD // t.itemsize)
            if part is not None and len(flat) >= HUGE:
                blocks = flat[: len(flat) // BLOCK * BLOCK].view(-1, BLOCK)[part % PARTS :: PARTS]
                sums.append(_words(blocks.clone() if _askew(flat) else blocks))
                continue
            whole = len(flat) // many * many
            together.setdefault((t.dtype, t.device), []).append(flat[whole:])
            sums += [_words(part) for part in _aligned(flat[:whole])]
    sums += [_together(many, dtype) for (dtype, _), many in together.items()]
    if not sums:
        return torch.zeros((), dtype=torch.int64)
    return (
        sums[0] if len(sums) == 1 else torch.stack([part.to(sums[0].device) for part in sums]).sum()
    )


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Of sparse tensors what they hold and where."""
    for t in tensors:
        yield from (t.indices(), t.values()) if t.is_sparse else (t,)


def _words(flat: Tensor) -> Tensor:
    return flat.view(torch.int64).sum()


def _aligned(flat: Tensor) -> Iterable[Tensor]:
    """`flat` in pieces that begin at a whole word: itself, or copies where it lies askew."""
    return (part.clone() for part in flat.split(HUGE)) if _askew(flat) else (flat,)


def _askew(flat: Tensor) -> bool:
    return flat.storage_offset() * flat.itemsize % WORD != 0


def _together(many: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Of small tensors of one type, with zeros up to a whole word."""
    lacking = -sum([t.numel() for t in many]) % max(1, WORD // dtype.itemsize)
    flat = torch._C._nn.flatten_dense_tensors([*many, _zeros(lacking, dtype, many[0].device)])
    return _words(flat.detach())


@lru_cache(maxsize=64)
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


READ, DRAWN = 2, 64
"""Values of each weight that are read at a step, and how often they are drawn, by turns."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Values:
    """A few values of each tensor in the processor's memory, others after each `move`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        words = [
            t.detach().view(INTEGERS[t.itemsize]).numpy().reshape(-1)
            for t in tensors
            if t.device.type == "cpu" and t.is_contiguous() and t.itemsize in INTEGERS and t.numel()
        ]
        draw = random.Random().randrange
        self._drawn = cycle(
            [[(w.item, draw(w.size)) for w in words for _ in range(READ)] for _ in range(DRAWN)]
        )
        self.move()

    def move(self) -> None:
        """Read others from now on."""
        self._places = next(self._drawn)

    def read(self) -> list[int]:
        """What they hold."""
        return [item(place) for item, place in self._places]


FIRST = 4
"""Steps at the beginning before each of which contents are looked at."""

SELDOM = 32
"""Afterwards one step in so many, drawn at random."""

SHARE = 0.005
"""Of the time of a run, for looking at contents at further steps."""

WRITTEN = "a weight or the optimizer's state written to outside of training.step through .data"
OUTSIDE = (
    "only training.step may move weights; load them before the run begins, and state a rule of "
    "weights alone as Update(project=...)"
)
STILL = (
    "what is not trained must stay as it was, or it would carry data past the noise: remove it, or "
    "compute it before the run begins"
)
BILLED = "leave it to the run: noise that forgets what it was is not the noise that is charged"
SHAPE = (
    "leave them alone while a run lasts; what a first pass makes (caches, say), make before it "
    "with a public example"
)


class Guard:
    """Remembers a model, its optimizer, the average of its weights and the memory of its noise as a
    step left them.

    Guarantees: `check` returns only if since the last `accept` no parameter, buffer, averaged
    weight, memory of the noise or state of the optimizer was written, replaced, added, frozen or
    unfrozen in a way that torch counts; and, where `accept` was told to look, in any way (the
    memory of the noise, which may be many times the model, is only counted). On the processor no
    trained weight was written over as a whole in any way.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: Mapping[str, Tensor],
        records: Iterable[Tensor],
        noise: Mapping[str, Tensor],
        aliases: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """`aliases` are tensors that may stand in for a parameter in its module while it
        computes.
        """
        self._optimizer, self._records, self._aliases = optimizer, list(records), aliases
        self.trainable = trainable(model)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._names = {id(local(t)): name for name, t in named.items()}
        self._moving = [local(t) for t in (*self.trainable.values(), *average.values())]
        self._still = [local(t) for name, t in named.items() if name not in self.trainable]
        self.frozen = [p for p in model.parameters() if not p.requires_grad]
        self._dicts = [d for m in model.modules() for d in (m._parameters, m._buffers, m._modules)]
        self._sizes = [len(d) for d in self._dicts]
        self._held = list(chain.from_iterable(d.values() for d in self._dicts))
        self._grouped = self._groups()
        self._wanted = self._requires()
        self._still_marks, self._still_sum = _marks(self._still), checksum(self._still)
        self._data_marks = _marks(self._records)
        self._values = _Values(self._moving)
        self._began, self._looked = time.perf_counter(), 0.0
        self.accept(noise, look=True)

    def accept(self, noise: Mapping[str, Tensor], *, look: bool = False) -> None:
        """Take weights, optimizer and `noise` as they are now: a step of the run moved them. With
        `look`, note their contents too.
        """
        states = self._states()
        self._noise, self._noise_marks = noise, _marks(noise.values())
        self._moved, self._state, self._sum = _marks(self._moving), _marks(states), None
        self._values.move()
        self._read = self._values.read()
        now = time.perf_counter()
        if look or self._looked < SHARE * (now - self._began):
            self._sum = checksum([*self._moving, *states])
            self._looked += time.perf_counter() - now

    def restored(self) -> None:
        """The run has put the weights back as they were: their counters have moved, their contents
        have not.
        """
        self._moved = _marks(self._moving)

    def check(self) -> None:
        """Refuse whatever was changed by others since `accept`."""
        self.check_shape()
        if self._groups() != self._grouped:
            raise Unsupported("parameter groups of the optimizer changed while a run lasts", SHAPE)
        self._compare(self._still, self._still_marks, "changed in training", STILL)
        self._compare(self._moving, self._moved, "written to outside of training.step", OUTSIDE)
        if self._values.read() != self._read:
            raise Unsupported(WRITTEN, OUTSIDE)
        if _marks(states := self._states()) != self._state:
            raise Unsupported(
                "a state of the optimizer written to outside of training.step", OUTSIDE
            )
        if _marks(self._noise.values()) != self._noise_marks:
            raise Unsupported("the memory of the noise written to outside of training.step", BILLED)
        if _marks(self._records) != self._data_marks:
            raise Unsupported(
                "training data written to while a run lasts",
                "change what a batch gives, never the data itself",
            )
        if self._sum is not None:
            self._look(self._sum, states)

    def check_shape(self) -> None:
        """Refuse a model with other modules, parameters or buffers than before, or others that want
        a gradient.
        """
        now = list(chain.from_iterable([d.values() for d in self._dicts]))
        if self._aliases:
            now = [self._aliases.get(id(t), t) for t in now]
        if [len(d) for d in self._dicts] != self._sizes or not all(map(is_, now, self._held)):
            raise Unsupported(
                "a module, parameter or buffer added, replaced or removed while a run lasts", SHAPE
            )
        if self._requires() != self._wanted:
            raise Unsupported("a parameter frozen or unfrozen while a run lasts", SHAPE)

    def _look(self, moved: Tensor, states: list[Tensor]) -> None:
        started = time.perf_counter()
        if not torch.equal(checksum(self._still), self._still_sum):
            raise Unsupported("a buffer or frozen weight changed in training through .data", STILL)
        if not torch.equal(checksum([*self._moving, *states]), moved):
            raise Unsupported(WRITTEN, OUTSIDE)
        self._looked += time.perf_counter() - started

    def _compare(self, tensors: list[Tensor], marks: list[int], what: str, way_out: str) -> None:
        now = _marks(tensors)
        if now != marks:
            changed = next(
                i for i, (a, b) in enumerate(zip(now, marks, strict=True)) if a != b
            ) % len(tensors)
            raise Unsupported(
                f"{self._names.get(id(tensors[changed]), 'an averaged weight')}, {what},", way_out
            )

    def _requires(self) -> list[bool]:
        return [p.requires_grad for p in chain(self.trainable.values(), self.frozen)]

    def _groups(self) -> list[int]:
        return [id(p) for group in self._optimizer.param_groups for p in group["params"]]

    def _states(self) -> list[Tensor]:
        return [
            local(v)
            for s in self._optimizer.state.values()
            for v in s.values()
            if isinstance(v, Tensor)
        ]


def _marks(tensors: Iterable[Tensor]) -> list[int]:
    """Counters of writes, then places in memory."""
    many = list(tensors)
    return [t._version for t in many] + [t.data_ptr() for t in many]


def looks(step: int, steps: int, randomness: Randomness) -> bool:
    """Whether contents are looked at before the noise of `step`: at the first, the last (`steps` is
    the end), and some drawn steps.
    """
    return step < FIRST or step == steps or randomness.key("look", step, 1)[0] % SELDOM == 0


def seal(model: nn.Module, randomness: Randomness) -> dict[str, str]:
    """A keyed fingerprint of every tensor that training must leave alone, by its name in the
    state_dict or among the buffers.
    """
    mine = trainable(model)
    moving = {
        local(t).untyped_storage().data_ptr()
        for t in model.parameters()
        if t.requires_grad and t.numel()
    }
    named = {
        name: local(t) for name, t in {**dict(model.named_buffers()), **model.state_dict()}.items()
    }
    return {
        name: "moves"
        if name in mine or (t.numel() and t.untyped_storage().data_ptr() in moving)
        else randomness.tag(f"still {name}", _raw(t))
        for name, t in sorted(named.items())
    }


def _raw(t: Tensor) -> bytes:
    kind = f"{t.dtype} {tuple(t.shape)} ".encode()
    flat = t.detach().cpu().contiguous().reshape(-1)
    return kind + (flat.view(torch.uint8).numpy().tobytes() if t.numel() else b"")


def check_state(model: nn.Module) -> None:
    """Refuse a model whose state holds more than tensors: it would be published, or lost,
    unseen.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            rule = "keep what is published in parameters and buffers"
            raise Unsupported(
                f"{name or 'the model'} ({type(module).__name__}): extra state of a module "
                f"(get_extra_state)",
                rule,
            )
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise Unsupported(
                f"{name}: a {type(value).__name__} in the state_dict",
                "keep what is published in parameters and buffers",
            )
