"""What a private step costs against a plain one, measured on the user's own model."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engine import Engine, tensors_in, trainable
from dpfy.gradients.engines.choice import choose

WARM = 4
"""Steps before anything is measured: the first ones find out where the examples lie."""

T = TypeVar("T")

Losses = Callable[[Any], Tensor]
"""From the output of a model to one loss per example."""


@dataclass(frozen=True)
class StepCost:
    """Medians over rounds in which both steps took turns; times in milliseconds, memory in MiB, of
    forward, backward and clipped sum.

    Noise and update are the same for every model and left out. `spread`: the smallest and the
    largest ratio of a round. Memory is the peak of a step, the parameters with it; None where the
    system does not tell.
    """

    clock: str
    batch: int
    rounds: int
    plain_ms: float
    private_ms: float
    time_ratio: float
    spread: tuple[float, float]
    plain_mib: float | None
    private_mib: float | None

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory of the private step over that of the plain one."""
        return (
            self.private_mib / self.plain_mib
            if self.plain_mib and self.private_mib is not None
            else None
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        memory = None if self.memory_ratio is None else round(self.memory_ratio, 3)
        return asdict(self) | {"memory_ratio": memory, "time_ratio": round(self.time_ratio, 3)}

    def text(self) -> str:
        """In one line."""
        low, high = self.spread
        memory = "peak memory not known here"
        if self.memory_ratio is not None:
            memory = (
                f"peak memory {self.plain_mib:.0f} and {self.private_mib:.0f} MiB, "
                f"{self.memory_ratio:.2f}x"
            )
        times = (
            f"plain {self.plain_ms:.2f} ms, private {self.private_ms:.2f} ms, "
            f"{self.time_ratio:.2f}x ({low:.2f} to {high:.2f})"
        )
        return (
            f"measured, batch {self.batch}, {self.rounds} rounds in turns, {self.clock}, without "
            f"noise and update: {times}; {memory}"
        )


def sine_loss(output: Any) -> Tensor:
    """Some loss for every example, from outputs whose first dimension is the batch: for models
    whose own loss is not known.
    """
    found = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad and t.dim()]
    if not found:
        raise InvalidInput(
            "model output",
            type(output).__name__,
            "must hold a floating point tensor whose first dimension is the batch",
        )
    return torch.stack(
        [t.float().flatten(1).sin().mean(1) if t.dim() > 1 else t.float().sin() for t in found]
    ).sum(0)


def step_cost(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    losses: Losses = sine_loss,
    rounds: int = 5,
    engine: Engine | None = None,
) -> StepCost:
    """Run plain and private steps of `model` on `inputs`, in turns. Parameters do not change;
    buffers and modes are put back.

    Use random or public inputs of the real shape and batch: nothing is trained and nothing is
    released.
    """
    check.integer("rounds", rounds, least=1, most=1000)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    chosen = choose(model)[0] if engine is None else engine
    params, device = list(trainable(model).values()), given[0].device
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    def plain() -> None:
        torch.autograd.grad(losses(model(*given)).mean(), params, allow_unused=True)

    def private() -> None:
        chosen.bounded_sum(losses(model(*given)), FlatClip(1.0))

    try:
        pairs = []
        for _ in range(rounds):
            pairs.append(
                (
                    _timed(plain, device),
                    _attached(chosen, model, private, lambda: _timed(private, device)),
                )
            )
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        peaks = [
            _peak(plain, device, held),
            _attached(chosen, model, private, lambda: _peak(private, device, held)),
        ]
    finally:
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
    ratios = [b / a for a, b in pairs]
    plain_ms, private_ms = (
        round(1e3 * statistics.median(side), 4) for side in zip(*pairs, strict=True)
    )
    clock = (
        "CUDA events"
        if device.type == "cuda"
        else f"CPU seconds, {torch.get_num_threads()} thread(s)"
    )
    spread = (round(min(ratios), 3), round(max(ratios), 3))
    ratio = statistics.median(ratios)
    return StepCost(
        clock, len(given[0]), rounds, plain_ms, private_ms, ratio, spread, peaks[0], peaks[1]
    )


def _attached(
    engine: Engine, model: nn.Module, step: Callable[[], None], then: Callable[[], T]
) -> T:
    engine.attach(model)
    try:
        for _ in range(WARM):
            step()
        return then()
    finally:
        engine.detach()


def _timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one step, after one that is not counted: enough of them for a tenth of a
    second.
    """
    step()
    many, total = 0, 0.0
    while total < 0.1 and many < 50:
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize(device)
            total += begin.elapsed_time(end) / 1e3
        else:
            start = time.process_time()
            step()
            total += time.process_time() - start
        many += 1
    return total / many


def _peak(step: Callable[[], None], device: torch.device, held: int) -> float | None:
    """MiB at the peak of a step."""
    step()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed must not hide what a step asks for
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        step()
        return (max(_status("VmHWM") - before, 0) + held) / 2**20
    except (OSError, AttributeError):  # only Linux tells
        return None


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
