"""Files as bytes. Compression is recognised by content; an error shows the path as the user wrote
it, never a longer one.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from dpfy.core import storage
from dpfy.core.errors import Corrupt, InvalidInput

GZIP_MAGIC = b"\x1f\x8b"
ENVIRONMENT = "DPFY_DATA"


def unpacked(packed: int) -> int:
    """The most bytes that a compressed file of `packed` bytes may hold: honest data shrinks to a
    two-hundredth at best.
    """
    return min(storage.MOST_DATA, max(64 << 20, 200 * packed))


@dataclass(frozen=True)
class DataFile:
    """A file and the words to call it by in a message."""

    path: Path
    name: str

    @classmethod
    def given(cls, path: str) -> DataFile:
        """A file by the path the user gave."""
        return cls(_expanded("data file", path), path)

    def read(self) -> bytes:
        """The whole content, decompressed when it is gzip. A missing, unreadable or truncated file
        is a one-line error.

        Guarantees: nothing is read from a pipe or a device, and a small file is never unpacked into
        a huge one.
        """
        content = storage.content("data file", self.path, most=storage.MOST_DATA, name=self.name)
        if content[:2] != GZIP_MAGIC:
            return content
        most = unpacked(len(content))
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                whole = storage.up_to(packed, most + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise Corrupt(
                self.name, "gzip data is truncated or damaged; fetch the file again"
            ) from None
        if len(whole) > most:
            raise InvalidInput(
                "data file", self.name, f"unpacks to more than {most} bytes, too many for its size"
            )
        return whole

    def text(self) -> str:
        """The whole content as UTF-8."""
        try:
            return self.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Corrupt(self.name, f"not UTF-8 text (byte {error.start})") from None


@dataclass(frozen=True)
class DataFolder:
    """The folder that holds one sub-folder per well-known data set, from the configuration or from
    the environment.
    """

    path: Path
    name: str

    @classmethod
    def find(cls, given: str | None) -> DataFolder:
        """`given`, or $DPFY_DATA; an error that says how to set it when there is neither."""
        if given is not None:
            return cls(_expanded("data.dir", given), given)
        value = os.environ.get(ENVIRONMENT)
        if not value:
            raise InvalidInput(
                "data.dir",
                None,
                f"give the data folder in data.dir or in the environment variable {ENVIRONMENT}",
            )
        return cls(Path(value), f"${ENVIRONMENT}")

    def file(self, folder: str, *names: str) -> DataFile:
        """The first of `names` that exists in `folder`; the first name when none does, so that the
        error names it.
        """
        for name in names:
            if os.path.isfile(self.path / folder / name):  # False for a path that cannot be, too
                return DataFile(self.path / folder / name, f"{self.name}/{folder}/{name}")
        return DataFile(self.path / folder / names[0], f"{self.name}/{folder}/{names[0]}")


def _expanded(field: str, path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidInput(field, path, "names a home folder that does not exist") from None
