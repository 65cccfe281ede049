"""A BERT, a GPT-2 or a Llama with LoRA adapters, trained privately for one epoch on Shakespeare,
with no change to the model's code.

    pip install dpfy[text] python examples/text.py --model gpt2 --data-dir DATA      # DATA holds
    shakespeare/input.txt.gz; or set DPFY_DATA

The models come from small random configurations, so nothing is downloaded. An example is a run of
`--length` + 1 bytes of the text and no byte is in two of them. One example is the unit of privacy:
the guarantee is for such a passage, not for a scene or an author.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import dpfy
from dpfy.data.config import DataConfig
from dpfy.data.records import Records
from dpfy.data.source import load

BYTES, MASK = 256, 256  # the vocabulary of a byte, and one token more for what BERT must guess
HIDDEN_SHARE = 0.15
Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


def bert(length: int) -> nn.Module:
    """Masked language model; its head is tied to the embedding."""
    config = transformers.BertConfig(
        vocab_size=BYTES + 1,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=length,
        pad_token_id=None,
    )
    return transformers.BertForMaskedLM(config)


def gpt2(length: int) -> nn.Module:
    """Causal language model; its head is tied to the embedding."""
    config = transformers.GPT2Config(
        vocab_size=BYTES,
        n_positions=length,
        n_embd=128,
        n_layer=2,
        n_head=4,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def llama_lora(length: int) -> nn.Module:
    """Causal language model with its own weights frozen: only the adapters of peft are trained."""
    config = transformers.LlamaConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
        use_cache=False,
    )
    adapters = peft.LoraConfig(
        r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"]
    )
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def next_byte(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """One loss per record: the mean over its positions of how badly the next byte is guessed."""
    logits = model(input_ids=text).logits
    return functional.cross_entropy(logits.mT, following, reduction="none").mean(1)


def hidden_bytes(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    """One loss per record: the mean over a few hidden positions of how badly the byte there is
    guessed.
    """
    count = max(1, round(HIDDEN_SHARE * text.shape[1]))
    places = torch.rand(text.shape, device=text.device).topk(count, dim=1).indices
    logits = model(input_ids=text.scatter(1, places, MASK)).logits
    guesses = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
    return functional.cross_entropy(guesses.mT, text.gather(1, places), reduction="none").mean(1)


MODELS: dict[str, tuple[Callable[[int], nn.Module], Losses, float]] = {
    # how it is built, its losses, and a learning rate for Adam
    "bert": (bert, hidden_bytes, 2e-3),
    "gpt2": (gpt2, next_byte, 2e-3),
    "llama-lora": (llama_lora, next_byte, 5e-3),
}


@torch.no_grad()
def held_out_loss(model: nn.Module, losses: Losses, records: Records, device: str) -> float:
    """Mean loss on records that take no part in training."""
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)  # BERT: the same bytes hidden before and after
        parts = [
            losses(model, *[t.to(device) for t in records.take(rows)])
            for rows in torch.arange(len(records)).split(256)
        ]
    model.train()
    return float(torch.cat(parts).mean())


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument(
        "--data-dir", help="folder that holds shakespeare/; default: the environment's DPFY_DATA"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--length", type=int, default=64, help="bytes the model reads at once")
    parser.add_argument(
        "--batch-size", type=int, default=256, help="expected number of records in a step"
    )
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--run", default=None, help="run folder; default: a new one under runs/")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    """Load, plan, train, say what was promised and what was learnt."""
    options = parse(given)
    build, losses, rate = MODELS[options.model]
    data = load(DataConfig(kind="shakespeare", dir=options.data_dir, length=options.length))
    print(data.description)

    unit = dpfy.Unit(tokens=options.length + 1)  # bytes, which are the tokens of these models
    # of a private text state a public number instead
    records = len(data.train)  # public, as the text is
    recipe = dpfy.dpsgd(
        records=records, batch_size=options.batch_size, epochs=options.epochs, unit=unit
    )
    plan = recipe.calibrate(epsilon=options.epsilon, delta=options.delta)

    model = build(options.length).to(options.device)
    print(dpfy.inspect(model, data.test.tensors[0][:4].to(options.device)).table())
    before = held_out_loss(model, losses, data.test, options.device)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    runtime = dpfy.Runtime(max_physical_batch=64, device=options.device, progress=True)

    with dpfy.PrivateTraining(
        model, optimizer, data.train, plan, options.run, runtime=runtime
    ) as training:
        for text, following in training.batches():
            training.step(losses(model, text, following))
        after = held_out_loss(model, losses, data.test, options.device)
        guarantee = training.guarantee()
        training.finish({"held_out_loss": after})

    print(f"held-out loss {before:.3f} before, {after:.3f} after {training.steps_done} steps")
    print(guarantee.sentence(plan.delta))
    print(f"one example is a passage of {options.length + 1} bytes")
    print(f"check it: dpfy verify {training.folder.path}")


if __name__ == "__main__":
    main()
