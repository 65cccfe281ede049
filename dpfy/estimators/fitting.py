"""One fit in its run folder: reserve, read, release in rounds, write, report.

Sums are made without rounding. What a record adds is a vector of whole multiples of 2^-bits; double
precision adds and multiplies such numbers without error as long as sums stay below 2^53 steps, in
any order, on any number of threads. So what is released changes by what one record adds and by
nothing else, and matrix products do the work.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dpfy
from dpfy.core import check, events, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.values import Bound
from dpfy.estimators.claim import FILE, FitClaim, ReleaseRound
from dpfy.mechanisms import integers
from dpfy.mechanisms.additive import GaussianMechanism, LaplaceMechanism
from dpfy.mechanisms.choice import Exponential
from dpfy.mechanisms.grid import Grid
from dpfy.mechanisms.mechanism import drawable, source
from dpfy.report import card
from dpfy.report.verify import Finding, load_card, verify
from dpfy.runs.folder import CARD, LEDGER, RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run

BITS = 12
"""Fractional bits of a scaled number, or of a factor, where nothing else is said: products have
twice as many.
"""
EXACT = 53
"""Double precision holds whole numbers up to 2^53."""
FINE = 16
"""Bits between a step of the grid and the scale of the noise, at least."""
TERM = 40
"""Bits between a step and the deviation of the linear term of an objective."""
META = "dpfy"
MEMORY = "/dev/shm"
KEPT = (LEDGER, CARD, "report.html", "report.md", FILE)

Floats = NDArray[np.float64]


def fixed(values: Any, bits: int = BITS) -> Floats:
    """Numbers rounded to whole multiples of 2^-bits."""
    found = np.multiply(values, 2.0**bits, dtype=np.float64)
    np.rint(found, out=found)
    found *= 2.0**-bits
    return found


def most_records(largest: float, bits: int) -> int:
    """How many records, none of which adds more than `largest` to a coordinate in steps of 2^-bits,
    can be summed without rounding.
    """
    return int(2**EXACT / max(1.0, largest * 2.0**bits))


@dataclass(frozen=True)
class WholeSteps:
    """Sums in whole steps of 2^-bits: those of many records leave what doubles have exactly."""

    counts: NDArray[np.int64] = field(repr=False)
    bits: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.ldexp(self.counts.astype(np.float64), -self.bits).astype(dtype or np.float64)


@dataclass(frozen=True)
class FittedArrays:
    """What a fit leaves: released arrays by name, and facts about them as JSON."""

    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """As safetensors."""
        from safetensors.numpy import save

        return save(
            {k: np.ascontiguousarray(v) for k, v in self.arrays.items()},
            {META: json.dumps(dict(self.facts))},
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> FittedArrays:
        """What `to_bytes` wrote; anything else is `Corrupt`."""
        from safetensors.numpy import load

        try:
            size = int.from_bytes(content[:8], "little")
            facts = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][META])
            if not isinstance(facts, dict):
                raise TypeError
            return cls(load(content), facts)
        except Exception:  # the reader raises types of its own
            raise Corrupt(FILE, "does not hold an estimator") from None


@dataclass(frozen=True, repr=False)
class FinishedFit(Released):
    """A finished fit: the files of its run folder. `run` is where they are, None for a fit that was
    given no folder: `save` writes one.
    """

    run: Path | None  # type: ignore[assignment]
    files: Mapping[str, bytes] = field(repr=False)

    @cached_property
    def report(self) -> dict[str, Any]:
        """The privacy report: guarantee, rounds, assumptions."""
        found: dict[str, Any] = json.loads(self.files[CARD])
        return found

    def verify(self, **options: Any) -> list[Finding]:
        """Check the files of the run, wherever they are kept."""
        with tempfile.TemporaryDirectory(prefix="dpfy-verify-") as folder:
            return verify(self.save(Path(folder) / "run"), **options)

    def _ledger(self) -> Ledger:
        with tempfile.TemporaryDirectory(prefix="dpfy-verify-") as folder:
            return Ledger.read(self.save(Path(folder) / "run") / LEDGER)

    def _told(self) -> dict[str, Any]:
        return {"estimator": self.model.facts.get("estimator")}

    def _where(self) -> str:
        return f"Run: {self.run}" if self.run else "Run: kept in memory; release_.save(path)"

    @property
    def model(self) -> FittedArrays:
        """What was released."""
        return FittedArrays.from_bytes(self.files[FILE])

    def save(self, folder: str | Path) -> Path:
        """Write the run folder, new or empty; `dpfy verify` checks it."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise InvalidInput("folder", str(folder), "is not empty; choose another")
        for name, content in self.files.items():
            (path / name).write_bytes(content)
        return path

    @classmethod
    def of(cls, folder: Path, keep_path: bool = True) -> FinishedFit:
        """The finished run in a folder."""
        names = [name for name in KEPT if (folder / name).is_file()]
        if CARD in names and FILE not in names:
            card.require_a_trial(load_card(folder / CARD), folder)
        for name in (CARD, FILE):
            if name not in names:
                raise InvalidInput("run", str(folder), f"holds no finished fit: {name} is missing")
        files = {
            name: storage.content(name, folder / name, most=storage.MOST_DATA) for name in names
        }
        return cls(folder if keep_path else None, files)


