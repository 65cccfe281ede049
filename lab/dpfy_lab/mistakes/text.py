"""Mistakes of synthetic text: private texts in what is sampled, weights that know them without noise,
steps with too little noise, and texts that are read before they are paid for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dpfy_lab.checks.text import NOISE, ORDER, REPLAYED
from dpfy_lab.selftest.mistake import mistake
from dpfy_lab.selftest.patch import Patch

RUN = "dpfy.synthetic.text.run"
RELEASE = "dpfy.noise.stream.NoiseStream.release"
SAMPLED = f"{RUN}.sampled"


def knowing(target: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """A replacement that is given the tokens of the private texts too: `change(real, rows, ...)`."""

    def apply(patch: Patch) -> None:
        rows: list[Any] = []

        def read(real: Any, *given: Any) -> Any:
            found = real(*given)
            rows[:] = found
            return found

        patch.around(f"{RUN}._rows", read)
        patch.around(target, lambda real, *given, **named: change(real, rows[0], *given, **named))

    return apply


def words_of(tokens: Any, row: Any) -> str:
    """A private text."""
    return str(tokens.decode([t for t in row.tolist() if t != tokens.end]))


def copied(
    real: Any, rows: Any, model: Any, count: int, length: int, tokens: Any, *more: Any
) -> Any:
    """The first private text is among the samples."""
    return [words_of(tokens, rows[0]), *real(model, count, length, tokens, *more)[1:]]


def prompted(
    real: Any, rows: Any, model: Any, count: int, length: int, tokens: Any, *more: Any
) -> Any:
    """Samples begin as private texts do."""
    made = real(model, count, length, tokens, *more)
    return [words_of(tokens, row)[:3] + text[3:] for row, text in zip(rows, made, strict=False)]


def as_long(
    real: Any, rows: Any, model: Any, count: int, length: int, tokens: Any, *more: Any
) -> Any:
    """Samples are as long as private texts are on average."""
    mean = float((rows != tokens.end).sum(1).double().mean())
    return [text[: int(mean)] for text in real(model, count, length, tokens, *more)]


def likest(
    real: Any, rows: Any, model: Any, count: int, length: int, tokens: Any, *more: Any
) -> Any:
    """Of twice as many samples, those are kept that are most like private texts."""
    known = {c for row in rows for c in words_of(tokens, row)}
    made = real(model, 2 * count, length, tokens, *more)
    return sorted(made, key=lambda text: -sum(c in known for c in text))[:count]


for name, words, change in (
    ("text-copied", "a private text is among the samples", copied),
    ("text-prompted", "samples are prompted with the first letters of private texts", prompted),
    ("text-length", "samples are as long as private texts are on average", as_long),
    ("text-likest", "of several samples the one that is most like private texts is kept", likest),
):
    mistake(name, words, REPLAYED)(knowing(SAMPLED, change))


def first_weights(real: Any, rows: Any, *given: Any, **named: Any) -> Any:
    """A model whose weights were made with the private texts."""
    model = real(*given, **named)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1e-3 * float(rows.double().mean()))
    return model


mistake(
    "text-first-weights", "training begins at weights that private texts were used for", REPLAYED
)(knowing(f"{RUN}.ByteTransformer", first_weights))


def vocabulary_told(real: Any, rows: Any, *given: Any) -> Any:
    """The report says how many tokens private texts have."""
    return real(*given) | {"vocabulary": len(set(rows.reshape(-1).tolist()))}


mistake("text-vocabulary-told", "the report says how many letters private texts have", REPLAYED)(
    knowing(f"{RUN}._sampled", vocabulary_told)
)


@mistake(
    "text-clip-forgotten",
    "the gradient of a text is not clipped",
    REPLAYED,
    "dpfy.gradients.clip.FlatClip.scale",
)
def _(real: Any, self: Any, squared_norms: Any) -> Any:
    return torch.ones_like(squared_norms)


@mistake("text-noise-missing", "a step has no noise", NOISE, RELEASE)
def _(real: Any, self: Any, total: Any, step: int, *rest: Any) -> Any:
    return real(replace(self, scale=self.scale * (1e-3 if step == 2 else 1)), total, step, *rest)


@mistake(
    "text-calibrated-for-less",
    "the noise is calibrated for four times the epsilon that was asked",
    NOISE,
    f"{RUN}.planned",
)
def _(real: Any, terms: Any, *given: Any) -> Any:
    return real(replace(terms, epsilon=4 * terms.epsilon), *given)


@mistake(
    "text-read-first",
    "texts are read before the training is reserved",
    ORDER,
    f"{RUN}.synthesize_text",
)
def _(real: Any, texts: Any, **named: Any) -> Any:
    return real(texts() if callable(texts) else texts, **named)
