"""What was paid for and is not used yet. It is taken in blocks, each written down durably before
its first release is made.

    checkpoint/spent.json   for every kind of release, how many may have been made

A release needs an address of its own for its noise, too: its step. Steps are handed out from the
block in memory. A process that is killed has used some of its block; the next one begins after it,
so that no step is used twice and no more is released than was paid for. What was left of the block
is lost: a crash can only over-report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dpfy.core import check, storage
from dpfy.core.errors import BudgetExceeded, Corrupt
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, identity_of, write_atomically
from dpfy.core.values import Permit
from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.mechanism import source
from dpfy.prediction.claim import VoteClaim
from dpfy.runs.mark import SPENT

BLOCK = 64
"""Releases of one kind that are taken at a time."""
ITSELF = ""
"""The key under which the file recognises itself: no kind of release is empty."""
NONE_LEFT = (
    "all {most} releases of kind {kind!r} that were paid for are used: no more questions are "
    "answered"
)


class ReservedSteps:
    """The releases of one claim, for the process that holds its run folder.

    Guarantees: a release is handed out only after the file says that it may have been made; over
    all processes that ever held the folder none is handed out twice, and none beyond the claim. A
    file that is missing where it is `due`, or a copy, is refused.
    """

    def __init__(
        self,
        folder: Path,
        claim: VoteClaim,
        permit: Permit,
        randomness: Randomness,
        block: int = BLOCK,
        due: bool = False,
    ) -> None:
        self.file, self.claim, self.permit, self.randomness = (
            folder / SPENT,
            claim,
            permit,
            randomness,
        )
        self.block = check.integer("block", block)
        self._event = claim.event
        self._most = claim.most
        self.taken = self._read(due)
        self._next = dict(self.taken)

    def left(self) -> dict[str, int]:
        """How many releases of each kind can still be made, by this process or by one that
        follows.
        """
        return {kind: self._most[kind] - self._next[kind] for kind in self._most}

    def need(self, *kinds: str) -> None:
        """See `rules.PaidReleases`."""
        for kind in kinds:
            if self._next[kind] >= self._most[kind]:
                raise BudgetExceeded(NONE_LEFT.format(most=self._most[kind], kind=kind))

    def spend(self, kind: str) -> Bits:
        """See `rules.PaidReleases`."""
        self.need(kind)
        if self._next[kind] == self.taken[kind]:
            self._take(kind)
        step = self.claim.first_step(kind) + self._next[kind]
        self._next[kind] += 1
        return source(self._event, self.permit, self.randomness, step)

    def same(self, name: str) -> Bits:
        """See `rules.PaidReleases`: at the address after the last release."""
        self.permit.check(0, self._event)
        return Bits(self.randomness, f"{self.permit.name}, {name}", self.claim.releases)

    def _take(self, kind: str) -> None:
        more = self.taken | {kind: min(self._most[kind], self.taken[kind] + self.block)}
        write(self.file, more, self.randomness)
        self.taken = more

    def _read(self, due: bool) -> dict[str, int]:
        if not self.file.is_file():
            if due:
                raise Corrupt(
                    SPENT,
                    "is missing: nobody can tell which releases were made, and nothing more is "
                    "answered",
                )
            return dict.fromkeys(self._most, 0)
        held = storage.parsed_json(SPENT, self.file.read_bytes())
        own = held.pop(ITSELF, None) if isinstance(held, dict) else None
        if own is not None and own != self.randomness.tag("file", identity_of(self.file).encode()):
            raise Corrupt(
                SPENT,
                "is a copy, or was restored from one, which may lack what was released since: "
                "nothing more is answered",
            )
        if not isinstance(held, dict) or set(held) != set(self._most):
            raise Corrupt(
                SPENT, "does not say what was spent of this claim: nothing more is answered"
            )
        for kind, spent in held.items():
            if type(spent) is not int or not 0 <= spent <= self._most[kind]:
                raise Corrupt(
                    SPENT,
                    f"says that {spent!r} of {self._most[kind]} releases of kind {kind!r} were "
                    f"made",
                )
        return {kind: held[kind] for kind in self._most}


def write(file: Path, spent: Mapping[str, int], randomness: Randomness) -> None:
    """Replace the file of what was spent. It knows itself."""

    def content(own: str) -> bytes:
        return json.dumps({**spent, ITSELF: randomness.tag("file", own.encode())}).encode()

    write_atomically(file, content, mode=PRIVATE_MODE)
