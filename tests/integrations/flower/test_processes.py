"""Flower's PyTorch quickstart pattern over its transport, on localhost: lost replies, dead clients,
killed servers.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from safetensors.torch import load_file

import dpfy
from dpfy import accounting
from dpfy.core.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent))
import processes

pytestmark = pytest.mark.slow
PLAN = {"num_server_rounds": 24, "cohort": 1.5, "noise": 1.0, "timeout": 300}


def epsilon_of(run: Path) -> float:
    return json.loads((run / "privacy.json").read_text())["guarantee"]["epsilon"]


def finished(run: Path, seconds: float = 1800) -> None:
    processes.until(
        lambda: (run / "report.html").is_file() and not (run / "checkpoint").exists(), seconds
    )
    assert all(f.holds for f in dpfy.verify(run))


def same(one: Path, other: Path) -> bool:
    first, second = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return all((first[name] == second[name]).all() for name in first)


def test_killed_servers_and_lost_replies(tmp_path):
    """A run whose server is killed 20 times ends with the bits of one that is left alone; three
    replies in ten are spoilt in both.

    Every other server is killed when the sum of a round is on disk, before or while its noise is
    made; the others at any time.
    """
    chance, server = random.Random(0), None
    app = processes.faulty_app(tmp_path / "app", 5, light=True)
    whole, cut = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut"
    whole.parent.mkdir()
    with processes.Processes(tmp_path, 5) as federation:
        federation.server(app, run=str(whole), **PLAN)
        finished(whole)
        for kill in range(20):
            federation.server(app, run=str(cut), **PLAN)
            server = processes.started(cut, server)
            if kill % 2:
                round_kept(cut)
            time.sleep(chance.uniform(0, 0.05 if kill % 2 else 3))
            os.kill(server, signal.SIGKILL)
            assert not (cut / "privacy.json").is_file()
            if (cut / "ledger.jsonl").is_file() and Ledger.read(cut / "ledger.jsonl").permits():
                billed = accounting.epsilon(Ledger.read(cut / "ledger.jsonl").event(), 0.01)
                assert billed == pytest.approx(epsilon_of(whole), rel=1e-6)
        federation.server(app, run=str(cut), **PLAN)
        finished(cut)
        assert same(whole, cut)


def round_kept(run: Path) -> None:
    """Until the sum of another round than now is on disk."""
    file = run / "checkpoint" / "round.safetensors"
    before = file.stat().st_mtime_ns if file.is_file() else None
    processes.until(lambda: file.is_file() and file.stat().st_mtime_ns != before, 300, pause=0.005)


def test_simulation(tmp_path):
    """The example as it is, simulated by Ray."""
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    with processes.Processes(tmp_path, 5, simulation=True) as federation:
        federation.server(processes.ROOT / "examples" / "flower", run=str(run))
        finished(run)


def test_dead_clients(tmp_path):
    """Two of five nodes are killed while a round is under way; it ends without them, and one comes
    back.
    """
    with processes.Processes(tmp_path, 5) as federation:
        (tmp_path / "runs").mkdir()
        run = tmp_path / "runs" / "run"
        app = processes.ROOT / "examples" / "flower"
        federation.server(app, run=str(run), num_server_rounds=5, cohort=5.0, timeout=60)
        processes.until(lambda: (run / "checkpoint" / "round.safetensors").is_file(), 300)
        federation.kill_node(1)
        federation.kill_node(3)
        federation.start_node(3)
        finished(run)


def test_secure_aggregation_with_a_dropout(tmp_path):
    """SecAgg+ over the transport: the third of five clients vanishes after keys were shared, in
    every round.
    """
    app, run = processes.secure_app(tmp_path / "app"), tmp_path / "runs" / "run"
    run.parent.mkdir()
    with processes.Processes(tmp_path, 5) as federation:
        federation.server(app, run=str(run))
        finished(run)
        processes.until(lambda: Path(f"{run}.missing").is_file(), 60)
    assert Path(f"{run}.missing").read_text() == str([(2,), (2,)])
    assert json.loads((run / "privacy.json").read_text())["guarantee"]["trust"] == "distributed"
