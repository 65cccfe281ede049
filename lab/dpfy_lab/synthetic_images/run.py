"""Synthetic images, from what is asked to the run folder: plan, reserve, read, measure, draw, card.
In this order.
"""

from __future__ import annotations

import io
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import dpfy
from dpfy.accounting.filters import least_noise
from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput
from dpfy.core.unit import Adjacency
from dpfy.report import card
from dpfy.runs.folder import RunFolder, complete
from dpfy.runs.run import Progress, Run, quiet
from dpfy.synthetic.run import one_thread
from dpfy_lab.synthetic_images import stages
from dpfy_lab.synthetic_images.claim import FACTS, IMAGES, MEASUREMENTS, SHEET, ImageSynthesis
from dpfy_lab.synthetic_images.encoding import Bytes, Encoding
from dpfy_lab.synthetic_images.mixture import ClusterMixture, fitted, pictures
from dpfy_lab.synthetic_images.releases import ImageReleases
from dpfy_lab.synthetic_images.sheet import sheet
from dpfy_lab.synthetic_images.source import KNOWN, ImageSchema, read
from dpfy_lab.synthetic_images.stages import Pictures

MOST_IMAGES = 1 << 20


@dataclass(frozen=True)
class ImageSettings:
    """What the images may cost. One picture, added or removed, is protected."""

    epsilon: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check.epsilon("epsilon", self.epsilon)
        check.delta("delta", self.delta)


@dataclass(frozen=True)
class ImageOptions:
    """How images are made; none of it changes what they cost.

    `images` is how many to make, by default as many as there seem to be. `clusters` is the number
    of Gaussians of a class, by default as many as the noise allows. `frequencies` along each side
    of a picture are kept; k-means has so many `rounds`.
    """

    images: int | None = None
    clusters: int | None = None
    frequencies: int = 12
    rounds: int = 4

    def __post_init__(self) -> None:
        if self.images is not None:
            check.integer("images", self.images, most=MOST_IMAGES)
        if self.clusters is not None:
            check.integer("clusters", self.clusters, most=64)
        check.integer("frequencies", self.frequencies, least=2, most=32)
        check.integer("rounds", self.rounds, most=20)


IMAGE_DEFAULTS = ImageOptions()


@dataclass(frozen=True)
class ImagePlan:
    """A synthesis of images before any picture is read."""

    schema: ImageSchema
    encoding: Encoding
    claim: ImageSynthesis
    options: ImageOptions


@dataclass(frozen=True)
class SyntheticImages:
    """What a synthesis of images leaves: a run folder with the images, a sheet of some of them,
    what was measured, and the card.
    """

    run: Path
    facts: dict[str, Any]
    card: dict[str, Any]

    @property
    def file(self) -> Path:
        """Arrays x (bytes) and y (labels), as NPZ."""
        return self.run / IMAGES

    @property
    def arrays(self) -> tuple[Bytes, Bytes]:
        """Images (n, height, width) and labels."""
        with np.load(self.file, allow_pickle=False) as held:
            return held["x"], held["y"]

    def to_json(self) -> dict[str, Any]:
        """What was made, and what it costs."""
        stated = self.card["guarantee"]
        return {
            "run": str(self.run),
            "file": str(self.file),
            "sheet": str(self.run / SHEET),
            **self.facts,
            **{key: stated[key] for key in ("epsilon", "delta", "accountant", "adjacency", "unit")},
            "statement": self.card["statement"],
        }


def plan(
    schema: ImageSchema, terms: ImageSettings, options: ImageOptions = IMAGE_DEFAULTS
) -> ImagePlan:
    """The claim of a synthesis of images.

    Guarantees: the claim's event is within (epsilon, delta) by the accountant that the card will
    name. Nothing depends on the pictures.
    """
    encoding = Encoding(schema.height, schema.width, options.frequencies)
    noise = least_noise(terms.epsilon, terms.delta, 0, 0.0, Adjacency.ADD_OR_REMOVE_ONE)
    side = encoding.side
    claim = ImageSynthesis(
        schema.height, schema.width, schema.classes, side, options.rounds, noise, delta=terms.delta
    )
    return ImagePlan(schema, encoding, claim, options)


