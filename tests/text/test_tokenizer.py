"""Private vocabularies: bounded counts, thresholds, one charge, and tokenizers made of what was
released alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest

import dpfy
from dpfy.core.errors import BudgetExceeded, DpfyError, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import user_unit
from dpfy.core.values import mock_permit
from dpfy.mechanisms.additive import GaussianMechanism
from dpfy.mechanisms.histogram import StabilityHistogram
from dpfy.report.card import section
from dpfy.runs.run import Run
from dpfy.testing import check_claim, check_release
from dpfy.text import tokenizer as tokenizers
from dpfy.text import train_tokenizer
from dpfy.text.claim import VocabularyClaim
from dpfy.text.corpus import DOCUMENT, Texts
from dpfy_lab import replay

DELTA = 1e-6


def notes(count=1500, seed=0):
    """Notes of few common words and some rare ones."""
    rng = np.random.default_rng(seed)
    common = ["patient", "slept", "well", "pain", "none", "walked", "today"]
    return [
        " ".join([*rng.choice(common, 5), "".join(rng.choice(list("bdfgkmz"), 9))])
        for _ in range(count)
    ]


def small(size=300, words=4, **about):
    return VocabularyClaim(size, words, 0.2, (5, 4), unit=DOCUMENT, **about)


def run_of(place, read, claim):
    return tokenizers.learn(place, read, claim).run


def test_the_contract_of_a_release():
    data = [[text] for text in notes(60)]
    claim = VocabularyClaim(280, 3, 1.5, (22, 15), unit=DOCUMENT, delta=1e-3)
    check_claim(claim)
    check_claim(VocabularyClaim.calibrated(4000, 40, 1.0, DELTA, user_unit(20)))
    check_release(
        run_of,
        claim,
        data,
        data[1:],
        outcome=lambda folder: sum(json.loads((folder / "words.json").read_text()).values()),
        trials=5,
    )


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"), [(1.0, 1e-6, 8), (0.3, 1e-5, 1), (8.0, 1e-9, 200)]
)
def test_a_calibrated_claim_is_within_what_was_asked_and_thresholds_are_least(
    epsilon, delta, words
):
    claim = VocabularyClaim.calibrated(4000, words, epsilon, delta, DOCUMENT)
    spent = dpfy.accounting.epsilon(claim.event, delta)
    assert 0.99 * epsilon < spent <= epsilon
    for mechanism in claim.rounds():
        assert isinstance(mechanism.noise, GaussianMechanism)
        lower = StabilityHistogram(mechanism.noise, mechanism.threshold - 1, words)
        assert mechanism.delta <= delta / 20 < lower.delta
    squares = sum(m.noise.noise_multiplier**-2 for m in claim.rounds())
    assert squares <= claim.noise_multiplier**-2 * (1 + 1e-12)


def test_tokenizer_is_lossless_and_shorter_and_reads_as_hugging_faces(tmp_path):
    made = train_tokenizer(notes(), epsilon=2.0, delta=DELTA, size=400, run=tmp_path / "run")
    rng = np.random.default_rng(1)
    for _ in range(50):
        text = "".join(chr(int(c)) for c in rng.integers(1, 0x2FFF, rng.integers(0, 30)))
        assert made.decode(made.encode(text)) == text
    assert len(made.encode("patient slept well")) <= 5
    assert made.end not in made.encode("patient slept well")
    assert 257 < made.vocabulary <= 400
    words = json.loads((made.run / "words.json").read_text())
    assert set(words) == {
        f"Ġ{w}" for w in ("patient", "slept", "well", "pain", "none", "walked", "today")
    } | {w for w in words if not w.startswith("Ġ")}
    assert all(finding.holds for finding in made.verify())
    assert section(made.report, "vocabulary")["tokens"] == made.vocabulary
    again = dpfy.load(made.run)
    assert again.encode("patient") == made.encode("patient")
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(made.path))
    assert fast.decode(fast("patient slept well").input_ids) == "patient slept well"


def rehearsed(claim, units, seed=3):
    names = [tokenizers._digest(texts) for texts in units]
    permit = mock_permit(claim.event, claim.releases, claim.name, claim.adjacency)
    counted = [tokenizers.words_of(texts) for texts in units]
    found = tokenizers.released_words(counted, names, claim, permit, Randomness.for_tests(seed))
    return found, tokenizers.merged(found, claim.size).to_str()


@pytest.mark.parametrize("trial", range(8))
def test_nothing_but_noisy_counts_tells_corpora_apart(trial):
    """Record and replay: one unit more, ordinary, huge, empty, strange, or a copy."""
    rng = np.random.default_rng(trial)
    texts = notes(40, trial)
    units = [texts[k : k + int(rng.integers(1, 4))] for k in range(0, 36, 4)]
    odd = [
        ["patient"],
        ["patient " * 500 + " ".join(f"w{k}" for k in range(300))],
        [""],
        ["\ud800\x00 \u200b" + "z" * 200],
        units[0],
        [],
        ["\n\n\t  ", "ÄÖ 漢字 " * 9],
        notes(30, 99),
    ][trial]
    claim = small(words=int(rng.integers(1, 9)))
    place = int(rng.integers(0, len(units)))
    more = [*units[:place], odd, *units[place:]]
    assert replay.check(lambda held: rehearsed(claim, held), units, more) == []
    strangers = [[text] for text in notes(25, 77)]
    faults = replay.check(lambda held: rehearsed(claim, held), units, strangers)
    assert all(fault.kind == "distance" for fault in faults)


def test_a_unit_counts_its_most_frequent_words_once_and_by_itself():
    words = Counter({"a": 9, "b": 1, "c": 1, "d": 5, "e": 1})
    key = b"k" * 32
    assert tokenizers.chosen_words(words, {}, 2, key, b"one") == ["a", "d"]
    assert set(tokenizers.chosen_words(words, {"a": 1.0}, 2, key, b"one")) > {"d"}
    assert sorted(tokenizers.chosen_words(words, {}, 9, key, b"one")) == list("abcde")
    picked = [tokenizers.chosen_words(words, {}, 3, key, str(k).encode())[2] for k in range(600)]
    counts = Counter(picked)  # the secret order is even: each of three, with a chance of 1 in 10^9
    assert set(counts) == {"b", "c", "e"}
    assert all(120 < count < 280 for count in counts.values())


def test_persons_count_as_one_and_rows_without_a_person_or_a_text_are_left_out(tmp_path):
    rows = notes(300)
    frame = pd.DataFrame({"who": [f"p{k % 3}" for k in range(300)], "note": rows})
    frame.loc[5, "who"] = None
    frame.loc[7, "note"] = None
    held = dpfy.Dataset(frame, schema=[dpfy.Text("note")], unit=dpfy.Person("who", at_most=4))
    made = train_tokenizer(held, epsilon=3.0, delta=DELTA, run=tmp_path / "run")
    assert made.facts["words_released"] == 0  # three people, however much they wrote
    assert made.vocabulary == 257
    assert made.report["unit"]["name"] == "user"
    assert made.report["unit"]["most_records"] == 4
    corpus = tokenizers.corpus_of(held)
    assert len(corpus.texts) == 298
    units = corpus.units(4)
    assert [len(unit) for unit in units] == [4, 4, 4]
    assert corpus.units()[0][:4] == units[0]
    texts = dpfy.Dataset(Texts(frame, column="note"), unit=dpfy.Person("who", at_most=4))
    assert tokenizers.corpus_of(texts).units(4) == units


def test_a_run_that_is_killed_goes_on_to_the_same_vocabulary(tmp_path, monkeypatch):
    terms = {"epsilon": 2.0, "delta": DELTA, "size": 300}
    whole = train_tokenizer(notes(), run=Run(tmp_path / "a", seed=1), **terms)
    real = tokenizers.merged
    monkeypatch.setattr(tokenizers, "merged", lambda *given: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        train_tokenizer(notes(), run=Run(tmp_path / "b", seed=1), **terms)
    monkeypatch.setattr(tokenizers, "merged", real)
    with pytest.raises(InvalidInput, match="other data"):
        train_tokenizer(notes(seed=2), run=Run(tmp_path / "b", seed=1, resume=True), **terms)
    again = train_tokenizer(notes(), run=Run(tmp_path / "b", seed=1, resume=True), **terms)
    for name in ("tokenizer.json", "words.json"):
        assert (whole.run / name).read_bytes() == (again.run / name).read_bytes()


def test_merges_are_the_same_in_every_process():
    code = (
        "from dpfy.text.tokenizer import merged\n"
        "counts = {f'w{k % 37}{k % 11}x{k}': 1.0 + k % 5 for k in range(400)}\n"
        "import hashlib; print(hashlib.sha256(merged(counts, 700).to_str().encode()).hexdigest())"
    )
    found = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1


def test_it_is_charged_to_the_budget_and_refused_before_the_texts_are_read(tmp_path):
    read = []

    def texts():
        read.append(1)
        return notes(200)

    held = dpfy.Dataset(
        Texts(texts), ledger=tmp_path / "l.jsonl", budget=dpfy.Budget(2.0, 1e-5), records=200
    )
    made = train_tokenizer(held, epsilon=1.0, delta=1e-6, size=300, run=tmp_path / "one")
    assert 0.5 < held.spent().epsilon < 2.0
    assert all(finding.holds for finding in made.verify(ledger=held.ledger))
    with pytest.raises(BudgetExceeded):
        train_tokenizer(held, epsilon=2.0, delta=1e-6, size=300, run=tmp_path / "two")
    assert len(read) == 1
    assert not (tmp_path / "two").exists()


def test_bad_settings_are_refused_in_one_line_and_cost_nothing(tmp_path):
    held = dpfy.Dataset(notes(50) and Texts(notes(50)), ledger=tmp_path / "l.jsonl")
    for change in (
        {"size": 256},
        {"size": 2.5},
        {"words": 0},
        {"epsilon": -1.0},
        {"delta": 0.0},
        {"delta": "one"},
    ):
        with pytest.raises(DpfyError) as caught:
            train_tokenizer(
                held, run=tmp_path / "run", **{"epsilon": 1.0, "delta": 1e-6, "size": 300} | change
            )
        assert "\n" not in str(caught.value)
    for data in (Texts(["a", 3]), Texts(lambda: "text"), Texts(tmp_path / "none.jsonl")):
        with pytest.raises(DpfyError) as caught:
            train_tokenizer(data, epsilon=1.0, delta=1e-6, run=tmp_path / "run")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
    with pytest.raises(InvalidInput, match="table"):
        train_tokenizer(
            dpfy.Dataset(Texts(["a"]), unit=dpfy.Person("who", 2)), epsilon=1.0, delta=1e-6
        )
