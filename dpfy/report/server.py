"""The explorer's server: the standard library's, on 127.0.0.1 alone, behind a random token. Nothing is stored and no data is read."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dpfy.core.errors import DpfyError
from dpfy.report import explorer
from dpfy.report.html import environment

HOME = "127.0.0.1"

ANSWERS: dict[str, Callable[[explorer.Wish], dict[str, Any]]] = {
    "answer": explorer.answer,
    "attacker": explorer.attacker,
    "batches": explorer.batches,
    "mechanisms": lambda wish: explorer.mechanisms(wish, optimised=False),
    "all-mechanisms": lambda wish: explorer.mechanisms(wish, optimised=True),
}


class Explorer(ThreadingHTTPServer):
    """Serves the page and its figures at `address`, to this machine only.

    Guarantees: listens on the loopback interface alone; every path that does not begin with the token is refused, and so is a request
    whose Host is another name (a foreign page cannot reach it by rebinding a name).
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        super().__init__((HOME, port), _Handler)
        # The first answer pays for imports; begin with it while the page is on its way.
        threading.Thread(target=explorer.answer, args=(explorer.START,), daemon=True).start()

    @property
    def address(self) -> str:
        """Where the page is, token included."""
        return f"http://{HOME}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: Explorer
    server_version = "dpfy"
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The page, or one of its answers."""
        parts = urlsplit(self.path)
        token, _, rest = parts.path.lstrip("/").partition("/")
        hosts = {f"{HOME}:{self.server.server_port}", f"localhost:{self.server.server_port}"}
        if self.headers.get("Host") not in hosts or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "refused: the address needs its token\n")
        elif rest == "" and parts.path.endswith("/"):
            self._page()
        elif rest in ANSWERS:
            self._answer(ANSWERS[rest], dict(parse_qsl(parts.query)))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page\n")

    def _page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page = environment().get_template("explorer.html.j2").render(nonce=nonce)
        self._send(HTTPStatus.OK, "text/html", page, {"Content-Security-Policy": policy})

    def _answer(self, make: Callable[[explorer.Wish], dict[str, Any]], fields: dict[str, str]) -> None:
        started = time.perf_counter()
        try:
            found = make(explorer.Wish.parse(fields))
        except DpfyError as problem:
            found = {"problem": str(problem)}
        found = found | {"milliseconds": round(1000 * (time.perf_counter() - started), 1)}
        self._send(HTTPStatus.OK, "application/json", json.dumps(found))

    def _send(self, status: HTTPStatus, kind: str, text: str, headers: dict[str, str] | None = None) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in {
            "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", **(headers or {}),
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: addresses hold the token."""
