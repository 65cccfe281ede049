"""Private text: corpora and whose they are, and vocabularies learnt from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

if TYPE_CHECKING:
    from dpfy.text.tokenizer import PrivateTokenizer as PrivateTokenizer
    from dpfy.text.tokenizer import train_tokenizer as train_tokenizer

__getattr__, __dir__ = _lazy_names(
    __name__, {"dpfy.text.tokenizer": "PrivateTokenizer train_tokenizer"}
)

__all__ = ["PrivateTokenizer", "train_tokenizer"]
