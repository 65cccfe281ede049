"""Checkpoints of several ranks: each writes a file of what only it holds; rank 0's, written last,
names them all.

    checkpoint/  rank1-5c0e....safetensors  rank2-9a41....safetensors  state.safetensors (rank 0;
    the fingerprints of the others)

The name of a rank's file holds its fingerprint, so a new checkpoint never writes over a part of the
one before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.storage import erase
from dpfy.training.integrity import checkpoint
from dpfy.training.integrity.checkpoint import Snapshot
from dpfy.training.parallel.world import World

RANKS, OWN = "ranks", ("still",)
"""The fact that names the files of the ranks, and facts that each rank has of its own: seals of
what it holds of the model.
"""


def write(
    state: Path, snapshot: Snapshot, randomness: Randomness, world: World, own: tuple[str, ...]
) -> None:
    """Replace the checkpoint at `state`. Of rank 0 all is written, of the others the tensors under
    the prefixes `own`.

    Guarantees: a crash of any rank leaves the previous checkpoint, whole, or this one.
    """
    if world.count == 1:
        checkpoint.write(state, snapshot, randomness)
        return
    mine = ""
    if not world.first:
        held = {name: t for name, t in snapshot.tensors.items() if name.partition(".")[0] in own}
        facts = {key: snapshot.facts[key] for key in OWN if key in snapshot.facts}
        mine = checkpoint.tag(part := Snapshot(snapshot.step, facts, held), randomness)
        checkpoint.write(_file(state, world.rank, mine), part, randomness)
    tags = world.exchange(f"the checkpoint of step {snapshot.step}", mine)
    if world.first:
        checkpoint.write(
            state, replace(snapshot, facts={**snapshot.facts, RANKS: tags}), randomness
        )
    world.exchange("its end")
    for old in state.parent.glob(f"rank{world.rank}-*.safetensors"):
        if old != _file(state, world.rank, mine):
            erase(old)
    world.exchange("what it replaced")  # before rank 0 may erase all of them


def read(state: Path, randomness: Randomness, world: World) -> Snapshot:
    """The checkpoint at `state` as this rank wrote it; refused if other ranks than these did, or if
    files of two checkpoints are mixed.
    """
    whole = checkpoint.read(state, randomness)
    tags = whole.facts.get(RANKS, [""])
    if len(tags) != world.count:
        rule = (
            f"must be what the run was started with: {len(tags)} (torchrun "
            f"--nproc-per-node={len(tags)})"
        )
        raise InvalidInput("resume ranks", world.count, rule)
    if world.first:
        return whole
    file = _file(state, world.rank, tags[world.rank])
    part = checkpoint.read(file, randomness)
    if checkpoint.tag(part, randomness) != tags[world.rank] or part.step != whole.step:
        raise Corrupt(f"checkpoint/{file.name}", "belongs to another checkpoint than rank 0's")
    return replace(
        whole, facts={**whole.facts, **part.facts}, tensors={**whole.tensors, **part.tensors}
    )


def _file(state: Path, rank: int, tag: str) -> Path:
    return state.parent / f"rank{rank}-{tag[:16]}.safetensors"
