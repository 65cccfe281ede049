"""The claim of sampled text, which costs nothing beside the training of the model that it is
sampled from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dpfy.core import check, events
from dpfy.core.claim import STATED, YES, Assumption, Claim, register

TEXTS, FACTS = "texts.jsonl", "texts.json"


@register
@dataclass(frozen=True)
class GeneratedText(Claim):
    """So many `texts`, sampled from the model that a training in the same folder releases; `tokens`
    says in words what it reads.
    """

    texts: int
    length: int
    tokens: str

    kind: ClassVar[str] = "generated-text"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (TEXTS, FACTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("texts", self.texts, most=1 << 20)
        check.integer("length", self.length, least=2, most=1 << 16)
        check.one_line("tokens", self.tokens, 200)

    @property
    def name(self) -> str:
        """What the reservation is called."""
        return "synthetic text"

    @property
    def event(self) -> events.Event:
        """Nothing beside the training."""
        return events.Nothing()

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """Sampling is post-processing; nobody looked at the texts for a vocabulary."""
        return [
            Assumption(
                "sampling",
                "texts are made of the released model and random numbers",
                "they were",
                YES,
            ),
            Assumption(
                "vocabulary",
                "tokens, and the weights before training, are public",
                f"{self.tokens}",
                STATED,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """The section of the report."""
        return {
            "title": "Synthetic text",
            "words": "A language model was trained privately on texts, of each of which the first "
            "tokens were read; new texts were sampled "
            "from it.",
            "texts": self.texts,
            "tokens_of_a_text_at_most": self.length,
            "tokens": self.tokens,
        }
