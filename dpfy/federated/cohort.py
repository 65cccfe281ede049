"""The cohort of a round: which clients were drawn, and the updates that came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Unit
from dpfy.core.values import Bounded
from dpfy.gradients.clip import Clip
from dpfy.gradients.engine import Grads, added, clipped_sum, zeros
from dpfy.gradients.engines.loop import CHUNK_ELEMENTS
from dpfy.gradients.per_example.arithmetic import row_chunks
from dpfy.gradients.per_example.rounding import row_squares

Update = Mapping[str, object] | Sequence[object]
"""What a client sends: for each trainable parameter, by name or in their order, global weights
minus local weights.
"""


@dataclass(frozen=True)
class Tally:
    """What became of a cohort, for the caller alone: sizes of random cohorts are as private as the
    data.

    `unusable` updates held NaN, infinity, or numbers too large to measure: they counted as zero, as
    those `missing` did.
    """

    drawn: int
    answered: int
    unusable: tuple[int, ...]

    @property
    def missing(self) -> int:
        """Drawn clients that sent nothing."""
        return self.drawn - self.answered


class Cohort:
    """The clients of one round and their updates, in any order of arrival. Made by
    :class:`dpfy.federated.PrivateRounds`.

    Guarantees: a client adds at most the clip bound to the round, whatever it sends and however
    often; one that was not drawn adds nothing; one that sends nothing, or what is not finite, adds
    exactly zero, and changes nothing about what the others add. The sum does not depend on the
    order of arrival, to the last bit.
    """

    def __init__(
        self,
        step: int,
        clients: NDArray[np.int64],
        parameters: Mapping[str, nn.Parameter],
        end: Callable[[Cohort], Tally],
    ) -> None:
        self.step = step
        self.clients = clients
        self.tally: Tally | None = None
        self._drawn = {int(client) for client in clients}
        self._parameters = dict(parameters)
        self._rows: dict[int, list[Tensor]] = {}
        self._stacked: list[Tensor] | None = None
        self._end = end

    def __len__(self) -> int:
        return len(self.clients)

    @property
    def waiting(self) -> list[int]:
        """Clients that were drawn and have sent nothing yet."""
        return (
            []
            if self._stacked is not None
            else [int(c) for c in self.clients if int(c) not in self._rows]
        )

    def add(self, client: int, update: Update) -> None:
        """Take the update of one client: global weights minus local weights, by name or as a list
        in the order of the parameters.

        What is refused here (another client, a second update, another shape) leaves the cohort as
        it was.
        """
        number = self._admitted(client)
        self._rows[number] = self._checked(f"client {number}", update, ())

    def add_all(self, updates: Update) -> None:
        """Take the updates of all clients at once, stacked in the order of `clients`: tensors of
        shape [clients, *parameter].
        """
        for client in self.clients:
            self._admitted(client)
        self._stacked = self._checked("the cohort", updates, (len(self.clients),))

    def close(self) -> Tally:
        """End the round: clip, sum, noise, update of the model. Closing it twice does no harm."""
        if self.tally is None:
            self.tally = self._end(self)
        return self.tally

    def _admitted(self, client: object) -> int:
        """The number of a client that was drawn and has not sent anything."""
        if self.tally is not None:
            raise InvalidInput(
                f"client {client}",
                f"round {self.step} is over",
                "an update counts in the round it was made for alone",
            )
        if (
            isinstance(client, bool)
            or not isinstance(client, int | np.integer)
            or int(client) not in self._drawn
        ):
            raise InvalidInput(
                f"client {client}",
                "was not drawn",
                f"must be one of the clients of round {self.step}",
            )
        if self._stacked is not None or int(client) in self._rows:
            raise InvalidInput(
                f"client {client}", "a second update", "a client sends one update a round"
            )
        return int(client)

    def _checked(self, who: str, update: Update, rows: tuple[int, ...]) -> list[Tensor]:
        """The tensors of an update in the order of the parameters, in their types and on their
        device.
        """
        if isinstance(update, Mapping):
            if update.keys() != self._parameters.keys():
                rule = "must hold every trainable parameter of the model by name, and nothing else"
                strange = sorted(map(str, update.keys() ^ self._parameters.keys()))
                raise InvalidInput(
                    f"{who} update",
                    f"{len(update)} tensors ({strange[0]} is missing or too many)",
                    rule,
                )
            update = [update[name] for name in self._parameters]
        if len(update) != len(self._parameters):
            rule = f"must hold {len(self._parameters)} tensors, one for each trainable parameter"
            raise InvalidInput(f"{who} update", f"{len(update)} tensors", rule)
        return [
            _tensor(f"{who} {name}", value, p, rows)
            for (name, p), value in zip(self._parameters.items(), update, strict=True)
        ]

    def bounded(self, clip: Clip, unit: Unit) -> tuple[Bounded[Grads], Tally]:
        """The sum of the clipped updates, in the order of the clients, and what became of each."""
        names, width = list(self._parameters), sum(p.numel() for p in self._parameters.values())
        answered = [
            int(c) for c in self.clients if self._stacked is not None or int(c) in self._rows
        ]
        total, unusable = zeros(self._parameters, clip), []
        for part in row_chunks(len(answered), width, CHUNK_ELEMENTS) if answered else []:
            some = answered[part]
            if self._stacked is not None:
                per_client = [t[part] for t in self._stacked]
            else:
                per_client = [
                    torch.stack(column)
                    for column in zip(*[self._rows[c] for c in some], strict=True)
                ]
            sound = sum(row_squares(t) for t in per_client).isfinite()  # type: ignore[union-attr]
            unusable += [c for c, good in zip(some, sound.tolist(), strict=True) if not good]
            added(total, clipped_sum(per_client, names, clip, sound))
        return Bounded(total, clip.bound, unit), Tally(
            len(self.clients), len(answered), tuple(unusable)
        )


def _tensor(name: str, value: object, like: nn.Parameter, rows: tuple[int, ...]) -> Tensor:
    """One tensor of an update, copied to where and what the parameter is."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = torch.from_numpy(
            np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False)).copy()
        )
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse:
        shown = str(value.dtype) if isinstance(value, Tensor | np.ndarray) else type(value).__name__
        raise InvalidInput(name, shown, "must be a dense tensor or array of floating-point numbers")
    if tuple(value.shape) != (*rows, *like.shape):
        raise InvalidInput(
            name,
            f"shape {tuple(value.shape)}",
            f"must have shape {(*rows, *like.shape)}, as the model's",
        )
    value = value.detach()
    moved = value.to(device=like.device, dtype=like.dtype)
    return moved.clone() if moved.data_ptr() == value.data_ptr() and not rows else moved
