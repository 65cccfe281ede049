"""One loss for each example of a Hugging Face model, from its logits: the model's own loss is a
mean over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from dpfy.core.errors import Unsupported
from dpfy.training import losses

OWN = "give compute_loss_func, or override compute_losses, to one loss for each example"
LABELS = ("labels", "start_positions", "end_positions")

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""(outputs of the model, labels by name) to one loss for each example."""


def of_model(model: nn.Module) -> Loss:
    """The loss that goes with a model, by the ending of its class, as transformers chooses it
    too.
    """
    kind = type(base(model)).__name__
    for ending, loss in ENDINGS.items():
        if kind.endswith(ending):
            return loss
    raise Unsupported(f"the loss of {kind}", OWN)


def base(model: nn.Module) -> Any:
    """The model inside of an adapter or a compiled model."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def inputs_for(
    model: nn.Module, batch: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(what the model is called with, labels by name). Without labels a model computes no mean; a
    decoder is given its own input.
    """
    given = {name: field for name, field in batch.items() if name not in LABELS}
    labels = {name: batch[name] for name in LABELS if batch.get(name) is not None}
    inner = base(model)
    if (
        getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        and "decoder_input_ids" not in given
    ):
        given["decoder_input_ids"] = inner.prepare_decoder_input_ids_from_labels(
            labels=labels["labels"]
        )
    return given, labels


def next_token(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """The mean over an example's tokens of the loss of the token that follows; -100 does not
    count.
    """
    return losses.next_token(outputs.logits.float(), labels["labels"])


def tokens(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """The mean over an example's labelled tokens; -100 does not count."""
    return losses.tokens(outputs.logits.float(), labels["labels"])


def classes(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """Classes, several labels at once, or a number, by the type and shape of the labels."""
    logits, target = outputs.logits.float(), labels["labels"]
    if logits.shape[-1] == 1:
        return losses.squared_error(logits, target)
    if target.is_floating_point():
        return losses.binary(logits, target)
    return functional.cross_entropy(logits, target, reduction="none")


def span(outputs: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """The mean of the losses of the first and the last token of an answer."""
    pairs = (
        (outputs.start_logits, labels["start_positions"]),
        (outputs.end_logits, labels["end_positions"]),
    )
    first, last = (
        functional.cross_entropy(logits.float(), place, reduction="none") for logits, place in pairs
    )
    return (first + last) / 2


ENDINGS: dict[str, Loss] = {
    "ForCausalLM": next_token,
    "LMHeadModel": next_token,
    "ForMaskedLM": tokens,
    "ForTokenClassification": tokens,
    "ForConditionalGeneration": tokens,
    "ForSequenceClassification": classes,
    "ForImageClassification": classes,
    "ForAudioClassification": classes,
    "ForMultipleChoice": classes,
    "ForQuestionAnswering": span,
}
