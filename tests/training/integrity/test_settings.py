"""The optimizer's settings follow a schedule that is known when the run begins; what follows the
data is refused before it is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.training import Update

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

STEPS = 8


def run(
    path,
    optimizer=torch.optim.SGD,
    *,
    loop=None,
    after=None,
    make=None,
    steps=STEPS,
    update=None,
    **settings,
):
    torch.set_num_threads(1)
    net = small.model()
    settings = {"lr": 0.1} | settings
    made = optimizer(net.parameters(), **settings)
    scheduler = None if make is None else make(made)
    training = dpfy.PrivateTraining(
        net, made, small.data(), small.plan(steps), path, scheduler=scheduler, update=update
    )
    with training:
        for x, y in training.batches():
            losses = nn.functional.cross_entropy(net(x), y, reduction="none")
            if loop is not None:
                loop(training, x, losses.detach())
            training.step(losses)
            if after is not None and training.boundary:
                after(training, x, losses.detach())
    return training


FOLLOWING = {
    "lr": (torch.optim.SGD, {}, lambda g, x, losses: g.update(lr=float(losses.mean()))),
    "weight decay": (
        torch.optim.SGD,
        {},
        lambda g, x, losses: g.update(weight_decay=float(x[0, 0])),
    ),
    "momentum": (
        torch.optim.SGD,
        {"momentum": 0.9},
        lambda g, x, losses: g.update(momentum=float(losses.max()) / 100),
    ),
    "dampening": (
        torch.optim.SGD,
        {"momentum": 0.9},
        lambda g, x, losses: g.update(dampening=float(losses.max()) / 100),
    ),
    "eps": (torch.optim.Adam, {}, lambda g, x, losses: g.update(eps=float(losses.min()))),
    "betas": (
        torch.optim.Adam,
        {},
        lambda g, x, losses: g.update(betas=(float(losses.min()) % 1, 0.999)),
    ),
    "one bit": (
        torch.optim.SGD,
        {},
        lambda g, x, losses: g.update(nesterov=False, maximize=bool(losses.mean() > 0)),
    ),
    "one unit in the last place": (
        torch.optim.SGD,
        {},
        lambda g, x, losses: g.update(lr=0.10000000000000002),
    ),
    "a setting of its own": (
        torch.optim.SGD,
        {},
        lambda g, x, losses: g.update(scale=float(losses.mean())),
    ),
}


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize("first", [1, STEPS // 2, STEPS - 1])
def test_a_setting_that_follows_the_batch_is_refused_before_it_moves_a_weight(
    tmp_path, name, first
):
    kind, settings, change = FOLLOWING[name]
    weights = []

    def after(training, x, losses):
        if training.steps_done == first:
            weights.append([p.detach().clone() for p in training.model.parameters()])
            change(training.optimizer.param_groups[0], x, losses)
            weights.append(training)

    with pytest.raises(
        InvalidInput,
        match=r"optimizer\.\w+: got 'a value at step \d+ that was changed outside of the schedule",
    ):
        run(tmp_path / "run", kind, after=after, **settings)
    before, training = weights
    assert training.steps_done == first
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize("step", [1, 5])
def test_a_value_is_put_in_no_message(tmp_path, step):
    seen = []

    def after(training, x, losses):
        if training.steps_done == step:
            seen.append(float(x[0, 0]))
            training.optimizer.param_groups[0]["weight_decay"] = seen[0]

    with pytest.raises(InvalidInput) as refused:
        run(tmp_path / "run", after=after)
    assert f"{seen[0]:.3g}" not in str(refused.value)


def test_a_scheduler_that_the_run_was_not_given_is_refused_with_the_way_out(tmp_path):
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.4)
    scheduler = rates.LambdaLR(sgd, lambda epoch: 0.5**epoch)

    def train():
        with dpfy.PrivateTraining(
            net, sgd, small.data(), small.plan(4), tmp_path / "run"
        ) as training:
            for x, y in training.batches():
                training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
                scheduler.step()

    with pytest.raises(
        InvalidInput, match=r"optimizer\.lr.*PrivateTraining\(\.\.\., scheduler=scheduler\)"
    ):
        train()


def test_a_plateau_stepped_on_the_batchs_loss_is_refused(tmp_path):
    held = {}

    def make(optimizer):
        held["plateau"] = rates.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    def outside(training, x, losses):
        held["plateau"].step(float(losses.mean()))

    with pytest.raises(InvalidInput, match=r"optimizer\.lr"):
        run(tmp_path / "outside", after=outside, make=make, steps=30)

    def given(training, x, losses):
        training.schedule(source="public", loss=float(losses.mean()))

    with pytest.raises(InvalidInput, match="computed from the data"):
        run(tmp_path / "given", after=given, make=lambda o: rates.ReduceLROnPlateau(o))


def test_a_scheduler_class_that_follows_the_losses_is_refused(tmp_path):
    held = {"loss": 1.0}

    class Following(rates.LRScheduler):
        def get_lr(self):
            return [base / held["loss"] for base in self.base_lrs]

    def after(training, x, losses):
        held["loss"] = float(losses.mean())

    with pytest.raises(InvalidInput, match=r"optimizer\.lr"):
        run(tmp_path / "run", after=after, make=Following)


def test_a_scheduler_whose_fields_are_set_in_the_loop_is_refused(tmp_path):
    def after(training, x, losses):
        training.schedules.all[0].base_lrs[0] = float(losses.mean())

    with pytest.raises(InvalidInput, match=r"optimizer\.lr"):
        run(tmp_path / "run", after=after, make=lambda o: rates.LambdaLR(o, lambda step: 0.9**step))


@pytest.mark.parametrize("update", [None, Update(schedule=lambda step: 1.0)])
def test_a_hook_that_changes_a_setting_for_one_step_is_refused(tmp_path, update):
    now = {}

    def early(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] = now["loss"]

    def late(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] = 0.1

    def after(training, x, losses):
        now["loss"] = float(losses.mean())
        if training.steps_done == 2:
            training.optimizer.register_step_pre_hook(early)
            training.optimizer.register_step_post_hook(late)

    with pytest.raises(InvalidInput, match="changed by a hook"):
        run(tmp_path / "run", after=after, update=update)


def test_settings_that_change_inside_of_torchs_own_step_end_the_run(tmp_path):
    def after(training, x, losses):
        optimizer = training.optimizer
        real = type(optimizer).step

        def step(closure=None):
            optimizer.param_groups[0]["lr"] = float(losses.mean())
            return real(optimizer, closure)

        optimizer.step = step

    with pytest.raises(DpfyError, match=r"changed by (a hook|the optimizer itself)"):
        run(tmp_path / "run", after=after)


def warm(optimizer):
    return rates.SequentialLR(
        optimizer,
        [rates.LinearLR(optimizer, 0.1, total_iters=3), rates.ExponentialLR(optimizer, 0.9)],
        [3],
    )


BUILT_IN = {
    "lambda": lambda o: rates.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: rates.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: rates.StepLR(o, 2),
    "multi step": lambda o: rates.MultiStepLR(o, [2, 5]),
    "constant": lambda o: rates.ConstantLR(o, 0.5, 3),
    "linear": lambda o: rates.LinearLR(o, 0.1, total_iters=5),
    "exponential": lambda o: rates.ExponentialLR(o, 0.9),
    "polynomial": lambda o: rates.PolynomialLR(o, 8, 2.0),
    "cosine": lambda o: rates.CosineAnnealingLR(o, 8),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3, 2),
    "cyclic": lambda o: rates.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "cyclic of a function": lambda o: rates.CyclicLR(
        o, 0.01, 0.1, 2, scale_fn=lambda x: 0.5, scale_mode="cycle"
    ),
    "triangular": lambda o: rates.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2"),
    "one cycle": lambda o: rates.OneCycleLR(o, 0.4, total_steps=STEPS),
    "three phases": lambda o: rates.OneCycleLR(
        o, 0.4, total_steps=STEPS, three_phase=True, anneal_strategy="linear"
    ),
    "warm": warm,
    "chained": lambda o: rates.ChainedScheduler(
        [rates.ConstantLR(o, 0.5, 3), rates.MultiStepLR(o, [2, 5, 5])], o
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=4),
    "two": lambda o: [rates.ExponentialLR(o, 0.9), rates.StepLR(o, 3)],
    "every": lambda o: __import__("dpfy.training.schedulers").training.schedulers.Every(
        rates.StepLR(o, 1), 3
    ),
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_every_scheduler_of_torch_is_accepted_and_keeps_its_rates(tmp_path, name, optimizer):
    more = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    seen = {}

    def loop(training, x, losses):
        group = training.optimizer.param_groups[0]
        seen[training.steps_done] = float(group["lr"]), group.get("momentum"), group.get("betas")

    run(tmp_path / "run", optimizer, make=BUILT_IN[name], loop=loop, **more)
    net = small.model()
    alone = optimizer(net.parameters(), lr=0.1, **more)
    schedulers, wanted = BUILT_IN[name](alone), {}
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    for step in range(STEPS):
        group = alone.param_groups[0]
        wanted[step] = float(group["lr"]), group.get("momentum"), group.get("betas")
        alone.step()
        for one in schedulers:
            if (step + 1) % getattr(one, "steps", 1) == 0:
                getattr(one, "scheduler", one).step()
    assert seen == {step: wanted[step] for step in seen}, "a step without records has no batch"
    assert len(seen) >= STEPS - 2


def test_a_schedule_of_several_groups_is_accepted(tmp_path):
    net = small.model()
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[3].parameters()}]
    adam = torch.optim.Adam(groups, lr=0.1)
    scheduler = rates.OneCycleLR(adam, [0.1, 0.4], total_steps=STEPS)
    with dpfy.PrivateTraining(
        net, adam, small.data(), small.plan(STEPS), tmp_path / "run", scheduler=scheduler
    ) as training:
        for x, y in training.batches():
            training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))


class Counting(torch.optim.SGD):
    """Keeps a count among its settings, and a rate that falls with it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


