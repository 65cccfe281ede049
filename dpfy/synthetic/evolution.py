"""Private evolution, from what is asked to the run folder: reserve, read, vote, vary, report.

What leaves the machine are samples of the public generator. The private records decide which, by
votes with noise, and nothing else.
"""

from __future__ import annotations

import io
import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

import dpfy
from dpfy.accounting.filters import least_noise, noise_of, squares
from dpfy.core import check, events, storage
from dpfy.core.claim import STATED, YES, Assumption, Claim, register
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import EXAMPLE, Adjacency
from dpfy.core.values import Bound, Bounded, Permit
from dpfy.report import card
from dpfy.runs.dataset import Dataset
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.released import Released
from dpfy.runs.run import Progress, Run, quiet
from dpfy.synthetic.releases import PartOfGaussian, no_binding

Array = NDArray[np.float64]
Samples = NDArray[Any]
Whole = NDArray[np.int64]
Embed = Callable[[Samples], Any]

SAMPLES, FACTS = "samples.npz", "evolution.json"
FINE = 1 << 14
"""Bounded vectors are whole multiples of 1 / FINE: products of two have 28 bits after the point, so
that float64 adds 2^25 of them without an error.
"""
WIDE = 4.0
"""Embeddings keep this many times the length of the longest one of the first samples."""
CHUNK = 1 << 12
"""Records that vote at a time."""
HEARD = 2.0
"""Votes below this many standard deviations of the noise are not heard."""


