"""Who may ask the service, on real sockets: token, host, origin, sizes and slow clients. A refused
request spends nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from electorate import voters

import dpfy
from dpfy.core import web
from dpfy.core.errors import InvalidInput
from dpfy.prediction import service
from dpfy.prediction.service import MOST_BODY, Access
from dpfy.runs.mark import SPENT

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
TOKEN = "a-token-of-the-tests-0123456789"
SECRET = 8.7654321
QUESTION = json.dumps({"inputs": [[SECRET] * 6]}).encode()
JSON = {"Content-Type": "application/json"}
KNOWN = {"Authorization": f"Bearer {TOKEN}"} | JSON


class Server:
    """The command as a process."""

    def __init__(self, folder: Path, *flags: str, token: str | None = TOKEN) -> None:
        self.run, self.err = folder / "run", folder / "err"
        voters(20, 2).save(folder / "v", labels=["no", "yes"])
        command = [
            sys.executable,
            "-P",
            "-m",
            "dpfy",
            "predict",
            "serve",
            str(folder / "v"),
            "--run",
            str(self.run),
            "--port",
            "0",
        ]
        env = os.environ | {"PYTHONPATH": str(Path(dpfy.__file__).parents[1])}
        env.pop(service.VARIABLE, None)
        with self.err.open("w") as err:
            flags = ("--answers", "50", "--epsilon", "20", *flags)
            env |= {service.VARIABLE: token} if token else {}
            self.process = subprocess.Popen(
                [*command, *flags], stdout=subprocess.PIPE, stderr=err, text=True, env=env
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "serving on" in line, self.err.read_text()
        self.port = int(line.rsplit(":", 1)[1])

    def ask(
        self, method="POST", path="/predict", body=QUESTION, headers=KNOWN
    ) -> tuple[int, dict, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
            return (
                reply.status,
                json.loads(content) if content.startswith(b"{") else {},
                reply.headers,
            )

    def left(self) -> int:
        return self.ask("GET", "/about", None)[1]["left"]["answer"]

    def end(self) -> str:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        return self.process.stdout.read() + self.err.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("service"), "--allow-host", "answers.example")
    yield made
    made.end()


@contextlib.contextmanager
def spends_nothing(server):
    file, before = server.run / "checkpoint" / SPENT, server.left()
    on_disk = file.read_bytes() if file.exists() else None
    yield
    assert server.left() == before
    assert (file.read_bytes() if file.exists() else None) == on_disk


def without(headers, *names):
    return {name: value for name, value in headers.items() if name not in names}


def test_without_the_token_nothing_is_answered(server):
    wrong = [
        None,
        "",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN}x",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN.upper()}",
    ]
    with spends_nothing(server):
        for value in wrong:
            headers = JSON | ({} if value is None else {"Authorization": value})
            for method, path in (
                ("POST", "/predict"),
                ("GET", "/about"),
                ("GET", "/elsewhere"),
                ("DELETE", "/predict"),
            ):
                status, held, sent = server.ask(method, path, QUESTION, headers)
                assert (status, set(held)) == (401, {"error"}), (value, method, path)
                assert sent["WWW-Authenticate"].startswith("Bearer")
                assert TOKEN not in str(held)
    assert (
        server.ask(headers=without(KNOWN, "Authorization") | {"authorization": f"bearer {TOKEN}"})[
            0
        ]
        == 200
    )


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "answers.example@evil.example",
        "[::1",
        "localhost:x",
    ],
)
def test_a_foreign_host_is_refused_although_the_token_is_right(server, host):
    """DNS rebinding: a page's own host name is made to point at this machine."""
    with spends_nothing(server):
        assert server.ask(headers=KNOWN | {"Host": host})[0] in (400, 403)


def test_every_name_of_the_service_is_a_host(server):
    for name in (
        "localhost",
        "LOCALHOST",
        "127.0.0.1",
        "[::1]",
        "answers.example",
        "Answers.Example.",
        "answers.example:443",
    ):
        for host in {name, f"{name}:{server.port}"} if ":443" not in name else {name}:
            assert server.ask("GET", "/about", None, KNOWN | {"Host": host})[0] == 200, host


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": ""}, {"Origin": "http://localhost:1"}, {"Origin": "https://127.0.0.1"},  # noqa: E501
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}],  # noqa: E501
    ids=str,
)  # fmt: skip
def test_pages_of_other_sites_are_refused(server, headers):
    with spends_nothing(server):
        status, _, sent = server.ask(headers=KNOWN | headers)
        assert status == 403
        assert not [name for name in sent if name.lower().startswith("access-control")]
        status, _, sent = server.ask(
            "OPTIONS", "/predict", None, headers | {"Access-Control-Request-Method": "POST"}
        )
        assert status == 403
        assert not [name for name in sent if name.lower().startswith("access-control")]


