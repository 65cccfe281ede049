"""The server's side of private prediction: voters that stay where they are, and answers that were
paid for.

What was paid for and is not used yet. It is taken in blocks, each written down durably before
its first release is made.

    checkpoint/spent.json   for every kind of release, how many may have been made

A release needs an address of its own for its noise, too: its step. Steps are handed out from the
block in memory. A process that is killed has used some of its block; the next one begins after it,
so that no step is used twice and no more is released than was paid for. What was left of the block
is lost: a crash can only over-report.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

import dpfy
from dpfy.core import check, storage
from dpfy.core.claim import Claim
from dpfy.core.errors import BudgetExceeded, Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, identity_of, write_atomically
from dpfy.core.values import Permit
from dpfy.mechanisms.exact import Bits
from dpfy.mechanisms.mechanism import source
from dpfy.prediction.claim import VoteClaim
from dpfy.prediction.rules import Ask
from dpfy.report import card
from dpfy.runs.folder import RunFolder
from dpfy.runs.mark import ANSWERED, SPENT
from dpfy.runs.run import Run

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


MOST_CACHED = 1 << 20
"""Answers that are remembered; the oldest are forgotten first, and are paid for again."""
FLOAT = np.float32


class Voters(Protocol):
    """Models of which every unit of the data made at most one."""

    @property
    def count(self) -> int:
        """How many there are."""

    @property
    def classes(self) -> int:
        """How many answers there are."""

    @property
    def features(self) -> int:
        """How many numbers a question has."""

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """For each question (a row), the function that gives the votes on it, with what one unit
        moves them by.
        """

    def fingerprint(self) -> bytes:
        """What makes them the same voters again after a restart."""


@dataclass(frozen=True)
class Prediction:
    """What leaves for one question: a class or a number, or None with the reason. `paid` is False where the
    same was answered before.
    """

    label: Any
    why_not: str = ""
    paid: bool = True

    def to_json(self) -> dict[str, Any]:
        """For the service."""
        return (
            {"label": self.label}
            | ({"why_not": self.why_not} if self.why_not else {})
            | {"paid": self.paid}
        )


DISAGREE = "the voters do not agree enough"


class PrivatePredictor:
    """Answers questions from private voters, as many as were paid for, in a run folder with a
    ledger and, at the end, a report.

    Use it as a context. `Run(..., resume=True)` goes on after a crash, with the same voters.
    `voters` may be a function that makes them when the claim is reserved, given the folder.
    `beside` are claims of other releases in the same folder, reserved with it.

    Guarantees: the whole claim is reserved in every ledger before the first question is looked at,
    and started before the first answer; each release is taken from what was paid for, durably, before
    its noise is drawn; a question that was answered before is answered alike, for nothing; when
    nothing is left, `answer` refuses. The voters and their votes never leave.
    """

    def __init__(
        self,
        place: Run,
        claim: VoteClaim,
        voters: Voters | Callable[[RunFolder], Voters],
        *,
        block: int = BLOCK,
        beside: Sequence[Claim] = (),
    ) -> None:
        if not callable(voters):
            _agree(claim, voters)
        self.claim, self.rule = claim, claim.tool
        self.folder = RunFolder(place, claim, *beside)
        try:
            if callable(voters):
                voters = voters(self.folder)
                _agree(claim, voters)
            self.voters = voters
            self.folder.bind(claim.name, voters.fingerprint())
            spent = self.folder.secrets / SPENT
            if not spent.is_file() and not (
                self.folder.identified and self.folder.has_begun(claim.name)
            ):
                write(spent, dict.fromkeys(claim.most, 0), self.folder.randomness)
            permit = self.folder.begin(claim.name)
            self.purse = ReservedSteps(
                self.folder.secrets, claim, permit, self.folder.randomness, block, due=True
            )
            self._cache = AnswerCache(self.folder.secrets / ANSWERED)
        except BaseException as error:
            self.folder.__exit__(type(error), error, None)
            raise

    def answer(self, question: Sequence[float] | NDArray[Any]) -> Prediction:
        """The answer to one question, or a refusal."""
        return self.answer_all(np.asarray(question)[None])[0]

    def answer_all(self, questions: Any) -> list[Prediction]:
        """Answers to several questions, in their order; the same question twice is paid for
        once.
        """
        self.folder.renew()
        table = self._checked(questions)
        keys = [hashlib.blake2b(row.tobytes(), digest_size=16).hexdigest() for row in table]
        unknown = {key: place for place, key in enumerate(keys) if key not in self._cache}
        asks = self.voters.asked(table[list(unknown.values())]) if unknown else []
        fresh = {key: self._asked(key, ask) for key, ask in zip(unknown, asks, strict=True)}
        found = []
        for key in keys:
            answer = fresh.pop(key, None) or self._cache.get(key)
            found.append(self._said(answer if answer is not None else self._refusal()))
        return found

    def _said(self, answer: Prediction) -> Prediction:
        """An answer as its rule reads it."""
        known = answer.label is not None
        return replace(answer, label=self.rule.says(answer.label)) if known else answer

    def _asked(self, key: str, ask: Ask) -> Prediction:
        """A question that is not known: paid for, answered, remembered, in this order."""
        try:
            label = self.rule.answer(ask, self.purse)
        except BudgetExceeded as refused:
            return Prediction(None, str(refused), paid=False)
        self._cache.put(key, label)
        return Prediction(label, "" if label is not None else DISAGREE)

    def _refusal(self) -> Prediction:
        return Prediction(None, "was refused before in the same request", paid=False)

    def _checked(self, questions: Any) -> NDArray[np.float32]:
        try:
            with np.errstate(over="ignore"):
                table = np.asarray(questions, dtype=FLOAT)
        except (TypeError, ValueError):
            raise InvalidInput(
                "inputs", "no numbers", f"must be rows of {self.voters.features} numbers"
            ) from None
        if (
            table.ndim != 2
            or table.shape[1] != self.voters.features
            or not np.isfinite(table).all()
        ):
            rule = f"must be rows of {self.voters.features} finite numbers"
            raise InvalidInput("inputs", f"an array of shape {table.shape}", rule)
        return np.ascontiguousarray(table + FLOAT(0))  # a question with -0 is the one with 0

    def left(self) -> dict[str, int]:
        """How many releases of each kind can still be made: a function of what was released, and no
        secret.
        """
        return self.purse.left()

    def finish(self) -> Path:
        """End the service: report, pages, and the secrets erased. Nothing is answered any more."""
        seed = card.FIXED_SEED if self.folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        made = {kind: most - self.purse.left()[kind] for kind, most in self.claim.most.items()}
        self.folder.tell(self.claim.name, made=made)
        self._cache.close()
        return self.folder.finish(
            card.Facts(about, releases=sum(made.values()) + len(self.folder.claims) - 1)
        )

    def __enter__(self) -> Self:
        """Held until the block is left."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Let go. The folder stays, to be resumed or finished."""
        self._cache.close()
        self.folder.__exit__(kind, error, trace)


