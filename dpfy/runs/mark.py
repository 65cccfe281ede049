"""The mark of a run folder: a file that says that this folder is ours, made before anything else in
it and removed after all else.

The mark's name holds the random name of the run (``.dpfy-`` and 16 digits), so that it is whole as
soon as it is there. Without a mark nothing in a folder is ever changed: what is not marked is not
ours, whatever its name.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dpfy.core import storage
from dpfy.core.errors import Busy, InvalidInput
from dpfy.core.storage import TEMPORARY

NAME = re.compile(r"\.dpfy-([0-9a-f]{16})")
MADE = b"this run made its folder\n"
HIDDEN = "checkpoint"
CANARIES = "canaries.npz"
UPDATES = "updates.f64"
ROUND = "round.safetensors"
"""The sum of a round of clients that cannot be asked again, until a checkpoint holds the step made
of it.
"""
ENCODED_HERE = "encoded-here"
"""Says that a secure aggregation was simulated, and how: the server could see more than sums."""
ASKED = "asked"
"""The last round for which clients were asked for masked updates: they are not asked for it
again.
"""
POPULATION = "population.json"
"""The names of the clients of a federation, in the order of their numbers."""
SPENT, ANSWERED = "spent.json", "answered.jsonl"
"""How many answers may have been given, and which were."""
SEARCH_LOG, SEARCH_TRIALS = "scores.jsonl", "trials"
"""Scores of a search for settings, and the folders of its trials, which are destroyed whole."""
SECRETS = (
    "state.safetensors", "secret.json", "steps.jsonl", "watch.json", "evaluation.json", "bound.json", UPDATES, ROUND,
    POPULATION, ENCODED_HERE, ASKED, SEARCH_LOG, ANSWERED, SPENT, "privacy.json", "config.toml", "lock", "holder.json",
)  # fmt: skip
"""What a run keeps in checkpoint/, in the order in which it is destroyed. A new file there must be
named here.
"""
RANK_STATE = re.compile(r"rank[0-9]+-[0-9a-f]{16}\.safetensors")
"""The same of the ranks of a run beside rank 0: they are destroyed first."""
PROGRESS = re.compile(r"reached-([0-9]+)-([0-9]+)")
"""How far a training run got, as the name of a file: the step of its last checkpoint, and the steps
in its journal.
"""
BEFORE_STEPS = ("ledger.jsonl", "ledger.jsonl.head", CANARIES, "config.toml")
"""What a run that made no release may have written beside them and what its claims name."""


@dataclass(frozen=True)
class Mark:
    """A marked folder. `run` is the random name of its run."""

    folder: Path
    run: str

    @property
    def file(self) -> Path:
        """The mark itself."""
        return self.folder / f".dpfy-{self.run}"

    @classmethod
    def find(cls, folder: Path) -> Mark | None:
        """The mark of `folder`, if it has one. Two marks, or one that is no plain file, are
        none.
        """
        if not folder.is_dir():
            return None
        found = [name for p in folder.iterdir() if (name := NAME.fullmatch(p.name))]
        if len(found) != 1 or not stat.S_ISREG(_mode(folder / found[0].group())):
            return None
        return cls(folder, found[0].group(1))

    @classmethod
    def make(cls, folder: Path) -> Mark:
        """Mark an empty folder, which is made if it is not there.

        Guarantees: of two processes that mark one folder at the same time at most one gets it.
        """
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        mark = cls(folder, secrets.token_hex(8))
        storage.create(mark.file, MADE if made else b"")
        if [p.name for p in folder.iterdir()] != [mark.file.name]:
            mark.file.unlink()
            raise Busy(
                f"run {folder.name}: another process is using it; wait for it to end or choose "
                f"another folder"
            )
        return mark

    def erase_secrets(self) -> None:
        """Destroy seed, noise state, checkpoints and their temporary files. Files that no run of
        ours makes are left. Safe to repeat.
        """
        hidden = self.folder / HIDDEN
        if not hidden.is_dir() or hidden.is_symlink():
            return
        self.erase_temporaries()
        erase_folder(hidden / SEARCH_TRIALS)
        ranks = sorted(
            p.name
            for p in hidden.iterdir()
            if RANK_STATE.fullmatch(p.name) or PROGRESS.fullmatch(p.name)
        )
        for name in (*ranks, *SECRETS):
            storage.erase(hidden / name)
        if not any(hidden.iterdir()):
            hidden.rmdir()

    def erase_temporaries(self) -> None:
        """Destroy what writes that a crash cut short have left."""
        for folder in (self.folder / HIDDEN, self.folder):
            if folder.is_dir():
                for file in [p for p in folder.iterdir() if TEMPORARY.fullmatch(p.name)]:
                    storage.erase(file)

    def clear(self, named: Iterable[str]) -> None:
        """Remove what a run that made no step has written, with the files that its claims name, but
        not the mark.

        Its secrets must be destroyed already.
        """
        for name in dict.fromkeys((*BEFORE_STEPS, *named)):
            (self.folder / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Unmark the folder: what is in it now stays."""
        self.file.unlink(missing_ok=True)
        storage.sync_folder(self.folder)

    def remove_folder(self) -> None:
        """Unmark the folder, and remove it if this run made it and nothing else is in it."""
        made = self.file.is_file() and self.file.read_bytes() == MADE
        self.remove()
        if made and not any(self.folder.iterdir()):
            self.folder.rmdir()


def erase_folder(folder: Path, *, durable: bool = True) -> None:
    """Destroy a folder of secrets and all that is in it: files overwritten with zeros, links
    removed, not followed. Safe to repeat.

    Guarantees: every file's zeros are on the disk before the first file is unlinked. If not
    `durable`, a death of the machine may bring names back, of files that hold zeros: anyone who comes
    next erases the folder again.
    """
    if folder.is_symlink() or not folder.is_dir():
        return
    every = [os.path.join(folder, name) for name in os.listdir(folder)]
    files = [found for found in every if storage.overwrite(found)]
    for found in set(every).difference(files):
        erase_folder(Path(found), durable=False)
    for found in files:
        os.unlink(found)
    folder.rmdir()
    if durable:
        storage.sync_folder(folder.parent)


def refuse_planted(folder: Path) -> None:
    """Refuse a run folder in which something lies that no run makes: links, pipes, devices; a
    checkpoint/ that is no folder.

    Nobody holds the folder yet: what another process takes away meanwhile is passed over.
    """
    hidden = folder / HIDDEN
    if (mode := _mode(hidden)) and not stat.S_ISDIR(mode):
        raise InvalidInput(
            "run",
            str(folder),
            f"{HIDDEN} is a link or a file; a run keeps its secrets in a folder of its own",
        )
    inside = [
        Path(at, name) for at, folders, files in os.walk(hidden) for name in (*folders, *files)
    ]
    for found in [*folder.iterdir(), *inside]:
        mode = _mode(found)
        if mode and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            name = str(found.relative_to(folder))
            raise InvalidInput(
                "run",
                str(folder),
                f"holds {name!r}, a link, pipe or device: a run folder holds none",
            )


def _mode(path: Path) -> int:
    """Type and permissions, of a link its own; 0 where nothing is, or nothing any more."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0