class FitSession:
    """An open fit: what its claim has reserved is released under it, round by round.

    Guarantees: nothing is released that was not reserved, no release twice, none with less noise
    than its round says. In a folder that can be resumed each sum is bound before its noise is made.
    """

    def __init__(
        self, folder: RunFolder, claim: FitClaim, resumable: bool, progress: Progress | None = None
    ) -> None:
        self._folder, self.claim, self._resumable, self._progress = (
            folder,
            claim,
            resumable,
            progress,
        )
        self._event = claim.event
        self._used: dict[str, int] = {}

    @property
    def released(self) -> int:
        """How many releases were made."""
        return sum(self._used.values())

    def key(self, name: str) -> bytes:
        """A secret of the run, for choices that nobody may foresee."""
        return self._folder.randomness.key(name, 0, 32)

    def round(self, name: str) -> ReleaseRound:
        """A round by its name: its bound is what contributions are clipped to."""
        return self.claim.first_step(name)[0]

    def release(self, name: str, total: NDArray[Any] | WholeSteps, bits: int = 0) -> Floats:
        """The next release of a round: a sum of contributions, in whole steps of 2^-bits, with its
        noise.

        The caller has made every contribution a vector of whole steps with at most the norm
        `round(name).bound`.

        Guarantees: the noise is drawn exactly, of at least the scale of the round.
        """
        held, step = self._next(name)
        if not isinstance(held.event, events.Gaussian | events.Laplace):
            raise InvalidInput("round", name, "is a choice, not a sum")
        counts, bits = _laid(total, bits, held.scale)
        grid, bound = (
            Grid(-bits),
            Bound(l2=held.bound)
            if isinstance(held.event, events.Gaussian)
            else Bound(l1=held.bound),
        )
        tool = (GaussianMechanism if isinstance(held.event, events.Gaussian) else LaplaceMechanism)(
            held.event.noise_multiplier
        )
        parameter = tool.parameter(grid, bound)
        bits_of_step = source(
            self._event, self._begun(name, step, counts), self._folder.randomness, step
        )
        noise = tool.draw(counts.size, parameter, bits_of_step).reshape(counts.shape)
        return np.asarray(grid.values(counts + noise), np.float64)

    def choose(self, name: str, scores: NDArray[Any], bits: int = 0, monotone: bool = False) -> int:
        """The next choice of a round: a public candidate, by scores in whole steps of 2^-bits, of
        which one unit changes each by at most the bound of the round. `monotone`: adding a unit
        raises all scores or lowers all.
        """
        return self.choose_each(name, np.asarray(scores).reshape(1, -1), bits, monotone)[0]

    def choose_each(
        self, name: str, scores: NDArray[Any], bits: int = 0, monotone: bool = False
    ) -> list[int]:
        """A choice for each row of scores, where adding a unit changes one row only: parts of the
        data that share no record.

        Guarantees: all together are one choice for the charge. Adding or removing a unit changes one
        row; replacing one changes at most two, by what adding changes each, and intervals of losses
        add up to that of one row changed by twice as much.
        """
        held, step = self._next(name)
        if not isinstance(held.event, events.BoundedRange):
            raise InvalidInput("round", name, "is a sum, not a choice")
        counts = in_steps(scores, bits)
        tool = Exponential(held.event.epsilon, monotone, adjacency=self.claim.adjacency)
        stream = source(self._event, self._begun(name, step, counts), self._folder.randomness, step)
        width = max(1, math.floor(held.bound * 2.0**bits)) * tool.moves * (1 if monotone else 2)
        return [tool._index(row, width, stream) for row in counts]

    def draw(self, name: str, count: int, content: Callable[[], Iterable[bytes]]) -> Floats:
        """The random linear term of an objective: standard normal numbers, rounded to 2^-40 of
        their deviation, and drawn exactly.

        `content` gives all that they will meet.
        """
        held, step = self._next(name)
        if not isinstance(held.event, events.ObjectivePerturbation):
            raise InvalidInput("round", name, "is not the linear term of an objective")
        whole = hashlib.blake2b()
        for part in content() if self._resumable else ():
            whole.update(part)
        permit = self._begun(name, step, np.frombuffer(whole.digest(), np.int64))
        drawn = integers.gaussian(
            count, 1 << TERM, source(self._event, permit, self._folder.randomness, step)
        )
        return np.ldexp(drawn.astype(np.float64), -TERM)

    def tell(self, **facts: Any) -> None:
        """Put released figures, or public ones, into the section of the report."""
        self._folder.tell(self.claim.name, **facts)

    def _next(self, name: str) -> tuple[ReleaseRound, int]:
        held, first = self.claim.first_step(name)
        used = self._used.get(name, 0)
        if used >= held.releases:
            raise InvalidInput(
                "round", name, f"was reserved for {held.releases} releases, and all are made"
            )
        self._used[name] = used + 1
        return held, first + used

    def _begun(self, name: str, step: int, counts: NDArray[np.int64]) -> Any:
        if self._resumable:
            self._folder.bind(f"{name} {step}", counts.tobytes())
        if self._progress is not None:
            self._progress("fitting", self.released / self.claim.releases)
        return self._folder.begin(self.claim.name)