def test_an_optimizer_of_ones_own_may_change_its_settings_in_its_step_and_is_resumed(tmp_path):
    def die(training, x, losses):
        if training.steps_done == 4:
            raise KeyboardInterrupt

    def place(name):
        return dpfy.Run(tmp_path / name, seed=3, resume=True, checkpoint_every=0.0)

    whole = run(place("whole"), Counting)
    assert whole.optimizer.param_groups[0]["k"] == STEPS
    with pytest.raises(KeyboardInterrupt):
        run(place("cut"), Counting, after=die)
    cut = run(place("cut"), Counting)
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True)
    )


def test_a_plateau_beside_a_schedule_of_the_step_is_repeated(tmp_path):
    def make(optimizer):
        return [
            rates.ExponentialLR(optimizer, 0.9),
            rates.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        ]

    def after(training, x, losses):
        if training.steps_done % 2 == 0:
            training.schedule(source="public", error=1.0)

    training = run(tmp_path / "run", make=make, after=after)
    assert training.optimizer.param_groups[0]["lr"] < 0.1 * 0.9**STEPS

    def also(training, x, losses):
        after(training, x, losses)
        training.optimizer.param_groups[0]["weight_decay"] = float(losses.mean())

    with pytest.raises(InvalidInput, match=r"scheduler: got .stepped"):
        run(tmp_path / "also", make=make, after=also)


