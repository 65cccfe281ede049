"""How a family tells what it is doing: one function, the same for all."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a caller gives as `progress=`.

    dpfy.query(people, "count()", epsilon=1.0, progress=lambda what, share=None: print(what))
    """

    def __call__(self, what: str, share: float | None = None) -> None:
        """Be told.

        Args:
            what: What is being done, in words.
            share: Which share of it is done, from 0 to 1; None where nobody knows, or where it
                would tell something of the data.
        """


def quiet(what: str, share: float | None = None) -> None:
    """Show nothing."""
