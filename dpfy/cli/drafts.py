"""The two files of `dpfy init`: read the header, draft, and write nothing over what is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.core import storage
from dpfy.core.errors import InvalidInput
from dpfy.data import cells, draft
from dpfy.data import header as headers
from dpfy.data.config import kind_of
from dpfy.data.files import DataFile


@dataclass(frozen=True)
class ColumnChoices:
    """What the user said about columns, by name."""

    label: str | None = None
    number: tuple[str, ...] = ()
    category: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    user: str | None = None

    def kinds(self) -> dict[str, str]:
        """Kind by column; a column that is given twice is refused."""
        said = [(self.label, draft.LABEL), (self.user, draft.IGNORE)]
        said += [(n, draft.NUMBER) for n in self.number] + [
            (n, draft.CATEGORY) for n in self.category
        ]
        said += [(n, draft.IGNORE) for n in self.ignore]
        found: dict[str, str] = {}
        for name, kind in said:
            if name is None:
                continue
            if found.setdefault(name, kind) != kind:
                raise InvalidInput(
                    f"--{kind}", name, f"is given as {found[name]} too; give it once"
                )
        return found


def write(
    data: str, out: Path, given: ColumnChoices, *, public: bool, header: bool, force: bool
) -> dict[str, Any]:
    """Draft schema and job of the table `data` into the folder `out`.

    Guarantees: unless `public`, nothing after the header is read; both files are written or
    neither, and none that is there is replaced unless `force`.
    """
    if not os.path.isdir(out):
        raise InvalidInput("--out", str(out), "must be a folder that exists")
    file, kind = DataFile.given(data), kind_of(data) or "csv"
    if kind not in ("csv", "parquet"):
        raise InvalidInput(
            "DATA",
            data,
            "must be a table, CSV or Parquet; dpfy train reads this kind without a schema",
        )
    found = headers.read(file, parquet=kind == "parquet")
    _check(found, data, header)
    drafted = draft.columns(found.names, found.kinds, given.kinds())
    if public:
        table: dict[str, Any] = dict(
            cells.read_csv(file, 0) if kind == "csv" else cells.read_parquet(file, 0)
        )
        drafted = [draft.filled(column, table[column.name]) for column in drafted]
    name = file.path.name.removesuffix(".gz").rpartition(".")[0] or file.path.name
    schema, job = out / f"{name}.schema.toml", out / f"{name}.job.toml"
    texts = {
        schema: draft.schema(file.path.name, drafted, public=public),
        job: draft.job(kind, data, str(schema), name, given.user),
    }
    _save(texts, force)
    return {
        "columns": len(drafted),
        "open": draft.open_places(drafted),
        "label": next((column.name for column in drafted if column.kind == draft.LABEL), None),
        "public": public,
        "schema": str(schema),
        "job": str(job),
    }


def _check(found: headers.Header, data: str, header: bool) -> None:
    if len(set(found.names)) != len(found.names):
        raise InvalidInput("DATA", data, "has two columns of one name; rename one")
    if not header and headers.looks_like_a_record(found.names):
        rule = (
            "its first line holds a number or a date, so it looks like a record and not like "
            "names; add a line of names, or say --header"
        )
        raise InvalidInput("DATA", data, rule)


def _save(texts: dict[Path, str], force: bool) -> None:
    for path in texts:
        if os.path.lexists(path) and not force:
            raise InvalidInput("--out", str(path), "is there already; --force replaces it")
        if os.path.lexists(path) and not path.is_file():
            raise InvalidInput("--out", str(path), "is there already and is no file")
    for path, text in texts.items():
        try:
            content = text.encode()
            storage.write_atomically(path, content) if force else storage.create(path, content)
        except OSError as problem:
            raise InvalidInput(
                "--out", str(path), storage.why(problem, "cannot be written")
            ) from None
