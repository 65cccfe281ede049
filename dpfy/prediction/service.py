"""Private answers over HTTP: one process, the ledger behind it. Needs the extra `serve` (starlette
and uvicorn).

    POST /predict   {"inputs": [[...], ...]}  ->  {"answers": [{"label": 3, "paid": true}, ...],
    "left": {"answer": 17}} GET  /about     what is promised: the claim, the guarantee, what is left

Both need the token (`dpfy.prediction.service`): Authorization: Bearer TOKEN.

Requests are handled one after the other: between the moment an answer is paid for and the moment it
is remembered nobody else is served.

Who may ask the service: a bearer token, a host of ours, no page of another site; and connections
that end in time.

A refusal is sent before anything of the question is read, and costs nothing of what was paid for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfy.core import check, errors, web
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.prediction.predictor import PrivatePredictor

VARIABLE = "DPFY_SERVE_TOKEN"
"""The environment variable that may hold the token."""
SHORTEST, LONGEST = 16, 4096
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""What an Authorization header can carry (RFC 6750)."""
MOST_DRAINED = 64 << 20
"""Bytes of a refused request that are still read. A client that is cut off while it sends may never
see the refusal.
"""
SILENT, BUSY = 30.0, 300.0
"""Seconds that a client may take to send a request or to read its answer, and that the answer may
take.
"""
CONNECTIONS = 256
"""At most so many at a time."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(32)


def given_token(file: Path | None) -> str | None:
    """The token of a file, or else of the environment; None where neither is given. An error never
    repeats it.
    """
    if file is not None:
        try:
            text = file.read_text(encoding="ascii")
        except (OSError, UnicodeError) as problem:
            why = getattr(problem, "strerror", None) or "it holds other letters than a token"
            raise InvalidInput("--token-file", str(file), f"cannot be read ({why})") from None
        return checked(text.strip(), "--token-file")
    text = os.environ.get(VARIABLE, "")
    return checked(text, VARIABLE) if text else None


def checked(token: str, name: str) -> str:
    """The token, if it is one."""
    if not SHORTEST <= len(token) <= LONGEST or not TOKEN.fullmatch(token):
        rule = (
            f"must have {SHORTEST} to {LONGEST} characters of A-Z a-z 0-9 . _ ~ + / - (make one: "
            f"openssl rand -hex 32)"
        )
        raise InvalidInput(name, f"{len(token)} characters", rule)
    return token


@dataclass(frozen=True)
class Access:
    """Who may ask. `token=None` lets everybody ask who reaches the address.

    Guarantees: a token is compared in constant time and never printed; a request for another host,
    or from a page of another site, is refused whether it has the token or not.
    """

    hosts: frozenset[str] = web.LOCAL
    token: str | None = field(default_factory=new_token, repr=False)

    def __post_init__(self) -> None:
        if self.token is not None:
            checked(self.token, "token")

    @classmethod
    def at(cls, host: str, token: str | None, more: Iterable[str] = ()) -> Access:
        """For a server that listens at `host`; `more` are other names that clients call it by."""
        names = set(web.LOCAL) | {web.canonical(host)}
        for name in more:
            found = web.host_name(
                f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name
            )
            if found is None or "*" in name:
                raise InvalidInput(
                    "--allow-host", name, "must be one host name or address, as in service.example"
                )
            names.add(found)
        return cls(frozenset(names), token)

    def problem(self, scope: Message) -> tuple[int, str] | None:
        """Why a request is refused: status and words; None where it is not."""
        held: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            held.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

        def header(name: str) -> str | None:
            return ", ".join(held[name]) if name in held else None

        # A client may also name the address that it reached: a name server cannot change what an
        # address means.
        here = {web.canonical(str(scope["server"][0]))} if scope.get("server") else set()
        if web.foreign_host(header("host"), self.hosts | here):
            return (
                403,
                "the Host header names another host; start the service with --allow-host NAME if "
                "it is one of its names",
            )
        if web.foreign_origin(header):
            return 403, "pages of other sites may not ask"
        if self.token is not None and not self._known(header("authorization")):
            return (
                401,
                "the request needs the token that the service was started with: Authorization: "
                "Bearer TOKEN",
            )
        return None

    def _known(self, header: str | None) -> bool:
        kind, _, sent = (header or "").partition(" ")
        assert self.token is not None
        same = secrets.compare_digest(_digest(sent.strip()), _digest(self.token))
        return same and kind.lower() == "bearer"


class Gate:
    """An ASGI application that refuses what `Access` refuses, and ends every request well.

    Guarantees: a refusal reaches its client although the client is still sending; a client that
    goes away, and a mistake of ours, leave nothing of the question in the log.
    """

    def __init__(self, application: Any, access: Access) -> None:
        self.application, self.access = application, access

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        exchange = _Exchange(receive, send)
        problem = self.access.problem(scope)
        if problem is not None:
            await exchange.refuse(*problem)
            return
        try:
            await self.application(scope, exchange.receive, exchange.send)
        except Exception as error:
            if not exchange.gone:
                print(
                    f"internal error: {type(error).__name__}; the request was not answered",
                    file=sys.stderr,
                    flush=True,
                )
                if not exchange.started:
                    await exchange.refuse(500, f"internal error: {type(error).__name__}")


class _Exchange:
    """Request and answer of one client. The answer is sent whole; then the rest of the request is
    read, and only then is it over.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.more, self.gone, self.started = True, False, False

    async def receive(self) -> Message:
        message = await self._receive()
        self.gone = message["type"] == "http.disconnect"
        self.more = not self.gone and bool(message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        self.started = True
        if not last or not self.more:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        read = 0
        while self.more and read < MOST_DRAINED:
            read += len((await self.receive()).get("body", b""))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, status: int, why: str) -> None:
        body = json.dumps({"error": why}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if status == 401:
            headers.append((b"www-authenticate", b'Bearer realm="dpfy"'))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def protocol() -> type[Any]:
    """Uvicorn's HTTP protocol, whose connections are limited in number and end in time."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Timed(H11Protocol):
        """Cut off where a request takes longer than `SILENT` to arrive, its answer longer than
        `BUSY`, or a client does not read.
        """

        _timer: Any = None
        _until = 0.0
        _answering = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._limit(SILENT)
            if len(self.connections) > CONNECTIONS:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            self._answering = False
            self._limit(SILENT)
            super().on_response_complete()

        def _limit(self, seconds: float) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._until = self.loop.time() + seconds
            self._timer = self.loop.call_at(self._until, self._late)

        def _late(self) -> None:
            behind = self.loop.time() - self._until
            if behind > 1:  # the service was busy with others and could not listen
                self._limit(min(behind, SILENT))
            elif (
                self.cycle
                and not self.cycle.response_complete
                and not self.cycle.more_body
                and not self._answering
            ):
                self._answering = True
                self._limit(BUSY)
            else:
                self.transport.abort()

    return Timed


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


JSON = "application/json"
MOST_BODY = 1 << 20
"""Bytes of one request."""
MOST_INPUTS = 1000
"""Questions of one request."""


def application(
    predictor: PrivatePredictor, labels: tuple[str, ...] = (), *, access: Access
) -> Any:
    """The ASGI application around a predictor. `labels` are the names of the classes, in their
    order; `access` says who may ask.

    Guarantees: only answers, what is left and public facts is sent; an error names the input
    that was sent and never the voters; a request that is refused spends nothing and leaves nothing
    of itself in the log.
    """
    try:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ImportError:
        raise errors.missing("dpfy serve start", "starlette") from None
    if labels and len(labels) != predictor.claim.classes:
        raise InvalidInput(
            "labels",
            f"{len(labels)} names",
            f"must be one for each of {predictor.claim.classes} classes",
        )
    known: dict[str, Any] = {}

    async def predict(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
            return JSONResponse({"error": f"a question is sent as Content-Type: {JSON}"}, 415)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY:
                error = {"error": f"a request must have at most {MOST_BODY} bytes"}
                return JSONResponse(error, 413, {"connection": "close"})
        try:
            found = predictor.answer_all(_inputs(bytes(body)))
        except DpfyError as problem:
            return JSONResponse({"error": str(problem)}, 400)
        told = [_named(answer.to_json(), labels) for answer in found]
        spent = all(
            answer.label is None and not answer.paid and answer.why_not for answer in found
        ) and bool(found)
        return JSONResponse(
            {"answers": told, "left": predictor.left()}, 429 if spent and _empty(predictor) else 200
        )

    async def about(request: Request) -> Response:
        if not known:  # accounting takes a second or two: meanwhile others are answered
            known.update(await asyncio.to_thread(public, predictor, labels))
        return JSONResponse(known | {"left": predictor.left()})

    routes = [Route("/predict", predict, methods=["POST"]), Route("/about", about)]
    return Gate(Starlette(routes=routes), access)


def public(predictor: PrivatePredictor, labels: tuple[str, ...]) -> dict[str, Any]:
    """What anybody may know: the claim and its guarantee."""
    from dpfy.accounting import epsilon

    claim = predictor.claim
    spent = epsilon(
        claim.event, claim.delta, adjacency=claim.adjacency, accountant=claim.accountant
    )
    facts = {
        "epsilon": spent,
        "delta": claim.delta,
        "unit": claim.unit.name,
        "adjacency": claim.adjacency.value,
    }
    facts |= {
        "accountant": claim.accountant,
        "boundary": claim.boundary,
        "rule": claim.tool.words,
        "voters": claim.voters,
    }
    return facts | {
        "features": predictor.voters.features,
        "labels": list(labels) or [str(k) for k in range(claim.classes)],
        "most": claim.most,
    }


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens; asked for before anything is charged, so that a port that is taken
    costs nothing.
    """
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise errors.missing("dpfy serve start", "uvicorn") from None
    check.integer("port", port, least=0, most=65535)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as problem:
        why = getattr(problem, "strerror", None) or type(problem).__name__
        raise InvalidInput(
            "host, port", f"{host}:{port}", f"cannot be listened on ({why})"
        ) from None


def serve(application: Any, held: socket.socket) -> None:
    """Answer until the process is told to stop (an interrupt or SIGTERM)."""
    import uvicorn

    settings = uvicorn.Config(
        application,
        http=protocol(),
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=int(SILENT),
        proxy_headers=False,
        server_header=False,
    )
    asyncio.run(uvicorn.Server(settings).serve([held]))


def _inputs(body: bytes) -> list[Any]:
    try:
        held = json.loads(body)
        inputs = held["inputs"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidInput(
            "body", "something else", 'must be JSON: {"inputs": [[numbers], ...]}'
        ) from None
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= MOST_INPUTS:
        raise InvalidInput(
            "inputs", type(inputs).__name__, f"must be a list of 1 to {MOST_INPUTS} rows of numbers"
        )
    return inputs


def _named(answer: dict[str, Any], labels: tuple[str, ...]) -> dict[str, Any]:
    if labels and answer["label"] is not None:
        return answer | {"label": labels[answer["label"]]}
    return answer


def _empty(predictor: PrivatePredictor) -> bool:
    """Whether some kind of release is used up."""
    return any(left == 0 for left in predictor.left().values())
