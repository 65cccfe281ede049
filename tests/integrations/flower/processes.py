"""A federation of processes on localhost: Flower's SuperLink, its SuperNodes, and servers that may
be killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
FAULTY = '''"""The example's server behind a network that loses, repeats and spoils three replies in ten."""
import hashlib, os
import dpfy, torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import ServerApp
from quickstart import server_app as plain

SEED = {SEED}
app = ServerApp()


class Faulty:
    """A grid whose replies have a fate, by the client's name and the round."""

    def __init__(self, grid):
        self.grid, self.names, self.round = grid, {}, 0

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def push_messages(self, messages):
        for message in messages:
            self.round = int(message.content.get("config", {}).get("server-round", self.round))
        return self.grid.push_messages(messages)

    def pull_messages(self, keys):
        return [made for reply in self.grid.pull_messages(keys) for made in self.fate(reply)]

    def fate(self, reply):
        node = reply.metadata.src_node_id
        if reply.has_content() and "dpfy" in reply.content:
            self.names[node] = str(reply.content["dpfy"]["name"])
            return [reply]
        drawn = hashlib.sha256(f"{SEED:d} {self.names.get(node)} {self.round}".encode()).digest()[0] % 10
        if reply.has_error() or drawn > 2:
            return [reply]
        answered = Message(RecordDict(), dst_node_id=node, message_type="train")
        answered.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
        if drawn == 0:
            return [Message(Error(0, "lost"), reply_to=answered)]
        if drawn == 1:
            return [reply, reply]
        arrays = {name: Array(a.numpy() * float("nan")) for name, a in reply.content["arrays"].items()}
        return [Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=answered)]


@app.main()
def main(grid, context):
    with open(str(context.run_config["run"]) + ".pid", "w") as file:
        file.write(str(os.getpid()))
    torch.manual_seed(SEED)
    made = plain.PrivateFedAvg
    plain.PrivateFedAvg = lambda model, plan, run, **more: made(model, plan, dpfy.Run(run, seed=SEED), **more)
    plain.main(Faulty(grid), context)
'''


LIGHT = '''"""A client without torch, which takes seconds to start: it moves its weights by numbers of its own."""
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from dpfy.integrations.flower import private_mod

app = ClientApp(mods=[private_mod])


@app.train()
def train(msg, context):
    made = np.random.default_rng([int(context.node_config["partition-id"]), int(msg.content["config"]["server-round"])])
    arrays = {name: Array((a.numpy() + 0.1 * made.normal(size=a.shape)).astype(np.float32)) for name, a in msg.content["arrays"].items()}
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 300})}), reply_to=msg)
'''  # noqa: E501


SECURE = '''"""Clients whose updates go through secure aggregation; the third vanishes whenever masked updates are asked for."""
import os
from quickstart import light
from flwr.clientapp import ClientApp
from dpfy.integrations.flower import secure_mod


def vanishing(message, context, call_next):
    held = message.content.config_records.get("secaggplus_configs", {})
    if int(context.node_config["partition-id"]) == 2 and held.get("stage") == "collect_masked_vectors":
        raise RuntimeError("gone")
    return call_next(message, context)


app = ClientApp(mods=[vanishing, secure_mod])
app.train()(light.train)
'''  # noqa: E501
SECURE_SERVER = '''"""A server that sees sums alone."""
import dpfy
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from dpfy.federated import shares
from dpfy.integrations.flower import PrivateFedAvg
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid, context):
    model = Net()
    size = sum(p.numel() for p in model.parameters())
    plan = shares.plan(clients=5, dimension=size, rounds=2, epsilon=8.0, delta=0.01, least=3, bits=20, rotation=1)
    made = PrivateFedAvg(model, plan, str(context.run_config["run"]), identity="partition-id", wait_for=5)
    made.start(grid, ArrayRecord(model.state_dict()), timeout=300)
    with open(str(context.run_config["run"]) + ".missing", "w") as file:
        file.write(str([report.silent for report in made.reports]))
