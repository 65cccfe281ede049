"""What TrainingArguments may say beside a plan: translated where it can be, refused in one line
where it contradicts.

Evaluation inside of a private Trainer: on data declared public, apart from the training data,
and without a trace in the run.

One loss for each example of a Hugging Face model, from its logits: the model's own loss is a
mean over the batch.

The privacy of a run in the README.md of a saved model, which hubs show as its model report.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.core.check import one_of
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.integrations import adapter
from dpfy.plan.recipe import Plan
from dpfy.report.markdown import NAME
from dpfy.runs.folder import CARD
from dpfy.training import losses, weights
from dpfy.training.load import ReleasedModel
from dpfy.training.runtime import Runtime
from dpfy.training.validation import NARROW

DEFAULT_CLIP = 1.0
"""The max_grad_norm of TrainingArguments who do not say anything. Here it is off: the plan's clip
norm bounds each example.
"""
DEFAULT_EPOCHS = 3.0
"""The num_train_epochs of TrainingArguments who do not say anything. A whole number, 3, was given."""

REFUSED: dict[str, str] = {
    "fp16": NARROW,
    "torch_compile": "compile the model yourself: model.compile(), before it is given to the "
    "trainer",
    "auto_find_batch_size": 'give runtime=Runtime(max_physical_batch="auto")',
    "label_smoothing_factor": "give compute_loss_func with one smoothed loss for each example",
    "neftune_noise_alpha": "noise in the embeddings is not watched: leave it out",
    "dataloader_drop_last": "the plan draws the batches, and none is dropped: leave it out",
    "group_by_length": "the plan draws the batches: leave it out",
    "deepspeed": "use the plain trainer",
    "fsdp": "use PrivateTraining with a sharded model",
    "use_liger_kernel": "fused losses give no loss for each example: leave it out",
}
"""Arguments that must be unset, and the way out."""

NO: tuple[Any, ...] = (None, False, 0, 0.0, "", "no", [], {})


def check(args: Any, plan: Plan) -> None:
    """Refuse arguments that contradict the plan, or that would show what the guarantee does not
    cover.

    Guarantees: what passes changes speed, rates, evaluation on other data and what is logged of it,
    and nothing that is charged.
    """
    recipe = plan.recipe
    for name, way_out in REFUSED.items():
        if getattr(args, name, None) not in NO:
            raise Unsupported(f"{name}={getattr(args, name)!r} in private training", way_out)
    if getattr(args, "include_num_input_tokens_seen", "no") not in NO:
        raise Unsupported(
            "include_num_input_tokens_seen, which counts the private batches,", "leave it out"
        )
    if getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential"):
        raise Unsupported(
            f"train_sampling_strategy={args.train_sampling_strategy!r}",
            "the plan draws the batches: leave it out",
        )
    if args.max_steps > 0 and args.max_steps != recipe.steps:
        raise InvalidInput(
            "max_steps",
            args.max_steps,
            f"the plan has {recipe.steps} steps: leave it out, or make another plan",
        )
    epochs = args.num_train_epochs
    if args.max_steps <= 0 and (isinstance(epochs, int) or epochs != DEFAULT_EPOCHS):
        adapter.check_epochs("num_train_epochs", epochs, recipe)
    if args.max_grad_norm not in (None, 0, 0.0, DEFAULT_CLIP):
        rule = (
            "the plan's clip norm bounds each example, and the noisy mean is not clipped again: "
            "leave it out"
        )
        raise InvalidInput("max_grad_norm", args.max_grad_norm, rule)
    adapter.check_accumulation(
        "gradient_accumulation_steps",
        args.gradient_accumulation_steps,
        "per_device_train_batch_size",
    )
    if getattr(args, "world_size", 1) > 1:
        raise Unsupported(
            "PrivateTrainer with several processes", "use PrivateTraining under torchrun"
        )
    if args.n_gpu > 1:
        raise Unsupported(
            "nn.DataParallel over several GPUs",
            "set CUDA_VISIBLE_DEVICES to one of them, or use torchrun with PrivateTraining",
        )
    if os.environ.get("WANDB_WATCH", "false") not in ("", "false", "0"):
        raise Unsupported(
            "WANDB_WATCH, which logs gradients,", "unset it: gradients of the batch are private"
        )


def runtime(args: Any, given: Runtime | None) -> Runtime:
    """The speed knobs: those given, or a physical batch of per_device_train_batch_size on the
    arguments' device.
    """
    return given or Runtime(
        max_physical_batch=args.per_device_train_batch_size, device=str(args.device), progress=False
    )


PUBLIC = "public"


def require_public(trainer: Any, given: Any, asked: bool) -> None:
    """Refuse to measure while training on data that nobody declared public, and on the training
    data at any time.

    `given` is what `evaluate` was given: a data set, several by name, the name of one, or None for
    the trainer's own.
    """
    if trainer.eval_is is not None:
        one_of("eval_is", trainer.eval_is, [PUBLIC])
    if asked and trainer.eval_is != PUBLIC:
        rule = (
            'say eval_is="public" if the evaluation data is public: its metrics are logged; else '
            "evaluate after training"
        )
        raise InvalidInput("eval_is", trainer.eval_is, rule)
    require_apart(trainer, given)


def require_apart(trainer: Any, given: Any) -> None:
    """Refuse the training data, or a part of it."""
    held = trainer.eval_dataset
    data = (
        held.get(given)
        if isinstance(given, str) and isinstance(held, dict)
        else held
        if given is None
        else given
    )
    if any(
        adapter.share_records(trainer.train_dataset, one)
        for one in (data.values() if isinstance(data, dict) else [data])
    ):
        raise InvalidInput(
            "eval_dataset",
            "the training data",
            "must be other data: what is measured on it would be published",
        )


@contextmanager
def aside(trainer: Any) -> Iterator[None]:
    """Around a pass over other data: with the averaged weights; model, mode and torch's generators
    are left as they were.
    """
    model, training = trainer.model, trainer.training
    shadowed, modes = (
        {k: v for k, v in vars(model).items() if k == "forward"},
        {m: m.training for m in model.modules()},
    )
    running = training is not None and trainer.is_in_train
    try:
        with torch.random.fork_rng(devices=[]), training.averaged() if running else nullcontext():
            yield
    finally:
        vars(model).pop("forward", None)  # accelerate puts another in its place
        vars(model).pop("_original_forward", None)
        vars(model).update(shadowed)
        trainer.accelerator._models.clear()
        for module, mode in modes.items():
            module.training = mode


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


BEGIN, END = "<!-- dpfy: begin -->", "<!-- dpfy: end -->"
FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)

OTHER = (
    "The weights saved here are not those that the run ended with. The guarantee covers those of "
    "every step of the run, and nothing that "
    "was done to them since."
)


def describe(folder: Path, run: Path, model: nn.Module) -> bool:
    """Put the report of the finished run `run` into the README.md of `folder`, and its report beside
    it. False while it is unfinished.

    What was there stays; an earlier report is replaced. Where `model` holds other weights than the
    run ended with, it says so.
    """
    if not (run / CARD).is_file() or not (run / NAME).is_file():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    page, report = folder / "README.md", (run / NAME).read_text()
    held = (
        page.read_text()
        if page.is_file()
        else (front.group() if (front := FRONT.match(report)) else "")
    )
    note = "" if _released(model, run) else f"**{OTHER}**\n\n"
    body = f"{BEGIN}\n{note}{FRONT.sub('', report).strip()}\n{END}\n"
    if BEGIN in held and END in held:
        before, _, rest = held.partition(BEGIN)
        page.write_text(before + body + rest.partition(END)[2].lstrip("\n"))
    else:
        page.write_text(f"{held.rstrip()}\n\n{body}" if held else body)
    shutil.copyfile(run / CARD, folder / CARD)
    return True


def _released(model: nn.Module, run: Path) -> bool:
    """Whether `model` holds the weights that `run` released, in every bit."""
    held, mine = ReleasedModel.read(run).weights(), weights.released(model)
    return held.keys() == mine.keys() and all(
        torch.equal(t, mine[name].detach().cpu()) for name, t in held.items()
    )
