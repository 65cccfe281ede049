"""The state of a training between two steps, as one value: what checkpoint, resume, audit and the
end of a run read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpfy import accounting
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.guarantee import Guarantee
from dpfy.gradients.clip import Clip
from dpfy.noise.strategy import State
from dpfy.plan.recipe import CODEC
from dpfy.training.integrity.checkpoint import Snapshot, join_optimizer, split_optimizer
from dpfy.training.parallel.dtensor import local
from dpfy.training.schedulers import Schedules, decode, encode

if TYPE_CHECKING:
    from dpfy.training.loop import PrivateTraining

Named = Mapping[str, Tensor]


@dataclass(frozen=True, repr=False)
class TrainState:
    """Where a training stands before step `step`. With plan, data, code and secret of the run it
    decides every later bit.

    `weights` (parameters and buffers, shared ones under their first name), `average`, `optimizer`
    and `noise` (the memory of the noise strategy) are the run's own, which the next step moves in
    place: `snapshot` keeps them. All else is replaced: `clip` is the rule of this step, `random`
    the positions of torch's own generators (dropout and the like); `rates` tells at which steps a
    scheduler that waits for a metric changed the learning rates, `recorded` which names of values
    the caller published, `computed` what functions steps were made with, `kept` what the caller's
    own loop wants to find again. `schedules` move in place like the optimizer.
    """

    step: int
    weights: Named
    optimizer: torch.optim.Optimizer
    average: Named
    noise: State
    clip: Clip
    random: Named
    schedules: Schedules
    rates: tuple[tuple[int, list[float]], ...] = ()
    recorded: frozenset[str] = frozenset()
    computed: Mapping[str, str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def after(self, noise: State, clip: Clip, rates: list[float] | None) -> TrainState:
        """The state after the step; `rates` are its learning rates where they follow a metric."""
        made = self.rates
        if rates is not None and (not made or made[-1][1] != rates):
            made = (*made, (self.step, rates))
        return replace(self, step=self.step + 1, noise=noise, clip=clip, rates=made)

    def computing(self, what: str, fingerprint: str) -> TrainState:
        """The state with this fingerprint of `what`; refused if earlier steps were made with
        another.
        """
        if self.computed.get(what, fingerprint) != fingerprint:
            raise InvalidInput(
                f"resume {what}", f"other {what}", "must be what the run was started with"
            )
        return replace(self, computed={**self.computed, what: fingerprint})

    def snapshot(self, terms: Mapping[str, Any]) -> Snapshot:
        """What a checkpoint holds: tensors, and facts in JSON, among them the `terms` of the
        run.
        """
        tensors, optimizer = split_optimizer(self.optimizer.state_dict())
        parts = {
            "model": self.weights,
            "optimizer": tensors,
            "average": self.average,
            "noise": self.noise,
            "random": self.random,
        }
        facts = {
            "optimizer": optimizer,
            "clip": CODEC.encode(self.clip),
            "rates made": self.rates,
            "recorded": sorted(self.recorded),
            "computed": dict(self.computed),
            **({"schedulers": self.schedules.facts()} if self.schedules else {}),
            **({"kept": encode(self.kept)} if self.kept else {}),
        }
        return Snapshot(
            self.step,
            {**terms, **facts},
            {
                f"{prefix}.{name}": local(t)
                for prefix, part in parts.items()
                for name, t in part.items()
            },
        )

    def restored(self, snapshot: Snapshot, device: torch.device) -> TrainState:
        """The state that `snapshot` holds: weights, average, optimizer and torch's generators are
        set to it.
        """
        held, facts = snapshot.part("model"), snapshot.facts
        try:
            with torch.no_grad():
                for name, value in self.weights.items():
                    local(value).copy_(held[name])
                for name, value in snapshot.part("average").items():
                    self.average[name].copy_(value)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.optimizer.load_state_dict(
                join_optimizer(snapshot.part("optimizer"), facts["optimizer"], parameters)
            )
        except (KeyError, RuntimeError, ValueError) as problem:
            raise Corrupt(
                "checkpoint/state.safetensors", f"does not fit this model ({problem})"
            ) from None
        if self.schedules:
            self.schedules.restore(facts["schedulers"])
        random, noise = snapshot.part("random"), snapshot.part("noise")
        set_generators(random, device)
        return replace(
            self,
            step=snapshot.step,
            noise={
                name: t.to(self.noise[name].device if name in self.noise else device)
                for name, t in noise.items()
            },
            clip=CODEC.decode(facts["clip"]),
            random=random,
            rates=tuple((step, rates) for step, rates in facts["rates made"]),
            recorded=frozenset(facts["recorded"]),
            computed=dict(facts["computed"]),
            kept=decode(facts["kept"]) if "kept" in facts else {},
        )


def weights_of(model: nn.Module) -> Named:
    """Parameters and buffers, each once (shared ones under their first name)."""
    return MappingProxyType({**dict(model.named_parameters()), **dict(model.named_buffers())})


def generators(device: torch.device) -> Named:
    """Positions of torch's own generators (dropout and the like): not privacy, but exactness."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_rng_state(device)
    return found


def set_generators(random: Named, device: torch.device) -> None:
    """Put torch's own generators where `generators` found them."""
    torch.set_rng_state(random["cpu"])
    if "device" in random:
        torch.cuda.set_rng_state(random["device"], device)


def guarantee(training: PrivateTraining) -> Guarantee:
    """The guarantee of the run's ledger, with the caveats that this run has earned."""
    folder = training.folder
    route, held = accounting.accountant(training.plan.accountant), folder.reserved
    return folder.ledger.guarantee(route, held.caveats, held.claim.trust)
