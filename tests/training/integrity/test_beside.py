"""What changes beside the pipeline: weights, buffers, gradients, optimizer and settings are the
run's alone while it lasts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.training import Update

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

FEATURES, CLASSES = small.FEATURES, small.CLASSES


def losses_of(net, batch):
    return functional.cross_entropy(net(batch[0]), batch[1], reduction="none")


def run(
    path, between=None, *, net=None, optimizer=None, steps=6, engine="auto", update=None, after=2
):
    """Train; before the batch that follows step `after`, do something that a run must not allow."""
    net = net or small.model()
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    runtime = dpfy.Runtime(engine=engine)
    place = dpfy.Run(path, seed=3)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(steps), place, runtime=runtime, update=update
    ) as training:
        for batch in training.batches():
            if training.steps_done == after and between is not None:
                between(training)
            training.step(losses_of(net, batch))
    return training


def card(path):
    return small.card_of(path)


def weight(training):
    return next(iter(training.model.parameters()))


@torch.no_grad()
def overwrite(training):
    weight(training).copy_(small.data()[0][:16])


def own_step(training):
    x, y = small.data()
    functional.cross_entropy(training.model(x), y).backward()
    training.optimizer.step()


def load(training):
    training.model.load_state_dict(training.model.state_dict())


def through_data(training):
    weight(training).data.clamp_(-0.01, 0.01)


def swap_data(training):
    weight(training).data = small.data()[0][:16].clone()


def through_numpy(training):
    weight(training).detach().numpy()[0, 0] = 7.0


def fill_momentum(training):
    training.optimizer.state[weight(training)]["momentum_buffer"].fill_(1.0)


def new_momentum(training):
    training.optimizer.state[weight(training)]["momentum_buffer"] = torch.ones(16, FEATURES)


def momentum_data(training):
    training.optimizer.state[weight(training)]["momentum_buffer"].data.fill_(1.0)


def other_records(training):
    training.records.tensors[0].mul_(2.0)


def freeze(training):
    weight(training).requires_grad_(False)


def replace(training):
    training.model[0].weight = nn.Parameter(torch.ones(16, FEATURES))


def another_layer(training):
    training.model.append(nn.Identity())


def register(training):
    training.model.register_buffer("seen", small.data()[0][0].clone())


def more_groups(training):
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize("engine", ["loop", "batched", "bookkeeping"])
@pytest.mark.parametrize("between", [overwrite, own_step, freeze], ids=lambda f: f.__name__)
def test_every_engine_refuses_writes_between_steps(tmp_path, engine, between):
    with pytest.raises(
        DpfyError, match=r"outside of training.step|frozen|backward: called on a model"
    ):
        run(tmp_path / "run", between, engine=engine)
    assert not (tmp_path / "run" / "privacy.json").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("between", "match"),
    [
        (load, "0.weight, written to outside of training.step"),
        (
            through_data,
            "a weight or the optimizer's state written to outside of training.step through .data",
        ),
        (swap_data, "0.weight, written to outside of training.step"),
        (
            through_numpy,
            "a weight or the optimizer's state written to outside of training.step through .data",
        ),
        (
            momentum_data,
            "a weight or the optimizer's state written to outside of training.step through .data",
        ),
        (other_records, "training data written to while a run lasts"),
        (fill_momentum, "state of the optimizer"),
        (new_momentum, "state of the optimizer"),
        (replace, "a module, parameter or buffer added, replaced"),
        (another_layer, "a module, parameter or buffer added"),
        (register, "a module, parameter or buffer added"),
        (more_groups, "parameter groups of the optimizer"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_writes_between_steps_end_the_run(tmp_path, between, match):
    with pytest.raises(Unsupported, match=match):
        run(tmp_path / "run", between)
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("between", [overwrite, through_data], ids=lambda f: f.__name__)
def test_what_is_written_inside_averaged_does_not_last(tmp_path, between, average):
    """With an average the weights are put back; without one the write is found."""

    def inside(training):
        with training.averaged():
            between(training)

    if average:
        run(tmp_path / "run", inside, update=Update(average=average))
        run(tmp_path / "same", update=Update(average=average))
        assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
            tmp_path / "same" / "model.safetensors"
        ).read_bytes()
    else:
        with pytest.raises(Unsupported, match="written to outside"):
            run(tmp_path / "run", inside)


def test_without_an_average_the_counters_go_on_inside_averaged(tmp_path, monkeypatch):
    """Nothing is put back, so nothing is taken as put back, also at steps at which contents are not
    looked at.
    """
    from dpfy.training.integrity import guard

    def inside(training):
        with training.averaged():
            overwrite(training)

    monkeypatch.setattr(guard, "SHARE", 0.0)
    monkeypatch.setattr(guard, "looks", lambda *_: False)
    with pytest.raises(Unsupported, match=r"0\.weight, written to outside"):
        run(tmp_path / "run", inside)


def test_the_average_is_the_runs_own(tmp_path):
    def put(training):
        training.average["0.weight"] = torch.zeros(16, FEATURES)

    def write(training):
        training.average["0.weight"].zero_()

    with pytest.raises(TypeError, match="item assignment"):
        run(tmp_path / "a", put, update=Update(average=0.9))
    with pytest.raises(Unsupported, match="an averaged weight, written to"):
        run(tmp_path / "b", write, update=Update(average=0.9))


@pytest.mark.parametrize(
    "between", [overwrite, through_data, load, register], ids=lambda f: f.__name__
)
def test_nothing_is_published_or_saved_after_a_write(tmp_path, between):
    """After the last step, or before an early end: neither a card nor a checkpoint holds what
    others wrote.
    """
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(
        net, sgd, small.data(), small.plan(3), dpfy.Run(tmp_path / "run", seed=3)
    ) as training:
        for batch in training.batches():
            training.step(losses_of(net, batch))
        between(training)
        before = (tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes()
        for call in (training.finish, training.save):
            with pytest.raises(Unsupported):
                call()
        with pytest.raises(Unsupported), training.averaged():
            pass
        assert (tmp_path / "run" / "checkpoint" / "state.safetensors").read_bytes() == before
    assert not (tmp_path / "run" / "privacy.json").exists()


def test_a_parameter_unfrozen_in_mid_run(tmp_path):
    net = small.model()
    net[0].bias.requires_grad_(False)
    with pytest.raises(Unsupported, match="frozen or unfrozen"):
        run(tmp_path / "run", lambda training: net[0].bias.requires_grad_(True), net=net)


def test_a_stale_gradient_moves_no_frozen_weight(tmp_path):
    net = small.model()
    net[0].bias.requires_grad_(False)
    before = net[0].bias.detach().clone()
    net[0].bias.grad = torch.full_like(before, 100.0)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def again(training):
        net[0].bias.grad = torch.full_like(before, 100.0)

    run(tmp_path / "run", again, net=net, optimizer=sgd)
    assert torch.equal(net[0].bias, before)


def test_gradients_of_the_caller_are_not_added(tmp_path):
    """A backward of the caller's own, without a step, changes nothing of what is released."""

    def backward(training):
        x, y = small.data()
        functional.cross_entropy(training.model(x), y).backward()

    nets = []
    for name, between in (("a", None), ("b", backward)):
        nets.append(nn.Linear(FEATURES, CLASSES))
        torch.nn.init.zeros_(nets[-1].weight), torch.nn.init.zeros_(nets[-1].bias)
        run(tmp_path / name, between, net=nets[-1], engine="loop")
    assert all(
        torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    )


