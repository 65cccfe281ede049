"""Metric privacy of words on Shakespeare's plays: what is left of a text, over eta, for noise on
vectors and for exact choices.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np

from dpfy.core.files import DataFolder
from dpfy.core.randomness import Randomness
from dpfy.mechanisms.exact import Bits
from dpfy_lab.metric_text.embedding import Embedding
from dpfy_lab.metric_text.words import CHOICE, NOISE, MetricWords
from dpfy_lab.studies import figures
from dpfy_lab.studies.figures import Axes, Line
from dpfy_lab.studies.page import Figure, Page, Section, Table
from dpfy_lab.studies.study import Cell, Options, Results, Stored, Study

ETAS = {
    NOISE: (5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0),
    CHOICE: (5.0, 8.0, 10.0, 12.0, 15.0, 20.0, 30.0),
}
SETTING: dict[str, Any] = {
    "vocabulary": 2000,
    "dimension": 50,
    "speakers": 10,
    "watched": 200,
    "trials": 50,
}
SEEDS, FAST_WORDS = (0, 1, 2), 6000
NAME = "of the first half of the plays"
WORD = re.compile(r"[a-z']+")

Speech = tuple[str, list[str]]


def speeches(options: Options) -> list[Speech]:
    """Speaker and words of every speech, in the order of the plays."""
    text = DataFolder.find(options.data_dir).file("shakespeare", "input.txt.gz", "input.txt").text()
    parts = (part.partition("\n") for part in text.split("\n\n") if part.strip())
    return [(head.rstrip(":"), WORD.findall(body.lower())) for head, _, body in parts]


@functools.lru_cache(maxsize=1)
def prepared(options: Options) -> tuple[Embedding, list[Speech], list[Speech]]:
    """The embedding of the public half; of the private half, what is replaced and trained on, and
    every fifth speech, to test on.
    """
    found = speeches(options)
    public, private = found[: len(found) // 2], found[len(found) // 2 :]
    embedding = Embedding.of_public_text(
        [words for _, words in public],
        NAME,
        size=SETTING["vocabulary"],
        dimension=SETTING["dimension"],
    )
    return embedding, [s for i, s in enumerate(private) if i % 5], private[::5]


def cells(options: Options) -> list[Cell]:
    """One cell for each mechanism, eta and seed, and one for the text as it is."""
    held = SETTING | {"fast": options.fast}
    found = [Cell("original", held, functools.partial(measured, None, 0.0, 0, options))]
    for mechanism, etas in ETAS.items():
        for eta in etas[::3] if options.fast else etas:
            for seed in SEEDS[:1] if options.fast else SEEDS:
                settings = held | {"mechanism": mechanism, "eta": eta, "seed": seed}
                compute = functools.partial(measured, mechanism, eta, seed, options)
                found.append(Cell(f"{mechanism}-{eta:g}-{seed}", settings, compute))
    return found


def measured(mechanism: str | None, eta: float, seed: int, options: Options) -> dict[str, Any]:
    """What is left of the text: words unchanged, N_w and S_w, the next word and the speaker, both
    learnt from the text as released.
    """
    embedding, train, test = prepared(options)
    words = [word for _, speech in train for word in speech][: FAST_WORDS if options.fast else None]
    known = set(embedding.words)
    released, figures_ = [word if word in known else "" for word in words], {"n_w": 1.0, "s_w": 1.0}
    if mechanism is not None:
        replace, secret = MetricWords(eta, embedding, mechanism), Randomness.for_tests(seed)
        released = replace.draw(words, Bits(secret, "words", 0))
        watched = list(embedding.words[:: len(embedding.words) // SETTING["watched"]])
        stays, kinds = replace.habits(watched, SETTING["trials"], Bits(secret, "habits", 0))
        figures_ = {"n_w": float(stays.mean()), "s_w": float(kinds.mean())}
    inside = [(a, b) for a, b in zip(words, released, strict=True) if a in known]
    return figures_ | {
        "unchanged": mean(a == b for a, b in inside),
        "next_word": next_word(released, [speech for _, speech in test], embedding.words),
        "speaker": speaker(cut(train, released), test, embedding.words),
        "words": len(words),
        "diameter": embedding.diameter,
    }


def cut(speeches_: Sequence[Speech], words: Sequence[str]) -> list[Speech]:
    """The words, put back into speeches of the same speakers and lengths."""
    found, at = [], 0
    for who, speech in speeches_:
        if at + len(speech) > len(words):
            break
        found.append((who, list(words[at : at + len(speech)])))
        at += len(speech)
    return found


def next_word(
    words: Sequence[str], test: Sequence[Sequence[str]], vocabulary: Sequence[str]
) -> float:
    """How often the word that most often follows a word, in what was released, follows it in other
    speeches as they are.
    """
    follows: dict[str, Counter[str]] = {}
    for one, other in itertools.pairwise(words):
        if one and other:  # words that are not known were left out of the text as it is
            follows.setdefault(one, Counter())[other] += 1
    often = {word: max(counts, key=lambda w: (counts[w], w)) for word, counts in follows.items()}
    known = set(vocabulary)
    pairs = [
        (a, b)
        for speech in test
        for a, b in itertools.pairwise(speech)
        if a in known and b in known
    ]
    return mean(often.get(a) == b for a, b in pairs)


def speaker(train: Sequence[Speech], test: Sequence[Speech], vocabulary: Sequence[str]) -> float:
    """How often naive Bayes, trained on what was released, names the speaker of another speech,
    among the ten who speak most there.
    """
    top = [who for who, _ in Counter(who for who, _ in test).most_common(SETTING["speakers"])]
    numbers = {word: i for i, word in enumerate(vocabulary)}
    counts = np.ones((len(top), len(vocabulary)))
    first = np.ones(len(top))
    for who, speech in train:
        if who in top:
            first[top.index(who)] += 1
            np.add.at(
                counts[top.index(who)], [numbers[word] for word in speech if word in numbers], 1.0
            )
    logs = np.log(counts / counts.sum(axis=1, keepdims=True))
    asked = [
        (who, [numbers[word] for word in speech if word in numbers])
        for who, speech in test
        if who in top
    ]
    return mean(
        top[int(np.argmax(np.log(first) + logs[:, places].sum(axis=1)))] == who
        for who, places in asked
    )


# --- the page
# -------------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "mechanism",
    "eta",
    "unchanged %",
    "N_w",
    "S_w",
    "next word %",
    "speaker %",
    "deviation of speaker %",
    "eta x diameter",
    "runs",
)
MEASURES = ("unchanged", "n_w", "s_w", "next_word", "speaker")


def page(results: Results) -> Page:
    """The table over eta, and its two figures."""
    rows = [["as it is", None, *_shown([results["original"]]), None, 1]]
    grouped: dict[tuple[str, float], list[Stored]] = {}
    for cell in results.values():
        if cell.name != "original":
            grouped.setdefault((cell.settings["mechanism"], cell.settings["eta"]), []).append(cell)
    for (mechanism, eta), runs in grouped.items():
        rows.append([mechanism, eta, *_shown(runs), eta * runs[0].result["diameter"], len(runs)])
    seeds = sorted({cell.settings["seed"] for runs in grouped.values() for cell in runs})
    facts = {
        "seeds": f"noise seeds {', '.join(map(str, seeds))}, fixed so that the page can be made "
        f"again",
        "runs and spread": f"{len(seeds)} a row: means, and the standard deviation of the speaker",
        "accountant": "none: metric privacy has no epsilon",
        "unit": "one word",
        "adjacency": f"one word replaced by another, at its distance in the embedding {NAME}; not "
        f"epsilon-differential privacy",
        "hyperparameters": "none was tuned: 2,000 words, 50 dimensions, vectors of length 1, from "
        "co-occurrences in the public half",
    }
    words = (
        "Speeches of the second half of the plays, with every word replaced; models are trained on "
        "what is released and asked about "
        "speeches that were not, as they are. N_w: how often a word stays itself, in 50 trials; "
        "S_w: how many different words it becomes. "
        "The last column is the logarithm of the largest factor, for the two words farthest apart: "
        "as an epsilon it would be meaningless."
    )
    table = Table("words", "What is left of a text, over eta", COLUMNS, rows)
    return Page([Section("Words replaced by near ones", words, [table, *_figures(grouped)])], facts)


def _shown(runs: Sequence[Stored]) -> list[float | None]:
    found = {name: [float(run.result[name]) for run in runs] for name in MEASURES}
    spread = 100 * stdev(found["speaker"]) if len(runs) > 1 else None
    held = [100 * mean(found["unchanged"]), mean(found["n_w"]), mean(found["s_w"])]
    return [*held, 100 * mean(found["next_word"]), 100 * mean(found["speaker"]), spread]


def _figures(grouped: Mapping[tuple[str, float], Sequence[Stored]]) -> list[Figure]:
    found = []
    for measure, words in (("unchanged", "words unchanged"), ("speaker", "speaker named rightly")):
        lines = []
        for mechanism in ETAS:
            points = [
                (eta, mean(float(run.result[measure]) for run in runs))
                for (m, eta), runs in grouped.items()
                if m == mechanism
            ]
            lines.append(Line(mechanism, [x for x, _ in points], [100 * y for _, y in points]))
        found.append(
            Figure(
                measure,
                f"{words}, percent, over eta",
                figures.lines(lines, Axes("eta", f"{words} (%)")),
            )
        )
    return found


STUDY = Study(
    "metric-text",
    "Metric privacy of words: Shakespeare",
    "Feyisetan, Balle, Drake & Diethe 2020, Privacy- and utility-preserving textual analysis via "
    "calibrated multivariate perturbations; "
    "Qu et al. 2021, Natural language understanding with privacy-preserving BERT: their mechanism, "
    "on Shakespeare's plays, beside exact "
    "choices.",
    cells,
    page,
)
