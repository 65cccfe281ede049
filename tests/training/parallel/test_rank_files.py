"""One checkpoint of several ranks: each reads what it wrote, and files that do not belong together
are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.training.integrity import checkpoint
from dpfy.training.integrity.checkpoint import Snapshot
from dpfy.training.parallel.world import World

RANDOMNESS = Randomness.for_tests(0)


@dataclass
class Told(World):
    """A rank by itself, with what the others would say."""

    said: list[str] = field(default_factory=list)

    def exchange(self, what, value=None):
        heard = list(self.said) or [None] * self.count
        heard[self.rank] = value
        self.brought = value or getattr(self, "brought", None)
        return heard


def snapshot(step: int, value: float) -> Snapshot:
    tensors = {
        "model.w": torch.full((2,), value),
        "noise.past": torch.full((3,), value),
        "random.cpu": torch.zeros(1),
    }
    return Snapshot(step, {"clip": 1, "still": value}, tensors)


def written(folder, step: int, values: tuple[float, float]):
    """A checkpoint of two ranks, as both leave it; the file of rank 1."""
    state = folder / "state.safetensors"
    second = Told(1, 2)
    checkpoint.write_ranks(
        state, snapshot(step, values[1]), RANDOMNESS, second, ("noise", "random")
    )
    checkpoint.write_ranks(
        state,
        snapshot(step, values[0]),
        RANDOMNESS,
        Told(0, 2, said=["", second.brought]),
        ("noise", "random"),
    )
    return state, folder / f"rank1-{second.brought[:16]}.safetensors"


def test_a_rank_reads_what_it_alone_held_and_the_rest_from_rank_0(tmp_path):
    state, mine = written(tmp_path, 3, (1.0, 2.0))
    assert mine.stat().st_mode & 0o777 == 0o600
    read = checkpoint.read_ranks(state, RANDOMNESS, World(1, 2))
    assert read.facts["still"] == 2.0
    assert (read.step, float(read.tensors["model.w"][0]), float(read.tensors["noise.past"][0])) == (
        3,
        1.0,
        2.0,
    )
    assert (
        float(checkpoint.read_ranks(state, RANDOMNESS, World(0, 2)).tensors["noise.past"][0]) == 1.0
    )
    for count in (1, 3):
        with pytest.raises(InvalidInput, match="resume ranks"):
            checkpoint.read_ranks(state, RANDOMNESS, World(0, count))


def test_a_file_of_another_checkpoint_is_refused(tmp_path, monkeypatch):
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    _, before = written(old, 3, (1.0, 2.0))
    state, now = written(new, 4, (1.5, 2.5))
    now.write_bytes(before.read_bytes())
    with pytest.raises(Corrupt, match="is a copy, or was restored from one"):
        checkpoint.read_ranks(state, RANDOMNESS, World(1, 2))
    monkeypatch.setattr(
        storage, "identity", lambda handle: "alike"
    )  # where files cannot be told apart
    _, before = written(old, 3, (1.0, 2.0))
    state, now = written(new, 4, (1.5, 2.5))
    now.write_bytes(before.read_bytes())
    with pytest.raises(Corrupt, match="belongs to another checkpoint"):
        checkpoint.read_ranks(state, RANDOMNESS, World(1, 2))
    now.unlink()
    with pytest.raises(Corrupt, match="not a readable dpfy checkpoint"):
        checkpoint.read_ranks(state, RANDOMNESS, World(1, 2))


def test_the_files_of_the_checkpoint_before_go_when_the_new_one_is_whole(tmp_path):
    _, first = written(tmp_path, 3, (1.0, 2.0))
    _, second = written(tmp_path, 4, (1.0, 2.5))
    assert not first.exists()
    assert second.is_file()
