"""Synthetic text, from what is asked to the run folder: plan, reserve, read, train privately,
sample, report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import user_unit
from dpfy.data.owners import Owned, Users
from dpfy.data.records import Records
from dpfy.data.split import uncounted
from dpfy.gradients.engine import per_user
from dpfy.models.language import ByteTransformer
from dpfy.plan.recipe import Plan, dpsgd
from dpfy.runs.dataset import Dataset
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run, quiet
from dpfy.synthetic.run import seeded
from dpfy.synthetic.text.claim import FACTS, TEXTS, GeneratedText
from dpfy.synthetic.text.tokens import (
    ByteTokens,
    Tokens,
    logits_of,
    losses_of,
    rows_of,
    sampled,
)
from dpfy.text.corpus import DOCUMENT, Corpus, corpus_of
from dpfy.training.load import load
from dpfy.training.loop import PrivateTraining
from dpfy.training.run import TrainingClaims, TrainingRun, complete
from dpfy.training.runtime import Runtime

SAMPLED = 256
"""Texts that are sampled at a time."""


@dataclass(frozen=True)
class TextTerms:
    """What synthetic text may cost. `records` is the public number of texts, one of which, added or
    removed, is hidden; or of persons, where each has at most `at_most` texts that are read.
    """

    epsilon: float
    delta: float
    records: int
    at_most: int | None = None

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta", self.delta)
        check.integer("records", self.records, least=2, most=check.RECORDS)
        if self.at_most is not None:
            check.integer("at_most", self.at_most, most=check.RECORDS)


@dataclass(frozen=True)
class TextOptions:
    """How it is made: `texts` to sample, the first `length` tokens of each text are read, and how
    the model is trained (Adam).

    `batch_size` texts take part in a step on average, in `epochs` passes; the contribution of a
    text is clipped to `clip_norm`.
    """

    texts: int = 100
    length: int = 64
    batch_size: int = 256
    epochs: float = 3.0
    learning_rate: float = 2e-3
    clip_norm: float = 1.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        GeneratedText(self.texts, self.length, "tokens")
        check.integer("batch_size", self.batch_size)
        check.positive("epochs", self.epochs)
        check.positive("learning_rate", self.learning_rate)
        check.positive("clip_norm", self.clip_norm)


@dataclass(frozen=True, repr=False)
class SyntheticText(Released):
    """What was made: a finished run with the texts and the model."""

    model: nn.Module = field(repr=False)
    facts: dict[str, Any] = field(repr=False)

    @property
    def texts(self) -> list[str]:
        """The synthetic texts."""
        lines = (self.run / TEXTS).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["text"] for line in lines]

    def _told(self) -> dict[str, Any]:
        return {"texts": str(self.run / TEXTS)} | {
            k: v for k, v in self.facts.items() if k != "texts"
        }


def planned(terms: TextTerms, options: TextOptions, tokens: Tokens) -> tuple[Plan, GeneratedText]:
    """The plan of the training and the claim of the texts: nothing of it depends on the private
    texts.
    """
    batch = min(options.batch_size, terms.records)
    unit = replace(
        DOCUMENT if terms.at_most is None else user_unit(terms.at_most), tokens=options.length
    )
    recipe = dpsgd(
        terms.records, batch, epochs=options.epochs, clip_norm=options.clip_norm, unit=unit
    )
    plan = recipe.calibrate(terms.epsilon, terms.delta)
    about: dict[str, Any] = {
        "unit": unit,
        "adjacency": recipe.adjacency,
        "delta": plan.delta,
        "accountant": plan.accountant,
    }
    return plan, GeneratedText(
        options.texts, options.length, tokens.words, records=terms.records, **about
    )


TRAINING = ("batch_size", "epochs", "learning_rate", "clip_norm")
"""Settings of the training that `dpfy.synthesize` takes for texts."""


def synthesize_texts(
    held: Dataset,
    epsilon: float,
    delta: float | None,
    rows: int | None,
    device: str,
    run: Run | str | Path | None,
    progress: Progress,
    training: Mapping[str, Any],
) -> SyntheticText:
    """`dpfy.synthesize` for `dpfy.Texts`."""
    check.known_keys("synthesize", training, (*TRAINING, "model", "tokens"))
    if held.records is None:
        rule = (
            "must be given: the public number of texts, or of persons, "
            "Dataset(Texts(...), records=1000)"
        )
        raise InvalidInput("records", None, rule)
    chosen = held.rule(delta)
    given = {name: training[name] for name in TRAINING if name in training}
    options = TextOptions(
        TextOptions.texts if rows is None else rows, held.source.length, device=device, **given
    )
    return synthesize_text(
        lambda: corpus_of(held),
        terms=TextTerms(
            epsilon, chosen.value, held.records, None if held.unit is None else held.unit.at_most
        ),
        run=held.run(run),
        options=options,
        model=training.get("model"),
        tokens=training.get("tokens"),
        progress=progress,
        delta_from=chosen.origin,
    )


def synthesize_text(
    texts: Sequence[str] | Callable[[], Sequence[str] | Corpus],
    *,
    terms: TextTerms,
    run: Run | str | Path,
    options: TextOptions | None = None,
    model: nn.Module | None = None,
    tokens: Tokens | None = None,
    progress: Progress = quiet,
    delta_from: str = "given by the caller",
) -> SyntheticText:
    """Train a language model privately on texts, and sample from it, in a run folder that anyone
    can verify.

    `texts` is a list of strings, or a function that gives one, or a `Corpus`, and is called when
    the charge is reserved. `model` is any causal language model that gives logits for `input_ids`, Hugging Face's
    say, whose weights are public; with `tokens`, its public vocabulary. Without it a small
    transformer of bytes is trained from random weights.

    Guarantees: the plan is reserved before `texts` is called; of each text the first `length`
    tokens are read, and its contribution to a step is clipped as one, or that of all texts of a
    person that take part in it; what is published is the
    trained model and samples of it. A killed run goes on to the same texts.
    """
    chosen, known = options or TextOptions(), tokens or ByteTokens()
    if model is not None:
        _try(model, known, chosen.length)
    plan, claim = planned(terms, chosen, known)
    asked, size = Run.of(run), getattr(known, "vocabulary", ByteTokens.vocabulary)
    if complete(asked, plan, TrainingClaims(beside=(claim,))):
        return finished(Path(asked.path), model or ByteTransformer(chosen.length, tokens=size))
    with TrainingRun(asked, plan, beside=(claim,)) as folder:
        corpus = _read(texts, terms)
        train = _rows(corpus, known, chosen.length, terms)
        with seeded(folder.randomness, "language model"):
            language = model or ByteTransformer(chosen.length, tokens=size)
        trained = [p for p in language.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=chosen.learning_rate)
        rows = max(1, min(plan.recipe.records, 256 // (terms.at_most or 1)))
        runtime = Runtime(device=chosen.device, max_physical_batch=rows)
        with PrivateTraining(language, optimizer, train, plan, folder, runtime=runtime) as training:
            for part, *real in training.batches():
                losses = losses_of(language, part.flatten(0, -2), known.end)
                training.step(per_user(losses, *real) if real else losses)
                progress("training", training.steps_done / plan.recipe.steps)
            progress("sampling texts")
            made = _sampled(folder, language, claim, known)
            folder.tell(claim.name, **made, delta_from=delta_from)
    return finished(Path(asked.path), language)


@torch.no_grad()
def _try(model: nn.Module, tokens: Tokens, length: int) -> None:
    """Refuse a model that does not know the tokens, or reads fewer of them at a time: on a text of
    ends, before anything is reserved.
    """
    rule = (
        f"must give logits for input_ids of {length} tokens, with the token {tokens.end} among "
        f"those it knows"
    )
    try:
        place = next(model.parameters()).device
        found = logits_of(
            model, torch.full((1, length), tokens.end, dtype=torch.int64, device=place)
        )
    except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError):
        raise InvalidInput("model", type(model).__name__, rule) from None
    if found.ndim != 3 or found.shape[1] != length or found.shape[2] <= tokens.end:
        raise InvalidInput(
            "model", f"{type(model).__name__} with logits of shape {tuple(found.shape)}", rule
        )


def _read(texts: Sequence[str] | Callable[[], Sequence[str] | Corpus], terms: TextTerms) -> Corpus:
    """All texts; refuses what are none, and another number than the public one."""
    held = texts() if callable(texts) else texts
    if not isinstance(held, Corpus):
        if isinstance(held, str) or not all(isinstance(text, str) for text in held):
            raise InvalidInput(
                "texts", type(held).__name__, "must be a list of strings, one for each text"
            )
        held = Corpus(list(held))
    if terms.at_most is None and len(held.texts) != terms.records:
        raise InvalidInput(
            "records",
            terms.records,
            "is not the number of texts, which must be public to be given",
        )
    return held


def _rows(corpus: Corpus, tokens: Tokens, length: int, terms: TextTerms) -> Any:
    """What is trained on: the tokens of each text, and of each person at most so many texts."""
    rows = rows_of(corpus.texts, tokens, length)
    if terms.at_most is None or corpus.owners is None:
        return (rows,)
    return uncounted(
        Owned(Records((rows,)), Users(corpus.owners), terms.at_most), expected=terms.records
    )


def _sampled(
    folder: TrainingRun, model: nn.Module, claim: GeneratedText, tokens: Tokens
) -> dict[str, Any]:
    """Sample and write all texts; what the report repeats."""
    was, made = model.training, []
    model.eval()
    for start in range(0, claim.texts, SAMPLED):
        key = folder.randomness.key("synthetic text", start, 7)
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        made += sampled(model, min(SAMPLED, claim.texts - start), claim.length, tokens, generator)
    model.train(was)
    folder.write(TEXTS, "".join(json.dumps({"text": text}) + "\n" for text in made).encode())
    facts = {"texts": len(made), "characters": sum(map(len, made)), "model": type(model).__name__}
    folder.write(FACTS, json.dumps(facts, indent=1).encode())
    return {"texts_made": len(made), "file": TEXTS}


def finished(path: Path, model: nn.Module) -> SyntheticText:
    """Synthetic text of a finished run, with the released weights in `model`."""
    facts = storage.parsed_json(FACTS, storage.content(FACTS, path / FACTS))
    return SyntheticText.read(path, model=load(path, model), facts=facts)
