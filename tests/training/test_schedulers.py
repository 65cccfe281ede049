"""Torch's schedulers in a private run: stepped at the boundary, resumed bit for bit, named on the
card; nothing is repeated differently.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.training import Update
from dpfy.training.schedulers import decode, encode

sys.path.insert(0, str(Path(__file__).parent))
import small

STEPS = 12


def half(step: int) -> float:
    return 0.5**step


def falling(step: int, *, after: int) -> float:
    return 1.0 if step < after else 0.5


def one_cycle(optimizer):
    return rates.OneCycleLR(optimizer, max_lr=0.4, total_steps=STEPS)


def warm_cosine(optimizer):
    parts = [
        rates.LinearLR(optimizer, 0.1, total_iters=4),
        rates.CosineAnnealingLR(optimizer, T_max=STEPS - 4),
    ]
    return rates.SequentialLR(optimizer, parts, milestones=[4])


def chained(optimizer):
    return rates.ChainedScheduler(
        [rates.ConstantLR(optimizer, 0.5, 3), rates.MultiStepLR(optimizer, [2, 5, 5])], optimizer
    )


def transformers_cosine(optimizer):
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 3, STEPS)


SCHEDULERS = {
    "lambda": lambda o: rates.LambdaLR(o, half),
    "partial": lambda o: rates.LambdaLR(o, partial(falling, after=5)),
    "warm cosine": warm_cosine,
    "one cycle": one_cycle,
    "chained": chained,
    "cyclic": lambda o: rates.CyclicLR(o, 0.01, 0.1, 3),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 5),
    "multiplied": lambda o: rates.MultiplicativeLR(o, half),
    "transformers": transformers_cosine,
    "plateau": lambda o: rates.ReduceLROnPlateau(o, patience=0, factor=0.5),
}


class Stop(Exception):
    """The process dies here."""


def train(
    path,
    make,
    *,
    die=None,
    at="step",
    every=0.0,
    net=None,
    loop=None,
    dying=None,
    wrap=lambda s: s,
    **settings,
):
    """Trains with Adam; dies after `die` steps (at "step": right after it; "asked": when the next
    batch is out). Returns the weights.
    """
    torch.set_num_threads(1)
    net = net or small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler = make(optimizer) if make is not None else None
    run = dpfy.Run(path, seed=3, resume=True, checkpoint_every=every)
    runtime = dpfy.Runtime(max_physical_batch=12)
    training = dpfy.PrivateTraining(
        net,
        optimizer,
        small.data(),
        small.plan(STEPS),
        run,
        runtime=runtime,
        scheduler=wrap(scheduler),
        **settings,
    )
    seen = []
    with training:
        for x, y in training.batches():
            if at == "asked" and training.steps_done == die:
                raise Stop
            training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
            if at == "step" and training.boundary and training.steps_done == die:
                if dying is not None:
                    dying()
                raise Stop
            if training.boundary:
                seen.append(
                    (
                        training.steps_done,
                        optimizer.param_groups[0]["lr"],
                        optimizer.param_groups[0]["betas"],
                    )
                )
                if training.schedules.waiting and training.steps_done % 2 == 0:
                    training.schedule(
                        source="public", validation_loss=float(net[0].weight.detach().abs().sum())
                    )
            if loop is not None:
                loop(training, scheduler)
    return [p.detach().clone() for p in net.parameters()], seen


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def schedule_of(path):
    return small.card_of(path)["optimizer"]["schedule"]


# --- stepped at the boundary
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in SCHEDULERS if n != "plateau"])
def test_rates_are_those_that_torch_gives_to_as_many_steps(tmp_path, name):
    """Several physical batches a step: the scheduler moves once a step, not once a batch."""
    _, seen = train(tmp_path / "run", SCHEDULERS[name])
    net = small.model()
    alone = torch.optim.Adam(net.parameters(), lr=0.1)
    scheduler, wanted = SCHEDULERS[name](alone), []
    for step in range(1, STEPS + 1):
        alone.step()
        scheduler.step()
        wanted.append((step, alone.param_groups[0]["lr"], alone.param_groups[0]["betas"]))
    assert seen == wanted
    assert type(scheduler).__name__ in schedule_of(tmp_path / "run")
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_the_first_step_has_the_first_rate(tmp_path):
    """The rate of step k is the scheduler's of k: steps are bound with their rates."""
    made = []

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            made.append(self.param_groups[0]["lr"])
            return super().step(closure)

    net = small.model()
    sgd = Noting(net.parameters(), lr=1.0)
    scheduler = rates.LambdaLR(sgd, half)
    with dpfy.PrivateTraining(
        net, sgd, small.data(), small.plan(4), tmp_path / "run", scheduler=scheduler
    ) as training:
        for x, y in training.batches():
            training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
    assert made == [1.0, 0.5, 0.25, 0.125]
    assert small.card_of(tmp_path / "run")["optimizer"]["learning_rate"] == 1.0


