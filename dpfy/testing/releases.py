"""The contract of a kind of release: reserved before the data is read, released once, and as private
as its event says.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpfy import accounting
from dpfy.accounting.filters import RenyiFilter
from dpfy.audit import bounds
from dpfy.core import check, events
from dpfy.core.claim import NEARLY, NO, STATED, YES, Claim, Reserved, agree, kind_of
from dpfy.core.errors import BudgetExceeded, DpfyError
from dpfy.core.ledger import Ledger
from dpfy.report.verify import verify
from dpfy.runs.folder import CARD, LEDGER, RunFolder
from dpfy.runs.run import Run
from dpfy.testing.contract import ContractBroken, require, typed_refusals

REGISTERED = "The kind of a claim finds its class, in this process and from a file."
TRAVELS = "JSON brings a claim back equal, and its reservation too."
AGREES = "One report can state the claim: its purpose, boundary, trust and name are known words."
STATED_ONCE = "A claim says the same whenever it is asked."
EVENT = "The event is known to the accounting, and a guarantee can be given for it."
SECTION = "`describe` is a section of the report: JSON with a title."
FILES = "Artefacts are plain file names that are not those of the run folder itself."
STOPS = (
    "Ending early is charged as no less than the releases made, and as no more than all of them."
)
RESERVED = "The data is read after the claim is reserved, in every ledger."
BEGUN = "The ledger says that releases began before anything is written."
BUDGET = "Without budget the data is not read and nothing is released."
VERIFIED = "A finished run is verified, byte by byte."
ERASED = "No secrets stay in a finished run."
NOISE = "Runs with different secrets have different noise."
SEED = "The randomness of a release comes from the run folder: the same seed, the same bytes."
RESUMED = "A run that is stopped and resumed releases the same bytes."
REUSED = "One noise never meets two data sets: a resumed run refuses other data."
ONCE = "A finished run is not made again, and reads nothing."
PRIVATE = "What is released is as private as the event says."

OWN_FILES = (CARD, LEDGER, f"{LEDGER}.head", "report.html", "report.md", "checkpoint")
CONFIDENCE = 1e-3
"""The chance that the seeds of the comparison of outcomes make a right release fail."""

MakeRun = Callable[[Run, Callable[[], Any], Claim], Path]


def check_claim(claim: Claim) -> None:
    """Check what a claim promises before any data is read (:class:`dpfy.core.claim.Claim`).

    Args:
        claim: A claim with typical settings.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        A claim that passes is found by its kind, comes back equal from JSON, can be given in a
        report, and has an event for which the accountant it names states a guarantee. Ending early
        is charged between the releases that were made and all of them.

    Example:
        >>> from dpfy.models.normalisation import Normalisation
        >>> from dpfy.testing import check_claim
        >>> check_claim(Normalisation(noise_multiplier=4.0, layers=3))
    """
    where = repr(claim)
    with typed_refusals(REGISTERED, where):
        found = kind_of(claim.kind)
    require(found is type(claim), REGISTERED, where, f"{claim.kind!r} is {found.__name__}")
    with typed_refusals(TRAVELS, where):
        text = json.loads(json.dumps(claim.to_json(), allow_nan=False))
        back = type(claim).from_json(text)
        held = Reserved(claim, fixed_seed=True)
        again = Reserved.from_json(json.loads(json.dumps(held.to_json(), allow_nan=False)))
    require(back == claim and hash(back) == hash(claim), TRAVELS, where, f"it is {back!r}")
    require(again == held, TRAVELS, where, f"its reservation is {again!r}")
    try:
        agree([claim])
    except DpfyError as error:
        raise ContractBroken(AGREES, where, str(error)) from error
    for what in ("event", "name", "releases", "trust", "trusted", "artefacts", "caveats"):
        first, second = getattr(claim, what), getattr(back, what)
        require(first == second, STATED_ONCE, f"{where}, {what}", f"{first!r}, then {second!r}")
    _check_event(claim, where)
    _check_section(claim, where)


def _check_event(claim: Claim, where: str) -> None:
    check.integer("releases", claim.releases)
    with typed_refusals(EVENT, where):
        encoded = json.loads(json.dumps(events.CODEC.encode(claim.event), allow_nan=False))
        same = events.CODEC.decode(encoded) == claim.event
    require(same, EVENT, where, "the event is another one after JSON")
    if claim.instead or isinstance(claim.event, events.NotPrivate):
        return
    adjacency, accountant = claim.adjacency, claim.accountant
    reason = accounting.why_not(
        claim.event, claim.delta, adjacency=adjacency, accountant=accountant
    )
    require(reason is None, EVENT, where, str(reason))

    def cost(event: events.Event) -> float:
        return accounting.epsilon(event, claim.delta, adjacency=adjacency, accountant=accountant)

    whole = cost(claim.event)
    require(math.isfinite(whole), EVENT, where, "epsilon is infinite, and `instead` is empty")
    for made, billed in claim.stops.items():
        detail = f"{where}, after {made} releases"
        require(1 <= made <= claim.releases, STOPS, detail, f"of {claim.releases}")
        part = cost(billed)
        require(0 < part <= whole * (1 + 1e-9), STOPS, detail, f"epsilon {part}, all cost {whole}")
    billed_at = [cost(event) for _, event in sorted(claim.stops.items())]
    rising = all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(billed_at))
    require(rising, STOPS, where, f"a later end costs less: {billed_at}")


def _check_section(claim: Claim, where: str) -> None:
    with typed_refusals(SECTION, where):
        section = claim.describe()
        json.dumps(section, allow_nan=False)
    title = section.get("title")
    require(isinstance(title, str) and bool(title), SECTION, where, f"the title {title!r}")
    facts: dict[str, Any] = {}
    for assumption in claim.assumptions(facts):
        known = assumption.holds in (YES, NO, NEARLY, STATED)
        require(known, SECTION, where, f"an assumption holds {assumption.holds!r}")
    for name in claim.artefacts:
        plain = isinstance(name, str) and name == Path(name).name and not name.startswith(".")
        require(plain and name not in OWN_FILES, FILES, where, f"the artefact {name!r}")


def check_release(
    run: MakeRun,
    claim: Claim,
    data: Any,
    neighbour: Any,
    *,
    outcome: Callable[[Path], float] | None = None,
    trials: int = 0,
    thorough: bool = False,
) -> None:
    """Check that a kind of release keeps its contract, from reservation to verification.

    Args:
        run: `run(place, read, claim)` makes the release in the folder of `place` and returns the
            folder. `read` opens the data; it must be called after the claim is reserved.
        claim: What is claimed. With an epsilon of about 1, 200 `trials` show noise that is a third
            of what the event says, and 500 show half of it.
        data: What `read` gives.
        neighbour: The same without, or with another, record: as far away as the adjacency of the
            claim allows. The released values of both must differ.
        outcome: Reads one released number from a finished folder.
        trials: How many runs to make on `data`, and on `neighbour`, to compare the distributions
            of `outcome`, read before the report is written. 0 skips this check.
        thorough: Make four times as many trials.

    Raises:
        ContractBroken: a property does not hold.

    Guarantees:
        A release that passes keeps, in the settings tried:

        - all that :func:`check_claim` checks;
        - the claim, unchanged, is in the run's own ledger and in that of the data set before the
          data is read, and releases are announced there before anything is written;
        - without budget nothing is read and nothing is left;
        - a finished run is verified, holds no secrets, and is not made again;
        - noise comes from the run's secret: the same seed gives the same bytes, and another secret
          another outcome;
        - a stopped run resumes to the same bytes, and refuses other data;
        - outcomes on the two neighbours are no further apart than the privacy curve of the claim's
          event allows. The trials are seeded: one seed in a thousand fails a right release.

    Example:
        A kind of release in a file of its own is shown, with this check, in docs/testing.md.
    """
    check_claim(claim)
    with tempfile.TemporaryDirectory() as folder:
        checked = _Release(run, claim, data, neighbour, Path(folder))
        first = checked.reserved_first()
        checked.finished(first)
        checked.refused_without_budget()
        checked.seeded()
        checked.resumed()
        if outcome is not None:
            checked.fresh_noise(outcome)
            if trials:
                checked.private(outcome, trials * (4 if thorough else 1))


class _Stopped(BaseException):
    """A crash in the middle of a run, which no handler of the run may take for an error."""


@dataclass
class _Release:
    """One kind of release, in folders of its own."""

    run: MakeRun
    claim: Claim
    data: Any
    neighbour: Any
    folder: Path
    made: int = 0

    @property
    def where(self) -> str:
        """The setting of an error."""
        return repr(self.claim)

    def fresh(self) -> Path:
        """A folder for one more run."""
        self.made += 1
        return self.folder / f"run{self.made}"

    def release(self, place: Run, data: Any = None) -> Path:
        """One run; its folder."""
        given = self.data if data is None else data
        return Path(self.run(place, lambda: given, self.claim))

    def reserved_first(self) -> Path:
        """A run that looks into both ledgers when the data is read."""
        place = Run(
            self.fresh(), ledger=self.folder / "people.jsonl", budget=RenyiFilter(1e4, 0.5, 0.25)
        )
        read: list[list[Claim]] = []

        def look() -> Any:
            for ledger in (Path(place.path) / LEDGER, Path(str(place.ledger))):
                held = _claims(ledger)
                known = self.claim in held
                require(known, RESERVED, f"{self.where}, {ledger.name}", f"it holds {held!r}")
                read.append(held)
            return self.data

        with _announced(self.where, self.claim):
            made = Path(self.run(place, look, self.claim))
        require(bool(read), RESERVED, self.where, "the run never called `read`")
        for ledger in (made / LEDGER, Path(str(place.ledger))):
            held = _claims(ledger)
            require(
                held.count(self.claim) == 1,
                RESERVED,
                f"{self.where}, {ledger.name}",
                f"it is reserved {held.count(self.claim)} times",
            )
        self._not_again(place)
        wrong = [finding for finding in verify(made, ledger=place.ledger) if not finding.holds]
        require(not wrong, VERIFIED, self.where, "; ".join(map(str, wrong[:3])))
        return made

    def _not_again(self, place: Run) -> None:
        def read() -> Any:
            raise ContractBroken(ONCE, self.where, "the data is read again")

        resumed = Run(place.path, resume=True, ledger=place.ledger, budget=place.budget)
        before = _bytes(Path(place.path))
        with suppress(DpfyError):
            self.run(resumed, read, self.claim)
        require(_bytes(Path(place.path)) == before, ONCE, self.where, "a file changed")

    def finished(self, made: Path) -> None:
        """What is in a folder afterwards."""
        left = [p.name for p in (made / "checkpoint").glob("*")]
        require(not left, ERASED, self.where, f"checkpoint/ holds {left}")
        written = [name for name in self.claim.artefacts if (made / name).is_file()]
        require(
            bool(written) or not self.claim.artefacts, VERIFIED, self.where, "no artefact is there"
        )

    def refused_without_budget(self) -> None:
        """A budget that has next to nothing left."""
        if isinstance(self.claim.event, events.NotPrivate | events.Nothing):
            return
        path = self.fresh()
        place = Run(path, ledger=self.folder / "spent.jsonl", budget=RenyiFilter(1e-9, 1e-12))

        def read() -> Any:
            raise ContractBroken(BUDGET, self.where, "the data was read")

        try:
            self.run(place, read, self.claim)
        except BudgetExceeded:
            pass
        except DpfyError as error:
            raise ContractBroken(BUDGET, self.where, f"refused with {error!r}") from error
        else:
            require(False, BUDGET, self.where, "a release was made")
        left = sorted(p.name for p in path.glob("*")) if path.is_dir() else []
        require(not left, BUDGET, self.where, f"the folder holds {left}")

    def seeded(self) -> None:
        """Two runs with one seed."""
        one, other = (self.release(Run(self.fresh(), seed=5)) for _ in range(2))
        for name in self.claim.artefacts:
            if (one / name).is_file():
                same = (one / name).read_bytes() == (other / name).read_bytes()
                require(same, SEED, f"{self.where}, {name}", "two runs with one seed differ")

    def resumed(self) -> None:
        """Stopped before the report is written, then resumed."""
        due = self.release(Run(self.fresh(), seed=6))
        for data, other in ((self.data, False), (self.neighbour, True)):
            path = self.fresh()
            with (
                mock.patch.object(RunFolder, "finish", _stop),
                suppress(_Stopped),
            ):
                self.release(Run(path, seed=6))
                raise ContractBroken(VERIFIED, self.where, "the run never called `finish`")
            try:
                made = self.release(Run(path, seed=6, resume=True), data)
            except DpfyError as error:
                require(other, RESUMED, self.where, f"resuming raised {error!r}")
                continue
            require(not other, REUSED, self.where, "it released the neighbour with the same noise")
            for name in self.claim.artefacts:
                if (due / name).is_file():
                    same = (made / name).is_file() and (
                        (made / name).read_bytes() == (due / name).read_bytes()
                    )
                    require(same, RESUMED, f"{self.where}, {name}", "it has other bytes")

    def fresh_noise(self, outcome: Callable[[Path], float]) -> None:
        """Outcomes of runs with secrets from the operating system."""
        seen = [float(outcome(self.release(Run(self.fresh())))) for _ in range(4)]
        different = len(set(seen)) > 1 or all(math.isnan(value) for value in seen)
        require(different, NOISE, self.where, f"four runs released {seen[0]!r}")

    def unfinished(self, data: Any, seed: int) -> Path:
        """A run up to its report, which takes most of the time. Nothing of it needs to last."""
        path = self.fresh()
        with (
            mock.patch.object(RunFolder, "finish", _stop),
            mock.patch("os.fsync"),
            suppress(_Stopped),
        ):
            self.release(Run(path, seed=seed), data)
        return path

    def private(self, outcome: Callable[[Path], float], trials: int) -> None:
        """Distributions on the two neighbours, against the curve of the event."""
        inside, outside = (
            np.array(
                [outcome(self.unfinished(data, seed)) for seed in range(start, start + trials)]
            )
            for data, start in ((self.data, 0), (self.neighbour, trials))
        )
        curve = accounting.curve(
            self.claim.event, adjacency=self.claim.adjacency, accountant=self.claim.accountant
        )
        for epsilon in (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
            allowed = curve.delta(epsilon)
            for name, one, two in (("data", inside, outside), ("neighbour", outside, inside)):
                reached = max(
                    _surely(one, two, epsilon),
                    _surely(-one, -two, epsilon),
                )
                require(
                    reached <= allowed,
                    PRIVATE,
                    f"{self.where}, {trials} runs on each, more likely on the {name}",
                    f"delta {reached:.4g} at epsilon {epsilon}, where the event allows "
                    f"{allowed:.4g}",
                )


def _surely(one: Any, two: Any, epsilon: float) -> float:
    """A lower bound on P(outcome above t) - e^epsilon Q(outcome above t), for the best t of a half
    of the outcomes, counted on the other half.
    """
    chosen, counted = slice(0, None, 2), slice(1, None, 2)
    cuts = np.unique(np.concatenate([one[chosen], two[chosen]]))
    above = [np.mean(one[chosen] > t) - math.exp(epsilon) * np.mean(two[chosen] > t) for t in cuts]
    cut = cuts[int(np.argmax(above))]
    alpha = CONFIDENCE / 40
    p = bounds.lower(int((one[counted] > cut).sum()), len(one[counted]), alpha)
    q = bounds.upper(int((two[counted] > cut).sum()), len(two[counted]), alpha)
    return p - math.exp(epsilon) * q


def _stop(*_: object, **__: object) -> Path:
    raise _Stopped


def _claims(ledger: Path) -> list[Claim]:
    """The claims that a ledger holds; none where it is not there."""
    if not ledger.is_file():
        return []
    permits = Ledger.read(ledger).permits()
    return [Reserved.from_json(p.claim).claim for p in permits if p.claim]


@contextmanager
def _announced(where: str, claim: Claim) -> Iterator[None]:
    """Artefacts are written after the ledger says that releases began."""
    write = RunFolder.write

    def checked(folder: RunFolder, name: str, content: bytes) -> Path:
        named: Sequence[str] = [c.name for c in folder.claims if name in c.artefacts]
        require(
            folder.has_begun(*named),
            BEGUN,
            f"{where}, the file {name}",
            "nothing is announced in the ledger",
        )
        return write(folder, name, content)

    with mock.patch.object(RunFolder, "write", checked):
        yield


def _bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