@register
@dataclass(frozen=True)
class Evolution(Claim):
    """Noisy votes of private records for samples of a public generator, in `rounds` rounds, over
    `size` samples of each of `classes`.

    `noise_multiplier` is that of the one Gaussian release to which all rounds together amount.
    """

    classes: int
    size: int
    rounds: int
    noise_multiplier: float

    kind: ClassVar[str] = "evolution"
    purpose: ClassVar[str] = "synthesis"
    artefacts: ClassVar[tuple[str, ...]] = (SAMPLES, FACTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.integer("classes", self.classes, most=1000)
        check.integer("size", self.size, least=2, most=1 << 14)
        check.integer("rounds", self.rounds, most=100)
        check.noise_multiplier(
            "noise_multiplier", check.positive("noise_multiplier", self.noise_multiplier)
        )
        if self.adjacency is not Adjacency.ADD_OR_REMOVE_ONE or self.unit != EXAMPLE:
            raise InvalidInput(
                "adjacency", str(self.adjacency), "must be that one record is added or removed"
            )

    @property
    def releases(self) -> int:
        """One for each round."""
        return self.rounds

    @property
    def event(self) -> events.Event:
        """The whole charge: one Gaussian release."""
        return events.Gaussian(self.noise_multiplier)

    def assumptions(self, facts: Mapping[str, Any]) -> list[Assumption]:
        """A record votes once a round; the generator has not seen the records."""
        return [
            Assumption(
                "votes",
                "one record adds one vote to every round",
                "it voted for the nearest sample of its class",
                YES,
            ),
            Assumption(
                "generator",
                "generator and embedding are public, and look at each sample by itself",
                "the caller says so; of the embedding it was tried on public samples",
                STATED,
            ),
            Assumption(
                "arithmetic",
                "counts and noise are exact",
                "votes are whole numbers, noise is drawn on a grid",
                YES,
            ),
        ]

    def describe(self) -> dict[str, Any]:
        """What is made, from what."""
        return {
            "title": "Private evolution",
            "words": "A public generator made samples. Private records voted for those nearest to "
            "them; the counts were released with "
            "noise, and the generator varied the samples that had votes.",
            "classes": self.classes,
            "samples_of_a_class": self.size,
            "rounds": self.rounds,
            "noise_multiplier": self.noise_multiplier,
        }


class PublicGenerator(Protocol):
    """What makes samples and has never seen the private records. All its randomness comes from
    `rng`.
    """

    def random(self, count: int, label: int, rng: np.random.Generator) -> Samples:
        """So many samples of a class, one along the first axis each."""

    def vary(self, samples: Samples, label: int, rng: np.random.Generator) -> Samples:
        """A variation of each of these samples."""


@dataclass(frozen=True, repr=False)
class EvolutionResult(Released):
    """What an evolution leaves: a finished run with the samples."""

    facts: dict[str, Any] = field(repr=False)

    @property
    def arrays(self) -> tuple[Samples, Whole]:
        """Samples and their classes."""
        with np.load(self.run / SAMPLES, allow_pickle=False) as held:
            return held["x"], held["y"]

    def _told(self) -> dict[str, Any]:
        return {"samples": self.facts["samples"], "rounds": self.facts["rounds"]}


def flat(samples: Samples) -> Any:
    """The embedding of those who give none: the numbers themselves."""
    return np.asarray(samples).reshape(len(samples), -1)


def evolve(
    records: Any,
    generator: PublicGenerator,
    *,
    epsilon: float,
    delta: float | None = None,
    classes: int = 1,
    size: int = 100,
    rounds: int = 5,
    embed: Embed = flat,
    run: Run | str | Path | None = None,
    progress: Progress = quiet,
) -> EvolutionResult:
    """Samples of a public generator that are like private records, in a run folder that anyone can
    verify.

    Args:
        records: A pair (records, labels), or a function that gives one and is called when the price
            is reserved; or a `dpfy.Dataset` of either.
        generator: Makes samples, and has never seen the records.
        epsilon, delta: What the evolution costs.
        classes, size, rounds: The classes that records have, the samples of each, and the rounds of
            votes.
        embed: Makes vectors of records and of samples, each by itself; nearness is measured between
            them.
        run: The run folder, a `dpfy.Run`, or None for a new folder under runs/.
        progress: Told what is being done.

    Returns:
        The result: `arrays`, the samples and their classes.

    Raises:
        InvalidInput: A value does not fit its rule, or the generator makes no arrays.
        BudgetExceeded: The budget of the data set does not cover it.

    Guarantees: the price is computed and reserved before `records` is called; a record adds one
    vote to each round; what is published are samples of the generator, chosen by noisy votes. A
    killed run goes on to the same samples if the generator draws from its `rng` alone.

    Example:
        >>> import numpy as np
        >>> import dpfy
        >>> class Dots:
        ...     def random(self, count, label, rng):
        ...         return rng.uniform(-5, 5, (count, 2))
        ...     def vary(self, samples, label, rng):
        ...         return samples + rng.normal(0, 0.4, samples.shape)
        >>> records = (np.full((200, 2), 3.0), np.zeros(200, dtype=int))
        >>> made = dpfy.evolve(records, Dots(), epsilon=2.0, delta=1e-5, size=20, rounds=2)
        >>> made.arrays[0].shape
        (20, 2)
    """
    given = Dataset.of(records)
    chosen = given.rule(delta)
    Evolution(classes, size, rounds, 1.0)
    check.epsilon("epsilon", epsilon)
    noise = least_noise(
        epsilon, check.delta("delta", chosen.value), 0, 0.0, Adjacency.ADD_OR_REMOVE_ONE
    )
    claim = Evolution(classes, size, rounds, noise, delta=chosen.value)
    place = given.run(run)
    if complete(place, claim):
        return finished(Path(place.path))
    progress("reading")
    with RunFolder(place, claim) as folder:
        held, labels = _read(given.source, classes)
        first = SamplePopulation.first(claim, generator, embed, folder.randomness)
        voters = first.vectors(held)
        folder.bind("records", voters.tobytes() + labels.tobytes())
        last, votes = evolved(
            first, voters, labels, folder.begin(claim.name), folder.randomness, folder.bind
        )
        facts = {
            "samples": claim.classes * claim.size,
            "rounds": claim.rounds,
            "votes": [row.tolist() for row in votes.round(3)],
        }
        folder.write(SAMPLES, last.packed())
        folder.write(FACTS, json.dumps(facts, indent=1).encode())
        folder.tell(claim.name, samples=facts["samples"], delta_from=chosen.origin)
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=claim.releases))
    return finished(Path(place.path))


