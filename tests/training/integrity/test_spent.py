"""A step whose noise was made is spent: no error, no restart and no other code brings the same
noise onto another sum.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import dpfy
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.training import Update
from dpfy.training.integrity.journal import Journal

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

RUNTIME = dpfy.Runtime(max_physical_batch=12)


def plain_losses(net, x, y):
    return functional.cross_entropy(net(x), y, reduction="none")


def other_losses(net, x, y):
    return functional.cross_entropy(net(x), y, reduction="none") + net(x).square().mean(1)


def all_steps(training, net, losses=plain_losses):
    for x, y in training.batches():
        training.step(losses(net, x, y))


class Killed(BaseException):
    """Stands for the death of the process."""


def released_by(
    path,
    losses=plain_losses,
    *,
    die=None,
    net=None,
    update=None,
    clean=False,
    every=1e9,
    steps=8,
    adjust=None,
    device="cpu",
):
    """Train, or resume, and return what was released at each step; `die` after so many steps, with
    or without a last checkpoint.
    """
    torch.set_num_threads(1)
    net = (net or small.model()).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = {}
    run = dpfy.Run(path, resume=True, seed=5, checkpoint_every=every)
    training = dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(steps), run, runtime=RUNTIME, update=update
    )

    def look(*_):
        seen[training.steps_done] = torch.cat(
            [p.grad.reshape(-1).clone() for p in net.parameters()]
        )

    handle = optimizer.register_step_pre_hook(look)
    try:
        with training:
            for x, y in training.batches():
                if adjust is not None:
                    adjust(training)
                training.step(losses(net, x, y))
                if training.steps_done == die:
                    if not clean:
                        training._status.reason = "killed"  # nothing is written any more
                    raise Killed
    except Killed:
        pass
    finally:
        handle.remove()
    return seen


def test_an_error_after_the_noise_stops_the_run(tmp_path):
    """An optimizer hook that raises, and a loop that goes on: the step is not made again, neither
    is anything else.
    """
    net, released, failures = small.model(), [], []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def hook(*_):
        released.append(net[0].weight.grad.clone())
        if len(released) == 3:
            raise RuntimeError("a logger is down")

    optimizer.register_step_pre_hook(hook)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(), dpfy.Run(tmp_path / "run", seed=1)
    ) as training:
        for _ in range(3):
            try:
                for x, y in training.batches():
                    training.step(plain_losses(net, x, y))
            except (RuntimeError, Unsupported) as error:
                failures.append(error)
        assert len(released) == 3
        assert [type(e) for e in failures] == [RuntimeError, Unsupported, Unsupported]
        assert "step 2 failed after its noise was made" in str(failures[1])
        assert "resume=True" in str(failures[1])
        for call in (
            training.finish,
            training.save,
            training.batches().__next__,
            lambda: training.record(source="public", a=1.0),
        ):
            with pytest.raises(Unsupported, match="stopped"):
                call()
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("place", ["optimizer", "average", "project", "noise"])
def test_whatever_fails_between_noise_and_the_end_of_a_step(tmp_path, monkeypatch, place, error):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 2:
            raise error("on purpose")

    update = Update(average=0.5, project=fail if place == "project" else None)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(4), tmp_path / "run", update=update
    ) as training:
        if place == "optimizer":
            optimizer.register_step_post_hook(fail)
        elif place == "average":
            real = type(update.averaging).update
            monkeypatch.setattr(
                type(update.averaging), "update", lambda self, *a: (fail(), real(self, *a))
            )
        elif place == "noise":
            stream = training.private_step.stream
            failing = type(
                "Failing", (), {"release": lambda self, *a: (stream.release(*a), fail())[0]}
            )()
            object.__setattr__(
                training, "private_step", dataclasses.replace(training.private_step, stream=failing)
            )
        with pytest.raises(error):
            all_steps(training, net)
        with pytest.raises(Unsupported, match="step 1 failed after its noise was made"):
            next(training.batches())
    assert training.steps_done == 1


def test_an_empty_step_that_fails_is_spent_too(tmp_path):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    plan = dpfy.dpsgd(small.RECORDS, 1e-6, steps=3).with_noise(1.0, delta=1e-3)
    with dpfy.PrivateTraining(net, optimizer, small.data(), plan, tmp_path / "run") as training:
        with pytest.raises(ZeroDivisionError):
            next(training.batches())
        with pytest.raises(Unsupported, match="step 0"):
            next(training.batches())


def test_a_refusal_that_is_caught_is_not_forgotten(tmp_path):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(small.FEATURES, small.CLASSES)

        def forward(self, x):
            out = self.head(x)
            return out - out.mean(0)

    net, seen = Centred(), []
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    training = dpfy.PrivateTraining(
        net, sgd, small.data(), small.plan(4), dpfy.Run(tmp_path / "run", seed=1)
    )

    def body():
        with training:
            for _ in range(2):
                try:
                    all_steps(training, net)
                except Unsupported as refusal:
                    seen.append(str(refusal))

    with pytest.raises(Unsupported):
        body()
    assert len(seen) == 2
    assert training.steps_done == 0
    assert not (tmp_path / "run" / "privacy.json").exists()


def test_a_step_that_fails_while_it_sums_is_not_added_twice(tmp_path, monkeypatch):
    """An error inside the sum of a piece: the piece cannot be added again, and the step begins
    anew.
    """
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = dpfy.Run(tmp_path / "run", seed=1)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(2), run, runtime=RUNTIME
    ) as training:
        batches = training.batches()
        x, y = next(batches)
        real = training._pieces.add
        monkeypatch.setattr(
            training._pieces, "add", lambda *a: (real(*a), (_ for _ in ()).throw(MemoryError()))[0]
        )
        with pytest.raises(MemoryError):
            training.step(plain_losses(net, x, y))
        with pytest.raises(InvalidInput, match="once"):
            training.step(plain_losses(net, x, y))
        assert training.steps_done == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_killed_run_repeats_its_steps_bit_for_bit(tmp_path, device):
    whole = released_by(tmp_path / "whole", device=device)
    first = released_by(tmp_path / "cut", die=5, device=device)
    again = released_by(tmp_path / "cut", device=device)
    assert list(first) == [0, 1, 2, 3, 4]
    assert list(again) == list(range(8))  # from the checkpoint of step 0
    for step, value in {**first, **again}.items():
        assert torch.equal(value, whole[step])
    for step, value in first.items():
        assert torch.equal(value, again[step])


def test_a_clean_end_leaves_nothing_to_repeat(tmp_path):
    """Ctrl-C between or inside steps writes a checkpoint: nothing is made twice, and the result is
    the uninterrupted one's.
    """
    whole = released_by(tmp_path / "whole")
    first = released_by(tmp_path / "cut", die=5, clean=True)
    again = released_by(tmp_path / "cut")
    assert list(again) == [5, 6, 7]
    assert all(torch.equal(value, whole[step]) for step, value in {**first, **again}.items())

    def interrupted(net, x, y):
        losses = plain_losses(net, x, y)
        if interrupted.left == 0:
            raise Killed
        interrupted.left -= 1
        return losses

    interrupted.left = 7  # in the middle of a logical batch of two pieces
    first = released_by(tmp_path / "inside", interrupted)
    again = released_by(tmp_path / "inside")
    assert not first.keys() & again.keys()
    assert all(torch.equal(value, whole[step]) for step, value in {**first, **again}.items())


class Net(nn.Module):
    """A forward pass, as it was when the run began."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.gain = (
            nn.Linear(small.FEATURES, 16),
            nn.Linear(16, small.CLASSES),
            1.0,
        )

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.gain


