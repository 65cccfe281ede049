"""The Flower example runs without a published package, by the command that the documentation shows."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_app_fetches_nothing_and_the_documented_command_has_its_clients() -> None:
    held = tomllib.loads((ROOT / "examples/flower/pyproject.toml").read_text())
    assert held["project"]["dependencies"] == []
    config = held["tool"]["flwr"]["app"]["config"]
    page = (ROOT / "docs/flower.md").read_text()
    (command,) = [
        line for line in page.splitlines() if line.startswith("flwr run examples/flower -")
    ]
    assert f'--stream --federation-config "num-supernodes={config["clients"]}"' in command
    assert 0 < config["wait"] < config["timeout"]