def test_an_optimizer_that_brings_a_state(tmp_path):
    """Refused before anything is reserved, unless it is declared public; then the card says so."""
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = small.data()
    functional.cross_entropy(net(x), y).backward()
    sgd.step()
    with pytest.raises(InvalidInput, match=r"optimizer: got 'SGD with a state'.*public_state=True"):
        run(tmp_path / "run", net=net, optimizer=sgd)
    assert not (tmp_path / "run").exists()
    resumed = dpfy.Run(
        tmp_path / "run", resume=True
    )  # nothing there to resume: a beginning like any other
    with (
        pytest.raises(InvalidInput, match="SGD with a state"),
        dpfy.PrivateTraining(net, sgd, small.data(), small.plan(), resumed),
    ):
        pass
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", net=net, optimizer=sgd, update=Update(public_state=True))
    held = card(tmp_path / "run")
    assert held["optimizer"]["initial_state"] == "declared public"
    rows = {row["what"]: row for row in held["accounting"]["assumptions"]}
    assert "declared public" in rows["the beginning"]["done"]
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_optimizers_that_cannot_take_a_private_step(tmp_path, make):
    net = small.model()
    with pytest.raises(Unsupported, match=make.__name__):
        dpfy.PrivateTraining(
            net, make(list(net.parameters())), small.data(), small.plan(), tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_what_can_be_checked_before_the_reservation_is(tmp_path):
    x, y = small.data()
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for train in (
        (x[:50], y[:50]),
        [x[:50].numpy(), y[:50].numpy()],
        torch.utils.data.TensorDataset(x[:50], y[:50]),
        x[:50],
    ):
        with pytest.raises(InvalidInput, match=r"50 records.*made for 200"):
            dpfy.PrivateTraining(net, sgd, train, small.plan(), tmp_path / "run")
    update = Update(schedule=lambda step: float("nan") if step == 7 else 1.0)
    with pytest.raises(InvalidInput, match=r"schedule\(7\)"):
        dpfy.PrivateTraining(net, sgd, small.data(), small.plan(), tmp_path / "run", update=update)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    [
        "clip",
        "plan",
        "steps_done",
        "folder",
        "engine",
        "model",
        "optimizer",
        "records",
        "rule",
        "average",
    ],
)
def test_fields_are_read_only(tmp_path, name):
    from dpfy.gradients.clip import FlatClip

    def tamper(training):
        setattr(training, name, FlatClip(1000.0))

    with pytest.raises(InvalidInput, match=rf"training\.{name}: .*read-only"):
        run(tmp_path / "run", tamper)