@pytest.mark.parametrize("settings", [{}, {"initial_accumulator_value": 0.5, "lr_decay": 0.1}])
def test_a_new_adagrad_is_taken_and_a_used_one_is_not(tmp_path, settings):
    run(tmp_path / "new", torch.optim.Adagrad, **settings)
    net = small.model()
    adagrad = torch.optim.Adagrad(net.parameters(), lr=0.1, **settings)
    used = adagrad.state[net[0].bias]
    for key, value in (("sum", 0.25), ("step", 1.0)):
        kept = used[key].clone()
        used[key].view(-1)[0].add_(value)
        with pytest.raises(InvalidInput, match="optimizer: got 'Adagrad with a state'"):
            dpfy.PrivateTraining(net, adagrad, small.data(), small.plan(2), tmp_path / "used")
        used[key].copy_(kept)
    used["more"] = torch.zeros(1)
    with pytest.raises(InvalidInput, match="optimizer: got 'Adagrad with a state'"):
        dpfy.PrivateTraining(net, adagrad, small.data(), small.plan(2), tmp_path / "used")


@pytest.mark.parametrize("settings", [{"lr": torch.tensor(0.1)}, {"lr": torch.tensor([0.1])}])
def test_a_tensor_as_learning_rate_is_taken_or_refused_before_the_charge(tmp_path, settings):
    """A report holds the scheduler's first rate as it is: a tensor would end the run after its last
    step.
    """
    run(tmp_path / "plain", steps=2, foreach=False, **settings)
    with pytest.raises(
        InvalidInput, match=r"optimizer.lr: got 'a tensor that a scheduler starts from'.*lr=0.1"
    ):
        run(tmp_path / "run", make=lambda sgd: rates.StepLR(sgd, 1), foreach=False, **settings)
    assert not (tmp_path / "run").exists()


def test_tensors_within_a_setting_are_refused_before_the_charge(tmp_path):
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    with pytest.raises(InvalidInput, match=r"optimizer.betas: got 'tensors'; give plain numbers"):
        run(tmp_path / "run", torch.optim.Adam, foreach=False, betas=betas)
    assert not (tmp_path / "run").exists()
