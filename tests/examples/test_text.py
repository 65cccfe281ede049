"""The text example, through its command line, on text made up here: a few steps of each model."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "text.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_text", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "gpt2", "llama-lora"])
def test_a_few_private_steps_lower_the_held_out_loss(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data" / "shakespeare"
    folder.mkdir(parents=True)
    (folder / "input.txt").write_text(
        "Now is the winter of our discontent made glorious summer by this sun of York. " * 400
    )
    given = [
        "--model",
        model,
        "--data-dir",
        str(tmp_path / "data"),
        "--length",
        "16",
        "--batch-size",
        "300",
        "--epochs",
        "1",
    ]
    example().main([*given, "--run", str(tmp_path / "run"), "--delta", "1e-4"])
    said = capsys.readouterr().out
    before, after = (
        float(x) for x in re.search(r"held-out loss ([\d.]+) before, ([\d.]+) after", said).groups()
    )  # type: ignore[union-attr]
    assert after < before - 0.3
    assert "(8.000, 0.0001)-differential privacy for one example" in said
    assert "one example is a passage of 17 bytes" in said
    assert "engine bookkeeping" in said
    assert "NOT SUPPORTED" not in said
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["sections"][0]["utility"]["held_out_loss"] == pytest.approx(after, abs=1e-3)
