"""Durable files: whole or not at all. Every write is to a temporary file, synced, renamed, and the folder synced."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644


def sync_folder(folder: Path) -> None:
    """Make a rename or a creation inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes, *, mode: int = PUBLIC_MODE) -> None:
    """Replace `path` by `content`.

    Guarantees: after a crash at any moment `path` holds the old content or the new one, never a mixture; the temporary file never
    has a wider mode than `mode`.
    """
    temporary = path.with_name(f".{path.name}.part")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.fchmod(handle, mode)
        view = memoryview(content)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(temporary, path)
    sync_folder(path.parent)


def erase(path: Path) -> None:
    """Overwrite a secret file with zeros, sync, unlink. (Journals and flash storage may keep copies: see docs/decisions.md.)"""
    if not path.exists():
        return
    handle = os.open(path, os.O_WRONLY)
    try:
        left = os.fstat(handle).st_size
        while left > 0:
            left -= os.write(handle, bytes(min(left, 1 << 20)))
        os.fsync(handle)
    finally:
        os.close(handle)
    path.unlink()
    sync_folder(path.parent)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
