"""The state of a training is a value: complete, frozen, read by all, and what earlier versions
stored of it still fits.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
import torch

import dpfy
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.core.randomness import Randomness
from dpfy.core.values import Bounded
from dpfy.gradients.clip import CLIPS, FlatClip
from dpfy.gradients.engines.choice import ENGINES
from dpfy.plan.recipe import SAMPLERS, STRATEGIES
from dpfy.training import Update, loop
from dpfy.training.integrity import checkpoint, resume
from dpfy.training.integrity.state import TrainState, generators, weights_of
from dpfy.training.schedulers import Schedules

sys.path.insert(0, str(Path(__file__).parents[1]))
import sampled
import small

ROOT = Path(__file__).parents[3]
SAMPLES = Path(__file__).parents[1] / "samples"


def losses_of(net, x, y):
    return torch.nn.functional.cross_entropy(net(x), y, reduction="none")


def training_in(folder, **options):
    net = small.model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    return net, dpfy.PrivateTraining(net, optimizer, small.data(), small.plan(4), folder, **options)


@pytest.mark.parametrize("kind", sampled.RECIPES)
def test_a_checkpoint_of_the_version_before_is_resumed(kind, tmp_path, monkeypatch):
    """Steps 0 to 2 were made, stored and left by it; the rest is made now. On the machine that made
    them, to the same bits.
    """
    whole = sampled.train(dpfy.Run(tmp_path / "whole", seed=11), kind)
    sampled.train(dpfy.Run(tmp_path / "run", seed=11), kind, stop=0)
    file, randomness = (
        tmp_path / "run" / "checkpoint" / "state.safetensors",
        Randomness.for_tests(11),
    )
    mine, old = (
        checkpoint.read(path, randomness) for path in (file, SAMPLES / f"{kind}.safetensors")
    )
    assert (mine.step, old.step) == (0, sampled.STOP)
    assert mine.facts.keys() == old.facts.keys()
    machine = {key: mine.facts["identity"][key] for key in ("torch", "vector code", "plan")}
    here = machine.items() <= old.facts["identity"].items()
    facts = old.facts | {"identity": old.facts["identity"] | machine}
    checkpoint.write(file, dataclasses.replace(old, facts=facts), randomness)
    resumed = sampled.train(dpfy.Run(tmp_path / "run", resume=True), kind)
    for name, value in whole.items():
        assert (
            torch.equal(value, resumed[name])
            if here
            else torch.allclose(value, resumed[name], rtol=1e-3, atol=1e-3)
        )
    assert (tmp_path / "run" / "privacy.json").is_file()


def test_a_checkpoint_is_the_state_and_nothing_else(tmp_path):
    """What is stored and restored into another model is the same value, to the last bit of every
    part.
    """
    net, training = training_in(dpfy.Run(tmp_path / "run", seed=3), update=Update(average=0.9))
    with training:
        for x, y in training.batches():
            training.step(losses_of(net, x, y))
            if training.steps_done == 2:
                training.record(source="public", public=1.0)
                break
        state = training.state
        checkpoint.write(
            tmp_path / "file", state.snapshot(training.terms.facts()), training.folder.randomness
        )
        held = checkpoint.read(tmp_path / "file", training.folder.randomness)
    other = small.model(seed=9)
    adam = torch.optim.Adam(other.parameters(), lr=0.05)
    average = {name: torch.zeros_like(p) for name, p in other.named_parameters()}
    none, random = Schedules(None, adam, 4), generators(torch.device("cpu"))
    empty = TrainState(0, weights_of(other), adam, average, {}, FlatClip(9.0), random, none)
    again = empty.restored(held, torch.device("cpu"))
    assert again.step == 2
    assert again.recorded == {"public"}
    ours, theirs = again.snapshot({}), state.snapshot({})
    assert ours.facts == theirs.facts
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(t, theirs.tensors[name]) for name, t in ours.tensors.items())
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state.random["cpu"])


def test_every_field_of_the_state_is_stored():
    """A new one goes into `snapshot` and `restored` first, and then here."""
    stored = {
        "step",
        "weights",
        "optimizer",
        "average",
        "noise",
        "clip",
        "random",
        "rates",
        "recorded",
        "computed",
    }
    stored |= {"schedules", "kept"}
    assert {field.name for field in dataclasses.fields(TrainState)} == stored


def test_the_state_is_frozen_and_cannot_be_put_back(tmp_path):
    """Who holds an earlier state cannot make its step again: neither by writing to it nor by giving
    it to the run.
    """
    net, training = training_in(tmp_path / "run")
    with training:
        before = training.state
        for x, y in training.batches():
            training.step(losses_of(net, x, y))
        assert (before.step, training.state.step) == (0, 4)
        with pytest.raises(dataclasses.FrozenInstanceError):
            before.step = 3
        for name, value in (
            ("state", before),
            ("steps_done", 0),
            ("clip", FlatClip(1.0)),
            ("average", {}),
            ("private_step", None),
        ):
            with pytest.raises(InvalidInput, match="read-only"):
                setattr(training, name, value)
        with pytest.raises(TypeError):
            before.weights["0.weight"] = torch.zeros(1)


def test_the_step_of_an_earlier_state_is_not_made_again(tmp_path):
    """Not even by calling the private step itself: the journal knows which step is due, and a
    refusal ends the run.
    """
    net, training = training_in(tmp_path / "run")
    assert training.state.step == 0  # also before the block is entered
    with training:
        before, batches = training.state, training.batches()
        while training.steps_done < 2:
            training.step(losses_of(net, *next(batches)))
        weights = [p.detach().clone() for p in net.parameters()]
        total = Bounded(
            {name: torch.zeros_like(p) for name, p in net.named_parameters()},
            training.clip.bound,
            training.plan.recipe.unit,
        )
        for match in ("making step 0 where step 2 is due", "stopped"):
            with pytest.raises(Unsupported, match=match):
                training.private_step(before, total)
        with pytest.raises(Unsupported, match="stopped"):
            next(batches)
        assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda noise: noise["past"].zero_(),
        dict.clear,
        lambda noise: noise.update(more=torch.ones(1)),
    ],
)
def test_the_memory_of_the_noise_is_the_runs_alone(tmp_path, change):
    """Who reads the state can reach it. Correlated noise that forgets its past would not be the
    noise that is billed.
    """
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    sgd, plan = (
        torch.optim.SGD(net.parameters(), lr=0.1),
        sampled.RECIPES["banded"]().with_noise(2.0, delta=1e-3),
    )
    with dpfy.PrivateTraining(net, sgd, sampled.data(), plan, tmp_path / "run") as training:
        batches = training.batches()
        while training.steps_done < 1:
            training.step(losses_of(net, *next(batches)))
        made = training.steps_done  # a batch may be empty: its step is made with the next one
        change(training.state.noise)
        for _ in range(2):
            with pytest.raises(Unsupported, match="the memory of the noise written to"):
                training.step(losses_of(net, *next(batches)))
        assert training.steps_done == made


def test_in_the_middle_of_a_step_the_state_is_the_one_before_it(tmp_path):
    """Generators too: a checkpoint written then makes the whole step again, dropout included."""
    net, training = training_in(
        dpfy.Run(tmp_path / "run", seed=3), runtime=dpfy.Runtime(max_physical_batch=4)
    )
    with training:
        batches, begun = training.batches(), torch.get_rng_state()
        training.step(losses_of(net, *next(batches)))
        assert not torch.equal(torch.get_rng_state(), begun)
        assert torch.equal(training.state.random["cpu"], begun)
        assert training.state.step == 0


def test_an_optimizer_that_gives_its_weights_new_memory_is_checkpointed_with_them(tmp_path):
    """The state holds the model's own parameters: what a step puts in their place is what is
    stored.
    """

    class Moving(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = p - group["lr"] * p.grad

    net = small.model()
    run = dpfy.Run(tmp_path / "run", seed=3)
    training = dpfy.PrivateTraining(
        net, Moving(net.parameters(), lr=0.1), small.data(), small.plan(4), run
    )
    with training:
        for x, y in training.batches():
            training.step(losses_of(net, x, y))
            if training.steps_done == 2:
                break
    held = checkpoint.read(
        tmp_path / "run" / "checkpoint" / "state.safetensors", Randomness.for_tests(3)
    ).part("model")
    assert all(torch.equal(p, held[name]) for name, p in net.named_parameters())


def test_the_loop_names_no_sampler_clip_engine_or_strategy():
    """Its first line is true: it knows the protocols alone, and nothing else reads what is private
    to it.
    """
    text = Path(loop.__file__).read_text()
    known = {
        kind.__name__ for table in (CLIPS, ENGINES, SAMPLERS, STRATEGIES) for kind in table.values()
    }
    assert {"FlatClip", "BookkeepingEngine", "PoissonSampler", "Identity"} <= known
    assert not [name for name in known if re.search(rf"\b{name}\b", text)]
    assert sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text))) < 300
    for file in (ROOT / "dpfy").rglob("*.py"):
        reads = re.findall(r"\btraining\._[a-z]\w*", file.read_text())
        assert set(reads) <= ALLOWED.get(file.relative_to(ROOT).as_posix(), set()), file


ALLOWED = {
    "dpfy/audit/bugs/claims.py": {"training._status", "training._guard"},
    "dpfy/training/fit.py": {"training._note"},
}
"""The planted mistakes of the audit's self-test reach inside on purpose; `fit` writes rows that are
not the caller's.
"""


def test_another_identity_restores_nothing(tmp_path):
    """The refusal comes before anything is written to the model."""
    net, training = training_in(dpfy.Run(tmp_path / "run", seed=3))
    with training:
        for x, y in training.batches():
            training.step(losses_of(net, x, y))
            if training.steps_done:
                break
    other = small.model(seed=5)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05)
    before = [p.detach().clone() for p in other.parameters()]
    run = dpfy.Run(tmp_path / "run", resume=True)
    with (
        pytest.raises(InvalidInput, match="resume optimizer") as refusal,
        dpfy.PrivateTraining(other, sgd, small.data(), small.plan(4), run),
    ):
        pass
    assert "\n" not in str(refusal.value)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    assert set(resume.SECRET) <= resume.identity(training).keys()
