"""`dpfy predict serve` under load: answers a second, the time of a restart, and what is counted
when it is killed at random moments.

    python benchmarks/predict_serve.py                    # 250 voters, 32 clients: speed, then 20
    kills python benchmarks/predict_serve.py --kills 0          # the speed alone

The clients run in a process of their own. Answers a second are given by the clock and by the
server's processor time (on a busy machine the second is the one to compare); a restart is timed
from the start of the process to its first answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from dpfy.prediction.voters import LinearVoters

FEATURES, CLASSES = 64, 10


class Server:
    """The service as a process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "dpfy",
            "predict",
            "serve",
            str(folder / "voters"),
            "--run",
            str(folder / "run"),
        ]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--no-token", *flags], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "serving on" not in line:
            raise SystemExit(f"the service did not start: {line}")
        self.port = int(line.rsplit(":", 1)[1])

    def seconds(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def ask(connection: http.client.HTTPConnection, rows: list[list[float]]) -> dict[str, Any]:
    connection.request(
        "POST", "/predict", json.dumps({"inputs": rows}), {"Content-Type": "application/json"}
    )
    held: dict[str, Any] = json.loads(connection.getresponse().read())
    return held


def clients(port: int, count: int, seconds: float, seed: int, out: Any) -> None:
    """So many clients at once, each with questions of its own, until the time is over or the
    service is gone.
    """
    totals = [0] * count

    def one(number: int) -> None:
        rng, until = np.random.default_rng([seed, number]), time.monotonic() + seconds
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            while time.monotonic() < until:
                found = ask(connection, np.round(rng.normal(size=(1, FEATURES)), 3).tolist())
                totals[number] += sum(answer["paid"] for answer in found["answers"])
                if not any(found["left"].values()):
                    return
        except (OSError, http.client.HTTPException):
            return

    threads = [threading.Thread(target=one, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.put(sum(totals))


def burst(server: Server, count: int, seconds: float, seed: int) -> int:
    """The number of answers that clients got."""
    out: Any = multiprocessing.Queue()
    process = multiprocessing.Process(target=clients, args=(server.port, count, seconds, seed, out))
    process.start()
    total = out.get()
    process.join()
    return int(total)


def prepared(voters: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dpfy-serve-"))
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(FEATURES, voters, CLASSES)).astype(np.float32)
    LinearVoters(weights, np.zeros((voters, CLASSES), np.float32)).save(
        folder / "voters", labels=[]
    )
    return folder


def speed(voters: int, count: int, seconds: float) -> None:
    folder = prepared(voters)
    server = Server(folder, "--answers", "1000000", "--epsilon", "1000")
    burst(server, count, 1.0, 0)  # tables of the noise are made
    began, used = time.monotonic(), server.seconds()
    total = burst(server, count, seconds, 1)
    wall, cpu = time.monotonic() - began, server.seconds() - used
    server.kill()
    print(f"{total} answers to {count} clients from {voters} voters")
    print(
        f"{total / wall:.0f} a second by the clock, {total / cpu:.0f} a second of the server's "
        f"processor time"
    )


def kills(voters: int, count: int, times: int, budget: int) -> None:
    """Killed at random moments: what clients got is never more than what the folder says was spent,
    nor than the budget.
    """
    folder, chance, received, restarts = prepared(voters), random.Random(1), 0, []
    first = ["--answers", str(budget), "--epsilon", "100"]
    for number in range(times + 1):
        server = Server(folder, *(first if number == 0 else []))
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        found = ask(connection, [[float(number)] + [0.0] * (FEATURES - 1)])
        received += sum(answer["paid"] for answer in found["answers"])
        restarts.append((time.monotonic() - server.began, server.seconds()))
        if number < times:
            timer = threading.Timer(chance.uniform(0.05, 1.5), server.kill)
            timer.start()
            received += burst(server, count, 30.0, 10 + number)
            timer.join()
        spent = json.loads((folder / "run" / "checkpoint" / "spent.json").read_text())["answer"]
        if not received <= spent <= budget:
            raise SystemExit(
                f"{received} answers were received, {spent} were paid for, of {budget}"
            )
        if number == times:
            server.kill()
    wall, cpu = (sorted(row[k] for row in restarts[1:]) for k in (0, 1))
    print(f"{times} kills: {received} answers received, {spent} paid for, budget {budget}")
    for name, found in (("clock", wall), ("processor", cpu)):
        print(
            f"restart to first answer by the {name}: median {found[len(found) // 2]:.2f} s, most "
            f"{found[-1]:.2f} s"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voters", type=int, default=250)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--budget", type=int, default=20_000)
    given = parser.parse_args()
    speed(given.voters, given.clients, given.seconds)
    if given.kills:
        kills(given.voters, given.clients, given.kills, given.budget)
