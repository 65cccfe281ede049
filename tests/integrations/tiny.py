"""Tiny models, texts and plans for the tests of integrations, and the loop of level 2 that each tool must equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

import dpfy
from dpfy.integrations import task_losses

V, RECORDS, STEPS = 40, 48, 6


def bert() -> nn.Module:
    shape = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**shape, num_labels=3))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama() -> nn.Module:
    """With LoRA adapters: the base is frozen."""
    import peft

    shape = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=2))
    return peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
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


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest: ids with 0, labels of tokens with -100."""
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    labels = [item["labels"] for item in items]
    whole = (
        torch.stack(labels) if labels[0].dim() == 0 else nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    )
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": whole}


def plan(steps: int = STEPS, records: int = RECORDS, batch: float = 12) -> dpfy.Plan:
    return dpfy.dpsgd(records, batch, steps=steps, clip_norm=0.5).with_noise(1.0, delta=1e-2)


RUNTIME = dpfy.Runtime(max_physical_batch=8, device="cpu")


def losses(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As a user of level 2 writes it."""
    given, labels = task_losses.inputs_for(net, batch)
    return task_losses.of_model(net)(net(**given), labels)


def level_two(
    path: Path, name: str, optimizer_of: Any, scheduler_of: Any = None, seed: int | None = 3, **settings: Any
) -> nn.Module:
    """The private loop by hand."""
    net = model(name)
    net.train()
    optimizer = optimizer_of(net)
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    data = dpfy.lazy(Texts(name), collate=collate)
    run = dpfy.Run(path, seed=seed)
    if (generator := settings.pop("torch_seed", None)) is not None:
        torch.manual_seed(generator)
    with dpfy.PrivateTraining(net, optimizer, data, plan(), run, runtime=RUNTIME, scheduler=scheduler, **settings) as training:
        for batch in training.batches():
            training.step(losses(net, batch))
    return net


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
