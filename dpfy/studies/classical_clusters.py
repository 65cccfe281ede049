"""Clusters: DP-Lloyd from public seeds against a grid (synopsis), both together, and a private coreset, by dimensions and epsilon."""

from __future__ import annotations

import functools
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy.studies.classical_part import Part
from dpfy.studies.page import Section, Table
from dpfy.studies.study import Cell, Options, Results, Stored

Floats = NDArray[np.float64]
DIMENSIONS, CLUSTERS, EPSILONS, DELTA = (2, 3, 5, 10), 5, (0.1, 0.5, 1.0), 1e-6
TITLES = {
    "images": "Clusters: principal components of MNIST",
    "stretched": "Clusters: principal components of MNIST, each stretched to its own range",
    "overlapping": "Clusters: made up, overlapping",
    "far-apart": "Clusters: made up, far apart",
}
SPREAD = {"overlapping": 0.3, "far-apart": 0.12}
"""The deviation of a made-up cluster in each coordinate; centres lie in a cube of side 1.6."""
METHODS: dict[str, dict[str, Any]] = {"lloyd": {"rounds": 5}, "synopsis": {}, "hybrid": {}, "coreset": {}}
SEEDED, HUGE = "lloyd, hardly any noise", 1e4
"""DP-Lloyd from the same public seeds at a huge epsilon: what is lost by seeds and by few rounds alone."""
PUBLIC = 10_000
"""Images that give the components and their range; no point is one of them."""


def made_up(kind: str, dimensions: int, records: int, seed: int) -> Floats:
    """Round clusters in a cube."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-0.8, 0.8, (CLUSTERS, dimensions))
    return np.clip(centres[rng.integers(CLUSTERS, size=records)] + rng.normal(0, SPREAD[kind], (records, dimensions)), -1, 1)


@functools.lru_cache(maxsize=1)
def components(data_dir: str | None) -> tuple[Floats, Floats]:
    """Images in the ten first components of others, and the largest coordinate of those in each."""
    from sklearn.decomposition import PCA

    images = load(DataConfig(kind="mnist"), data_dir=data_dir).train.tensors[0].numpy()
    rows = images.reshape(len(images), -1)
    found = PCA(max(DIMENSIONS), svd_solver="randomized", random_state=0).fit(rows[:PUBLIC])
    return np.asarray(found.transform(rows[PUBLIC:]), np.float64), np.abs(found.transform(rows[:PUBLIC])).max(axis=0)


def points(kind: str, dimensions: int, records: int, seed: int, data_dir: str | None) -> Floats:
    """The points of a seed, within [-1, 1]. Images have one range, so that distances stay; stretched ones have one for each component."""
    if kind in SPREAD:
        return made_up(kind, dimensions, records, seed)
    every, widest = components(data_dir)
    kept = every[np.random.default_rng(seed).choice(len(every), records, replace=False), :dimensions]
    return np.clip(kept / (widest[:dimensions] if kind == "stretched" else widest.max()), -1, 1)


def costs(kind: str, dimensions: int, epsilon: float, records: int, seeds: int, data_dir: str | None = None) -> dict[str, Any]:
    """Cost over that of k-means without privacy, by method and seed; seeds are those of points, public seeds and noise alike."""
    from sklearn.cluster import KMeans as Plain

    from dpfy.estimators import KMeans

    found: dict[str, list[float]] = {method: [] for method in (*METHODS, SEEDED)}
    methods = [(m, m, epsilon) for m in METHODS] + [(SEEDED, "lloyd", HUGE)]
    for seed in range(seeds):
        rows = points(kind, dimensions, records, seed, data_dir)
        best = float(Plain(CLUSTERS, n_init=5, random_state=0).fit(rows).inertia_)
        for name, method, spent in methods:
            terms: dict[str, Any] = {"epsilon": spent, "delta": DELTA, "random_state": seed, "structure": seed, **METHODS[method]}
            made = KMeans(bounds=(-1, 1), n_clusters=CLUSTERS, method=method, **terms).fit(rows)
            found[name].append(-made.score(rows) / best)
    return found


def cells(options: Options) -> list[Cell]:
    """One for each kind of points, number of dimensions and epsilon; no images in the short form, which has no data."""
    records, seeds = (2000, 2) if options.fast else (10_000, 10)
    common = {"delta": DELTA, "records": records, "seeds": seeds, "clusters": CLUSTERS, "methods": METHODS, "huge": HUGE}
    return [
        Cell(
            f"clusters-{kind}-{dimensions}-{epsilon:g}",
            {**common, "epsilon": epsilon, "dimensions": dimensions, "spread": SPREAD.get(kind)},
            functools.partial(costs, kind, dimensions, epsilon, records, seeds, options.data_dir),
        )
        for kind in TITLES
        if kind in SPREAD or not options.fast
        for dimensions in DIMENSIONS
        for epsilon in EPSILONS
    ]


def beats(cell: Stored) -> bool:
    """Whether the grid costs less than rounds from public seeds, on average."""
    return mean(cell.result["synopsis"]) < mean(cell.result["lloyd"])


def rows_of(kind: str, results: Results) -> list[list[Any]]:
    """Dimensions, epsilon, mean cost and its deviation by method, and whether the grid beats DP-Lloyd."""
    rows: list[list[Any]] = []
    for cell in results.starting(f"clusters-{kind}-"):
        held = [cell.result[method] for method in (*METHODS, SEEDED)]
        told = [f"{mean(v):.3f} ± {stdev(v):.3f}" for v in held]
        rows.append([cell.settings["dimensions"], f"{cell.settings['epsilon']:g}", *told, "yes" if beats(cell) else "no"])
    return rows


def sections(results: Results) -> list[Section]:
    """A table for each kind of points."""
    columns = ("dimensions", "epsilon", *METHODS, SEEDED, "synopsis beats lloyd")
    tables = [
        Table(f"clusters-{kind}", title, columns, rows) for kind, title in TITLES.items() if (rows := rows_of(kind, results))
    ]
    if not tables:
        return []
    settings = results.starting("clusters-")[0].settings
    words = (
        f"{CLUSTERS} clusters of {settings['records']:,} points, delta {DELTA:g}. Cost over that of k-means without privacy; mean and "
        f"standard deviation over {settings['seeds']} sets of points. A grid has few cells a side in many dimensions (Su et al. 2016). "
        "DP-Lloyd stands or falls with its seeds, which are public: where clusters lie far apart, rounds do not move a centre from one "
        "to another, and the last method shows what is lost by seeds and rounds alone. Hybrid and coreset begin with a summary of the "
        "records and go on with rounds. Components of MNIST are those of 10,000 other images."
    )
    return [Section("Clusters: rounds, grids and both", words, tables)]


PART = Part("clusters", cells, sections, "k-means has its defaults; DP-Lloyd alone has five rounds.")
