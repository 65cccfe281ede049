"""Accelerate with a private loop: equal to level 2 bit for bit, resumed bit for bit, and the
script's own calls do no harm.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, Subset

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import dpfy
from dpfy.core.errors import DpfyError, InvalidInput, Unsupported
from dpfy.integrations.accelerate import PrivateAccelerator

sys.path.insert(0, str(Path(__file__).parent))
import tiny

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps its precision for the whole process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def accelerator(path: Path, **settings: Any) -> PrivateAccelerator:
    made = {
        "plan": tiny.plan(),
        "run": dpfy.Run(path / "run", seed=3),
        "runtime": tiny.RUNTIME,
        "cpu": True,
    }
    return PrivateAccelerator(**made | settings)


def script(
    path: Path,
    name: str = "bert",
    scheduler: Any = tiny.cosine,
    *,
    die: int | None = None,
    load: bool = False,
    act: Any = None,
    later: bool = False,
    stop: int | None = None,
    **settings: Any,
) -> nn.Module:
    """A training script as people write it."""
    mine = accelerator(path, **settings)
    net = tiny.model(name)
    net.train()
    adam = tiny.adam(net)
    loader = DataLoader(tiny.Texts(name), batch_size=8, shuffle=True, collate_fn=tiny.collate)
    rule = scheduler(adam)
    if later:
        model, optimizer, loader = mine.prepare(net, adam, loader)
        rule = mine.prepare(rule)
    else:
        model, optimizer, loader, rule = mine.prepare(net, adam, loader, rule)
    if load:
        mine.load_state(str(path / "state"))
    torch.manual_seed(tiny.SEED)
    seen, done = [], None
    for _ in range(5):
        for batch in loader:
            done = mine.training
            with mine.accumulate(model):
                losses = tiny.losses(model, batch)
                mine.backward(losses)
                if mine.sync_gradients:
                    mine.clip_grad_norm_(model.parameters(), 1.0)
                    seen.append(mine.training.steps_done)
                optimizer.step()
                rule.step()
                optimizer.zero_grad()
            if act is not None:
                act(mine, losses)
            if mine.sync_gradients and seen[-1] % 2 == 0:
                mine.save_state(str(path / "state"))
            if seen and seen[-1] == stop:
                break
            if seen and seen[-1] == die:
                done.__exit__(tiny.Stop, tiny.Stop(), None)
                raise tiny.Stop
        if seen and seen[-1] == stop:
            break
        if isinstance(getattr(rule, "scheduler", None), rates.ReduceLROnPlateau):
            rule.step(1.0)
    mine.end_training()
    assert len(loader) == 4
    return net


@pytest.mark.parametrize("name", tiny.MODELS)
def test_accelerate_equals_level_two_bit_for_bit(tmp_path, name):
    net = script(tmp_path, name, later=name == "gpt2")
    assert tiny.same(net, tiny.level_two(tmp_path, name))
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert tiny.section(tmp_path)["optimizer"]["schedule"].startswith("CosineAnnealingLR(")


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(tiny.cosine, marks=pytest.mark.slow),
        lambda o: rates.ReduceLROnPlateau(o, patience=0, factor=0.5),
    ],
    ids=["cosine", "plateau"],
)
def test_a_script_that_was_killed_is_resumed_bit_for_bit(tmp_path, rule):
    whole = script(tmp_path / "whole", scheduler=rule)
    for step in (3, 5):
        with pytest.raises(tiny.Stop):
            script(tmp_path / "cut", scheduler=rule, die=step, load=step > 3)
    assert tiny.same(script(tmp_path / "cut", scheduler=rule, load=True), whole)
    assert (
        tiny.section(tmp_path / "cut")["optimizer"] == tiny.section(tmp_path / "whole")["optimizer"]
    )


@pytest.mark.parametrize("name", tiny.each_model("llama"))
def test_bfloat16_is_that_of_level_two_bit_for_bit(tmp_path, name):
    net = script(tmp_path, name, mixed_precision="bf16")
    assert tiny.same(net, tiny.level_two(tmp_path, name, mixed="model"))
    assert all(p.dtype is torch.float32 for p in net.parameters())


def test_a_break_ends_a_run_that_may_end(tmp_path):
    with pytest.warns(UserWarning, match="ended after 3 of 6 steps, 4 charged"):
        script(tmp_path, stop=3, plan=tiny.MAY_STOP)
    tiny.check_ended(tmp_path, 3)


def test_a_break_leaves_any_other_run_to_be_resumed(tmp_path):
    with pytest.warns(UserWarning, match="unfinished, 3 of 6 steps made, all 6 charged"):
        script(tmp_path, stop=3)
    assert tiny.same(script(tmp_path, load=True), tiny.level_two(tmp_path, "bert"))


def test_what_is_logged_is_recorded_and_a_loss_of_the_batch_is_refused(tmp_path):
    def act(mine, losses):
        with pytest.raises(InvalidInput, match="loss of the last batch"):
            mine.log({"loss": losses.mean().item()})
        with pytest.raises(InvalidInput, match="plain number"):
            mine.log({"loss": losses.mean()})
        mine.log({"accuracy": 0.5})

    script(tmp_path, act=act)
    assert tiny.section(tmp_path)["recorded"] == "accuracy"


@pytest.mark.slow
def test_gradients_are_neither_clipped_again_nor_told(tmp_path):
    def act(mine, losses):
        assert math.isnan(float(mine.clip_grad_norm_([], 1.0)))
        assert not [p for p in mine._model.parameters() if p.grad is not None]

    script(tmp_path, act=act)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: got 2; a batch of the plan is one step",
        ),
        (
            {"mixed_precision": "fp16"},
            "mixed_precision='fp16' is not supported; use torch.autocast",
        ),
    ],
)
def test_settings_that_contradict_a_plan_are_refused(tmp_path, settings, told):
    with pytest.raises(DpfyError, match=told):
        accelerator(tmp_path, **settings)


def test_mistakes_are_told_in_one_line(tmp_path):
    mine = accelerator(tmp_path)
    net = tiny.model("bert")
    adam = torch.optim.Adam(net.parameters(), lr=1e-2)
    loader = DataLoader(tiny.Texts("bert"), batch_size=8, collate_fn=tiny.collate)
    with pytest.raises(InvalidInput, match="follows a batch of the prepared training loader"):
        mine.backward(torch.ones(3))
    with pytest.raises(InvalidInput, match="there is no run to resume"):
        mine.load_state(str(tmp_path / "state"))
    model, _, train = mine.prepare(net, adam, loader)
    with pytest.raises(Unsupported, match="a second model"):
        mine.prepare(nn.Linear(2, 2))
    batch = next(iter(train))
    with pytest.raises(InvalidInput, match='reduction="none"'):
        mine.backward(tiny.losses(model, batch).mean())
    with pytest.raises(InvalidInput, match="load before the first batch"):
        mine.load_state(str(tmp_path / "state"))
    mine.end_training()
    assert not (tmp_path / "run").exists(), "nothing was released: it is given back"


def test_other_loaders_are_accelerates_own(tmp_path):
    mine = accelerator(tmp_path)
    other = mine.prepare(
        DataLoader(tiny.Texts("bert", 10, 2), batch_size=5, collate_fn=tiny.collate)
    )
    assert [len(batch["labels"]) for batch in other] == [5, 5]


# --- what a careless colleague does
# -------------------------------------------------------------------------------------------------


def test_a_part_of_the_training_data_is_no_evaluation_data(tmp_path):
    net, data = tiny.model("bert"), tiny.Texts("bert")
    train, part = (
        DataLoader(d, batch_size=8, collate_fn=tiny.collate) for d in (data, Subset(data, [1, 2]))
    )
    with pytest.raises(InvalidInput, match="prepare: got 'the training data'"):
        accelerator(tmp_path).prepare(net, tiny.adam(net), train, part)
    mine = accelerator(tmp_path)
    mine.prepare(net, tiny.adam(net), train)
    with pytest.raises(InvalidInput, match="prepare: got 'the training data'"):
        mine.prepare(part)
    mine = accelerator(tmp_path)
    mine.prepare(part)
    with pytest.raises(InvalidInput, match="prepare: got 'the training data'"):
        mine.prepare(net, tiny.adam(net), train)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("epoch", marks=pytest.mark.slow),
        "batch",
        pytest.param("all", marks=pytest.mark.slow),
    ],
)
def test_the_loss_of_an_epoch_is_refused_also_after_the_last(tmp_path, how):
    """As scripts of Accelerate add it up."""
    sums = {"loss": 0.0, "read": 0.0, "batches": 0}

    def act(mine, losses):
        sums["loss"] += float(losses.detach().float().mean())  # a number that nobody can follow
        sums["read"] += losses.detach().float().mean().item()
        sums["batches"] += 1

    mine = None

    def keep(made, losses):
        nonlocal mine
        mine = made
        act(made, losses)
        if made.training.steps_done == 3 and made.sync_gradients and how == "batch":
            with pytest.raises(InvalidInput, match="of the training batches"):
                made.log({"train_loss": sums["loss"] / sums["batches"]})
            with pytest.raises(InvalidInput, match="is read by item"):
                made.log({"train_loss": 0.37 + sums["read"] / 7})

    script(tmp_path, act=keep, plan=tiny.plan(steps=4))
    value = sums["loss"] / (4 if how == "epoch" else sums["batches"] if how == "batch" else 1)
    with pytest.raises(InvalidInput, match="of the training batches"):
        mine.log({"train_loss": value})


def test_no_record_is_read_before_the_reservation(tmp_path):
    net = tiny.model("bert")
    mine = accelerator(tmp_path, plan=tiny.plan(steps=2))
    data = DataLoader(tiny.Guarded("bert", tmp_path / "run"), batch_size=8, collate_fn=tiny.collate)
    model, _, train = mine.prepare(net, tiny.adam(net), data)
    for batch in train:
        mine.backward(tiny.losses(model, batch))
