"""Accelerate with a private loop: equal to level 2 bit for bit, resumed bit for bit, and the script's own calls do no harm."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader

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


class Stop(Exception):
    """The process dies here."""


def accelerator(path: Path, **settings: Any) -> PrivateAccelerator:
    made = {"plan": tiny.plan(), "run": dpfy.Run(path / "run", seed=3), "runtime": tiny.RUNTIME, "cpu": True}
    return PrivateAccelerator(**made | settings)


def cosine(optimizer):
    return rates.CosineAnnealingLR(optimizer, tiny.STEPS)


def script(
    path: Path,
    name: str = "bert",
    scheduler: Any = cosine,
    *,
    die: int | None = None,
    load: bool = False,
    act: Any = None,
    later: bool = False,
    **settings: Any,
) -> nn.Module:
    """A training script as people write it."""
    mine = accelerator(path, **settings)
    net = tiny.model(name)
    net.train()
    adam = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(tiny.Texts(name), batch_size=8, shuffle=True, collate_fn=tiny.collate)
    rule = scheduler(adam)
    if later:
        model, optimizer, loader = mine.prepare(net, adam, loader)
        rule = mine.prepare(rule)
    else:
        model, optimizer, loader, rule = mine.prepare(net, adam, loader, rule)
    if load:
        mine.load_state(str(path / "state"))
    torch.manual_seed(11)
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
            if seen and seen[-1] == die:
                done.__exit__(Stop, Stop(), None)
                raise Stop
        if isinstance(getattr(rule, "scheduler", None), rates.ReduceLROnPlateau):
            rule.step(1.0)
    mine.end_training()
    assert len(loader) == 4
    return net


def two(path: Path, name: str) -> nn.Module:
    def adam(net):
        return torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)

    return tiny.level_two(path / "two", name, adam, cosine, torch_seed=11)


def card(path: Path) -> dict[str, Any]:
    return json.loads((path / "run" / "privacy.json").read_text())["sections"][0]


@pytest.mark.parametrize("name", tiny.MODELS)
def test_accelerate_equals_level_two_bit_for_bit(tmp_path, name):
    net = script(tmp_path, name, later=name == "gpt2")
    assert tiny.same(net, two(tmp_path, name))
    assert all(f.holds for f in dpfy.verify(tmp_path / "run"))
    assert card(tmp_path)["optimizer"]["schedule"].startswith("CosineAnnealingLR(")


@pytest.mark.parametrize(
    "rule",
    [pytest.param(cosine, marks=pytest.mark.slow), lambda o: rates.ReduceLROnPlateau(o, patience=0, factor=0.5)],
    ids=["cosine", "plateau"],
)
def test_a_script_that_was_killed_is_resumed_bit_for_bit(tmp_path, rule):
    whole = script(tmp_path / "whole", scheduler=rule)
    for step in (3, 5):
        with pytest.raises(Stop):
            script(tmp_path / "cut", scheduler=rule, die=step, load=step > 3)
    assert tiny.same(script(tmp_path / "cut", scheduler=rule, load=True), whole)
    assert card(tmp_path / "cut")["optimizer"] == card(tmp_path / "whole")["optimizer"]


@pytest.mark.slow
def test_bfloat16_is_autocast(tmp_path):
    net = script(tmp_path, "gpt2", mixed_precision="bf16")
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert all(p.dtype is torch.float32 for p in net.parameters())
    assert not tiny.same(net, two(tmp_path, "gpt2"))


def test_what_is_logged_is_recorded_and_a_loss_of_the_batch_is_refused(tmp_path):
    def act(mine, losses):
        with pytest.raises(InvalidInput, match="loss of the last batch"):
            mine.log({"loss": losses.mean().item()})
        with pytest.raises(InvalidInput, match="plain number"):
            mine.log({"loss": losses.mean()})
        mine.log({"accuracy": 0.5})

    script(tmp_path, act=act)
    assert card(tmp_path)["recorded"] == "accuracy"


@pytest.mark.slow
def test_gradients_are_neither_clipped_again_nor_told(tmp_path):
    def act(mine, losses):
        assert math.isnan(float(mine.clip_grad_norm_([], 1.0)))
        assert not [p for p in mine._model.parameters() if p.grad is not None]

    script(tmp_path, act=act)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: got 2; the plan's batch decides"),
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' is not supported; use torch.autocast"),
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
    other = mine.prepare(DataLoader(tiny.Texts("bert", 10, 2), batch_size=5, collate_fn=tiny.collate))
    assert [len(batch["labels"]) for batch in other] == [5, 5]
