"""Tiny models, texts and plans for the tests of integrations, and the loop of level 2 that each
tool must equal bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import lr_scheduler as rates
from torch.utils.data import Dataset

import dpfy
from dpfy.integrations import trainer

V, RECORDS, STEPS = 40, 48, 6
SEED = 11
"""Of torch's own generator, when training begins."""


def bert() -> nn.Module:
    shape = {
        "vocab_size": V,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**shape, num_labels=3)
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def llama() -> nn.Module:
    """With LoRA adapters: the base is frozen."""
    import peft

    shape = {
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2))
    return peft.get_peft_model(
        base,
        peft.LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1
        ),
    )


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}


def model(name: str) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return MODELS[name]()


class Texts(Dataset):
    """Texts of different lengths, as dicts; the collator pads them."""

    def __init__(self, name: str, records: int = RECORDS, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 9, (records,), generator=generator).tolist()
        self.items: list[dict[str, Any]] = []
        for length in lengths:
            ids = torch.randint(1, V, (length,), generator=generator)
            label = ids[:1].squeeze() % 3 if name == "bert" else ids
            self.items.append({"input_ids": ids, "labels": label})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


class Guarded(Texts):
    """Texts that may be read only once the run has reserved its plan."""

    def __init__(self, name: str, run: Path) -> None:
        super().__init__(name)
        self.ledger = run / "ledger.jsonl"

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert self.ledger.is_file(), "a record was read before the reservation"
        return super().__getitem__(index)


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest: ids with 0, labels of tokens with -100."""
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    labels = [item["labels"] for item in items]
    whole = (
        torch.stack(labels)
        if labels[0].dim() == 0
        else nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    )
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": whole}


def plan(steps: int = STEPS, records: int = RECORDS, batch: float = 12, **more: Any) -> dpfy.Plan:
    return dpfy.dpsgd(records, batch, steps=steps, clip_norm=0.5, **more).with_noise(
        1.0, delta=1e-2
    )


POINT = 4
MAY_STOP = plan(stopping=[POINT])
"""A plan that may end before its last step."""


def check_ended(path: Path, steps: int, billed: int = POINT) -> float:
    """The run ended after `steps`, is billed for `billed` of its plan, and verifies. What is
    billed.
    """
    made = section(path)
    epsilon = json.loads((path / "run" / "privacy.json").read_text())["guarantee"]["epsilon"]
    assert made["steps_done"] == steps
    assert made["ended"]["billed"] == billed if billed < STEPS else "ended" not in made
    assert epsilon == pytest.approx(
        MAY_STOP.epsilon_after(billed) if billed < STEPS else plan().epsilon
    )
    assert all(f.holds for f in dpfy.verify(path / "run"))
    return float(epsilon)


RUNTIME = dpfy.Runtime(max_physical_batch=8, device="cpu")


def losses(net: nn.Module, batch: dict[str, Tensor], mixed: bool = False) -> Tensor:
    """As a user of level 2 writes it; with `mixed` the model computes in bfloat16."""
    given, labels = trainer.inputs_for(net, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        outputs = net(**given)
    return trainer.of_model(net)(outputs, labels)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=1e-2)


def cosine(optimizer: torch.optim.Optimizer) -> rates.LRScheduler:
    return rates.CosineAnnealingLR(optimizer, STEPS)


def level_two(
    path: Path,
    name: str,
    optimizer_of: Any = adam,
    scheduler_of: Any = cosine,
    mixed: str = "",
    **settings: Any,
) -> nn.Module:
    """The private loop by hand, in `path`/two; `mixed`: what is computed in bfloat16, nothing, the
    model or the whole step.
    """
    net = model(name)
    net.train()
    optimizer = optimizer_of(net)
    data = dpfy.lazy(Texts(name), collate=collate)
    run = dpfy.Run(path / "two", seed=3)
    scheduler = scheduler_of(optimizer)
    torch.manual_seed(SEED)
    with dpfy.PrivateTraining(
        net, optimizer, data, plan(), run, runtime=RUNTIME, scheduler=scheduler, **settings
    ) as training:
        for batch in training.batches():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed == "step"):
                found = losses(net, batch, mixed == "model")
            training.step(found)
    return net


def section(path: Path) -> dict[str, Any]:
    """What the card of the run in `path` tells of its training."""
    found: dict[str, Any] = json.loads((path / "run" / "privacy.json").read_text())["sections"][0]
    return found


def each_model(default: str) -> list[Any]:
    """All models; all but `default` take longer."""
    return [
        name if name == default else pytest.param(name, marks=pytest.mark.slow) for name in MODELS
    ]


class Stop(Exception):
    """The process dies here."""


def die(*given: Any) -> None:
    raise Stop


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
