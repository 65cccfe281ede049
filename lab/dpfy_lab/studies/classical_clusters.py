"""Clusters: DP-Lloyd from public seeds, few and many, against a grid (synopsis), both together, and
a private coreset.
"""

from __future__ import annotations

import functools
from statistics import geometric_mean, mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.data.config import DataConfig
from dpfy.data.source import load
from dpfy_lab.studies import classical_adult
from dpfy_lab.studies.classical_part import Part
from dpfy_lab.studies.page import Section, Table
from dpfy_lab.studies.study import Cell, Options, Results, Stored

Floats = NDArray[np.float64]
CLUSTERS, EPSILONS, DELTA = 5, (0.1, 0.5, 1.0), 1e-6
TITLES = {
    "images": "Clusters: principal components of MNIST",
    "stretched": "Clusters: principal components of MNIST, each stretched to its own range",
    "adult": "Clusters: numbers of Adult",
    "overlapping": "Clusters: made up, overlapping",
    "far-apart": "Clusters: made up, far apart",
}
SPREAD = {"overlapping": 0.3, "far-apart": 0.12}
"""The deviation of a made-up cluster in each coordinate; centres lie in a cube of side 1.6."""
WIDTHS = {kind: (2, 3, 5) if kind == "adult" else (2, 3, 5, 10) for kind in TITLES}
MANY = "lloyd, many seeds"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lloyd": ("lloyd", {"rounds": 5, "seeds": 1}),
    "synopsis": ("synopsis", {}),
    MANY: ("lloyd", {"rounds": 5}),
    "hybrid": ("hybrid", {}),
    "coreset": ("coreset", {}),
}
"""DP-Lloyd as it was published has one public seed for each cluster."""
NUMBERS = ("age", "hr_per_week", "education_num", "capital_gain", "capital_loss")
STARTS = 20
"""Of k-means without privacy."""
PUBLIC = 10_000
"""Images that give the components and their range; no point is one of them."""