def changed_net():
    """Another forward pass in a class of the same name."""

    class Changed(Net):
        def forward(self, x):
            return self.second(torch.relu(self.first(x))) * self.gain

    Changed.__name__, Changed.__qualname__ = Net.__name__, Net.__qualname__
    return Changed()


def louder_net():
    net = Net()
    net.gain = 20.0
    return net


@pytest.mark.parametrize(
    ("began", "resumed", "match"),
    [
        ({}, {"losses": other_losses}, "resume losses"),
        ({}, {"losses": lambda net, x, y: -plain_losses(net, x, y)}, "resume losses"),
        ({"net": Net}, {"net": changed_net}, "resume model"),
        ({"net": Net}, {"net": louder_net}, "resume model"),
        ({}, {"update": Update(schedule=lambda step: 10.0)}, "resume schedule"),
        (
            {"update": Update(schedule=lambda s: 1.0)},
            {"update": Update(schedule=lambda s: 1.0 + (s > 6))},
            "resume schedule",
        ),
        (
            {},
            {"adjust": lambda t: t.optimizer.param_groups[0].update(lr=2.0)},
            r"optimizer\.lr: got .a value at step 0 that was changed",
        ),
        ({}, {"update": Update(project=lambda net: None)}, "resume projection"),
    ],
    ids=["loss", "sign", "forward", "setting", "schedule", "later schedule", "rates", "projection"],
)
def test_a_resumed_run_that_computes_something_else_is_refused_before_it_releases(
    tmp_path, began, resumed, match
):
    def make(given):
        return {k: v() if k == "net" else v for k, v in given.items()}

    first = released_by(tmp_path / "run", die=5, **make(began))
    assert len(first) == 5
    again = {}
    with pytest.raises(InvalidInput, match=match):
        again = released_by(tmp_path / "run", **make(resumed))
    assert again == {}
    right = released_by(
        tmp_path / "run", **make(began)
    )  # the right one still resumes, to the same bits
    assert all(torch.equal(value, right[step]) for step, value in first.items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "losses", [other_losses, lambda *batch: -plain_losses(*batch)], ids=["other", "sign"]
)
def test_the_journal_alone_finds_another_loss(tmp_path, losses, device):
    """Where no recording was kept: the sums are compared, and nothing is released."""
    first = released_by(tmp_path / "run", die=5, device=device)
    (tmp_path / "run" / "checkpoint" / "watch.json").unlink()
    with pytest.raises(InvalidInput, match="resume step 0: got 'another sum of gradients'"):
        released_by(tmp_path / "run", losses, device=device)
    (tmp_path / "run" / "checkpoint" / "watch.json").unlink()
    right = released_by(tmp_path / "run", device=device)
    assert all(torch.equal(value, right[step]) for step, value in first.items())


