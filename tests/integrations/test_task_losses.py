"""One loss for each example: of a batch of one it is the model's own loss, and it does not change
with the examples beside it.
"""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dpfy.integrations import trainer  # noqa: E402

V, T = 40, 6
BERT = {
    "vocab_size": V,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def words(rows: int) -> torch.Tensor:
    return torch.randint(1, V, (rows, T), generator=torch.Generator().manual_seed(rows))


def hidden(rows: int) -> torch.Tensor:
    """Labels of tokens, some of which do not count."""
    return words(rows).masked_fill(torch.arange(T) % 3 == 0, -100)


def bert(kind: str, **more):
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**BERT, **more))


def t5():
    shape = {
        "vocab_size": V,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    )


CASES = {
    "next token": (gpt2, lambda n: {"labels": hidden(n)}),
    "masked": (lambda: bert("MaskedLM"), lambda n: {"labels": hidden(n)}),
    "tagged": (
        lambda: bert("TokenClassification", num_labels=5),
        lambda n: {"labels": words(n) % 5},
    ),
    "translated": (t5, lambda n: {"labels": words(n)}),
    "classes": (
        lambda: bert("SequenceClassification", num_labels=3),
        lambda n: {"labels": words(n)[:, 0] % 3},
    ),
    "number": (
        lambda: bert("SequenceClassification", num_labels=1),
        lambda n: {"labels": words(n)[:, 0] / 7},
    ),
    "labels": (
        lambda: bert(
            "SequenceClassification", num_labels=3, problem_type="multi_label_classification"
        ),
        lambda n: {"labels": (words(n)[:, :3] % 2).float()},
    ),
    "span": (
        lambda: bert("QuestionAnswering"),
        lambda n: {"start_positions": words(n)[:, 0] % T, "end_positions": words(n)[:, 1] % T},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_that_of_the_model_for_the_example_alone(name):
    make, labels_of = CASES[name]
    torch.manual_seed(0)
    net = make().eval()
    batch = {"input_ids": words(4)} | labels_of(4)

    def losses(rows):
        given, labels = trainer.inputs_for(net, {key: field[rows] for key, field in batch.items()})
        assert not set(given) & set(trainer.LABELS)
        return trainer.of_model(net)(net(**given), labels)

    whole = losses(slice(0, 4))
    assert whole.shape == (4,)
    for row in range(4):
        alone = {key: field[row : row + 1] for key, field in batch.items()}
        assert float(whole[row]) == pytest.approx(float(net(**alone).loss), rel=1e-5)
        assert float(losses(slice(row, row + 1))[0]) == pytest.approx(float(whole[row]), rel=1e-5)


def test_an_example_without_a_label_has_no_loss_and_no_gradient():
    net = gpt2()
    given, labels = trainer.inputs_for(
        net, {"input_ids": words(2), "labels": torch.full((2, T), -100)}
    )
    losses = trainer.of_model(net)(net(**given), labels)
    assert losses.tolist() == [0.0, 0.0]
    losses.sum().backward()
    assert not any(p.grad is not None and bool(p.grad.any()) for p in net.parameters())
