"""Losses by name: one loss for each example, from what the model gave for it and what it should
have given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dpfy.core.errors import InvalidInput

Loss = Callable[..., Tensor]
"""(outputs, targets) to one loss for each example."""

LEFT_OUT = -100
"""A token with this label is not counted, as everywhere in torch."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example; for sequences and images the mean over positions. Probabilities are
    targets too.
    """
    if targets.is_floating_point():
        if targets.shape != outputs.shape or outputs.dim() < 2:
            rule = (
                'classes are whole numbers: convert with labels.long(), or use loss="mse" or "bce" '
                "where they are none"
            )
            raise InvalidInput("labels", _told(targets), rule)
        losses = functional.cross_entropy(
            outputs.flatten(0, -2), targets.flatten(0, -2), reduction="none"
        )
        return losses.view(len(outputs), -1).mean(1)
    if outputs.dim() == 2 and targets.dim() == 1 and len(outputs) == len(targets):
        return _entropy(outputs, targets.long())  # as people write it: runs of both kinds are one
    return _of_classes(outputs, targets).mean(1)


def tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy over the positions of an example, those labelled -100 left out; an
    example without any has loss 0.
    """
    whole = classes_of("labels", targets)
    return _of_classes(outputs, whole).sum(1) / _counted(whole).sum(1).clamp(min=1)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Like `tokens`, where the labels are the text itself: each position is asked for the token
    after it.
    """
    if outputs.dim() != 3 or targets.dim() != 2 or outputs.shape[1] < 2:
        raise _unequal(
            outputs,
            targets,
            "next_token needs outputs [rows, positions, vocabulary] and labels [rows, positions]",
        )
    return tokens(outputs[:, :-1], targets[:, 1:])


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error per example."""
    return _each(outputs, targets, functional.mse_loss)


def squared_error_of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error per example to 1 for its class and 0 for all others."""
    classes = functional.one_hot(classes_of("labels", targets), outputs.shape[1])
    return squared_error(outputs, classes)


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error per example."""
    return _each(outputs, targets, functional.l1_loss)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean Huber loss per example: squares of small errors, and of large ones the absolute
    value.
    """
    return _each(outputs, targets, functional.huber_loss)


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross entropy of logits, the mean over the labels of an example: one yes or no, or
    several at once.
    """
    return _each(outputs, targets, functional.binary_cross_entropy_with_logits)


def _each(outputs: Tensor, targets: Tensor, of: Callable[..., Tensor]) -> Tensor:
    """The mean over an example of what `of` gives for each number; targets become numbers of the
    outputs' type.
    """
    if len(outputs) != len(targets) or outputs.numel() != targets.numel():
        raise _unequal(
            outputs,
            targets,
            "this loss needs one target for each number that the model gives; classes need "
            "cross_entropy",
        )
    flat = targets.reshape(len(targets), -1).to(outputs.dtype)
    return of(outputs.reshape(len(outputs), -1), flat, reduction="none").mean(1)


def _of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """[rows, positions] of cross entropy; classes are the last dimension of the outputs, or the
    second as in torch's own.
    """
    whole = classes_of("labels", targets)
    if whole.shape == (*outputs.shape[:-1], 1):
        whole = whole.squeeze(-1)
    if outputs.dim() >= 2 and whole.shape == outputs.shape[:-1]:
        losses = _entropy(outputs.flatten(0, -2), whole.flatten())
    elif outputs.dim() >= 3 and whole.shape == (len(outputs), *outputs.shape[2:]):
        losses = _entropy(outputs, whole)
    else:
        raise _unequal(
            outputs,
            targets,
            "cross entropy needs a score for each class and one class for each row or position",
        )
    return losses.reshape(len(outputs), -1)


def _entropy(outputs: Tensor, classes: Tensor) -> Tensor:
    try:
        return functional.cross_entropy(outputs, classes, reduction="none", ignore_index=LEFT_OUT)
    except IndexError:  # which would show the label
        raise InvalidInput(
            "labels",
            "a class outside",
            f"must be from 0 to {outputs.shape[1] - 1}: one of the model's outputs",
        ) from None


