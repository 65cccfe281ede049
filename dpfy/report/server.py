"""The explorer's server: the standard library's, on 127.0.0.1 alone, behind a random token. Nothing
is stored and no data is read.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dpfy.core import web
from dpfy.core.errors import DpfyError
from dpfy.report import explorer
from dpfy.report.html_page import environment

HOME = "127.0.0.1"
CONNECTIONS = 32
"""At most so many at a time; a browser opens six."""
SILENT, BUSY = 10.0, 300.0
"""Seconds that a client may take to send a request, and that its answer may take."""
FIELDS = 16
MOST_DRAINED = 64 << 20
"""Bytes of a refused request that are still read."""

ANSWERS: dict[str, Callable[[explorer.Wish], dict[str, Any]]] = {
    "answer": explorer.answer,
    "attacker": explorer.attacker,
    "batches": explorer.batches,
    "mechanisms": lambda wish: explorer.mechanisms(wish, optimised=False),
    "all-mechanisms": lambda wish: explorer.mechanisms(wish, optimised=True),
}


class Explorer(ThreadingHTTPServer):
    """Serves the page and its figures at `address`, to this machine only.

    Guarantees: listens on the loopback interface alone; every path that does not begin with the
    token is refused, and so is a request whose Host is another name (a foreign page cannot reach it
    by rebinding a name), or that a page of another site sent. A client that keeps silent, or sends
    a request byte by byte, is cut off after ten seconds, and there are never more than 32.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        self.until: dict[socket.socket, float] = {}
        super().__init__((HOME, port), _Handler)
        # The first answer pays for imports; begin with it while the page is on its way.
        threading.Thread(target=explorer.answer, args=(explorer.START,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, if there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self.until[request] = time.monotonic() + SILENT
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve the connection, then make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.until.pop(request, None)
            self._room.release()

    def service_actions(self) -> None:
        """Cut off who is too slow; called twice a second."""
        now = time.monotonic()
        for request in [request for request, until in list(self.until.items()) if until < now]:
            self.until.pop(request, None)
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Quiet: a client that goes away is no news."""

    @property
    def address(self) -> str:
        """Where the page is, token included."""
        return f"http://{HOME}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    server_version = "dpfy"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = SILENT

    def handle_one_request(self) -> None:
        """One request, which must arrive in time."""
        self.server.until[self.connection] = time.monotonic() + SILENT
        super().handle_one_request()

    def do_GET(self) -> None:
        """The page, or one of its answers."""
        self.server.until[self.connection] = time.monotonic() + BUSY
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self._end(HTTPStatus.BAD_REQUEST, "refused: a question has no body\n")
            return
        parts = urlsplit(self.path)
        token, _, rest = parts.path.lstrip("/").partition("/")
        hosts = {f"{HOME}:{self.server.server_port}", f"localhost:{self.server.server_port}"}
        foreign = self.headers.get("Host") not in hosts or web.foreign_origin(self.headers.get)
        if foreign or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "refused: the address needs its token\n")
        elif rest == "" and parts.path.endswith("/"):
            self._page()
        elif rest in ANSWERS:
            self._answer(ANSWERS[rest], parts.query)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page\n")

    def _other(self) -> None:
        """Nothing is sent to the page: only questions are answered."""
        self._end(
            HTTPStatus.METHOD_NOT_ALLOWED, "refused: only GET is answered\n", {"Allow": "GET"}
        )

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _other

    def _end(self, status: HTTPStatus, text: str, headers: dict[str, str] | None = None) -> None:
        """Refuse, then read the rest of the request for a while: a client that is cut off while it
        sends may never see the answer.
        """
        self.close_connection = True
        self._send(status, "text/plain", text, {"Connection": "close", **(headers or {})})
        self.server.until[self.connection] = time.monotonic() + SILENT
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            read = 0
            while read < MOST_DRAINED and (part := self.rfile.read1(1 << 16)):
                read += len(part)

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
            f"connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page = environment().get_template("explorer.html.j2").render(nonce=nonce)
        self._send(HTTPStatus.OK, "text/html", page, {"Content-Security-Policy": policy})

    def _answer(self, make: Callable[[explorer.Wish], dict[str, Any]], query: str) -> None:
        started, status = time.perf_counter(), HTTPStatus.OK
        try:
            found = make(explorer.Wish.parse(dict(parse_qsl(query, max_num_fields=FIELDS))))
            text = json.dumps(
                found | {"milliseconds": round(1000 * (time.perf_counter() - started), 1)},
                allow_nan=False,
            )
        except DpfyError as problem:
            text = json.dumps({"problem": str(problem)})
        except (ArithmeticError, ValueError, MemoryError):
            text = json.dumps(
                {"problem": "these numbers are too large or too small to compute with"}
            )
        except (
            Exception
        ) as problem:  # a mistake of ours: the page says so, and the connection is kept
            status, text = (
                HTTPStatus.INTERNAL_SERVER_ERROR,
                json.dumps({"problem": f"internal error: {type(problem).__name__}"}),
            )
        self._send(status, "application/json", text)

    def _send(
        self, status: HTTPStatus, kind: str, text: str, headers: dict[str, str] | None = None
    ) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in {
            "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", **(headers or {}),  # noqa: E501
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: addresses hold the token."""