class Keeper(nn.Module):
    """A model that keeps something of what it sees."""

    def __init__(self, kind):
        super().__init__()
        self.head, self.kind = nn.Linear(FEATURES, CLASSES), kind
        self.register_buffer("last", torch.zeros(FEATURES), persistent=kind != "hidden")
        if kind == "frozen":
            self.frozen = nn.Parameter(torch.zeros(FEATURES), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            if self.kind in ("copy", "hidden"):
                self.last.copy_(x[0])
            elif self.kind == "mean":
                self.last.lerp_(x.mean(0), 0.1)
            elif self.kind == "data":
                self.last.data.copy_(x[0])
            elif self.kind == "new":
                self.last = x[0].clone()
            elif self.kind == "late" and not hasattr(self, "kept"):
                self.register_buffer("kept", x[0].clone())
            elif self.kind == "frozen":
                self.frozen.copy_(x[0])
            elif self.kind == "later":
                self.calls = getattr(self, "calls", 0) + 1
                if self.calls > 20:
                    self.last.data.copy_(x[0])
        return self.head(x)


@pytest.mark.parametrize(
    "kind", ["copy", "hidden", "mean", "data", "new", "late", "frozen", "later"]
)
def test_a_buffer_that_learns_is_refused(tmp_path, kind):
    net = Keeper(kind)
    steps = 60 if kind == "later" else 3
    with pytest.raises(Unsupported, match=r"buffer|last|frozen"):
        run(tmp_path / "run", net=net, steps=steps)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    left = b"".join(p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())
    assert not any(row.numpy().tobytes() in left for row in small.data()[0])


def test_spectral_norm_is_refused_with_a_way_out(tmp_path):
    net = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(FEATURES, 16)), nn.Tanh(), nn.Linear(16, CLASSES)
    )
    with pytest.raises(
        Unsupported, match=r"power iteration that changes buffers.*n_power_iterations = 0"
    ):
        run(tmp_path / "run", net=net, engine="loop")


def test_state_beside_tensors_is_refused(tmp_path):
    class Talkative(nn.Linear):
        def get_extra_state(self):
            return {"mean": small.data()[0].mean(0)}

        def set_extra_state(self, state):
            pass

    with pytest.raises(Unsupported, match="get_extra_state"):
        run(tmp_path / "run", net=Talkative(FEATURES, CLASSES))
    assert not (tmp_path / "run").exists()


