"""Clusters: DP-Lloyd from public seeds against a grid (synopsis), both together, and a private coreset, by the number of dimensions."""

from __future__ import annotations

import functools
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfy.studies.classical_part import Part
from dpfy.studies.page import Section, Table
from dpfy.studies.study import Cell, Options, Results

DIMENSIONS, CLUSTERS = (2, 3, 5, 10), 5
DATA = {"overlapping": 0.3, "far-apart": 0.12}
"""The deviation of a cluster in each coordinate; centres lie in a cube of side 1.6."""
METHODS: dict[str, dict[str, Any]] = {"lloyd": {"rounds": 5}, "synopsis": {}, "hybrid": {}, "coreset": {}}
TERMS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}


def made_up(kind: str, dimensions: int, records: int, seed: int) -> NDArray[np.float64]:
    """Round clusters in a cube."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-0.8, 0.8, (CLUSTERS, dimensions))
    return np.clip(centres[rng.integers(CLUSTERS, size=records)] + rng.normal(0, DATA[kind], (records, dimensions)), -1, 1)


def costs(kind: str, dimensions: int, records: int, seeds: int) -> dict[str, Any]:
    """Cost over that of k-means without privacy, by method and seed; seeds are those of data, public seeds and noise alike."""
    from sklearn.cluster import KMeans as Plain

    from dpfy.estimators import KMeans

    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(seeds):
        rows = made_up(kind, dimensions, records, seed)
        best = float(Plain(CLUSTERS, n_init=5, random_state=0).fit(rows).inertia_)
        for method, more in METHODS.items():
            made = KMeans(bounds=(-1, 1), n_clusters=CLUSTERS, method=method, random_state=seed, structure=seed, **TERMS, **more)
            found[method].append(-made.fit(rows).score(rows) / best)
    return found


def cells(options: Options) -> list[Cell]:
    """One for each kind of data and number of dimensions."""
    records, seeds = (2000, 2) if options.fast else (10_000, 10)
    return [
        Cell(
            f"clusters-{kind}-{dimensions}",
            {**TERMS, "records": records, "seeds": seeds, "clusters": CLUSTERS, "methods": METHODS, "spread": DATA[kind]},
            functools.partial(costs, kind, dimensions, records, seeds),
        )
        for kind in DATA
        for dimensions in DIMENSIONS
    ]


def rows_of(kind: str, results: Results) -> list[list[Any]]:
    """Dimensions, mean cost and its deviation by method, and whether the grid beats DP-Lloyd."""
    rows: list[list[Any]] = []
    for cell in results.starting(f"clusters-{kind}-"):
        held = [cell.result[method] for method in METHODS]
        told = [f"{mean(v):.3f} ± {stdev(v):.3f}" for v in held]
        wins = "yes" if mean(cell.result["synopsis"]) < mean(cell.result["lloyd"]) else "no"
        rows.append([cell.name.rpartition("-")[2], *told, wins])
    return rows


def sections(results: Results) -> list[Section]:
    """A table for each kind of data."""
    columns = ("dimensions", *METHODS, "synopsis beats lloyd")
    titles = {"overlapping": "Clusters that overlap", "far-apart": "Clusters far apart"}
    tables = [Table(f"clusters-{kind}", titles[kind], columns, rows) for kind in DATA if (rows := rows_of(kind, results))]
    if not tables:
        return []
    settings = results.starting("clusters-")[0].settings
    words = (
        f"{CLUSTERS} round clusters of {settings['records']:,} made-up records, epsilon {TERMS['epsilon']:g}, delta 1e-6. Cost over "
        f"that of k-means without privacy; mean and standard deviation over {settings['seeds']} data sets. A grid has few cells a side "
        "in many dimensions (Su et al. 2016). DP-Lloyd stands or falls with its seeds, which are public: where clusters lie far apart, "
        "rounds do not move a centre from one to another. Hybrid and coreset begin with a summary of the records and go on with rounds."
    )
    return [Section("Clusters: rounds, grids and both", words, tables)]


PART = Part("clusters", cells, sections, "k-means has its defaults; DP-Lloyd alone has five rounds.")
