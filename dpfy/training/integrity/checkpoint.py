"""Checkpoints: one file with all that a resumed run needs to release the same bits. Safetensors,
never pickle; whole or not at all.

Tensors are stored under ``model.``, ``optimizer.``, ``average.``, ``noise.`` and ``random.``;
numbers and names as JSON in the header. The header carries a keyed fingerprint of all of it: a
damaged file, or one from another run, is refused. It also names the file itself
(:mod:`dpfy.core.storage`): a copy of a checkpoint is refused, as one that was put in the place of a
later one would be.

Of several ranks each writes a file of what only it holds; rank 0's, written last, names them all.

    checkpoint/  rank1-5c0e....safetensors  rank2-9a41....safetensors  state.safetensors (rank 0;
    the fingerprints of the others)

The name of a rank's file holds its fingerprint, so a new checkpoint never writes over a part of the
one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dpfy.core.codec import canonical
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, erase, identity_of, write_atomically
from dpfy.training.parallel.dtensor import spread_like
from dpfy.training.parallel.world import World

FORMAT, BEFORE = "dpfy-checkpoint-3", "dpfy-checkpoint-2"
"""The format, and the one before it, whose files do not know themselves."""


@dataclass(frozen=True, repr=False)
class Snapshot:
    """The state of a run between two steps. `facts` is JSON; `tensors` maps full names to tensors;
    `format` is that of its file.
    """

    step: int
    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    format: str = FORMAT

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under one prefix, without it."""
        return {
            name[len(prefix) + 1 :]: t
            for name, t in self.tensors.items()
            if name.startswith(prefix + ".")
        }


def write(path: Path, snapshot: Snapshot, randomness: Randomness) -> None:
    """Replace the checkpoint at `path`, readable by its owner alone.

    Guarantees: a crash leaves the previous checkpoint or this one.
    """
    facts, tensors = _plain_parts(snapshot)
    header = {"facts": facts, "tag": _tag(facts, tensors, randomness)}

    def content(own: str) -> bytes:
        return save(
            tensors,
            metadata=header | {"file": randomness.tag("file", f"{header['tag']} {own}".encode())},
        )

    write_atomically(path, content, mode=PRIVATE_MODE)


def tag(snapshot: Snapshot, randomness: Randomness) -> str:
    """The fingerprint under which `write` keeps it."""
    return _tag(*_plain_parts(snapshot), randomness)


def _plain_parts(snapshot: Snapshot) -> tuple[str, dict[str, Tensor]]:
    tensors = {name: t.detach().cpu().contiguous() for name, t in snapshot.tensors.items()}
    return canonical(
        {"format": snapshot.format, "step": snapshot.step, "facts": snapshot.facts}
    ), tensors


def read(path: Path, randomness: Randomness) -> Snapshot:
    """The checkpoint at `path`; `Corrupt` if it is damaged, was written by another run, or is a
    copy.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = header["facts"]
        parsed = json.loads(facts)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        raise Corrupt(f"checkpoint/{path.name}", "not a readable dpfy checkpoint") from None
    if header.get("tag") != _tag(facts, tensors, randomness):
        raise Corrupt(
            f"checkpoint/{path.name}",
            "does not match its fingerprint: damaged, or written by another run",
        )
    if parsed["format"] not in (FORMAT, BEFORE):
        raise Corrupt(
            f"checkpoint/{path.name}",
            "was written by another version of dpfy: resume the run with that version",
        )
    own = randomness.tag("file", f"{header['tag']} {identity_of(path)}".encode())
    if parsed["format"] == FORMAT and header.get("file") != own:
        rule = (
            "is a copy, or was restored from one: the noise of later steps may have been used "
            "already; start a new run"
        )
        raise Corrupt(f"checkpoint/{path.name}", rule)
    return Snapshot(parsed["step"], parsed["facts"], tensors, parsed["format"])


def _tag(facts: str, tensors: Mapping[str, Tensor], randomness: Randomness) -> str:
    pieces = [facts]
    for name in sorted(tensors):
        t = tensors[name]
        raw = t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        pieces.append(f"{name} {t.dtype} {tuple(t.shape)} {randomness.tag('tensor', raw)}")
    return randomness.tag("checkpoint", "\n".join(pieces).encode())


def split_optimizer(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A torch optimizer's state_dict as tensors and JSON facts."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                plain.setdefault(str(index), {})[name] = value
    groups = [{k: _plain(v) for k, v in group.items()} for group in state["param_groups"]]
    return tensors, {"state": plain, "param_groups": groups}


def join_optimizer(
    tensors: dict[str, Tensor], facts: dict[str, Any], parameters: Sequence[Tensor]
) -> dict[str, Any]:
    """The inverse of `split_optimizer`, for these parameters: what is held of one that is spread
    over ranks is spread like it.
    """
    state: dict[int, dict[str, Any]] = {}
    for key, entries in facts["state"].items():
        state.setdefault(int(key), {}).update(entries)
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = spread_like(value, parameters[int(index)])
    groups = [
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
        for group in facts["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


RANKS, OWN = "ranks", ("still",)
"""The fact that names the files of the ranks, and facts that each rank has of its own: seals of
what it holds of the model.
"""


def write_ranks(
    state: Path, snapshot: Snapshot, randomness: Randomness, world: World, own: tuple[str, ...]
) -> None:
    """Replace the checkpoint at `state`. Of rank 0 all is written, of the others the tensors under
    the prefixes `own`.

    Guarantees: a crash of any rank leaves the previous checkpoint, whole, or this one.
    """
    if world.count == 1:
        write(state, snapshot, randomness)
        return
    mine = ""
    if not world.first:
        held = {name: t for name, t in snapshot.tensors.items() if name.partition(".")[0] in own}
        facts = {key: snapshot.facts[key] for key in OWN if key in snapshot.facts}
        mine = tag(part := Snapshot(snapshot.step, facts, held), randomness)
        write(_file(state, world.rank, mine), part, randomness)
    tags = world.exchange(f"the checkpoint of step {snapshot.step}", mine)
    if world.first:
        write(state, replace(snapshot, facts={**snapshot.facts, RANKS: tags}), randomness)
    world.exchange("its end")
    for old in state.parent.glob(f"rank{world.rank}-*.safetensors"):
        if old != _file(state, world.rank, mine):
            erase(old)
    world.exchange("what it replaced")  # before rank 0 may erase all of them


def read_ranks(state: Path, randomness: Randomness, world: World) -> Snapshot:
    """The checkpoint at `state` as this rank wrote it; refused if other ranks than these did, or if
    files of two checkpoints are mixed.
    """
    whole = read(state, randomness)
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
    part = read(file, randomness)
    if tag(part, randomness) != tags[world.rank] or part.step != whole.step:
        raise Corrupt(f"checkpoint/{file.name}", "belongs to another checkpoint than rank 0's")
    return replace(
        whole, facts={**whole.facts, **part.facts}, tensors={**whole.tensors, **part.tensors}
    )


def _file(state: Path, rank: int, tag: str) -> Path:
    return state.parent / f"rank{rank}-{tag[:16]}.safetensors"
