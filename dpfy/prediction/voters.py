"""Voters: many small models, each made from the units of one shard. Here the kinds that need no
training: class means, and their files.

From private records to voters: units go to shards by chance, each shard makes one voter, and
nothing else is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpfy.core import check, storage
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.core.unit import single_owner
from dpfy.mechanisms.exact import Bits
from dpfy.prediction.rules import Ask, moved

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpfy.data.config import DataConfig
    from dpfy.data.dataset import DataSource
    from dpfy.prediction.networks import NetworkTraining, NetworkVoters

FILE, NETWORKS, ABOUT = "voters.npy", "voters.safetensors", "voters.json"
NUMBERS = "numbers.safetensors"
"""Of a folder of voters: linear ones, networks, or of numbers; and what is said about them."""
AT_ONCE = 1 << 24
"""Scores that are computed at a time."""
NEVER = np.float32(-1e30)
"""The score of a class that a voter knows no record of."""
PERSON = b"dpfy shard"


def shards(
    units: int, voters: int, randomness: Randomness, owners: Any = None
) -> NDArray[np.int64]:
    """Which voter each record belongs to.

    Without `owners` every record is a unit and tosses its own coin; with them (names or numbers,
    one a record) the voter is a keyed hash of the owner, so that all records of an owner go to one
    voter.

    Guarantees: where a unit goes depends on the unit, its place and the secret alone: adding or
    removing another one moves nobody else.
    """
    check.integer("voters", voters, least=2, most=1 << 24)
    if (
        owners is None
    ):  # 128 bits each, so that nobody's draw depends on how many others there are: even to 2^-100
        high, low = Bits(randomness, "shards", 0).words(2 * units).reshape(-1, 2).T % np.uint64(
            voters
        )
        return ((high * np.uint64((1 << 64) % voters) + low) % np.uint64(voters)).astype(np.int64)
    names = np.asarray(owners).ravel()
    if len(names) != units:
        raise InvalidInput(
            "owners", f"{len(names)} owners", f"must be one for each of {units} records"
        )
    known, places = np.unique(names, return_inverse=True)
    key = randomness.key("shards", 0, 32)
    hashes = [
        hashlib.blake2b(str(name).encode(), key=key, digest_size=16, person=PERSON).digest()
        for name in known.tolist()
    ]
    drawn = np.array([int.from_bytes(h, "big") % voters for h in hashes], dtype=np.int64)
    return drawn[places.ravel()]


@dataclass(frozen=True, eq=False)
class LinearVoters:
    """Voters whose scores are linear in the question: `weights` are [features, voters, classes],
    `biases` [voters, classes].
    """

    weights: NDArray[np.float32]
    biases: NDArray[np.float32]

    def __post_init__(self) -> None:
        if (
            self.weights.ndim != 3
            or self.weights.shape[1:] != self.biases.shape
            or self.weights.dtype != np.float32
        ):
            raise InvalidInput(
                "voters",
                f"weights of shape {self.weights.shape}",
                "must be float32, [features, voters, classes]",
            )

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.weights.shape[1])

    @property
    def classes(self) -> int:
        """How many answers there are."""
        return int(self.weights.shape[2])

    @property
    def features(self) -> int:
        """How many numbers a question has."""
        return int(self.weights.shape[0])

    def asked(self, questions: NDArray[np.float32]) -> list[Ask]:
        """See `predictor.Voters`."""
        return fixed(self.votes(questions))

    def votes(self, questions: NDArray[np.float32]) -> NDArray[np.int64]:
        """How many voters say each class, question by question. Guarantees: a row depends on that
        question alone.
        """
        flat = self.weights.reshape(self.features, -1)
        found = [np.empty((0, self.classes), np.int64)]
        step = max(1, AT_ONCE // flat.shape[1])
        for start in range(0, len(questions), step):
            part = questions[start : start + step]
            scores = (part @ flat).reshape(len(part), self.count, self.classes) + self.biases
            found.append(tally(scores.argmax(axis=2), self.classes))
        return np.concatenate(found)

    def fingerprint(self) -> bytes:
        """See `predictor.Voters`."""
        whole = hashlib.blake2b(str(self.weights.shape).encode())
        for part in (self.weights, self.biases):
            whole.update(part.tobytes())
        return whole.digest()

    def save(self, folder: Path, **about: Any) -> None:
        """Put them into a folder, readable by their owner alone: they are as private as the data
        they were made from.
        """
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        packed = np.concatenate([self.weights, self.biases[None]])
        handle = _bytes(packed)
        write_atomically(folder / FILE, handle, mode=PRIVATE_MODE)
        write_atomically(
            folder / ABOUT,
            json.dumps(about | {"sha256": hashlib.sha256(handle).hexdigest()}).encode(),
            mode=PRIVATE_MODE,
        )

    @classmethod
    def load(cls, folder: Path) -> tuple[LinearVoters, dict[str, Any]]:
        """The voters that `save` wrote, and what was said about them."""
        about = storage.parsed_json(ABOUT, storage.content("voters", folder / ABOUT, name=ABOUT))
        content = storage.content("voters", folder / FILE, most=storage.MOST_DATA, name=FILE)
        if not isinstance(about, dict) or hashlib.sha256(content).hexdigest() != about.get(
            "sha256"
        ):
            raise Corrupt(FILE, f"is not what {ABOUT} was written for")
        packed = _array(content)
        return cls(np.ascontiguousarray(packed[:-1]), np.ascontiguousarray(packed[-1])), about


def load_voters(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The voters in a folder, of whichever kind, and what was said about them."""
    if (folder / NUMBERS).is_file():
        from dpfy.prediction.regression import NumberVoters

        return NumberVoters.load(folder)
    if (folder / NETWORKS).is_file():
        from dpfy.prediction.networks import NetworkVoters

        return NetworkVoters.load(folder)
    return LinearVoters.load(folder)


