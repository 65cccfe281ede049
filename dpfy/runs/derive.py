"""What is made from a finished run without its data: pruned, quantised, calibrated or distilled on
public data. It costs nothing.

Post-processing of a release is covered by its guarantee, if nothing else went into it. dpfy cannot
see that: anyone who adds a file says how it was made, and from which public data, and the ledger keeps
the words with the hash.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dpfy.core import check, storage
from dpfy.core.errors import InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.ledger_rules import FILE, RESERVED
from dpfy.core.storage import write_atomically
from dpfy.runs.folder import CARD, LEDGER

NO_DATA = "none"


def derive(
    run: Path,
    file: Path,
    *,
    of: Sequence[str],
    how: str,
    public: str = NO_DATA,
    name: str | None = None,
) -> Path:
    """Add `file` to a finished run as made from its files `of`, by `how`, with the data `public`,
    which must be public.

    Guarantees: the file lies in the folder, and its hash in the ledger, or neither; nothing of the
    run is changed. Verification follows the hash. A name of the run's own files is refused.
    """
    chosen = file.name if name is None else name
    check.one_line("how", how)
    check.one_line("public", public)
    if not (run / CARD).is_file():
        raise InvalidInput(
            "run",
            str(run),
            "is not a finished run: only what was released can be processed further",
        )
    if not FILE.fullmatch(chosen) or chosen in RESERVED:
        raise InvalidInput(
            "name",
            chosen,
            "must be letters, digits, dots and dashes, and no name of the run's own files",
        )
    content = storage.content("file", file, most=storage.MOST_DATA)
    ledger, target = Ledger.read(run / LEDGER), run / chosen
    if chosen in ledger.book.derived or (os.path.lexists(target) and not _same(target, content)):
        raise InvalidInput("name", chosen, "is there already; choose another name")
    made = not target.exists()
    write_atomically(target, content)
    try:
        ledger.derive(chosen, of=of, how=how, public=public)
    except BaseException:
        if made:
            target.unlink(missing_ok=True)
        raise
    return target


def _same(file: Path, content: bytes) -> bool:
    """Whether a crash between file and ledger left this very file."""
    return file.is_file() and not file.is_symlink() and file.read_bytes() == content
