"""The contract suite of releases catches wrong ones; every kind of claim of ours passes its part."""

from __future__ import annotations

import json
import random
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from dpfy.core import events, plugins
from dpfy.core.claim import Claim, register
from dpfy.core.randomness import Randomness
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.run import Run
from dpfy.testing import ContractBroken, check_claim, check_release

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
import claims
from count import LaplaceCount, release

OWN = sorted(plugins.own(plugins.CLAIMS))
LAB = tomllib.loads((Path(__file__).parents[2] / "lab" / "pyproject.toml").read_text())
OF_LAB = LAB["project"]["entry-points"].get(plugins.CLAIMS, {})


def test_every_kind_of_release_has_a_claim_here():
    assert set(OWN) | set(OF_LAB) <= set(claims.MAKE)


@pytest.mark.parametrize("kind", OWN)
def test_claims_of_ours_keep_the_contract(kind):
    made = claims.MAKE[kind](plugins.find(plugins.CLAIMS, kind))
    assert made.kind == kind
    check_claim(made)


def counted(folder):
    return json.loads((folder / "count.json").read_text())["count"]


class Counting:
    """A private count in its right way, for the wrong ones to inherit from."""

    reads_first = False
    binds = True
    finishes = True

    def __call__(self, place, read, claim):
        if complete(place, claim):
            return Path(place.path)
        early = read() if self.reads_first else None
        with RunFolder(self.place(place), *self.claims(claim)) as folder:
            count = early if self.reads_first else read()
            if self.binds:
                folder.bind("count", str(count).encode())
            self.write(folder, claim, count)
            folder.tell(claim.name, count=0)
            return folder.finish(card.Facts({"dpfy": "x", "python": "y", "seed": "z"}, releases=1))

    def place(self, place):
        return place

    def claims(self, claim):
        return (claim,)

    def write(self, folder, claim, count):
        found = self.release(folder, claim, count)
        folder.write("count.json", json.dumps({"count": found}).encode())

    def release(self, folder, claim, count):
        permit = folder.begin(claim.name)
        return release(count, claim.noise_multiplier, folder.randomness, permit)


CLAIM = LaplaceCount(1.0, delta=1e-6)


class ReadsFirst(Counting):
    reads_first = True


class NotBound(Counting):
    """A resumed run takes other data: two counts with one noise show their difference."""

    binds = False


class ConstantNoise(Counting):
    """The same noise in every run."""

    def release(self, folder, claim, count):
        permit = folder.begin(claim.name)
        return release(count, claim.noise_multiplier, Randomness.for_tests(7), permit)


class OwnGenerator(Counting):
    """Noise that does not come from the secret of the run: a resumed run draws again."""

    def release(self, folder, claim, count):
        found = super().release(folder, claim, count)
        return found + random.random() / 2


class TooLittleNoise(Counting):
    """A record moves the count by five, and the event says one."""

    def release(self, folder, claim, count):
        return super().release(folder, claim, 5 * count)


class NoNoise(Counting):
    def release(self, folder, claim, count):
        super().release(folder, claim, count)
        return count


class SmallerClaim(Counting):
    """Another claim is reserved than the one that was asked for."""

    def claims(self, claim):
        return (LaplaceCount(100.0, delta=1e-6),)

    def release(self, folder, claim, count):
        folder.begin(claim.name)
        return count


class OwnLedgerAlone(Counting):
    """The ledger of the data set is left out."""

    def place(self, place):
        return Run(place.path, resume=place.resume, seed=place.seed)


class WritesFirst(Counting):
    """The artefact is there before the ledger says that releases began."""

    def write(self, folder, claim, count):
        folder.write("count.json", b"{}")
        super().write(folder, claim, count)


class KeepsCount(Counting):
    """The count itself is left among the secrets of the finished run."""

    def __call__(self, place, read, claim):
        made = super().__call__(place, read, claim)
        (made / "checkpoint").mkdir(exist_ok=True)
        (made / "checkpoint" / "count.txt").write_text("37")
        return made


class ChangesAfterwards(Counting):
    """The artefact is written again when the run is finished."""

    def __call__(self, place, read, claim):
        made = super().__call__(place, read, claim)
        (made / "count.json").write_text('{"count": 37}')
        return made


class IgnoresBudget(Counting):
    """A second run without a ledger where the budget is spent."""

    def __call__(self, place, read, claim):
        try:
            return super().__call__(place, read, claim)
        except Exception:
            return super().__call__(Run(place.path), read, claim)