def made_up(kind: str, dimensions: int, records: int, seed: int) -> Floats:
    """Round clusters in a cube."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-0.8, 0.8, (CLUSTERS, dimensions))
    return np.clip(
        centres[rng.integers(CLUSTERS, size=records)]
        + rng.normal(0, SPREAD[kind], (records, dimensions)),
        -1,
        1,
    )


@functools.lru_cache(maxsize=1)
def components(data_dir: str | None) -> tuple[Floats, Floats]:
    """Images in the ten first components of others, and the largest coordinate of those in each."""
    from sklearn.decomposition import PCA

    images = load(DataConfig(kind="mnist"), data_dir=data_dir).train.tensors[0].numpy()
    rows = images.reshape(len(images), -1)
    found = PCA(max(WIDTHS["images"]), svd_solver="randomized", random_state=0).fit(rows[:PUBLIC])
    return np.asarray(found.transform(rows[PUBLIC:]), np.float64), np.abs(
        found.transform(rows[:PUBLIC])
    ).max(axis=0)


@functools.lru_cache(maxsize=1)
def people(data_dir: str | None) -> Floats:
    """The numbers of Adult on their scales, from -1 to 1."""
    from dpfy.tables import Number, Schema

    columns = {c.name: c for c in Schema.of("adult").features if isinstance(c, Number)}
    table, shares = classical_adult.table(data_dir)[0], []
    for name in NUMBERS:
        low, high = (columns[name].transformed(end) for end in columns[name].range)
        values = table[name].to_numpy(np.float64)
        values = np.log1p(values) if columns[name].transform == "log1p" else values
        shares.append(np.clip((values - low) / (high - low), 0, 1))
    return 2 * np.stack(shares, axis=1) - 1


def points(kind: str, dimensions: int, records: int, seed: int, data_dir: str | None) -> Floats:
    """The points of a seed, within [-1, 1]. Images have one range, so that distances stay;
    stretched ones have one for each component.
    """
    if kind in SPREAD:
        return made_up(kind, dimensions, records, seed)
    if kind == "adult":
        every = people(data_dir)
        return every[
            np.random.default_rng(seed).choice(len(every), records, replace=False), :dimensions
        ]
    every, widest = components(data_dir)
    kept = every[
        np.random.default_rng(seed).choice(len(every), records, replace=False), :dimensions
    ]
    return np.clip(kept / (widest[:dimensions] if kind == "stretched" else widest.max()), -1, 1)


def costs(
    kind: str,
    dimensions: int,
    epsilon: float,
    records: int,
    seeds: int,
    data_dir: str | None = None,
) -> dict[str, Any]:
    """Cost over that of k-means without privacy, by method and seed; seeds are those of points,
    public seeds and noise alike.
    """
    from dpfy.estimators import KMeans

    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for seed in range(seeds):
        rows, least = (
            points(kind, dimensions, records, seed, data_dir),
            best(kind, dimensions, records, seed, data_dir),
        )
        for name, (method, more) in METHODS.items():
            terms: dict[str, Any] = {
                "epsilon": epsilon,
                "delta": DELTA,
                "random_state": seed,
                "structure": seed,
                **more,
            }
            made = KMeans(bounds=(-1, 1), n_clusters=CLUSTERS, method=method, **terms).fit(rows)
            found[name].append(-made.score(rows) / least)
    return found


@functools.lru_cache(maxsize=32)
def best(kind: str, dimensions: int, records: int, seed: int, data_dir: str | None) -> float:
    """The cost without privacy."""
    from sklearn.cluster import KMeans as Plain

    rows = points(kind, dimensions, records, seed, data_dir)
    return float(Plain(CLUSTERS, n_init=STARTS, random_state=0).fit(rows).inertia_)


def cells(options: Options) -> list[Cell]:
    """One for each kind of points, number of dimensions and epsilon; no images and no people in the
    short form, which has no data.
    """
    records, seeds = (2000, 2) if options.fast else (10_000, 10)
    common = {
        "delta": DELTA,
        "records": records,
        "seeds": seeds,
        "clusters": CLUSTERS,
        "methods": {name: list(method) for name, method in METHODS.items()},
        "starts": STARTS,
    }
    return [
        Cell(
            f"clusters-{kind}-{dimensions}-{epsilon:g}",
            {**common, "epsilon": epsilon, "dimensions": dimensions, "spread": SPREAD.get(kind)},
            functools.partial(costs, kind, dimensions, epsilon, records, seeds, options.data_dir),
        )
        for kind in TITLES
        if kind in SPREAD or not options.fast
        for dimensions in WIDTHS[kind]
        for epsilon in EPSILONS
    ]


def beats(cell: Stored, method: str = "lloyd") -> str:
    """Whether the grid costs less than rounds from public seeds, on average."""
    return "yes" if mean(cell.result["synopsis"]) < mean(cell.result[method]) else "no"


def rows_of(kind: str, results: Results) -> list[list[Any]]:
    """Dimensions, epsilon, mean cost and its deviation by method, and whether the grid beats
    DP-Lloyd with one seed and with many.
    """
    rows: list[list[Any]] = []
    for cell in results.starting(f"clusters-{kind}-"):
        told = [
            f"{mean(cell.result[name]):.3f} ± {stdev(cell.result[name]):.3f}" for name in METHODS
        ]
        rows.append(
            [
                cell.settings["dimensions"],
                f"{cell.settings['epsilon']:g}",
                *told,
                beats(cell),
                beats(cell, MANY),
            ]
        )
    return rows


def by_dimensions(results: Results) -> list[list[Any]]:
    """Dimensions; then for DP-Lloyd with one seed and with many: how often the grid costs less on
    the same points, and how many times as much it costs, in the geometric mean over rows.
    """
    rows: list[list[Any]] = []
    cells = results.starting("clusters-")
    for dimensions in sorted({cell.settings["dimensions"] for cell in cells}):
        held = [cell.result for cell in cells if cell.settings["dimensions"] == dimensions]
        row: list[Any] = [dimensions, sum(len(found["synopsis"]) for found in held)]
        for method in ("lloyd", MANY):
            less = [
                a < b
                for found in held
                for a, b in zip(found["synopsis"], found[method], strict=True)
            ]
            ratios = [mean(found["synopsis"]) / mean(found[method]) for found in held]
            row += [f"{mean(less):.0%}", f"{geometric_mean(ratios):.3f}"]
        rows.append(row)
    return rows


def sections(results: Results) -> list[Section]:
    """A table for each kind of points, and one over all of them."""
    columns = (
        "dimensions",
        "epsilon",
        *METHODS,
        "synopsis beats lloyd",
        "synopsis beats many seeds",
    )
    tables = [
        Table(f"clusters-{kind}", title, columns, rows)
        for kind, title in TITLES.items()
        if (rows := rows_of(kind, results))
    ]
    if not tables:
        return []
    heads = (
        "dimensions",
        "comparisons",
        "costs less than lloyd",
        "times its cost",
        "costs less than many seeds",
        "times its cost",
    )
    tables.insert(
        0,
        Table(
            "clusters-by-dimensions",
            "Clusters: the grid (synopsis), over all points",
            heads,
            by_dimensions(results),
        ),
    )
    settings = results.starting("clusters-")[0].settings
    words = (
        f"{CLUSTERS} clusters of {settings['records']:,} points, delta {DELTA:g}. Cost over that "
        f"of k-means without privacy; mean and "
        f"standard deviation over {settings['seeds']} sets of points. A grid has few cells a side "
        f"in many dimensions (Su et al. 2016). "
        "DP-Lloyd as it was published has one public seed for each cluster, and stands or falls "
        "with it: where clusters lie far apart, "
        "rounds do not move a centre from one to another. With sixteen for each, most are merged "
        "after the first rounds, by the counts "
        "that these release. A comparison is one set of points with its public seeds, at one "
        "epsilon; how many times as much the grid "
        "costs is the geometric mean over the rows of the tables below. Hybrid and coreset begin "
        "with a summary of the records and go on "
        "with rounds. Components of MNIST are those of 10,000 other images."
    )
    return [Section("Clusters: rounds, grids and both", words, tables)]


PART = Part(
    "clusters",
    cells,
    sections,
    "k-means has its defaults; DP-Lloyd alone has five rounds. How many seeds it has, and how they "
    "are merged, was chosen on other draws "
    "of made-up points and of MNIST than those reported.",
)