def test_an_empty_batch_is_a_step_of_the_scheduler_too(tmp_path):
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    plan = dpfy.dpsgd(small.RECORDS, 1e-9, steps=5, clip_norm=0.5).with_noise(2.0, delta=1e-3)
    with dpfy.PrivateTraining(
        net, sgd, small.data(), plan, tmp_path / "run", scheduler=rates.LambdaLR(sgd, half)
    ) as training:
        assert list(training.batches()) == []
    assert sgd.param_groups[0]["lr"] == 0.5**5


def test_the_boundary_is_where_a_logical_batch_ends(tmp_path):
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    ends, batches = [], 0
    training = dpfy.PrivateTraining(
        net,
        sgd,
        small.data(),
        small.plan(5),
        tmp_path / "run",
        runtime=dpfy.Runtime(max_physical_batch=4),
    )
    assert not training.boundary
    with training:
        assert not training.boundary
        for x, y in training.batches():
            assert not training.boundary
            before = training.steps_done
            training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
            assert training.boundary == (training.steps_done > before)
            ends, batches = ends + [training.steps_done] * training.boundary, batches + 1
    assert ends == [1, 2, 3, 4, 5]
    assert batches > 10


# --- resumed
# ------------------------------------------------------------------------------------------------------------------------  # noqa: E501


@pytest.mark.parametrize(
    "every", [0.0, pytest.param(1e9, marks=pytest.mark.slow)], ids=["checkpoints", "journal"]
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_that_was_cut_has_the_rates_and_weights_of_one_that_was_not(tmp_path, name, every):
    whole, seen = train(tmp_path / "whole", SCHEDULERS[name], every=every)
    for die, at in ((1, "step"), (6, "step"), (7, "asked"), (STEPS, "step")):
        with pytest.raises(Stop):
            train(tmp_path / "cut", SCHEDULERS[name], die=die, at=at, every=every)
    weights, rest = train(tmp_path / "cut", SCHEDULERS[name], every=every)
    assert same(weights, whole)
    assert rest == seen[len(seen) - len(rest) :]
    models = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("whole", "cut")]
    assert models[0] == models[1]
    assert schedule_of(tmp_path / "cut") == schedule_of(tmp_path / "whole")
    rows = [(tmp_path / n / "metrics.jsonl") for n in ("whole", "cut")]
    assert [row.read_bytes() for row in rows if row.exists()] in (
        [],
        [rows[0].read_bytes()] * 2 if rows[0].exists() else [],
    )


@pytest.mark.parametrize("every", [0.0, 1e9], ids=["checkpoints", "journal"])
@pytest.mark.parametrize("name", ["lambda", "warm cosine", "plateau"])
def test_a_process_that_was_killed_leaves_a_run_that_goes_on_bit_for_bit(tmp_path, name, every):
    """SIGKILL: nothing of the process lives on but what is on disk. Before and after what the loop
    does at a boundary.
    """

    def kill(*given):
        os.kill(os.getpid(), signal.SIGKILL)

    whole, _ = train(tmp_path / "whole", SCHEDULERS[name])
    for step, after in ((4, False), (6, True), (9, False)):
        child = os.fork()
        if not child:
            try:
                at = (
                    {
                        "loop": lambda t, s, step=step: (
                            kill() if t.boundary and t.steps_done == step else None
                        )
                    }
                    if after
                    else {}
                )
                at |= {} if after else {"die": step, "dying": kill}
                train(tmp_path / "cut", SCHEDULERS[name], every=every, **at)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    weights, _ = train(tmp_path / "cut", SCHEDULERS[name], every=every)
    assert same(weights, whole)
    assert schedule_of(tmp_path / "cut") == schedule_of(tmp_path / "whole")


def test_a_plateau_is_named_with_its_metric_and_what_it_did(tmp_path):
    train(tmp_path / "run", lambda o: rates.ReduceLROnPlateau(o, patience=0, factor=0.5))
    told = schedule_of(tmp_path / "run")
    assert told.startswith("ReduceLROnPlateau(")
    assert "patience=0" in told
    assert "on validation_loss, public as declared by the caller: 0.1 at step 0" in told
    assert small.card_of(tmp_path / "run")["recorded"] == "validation_loss"


