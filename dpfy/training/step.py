"""One private step: from the bounded sum of a logical batch to the next state. Bind, noise, divide,
move.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dpfy.core.values import Bounded
from dpfy.gradients.engine import Grads
from dpfy.noise.stream import NoiseStream
from dpfy.plan.recipe import CODEC, EXACT, Plan
from dpfy.training.integrity import guard
from dpfy.training.integrity.guard import Guard
from dpfy.training.integrity.journal import Journal
from dpfy.training.integrity.run_state import RunStatus
from dpfy.training.integrity.settings import Settings
from dpfy.training.integrity.state import TrainState
from dpfy.training.parallel.data_parallel import SingleDevice
from dpfy.training.parallel.read_only_run import ReadOnlyRun
from dpfy.training.run import TrainingRun
from dpfy.training.update import Rates, Update, hand_over


def stream_of(plan: Plan, folder: TrainingRun | ReadOnlyRun) -> NoiseStream:
    """The noise that the run was billed for: the plan's strategy, scale and sampling, under the
    run's secret and event.
    """
    recipe = plan.recipe
    return NoiseStream(
        recipe.strategy,
        plan.scale,
        folder.randomness,
        divisor=recipe.expected_batch,
        in_place=True,
        event=folder.reserved.claim.event,
        exact=recipe.noise == EXACT,
    )


@dataclass(frozen=True)
class PrivateStep:
    """Takes a state and a bounded sum to the next state.

    Guarantees: noise is made once the step's sum is bound in the journal, for a model that nobody
    else has changed, and only with the permit of a run that is billed for good; of several ranks
    none makes any before all stand at the same step. From then on the run counts as stopped, until
    its owner has the next state: no error, wherever it comes from, lets the step be made again
    here.
    """

    plan: Plan
    folder: TrainingRun | ReadOnlyRun
    model: nn.Module
    stream: NoiseStream
    rates: Rates
    settings: Settings
    rule: Update
    guard: Guard
    journal: Journal
    status: RunStatus
    parallel: SingleDevice = field(default_factory=SingleDevice)

    def __call__(self, now: TrainState, total: Bounded[Grads]) -> TrainState:
        """Make the step that `now` stands before. The mean is over the expected batch, never the
        realised one.
        """
        self.status.require_live()
        recipe, parameters = self.plan.recipe, self.guard.trainable
        with self.status.stop_on_error():
            self.guard.check()
            if now.schedules.all:
                now.schedules.check()
            self.settings.check(now.step)
            rates = self.rates.at(now.step, now.optimizer)
            total = self._joined(now, total, rates)
        self.status.reason = f"step {now.step} failed after its noise was made"
        into = self.parallel.grad_buffers(total.value, parameters)
        released, noise = self.stream.release(total, now.step, now.noise, self.folder.permit, into)
        released = self.parallel.gather_grads(released, parameters)
        clip = now.clip.after(released.value, recipe.expected_batch)
        hand_over(released, parameters)
        for p in self.guard.frozen:
            p.grad = None
        self.settings.move(now.step)
        now.optimizer.zero_grad(set_to_none=True)
        if now.schedules.all:
            now.schedules.advance(now.step)
            self.settings.advanced(now.step)
        if self.rule.project is not None:
            with torch.no_grad():
                self.rule.project(self.model)
        if now.average:
            self.rule.averaging.update(now.average, parameters, now.step)
        self.guard.accept(
            noise, look=guard.looks(now.step + 1, recipe.steps, self.folder.randomness)
        )
        return now.after(
            noise, clip, rates if now.schedules.all and now.schedules.waiting else None
        )

    def _joined(self, now: TrainState, total: Bounded[Grads], rates: list[float]) -> Bounded[Grads]:
        """Of the sum over all ranks what this one releases, once all ranks stand at this step and
        the sum is bound and billed.
        """
        parallel, step = self.parallel, now.step
        alone = parallel.world.count == 1
        if not alone:
            facts = {"learning rate": rates, "clip rule": CODEC.encode(now.clip)}
            look = guard.looks(step, self.plan.recipe.steps, self.folder.randomness)
            parallel.agree(step, facts, self.guard.trainable, look)
        sums = parallel.reduce(total.value)
        tally = parallel.tally(sums, self.folder.randomness.key("part", step, 1)[0])

        def bind() -> None:
            self.journal.bind(step, tally, rates)
            self.folder.note_begun()

        if alone:
            bind()
        else:
            parallel.world.rank0_first(f"the sum of step {step}", bind)
        return replace(total, value=sums)
