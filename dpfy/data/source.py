"""Where records come from: one loader per kind, by a fixed table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from dpfy.data import arrays, embedded, idx, images, table, text
from dpfy.data.config import FIELDS_OF_KIND, DataConfig
from dpfy.data.dataset import DataSource

__all__ = ["LOADERS", "DataSource", "load"]

LOADERS: dict[str, Callable[[DataConfig], DataSource]] = {
    "embedded": embedded.mnist_5000,
    "digits": embedded.digits,
    "mnist": idx.well_known,
    "fashion-mnist": idx.well_known,
    "cifar10": images.cifar,
    "cifar100": images.cifar,
    "adult": table.adult,
    "shakespeare": text.shakespeare,
    "idx": idx.from_config,
    "npz": arrays.from_config,
    "images": images.of_folder,
    "csv": table.from_config,
    "parquet": table.from_config,
    "text": text.from_config,
}
TABLES = {"adult": table.adult, "csv": table.from_config, "parquet": table.from_config}


def load(
    config: DataConfig | str | None = None,
    *,
    data_dir: Path | str | None = None,
    every_row: bool = True,
) -> DataSource:
    """Load what `config` (or a kind by name; the embedded images by default) describes.

    `data_dir` stands in for `config.dir` when the configuration names none. `every_row`: the number
    of records is public, so that a table leaves out no row (see `table.encode`).

    Guarantees: nothing is learnt from the data: scales, ranges, categories and classes come from
    the configuration, the schema or this code; the split is a fixed permutation of record numbers.
    A bad file is a one-line InvalidInput or Corrupt.
    """
    chosen = (
        config
        if isinstance(config, DataConfig)
        else DataConfig(kind=config if config is not None else "embedded")
    )
    if data_dir is not None and chosen.dir is None and "dir" in FIELDS_OF_KIND[chosen.kind]:
        chosen = dataclasses.replace(chosen, dir=str(data_dir))
    if not every_row and chosen.kind in TABLES:
        return TABLES[chosen.kind](chosen, False)
    return LOADERS[chosen.kind](chosen)