def synthesize_images(
    data: Any,
    *,
    terms: ImageSettings,
    run: Run | str | Path,
    schema: ImageSchema | None = None,
    options: ImageOptions = IMAGE_DEFAULTS,
    data_dir: Path | str | None = None,
    progress: Progress = quiet,
) -> SyntheticImages:
    """Synthetic images with labels, made from private ones, in a run folder that anyone can verify.

    `data` is an NPZ file with arrays x and y, a pair of arrays, or a data set by name (mnist,
    fashion-mnist, embedded, digits; `data_dir` is where the first two lie); `schema` says how large
    the pictures are and how many classes there are, for data without a name.

    Guarantees: everything that can be refused for a public reason is, and the price is computed and
    reserved, before `data` is opened. A synthesis that is refused spends nothing and leaves no
    folder. A process killed at any moment goes on to the same bits.
    """
    progress("planning", 0.0)
    made = plan(_schema(data, schema), terms, options)
    place = Run.of(run)
    if complete(place, made.claim):
        return finished(Path(place.path))
    with RunFolder(place, made.claim) as folder, one_thread():
        progress("reading", 0.0)
        held = read(data, made.schema, data_dir)
        folder.bind("pictures", held.pixels.tobytes() + held.labels.tobytes())
        name = made.claim.name
        meter = ImageReleases(made.claim, folder.begin(name), folder.randomness, folder.bind)
        mixture = measured(meter, held, made, progress)
        progress("drawing", 1.0)
        images, labels = drawn(mixture, made, folder.randomness.generator("synthetic pictures", 0))
        facts = _facts(meter, mixture, labels, made)
        folder.write(IMAGES, _packed(images, labels))
        folder.write(SHEET, sheet(images, labels, made.schema.classes))
        folder.write(MEASUREMENTS, _kept(meter))
        folder.write(FACTS, json.dumps(facts, indent=1).encode())
        folder.tell(
            name,
            **{
                key: facts[key]
                for key in ("images", "clusters_of_a_class", "axes", "records_estimated")
            },
            sheet=SHEET,
        )
        seed = card.FIXED_SEED if folder.randomness.fixed else card.SECRET_SEED
        about = {"dpfy": dpfy.__version__, "python": platform.python_version(), "seed": seed}
        folder.finish(card.Facts(about, releases=made.claim.releases))
    return finished(Path(place.path))


def finished(path: Path) -> SyntheticImages:
    """A finished synthesis of images."""
    facts = storage.parsed_json(FACTS, storage.content(FACTS, path / FACTS))
    return SyntheticImages(
        path, facts, storage.parsed_json(card.NAME, storage.content(card.NAME, path / card.NAME))
    )


def measured(
    meter: ImageReleases, data: Pictures, made: ImagePlan, progress: Progress = quiet
) -> ClusterMixture:
    """All stages, one after the other: each asks about the pictures through the meter alone."""
    labels, vectors = data.labels, made.encoding.vectors(data.pixels)
    progress("levels", 0.0)
    known = stages.levels(meter, data, vectors, made.encoding)
    points = stages.bounded(vectors / known.radius)
    progress("moments", 1 - float(meter.left / meter.whole))
    seen = stages.directions(meter, points, labels, known)
    inner = stages.bounded(((points - seen.means[labels]) @ seen.axes) / seen.reach)
    clusters = made.options.clusters or stages.clusters_for(
        float(known.counts.sum()),
        made.schema.classes,
        seen.axes.shape[1],
        made.claim.noise_multiplier,
    )
    progress("k-means", 1 - float(meter.left / meter.whole))
    held = stages.centres(meter, inner, labels, seen, clusters)
    progress("clusters", 1 - float(meter.left / meter.whole))
    return fitted(known, seen, held, stages.moments(meter, inner, labels, held))


def drawn(
    mixture: ClusterMixture, made: ImagePlan, rng: np.random.Generator
) -> tuple[Bytes, Bytes]:
    """Images and labels: classes as often as they were counted, with noise."""
    counts = mixture.weights.sum(axis=1)
    total = made.options.images or int(np.clip(round(float(counts.sum())), 1, MOST_IMAGES))
    labels = rng.choice(made.schema.classes, total, p=counts / counts.sum())
    kind = np.uint8 if made.schema.classes <= 256 else np.uint16
    return pictures(mixture, made.encoding, labels, rng), labels.astype(kind)


def _schema(data: Any, schema: ImageSchema | None) -> ImageSchema:
    known = KNOWN.get(data) if isinstance(data, str) else None
    if schema is None and known is None:
        raise InvalidInput(
            "schema",
            None,
            "must say how large the pictures are and how many classes there are: ImageSchema(28, "
            "28, 10)",
        )
    if known is not None and schema not in (None, known):
        raise InvalidInput(
            "schema", f"{schema}", f"must be that of {data}, {known}, or be left out"
        )
    found = schema or known
    assert found is not None
    return found


def _packed(images: Bytes, labels: Bytes) -> bytes:
    whole = io.BytesIO()
    np.savez_compressed(whole, x=images, y=labels)
    return whole.getvalue()


def _kept(meter: ImageReleases) -> bytes:
    """What was measured, for whoever wants to fit another model to it."""
    from safetensors.numpy import save

    held = {name: np.ascontiguousarray(noisy.values) for name, noisy in meter.released.items()}
    return save(
        held,
        {
            "deviations": json.dumps(
                {name: noisy.deviation for name, noisy in meter.released.items()}
            )
        },
    )


def _facts(
    meter: ImageReleases, mixture: ClusterMixture, labels: Bytes, made: ImagePlan
) -> dict[str, Any]:
    """What may be published about the synthesis: all of it follows from what was released."""
    return {
        "images": len(labels),
        "size": [made.schema.height, made.schema.width],
        "classes": made.schema.classes,
        "images_of_class": np.bincount(labels, minlength=made.schema.classes).tolist(),
        "records_estimated": round(float(meter.released["classes"].values.sum()), 1),
        "clusters_of_a_class": mixture.clusters,
        "axes": int(mixture.axes.shape[1]),
        "deviations": {name: noisy.deviation for name, noisy in meter.released.items()},
    }
