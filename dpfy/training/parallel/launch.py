"""Joining the processes that torchrun, or a scheduler like Slurm, has started for one job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dpfy.training.parallel.read_only_run import RESTARTS


@contextmanager
def joined() -> Iterator[bool]:
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