def _agree(claim: VoteClaim, voters: Voters) -> None:
    for name, held in (("voters", voters.count), ("classes", voters.classes)):
        if getattr(claim, name) != held:
            raise InvalidInput(
                f"claim.{name}", getattr(claim, name), f"must be {held}, as the voters are"
            )


class AnswerCache:
    """Answers that were given, by a hash of their question; what a crash cut short is dropped, and
    would be paid for again.
    """

    def __init__(self, file: Path, most: int = MOST_CACHED) -> None:
        self.most = check.integer("cache", most)
        self._held: OrderedDict[str, int | None] = OrderedDict()
        content = file.read_bytes() if file.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            key, label = self._line(line)
            self._remember(key, label)
        self._handle = os.open(
            file,
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
            PRIVATE_MODE,
        )
        if len(whole) < len(content):
            os.ftruncate(self._handle, len(whole))

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def get(self, key: str) -> Prediction | None:
        """The answer that was given before, for nothing."""
        if key not in self._held:
            return None
        label = self._held[key]
        return Prediction(label, "" if label is not None else DISAGREE, paid=False)

    def put(self, key: str, label: int | None) -> None:
        """Remember an answer, in the file too, before it leaves."""
        line = json.dumps([key, label]).encode() + b"\n"
        while line:
            line = line[os.write(self._handle, line) :]
        self._remember(key, label)

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _remember(self, key: str, label: int | None) -> None:
        self._held[key] = label
        if len(self._held) > self.most:
            self._held.popitem(last=False)

    def _line(self, line: bytes) -> tuple[str, int | None]:
        held = storage.parsed_json(ANSWERED, line)
        if (
            not isinstance(held, list)
            or len(held) != 2
            or not isinstance(held[0], str)
            or type(held[1]) not in (int, type(None))
        ):
            raise Corrupt(ANSWERED, "holds a line that is no answer")
        return held[0], held[1]
