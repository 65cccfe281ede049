"""What TrainingArguments may say beside a plan: translated where it can be, refused in one line
where it contradicts.
"""

from __future__ import annotations

import os
from typing import Any

from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.integrations import adapter
from dpfy.plan.recipe import Plan
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
    and nothing that is billed.
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