def finished(path: Path | str) -> EvolutionResult:
    """A finished evolution."""
    path = Path(path)
    facts = storage.parsed_json(FACTS, storage.content(FACTS, path / FACTS))
    return EvolutionResult.read(path, facts=facts)


@dataclass(frozen=True)
class SamplePopulation:
    """The samples of every class, all of one size, and how they become vectors. Public, or
    released.
    """

    claim: Evolution
    generator: PublicGenerator
    embed: Embed
    samples: tuple[Samples, ...]
    reach: float

    @classmethod
    def first(
        cls, claim: Evolution, generator: PublicGenerator, embed: Embed, randomness: Randomness
    ) -> SamplePopulation:
        """Random samples; refuses an embedding that does not look at each of them by itself."""
        drawn = []
        for label in range(claim.classes):
            held = np.asarray(
                generator.random(
                    claim.size, label, randomness.generator(f"evolution class {label}", 0)
                )
            )
            drawn.append(_checked(held, claim.size))
        vectors = np.concatenate([_vectors(embed, held) for held in drawn])
        alone = _vectors(embed, drawn[0][:1])
        length = float(np.sqrt(np.square(vectors).sum(axis=1)).max())
        if not math.isfinite(length):
            raise InvalidInput("embed", length, "must give finite numbers for public samples")
        if not np.allclose(alone[0], vectors[0], rtol=1e-3, atol=1e-6 * length):
            raise InvalidInput(
                "embed", "another vector beside other samples", "must look at each sample by itself"
            )
        return cls(claim, generator, embed, tuple(drawn), WIDE * max(length, 1e-12))

    def vectors(self, held: Samples) -> Array:
        """Embedded, shortened and rounded, so that who is nearest is decided exactly."""
        return bounded(_vectors(self.embed, held) / self.reach) if len(held) else np.zeros((0, 1))

    def next(self, votes: Array, randomness: Randomness, number: int) -> SamplePopulation:
        """Half of the places for samples drawn by their votes, the other half for variations of
        these.
        """
        made = []
        for label, held in enumerate(self.samples):
            rng = randomness.generator(f"evolution class {label}", number + 1)
            parents = held[resample(votes[label], self.claim.size, rng)]
            if number + 1 < self.claim.rounds:
                half = self.claim.size // 2
                varied = np.asarray(self.generator.vary(parents[half:], label, rng))
                parents = np.concatenate([parents[:half], _checked(varied, self.claim.size - half)])
            made.append(parents)
        return SamplePopulation(self.claim, self.generator, self.embed, tuple(made), self.reach)

    def packed(self) -> bytes:
        """Samples and classes as NPZ."""
        whole = io.BytesIO()
        labels = np.repeat(np.arange(self.claim.classes), self.claim.size)
        np.savez_compressed(whole, x=np.concatenate(self.samples), y=labels)
        return whole.getvalue()


def fine(values: Any) -> Array:
    """Rounded to whole multiples of 1 / FINE."""
    return np.rint(np.asarray(values, np.float64) * FINE) / FINE


def bounded(vectors: Array) -> Array:
    """Vectors with a length of at most one, in whole multiples of 1 / FINE.

    Guarantees: no row is longer than 1 and half a step of rounding in each number; a row with
    anything but finite numbers is zero; each row is made of itself alone.
    """
    with np.errstate(all="ignore"):
        held = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, 0.0)
        lengths = np.sqrt(np.square(held).sum(axis=1, keepdims=True))
        return fine(np.where(np.isfinite(lengths), held / np.maximum(lengths, 1.0), 0.0))