def test_a_state_dict_hook_publishes_nothing(tmp_path):
    """What is written is compared with what was there at the beginning, name by name, whoever
    writes into the state_dict.
    """
    net = small.model()

    def sneak(module, state, prefix, metadata):
        state["extra"] = torch.full((3,), float(len(calls)))
        calls.append(1)

    calls = []
    net._register_state_dict_hook(sneak)
    with pytest.raises(Unsupported, match="publishing extra, which changed in training"):
        run(tmp_path / "run", net=net)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_buffers_and_frozen_weights_that_stand_still_are_fine(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.randn(FEATURES))
            self.register_buffer("unsaved", torch.ones(FEATURES), persistent=False)
            self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
            self.body.requires_grad_(False)

        def forward(self, x):
            return self.head(torch.tanh(self.body((x - self.mean) * self.unsaved)))

    net = Model()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    run(tmp_path / "run", net=net, update=Update(average=0.9))
    moved = {k for k, v in net.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {"head.weight", "head.bias"}
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_evaluation_between_steps_is_fine(tmp_path):
    """Averages, evaluation, a deep copy, and a look at the weights are not writes."""
    import copy

    def look(training):
        with training.averaged(), torch.no_grad():
            training.model.eval()
            training.model(small.data()[0])
            training.model.train()
        copy.deepcopy(training.model)(small.data()[0]).sum().backward()
        assert np.isfinite(weight(training).detach().numpy()).all()
        training.save()
        training.optimizer.zero_grad()

    for after in range(6):
        run(tmp_path / str(after), look, after=after, update=Update(average=0.9))


def test_a_rule_of_the_weights_may_be_stated(tmp_path):
    @torch.no_grad()
    def clamp(net):
        for p in net.parameters():
            p.clamp_(-0.05, 0.05)

    net = small.model()
    run(tmp_path / "run", net=net, update=Update(project=clamp))
    assert max(float(p.detach().abs().max()) for p in net.parameters()) <= 0.0501
    held = card(tmp_path / "run")
    assert "projection" in {row["what"] for row in held["accounting"]["assumptions"]}
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))

    @torch.no_grad()
    def sneak(net):
        net[0].bias.copy_(small.data()[0][0, 0])

    frozen = small.model()
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(Unsupported, match=r"0\.bias, changed in training"):
        run(tmp_path / "sneak", net=frozen, update=Update(project=sneak))


def test_the_loop_sets_no_rates(tmp_path):
    for value in (0.05, float("nan")):
        with pytest.raises(InvalidInput, match=r"optimizer\.lr|learning rate"):
            run(
                tmp_path / str(value),
                lambda training, value=value: training.optimizer.param_groups[0].update(lr=value),
            )
    run(tmp_path / "plain")
    assert card(tmp_path / "plain")["optimizer"]["schedule"] == "constant"


def test_recorded_values_are_plain_numbers_and_not_the_batchs(tmp_path):
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(net, sgd, small.data(), small.plan(3), tmp_path / "run") as training:
        for batch in training.batches():
            losses = losses_of(net, batch)
            training.step(losses)
            for bad in (
                losses,
                losses.mean(),
                losses.mean().detach(),
                losses.tolist(),
                "text",
                True,
                None,
            ):
                with pytest.raises(InvalidInput, match="must be a plain number"):
                    training.record(source="public", loss=bad)
            for bad in (
                losses.mean().item(),
                float(losses.detach().double().sum()),
                np.float64(losses.mean().item()),
            ):
                with pytest.raises(InvalidInput, match="loss of the last batch"):
                    training.record(source="public", loss=bad)
            with pytest.raises(InvalidInput, match="names of values"):
                training.record(source="public", **{"a\x1b[31m": 1.0})
            training.record(source="public", epoch=1, accuracy=0.5)
    held = card(tmp_path / "run")
    row = next(row for row in held["accounting"]["assumptions"] if row["what"] == "recorded")
    assert "accuracy, epoch" in row["assumed"]
    assert row["holds"] == "stated"
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))


