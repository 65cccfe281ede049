"""From private records to voters: units go to shards by chance, each shard makes one voter, and
nothing else is kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpfy.core import check
from dpfy.core.errors import InvalidInput
from dpfy.core.randomness import Randomness
from dpfy.core.unit import single_owner
from dpfy.prediction.voters import LinearVoters, checked, class_means, shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dpfy.data.config import DataConfig
    from dpfy.data.dataset import DataSource
    from dpfy.prediction.networks import NetworkTraining, NetworkVoters

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
