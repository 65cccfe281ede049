"""Which file this is: an identity that a file keeps for life and that no copy of it has.

It is the number of the inode and the time of its creation. Renaming a file or a folder above it,
changing its owner, its mode or its content and restarting the machine keep both. A copy, an
unpacked archive and a restored backup have others, and so has a file that is made after this one
was removed, even if it gets the same number. The device number is left out: it changes between
restarts, containers and mounts.

Where a file system keeps no time of creation (NFS and FUSE on older kernels) the inode number alone
counts. A copy of a whole disk, or a snapshot of one that is put back, has the same identities.
"""

from __future__ import annotations

import ctypes
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

AT_EMPTY_PATH, STATX_BTIME, SIZE = 0x1000, 0x800, 256
MASK, BIRTH = (0, "<I"), (80, "<qI")
"""Of `struct statx`: where the mask of valid fields and the time of creation lie (the same on every
Linux).
"""


def identity(handle: int) -> str:
    """The identity of an open file, as text without meaning for others."""
    return f"{os.fstat(handle).st_ino} {_birth(handle)}"


def identity_of(path: Path) -> str:
    """The identity of the file at `path`; a link is not followed."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return identity(handle)
    finally:
        os.close(handle)


def _birth(handle: int) -> int:
    """When the file was made, in nanoseconds; 0 where the system does not say."""
    held = os.fstat(handle)
    if (made := getattr(held, "st_birthtime", None)) is not None:
        return int(getattr(held, "st_birthtime_ns", made * 1e9))
    if (statx := _statx()) is None:
        return 0
    buffer = ctypes.create_string_buffer(SIZE)
    if statx(handle, b"", AT_EMPTY_PATH, STATX_BTIME, buffer) != 0:
        return 0
    (mask,) = struct.unpack_from(MASK[1], buffer, MASK[0])
    seconds, nanoseconds = struct.unpack_from(BIRTH[1], buffer, BIRTH[0])
    return int(seconds) * 10**9 + int(nanoseconds) if mask & STATX_BTIME else 0


@cache
def _statx() -> Any:
    """The function of the C library; None where it has none."""
    try:
        return ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None
