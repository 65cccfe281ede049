"""Which process may make noise: the one that opened the run. A fork has all its secrets, and would
use the same noise a second time.
"""

from __future__ import annotations

import os

from dpfy.core.errors import Unsupported


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
