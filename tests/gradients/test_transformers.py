"""Models of transformers, built from a random configuration, and LoRA adapters of peft: exact, with no change to their code."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from dpfy.gradients.clip import FlatClip  # noqa: E402
from dpfy.gradients.engine import Grads  # noqa: E402
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine  # noqa: E402
from dpfy.gradients.engines.loop import LoopEngine  # noqa: E402

V, T, B = 40, 6, 3


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    )


def masked_bert() -> nn.Module:
    """The head is tied to the embedding, and its bias is shared by two modules."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V, n_positions=8, n_embd=16, n_layer=2, n_head=2))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )
    return transformers.T5ForConditionalGeneration(config)


def with_lora(model: nn.Module, targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, lora_dropout=0.0))


MODELS = {
    "bert": bert,
    "masked bert": masked_bert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "t5": t5,
    "bert with lora": lambda: with_lora(bert(), ["query", "value"]),
    "gpt2 with lora": lambda: with_lora(gpt2(), ["c_attn"]),
    "llama with lora": lambda: with_lora(llama(), ["q_proj", "v_proj"]),
}


def inputs(name: str) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(B, 3, 8, 8, dtype=torch.float64)}
    index = torch.randint(1, V, (B, T))
    return {"input_ids": index} | ({"decoder_input_ids": torch.randint(1, V, (B, T))} if name == "t5" else {})


def losses_of(model: nn.Module, given: dict[str, Any]) -> Tensor:
    logits = model(**given).logits
    if logits.dim() == 2:
        return F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1], reduction="none")
    target = given["input_ids"].roll(-1, 1)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / math.sqrt(sum(float(b[k].square().sum()) for k in b))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for attention in (m for m in model.modules() if hasattr(m, "attention_dropout") and isinstance(m.attention_dropout, float)):
        attention.attention_dropout = 0.0
    return model.train()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loop(name: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = without_dropout(MODELS[name]().to(dtype))
    oracle = copy.deepcopy(model)
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(oracle)
    for clip in (FlatClip(0.1), FlatClip(math.inf)):
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(name).items()}
        expected = loop.bounded_sum(losses_of(oracle, given), clip).value
        for _ in range(2):
            found = fast.bounded_sum(losses_of(model, given), clip).value
        assert distance(found, expected) < tolerance
    fast.detach()
    loop.detach()


@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = without_dropout(MODELS[name]().double())
    oracle = copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fast, loop = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    loop.attach(oracle)
    given = inputs(name)
    expected = loop.bounded_sum(losses_of(oracle, given), FlatClip(0.1)).value
    for _ in range(2):
        assert distance(fast.bounded_sum(losses_of(model, given), FlatClip(0.1)).value, expected) < 1e-9
    fast.detach()
    loop.detach()


@pytest.mark.parametrize("name", MODELS)
def test_no_parameter_takes_the_batched_route(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have rows; position tables, class tokens and scales are rows of a gradient. Only T5's bias lies below other operations."""
    torch.manual_seed(0)
    model = without_dropout(MODELS[name]().double())
    fast = BookkeepingEngine()
    fast.attach(model)
    given = inputs(name)
    fast.bounded_sum(losses_of(model, given), FlatClip(1.0))
    monkeypatch.setattr(fast, "_measure", lambda *rest: pytest.fail("measured again"))
    fast.bounded_sum(losses_of(model, given), FlatClip(1.0))
    assert all("relative_attention_bias" in parameter for parameter in fast._suspects)
    fast.detach()
