"""What a release promises, known before the data is read. Every kind of release is one class that
keeps to this.

A kind is a name and a class. An installed distribution, dpfy or a plug-in, registers it by an entry
point of the group `dpfy.claims`; one that belongs to no distribution registers itself with
:func:`register` where it is defined. A file names a kind, never a module: what it names is imported
only where an entry point has that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from dpfy.core import check, errors, events, plugins
from dpfy.core.codec import Codec
from dpfy.core.errors import Corrupt, InvalidInput, Unsupported
from dpfy.core.unit import EXAMPLE, Adjacency, Unit, check_content

ENTROPY, FIXED = "entropy", "fixed"
PRACTICE = "the seed was fixed for a test: whoever knows it can remove the noise"
YES, NO, NEARLY, STATED = "yes", "no", "nearly", "stated"
"""Whether an assumption of the accounting holds; `STATED` where only the caller can know."""

PURPOSES = {
    "training": "training the released model",
    "tuning": "choosing hyperparameters, architectures or stopping times",
    "statistics": "statistics, ranges and normalisation computed from the data",
    "vocabulary": "vocabularies, label sets and categories read from the data",
    "labels": "labels given to data that has none",
    "answers": "answers about the data, or predictions from it",
    "synthesis": "synthetic data made from the data",
    "audit": "audits that look at the data",
    "evaluation": "measuring the released model on private held-out records",
}
"""What data may be used for."""

BOUNDARIES = {
    "B1": "the raw data from which records are derived",
    "B2": "the data set itself",
    "B3": "the contribution of a single unit",
    "B4": "sums over many units: aggregated gradients and every intermediate model, or noisy "
    "statistics",
    "B5": "the final result alone: the parameters of the released model",
    "B6": "predictions or answers alone",
}
"""Who may see what (Ponomareva et al. 2023, section 3.1): from its boundary on everything is
protected, and what lies before is not.
"""

TRUSTS = {
    "central": "Anyone who holds the data must be trusted, to keep it and to run the mechanism as "
    "described; nobody who sees what is released.",
    "distributed": "The protocol that adds up the contributions, and enough of their owners to add "
    "their noise, must be trusted; no single "
    "party, and nobody who sees the sum.",
    "local": "Nobody must be trusted but one's own device: what leaves it is protected already.",
    "shuffled": "Nobody must be trusted but one's own device, the shuffler, to put the reports in "
    "a random order and to show nobody whose "
    "each is, and the devices of others, to randomise theirs.",
}
"""Who must be trusted, in one sentence for each trust model. A claim that knows more says so itself
(`Claim.trusted`).
"""


@dataclass(frozen=True)
class Assumption:
    """One assumption of the accounting: what is assumed, what was done, and whether they agree."""

    what: str
    assumed: str
    done: str
    holds: str

    def to_json(self) -> dict[str, str]:
        """A row of the report."""
        return {"what": self.what, "assumed": self.assumed, "done": self.done, "holds": self.holds}


@dataclass(frozen=True)
class Claim:
    """What one release promises. All of it is known before the data is read, and none of it depends
    on the data.

    A kind of release is a frozen dataclass that inherits from this, adds its own fields and says
    what it does. The defaults are those of one central release of sums under the tight accountant.

    - `kind`: the name of the class of claims, that of an entry point or given to :func:`register`.
      `name`: what its reservation is called, once in a folder. `purpose`: one of `PURPOSES`.
    - `event`: the whole charge. `releases`: how many times noise is drawn under it. `delta`: where
      the guarantee is given, 0 for a pure one. `accountant`: by which accountant.
    - `unit`: whose data is protected. `adjacency`: which change of the data is hidden. `trust`: one
      of `TRUSTS`, and `trusted`: who must be trusted, in one sentence. `boundary`: one of
      `BOUNDARIES`, the first thing that is protected. `records`: the public number of units, where
      there is one.
    - `artefacts`: names of the files that may come of it.
    """

    unit: Unit = field(default=EXAMPLE, kw_only=True)
    adjacency: Adjacency = field(default=Adjacency.ADD_OR_REMOVE_ONE, kw_only=True)
    delta: float = field(default=1e-6, kw_only=True)
    accountant: str = field(default="tight", kw_only=True)
    records: int | None = field(default=None, kw_only=True)

    kind: ClassVar[str]
    purpose: ClassVar[str]
    boundary: ClassVar[str] = "B4"

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        check_content(self.unit, self.adjacency)
        if self.delta != 0:
            check.delta("delta", self.delta)
        if self.records is not None:
            check.integer("records", self.records, most=check.RECORDS)

    @property
    def event(self) -> events.Event:
        """The whole charge."""
        raise NotImplementedError(f"the claim {type(self).__name__} does not say what it costs")

    def describe(self) -> dict[str, Any]:
        """Its own section of the report: `title`, and whatever a reader needs, as JSON."""
        raise NotImplementedError(f"the claim {type(self).__name__} has no section of the report")

    @property
    def name(self) -> str:
        """Its kind: one release of a kind in a folder."""
        return self.kind

    @property
    def trust(self) -> str:
        """The data is in one place."""
        return "central"

    @property
    def trusted(self) -> str:
        """Who must be trusted, in one sentence."""
        return TRUSTS[self.trust]

    @property
    def releases(self) -> int:
        """Noise is drawn once."""
        return 1

    @property
    def stops(self) -> Mapping[int, events.Event]:
        """After how many releases the work may end early, each with what is charged then instead of
        `event`: never.
        """
        return {}

    @property
    def instead(self) -> str:
        """What is promised where there is no differential privacy, in words for the end of that
        sentence: nothing.
        """
        return ""

    @property
    def caveats(self) -> tuple[str, ...]:
        """Conditions of the guarantee, beside its assumptions: none."""
        return ()

    def trained(self, facts: Mapping[str, Any]) -> events.Event | None:
        """Of a claim that covers a search and the training it ends with: what the training would
        cost by itself. Others: None.
        """
        return None

    def check_group(self, size: int) -> None:
        """Refuse (`Unsupported`) where `event` does not say what `size` units together are shown:
        it does.
        """
        check.integer("group", size)

    def files(self) -> Mapping[str, bytes]:
        """What is written down about it in a folder before the data is read: nothing beside the
        ledger.
        """
        return {}

    def assumptions(self, facts: Mapping[str, Any]) -> Sequence[Assumption]:
        """What the accounting assumes, beside the noise, given what the run states about itself:
        nothing more.
        """
        return ()

    @property
    def artefacts(self) -> tuple[str, ...]:
        """No files."""
        return ()

    def warnings(self, facts: Mapping[str, Any]) -> Sequence[str]:
        """What a reader of the report must not overlook: nothing."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Every field."""
        held: dict[str, Any] = Codec("claim", {self.kind: type(self), "unit": Unit}).encode(self)
        return held

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The claim that `to_json` wrote, equal to it."""
        read = Codec("claim", {cls.kind: cls, "unit": Unit}).decode(data)
        if not isinstance(read, cls):
            raise InvalidInput("claim.kind", data, f"must be {cls.kind}")
        return read


_KINDS: dict[str, type[Any]] = {}
C = TypeVar("C", bound=type[Any])


def register(cls: C) -> C:
    """Make a kind of claim known, by its `kind`; for use as a decorator. A name that is taken is
    refused, and so are those of dpfy itself.
    """
    name = check.one_line("claim.kind", getattr(cls, "kind", None))
    own = plugins.own(plugins.CLAIMS).get(name)
    if own is not None and own != f"{cls.__module__}:{cls.__qualname__}":
        raise InvalidInput("claim.kind", name, f"is taken by {own}")
    if _KINDS.setdefault(name, cls) is not cls and _KINDS[name].__qualname__ != cls.__qualname__:
        raise InvalidInput("claim.kind", name, "is taken by another class")
    _KINDS[name] = cls
    return cls


def kind_of(name: str) -> type[Any]:
    """The class of claims called `name`; unknown ones are `Unsupported`."""
    if name not in _KINDS and (found := plugins.find(plugins.CLAIMS, name)) is not None:
        if getattr(found, "kind", None) != name:
            raise Unsupported(f"{found!r} as the kind of release {name!r}", "its kind differs")
        register(found)
    if name not in _KINDS:
        raise Unsupported(
            f"a release of kind {name!r}",
            "install the plug-in that made it (perhaps dpfy-lab), or import what defines it, or use "
            "the version of dpfy that made it",
        )
    return _KINDS[name]


@dataclass(frozen=True)
class Reserved:
    """A claim as its reservation states it: with the kind of its seed, and the entry of the data
    set's ledger where it is charged too.
    """

    claim: Claim
    fixed_seed: bool = False
    shared: tuple[str, str] | None = None

    @property
    def caveats(self) -> tuple[str, ...]:
        """Conditions of the guarantee that follow from how it was reserved."""
        return (*self.claim.caveats, *((PRACTICE,) if self.fixed_seed else ()))

    def due(self, settled: tuple[int, int] | None) -> events.Event:
        """What is charged: all of it, or what was `settled`, as the book of a ledger holds it."""
        return self.claim.event if settled is None else self.claim.stops[settled[1]]

    def to_json(self) -> dict[str, Any]:
        """What stands in the ledger."""
        shared = (
            None if self.shared is None else {"ledger": self.shared[0], "entry": self.shared[1]}
        )
        held = {
            "kind": self.claim.kind,
            "purpose": self.claim.purpose,
            "releases": self.claim.releases,
        }
        held |= {
            "claim": self.claim.to_json(),
            "seed": FIXED if self.fixed_seed else ENTROPY,
            "shared": shared,
        }
        return held | ({"stops": stops} if (stops := self._stops()) else {})

    def _stops(self) -> list[list[Any]]:
        return [
            [made, events.CODEC.encode(event)] for made, event in sorted(self.claim.stops.items())
        ]

    @classmethod
    def from_json(cls, data: Any) -> Reserved:
        """What `to_json` wrote, or what the first version wrote for a training run; anything else
        is `Corrupt`.
        """
        try:
            data = _raised(data)
            check.known_keys(
                "claim", data, ("kind", "purpose", "releases", "claim", "seed", "shared", "stops")
            )
            shared, claim = data["shared"], kind_of(data["kind"]).from_json(data["claim"])
            fixed = check.one_of("claim.seed", data["seed"], (ENTROPY, FIXED)) == FIXED
            read = cls(
                claim,
                fixed,
                None if shared is None else (str(shared["ledger"]), str(shared["entry"])),
            )
            if (read.claim.purpose, read.claim.releases) != (data["purpose"], data["releases"]):
                raise InvalidInput(
                    "claim.purpose",
                    data["purpose"],
                    "is not that of the claim, or the number of releases is not",
                )
            if read._stops() != data.get("stops", []):
                raise InvalidInput("claim.stops", data.get("stops"), "are not those of the claim")
            return read
        except errors.UNREADABLE as problem:
            raise Corrupt("claim", f"cannot be read ({errors.why(problem)})") from None


def _raised(data: Any) -> Any:
    """The first version wrote the parts of a training run's claim side by side."""
    if isinstance(data, dict) and set(data) == {"plan", "seed", "batches", "shared"}:
        steps = data["plan"]["recipe"]["steps"]
        claim = {"plan": data["plan"], "batches": data["batches"]}
        return {"kind": "training", "purpose": "training", "releases": steps, "claim": claim} | {
            "seed": data["seed"],
            "shared": data["shared"],
        }
    return data


