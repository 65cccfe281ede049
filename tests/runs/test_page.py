"""The code of docs/releases.md, run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dpfy.core.ledger import Ledger

PAGE = Path(__file__).parents[2] / "docs" / "releases.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (\w+\.py)\n")


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    seen: dict[str, object] = {}
    for number, block in enumerate(BLOCKS, start=1):
        if named := MODULE.match(block):
            Path(named[1]).write_text(block)
        else:
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), seen)
    assert len(BLOCKS) == 4
    assert sorted(p.name for p in Path("runs/yes").iterdir()) == sorted(
        [
            "count.json",
            "ledger.jsonl",
            "ledger.jsonl.head",
            "privacy.json",
            "report.html",
            "report.md",
        ]
    )
    card = json.loads(Path("runs/both/privacy.json").read_text())
    assert [part["kind"] for part in card["sections"]] == ["training", "count"]
    assert [p.claim["kind"] for p in Ledger.read(Path("people.jsonl")).permits()] == ["count"]
