"""Private answers over HTTP: one process, the ledger behind it. Needs the extra `serve` (starlette
and uvicorn).

    POST /predict   {"inputs": [[...], ...]}  ->  {"answers": [{"label": 3, "paid": true}, ...],
    "left": {"answer": 17}} GET  /about     what is promised: the claim, the guarantee, what is left

Both need the token (`dpfy.prediction.access`): Authorization: Bearer TOKEN.

Requests are handled one after the other: between the moment an answer is paid for and the moment it
is remembered nobody else is served.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from dpfy.core import check, errors
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.prediction import access as door
from dpfy.prediction.predictor import PrivatePredictor

JSON = "application/json"
MOST_BODY = 1 << 20
"""Bytes of one request."""
MOST_INPUTS = 1000
"""Questions of one request."""


def application(
    predictor: PrivatePredictor, labels: tuple[str, ...] = (), *, access: door.Access
) -> Any:
    """The ASGI application around a predictor. `labels` are the names of the classes, in their
    order; `access` says who may ask.

    Guarantees: nothing but answers, what is left and public facts is sent; an error names the input
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
    return door.Gate(Starlette(routes=routes), access)


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
    """A socket that listens; asked for before anything is billed, so that a port that is taken
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
        http=door.protocol(),
        ws="none",
        log_level="error",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=int(door.SILENT),
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
