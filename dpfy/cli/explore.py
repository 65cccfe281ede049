"""`dpfy plan explore`: a local page to plan a run before touching data."""

from __future__ import annotations

from typing import Annotated

import typer

from dpfy.cli.output import tell


def explore(
    port: Annotated[
        int, typer.Option(help="Port on 127.0.0.1 (default: any free one).", min=0, max=65535)
    ] = 0,
    show: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as one JSON object.")
    ] = False,
) -> None:
    """Plan a run on a local page: sliders for records, batch, epochs, epsilon and delta; noise,
    tier and attacker's odds at once.

    The page is served to this machine alone (127.0.0.1), at an address with a random token; it
    loads nothing from anywhere and reads no data. Stop it with Ctrl-C.

    Example: dpfy plan explore --port 0
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.report.server import Explorer

    try:
        server = Explorer(port)
    except OSError as problem:
        raise InvalidInput("--port", port, f"cannot be used ({problem.strerror})") from None
    with server:
        tell({"address": server.address}, server.address, as_json=as_json)
        if show:
            import webbrowser

            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