def purpose_of(name: str, claim: Mapping[str, Any]) -> str:
    """What a reservation was for: as its claim says, or, in a claim of the first version, by the
    first word of its name.
    """
    said = claim.get("purpose")
    if isinstance(said, str) and said in PURPOSES:
        return said
    word = "".join(c if c.isalpha() else " " for c in name.lower()).split()[:1]
    return word[0] if word and word[0] in PURPOSES else "other"


def releases_of(uses: int, claim: Mapping[str, Any]) -> int:
    """How many releases a reservation allows: as its claim says; else as often as it may be
    used.
    """
    try:
        said = _raised(dict(claim)).get("releases")
    except (AttributeError, KeyError, TypeError):
        return uses
    return max(said, uses) if isinstance(said, int) and not isinstance(said, bool) else uses


def stop_after(stops: Iterable[int], made: int) -> int | None:
    """The number of releases that is charged where `made` are all that there were: the next of
    `stops`; None is all of them.

    Guarantees: never less than was made.
    """
    return min((stop for stop in stops if stop >= made), default=None)


def agree(claims: Sequence[Claim]) -> None:
    """Refuse claims that one report could not state together."""
    if not claims:
        raise InvalidInput(
            "claims",
            [],
            "must be at least one: what is released is reserved before the data is read",
        )
    names = [c.name for c in claims]
    if len(set(names)) < len(names):
        raise InvalidInput("claims", names, "must have different names")
    if (reserved := "noise") in names:
        raise InvalidInput(
            "claims",
            names,
            f"must not be called {reserved!r}: that is the stream of training's own noise",
        )
    first = claims[0]
    for c in claims:
        check.one_of("claim.purpose", c.purpose, PURPOSES)
        check.one_of("claim.boundary", c.boundary, BOUNDARIES)
        check.one_of("claim.trust", c.trust, TRUSTS)
        check.one_line("claim.trusted", c.trusted, 400)
        for what in ("unit", "adjacency", "trust", "trusted", "delta", "accountant"):
            if getattr(c, what) != getattr(first, what):
                rule = (
                    f"must be {getattr(first, what)}, as for {first.name!r}: the claims of one "
                    f"folder have one report"
                )
                raise InvalidInput(f"{c.name} {what}", getattr(c, what), rule)