class NotAgain(Counting):
    """A finished run reads the data once more."""

    def __call__(self, place, read, claim):
        if complete(place, claim):
            read()
            return Path(place.path)
        return super().__call__(place, read, claim)


WRONG = {
    ReadsFirst: "read after the claim is reserved",
    NotBound: "never meets two data sets",
    ConstantNoise: "different secrets",
    OwnGenerator: "same seed",
    NoNoise: "different secrets",
    SmallerClaim: "read after the claim is reserved",
    OwnLedgerAlone: "in every ledger",
    WritesFirst: "before anything is written",
    KeepsCount: "No secrets stay|verified",
    ChangesAfterwards: "verified",
    IgnoresBudget: "Without budget",
    NotAgain: "not made again",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_wrong_releases_are_caught(kind):
    with pytest.raises(ContractBroken, match=WRONG[kind]):
        check_release(kind(), CLAIM, 37, 38, outcome=counted)


def test_an_event_that_understates_the_sensitivity_is_caught():
    with pytest.raises(ContractBroken, match="as private as the event says"):
        check_release(TooLittleNoise(), CLAIM, 37, 38, outcome=counted, trials=100)


def test_a_right_release_passes():
    check_release(Counting(), CLAIM, 37, 38, outcome=counted, trials=60)


def test_values_that_devices_randomise():
    """A release of ours that makes its reports itself."""
    from dpfy.local.claim import LocalClaim
    from dpfy.local.collection import simulate
    from dpfy.local.frequencies import KaryResponse

    values = np.arange(60) % 4
    other = values.copy()
    other[0] = 3

    def run(place, read, claim):
        return simulate(claim, read, place).run

    claim = LocalClaim("colour", KaryResponse(1.0, 4), simulated=True)
    check_release(run, claim, values, other)


@dataclass(frozen=True)
class Broken(Claim):
    """A claim that is all right, for the wrong ones to inherit from."""

    noise: float = 2.0
    kind: ClassVar[str] = "broken-claim"
    purpose: ClassVar[str] = "statistics"

    @property
    def event(self):
        return events.Gaussian(self.noise)

    def describe(self):
        return {"title": "A claim"}


class NoEvent(Broken):
    kind = "no-event"

    @property
    def event(self):
        return events.MetricPrivacy(1.0, "a metric")


class OtherPurpose(Broken):
    kind = "other-purpose"
    purpose = "curiosity"


class Untitled(Broken):
    kind = "untitled"

    def describe(self):
        return {"noise": self.noise}


class NotJson(Broken):
    kind = "not-json"

    def describe(self):
        return {"title": "A claim", "made": object()}


class OverwritesCard(Broken):
    kind = "overwrites-card"
    artefacts = ("privacy.json",)


class OutsideFolder(Broken):
    kind = "outside-folder"
    artefacts = ("../model.safetensors",)


class ChangingEvent(Broken):
    kind = "changing-event"

    @property
    def event(self):
        return events.Gaussian(2.0 + random.random())


class FreeStop(Broken):
    """Two releases, of which the first is free if it is the only one."""

    kind = "free-stop"
    releases = 2

    @property
    def stops(self):
        return {1: events.Nothing()}


@dataclass(frozen=True)
class Listed(Broken):
    """A field that JSON brings back as another type."""

    kind: ClassVar[str] = "listed"
    names: list = field(default_factory=lambda: ["a"])


WRONG_CLAIMS = {
    NoEvent: "known to the accounting",
    OtherPurpose: "purpose",
    Untitled: "title",
    NotJson: "describe",
    OverwritesCard: "plain file names",
    OutsideFolder: "plain file names",
    ChangingEvent: "same whenever|after JSON|comes back",
    FreeStop: "Ending early",
    Listed: "JSON brings a claim back",
}


@pytest.mark.parametrize("kind", WRONG_CLAIMS, ids=lambda kind: kind.__name__)
def test_wrong_claims_are_caught(kind):
    with pytest.raises(ContractBroken, match=WRONG_CLAIMS[kind]):
        check_claim(register(kind)())


def test_a_claim_that_is_not_registered_is_caught():
    class Unknown(Broken):
        kind = "nobody-knows-this-kind"

    with pytest.raises(Exception, match="nobody-knows-this-kind"):
        check_claim(Unknown())
    check_claim(register(Broken)())