def test_a_checkpoint_in_the_middle_of_repeating_keeps_the_rest_bound(tmp_path):
    """Killed after 6 steps, resumed and left after 2 of them: the other four are still what they
    were.
    """
    first = released_by(tmp_path / "run", die=6)
    released_by(tmp_path / "run", die=2, clean=True)
    (tmp_path / "run" / "checkpoint" / "watch.json").unlink()
    with pytest.raises(InvalidInput, match="resume step 2"):
        released_by(tmp_path / "run", other_losses)
    (tmp_path / "run" / "checkpoint" / "watch.json").unlink()
    again = released_by(tmp_path / "run")
    assert list(again) == [2, 3, 4, 5, 6, 7]
    assert all(torch.equal(first[step], again[step]) for step in (2, 3, 4, 5))


def test_a_change_in_the_middle_is_found_at_the_first_step_that_differs(tmp_path):
    """The resumed run is the same for two steps, then another: the differing step is not released,
    and the run is dead.
    """
    first = released_by(tmp_path / "run", die=6)
    net, seen = small.model(), {}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    run = dpfy.Run(tmp_path / "run", resume=True, checkpoint_every=1e9)
    with dpfy.PrivateTraining(
        net, sgd, small.data(), small.plan(8), run, runtime=RUNTIME
    ) as training:
        sgd.register_step_pre_hook(lambda *_: seen.update({training.steps_done: True}))
        with pytest.raises(InvalidInput, match="resume step 3"):
            all_steps(
                training,
                net,
                lambda *batch: (plain_losses if training.steps_done < 3 else other_losses)(*batch),
            )
        with pytest.raises(Unsupported, match="stopped"):
            next(training.batches())
    assert list(seen) == [0, 1, 2]
    assert len(first) == 6


