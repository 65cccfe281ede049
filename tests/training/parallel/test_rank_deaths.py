"""A rank that dies at any moment: the others stop before noise is added, and a resumed run releases
the same bits under the same bill.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from tests.training.parallel import ranked

from dpfy.core.ledger import Ledger


def whole(folder: Path, kind: str, wrap: str, ranks: int) -> tuple[bytes, list[int]]:
    """The model of a run without deaths, and how many calls each rank makes in it."""
    assert (
        ranked.outcomes(
            ranked.start(ranked.dying, ranks, str(folder / "whole"), kind, wrap, 0, 0, str(folder))
        )
        == [0] * ranks
    )
    return (folder / "whole" / "model.safetensors").read_bytes(), [
        int((folder / str(rank)).read_text()) for rank in range(ranks)
    ]


def billed(run: Path) -> None:
    """Whatever noise may have been made is in the ledger: a sum that is bound, or a checkpoint of
    later steps, has begun.
    """
    if not (run / "ledger.jsonl").is_file():
        assert not (run / "checkpoint" / "steps.jsonl").is_file()
        return
    ledger = Ledger.read(run / "ledger.jsonl")
    lines = run / "checkpoint" / "steps.jsonl"
    if (
        lines.is_file() and lines.read_bytes().count(b"\n") > 1
    ):  # the first is written before the ledger says that it begins
        assert ledger.book.begun


def die_and_resume(
    folder: Path, kind: str, wrap: str, deaths: list[tuple[int, int]], ranks: int, expected: bytes
) -> None:
    run = folder / "run"
    for victim, event in deaths:
        ended = ranked.outcomes(
            ranked.start(ranked.dying, ranks, str(run), kind, wrap, victim, event)
        )
        assert None not in ended, f"a rank hangs after the death of rank {victim} at call {event}"
        assert ended[victim] in (-signal.SIGKILL, 0, 1)
        billed(run)
    assert (
        ranked.outcomes(ranked.start(ranked.dying, ranks, str(run), kind, wrap, 0, 0))
        == [0] * ranks
    )
    assert (run / "model.safetensors").read_bytes() == expected
    assert not (run / "checkpoint").exists()
    ledger = Ledger.read(run / "ledger.jsonl")
    assert len(ledger.permits()) == 1
    assert ledger.book.begun


@pytest.mark.slow
def test_a_rank_dies_and_the_resumed_run_releases_the_same_bits(tmp_path):
    expected, calls = whole(tmp_path, "banded", "fsdp", 2)
    deaths = [(victim, int(share * calls[victim])) for victim, share in ((1, 0.5), (0, 0.8))]
    die_and_resume(tmp_path, "banded", "fsdp", deaths, 2, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrap", "ranks"),
    [
        ("blt", "fsdp", 4),
        ("banded", "plain", 2),
        ("adaptive", "fsdp", 2),
        ("banded", "parallel", 2),
    ],
)
def test_twenty_deaths_at_random_moments(tmp_path, kind, wrap, ranks):
    expected, calls = whole(tmp_path, kind, wrap, ranks)
    rng = random.Random(5)
    for trial in range(7):
        (folder := tmp_path / f"trial{trial}").mkdir()
        victims = [rng.randrange(ranks) for _ in range(3)]
        die_and_resume(
            folder, kind, wrap, [(v, rng.randrange(1, calls[v])) for v in victims], ranks, expected
        )