def differences(stated: Any, due: Any, place: str = "") -> list[str]:
    """Where two JSON values differ: one line a leaf, ``place: stated where due``."""
    return [f"{at or 'it'} is {a} and not {b}" for at, a, b in _apart(stated, due, place)]


def _apart(stated: Any, due: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(stated, dict) and isinstance(due, dict):
        for key in sorted(stated.keys() | due.keys()):
            yield from _apart(stated.get(key), due.get(key), f"{place}.{key}".lstrip("."))
    elif isinstance(stated, list) and isinstance(due, list) and len(stated) == len(due):
        for number, (a, b) in enumerate(zip(stated, due, strict=True)):
            yield from _apart(a, b, f"{place}.{number}")
    elif stated != due or isinstance(stated, bool) != isinstance(due, bool):
        yield place, _short(stated), _short(due)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class GaussianClaim(Claim):
    """One release of a sum with Gaussian noise of `noise_multiplier` times what one unit adds at
    most.
    """

    noise_multiplier: float

    given_as: ClassVar[str] = "noise_multiplier"
    """What the user calls it, in refusals."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check.noise_multiplier(self.given_as, check.positive(self.given_as, self.noise_multiplier))

    @property
    def event(self) -> events.Event:
        """One Gaussian release."""
        return events.Gaussian(self.noise_multiplier)
