"""The processes that make a run together: the ranks of a torch.distributed group. One process alone
is the identity element.

Sums travel over the group that the user made (NCCL or gloo); words travel beside them over a gloo
group with a time-out of its own, so that a rank that failed, disagrees or is gone is noticed before
noise is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dpfy.core.errors import Lost

FAILED = "failed"
TIMEOUT = 600.0
"""Seconds that ranks wait for each other's words: a step, a checkpoint or the reading of the data
may take as long.
"""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Set by torchrun: how often it has started these processes again."""

T = TypeVar("T")


@dataclass
class World:
    """Rank `rank` of `count`. Rank 0 owns the folder, the ledger and the secret of the run.

        world = World.joined()            # every rank of the default group; alone, where there is
        none with dpfy.PrivateTraining(model, optimizer, train, plan, run, world=world) as training:
        ...

    Guarantees: `exchange`, and what is built on it, returns on every rank or raises on every rank
    that still lives, within the time-out, and never goes on with ranks that stand at different
    places. After it raised once it always raises.
    """

    rank: int = 0
    count: int = 1
    group: Any = None
    control_group: Any = None
    lost: str | None = field(default=None, init=False)

    @classmethod
    def alone(cls) -> World:
        """This process by itself, whatever others there are."""
        return cls()

    @classmethod
    def joined(cls, group: Any = None, timeout: float = TIMEOUT) -> World:
        """All ranks of `group`, by default of torch.distributed's own group where one is
        initialised. All of them must call it.
        """
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]
        if len(ranks) == 1:
            return cls()
        control = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo")
        return cls(dist.get_rank(group), len(ranks), group, control)

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def share(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """This rank's part of a batch that all ranks have drawn alike. It may be empty."""
        return indices[
            len(indices) * self.rank // self.count : len(indices) * (self.rank + 1) // self.count
        ]

    def largest_share(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """That of the last rank: no other is larger."""
        return indices[len(indices) * (self.count - 1) // self.count :]

    def close(self) -> None:
        """Let go of what `joined` made."""
        if self.control_group is not None:
            control, self.control_group = self.control_group, None
            dist.destroy_process_group(control)

    def exchange(self, what: str, value: Any = None) -> list[Any]:
        """What every rank brought, in JSON, in their order; `what` says where the run stands and
        must be the same on all ranks.
        """
        if self.count == 1:
            return [value]
        if self.lost is not None or self.control_group is None:
            raise Lost(self.lost or "the run has ended here")
        try:
            brought = self._gather(json.dumps([what, value]).encode())
        except (RuntimeError, ValueError) as problem:
            raise self._gone(
                f"a rank does not answer ({str(problem).splitlines()[0][:120]})"
            ) from None
        places = [place for place, _ in brought]
        for rank, (place, word) in enumerate(brought):
            if place == FAILED:
                raise self._gone(f"rank {rank} failed: {word}")
        if len(set(places)) > 1:
            other = next(rank for rank, place in enumerate(places) if place != places[self.rank])
            raise self._gone(
                f"rank {other} is at {places[other]!r} where rank {self.rank} is at "
                f"{places[self.rank]!r}"
            )
        return [word for _, word in brought]

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """Refuse to go on unless all ranks have the same facts. What is secret comes in as a
        fingerprint.
        """
        everyone = self.exchange(what, dict(facts))
        for rank, theirs in enumerate(everyone):
            for key in {**everyone[0], **theirs}:
                if theirs.get(key) != everyone[0].get(key):
                    raise self._gone(f"rank {rank} has another {key} than rank 0")

    def rank0_first(self, what: str, action: Callable[[], T]) -> T:
        """Rank 0 does it, then all others; if it raises on rank 0, no other does it."""
        if self.first:
            done = action()
            self.exchange(what)
            return done
        self.exchange(what)
        return action()

    def broadcast_object(self, what: str, action: Callable[[], Any]) -> Any:
        """What `action` gives on rank 0, in JSON, on all ranks."""
        return self.exchange(what, action() if self.first else None)[0]

    def notify_on_error(self, action: Callable[[], T]) -> T:
        """What `action` gives; what it raises the other ranks are told."""
        try:
            return action()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank goes no further. Nothing is raised, and nothing is said
        twice.
        """
        if self.count == 1 or self.lost is not None or self.control_group is None:
            return
        with suppress(RuntimeError, ValueError):  # where they are gone already
            self._gather(json.dumps([FAILED, f"{type(error).__name__}: {error}"[:500]]).encode())
        self.lost = f"rank {self.rank} failed: {error}"

    def all_reduce(self, t: Tensor) -> Tensor:
        """The sum of `t` over all ranks, in its place."""
        if self.count > 1:
            self._travel(lambda: dist.all_reduce(t, group=self.group))
        return t

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks what rank 0 holds."""
        if self.count > 1:
            source = dist.get_global_rank(self.group, 0) if self.group is not None else 0
            self._travel(
                lambda: [dist.broadcast(t.detach(), source, group=self.group) for t in tensors]
            )

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        """Of the sum of `flat` over all ranks, which is cut into these sizes, the part of this
        rank.
        """
        if self.count == 1:
            return flat
        mine = flat.new_empty(sizes[self.rank])
        self._travel(
            lambda: dist.reduce_scatter(mine, list(flat.split(list(sizes))), group=self.group)
        )
        return mine

    def all_gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """The parts of all ranks, of these sizes, one after the other."""
        room = max(sizes)
        padded = (
            torch.cat([part, part.new_zeros(room - len(part))])
            if len(part) < room
            else part.contiguous()
        )
        parts = [part.new_empty(room) for _ in sizes]
        self._travel(lambda: dist.all_gather(parts, padded, group=self.group))
        return torch.cat([p[:size] for p, size in zip(parts, sizes, strict=True)])

    def _travel(self, action: Callable[[], object]) -> None:
        if self.lost is not None:
            raise Lost(self.lost)
        try:
            action()
        except RuntimeError as problem:
            raise self._gone(f"a rank is gone ({str(problem).splitlines()[0][:120]})") from None

    def _gather(self, mine: bytes) -> list[tuple[str, Any]]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.control_group)
        room = max(int(size) for size in sizes)
        brought = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.count)]
        padded = torch.frombuffer(bytearray(mine.ljust(room)), dtype=torch.uint8)
        dist.all_gather(brought, padded, group=self.control_group)
        return [
            tuple(json.loads(bytes(b.numpy().tobytes()[: int(n)])))
            for b, n in zip(brought, sizes, strict=True)
        ]

    def _gone(self, why: str) -> Lost:
        self.lost = why
        return Lost(why)


@contextmanager
def process_group() -> Iterator[bool]:
    """Inside the block, the process group of the job: that of ``WORLD_SIZE`` processes, as torchrun
    tells them. Whether this is rank 0.

    Each process takes the GPU of its local rank, where there are GPUs. A process alone joins
    nothing, and is rank 0.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield not dist.is_initialized() or dist.get_rank() == 0
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def restarted() -> bool:
    """Whether torchrun has started this job again after a failure."""
    return os.environ.get(RESTARTS, "0") != "0"