def classes_of(name: str, targets: Tensor) -> Tensor:
    """Class labels as torch wants them. SingleDevice numbers of any width are; others are refused."""
    if targets.is_floating_point() or targets.is_complex():
        raise InvalidInput(
            name, _told(targets), "classes are whole numbers: convert with labels.long()"
        )
    return targets.long()


def _counted(targets: Tensor) -> Tensor:
    return (targets != LEFT_OUT).reshape(len(targets), -1)


def _told(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} of shape {list(t.shape)}"


def _unequal(outputs: Tensor, targets: Tensor, rule: str) -> InvalidInput:
    return InvalidInput(
        "labels", f"{_told(targets)} for outputs of shape {list(outputs.shape)}", rule
    )


def right_class(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """1 for each row whose class has the highest score; None where the targets are no classes of
    rows.
    """
    pairs = of_one_class(outputs, targets)
    return None if pairs is None else (pairs[0] == pairs[1]).double()


def right_labels(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """The share of each row's labels whose logit lies on the right side."""
    if outputs.numel() != targets.numel():
        return None
    told, due = (t.reshape(len(t), -1) for t in (outputs > 0, targets > 0.5))
    return (told == due).double().mean(1)


def right_tokens(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """The share of each row's counted tokens that have the highest score."""
    if outputs.shape[:-1] != targets.shape or targets.is_floating_point():
        return None
    counted = _counted(targets)
    right = (outputs.argmax(-1) == targets).reshape(len(targets), -1) & counted
    return right.sum(1).double() / counted.sum(1).clamp(min=1)


def right_next(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """`right_tokens` of the token after each position."""
    return right_tokens(outputs[:, :-1], targets[:, 1:])


def of_one_class(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """(predicted, true, how many classes), for one class a row; None for anything else."""
    if targets.shape == (*outputs.shape[:1], 1):
        targets = targets.squeeze(1)
    if (
        targets.is_floating_point()
        or outputs.dim() != 2
        or outputs.shape[1] < 2
        or targets.shape != outputs.shape[:1]
    ):
        return None
    return outputs.argmax(1), targets.long(), outputs.shape[1]


def of_yes_or_no(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int] | None:
    """(predicted, true, 2), for one logit a row; None for several."""
    if outputs.numel() != len(outputs):
        return None
    return (outputs.flatten() > 0).long(), (targets.flatten() > 0.5).long(), 2


@dataclass(frozen=True)
class NamedLoss:
    """A loss; the share of an example's answers that are right, from 0 to 1 (None without answers);
    and its classes, if it has one.

    `whole` says that targets are whole numbers.
    """

    loss: Loss
    right: Callable[[Tensor, Tensor], Tensor | None] | None = None
    pairs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, int] | None] | None = None
    whole: bool = False


CLASSES = NamedLoss(cross_entropy, right_class, of_one_class)
MSE, BINARY = NamedLoss(squared_error), NamedLoss(binary, right_labels, of_yes_or_no)
LOSSES: dict[str, NamedLoss] = {
    "cross_entropy": CLASSES,
    "mse": MSE,
    "squared_error": MSE,
    "l1": NamedLoss(absolute_error),
    "huber": NamedLoss(huber),
    "bce": BINARY,
    "multi_label": BINARY,
    "tokens": NamedLoss(tokens, right_tokens, whole=True),
    "next_token": NamedLoss(next_token, right_next, whole=True),
}

OF_CLASSES: dict[str, str | Loss] = {
    "cross_entropy": "cross_entropy",
    "squared_error": squared_error_of_classes,
}
"""What the names mean for a classifier, whose targets are classes."""


def check_type(loss: str, name: str, dtype: torch.dtype, dimensions: int) -> None:
    """Refuse, by type and number of dimensions alone, labels that the loss called `loss` cannot
    take.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    if floating and (LOSSES[loss].whole or (loss == "cross_entropy" and dimensions == 1)):
        rule = (
            'classes are whole numbers: convert with labels.long(), or use loss="mse" or "bce" '
            "where they are none"
        )
        raise InvalidInput(name, str(dtype).removeprefix("torch."), rule)