'''


def secure_app(folder: Path) -> Path:
    """The example with secure aggregation and a client that vanishes."""
    made = faulty_app(folder, 5, light=True)
    (made / "quickstart" / "secure.py").write_text(SECURE)
    (made / "quickstart" / "secure_server.py").write_text(SECURE_SERVER)
    settings = (
        (made / "pyproject.toml")
        .read_text()
        .replace("quickstart.light:app", "quickstart.secure:app")
    )
    (made / "pyproject.toml").write_text(
        settings.replace("quickstart.faulty:app", "quickstart.secure_server:app")
    )
    return made


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def faulty_app(folder: Path, seed: int, *, light: bool = False) -> Path:
    """The example with a server whose network fails, and, if `light`, with clients that start
    fast.
    """
    shutil.copytree(
        ROOT / "examples" / "flower", folder, ignore=shutil.ignore_patterns("__pycache__", "runs")
    )
    (folder / "quickstart" / "faulty.py").write_text(FAULTY.replace("{SEED}", str(seed)))
    settings = (
        (folder / "pyproject.toml")
        .read_text()
        .replace("quickstart.server_app:app", "quickstart.faulty:app")
    )
    if light:
        (folder / "quickstart" / "light.py").write_text(LIGHT)
        settings = settings.replace("quickstart.client_app:app", "quickstart.light:app")
    (folder / "pyproject.toml").write_text(settings)
    return folder


class Processes:
    """A SuperLink and `nodes` SuperNodes, all children of this process (or simulated by Ray); gone
    when the block is left.
    """

    def __init__(self, folder: Path, nodes: int, *, simulation: bool = False) -> None:
        self.folder, self.count, self.port = folder, 0 if simulation else nodes, free_port()
        self.simulated = nodes if simulation else 0
        self.nodes: dict[int, subprocess.Popen] = {}
        home = folder / "home"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = '
            f'"127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }

    def __enter__(self) -> Processes:
        flags = [
            "--insecure",
            "--disable-runtime-dependency-installation",
            "--port",
            str(self.port),
        ]
        flags += ["--simulation"] if self.simulated else []
        self.link = self._start("superlink", "flower-superlink", *flags)
        until(lambda: _listens(self.port), 120)
        for part in range(self.count):
            self.start_node(part)
        until(
            lambda: (
                (self.folder / "superlink.log").read_text().count("Activated node_id") >= self.count
            ),
            240,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        for process in [*self.nodes.values(), self.link]:
            _end(process)

    def start_node(self, part: int) -> None:
        """(Again) the node of one client."""
        config = f"partition-id={part} num-partitions={self.count}"
        flags = [
            "--insecure",
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--port",
            str(free_port()),
            "--node-config",
            config,
        ]
        self.nodes[part] = self._start(f"node{part}", "flower-supernode", *flags)

    def kill_node(self, part: int) -> None:
        """The node and whatever it runs, at once."""
        _end(self.nodes.pop(part))

    def server(self, app: Path, **settings: object) -> None:
        """Start a server."""
        given = " ".join(f"{key.replace('_', '-')}={value!r}" for key, value in settings.items())
        command = [str(BIN / "flwr"), "run", str(app), "local", "-c", given]
        if self.simulated:
            sizes = (
                f"num-supernodes={self.simulated} client-resources-num-cpus=1 init-args-num-cpus=2"
            )
            command += ["--federation-config", sizes]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert "Successfully started run" in done.stdout, done.stdout + done.stderr

    def _start(self, name: str, command: str, *flags: str) -> subprocess.Popen:
        log = (self.folder / f"{name}.log").open("a")
        return subprocess.Popen(
            [str(BIN / command), *flags],
            stdout=log,
            stderr=log,
            env=self.environment,
            cwd=self.folder,
            start_new_session=True,
        )


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def until(done, seconds: float, pause: float = 0.2) -> None:
    """Wait."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "waited too long"
        time.sleep(pause)


def _end(process: subprocess.Popen) -> None:
    """Kill a child with all of its own: Flower's start in sessions of theirs."""
    for one in [process.pid, *_below(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.wait()


def _below(parent: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    parents = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parents[int(number)] = int(
                Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1]
            )
    found, fresh = [], [parent]
    while fresh:
        fresh = [child for child, above in parents.items() if above in fresh]
        found += fresh
    return found


def started(run: Path, before: int | None = None, seconds: float = 240) -> int:
    """The process id of the server that works on a run folder, once it is another than `before`."""
    file, found = Path(f"{run}.pid"), []

    def there() -> bool:
        found[:] = [file.read_text()] if file.is_file() else []
        return bool(found and found[0].isdigit() and int(found[0]) != before)

    until(there, seconds)
    return int(found[0])


def alive(process: int) -> bool:
    """Whether a process that is no child of ours is still there (one that ended and was not waited
    for is not).
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