def test_a_page_of_the_service_itself_may_ask(server):
    host = f"127.0.0.1:{server.port}"
    assert (
        server.ask(headers=KNOWN | {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"})[0]
        == 200
    )
    behind_a_proxy = {"Host": "answers.example", "Origin": "https://answers.example"}
    assert server.ask(headers=KNOWN | behind_a_proxy)[0] == 200


def test_other_kinds_of_requests_are_refused_by_their_own_status(server):
    plain = without(KNOWN, "Content-Type")
    with spends_nothing(server):
        for kind in (
            None,
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/jsonp",
            "multipart/form-data; boundary=x",
        ):
            assert server.ask(headers=plain | ({"Content-Type": kind} if kind else {}))[0] == 415, (
                kind
            )
        for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD"):
            assert server.ask(method)[0] == 405, method
        assert server.ask("POST", "/about")[0] == 405
        assert server.ask("POST", "/elsewhere")[0] == 404
        assert server.ask(body=b"no json")[0] == 400
    assert server.ask(headers=plain | {"Content-Type": "Application/JSON; charset=utf-8"})[0] == 200


def _urllib(server, size, headers):
    """As many scripts ask: the connection ends with the answer, and the body is sent before
    anything is read.
    """
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/predict", b"x" * size, headers
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return refused.value.code


@pytest.mark.parametrize("size", [MOST_BODY + 1, 6_000_000, 30_000_000])
def test_a_body_that_is_too_large_is_told_so(server, size):
    with spends_nothing(server):
        for _ in range(3):
            assert _urllib(server, size, KNOWN) == 413
            assert _urllib(server, size, JSON) == 401
            assert _urllib(server, size, KNOWN | {"Content-Type": "text/plain"}) == 415
            assert server.ask(body=b"x" * size)[0] == 413


def test_a_large_body_of_unknown_length_is_told_so(server):
    with (
        spends_nothing(server),
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as client,
    ):
        lines = [
            "POST /predict HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            "Transfer-Encoding: chunked",
            "Connection: close",
        ]
        lines += [f"{name}: {value}" for name, value in KNOWN.items()]
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(100):
            client.sendall(chunk)
        client.sendall(b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def _head(server, length=100) -> bytes:
    lines = [
        f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{server.port}",
        *(f"{k}: {v}" for k, v in KNOWN.items()),
    ]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_clients_that_go_away_leave_no_word(tmp_path):
    server, chance = Server(tmp_path), random.Random(5)
    with spends_nothing(server):
        for _ in range(40):
            whole = _head(server, 10 * len(QUESTION)) + QUESTION
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(whole[: chance.randrange(1, len(whole))])
            if chance.random() < 0.5:  # a reset instead of an end
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        for junk in (
            b"\x16\x03\x01\x02",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            os.urandom(3000),
        ):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(junk + b"\r\n\r\n")
    for _ in range(20):  # gone before they read what they paid for
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(_head(server, len(QUESTION)) + QUESTION)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    assert server.ask()[0] == 200
    said = server.end()
    lines = [line for line in said.splitlines() if line and not line.startswith("stopped; left: ")]
    assert lines == [], said


def test_the_log_holds_nothing_of_a_question(tmp_path, server):
    for body in (
        QUESTION,
        QUESTION[:-1],
        b'{"inputs": [["8.7654321"]]}',
        json.dumps({"inputs": [[SECRET]]}).encode(),
    ):
        server.ask(body=body)
        server.ask(body=body, path=f"/predict?x={SECRET}")
        server.ask("GET", f"/{SECRET}", None)
    assert str(SECRET) not in server.err.read_text()
    assert TOKEN not in server.err.read_text()


def _called(gate, headers=KNOWN, body=QUESTION):
    """One request without a server."""
    sent: list[dict] = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    held = [
        (name.lower().encode(), value.encode())
        for name, value in ({"Host": "localhost"} | headers).items()
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "raw_path": b"/predict",
        "query_string": b"",
        "headers": held,
    }
    asyncio.run(gate(scope, receive, send))
    return sent[0]["status"]


def test_a_mistake_of_ours_is_logged_without_the_question(capsys):
    class Broken:
        claim = None

        def answer_all(self, inputs):
            raise RuntimeError(f"cannot divide {inputs}")

    from dpfy.prediction.service import application

    assert _called(application(Broken(), access=Access(token=TOKEN))) == 500
    said = capsys.readouterr().err
    assert said == "internal error: RuntimeError; the request was not answered\n"


def test_a_new_token_is_shown_once_and_needed(tmp_path):
    server = Server(tmp_path, token=None)
    said = server.err.read_text()
    token = re.search(r"\): (\S+)$", said.strip())
    assert token
    assert len(token[1]) >= 40
    assert server.ask()[0] == server.ask(headers=JSON | {"Authorization": "Bearer "})[0] == 401
    assert server.ask(headers=JSON | {"Authorization": f"Bearer {token[1]}"})[0] == 200
    ended = server.end()
    assert ended.count(token[1]) == 1
    held = [
        file
        for file in server.run.rglob("*")
        if file.is_file() and token[1].encode() in file.read_bytes()
    ]
    assert held == []


def test_a_token_of_a_file_and_none_at_all(tmp_path):
    (tmp_path / "token").write_text("t" * 40 + "\n")
    server = Server(
        tmp_path, "--token-file", str(tmp_path / "token")
    )  # the file counts, not the variable
    assert server.ask()[0] == 401
    assert server.ask(headers=JSON | {"Authorization": "Bearer " + "t" * 40})[0] == 200
    assert "t" * 40 not in server.end()
    (tmp_path / "open").mkdir()
    server = Server(tmp_path / "open", "--no-token", token=None)
    assert server.ask(headers=JSON)[0] == 200
    assert server.ask(headers=JSON | {"Host": "evil.example"})[0] == 403
    assert server.ask(headers=JSON | {"Origin": "http://evil.example"})[0] == 403
    assert "everybody who reaches" in server.end()


def test_slow_clients_are_cut_off_and_others_are_served(monkeypatch, tmp_path):
    """Silent, byte by byte in head and body, one that never ends a refused body, and one that never
    reads.
    """
    from dpfy.prediction import service

    monkeypatch.setattr(service, "SILENT", 1.0)
    monkeypatch.setattr(service, "CONNECTIONS", 12)

    class Quick:
        claim = None

        def answer_all(self, inputs):
            return []

        def left(self):
            return {"answer": 1}

    listening = service.listening("127.0.0.1", 0)
    app = service.application(Quick(), access=Access(token=TOKEN))
    threading.Thread(target=service.serve, args=(app, listening), daemon=True).start()
    port = listening.getsockname()[1]
    head = _head(type("At", (), {"port": port}), 10_000_000)
    clients = {}
    for name, first in (
        ("silent", b""),
        ("head", b"POST /pre"),
        ("body", head),
        ("refused", head.replace(TOKEN.encode(), b"x" * 20)),
    ):
        clients[name] = socket.create_connection(("127.0.0.1", port))
        clients[name].sendall(first)
    until, gone = time.monotonic() + 60, set()
    while len(gone) < len(clients):
        assert time.monotonic() < until, set(clients) - gone
        for name, client in clients.items():
            client.setblocking(False)
            try:
                if name != "silent":
                    client.send(b"x")
                while client.recv(1000):
                    pass
                gone.add(name)
            except BlockingIOError:
                pass
            except OSError:
                gone.add(name)
        time.sleep(0.1)
    flood = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    served = 0
    while not served:
        assert time.monotonic() < until
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("POST", "/predict", json.dumps({"inputs": [[1]]}), KNOWN)
            served += connection.getresponse().status == 200
    for client in [*flood, *clients.values()]:
        client.close()


@pytest.mark.parametrize(
    "token",
    [
        "",
        "short",
        "x" * 15,
        "x" * 5000,
        "a token with spaces in it",
        "ümlaut-ümlaut-ümlaut",
        "x" * 20 + "\nX-Evil: 1",
    ],
)
def test_what_is_no_token_is_refused_and_not_repeated(token, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(token)
    with pytest.raises(InvalidInput) as refused:
        service.given_token(tmp_path / "token")
    assert len(token) < 5 or token not in str(refused.value)
    with pytest.raises(InvalidInput):
        Access(token=token)
    if token:
        monkeypatch.setenv(service.VARIABLE, token)
        with pytest.raises(InvalidInput):
            service.given_token(None)


def test_tokens_are_new_each_time_and_hidden():
    assert len({Access().token for _ in range(50)}) == 50
    made = Access()
    assert str(made.token) not in repr(made)


@pytest.mark.parametrize("name", ["", "*", "*.example", "http://a", "a/b", "a b@c"])
def test_what_is_no_host_name_cannot_be_allowed(name):
    with pytest.raises(InvalidInput, match="--allow-host"):
        Access.at("127.0.0.1", TOKEN, [name])


def test_hosts_have_one_spelling():
    assert Access.at("0:0:0:0:0:0:0:1", TOKEN, ["A.Example.", "fe80::1"]).hosts == web.LOCAL | {
        "a.example",
        "fe80::1",
    }
    rng = np.random.default_rng(0)
    letters = list("abz01-.:[]@/# \\%é")
    for _ in range(3000):
        text = "".join(rng.choice(letters, rng.integers(0, 12)))
        name = web.host_name(text)
        assert name is None or (name and not set(name) & set("@/# []"))
