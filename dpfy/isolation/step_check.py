"""The check of one recorded step: run again with other records in some rows, in the circumstances of
the step and in others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpfy.gradients.engine import trainable
from dpfy.isolation.comparison import (
    Replacement,
    check_apart,
    check_losses,
    check_sum,
    codes,
    observe,
)
from dpfy.isolation.equality import ExampleParts
from dpfy.isolation.operations import Unrecordable, Variation
from dpfy.isolation.program import Program, Replay
from dpfy.isolation.proof import works_apart
from dpfy.isolation.recorder import OperationRecorder
from dpfy.isolation.replacements import (
    HALVES,
    Replacements,
    moved_constants,
    moved_parameters,
    moved_switches,
)
from dpfy.isolation.schedule import CheckLevel

FAR = 16.0
"""How far from the data records may lie that replace others in a thorough check."""

SEEDS = 2
"""In how many draws of its random operations a step is run again when gradients are checked."""


@dataclass
class StepCheck:
    """One recorded step with its `losses`, to be checked. `seed` is the run's, for other draws."""

    recorder: OperationRecorder
    losses: Tensor
    replacements: Replacements
    model: nn.Module
    engine: Any
    step: int
    seed: int

    @property
    def program(self) -> Program:
        """What was recorded."""
        return self.recorder.program

    @property
    def _first_way(self) -> int:
        """The way of replacing records with which gradients are checked."""
        return (self.step + 1) % HALVES

    @property
    def _reads(self) -> bool:
        """Whether Python, or a shape, learned a value of the batch."""
        return any(operation.read or operation.shaped for operation in self.program.operations)

    def run(self, level: CheckLevel) -> bool:
        """Check the step at this level, at least LIGHT. Returns whether it was run again; if not, it
        is proven that no operation brings examples together.

        A thorough check runs the step again in any case, once.

        Guarantees: raises :class:`dpfy.core.errors.Unsupported` if the losses, or the gradients
        where they are checked, of an example change with other records in other rows;
        :class:`Unrecordable` if the step cannot be run again.
        """
        apart = self._works_apart(ExampleParts.forward(self.program, self.losses))
        if level is CheckLevel.LIGHT or not _has_room(self.program, self.losses.device):
            if level is CheckLevel.THOROUGH or self._reads:
                self._check_thoroughly(None)
            elif not apart:
                self._check_losses()
            return level is CheckLevel.THOROUGH or not apart
        return self._check_gradients(level is CheckLevel.THOROUGH, apart)

    def _works_apart(self, seen: ExampleParts) -> bool:
        """Whether it is proven for `seen`."""
        weights = [] if seen.weights is None else [seen.weights]
        fields = [*map(self.program.ref, self.replacements.batch), *weights]
        return not seen.gradients and works_apart(self.program, seen.refs, fields, len(self.losses))

    def _check_losses(self) -> None:
        """Check the losses alone, with one replacement."""
        ways, step = self.replacements.ways, self.step
        way = step % ways if step % 2 else step // 2 % HALVES
        seen = ExampleParts.forward(self.program, self.losses)
        check_losses(self.program, seen, self.losses, self.replacements.way(way))

    def _check_gradients(self, thorough: bool, apart: bool) -> bool:
        """Check losses and gradients, and that the backward pass of all rows is the sum of its
        parts: two halves, and in a `thorough` check one record and the others. Returns whether
        anything was run again. `apart` says whether the losses are proven.
        """
        params, weights = list(trainable(self.model).values()), torch.ones_like(self.losses)
        self.recorder.start()
        try:
            seen = observe(self.program, self.losses, weights, self.engine, params)
        finally:
            self.recorder.stop()
        require_recorded(self.program)
        proven = apart and self._works_apart(seen)
        if proven and not thorough:
            return False
        change = self.replacements.way(self._first_way)
        plain = check_apart(self.program, seen, self.losses, [change])
        check_sum(self.program, seen, change.rows, plain)
        if thorough and not proven:
            check_sum(self.program, seen, self.replacements.all_but_one)
        operations = self.program.operations
        # Replaced records have no weight above: what Python reads of gradients lacks theirs.
        if self._reads or (thorough and not apart):
            self._check_thoroughly(plain)
        elif not apart and any(o.random is not None for o in operations):
            draws = [Variation(seed=self.seed + SEEDS * self.step + k) for k in range(SEEDS)]
            self._vary(change, draws)
        return True

    def _check_thoroughly(self, plain: Replay | None) -> None:
        """Check the losses with all ways of replacing records, and with other weights and switches.
        `plain` is a run of the step as it was, if there is one.
        """
        program, model = self.program, self.model
        seen = ExampleParts.forward(program, self.losses)
        done = -1 if plain is None else self._first_way
        ways = [self.replacements.way(n) for n in range(self.replacements.ways) if n != done]
        plain = check_apart(program, seen, self.losses, ways, plain=plain)
        known = [program.ref(t).storage for t in (*model.parameters(), *self.replacements.batch)]
        moved = moved_parameters(program, list(trainable(model).values()), self.step)
        moved |= moved_switches(program, known)
        factor = 1.0 if codes(program) else FAR
        far = self.replacements.far(factor)
        self._vary(far, [Variation(moved, moved_constants(program), self.seed)])
        for change in self.replacements.extremes(factor):
            with suppress(Unrecordable):  # numbers for which its operations are not made
                check_apart(program, seen, self.losses, [change], plain=plain)

    def _vary(self, change: Replacement, variations: Sequence[Variation]) -> None:
        """Check the losses in other circumstances than those of the step."""
        seen = ExampleParts.forward(self.program, self.losses)
        for variation in variations:
            with suppress(Unrecordable):  # numbers for which its operations are not made
                check_apart(self.program, seen, self.losses, [change], variation)


def require_recorded(program: Program) -> None:
    """Raise Unrecordable if something was seen that cannot be run again."""
    if program.problem is not None:
        raise Unrecordable(program.problem)


def _has_room(program: Program, device: torch.device) -> bool:
    """Whether the memory holds the activations of a backward pass twice more."""
    if device.type == "cuda":
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 3 * program.held_bytes < free
