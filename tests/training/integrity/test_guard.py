"""The guard by itself: every way to write is seen, at the step after it, and no reading is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.training.integrity import guard
from dpfy.training.integrity.guard import FIRST, SELDOM, Guard, looks, seal

sys.path.insert(0, str(Path(__file__).parents[1]))
import small

RANDOMNESS = Randomness.for_tests(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.frozen = nn.Linear(3, 2), nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)


@pytest.fixture
def parts():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.inner.weight.grad = torch.ones(2, 3)
    optimizer.step()
    average = {"inner.weight": torch.zeros(2, 3)}
    data = torch.zeros(5, 3)
    return model, optimizer, average, data, Guard(model, optimizer, average, [data], {})


def momentum(optimizer):
    return next(s["momentum_buffer"] for s in optimizer.state.values() if s)


WRITES = {
    "weight": (lambda m, o, a, d: m.inner.weight.detach().add_(1), "inner.weight, written to"),
    "one value": (lambda m, o, a, d: m.inner.bias.detach()[0].add_(1), "inner.bias, written to"),
    "frozen": (lambda m, o, a, d: m.frozen.add_(1), "frozen, changed in training"),
    "buffer": (lambda m, o, a, d: m.mean.add_(1), "mean, changed in training"),
    "hidden buffer": (lambda m, o, a, d: m.hidden.add_(1), "hidden, changed in training"),
    "average": (lambda m, o, a, d: a["inner.weight"].add_(1), "an averaged weight, written to"),
    "momentum": (lambda m, o, a, d: momentum(o).add_(1), "state of the optimizer"),
    "no state": (lambda m, o, a, d: o.state.clear(), "state of the optimizer"),
    "data": (lambda m, o, a, d: d.add_(1), "training data"),
    "group": (lambda m, o, a, d: o.param_groups[0]["params"].pop(), "parameter groups"),
    "freeze": (lambda m, o, a, d: m.inner.bias.requires_grad_(False), "frozen or unfrozen"),
    "unfreeze": (lambda m, o, a, d: m.frozen.requires_grad_(True), "frozen or unfrozen"),
    "new parameter": (
        lambda m, o, a, d: setattr(m.inner, "weight", nn.Parameter(torch.zeros(2, 3))),
        "replaced",
    ),
    "new buffer": (lambda m, o, a, d: setattr(m, "mean", torch.zeros(3)), "replaced"),
    "one more buffer": (lambda m, o, a, d: m.register_buffer("more", torch.zeros(1)), "added"),
    "one more module": (lambda m, o, a, d: setattr(m, "more", nn.Identity()), "added"),
    "one less": (lambda m, o, a, d: delattr(m, "mean"), "removed"),
    "swap": (
        lambda m, o, a, d: setattr(m.inner.weight, "data", torch.zeros(2, 3)),
        "inner.weight, written to",
    ),
    "through data": (lambda m, o, a, d: m.inner.weight.data.add_(1), r"through \.data"),
    "buffer through data": (lambda m, o, a, d: m.mean.data.add_(1), r"through \.data"),
    "frozen through data": (lambda m, o, a, d: m.frozen.data.add_(1), r"through \.data"),
    "average through data": (lambda m, o, a, d: a["inner.weight"].data.add_(1), r"through \.data"),
    "momentum through data": (lambda m, o, a, d: momentum(o).data.add_(1), r"through \.data"),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_write_is_seen(parts, name):
    *things, watch = parts
    watch.check()
    write, match = WRITES[name]
    write(*things)
    with pytest.raises(Unsupported, match=match):
        watch.check()


def test_reading_and_the_runs_own_writes_are_not(parts, monkeypatch):
    monkeypatch.setattr(guard, "SHARE", 0.0)
    model, optimizer, average, data, watch = parts
    model.inner(data).sum().backward()
    model.state_dict()
    watch.check()
    optimizer.step()
    average["inner.weight"].lerp_(model.inner.weight.detach(), 0.5)
    watch.accept({})
    watch.check()
    for write in (
        "frozen",
        "buffer",
        "data",
    ):  # these stand still for the whole run, whatever is accepted
        WRITES[write][0](model, optimizer, average, data)
        watch.accept({})
        with pytest.raises(Unsupported):
            watch.check()


def test_weights_put_back_are_the_same_weights(parts):
    model, *_, watch = parts
    kept = model.inner.weight.detach().clone()
    model.inner.weight.detach().zero_()
    model.inner.weight.detach().copy_(kept)
    watch.restored()
    watch.check()
    model.inner.weight.detach().zero_()
    watch.restored()
    with pytest.raises(Unsupported, match=r"through \.data"):
        watch.check()


def test_without_time_for_it_contents_are_looked_at_when_told(parts, monkeypatch):
    _, optimizer, *_, watch = parts
    monkeypatch.setattr(guard, "SHARE", 0.0)
    watch.accept({})
    momentum(optimizer).data.add_(1)
    watch.check()
    watch.accept({}, look=True)
    momentum(optimizer).data.add_(1)
    with pytest.raises(Unsupported, match=r"through \.data"):
        watch.check()


def test_a_weight_written_over_as_a_whole_is_seen_at_every_step(parts, monkeypatch):
    model, *_, watch = parts
    monkeypatch.setattr(guard, "SHARE", 0.0)
    for _ in range(2 * guard.DRAWN):
        watch.accept({})
        watch.check()
        model.inner.bias.data.add_(1e-3)
        with pytest.raises(Unsupported, match=r"through \.data"):
            watch.check()


def test_when_contents_are_looked_at():
    steps = 20_000
    looked = [step for step in range(steps) if looks(step, steps, RANDOMNESS)]
    assert looked[:FIRST] == list(range(FIRST))
    assert looks(steps, steps, RANDOMNESS)
    assert abs(len(looked) - steps / SELDOM) < 5 * (steps / SELDOM) ** 0.5
    assert looked != [step for step in range(steps) if looks(step, steps, Randomness.for_tests(2))]


def test_the_seal_is_of_all_that_must_stay(parts):
    model, *_ = parts
    before = seal(model, RANDOMNESS)
    assert {name for name, tag in before.items() if tag == "moves"} == {
        "inner.weight",
        "inner.bias",
    }
    assert before.keys() == {"inner.weight", "inner.bias", "frozen", "mean", "hidden"}
    model.inner.weight.detach().add_(1)
    assert seal(model, RANDOMNESS) == before
    for tensor in (model.frozen, model.mean, model.hidden):
        tensor[1] += 1
        assert seal(model, RANDOMNESS) != before
        tensor[1] -= 1
    assert seal(model, RANDOMNESS) == before
    assert seal(model, Randomness.for_tests(2)) != before
    model.register_buffer("more", torch.zeros(1))
    assert seal(model, RANDOMNESS) != before


def test_the_report_says_how_often_contents_are_compared(tmp_path):
    """The words are those of the rule: a write that torch does not count may go unseen at the other
    steps.
    """
    small.train(tmp_path / "run", steps=5)
    rows = small.card_of(tmp_path / "run")["accounting"]["assumptions"]
    (words,) = [row["done"] for row in rows if row["what"] == "the caller's code"]
    assert (guard.FIRST, guard.SELDOM) == (4, 32)
    assert "counters of writes" in words
    assert (
        "contents at the first four steps, at the last and at about one in thirty-two of the others"
        in words
    )