def class_means(
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    places: NDArray[np.int64],
    voters: int,
    classes: int,
    shrink: float = 1.0,
) -> LinearVoters:
    """Each voter says the class whose mean over its own records, drawn to 0 by `shrink` records
    there, is nearest: linear scores.

    Guarantees: the scores of a voter depend on the records at its own place alone. A class that it
    knows no record of is never said, if it knows any; a voter without records says class 0.
    """
    check.nonnegative("shrink", shrink)
    cell = places * classes + y
    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell, minlength=voters * classes)
    sums = np.zeros((voters * classes, x.shape[1]), np.float64)
    ends = np.cumsum(counts)
    held = np.flatnonzero(counts)
    if len(held):
        starts = (ends - counts)[held]
        sums[held] = np.add.reduceat(x[order].astype(np.float64), starts, axis=0)
    means = (sums / np.maximum(counts + shrink, 1e-9)[:, None]).astype(np.float32)
    biases = np.where(counts > 0, -(means.astype(np.float64) ** 2).sum(axis=1) / 2, NEVER).astype(
        np.float32
    )
    shaped = np.ascontiguousarray(means.reshape(voters, classes, -1).transpose(2, 0, 1))
    return LinearVoters(shaped, biases.reshape(voters, classes))


def ridge(
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    places: NDArray[np.int64],
    voters: int,
    classes: int,
    strength: float = 1.0,
) -> LinearVoters:
    """Each voter is a ridge regression of its own records onto their classes, with a constant;
    `strength` draws its weights to 0.

    Guarantees: the scores of a voter depend on the records at its own place alone; a voter without
    records says class 0.
    """
    check.positive("strength", strength)
    weights = np.zeros((x.shape[1], voters, classes), np.float32)
    biases = np.zeros((voters, classes), np.float32)
    order = np.argsort(places, kind="stable")
    ends = np.cumsum(np.bincount(places, minlength=voters))
    for voter, own in enumerate(np.split(order, ends[:-1])):
        found = ridge_weights(x[own], np.eye(classes)[y[own]] - 1 / classes, strength)
        weights[:, voter], biases[voter] = found[:-1], found[-1]
    return LinearVoters(weights, biases)


def ridge_weights(
    rows: NDArray[Any], targets: NDArray[np.float64], strength: float
) -> NDArray[np.float64]:
    """The weights of a ridge regression, those of the constant last."""
    wide = np.hstack([rows.astype(np.float64), np.ones((len(rows), 1))])
    if len(wide) <= wide.shape[1]:
        alike = wide @ wide.T + strength * np.eye(len(wide))
        return np.asarray(wide.T @ np.linalg.solve(alike, targets))
    alike = wide.T @ wide + strength * np.eye(wide.shape[1])
    return np.asarray(np.linalg.solve(alike, wide.T @ targets))


