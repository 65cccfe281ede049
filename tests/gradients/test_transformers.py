"""Models of transformers, built from a random configuration, and LoRA adapters of peft: exact, with
no change to their code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import dpfy  # noqa: E402
from dpfy.gradients.clip import FlatClip  # noqa: E402
from dpfy.gradients.engine import Grads  # noqa: E402
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine  # noqa: E402
from dpfy.gradients.engines.loop import LoopEngine  # noqa: E402
from dpfy.models.repair import repair  # noqa: E402

V, T, B = 40, 6, 3


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=V,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )


def masked_bert() -> nn.Module:
    """The head is tied to the embedding, and its bias is shared by two modules."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=V,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    )


def causal(kind: str, **more: Any) -> nn.Module:
    shape = {
        "vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**shape, **more)
    )  # type: ignore[no-any-return]


def llama() -> nn.Module:
    return causal("Llama", num_key_value_heads=1)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=V,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def mistral() -> nn.Module:
    return causal("Mistral", num_key_value_heads=2, sliding_window=3)


def mixtral() -> nn.Module:
    """A mixture of experts, whose tokens choose their weights: the shapes of a step do not depend
    on who goes where.
    """
    model = causal("Mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    model.set_experts_implementation("batched_mm")
    return model


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=V,
        d_model=16,
        num_mel_bins=4,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=5,
        max_target_positions=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic", num_labels=3
    )
    return repair(transformers.ResNetForImageClassification(config)).model


def clip() -> nn.Module:
    """Two towers. The loss of an example is the distance of its own pair: the usual one compares
    all pairs of the batch.
    """
    tower = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    text = tower | {
        "vocab_size": V,
        "max_position_embeddings": 8,
        "eos_token_id": V - 1,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    image = tower | {"image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    )


def with_lora(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Adapters on every linear layer inside of the model; of the ResNet on its convolutions."""

    def adapted() -> nn.Module:
        peft = pytest.importorskip("peft")
        model = make()
        heads = {
            m
            for m in (getattr(model, name, None) for name in ("lm_head", "proj_out", "classifier"))
            if m is not None
        }
        kinds = (
            (nn.Linear, nn.Conv2d)
            if make is resnet
            else (nn.Linear, transformers.pytorch_utils.Conv1D)
        )
        names = [
            name for name, m in model.named_modules() if isinstance(m, kinds) and m not in heads
        ]
        return peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
        )

    return adapted


PLAIN = {
    "bert": bert,
    "masked bert": masked_bert,
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "resnet": resnet,
    "clip": clip,
}
MODELS = PLAIN | {f"{name} with lora": with_lora(make) for name, make in PLAIN.items()}


def inputs(name: str) -> dict[str, Any]:
    """Inputs of a model, in the order in which they are records of a data set."""
    kind, index = name.removesuffix(" with lora"), torch.randint(3, V - 1, (B, T))
    image = torch.randn(B, 3, 8, 8, dtype=torch.float64)
    given: dict[str, dict[str, Any]] = {
        "vit": {"pixel_values": image},
        "resnet": {"pixel_values": torch.randn(B, 3, 16, 16, dtype=torch.float64)},
        "clip": {
            "input_ids": torch.cat([index, torch.full((B, 1), V - 1)], 1),
            "pixel_values": image,
        },
        "whisper": {
            "input_features": torch.randn(B, 4, 10, dtype=torch.float64),
            "decoder_input_ids": index,
        },
        "t5": {"input_ids": index, "decoder_input_ids": torch.randint(3, V, (B, T))},
    }
    return given.get(kind, {"input_ids": index})


def losses_of(model: nn.Module, given: dict[str, Any]) -> Tensor:
    out = model(**given)
    if hasattr(out, "image_embeds"):
        return 1 - (out.text_embeds * out.image_embeds).sum(1)
    logits = out.logits
    if logits.dim() == 2:
        first = next(iter(given.values())).flatten(1)[:, 0]
        return F.cross_entropy(logits, (first.abs() * 7).long() % logits.shape[1], reduction="none")
    target = (given.get("input_ids") if "input_ids" in given else given["decoder_input_ids"]).roll(
        -1, 1
    )
    return (
        F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        .view(target.shape)
        .mean(1)
    )


def distance(a: Grads, b: Grads) -> float:
    assert list(a) == list(b)
    gap = math.sqrt(sum(float((a[k] - b[k]).square().sum()) for k in a))
    return gap / math.sqrt(sum(float(b[k].square().sum()) for k in b))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for attention in (
        m
        for m in model.modules()
        if hasattr(m, "attention_dropout") and isinstance(m.attention_dropout, float)
    ):
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
    for rule in (FlatClip(0.1), FlatClip(math.inf)):
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(name).items()}
        expected = loop.bounded_sum(losses_of(oracle, given), rule).value
        for _ in range(2):
            found = fast.bounded_sum(losses_of(model, given), rule).value
        assert distance(found, expected) < tolerance
    assert not fast.example_by_example
    fast.detach()
    loop.detach()


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("resnet")])
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    """Nor does any part go example by example then, where tensors may be read only once. (ResNet
    has no such switch.)
    """
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
        assert (
            distance(fast.bounded_sum(losses_of(model, given), FlatClip(0.1)).value, expected)
            < 1e-9
        )
    left = {
        part for part in fast.example_by_example if ".experts." not in part
    }  # tables from which examples choose
    assert not left
    fast.detach()
    loop.detach()


@pytest.mark.parametrize("name", PLAIN)
def test_the_place_of_the_batch_is_measured_at_the_first_steps_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = without_dropout(MODELS[name]().double())
    fast = BookkeepingEngine()
    fast.attach(model)
    given = inputs(name)
    for _ in range(
        4
    ):  # at the first it turns out that positions have no batch, at the second where they meet it
        fast.bounded_sum(losses_of(model, given), FlatClip(1.0))
    monkeypatch.setattr(fast, "_refuted", lambda *rest: pytest.fail("measured again"))
    fast.bounded_sum(losses_of(model, given), FlatClip(1.0))
    assert fast.sums.steady == (name not in ("t5", "whisper", "clip", "mixtral"))
    fast.detach()


def trained(name: str, engine: str, folder: Path) -> tuple[dict[str, Tensor], Any]:
    """The weights after three private steps in a loop of the user's own, and the training."""
    torch.manual_seed(0)
    model = without_dropout(MODELS[name]().double())
    fields = list(inputs(name))
    data = tuple(torch.cat([inputs(name)[field] for _ in range(8)]) for field in fields)
    plan = dpfy.dpsgd(len(data[0]), 8, steps=3, clip_norm=0.5).with_noise(0.5, delta=1e-3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    runtime = dpfy.Runtime(engine=engine)
    with dpfy.PrivateTraining(
        model, optimizer, data, plan, dpfy.Run(folder, seed=1), runtime=runtime
    ) as training:
        for batch in training.batches():
            training.step(losses_of(model, dict(zip(fields, batch, strict=True))))
        routes = getattr(training.engine, "example_by_example", None)
    return {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}, routes


QUICK = ("bert with lora", "t5", "whisper", "clip")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_a_private_training_equals_that_of_the_loop(name: str, tmp_path: Path) -> None:
    found, routes = trained(name, "bookkeeping", tmp_path / "fast")
    expected, _ = trained(name, "loop", tmp_path / "loop")
    assert distance(found, expected) < 1e-9
    assert not routes
