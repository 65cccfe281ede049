"""The benchmarks of the step and of the noise run: figures that nobody can measure again are worth
nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))


@pytest.mark.parametrize("kind", ["plain", "dpfy", "dpfy without noise"])
def test_the_step_of_the_benchmark(kind: str) -> None:
    import step

    case = step.Case(lambda: step.perceptron(4, 4), step.images(4, 4, kinds=4), step.classes)
    model, batch = step.fresh(case, "cpu", torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    step.STEPS[kind](model, case)(*batch)
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_the_noise_of_the_benchmark() -> None:
    import noise

    total = {"a": torch.zeros(10)}
    noise.shipped(noise.STRATEGIES["independent"], total)(0)
    assert total["a"].all()


def test_the_exact_noise_of_the_benchmark() -> None:
    from fractions import Fraction

    import exact_noise

    row = exact_noise.measure("gaussian", Fraction(3), 100, 10)
    assert row["million_a_second"] > 0


def test_the_lazy_data_of_the_benchmark(tmp_path: Path) -> None:
    import lazy_data

    lazy_data.write_images(tmp_path, 60)
    loop = lazy_data.Loop(lazy_data.Images(tmp_path, 60, flips=True), 20, 3, 0, "cpu", "lenet")
    assert sum(loop.plain()) == 60
    assert sum(loop.private(tmp_path / "run")) > 0
    (tmp_path / "mapped").mkdir()
    assert lazy_data.mapped(tmp_path / "mapped", 0.001, 2, 20, 0)["read_gigabytes"] > 0


@pytest.mark.slow
def test_a_mapped_file_of_20_gigabytes_trains_within_2_gibibytes(tmp_path: Path) -> None:
    """The file is sparse; every process of the run together, at its largest."""
    import json
    import subprocess

    script = Path(__file__).resolve().parents[1] / "benchmarks" / "lazy_data.py"
    command = [
        sys.executable,
        str(script),
        "mapped",
        "--steps",
        "400",
        "--batch",
        "1024",
        "--workers",
        "2",
    ]
    found = json.loads(
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        ).stdout
    )
    assert found["read_gigabytes"] > 4
    assert found["peak_gib"] + 2 * found["largest_worker_gib"] < 2


def test_the_ranks_of_the_benchmark() -> None:
    import distributed

    with distributed.one_rank("gloo"):
        row = distributed.alone(distributed.Shape(64, 1, 4, 8, tokens=16), "cpu", 4, 1)
        assert row["private"]["fsdp"] > 0
        assert row["not private"]["ddp"] > 0


def test_the_benchmark_of_losses_for_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    import per_record

    import isolation

    monkeypatch.setattr(isolation, "RECORDS", 64)
    plain, apart = per_record.ratio(isolation.linear, 16, 5)
    assert min(plain, apart) > 0
