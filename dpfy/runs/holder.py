"""Who holds a run folder, for machines that share it and do not see each other's locks.

A lock (`core/storage.py`) keeps out every process of the same machine, and of others where the file
system passes locks on. Some network file systems do not. So anyone who opens a folder leaves a small
file there that names its machine, and touches it at checkpoints. Another machine waits until the
file is `LEASE` seconds old. On the same machine the lock alone decides: after a crash or a restart
the run is resumed at once.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfy.core.errors import Busy, Unsupported
from dpfy.core.storage import PRIVATE_MODE

HOLDER = "holder.json"
LEASE = 900.0
"""Seconds for which a machine that is not heard of is believed to be alive."""
EVERY = 60.0
"""Seconds between two touches, at the least."""


def machine() -> dict[str, str]:
    """This machine: its name with its installation, and the start of its kernel, which containers
    on it share.
    """
    return {"host": socket.gethostname(), "installation": _line("/etc/machine-id"), "boot": boot()}


def boot() -> str:
    """What tells one start of this machine from the next; empty where the system does not say."""
    return _line("/proc/sys/kernel/random/boot_id")


@dataclass
class Holder:
    """The hold of this process on a folder. `nonce` tells it from every other one."""

    file: Path
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    touched: float = field(default_factory=time.monotonic)

    @classmethod
    def take(cls, file: Path, what: str) -> Holder:
        """Take over `file`, whose folder this process has locked.

        Guarantees: refused while another machine may be at work. Ages are taken from the clock of
        the file system, not of a machine.
        """
        mine, new = cls(file), file.with_name(f".{secrets.token_hex(8)}.part")
        handle = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE
        )
        try:
            os.write(handle, json.dumps(machine() | {"nonce": mine.nonce}).encode())
            now = os.fstat(handle).st_mtime
        finally:
            os.close(handle)
        held = _read(file)
        if (
            held
            and not _same(held, machine())
            and (left := LEASE - (now - file.stat().st_mtime)) > 0
        ):
            new.unlink()
            rule = (
                f"wait {left:.0f} seconds, or remove {file.parent.name}/{file.name} if that "
                f"machine is gone"
            )
            raise Busy(f"{what}: {held.get('host') or 'another machine'} is using it; {rule}")
        os.replace(new, file)
        return mine

    def renew(self) -> None:
        """Say that this process is alive, now and then.

        Guarantees: refused permanently once another machine has taken the folder over.
        """
        if time.monotonic() - self.touched < EVERY:
            return
        if _read(self.file).get("nonce") != self.nonce:
            rule = "wait for that one to end; then resume the run, or start a new one"
            raise Unsupported(
                "going on with a run folder that another machine has taken over", rule
            )
        os.utime(self.file)
        self.touched = time.monotonic()

    def release(self) -> None:
        """Let go of the folder, if it is still held."""
        with suppress(OSError):
            if _read(self.file).get("nonce") == self.nonce:
                self.file.unlink()


def _same(held: dict[str, Any], mine: dict[str, str]) -> bool:
    """Whether a file was left by this machine: by the kernel that runs now, or before a restart."""
    running = held.get("boot") == mine["boot"] != ""
    return running or all(held.get(key) == mine[key] for key in ("host", "installation"))


def _read(file: Path) -> dict[str, Any]:
    """What a holder says; nothing where there is none, or none that could be read whole."""
    try:
        held = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return ""
