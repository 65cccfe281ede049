"""Which process may make noise: the one that opened the run. A fork has all its secrets, and would
use the same noise a second time.

Randomness by address: every random number is a function of (secret, stream, step, part); nothing
is consumed or reused.

The secret is 32 bytes from the operating system. The key of one address is a keyed BLAKE2b hash,
used once: for an AES-256 keystream in counter mode (noise) or a Philox generator (sampling). A run
that is resumed asks for the same addresses and so draws the same numbers; two streams or two steps
never share a key. A fixed secret exists for tests and is marked in every report.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from dpfy.core.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    import numpy as np


def require_same_process(opened_in: int, what: str) -> None:
    """Refuse to use `what` in another process than `opened_in`.

    Guarantees: after a fork only the process that was there before makes releases.
    """
    if os.getpid() != opened_in:
        raise Unsupported(
            f"using {what} in a forked process",
            "use it in the process that opened it; the fork may read data, and opens runs of its "
            "own",
        )


SECRET_BYTES = 32

BLOCK_BYTES, KEYSTREAM_BYTES = 16, (1 << 36) - 32
"""Of AES; and of one keystream, whose blocks are counted in 32 bits."""

ZEROS = bytes(1 << 17)
"""What is encrypted to show a keystream. Held, because fresh memory costs more than the cipher;
short, so that it stays in the cache.
"""


@dataclass(frozen=True)
class Randomness:
    """A secret and the address book over it. `fixed` is True when the secret was chosen by a person
    and protects nothing.
    """

    secret: bytes = field(repr=False)
    fixed: bool = False

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise InvalidInput(
                "secret", f"{len(self.secret)} bytes", f"must be {SECRET_BYTES} bytes"
            )

    @classmethod
    def from_os(cls) -> Randomness:
        """Fresh entropy from the operating system."""
        return cls(secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def for_tests(cls, seed: int) -> Randomness:
        """A reproducible secret. Anyone who knows the seed can remove the noise: never for data that
        matters.
        """
        return cls(
            hashlib.blake2b(f"dpfy test seed {seed}".encode(), digest_size=SECRET_BYTES).digest(),
            fixed=True,
        )

    def key(self, stream: str, step: int, size: int = 16) -> bytes:
        """`size` bytes of key for one address. Distinct addresses and sizes get independent
        keys.
        """
        if step < 0:
            raise InvalidInput("step", step, "must be at least 0")
        address = f"{len(stream)}:{stream}:{step}".encode()
        return hashlib.blake2b(address, key=self.secret, digest_size=size).digest()

    def generator(self, stream: str, step: int) -> np.random.Generator:
        """A NumPy generator for one address."""
        import numpy as np

        return np.random.Generator(
            np.random.Philox(key=int.from_bytes(self.key(stream, step), "little"))
        )

    def keystream(self, stream: str, step: int, start: int = 0) -> Callable[[memoryview], None]:
        """A cipher for one address: each call overwrites a buffer with the next bytes of its
        keystream, AES-256 in counter mode.

        It begins at byte `start`, a whole number of blocks. A keystream ends after 64 GiB, with an
        error.
        """
        if start % BLOCK_BYTES or start < 0:
            raise InvalidInput(
                "keystream start", start, f"must be a multiple of {BLOCK_BYTES} bytes"
            )
        begin, zeros, left = _counter_mode(), memoryview(ZEROS), KEYSTREAM_BYTES - start
        cipher = begin(self.key(stream, step, 32), start // BLOCK_BYTES)

        def fill(buffer: memoryview) -> None:
            nonlocal left
            left -= len(buffer)
            if left < 0:
                raise Unsupported(
                    "more than 64 GiB of one keystream", "cut the work into several streams"
                )
            for at in range(0, len(buffer), len(zeros)):
                part = buffer[at : at + len(zeros)]
                cipher.update_into(zeros[: len(part)], part)

        return fill

    def tag(self, what: str, content: bytes) -> str:
        """A keyed fingerprint (hex): recognises `content` again without telling anything about it
        to who lacks the secret.
        """
        return hashlib.blake2b(
            what.encode() + b"\0" + content, key=self.secret, digest_size=32
        ).hexdigest()


@cache
def _counter_mode() -> Callable[[bytes, int], Any]:
    """From a key and the number of a block to a cipher in counter mode.

    Looked up once: imports in the middle of a step cost as much as small noise.
    """
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        raise Unsupported(
            "noise on a CPU without the cryptography package",
            "install it: pip install cryptography",
        ) from None
    # The ciphertext of GCM is that of counter mode from block 2 on, and OpenSSL has faster code for
    # it. Nobody asks for its tag.
    mode = modes.GCM(bytes(12))

    def begin(key: bytes, block: int) -> Any:
        return Cipher(
            algorithms.AES(key), modes.CTR((block + 2).to_bytes(16, "big")) if block else mode
        ).encryptor()

    return begin