def in_steps(total: NDArray[Any] | WholeSteps, bits: int) -> NDArray[np.int64]:
    """A sum in whole steps. Double precision made it without rounding, so that nothing is lost
    here.
    """
    check.integer("bits", bits, least=0, most=EXACT)
    if isinstance(total, WholeSteps):
        return total.counts
    value = np.asarray(total)
    if value.dtype.kind in "biu":
        return value.astype(np.int64) << bits
    return np.rint(np.ldexp(value, bits)).astype(np.int64)


def _laid(
    total: NDArray[Any] | WholeSteps, bits: int, scale: float
) -> tuple[NDArray[np.int64], int]:
    """A sum in whole steps, and their fractional bits: at least `FINE` bits finer than the noise,
    which is then hardly widened.

    What leaves the range of 62 bits counts as its end, which moves two sums no farther apart.
    """
    counts, more = in_steps(total, bits), fine(bits, scale) - bits
    most = (1 << 62) >> more
    return np.clip(counts, -most, most) << more, bits + more


def fine(bits: int, scale: float) -> int:
    """Fractional bits of the grid on which noise of this scale is added to sums with so many."""
    return max(bits, FINE - math.frexp(scale)[1])


def check_drawable(claim: FitClaim, bits: Mapping[str, int]) -> None:
    """Refuse, before anything is reserved, noise too wide to be drawn on the grid of a round."""
    for held in claim.rounds:
        if isinstance(held.event, events.Gaussian | events.Laplace):
            drawable(
                "epsilon",
                f"noise of {held.name}",
                Grid(-fine(bits.get(held.name, 0), held.scale)).steps(held.scale) + 8,
            )


def _memory() -> str | None:
    """A folder that lives in memory, where there is one: the secret of a fit without a folder never
    reaches a disk.
    """
    return MEMORY if os.access(MEMORY, os.W_OK | os.X_OK) else None


@contextmanager
def opened(
    place: Run, claim: FitClaim, resumable: bool, progress: Progress | None = None
) -> Iterator[FitSession]:
    """A fit in its folder, every release of it reserved in every ledger."""
    with RunFolder(place, claim) as folder:
        yield FitSession(folder, claim, resumable, progress)


def finish(fit: FitSession, model: FittedArrays, delta_from: str = "given by the caller") -> None:
    """Write what was released, and the report."""
    folder = fit._folder
    folder.begin(fit.claim.name)
    folder.write(FILE, model.to_bytes())
    folder.tell(fit.claim.name, delta_from=delta_from)
    seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
    about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
    folder.finish(card.Facts(about, releases=fit.released))


def run(
    place: Run | None,
    other: Mapping[str, Any],
    claim: FitClaim,
    learn: Callable[[FitSession], FittedArrays],
    progress: Progress | None = None,
    delta_from: str = "given by the caller",
) -> FinishedFit:
    """A fit from its claim to its report: in `place`, or, where there is none, in a temporary folder
    of which the files are kept.

    `other` are fields of a place for the temporary folder (ledger, seed). `learn` reads the data;
    it is called when the claim is reserved.

    Guarantees: what fails before the first release gives the reservations back and leaves no
    folder.
    """
    if place is not None:
        path = Path(place.path)
        if not complete(place, claim):
            with opened(place, claim, True, progress) as fit:
                finish(fit, learn(fit), delta_from)
        return FinishedFit.of(path)
    with tempfile.TemporaryDirectory(prefix="dpfy-fit-", dir=_memory()) as folder:
        path = Path(folder) / "run"
        with opened(Run(path, **other), claim, False, progress) as fit:
            finish(fit, learn(fit), delta_from)
        return FinishedFit.of(path, keep_path=False)