def checked(x: Any, y: Any, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Records of any one shape as float32, and their classes; what is no such table is refused."""
    table, labels = np.ascontiguousarray(np.asarray(x, dtype=np.float32)), np.asarray(y)
    if labels.shape != (len(table),) or labels.dtype.kind not in "iu":
        raise InvalidInput(
            "y",
            f"{labels.dtype} of shape {labels.shape}",
            "must be one class (a whole number) for each row",
        )
    check.integer("classes", classes, least=2)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise InvalidInput(
            "y",
            "a class outside of the public ones",
            f"must be a whole number from 0 to {classes - 1}",
        )
    # No cell of a private record raises an error: what is no finite number counts as 0.
    table = np.nan_to_num(table, nan=0.0, posinf=0.0, neginf=0.0)
    return table, labels.astype(np.int64)


def fixed(counts: NDArray[np.int64]) -> list[Ask]:
    """Votes that do not depend on the bits of a release, row by row."""
    return [lambda bits, row=row: moved(row) for row in counts]  # type: ignore[misc]


def tally(said: NDArray[np.int64], classes: int) -> NDArray[np.int64]:
    """How many voters say each class: from [questions, voters] to [questions, classes]."""
    cell = said + classes * np.arange(len(said))[:, None]
    return np.bincount(cell.ravel(), minlength=len(said) * classes).reshape(len(said), classes)


def _bytes(array: NDArray[np.float32]) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def _array(content: bytes) -> NDArray[np.float32]:
    import io

    try:
        found = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError:
        raise Corrupt(FILE, "does not hold an array") from None
    if found.ndim != 3 or found.dtype != np.float32 or len(found) < 2:
        raise Corrupt(FILE, f"holds an array of {found.dtype} of shape {found.shape}")
    return np.asarray(found)


MEANS, NETWORK_MODELS = "class-means", ("lenet5", "tanh-cnn", "mlp", "linear")
"""What voters may be."""

MOST_NUMBERS = 1 << 26
"""Numbers that all voters hold together: half a gigabyte while they are made."""


def teach(
    x: Any,
    y: Any,
    *,
    voters: int,
    classes: int,
    owners: Any = None,
    shrink: float = 1.0,
    randomness: Randomness | None = None,
) -> LinearVoters:
    """Voters that know class means: `x` are rows of numbers made by public rules, `y` their
    classes, `owners` whose each row is.

    Guarantees: every unit (a row, or an owner with all of its rows) is known to one voter alone.
    What comes out is as private as the records.
    """
    table, labels = checked(x, y, classes)
    table = table.reshape(len(table), -1)
    if check.integer("voters", voters) > (
        most := max(1, MOST_NUMBERS // max(1, table.shape[1] * classes))
    ):
        raise InvalidInput(
            "voters",
            voters,
            f"must be at most {most} with {table.shape[1]} features and {classes} classes",
        )
    secret = Randomness.from_os() if randomness is None else randomness
    places = shards(len(table), voters, secret, owners)
    return class_means(table, labels, places, voters, classes, shrink)


def settings(
    data: str,
    schema: str | None = None,
    classes: int | None = None,
    folder: str | None = None,
    person: str | None = None,
    at_most: int | None = None,
) -> DataConfig:
    """What `data` names: a known data set, or a file by its ending; and the column of the person
    that a row belongs to.
    """
    from dpfy.data.config import KNOWN, DataConfig, kind_of

    single_owner("teaching", person)
    if data in KNOWN:
        held = DataConfig(kind=data, user=person, most_records=at_most)
        return held if folder is None else replace(held, dir=folder)
    if (kind := kind_of(data)) is None:
        raise InvalidInput(
            "data", data, f"must be one of {', '.join(KNOWN)}, or a file .csv, .parquet or .npz"
        )
    return DataConfig(
        kind=kind, path=data, schema=schema, classes=classes, user=person, most_records=at_most
    )


def owners_of(held: DataSource) -> Any:
    """Whose each training record is, by name: a number would change when another user leaves. None
    where nobody said it.
    """
    if held.owned is None:
        return None
    names, which = held.owned.users_of(len(held.train))
    return names[which]


def taught(
    config: DataConfig, voters: int, shrink: float, training: NetworkTraining | None = None
) -> tuple[LinearVoters | NetworkVoters, dict[str, Any]]:
    """Voters from the training records of a source, and what is public about them: names of the
    classes, words for the data, the unit of privacy.

    With `training` they are networks; else they know class means.

    Guarantees: where users are the unit, all records of one user are known to one voter alone.
    """
    from dpfy.data import source
    from dpfy.tables.schema import training_schema

    single_owner("teaching", config.user)
    held = source.load(config, every_row=False)
    if held.classes is None:
        raise InvalidInput(
            "data", config.kind, "must be records with classes, which voters can say"
        )
    x, y = (part.numpy() for part in held.train.tensors[:2])
    owners = owners_of(held)
    found: LinearVoters | NetworkVoters
    if training is None:
        found = teach(x, y, voters=voters, classes=held.classes, owners=owners, shrink=shrink)
    else:
        from dpfy.prediction.networks import teach_networks

        found = teach_networks(
            x, y, voters=voters, classes=held.classes, training=training, owners=owners
        )
    named = "adult" if config.kind == "adult" else config.schema
    labels = (
        list(training_schema(named).label.classes)
        if named is not None
        else [str(k) for k in range(held.classes)]
    )
    about = {"labels": labels, "data": held.description}
    return found, about | ({} if config.user is None else {"most_records": config.most_records})


def network_training(model: str, given: Mapping[str, Any]) -> NetworkTraining | None:
    """What the command line says about networks; None for class means, which take no such settings.
    `given` are those that were given.
    """
    if model == MEANS:
        if given:
            first = next(iter(given))
            raise InvalidInput(
                first, given[first], f"goes with a network (--model), not with {MEANS}"
            )
        return None
    from dpfy.models.config import ModelConfig
    from dpfy.prediction.networks import NetworkTraining

    check.one_of("--model", model, (MEANS, *NETWORK_MODELS))
    return NetworkTraining(ModelConfig(model), **given)
