"""Models by other people, at tiny sizes: accepted, and equal to the reference loop in float64.

`python benchmarks/zoo.py` runs all families, with time and memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from zoo import TOLERANCE, exactness
from zoo_families import FAMILIES, OWN

KINDS = [
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "OlmoForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoForCausalLM",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "MptForCausalLM",
    "GraniteForCausalLM",
    "NemotronForCausalLM",
    "GPT2LMHeadModel",
    "OpenAIGPTLMHeadModel",
    "BertModel",
    "BertForSequenceClassification",
    "RobertaForSequenceClassification",
    "DistilBertForSequenceClassification",
    "AlbertForSequenceClassification",
    "ElectraForSequenceClassification",
    "MPNetForSequenceClassification",
    "SqueezeBertForSequenceClassification",
    "RoFormerForSequenceClassification",
    "LongformerForSequenceClassification",
    "DebertaV2ForSequenceClassification",
    "FNetForSequenceClassification",
    "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
    "MarianMTModel",
    "ViTForImageClassification",
    "DeiTForImageClassification",
]

BY_RULE = set(KINDS) - {"BartForConditionalGeneration", "DebertaV2ForSequenceClassification"}
"""Nothing of these goes through the graph example by example."""

ADAPTED = ["Llama, LoRA", "Llama, IA3", "Llama, LN tuning"]


@pytest.mark.parametrize("name", [*OWN, *KINDS, *ADAPTED])
def test_a_model_by_other_people_equals_the_reference_loop(name: str) -> None:
    error, path = exactness(name, batches=(3, 2))
    assert error <= TOLERANCE
    if name in BY_RULE:
        assert not path


def test_every_family_is_named_once() -> None:
    assert len(FAMILIES) > 150
    assert len([*OWN, *KINDS, *ADAPTED]) >= 40