def test_the_card_says_what_a_loop_of_the_callers_own_is_trusted_with(tmp_path):
    run(tmp_path / "run")
    rows = {row["what"]: row for row in card(tmp_path / "run")["accounting"]["assumptions"]}
    assert rows["the caller's code"]["holds"] == "stated"
    assert "is not watched" in rows["the caller's code"]["done"]
    assert "the optimizer began empty" in rows["the beginning"]["done"]
    assert not {"recorded", "projection"} & rows.keys()


def test_a_finished_run_makes_no_further_step(tmp_path):
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(net, sgd, small.data(), small.plan(), tmp_path / "run") as training:
        batches = training.batches()
        training.step(losses_of(net, next(batches)))
        training.finish()
        with pytest.raises(Unsupported, match="the run is finished"):
            next(batches)
        with pytest.raises(Unsupported, match="the run is finished"):
            next(training.batches())


def test_no_copies_of_a_run(tmp_path):
    """A copy would make the same noise for another sum."""
    import copy
    import pickle

    def fork(training):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(Unsupported, match="copy of a private training"):
                make(training)

    run(tmp_path / "run", fork)


def test_one_training_and_one_loop_at_a_time(tmp_path):
    """Two loops over one run would add a record twice to one sum; two trainings in one folder would
    share noise.
    """
    from dpfy.core.errors import Busy
    from dpfy.training.run import TrainingRun

    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime = dpfy.Runtime(max_physical_batch=8)
    plan = small.plan(4)
    with TrainingRun(dpfy.Run(tmp_path / "run", seed=3), plan) as folder:
        training = dpfy.PrivateTraining(net, sgd, small.data(), plan, folder, runtime=runtime)
        with training:
            first, second = training.batches(), training.batches()
            next(first)
            training.step(losses_of(net, next(second)))
            with pytest.raises(InvalidInput, match="two at a time"):
                next(first)
            with pytest.raises(InvalidInput, match="entered twice"):
                training.__enter__()
            other = dpfy.PrivateTraining(
                net,
                torch.optim.SGD(net.parameters(), lr=0.1),
                small.data(),
                plan,
                folder,
                runtime=runtime,
            )
            with pytest.raises(Busy, match="another training"):
                other.__enter__()
            assert training.steps_done == 0


def test_a_training_may_be_entered_again_to_resume(tmp_path):
    """After an error behind the noise, the same object resumes from its checkpoint and repeats the
    step with the same bits.
    """
    net = small.model()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    plan, seen = small.plan(4), []
    training = dpfy.PrivateTraining(
        net, sgd, small.data(), plan, dpfy.Run(tmp_path / "run", resume=True, seed=3)
    )

    def hook(*_):
        seen.append((training.steps_done, net[0].weight.grad.clone()))
        if len(seen) == 3:
            raise RuntimeError("on purpose")

    sgd.register_step_pre_hook(hook)

    def all_steps():
        with training:
            for batch in training.batches():
                training.step(losses_of(net, batch))

    with pytest.raises(RuntimeError, match="on purpose"):
        all_steps()
    all_steps()
    made = dict(seen)
    assert list(made) == [0, 1, 2, 3]
    assert all(torch.equal(value, made[step]) for step, value in seen)
    assert (tmp_path / "run" / "privacy.json").exists()


def test_a_buffer_that_changed_unseen_does_not_survive_a_resume(tmp_path, monkeypatch):
    """Through .data, at a step at which nobody looks, and then a checkpoint: the resumed run finds
    it before it goes on.
    """
    from dpfy.core.errors import Corrupt
    from dpfy.training.integrity import guard

    monkeypatch.setattr(guard, "SHARE", 0.0)
    monkeypatch.setattr(guard, "looks", lambda *_: False)

    def train(resume):
        net = Keeper("none")
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        place = dpfy.Run(tmp_path / "run", seed=3, resume=resume)
        with dpfy.PrivateTraining(net, sgd, small.data(), small.plan(6), place) as training:
            for batch in training.batches():
                training.step(losses_of(net, batch))
                if training.steps_done == 3:
                    net.last.data.copy_(batch[0][0])
                    break

    train(resume=False)
    with pytest.raises(Corrupt, match="a buffer or frozen weight that changed in training"):
        train(resume=True)
