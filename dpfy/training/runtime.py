"""Speed knobs. None of them can reach the plan, so none of them can change the guarantee."""

from __future__ import annotations

from dataclasses import dataclass

from dpfy.core import check
from dpfy.core.errors import InvalidInput


@dataclass(frozen=True)
class Runtime:
    """How a step is computed. Nothing here changes what is released, nor its guarantee.

    Args:
        engine: "auto", "bookkeeping", "batched" or "loop".
        max_physical_batch: The most records that are computed at once. "auto" takes the most that
            fit, found at the start and remembered for the run.
        pad: Pad batches to static shapes.
        device: Where to compute; None keeps the model where it is.
        progress: Show a progress bar.
        graph: Capture the step as CUDA graphs where there is a CUDA device: for steps that take
            longer to launch than to compute. Batches are then padded to a size that a random
            batch seldom exceeds, and a loop of your own uses :meth:`PrivateTraining.captured`.

    Raises:
        InvalidInput: A value does not fit its rule.

    Example:
        >>> import dpfy
        >>> dpfy.Runtime(engine="loop", max_physical_batch=64).engine
        'loop'
    """

    engine: str = "auto"
    max_physical_batch: int | str = 4096
    pad: bool = False
    device: str | None = None
    progress: bool = False
    graph: bool = False

    def __post_init__(self) -> None:
        check.one_of("engine", self.engine, ["auto", "bookkeeping", "batched", "loop"])
        if self.max_physical_batch != "auto":
            check.integer("max_physical_batch", self.max_physical_batch)
        if self.device is not None:
            check_device(self.device)

    @property
    def padded(self) -> bool:
        """Whether every physical batch has the same number of rows."""
        return self.pad or self.graph


def check_device(name: str) -> None:
    """Refuse a device that torch does not know or this machine does not have."""
    import torch

    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError):
        raise InvalidInput("device", name, _missing(name)) from None
    if kind != "meta":  # this one is refused below
        check.device_kind("training", kind)
    try:
        torch.empty(1, device=name).fill_(
            1
        ).item()  # a device that computes, and not one that only plans memory
    except (RuntimeError, AssertionError, TypeError, ValueError):
        raise InvalidInput("device", name, _missing(name)) from None


def _missing(name: object) -> str:
    """Why there is no such device here."""
    import torch

    if str(name).startswith("cuda") and not torch.cuda.device_count():
        found = "torch finds none" if torch.version.cuda else "this torch was built without CUDA"
        return f"must be a device of this machine, which has no CUDA device ({found}): use cpu"
    ours = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))]
    return f"must be a device of this machine: {', '.join(ours)}"
