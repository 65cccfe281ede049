"""The service: what it answers over HTTP, to many at once, and after it was killed."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from electorate import records, voters

import dpfy
from dpfy.core.errors import InvalidInput
from dpfy.prediction.claim import AnswersClaim
from dpfy.prediction.predictor import PrivatePredictor
from dpfy.prediction.service import MOST_BODY, MOST_INPUTS, Access, application
from dpfy.runs.mark import SPENT
from dpfy.runs.run import Run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]
OPEN = Access(token=None)
CLAIM = AnswersClaim("gaussian", 2, 20, 60, 60, sigma=6.0, delta=1e-6)


def called(app, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, dict]:
    """One request to an ASGI application, without a server."""
    import asyncio

    sent: list[dict] = []
    parts = [body[k : k + (1 << 16)] for k in range(0, len(body), 1 << 16)] or [b""]

    async def receive():
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": HEADERS,
    }
    scope |= {
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "server": ("x", 1),
        "client": ("y", 2),
    }
    asyncio.run(app(scope, receive, send))
    content = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], json.loads(content) if content.startswith(b"{") else {}


@pytest.fixture
def predictor(tmp_path):
    with PrivatePredictor(Run(tmp_path / "run"), CLAIM, voters(20, 2)) as held:
        yield held


def body(rows) -> bytes:
    return json.dumps({"inputs": np.asarray(rows).tolist()}).encode()


def test_answers_are_named_and_counted(predictor):
    app = application(predictor, ("no", "yes"), access=OPEN)
    x, y = records(20, 2, seed=4)
    status, held = called(app, "/predict", body(x))
    assert status == 200
    assert held["left"] == {"answer": 40}
    assert (
        sum(a["label"] == ("no", "yes")[k] for a, k in zip(held["answers"], y, strict=True)) >= 14
    )
    status, about = called(app, "/about", method="GET")
    assert (status, about["voters"], about["labels"], about["left"]) == (
        200,
        20,
        ["no", "yes"],
        {"answer": 40},
    )
    assert about["epsilon"] == pytest.approx(dpfy.accounting.epsilon(CLAIM.event, 1e-6))
    with pytest.raises(InvalidInput, match="labels"):
        application(predictor, ("one",), access=OPEN)


def test_a_spent_service_refuses(predictor):
    app = application(predictor, access=OPEN)
    x = records(80, 2, seed=5)[0]
    assert called(app, "/predict", body(x))[0] == 200
    status, held = called(app, "/predict", body(x[70:]))
    assert status == 429
    assert all(a["label"] is None and not a["paid"] for a in held["answers"])
    assert called(app, "/predict", body(x[:3]))[0] == 200  # what was answered is remembered


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"{}", 400), (b'{"inputs": 3}', 400), (b'{"inputs": []}', 400), (b'{"inputs": [[1]]}', 400),  # noqa: E501
        (b'{"inputs": '
         b'[["a","b","c","d","e","f"]]}', 400), (b'{"inputs": '
                                                 b'[[NaN,0,0,0,0,0]]}', 400), (b'{"inputs": [null]}', 400),
        (b"[" * 100_000, 400), (json.dumps({"inputs": [[0] * 6] * (MOST_INPUTS + 1)}).encode(), 400), (b" " * (MOST_BODY + 1), 413),  # noqa: E501
        (b"\xff\xfe", 400), (b'{"inputs": [[1e999,0,0,0,0,0]]}', 400),
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused_and_costs_nothing(predictor, content, status):
    app = application(predictor, access=OPEN)
    assert called(app, "/predict", content)[0] == status
    assert predictor.left() == {"answer": 60}
    assert called(app, "/predict", method="GET")[0] == 405
    assert called(app, "/elsewhere")[0] == 404


class Service:
    def __init__(self, folder: Path, *flags: str) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "dpfy",
            "predict",
            "serve",
            str(folder / "v"),
            "--run",
            str(folder / "run"),
            "--port",
            "0",
            "--no-token",
            *flags,
        ]
        env = os.environ | {"PYTHONPATH": str(Path(dpfy.__file__).parents[1])}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        line = self.process.stdout.readline()
        assert "serving on" in line, self.process.stderr.read()
        self.port = int(line.rsplit(":", 1)[1])

    def ask(self, rows) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/predict", body(rows), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())


def many(service: Service, clients: int, seed: int) -> int:
    """How many paid answers clients got that ask without a pause until the service is gone or
    refuses.
    """
    received = [0] * clients

    def one(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            while True:
                found = service.ask(rng.normal(size=(1, 6)))["answers"][0]
                received[number] += found["paid"]
                if found["label"] is None:
                    return
        except (OSError, http.client.HTTPException, ValueError):
            return

    threads = [threading.Thread(target=one, args=(k,)) for k in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(received)


def test_killed_under_concurrent_clients_it_never_answers_more_than_was_paid_for(tmp_path):
    """`python benchmarks/predict_serve.py` does it twenty times, with 32 clients."""
    voters(20, 2).save(tmp_path / "v", labels=["no", "yes"])
    flags = ["--answers", "900", "--epsilon", "40"]
    received, chance = 0, random.Random(3)
    for number in range(3):
        service = Service(tmp_path, *(flags if number == 0 else ()))
        if number < 2:
            timer = threading.Timer(
                chance.uniform(0.1, 0.6), service.process.send_signal, (signal.SIGKILL,)
            )
            timer.start()
        received += many(service, 8, number)
        if number == 2:
            assert service.ask([[9.0] * 6])["answers"][0]["label"] is None
            service.process.terminate()
        service.process.wait()
        spent = (
            json.loads((tmp_path / "run" / "checkpoint" / SPENT).read_text())["answer"]
            if received
            else 0
        )
        assert received <= spent <= 900
    assert received >= 900 - 2 * 64
    env = os.environ | {"PYTHONPATH": str(Path(dpfy.__file__).parents[1])}
    command = [
        sys.executable,
        "-P",
        "-m",
        "dpfy",
        "predict",
        "serve",
        str(tmp_path / "v"),
        "--run",
        str(tmp_path / "run"),
        "--finish",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert json.loads(done.stdout)["run"] == str(tmp_path / "run")
    assert all(finding.holds for finding in dpfy.verify(tmp_path / "run"))