def nearest(points: Array, labels: Whole, places: Array) -> Whole:
    """The place of each point among those of its class, exactly: on ties the first."""
    found = np.zeros(len(points), np.int64)
    for label in range(len(places)):
        mine = labels == label
        apart = np.square(places[label]).sum(axis=1) - 2 * (points[mine] @ places[label].T)
        found[mine] = apart.argmin(axis=1)
    return found


def count_votes(voters: Array, labels: Whole, places: Array) -> Whole:
    """How many records have each sample for their nearest among those of their class."""
    classes, size = places.shape[:2]
    counts = np.zeros(classes * size, np.int64)
    for start in range(0, len(voters), CHUNK):
        part, mine = voters[start : start + CHUNK], labels[start : start + CHUNK]
        counts += np.bincount(mine * size + nearest(part, mine, places), minlength=classes * size)
    return counts


def noise_of_round(claim: Evolution) -> float:
    """The noise of one round, of which all together amount to that of the claim."""
    return noise_of(squares(claim.noise_multiplier) / Fraction(claim.rounds))


def threshold_votes(found: Array, noise: float, counts: Whole) -> Array:
    """Noisy votes, without those that the noise drowns; of the counts themselves nothing is
    used.
    """
    return np.where(np.asarray(found) > HEARD * noise, found, 0.0)


def evolved(
    population: SamplePopulation,
    voters: Array,
    labels: Whole,
    permit: Permit,
    randomness: Randomness,
    bind: Callable[[str, bytes], None] = no_binding,
) -> tuple[SamplePopulation, Array]:
    """All rounds: votes with noise, then the next samples. The last votes choose among what is
    there.

    Guarantees: a record adds one to one count of a round, whatever it is; all rounds together are
    within the claim.
    """
    claim = population.claim
    noise = noise_of_round(claim)
    votes = np.zeros((claim.classes, claim.size))
    for number in range(claim.rounds):
        places = np.stack([population.vectors(held) for held in population.samples])
        counts = count_votes(voters, labels, places)
        bind(f"{claim.name} {number}", counts.tobytes())
        mechanism = PartOfGaussian(noise, whole=claim.event)
        found = mechanism.release(
            Bounded(counts, Bound.scalar(1.0)), permit, randomness, number
        ).value
        votes = threshold_votes(found, noise, counts).reshape(claim.classes, claim.size)
        population = population.next(votes, randomness, number)
    return population, votes


def resample(votes: Array, count: int, rng: np.random.Generator) -> Whole:
    """So many places, in proportion to votes, as evenly as can be; all alike where nothing was
    heard.
    """
    weights = votes if votes.sum() > 0 else np.ones(len(votes))
    marks = (np.arange(count) + rng.random()) / count
    found: Whole = np.minimum(
        np.searchsorted(weights.cumsum() / weights.sum(), marks), len(votes) - 1
    )
    return rng.permutation(found)


def _vectors(embed: Embed, held: Samples) -> Array:
    found = np.asarray(embed(held), np.float64)
    if found.ndim != 2 or len(found) != len(held):
        raise InvalidInput(
            "embed", f"an array of shape {found.shape}", "must give one vector for each sample"
        )
    return found


def _checked(held: Samples, count: int) -> Samples:
    if held.dtype.kind not in "biufU" or len(held) != count:
        rule = f"must give an array of numbers or words with {count} samples along its first axis"
        raise InvalidInput("generator", f"{held.dtype} of shape {held.shape}", rule)
    return held


def _read(records: Any, classes: int) -> tuple[Samples, Whole]:
    given = records() if callable(records) else records
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InvalidInput("records", type(given).__name__, "must be (records, labels)")
    held, labels = (np.asarray(part) for part in given)
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or len(labels) != len(held):
        raise InvalidInput(
            "labels",
            f"{labels.dtype} of shape {labels.shape}",
            "must be one whole number for each record",
        )
    if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise InvalidInput(
            "labels", "labels", f"must lie from 0 to {classes - 1}: there are {classes} classes"
        )
    return held, labels.astype(np.int64)
