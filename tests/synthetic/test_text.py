"""Synthetic text: one text is one contribution, the folder verifies, and what was learnt by heart
shows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dpfy
from dpfy.core.errors import DpfyError
from dpfy.core.ledger import Ledger
from dpfy.models.language import ByteTransformer
from dpfy.runs.run import Run
from dpfy.synthetic.text import copies as checks
from dpfy.synthetic.text import run as runs
from dpfy.synthetic.text import tokens as tokening
from dpfy.synthetic.text.run import TextOptions, TextTerms, synthesize_text
from dpfy.synthetic.text.tokens import ByteTokens

TERMS = TextTerms(4.0, 1e-4, 120)
SMALL = TextOptions(texts=5, length=12, batch_size=40, epochs=1.0)


def notes(count=120):
    return [f"note {k % 7} of day {k % 3}" for k in range(count)]


def small_model(length=12, seed=0):
    torch.manual_seed(seed)
    return ByteTransformer(length, width=16, layers=1, heads=2)


def test_texts_are_made_and_the_folder_verifies(tmp_path):
    ledger = tmp_path / "notes.jsonl"
    place = Run(tmp_path / "run", ledger=ledger, seed=1)
    made = synthesize_text(notes, terms=TERMS, run=place, options=SMALL, model=small_model())
    assert all(finding.holds for finding in dpfy.verify(made.run, ledger=ledger))
    assert len(made.texts) == 5
    assert all(len(text.encode()) <= 12 * 3 for text in made.texts)
    assert 3.9 < made.report["guarantee"]["epsilon"] <= 4.0
    assert {section["kind"] for section in made.report["sections"]} == {
        "training",
        "generated-text",
    }
    again = synthesize_text(
        notes,
        terms=TERMS,
        run=Run(tmp_path / "run", resume=True, ledger=ledger, seed=1),
        options=SMALL,
        model=small_model(seed=5),
    )
    assert again.texts == made.texts
    for a, b in zip(again.model.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(a, b)


class Stop(BaseException):
    """As a kill: nothing is undone."""


@pytest.mark.slow
def test_stopped_while_sampling_and_resumed_to_the_same_texts(tmp_path, monkeypatch):
    whole = synthesize_text(
        notes(), terms=TERMS, run=Run(tmp_path / "a", seed=3), options=SMALL, model=small_model()
    )

    def stop(*given):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(runs, "sampled", stop)
        with pytest.raises(Stop):
            synthesize_text(
                notes(),
                terms=TERMS,
                run=Run(tmp_path / "b", seed=3),
                options=SMALL,
                model=small_model(),
            )
    place = Run(tmp_path / "b", seed=3, resume=True)
    again = synthesize_text(notes(), terms=TERMS, run=place, options=SMALL, model=small_model())
    assert again.texts == whole.texts


def test_rows_hold_the_text_between_its_ends_and_are_cut():
    rows = tokening.rows_of(["ab", "", "abcdefgh", "é"], ByteTokens(), 4)
    assert rows.tolist() == [
        [256, 97, 98, 256, 256],
        [256, 256, 256, 256, 256],
        [256, 97, 98, 99, 100],
        [256, 0xC3, 0xA9, 256, 256],
    ]


def test_a_loss_is_the_mean_over_the_text_and_its_first_end():
    """By hand: from the logits of each position, and nothing after the first end counts."""
    model, rows = small_model(4), tokening.rows_of(["ab", "", "abcd"], ByteTokens(), 4)
    found = tokening.losses_of(model, rows, 256)
    logs = model(rows[:, :-1]).log_softmax(-1)
    for row, counted in zip(range(3), (3, 1, 4), strict=True):
        due = -sum(logs[row, k, rows[row, k + 1]] for k in range(counted)) / counted
        assert found[row].item() == pytest.approx(due.item(), rel=1e-5)


def test_a_model_of_one_sentence_says_it_and_nothing_else():
    """Without noise, trained on one text until its loss is small: samples are that text, and the
    checks say so.
    """
    model = small_model()
    rows = tokening.rows_of(["dear reader"] * 8, ByteTokens(), 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        tokening.losses_of(model, rows, 256).mean().backward()
        optimizer.step()
    made = tokening.sampled(model, 20, 12, ByteTokens(), torch.Generator().manual_seed(0))
    assert made.count("dear reader") >= 15
    found = checks.copies(made, ["dear reader", "another text"], holdout=["some other"], run=8)
    assert found.copied >= 0.75
    assert (found.longest, found.nearest, found.elsewhere) == (11, 1.0, 0.0)
    assert "NOT PRIVATE" in found.to_json()["private"]


@pytest.mark.parametrize("trial", range(5))
def test_the_longest_copy_is_that_of_a_search_by_hand(trial):
    rng = np.random.default_rng(trial)
    one, other = (["".join(rng.choice(list("abc"), 30)) for _ in range(4)] for _ in range(2))
    due = max(
        size
        for size in range(30)
        for a in one
        for b in other
        if any(a[k : k + size] in b for k in range(len(a) - size + 1))
    )
    found = checks.copies(one, other, run=due)
    assert found.longest == due
    assert found.copied > 0
    assert checks.copies(one, other, run=due + 1).copied == 0


def test_near_duplicates_are_those_that_share_most_pieces():
    text = "it was the best of times, it was the worst of times"
    near = text.replace("best", "last")
    found = checks.copies([near, "a different sentence altogether"], [text])
    assert found.near == 0.5
    assert 0.6 <= found.nearest < 1.0
    assert checks.copies([], [text]).copied == checks.copies([text], []).nearest == 0


def test_secrets_learnt_by_heart_are_ranked_first_and_others_are_not():
    """40 secrets of 10 candidates: a model that knows them certifies an epsilon; one that does not
    does so in 5 of 100 runs at most.
    """
    canaries = checks.Canaries.made(40, seed=3, candidates=10)
    length = max(map(len, canaries.texts)) + 1
    known = set(canaries.texts)

    class Knows(ByteTransformer):
        def forward(self, input_ids):
            scores = torch.zeros(*input_ids.shape, 257)
            for row, ids in enumerate(input_ids.tolist()):
                text = bytes(t for t in ids if t < 256).decode()
                if text in known:
                    scores[row, torch.arange(len(ids) - 1), torch.tensor(ids[1:])] = 5.0
            return scores

    found = canaries.found(Knows(length, width=8, layers=1, heads=1), length=length, delta=1e-5)
    assert found.epsilon > 1.9
    assert found.detail["mean_exposure"] == pytest.approx(np.log2(10))
    assert canaries.found(small_model(length), length=length, delta=1e-5).epsilon < 0.5
    with pytest.raises(DpfyError, match="every secret whole"):
        canaries.found(small_model(length), length=9, delta=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"texts": notes(119)}, "number of texts"),
        ({"texts": "one text"}, "list of strings"),
        ({"texts": [1] * 120}, "list of strings"),
        ({"model": small_model(5)}, "of 12 tokens"),
        ({"model": torch.nn.Linear(3, 3)}, "must give logits"),
        ({"terms": TextTerms(4.0, 0.5, 120)}, "delta"),
    ],
)
def test_what_is_wrong_is_one_line_and_costs_nothing(tmp_path, change, words):
    asked = {"texts": notes, "terms": TERMS, "options": SMALL} | change
    ledger = tmp_path / "notes.jsonl"
    with pytest.raises(DpfyError, match=words):
        synthesize_text(asked.pop("texts"), run=Run(tmp_path / "run", ledger=ledger), **asked)
    assert not (tmp_path / "run").exists()
    assert not ledger.exists() or Ledger.read(ledger).spent() == []


def test_bad_options_are_named():
    for bad in ({"texts": 0}, {"length": 1}, {"batch_size": 0}, {"epochs": 0.0}):
        with pytest.raises(DpfyError, match=next(iter(bad))):
            TextOptions(**bad)