def test_a_plateaus_metric_given_after_a_checkpoint_of_the_same_step_is_not_lost(tmp_path):
    def saving(training, scheduler):
        if training.boundary and training.steps_done % 2 == 0:
            training.save()
            training.schedule(source="public", loss=1.0)

    def make(o):
        return rates.ReduceLROnPlateau(o, patience=0, factor=0.5)

    def run(path, die=None):
        net = small.model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        place = dpfy.Run(path, seed=3, resume=True, checkpoint_every=1e9)
        with dpfy.PrivateTraining(
            net, sgd, small.data(), small.plan(8), place, scheduler=make(sgd)
        ) as training:
            for x, y in training.batches():
                training.step(nn.functional.cross_entropy(net(x), y, reduction="none"))
                saving(training, None)
                if training.steps_done == die:
                    raise Stop
        return [p.detach().clone() for p in net.parameters()]

    whole = run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "cut", die=4)
    assert same(run(tmp_path / "cut"), whole)


OTHERS = {
    "none": None,
    "function": lambda o: rates.LambdaLR(o, lambda step: 0.4**step),
    "kind": lambda o: rates.ExponentialLR(o, 0.5),
    "settings": lambda o: rates.LambdaLR(o, partial(falling, after=6)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_scheduler_is_refused_on_resume_and_the_right_one_goes_on(tmp_path, other):
    right = SCHEDULERS["partial" if other == "settings" else "lambda"]
    whole, _ = train(tmp_path / "whole", right)
    with pytest.raises(Stop):
        train(tmp_path / "run", right, die=5)
    with pytest.raises(
        InvalidInput,
        match="resume scheduler: got 'another scheduler'; must be what the run was started with",
    ):
        train(tmp_path / "run", OTHERS[other])
    assert same(train(tmp_path / "run", right)[0], whole)


def test_a_table_behind_a_lambda_is_part_of_it(tmp_path):
    def by(table):
        return lambda o: rates.LambdaLR(o, lambda step: table[step])

    with pytest.raises(Stop):
        train(tmp_path / "run", by([1.0, 0.5] * 7), die=5)
    with pytest.raises(InvalidInput, match="resume scheduler"):
        train(tmp_path / "run", by([1.0, 0.5] * 6 + [0.5, 1.0]))


def test_a_setting_behind_an_object_is_part_of_it(tmp_path):
    class Factor:
        def __init__(self, base):
            self.base = base

        def __call__(self, step):
            return self.base**step

    with pytest.raises(Stop):
        train(tmp_path / "run", lambda o: rates.LambdaLR(o, Factor(0.9)), die=5)
    with pytest.raises(InvalidInput, match="resume scheduler"):
        train(tmp_path / "run", lambda o: rates.LambdaLR(o, Factor(0.8)))
    train(tmp_path / "run", lambda o: rates.LambdaLR(o, Factor(0.9)))


def test_a_function_that_gives_other_rates_in_another_life_is_refused(tmp_path):
    class Life:
        now = 1.0

    def make(o):
        return rates.LambdaLR(o, lambda step: (Life.now if step else 1.0) * 0.9**step)

    with pytest.raises(Stop):
        train(tmp_path / "run", make, die=5, at="asked")
    Life.now = 0.5
    with pytest.raises(InvalidInput, match="resume scheduler"):
        train(tmp_path / "run", make)


@pytest.mark.parametrize("inside", [False, True])
def test_a_function_that_follows_the_losses_is_refused(tmp_path, inside):
    class Loss:
        now = 1.0

    def make(o):
        one = rates.LambdaLR(o, lambda step: 1.0 / Loss.now)
        return rates.SequentialLR(o, [one, rates.ConstantLR(o)], milestones=[8]) if inside else one

    def loop(training, scheduler):
        Loss.now = float(training._seen._steps[-1][-1].mean())

    with pytest.raises(
        InvalidInput, match="a function that gives another rate than when the run began"
    ):
        train(tmp_path / "run", make, loop=loop)


# --- loops that step a scheduler themselves
# ------------------------------------------------------------------------------------------


def stepping(training, scheduler):
    if training.boundary:
        scheduler.step()


def test_a_loop_that_steps_a_scheduler_that_the_run_was_not_given_is_refused(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"optimizer\.lr.*give the scheduler to the run: PrivateTraining"
    ):
        train(tmp_path / "run", SCHEDULERS["lambda"], wrap=lambda s: None, loop=stepping)
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize(
    "make",
    [lambda o: rates.LambdaLR(o, lambda step: 1.0), lambda o: rates.ReduceLROnPlateau(o)],
    ids=["flat", "plateau"],
)
def test_a_scheduler_whose_rates_did_not_move_yet_is_found_on_resume(tmp_path, make):
    held = []

    def loop(training, scheduler):
        held.append(scheduler)

    with pytest.raises(Stop):
        train(tmp_path / "run", make, wrap=lambda s: None, loop=loop, die=5, at="asked")
    with pytest.raises(InvalidInput, match="resume scheduler: got 'one that the run was not given"):
        train(tmp_path / "run", make, wrap=lambda s: None, loop=loop)
    train(tmp_path / "run", None)


def test_other_settings_that_a_loop_changes_are_refused(tmp_path):
    def decaying(training, scheduler):
        if training.boundary:
            training.optimizer.param_groups[0]["weight_decay"] = training.steps_done / 10

    with pytest.raises(InvalidInput, match=r"optimizer\.weight_decay"):
        train(tmp_path / "run", None, loop=decaying, die=5, at="asked")


def test_a_scheduler_of_the_run_is_stepped_by_the_run_alone(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"scheduler: got .*take scheduler\.step\(\).* out of the loop"
    ):
        train(tmp_path / "twice", SCHEDULERS["lambda"], loop=stepping)
    with pytest.raises(InvalidInput, match="scheduler: got"):
        train(
            tmp_path / "set",
            SCHEDULERS["lambda"],
            loop=lambda t, s: t.optimizer.param_groups[0].update(lr=3.0),
        )


# --- what is refused before anything is reserved
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda o: "cosine", "scheduler: got 'str'; must be a scheduler of torch"),
        (
            lambda o: rates.LambdaLR(torch.optim.SGD(small.model().parameters(), 0.1), half),
            "of another optimizer",
        ),
        (lambda o: rates.OneCycleLR(o, 0.1, total_steps=5), "make it with total_steps=12"),
        (
            lambda o: rates.LambdaLR(o, lambda step: [1.0, 0.5, 0.25][step]),
            "a function without a value at 3",
        ),
    ],
)
def test_what_is_no_scheduler_of_the_run_is_refused_before_anything_is_reserved(
    tmp_path, make, match
):
    with pytest.raises(InvalidInput, match=match):
        train(tmp_path / "run", make)
    assert not (tmp_path / "run").exists()


