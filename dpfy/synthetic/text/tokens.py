"""Texts as numbers: the bytes of UTF-8, and a language model of them for those who bring none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpfy.models.language import BYTES


class Tokens(Protocol):
    """How a text becomes numbers, and back. Public: a vocabulary that was made from the private
    texts is a release nobody charged.
    """

    @property
    def words(self) -> str:
        """What it is, for the report."""

    @property
    def end(self) -> int:
        """The token that ends a text, and begins it."""

    def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text, without its end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""


class ByteTokens:
    """A token for each byte of UTF-8, and one for the end."""

    words, end, vocabulary = "bytes of UTF-8", BYTES, BYTES + 1

    def encode(self, text: str) -> Sequence[int]:
        """See `Tokens`."""
        return text.encode("utf-8", "replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokens`; what is no UTF-8 becomes a mark."""
        return bytes(token for token in tokens if token < self.end).decode("utf-8", "replace")


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of a model: itself a tensor, or the field of that name as Hugging Face's models
    give it.
    """
    found = model(input_ids=ids)
    scores: Tensor = found if isinstance(found, Tensor) else found.logits
    return scores


def rows_of(texts: Sequence[str], tokens: Tokens, length: int) -> Tensor:
    """Texts as rows of `length` + 1 tokens: the end, the text, and the end again, to the right;
    what is longer is cut.
    """
    found = torch.full((len(texts), length + 1), tokens.end, dtype=torch.int64)
    for row, text in enumerate(texts):
        held = list(tokens.encode(text))[:length]
        found[row, 1 : 1 + len(held)] = torch.tensor(held, dtype=torch.int64)
    return found


def losses_of(model: nn.Module, rows: Tensor, end: int) -> Tensor:
    """One loss a text: the mean over its tokens and its first end of how badly each is guessed from
    those before it.
    """
    following = rows[:, 1:]
    each = functional.cross_entropy(logits_of(model, rows[:, :-1]).mT, following, reduction="none")
    counted = torch.cat(
        [torch.ones_like(following[:, :1]), (following[:, :-1] != end).cummin(dim=1).values], dim=1
    )
    return (each * counted).sum(dim=1) / counted.sum(dim=1)


@torch.no_grad()
def sampled(
    model: nn.Module, count: int, length: int, tokens: Tokens, generator: torch.Generator
) -> list[str]:
    """So many texts of at most `length` tokens, each token drawn from what the model says of those
    before it.
    """
    device = next(model.parameters()).device
    rows = torch.full((count, 1), tokens.end, dtype=torch.int64, device=device)
    going = torch.ones(count, dtype=torch.bool)
    for _ in range(length):
        chances = logits_of(model, rows)[:, -1].double().softmax(-1).cpu()
        drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
        drawn = torch.where(going, drawn, tokens.end)
        going &= drawn != tokens.end
        rows = torch.cat([rows, drawn[:, None].to(device)], dim=1)
        if not bool(going.any()):
            break
    return [tokens.decode([t for t in row if t != tokens.end]) for row in rows[:, 1:].tolist()]