def test_a_loss_given_to_fit_is_compared_before_anything_is_computed(tmp_path):
    def train(loss):
        net = small.model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        return dpfy.fit(
            net,
            small.data(),
            plan=small.plan(6),
            optimizer=sgd,
            loss=loss,
            run=dpfy.Run(tmp_path / "run", resume=True),
        )

    calls = []

    def interrupted(outputs, targets):
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        if STOP and len(calls) > 3:
            raise KeyboardInterrupt
        calls.append(1)
        return losses

    STOP = [True]
    with pytest.raises(KeyboardInterrupt) as caught:
        train(interrupted)
    assert "resume it with" in "".join(caught.value.__notes__)
    STOP.clear()
    with pytest.raises(InvalidInput, match="resume losses"):
        train("cross_entropy")
    with pytest.raises(InvalidInput, match="resume losses"):
        train(
            lambda outputs, targets: (
                2 * functional.cross_entropy(outputs, targets, reduction="none")
            )
        )
    assert train(interrupted).steps == 6


def test_the_journal_is_private_short_and_erased(tmp_path):
    path = tmp_path / "run"
    released_by(path, die=5)
    journal = path / "checkpoint" / "steps.jsonl"
    assert journal.stat().st_mode & 0o777 == 0o600
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["rates"] == [0.1] for row in rows)
    released_by(path, die=7, every=0.0)  # a checkpoint at every step: nothing is left to repeat
    assert len(journal.read_text().splitlines()) <= 1
    released_by(path)
    assert not journal.exists()


def test_a_torn_last_line_is_of_noise_that_was_never_made(tmp_path):
    whole = released_by(tmp_path / "whole")
    released_by(tmp_path / "run", die=4)
    journal = tmp_path / "run" / "checkpoint" / "steps.jsonl"
    content = journal.read_bytes()
    os.truncate(journal, len(content) - 9)
    (progress,) = journal.parent.glob("reached-*")
    progress.rename(journal.parent / "reached-0-3")  # as it is when a line is cut short
    released_by(tmp_path / "run", die=6)
    assert [json.loads(line)["step"] for line in journal.read_text().splitlines()] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    again = released_by(tmp_path / "run")
    assert all(torch.equal(value, whole[step]) for step, value in again.items())


def test_a_repeated_step_keeps_its_learning_rates_and_its_sum(tmp_path):
    randomness = Randomness.for_tests(1)

    def bound(rates, total=5):
        journal = Journal(tmp_path, randomness, 0, due=(tmp_path / "steps.jsonl").exists())
        try:
            journal.bind(0, torch.tensor(total), rates)
        finally:
            journal.close()

    bound([0.1, 0.2])
    bound([0.1, 0.2])
    for other in ([0.1, 0.3], [0.1], [0.2, 0.1]):
        with pytest.raises(InvalidInput, match="learning rate"):
            bound(other)
    with pytest.raises(InvalidInput, match="another sum"):
        bound([0.1, 0.2], total=6)
    bound([0.1, 0.2])


@pytest.mark.parametrize(
    "damage",
    [b"nonsense\n", b'{"step": 0}\n', b"[1]\n", b'{"step": "x", "rates": [], "sum": ""}\n'],
)
def test_a_damaged_journal_is_refused(tmp_path, damage):
    released_by(tmp_path / "run", die=4)
    journal = tmp_path / "run" / "checkpoint" / "steps.jsonl"
    journal.write_bytes(damage + journal.read_bytes())
    with pytest.raises(Corrupt, match=r"steps\.jsonl"):
        released_by(tmp_path / "run")


def test_leaving_early_says_so_and_how_to_go_on(tmp_path):
    def leave():
        net = small.model()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        with dpfy.PrivateTraining(
            net, sgd, small.data(), small.plan(), tmp_path / "run"
        ) as training:
            for x, y in training.batches():
                training.step(plain_losses(net, x, y))
                if training.steps_done == 2:
                    break

    with pytest.warns(
        UserWarning, match=r"unfinished, 2 of 30 steps made.*secrets are kept.*resume=True"
    ) as caught:
        leave()
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
