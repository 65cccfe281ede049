"""The training loop: what it computes, what it refuses, what it leaves behind."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.training import Update

sys.path.insert(0, str(Path(__file__).parent))
import small


def losses_of(net, batch):
    x, y = batch
    return functional.cross_entropy(net(x), y, reduction="none")


def hooks(net: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in net.modules()
    )


def test_noise_zero_and_clip_infinity_equal_plain_sgd(tmp_path):
    """Full batch, no noise, no clipping: the same weights as a plain loop with the mean loss."""
    x, y = small.data()
    net = nn.Sequential(
        nn.Linear(small.FEATURES, 16), nn.Tanh(), nn.Linear(16, small.CLASSES)
    ).double()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        functional.cross_entropy(plain(x.double()), y).backward()
        optimizer.step()
    plan = dpfy.dpsgd(small.RECORDS, small.RECORDS, steps=10, clip_norm=math.inf).with_noise(0.0)
    sgd = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    result = dpfy.fit(
        net,
        (x.double(), y),
        plan=plan,
        optimizer=sgd,
        run=tmp_path / "run",
        runtime=dpfy.Runtime(max_physical_batch=64),
    )
    assert result.epsilon == math.inf
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


FIXED = {"sampling": "without-replacement", "adjacency": "replace-one"}


@pytest.mark.parametrize("sampling", [{}, FIXED], ids=["poisson", "fixed-size"])
def test_one_step_is_clip_sum_noise_divide(tmp_path, fineness, sampling):
    """One step against the definition, written out by hand from the same addresses, on a lattice
    that hides nothing.
    """
    from dpfy.core.randomness import Randomness
    from dpfy.noise.gaussian import draw

    fineness(2**44)
    x, y = small.data()
    net = nn.Linear(small.FEATURES, small.CLASSES).double()
    before = [p.detach().clone() for p in net.parameters()]
    plan = dpfy.dpsgd(small.RECORDS, 30, steps=1, clip_norm=0.4, **sampling).with_noise(
        1.5, delta=1e-3
    )
    randomness = Randomness.for_tests(11)
    indices = plan.recipe.sampler.batch(
        0, records=small.RECORDS, rng=randomness.generator("sampling", 0)
    )
    total = [torch.zeros_like(p) for p in before]
    for i in indices:
        grads = torch.autograd.grad(
            functional.cross_entropy(net(x[i : i + 1].double()), y[i : i + 1]),
            list(net.parameters()),
        )
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, 0.4 / norm)
    noise = draw(dict(net.named_parameters()), randomness, "noise", 0)
    expected = [
        b - 0.1 * (t + 1.5 * 0.4 * z) / 30
        for b, t, z in zip(before, total, noise.values(), strict=True)
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    dpfy.fit(
        net,
        (x.double(), y),
        plan=plan,
        optimizer=optimizer,
        run=dpfy.Run(tmp_path / "run", seed=11),
    )
    for p, e in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=1e-9, atol=1e-12)


def test_an_empty_batch_is_a_step_with_noise(tmp_path):
    x, y = small.data()
    net = nn.Linear(small.FEATURES, small.CLASSES)
    before = net.weight.detach().clone()
    plan = dpfy.dpsgd(small.RECORDS, 1e-6, steps=3).with_noise(1.0, delta=1e-3)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with dpfy.PrivateTraining(
        net, optimizer, (x, y), plan, dpfy.Run(tmp_path / "run", seed=0)
    ) as training:
        assert list(training.batches()) == []
        assert training.steps_done == 3
    assert not torch.equal(net.weight, before)


def test_a_training_is_printed_in_words_and_holds_no_record(tmp_path):
    x = torch.full((100, 4), 123.456)
    net = nn.Linear(4, 2)
    plan = dpfy.dpsgd(100, 20, steps=3).with_noise(2.0, delta=1e-3)
    training = dpfy.PrivateTraining(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        (x, torch.zeros(100, dtype=torch.int64)),
        plan,
        run=tmp_path / "run",
    )
    said = f"of 3 steps done, in {tmp_path / 'run'}\n{plan}"
    assert repr(training) == f"private training of a Linear, 0 {said}"
    with training:
        for batch in training.batches():
            training.step(losses_of(net, batch))
            if training.steps_done:
                break
        assert repr(training) == f"private training of a Linear, 1 {said}"
        assert "123" not in repr(training)
        for batch in training.batches():
            training.step(losses_of(net, batch))


@pytest.mark.parametrize(
    "runtime",
    [
        dpfy.Runtime(max_physical_batch=7),
        dpfy.Runtime(max_physical_batch=16, pad=True),
        dpfy.Runtime(graph=True),
        dpfy.Runtime(max_physical_batch=9, graph=True),
    ],
)
def test_physical_batches_do_not_change_the_result(tmp_path, runtime):
    whole = small_double(tmp_path / "a", dpfy.Runtime())
    for a, b in zip(whole, small_double(tmp_path / "b", runtime), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_captured_sum_may_overwrite_its_memory(tmp_path, monkeypatch):
    """Graphs answer in the same tensors at every call: the pieces of a logical batch must not lose
    one another.
    """
    from dpfy.gradients.cuda_graphs.captured import CapturedSum

    usual, kept = CapturedSum.__call__, {}

    def in_one_place(self, batch, clip, mask):
        total = usual(self, batch, clip, mask)
        for name, value in total.value.items():
            kept[name] = kept[name].copy_(value) if name in kept else value
        return type(total)(kept, total.bound)

    whole = small_double(tmp_path / "a", dpfy.Runtime())
    monkeypatch.setattr(CapturedSum, "__call__", in_one_place)
    for a, b in zip(
        whole,
        small_double(tmp_path / "b", dpfy.Runtime(max_physical_batch=6, graph=True)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    assert kept


def test_with_graphs_a_batch_seldom_needs_a_second_piece(tmp_path):
    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime = dpfy.Runtime(graph=True)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(8), tmp_path / "run", runtime=runtime
    ) as training:
        step = training.captured(
            lambda x, y: torch.nn.functional.cross_entropy(net(x), y, reduction="none")
        )
        rows = []
        for batch in training.batches():
            rows.append(len(batch[0]))
            step(*batch)
        assert training.steps_done == 8
        with pytest.raises(InvalidInput, match="all are done"):
            step(*batch)
    assert rows == [40] * 8, "20 + 4 sqrt(20), up to a multiple of 8"


def small_double(path, runtime):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(small.FEATURES, 8), nn.Tanh(), nn.Linear(8, small.CLASSES)
    ).double()
    x, y = small.data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    dpfy.fit(
        net,
        (x.double(), y),
        plan=small.plan(5),
        optimizer=optimizer,
        run=dpfy.Run(path, seed=3),
        runtime=runtime,
    )
    return [p.detach() for p in net.parameters()]


def test_the_model_stays_the_users(tmp_path):
    net = small.model()
    kind, keys = type(net), list(net.state_dict())

    def body(training, net):
        for batch in training.batches():
            training.step(losses_of(net, batch))
            assert list(net.state_dict()) == keys
            if training.steps_done == 2:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        in_training(tmp_path, body, net=net)
    assert type(net) is kind
    assert hooks(net) == 0
    assert all(p.grad is None for p in net.parameters())
    assert not any(k for k in vars(net) if "dpfy" in k)


def test_level_two_equals_level_one(tmp_path):
    small.train(dpfy.Run(tmp_path / "one", seed=4), steps=6)
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    update = Update(average=0.9, schedule=lambda step: 1 / (1 + 0.05 * step))
    runtime = dpfy.Runtime(max_physical_batch=12)
    run = dpfy.Run(tmp_path / "two", seed=4)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(6), run, runtime=runtime, update=update
    ) as training:
        for batch in training.batches():
            training.step(losses_of(net, batch))
        assert training.guarantee().epsilon(1e-3) == small.plan(6).epsilon
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_the_reservation_is_durable_before_the_data_is_read(tmp_path):
    class Watched:
        """A data set that looks at the ledger when it is first read."""

        def __len__(self):
            return small.RECORDS

        def __getitem__(self, index):
            assert '"type":"reserve"' in (tmp_path / "run" / "ledger.jsonl").read_text()
            return tuple(t[index] for t in small.data())

    net = small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    result = dpfy.fit(net, Watched(), plan=small.plan(2), optimizer=optimizer, run=tmp_path / "run")
    assert result.steps == 2


def test_os_entropy_by_default(tmp_path):
    for name in ("a", "b"):
        small.train(tmp_path / name, steps=2)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()


def in_training(tmp_path, body, net=None, data=None, plan=None):
    net = net or small.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with dpfy.PrivateTraining(
        net, optimizer, data or small.data(), plan or small.plan(), tmp_path / "run"
    ) as training:
        body(training, net)


def test_scalar_loss_is_refused(tmp_path):
    def body(training, net):
        x, y = next(training.batches())
        training.step(functional.cross_entropy(net(x), y))

    with pytest.raises(InvalidInput, match=r'losses: got .a scalar.*reduction="none"'):
        in_training(tmp_path, body)


def test_wrong_number_of_losses_is_refused(tmp_path):
    def body(training, net):
        training.step(losses_of(net, next(training.batches()))[1:])

    with pytest.raises(InvalidInput, match="one loss per example"):
        in_training(tmp_path, body)


def test_a_batch_without_a_step_and_a_step_without_a_batch(tmp_path):
    def skip(training, net):
        batches = training.batches()
        next(batches)
        next(batches)

    with pytest.raises(InvalidInput, match="followed by exactly one step"):
        in_training(tmp_path / "a", skip)

    def twice(training, net):
        losses = losses_of(net, next(training.batches()))
        training.step(losses)
        training.step(losses)

    with pytest.raises(InvalidInput, match="step"):
        in_training(tmp_path / "b", twice)


def test_more_steps_than_the_plan_are_refused(tmp_path):
    def body(training, net):
        for batch in training.batches():
            losses = losses_of(net, batch)
            training.step(losses)
        training.step(losses)

    with pytest.raises(InvalidInput, match="the plan allows 3 steps"):
        in_training(tmp_path, body, plan=small.plan(3))


def test_batchnorm_is_refused_with_the_way_out(tmp_path):
    net = nn.Sequential(
        nn.Linear(small.FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, small.CLASSES)
    )
    with pytest.raises(Unsupported, match="GroupNorm"):
        in_training(tmp_path, lambda t, n: None, net=net)
    assert not (tmp_path / "run").exists()


def test_losses_that_mix_examples_are_refused(tmp_path):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(small.FEATURES, small.CLASSES)

        def forward(self, x):
            out = self.head(x)
            return out - out.mean(0)

    def body(training, net):
        for batch in training.batches():
            training.step(losses_of(net, batch))

    with pytest.raises(Unsupported, match="mix"):
        in_training(tmp_path, body, net=Centred())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_features_are_refused_and_nothing_is_left(tmp_path, bad):
    x, y = small.data()
    x[7, 3] = bad
    with pytest.raises(InvalidInput, match=r"train\[0\].*record 7"):
        in_training(tmp_path, lambda t, n: None, data=(x, y))
    assert not (tmp_path / "run").exists()


def test_wrong_number_of_records_is_refused(tmp_path):
    x, y = small.data()
    with pytest.raises(InvalidInput, match="the plan was made for 200"):
        in_training(tmp_path, lambda t, n: None, data=(x[:100], y[:100]))


def test_optimizer_must_match_the_model(tmp_path):
    net = small.model()
    other = torch.optim.SGD(small.model().parameters(), lr=0.1)
    with pytest.raises(InvalidInput, match="optimizer"):
        dpfy.PrivateTraining(net, other, small.data(), small.plan(), tmp_path / "run")


def test_a_non_finite_gradient_contributes_nothing(tmp_path):
    """One example whose loss is infinite leaves the model finite."""
    x, y = small.data()
    x[3] = 1e38

    class Explosive(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(small.FEATURES, small.CLASSES)

        def forward(self, x):
            return self.head(x * x)

    net = Explosive()
    plan = dpfy.dpsgd(small.RECORDS, small.RECORDS, steps=3).with_noise(1.0, delta=1e-3)
    dpfy.fit(
        net,
        (x, y),
        plan=plan,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        run=tmp_path / "run",
    )
    assert all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.filterwarnings("ignore:run .* unfinished")
def test_the_largest_physical_batch_is_found_and_remembered(tmp_path, monkeypatch):
    """Half the free memory gives half the batch; a resumed run keeps what the first one found."""
    from dpfy.training import batches

    net = small.model()
    sizes = []
    for free in (2.0**24, 2.0**23):
        monkeypatch.setattr(batches, "_free_bytes", lambda device, free=free: free)
        sizes.append(batches.largest_batch(net, small.data(), torch.device("cpu")))
    assert sizes[0] == 2 * sizes[1] > 64
    monkeypatch.setattr(batches, "_free_bytes", lambda device: 4e3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    runtime = dpfy.Runtime(max_physical_batch="auto")
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(3), tmp_path / "run", runtime=runtime
    ) as training:
        first, rows = training.physical_batch, []
        for x, y in training.batches():
            if training.steps_done:
                break
            rows.append(len(x))
            training.step(functional.cross_entropy(net(x), y, reduction="none"))
    assert max(rows) <= first < 64
    monkeypatch.setattr(batches, "_free_bytes", lambda device: 2.0**30)
    run = dpfy.Run(tmp_path / "run", resume=True)
    with dpfy.PrivateTraining(
        net, optimizer, small.data(), small.plan(3), run, runtime=runtime
    ) as training:
        assert (training.physical_batch, training.steps_done) == (first, 1)


def test_bad_runtimes():
    for change in (
        {"max_physical_batch": 0},
        {"max_physical_batch": "all"},
        {"engine": "fast"},
        {"device": "quantum"},
    ):
        with pytest.raises(InvalidInput, match=next(iter(change))):
            dpfy.Runtime(**change)


def test_adaptive_clipping_follows_a_private_quantile_and_resumes(tmp_path):
    """From a clip norm far too large the norm comes down; a run cut in two releases the same bits
    as a whole one.
    """
    from dataclasses import replace

    from dpfy.gradients.clip import QuantileClip

    recipe = replace(
        dpfy.dpsgd(small.RECORDS, 50, steps=30), clip=QuantileClip(20.0, learning_rate=0.4)
    )
    plan = recipe.with_noise(1.0, delta=1e-3)
    norms = []
    for name, cut in (("whole", None), ("cut", 11), ("cut", None)):
        torch.manual_seed(0)
        net = nn.Linear(small.FEATURES, small.CLASSES)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        run = dpfy.Run(tmp_path / name, seed=3, resume=True)
        with dpfy.PrivateTraining(net, optimizer, small.data(), plan, run) as training:
            for batch in training.batches():
                training.step(losses_of(net, batch))
                if training.steps_done == cut:
                    break
            norms.append(training.clip.norm)
    assert norms[0] < 5
    assert norms[0] == norms[2] < norms[1]
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "cut" / "model.safetensors"
    ).read_bytes()


def test_clip_rules_without_a_proof_are_refused():
    from dataclasses import replace

    from dpfy.gradients.clip import MicrobatchClip

    with pytest.raises(Unsupported, match="microbatches"):
        replace(dpfy.dpsgd(small.RECORDS, 50, steps=3), clip=MicrobatchClip(1.0, 4))


def test_a_model_with_one_number_out(tmp_path):
    """A regression model that squeezes its output to one number an example."""

    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(small.FEATURES, 1)

        def forward(self, x):
            return self.head(x).squeeze(-1)

    (x, y), other = small.data(), small.data(2)
    net = Squeezed()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    result = dpfy.fit(
        net,
        (x, y.float()),
        plan=small.plan(3),
        optimizer=sgd,
        loss="squared_error",
        run=tmp_path / "run",
        evaluation=dpfy.PublicTest((other[0], other[1].float())),
    )
    assert set(result.utility) == {"test_loss"}