def test_fit_takes_a_scheduler(tmp_path):
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    dpfy.fit(
        net,
        small.data(),
        plan=small.plan(3),
        optimizer=sgd,
        run=tmp_path / "run",
        scheduler=rates.LambdaLR(sgd, half),
    )
    assert sgd.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert schedule_of(tmp_path / "run") == "LambdaLR(half)"
    plateau = rates.ReduceLROnPlateau(sgd)
    with pytest.raises(Unsupported, match="ReduceLROnPlateau in fit"):
        dpfy.fit(
            net,
            small.data(),
            plan=small.plan(3),
            optimizer=sgd,
            scheduler=plateau,
            update=Update(public_state=True),
        )


def test_two_rules_of_one_rate_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match="two rules of one learning rate"):
        train(tmp_path / "run", SCHEDULERS["lambda"], update=Update(schedule=half))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "takes one metric"),
        ({"a": 1.0, "b": 2.0}, "takes one metric"),
        ({"a": torch.ones(())}, "plain number"),
    ],
)
def test_a_metric_is_one_public_number(tmp_path, given, match):
    def loop(training, scheduler):
        with pytest.raises(InvalidInput, match=match):
            training.schedule(source="public", **given)
        raise Stop

    with pytest.raises(Stop):
        train(
            tmp_path / "run",
            lambda o: rates.ReduceLROnPlateau(o),
            loop=lambda t, s: loop(t, s) if t.boundary else None,
        )


def test_a_metric_without_a_scheduler_that_waits_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="no scheduler of this run waits for a metric"):
        train(
            tmp_path / "run",
            SCHEDULERS["lambda"],
            loop=lambda t, s: t.schedule(source="public", loss=1.0) if t.boundary else None,
        )


def test_any_scheduler_that_wants_a_metric_waits_for_it(tmp_path):
    class Greedy(rates.ReduceLROnPlateau):
        def step(self, metrics, epoch=None):
            super().step(metrics, epoch)

    train(tmp_path / "run", lambda o: Greedy(o, patience=0))
    assert "Greedy(" in schedule_of(tmp_path / "run")


def test_what_the_loop_keeps_is_found_again(tmp_path):
    found = []

    def counting(training, scheduler):
        found.append(training.kept.setdefault("batches", 0))
        training.kept["batches"] += 1

    with pytest.raises(Stop):
        train(tmp_path / "run", None, loop=counting, die=6, at="asked")
    count = len(found)
    train(tmp_path / "run", None, loop=counting)
    assert found[count] == count


def test_a_state_comes_back_equal():
    from collections import Counter

    state = {
        "a": [1, 2.5, None, True, "x"],
        3: (float("inf"), {"b": Counter({4: 2})}),
        "t": torch.tensor([0.1, 0.2]),
    }
    back = decode(encode(state))
    assert torch.equal(back.pop("t"), state.pop("t"))
    assert back == state
    assert isinstance(back[3][1]["b"], Counter)
    with pytest.raises(Unsupported, match="a object in what a checkpoint keeps"):
        encode({"a": object()})
