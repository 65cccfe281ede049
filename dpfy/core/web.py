"""Which host and origin an HTTP request names. A browser writes both headers itself: a page of
somebody else cannot change them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from ipaddress import ip_address

HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]*)?")
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine that no name server can give to another one."""
OWN_SITES = ("same-origin", "none")
"""What Sec-Fetch-Site says of a request by a page of this server, and of one by a person."""


def host_name(header: str) -> str | None:
    """The name in a Host header in small letters, without port, brackets and a final dot; None
    where there is none.
    """
    found = HOST.fullmatch(header)
    return (canonical(found["address"] or found["name"]) or None) if found else None


def canonical(name: str) -> str:
    """One spelling of a host name or an address."""
    name = name.lower().rstrip(".")
    try:
        return str(ip_address(name))
    except ValueError:
        return name


def foreign_host(header: str | None, allowed: Iterable[str]) -> bool:
    """Whether a request names a host that this server does not have: then a foreign name was made
    to point here (DNS rebinding).
    """
    name = host_name(header or "")
    return name is None or name not in allowed


def foreign_origin(header: Callable[[str], str | None]) -> bool:
    """Whether a page of another site sent the request. `header` gives the value of a header by its
    name.
    """
    origin, host = header("origin"), header("host")
    if origin is not None and origin.lower() not in {
        f"{scheme}://{host}".lower() for scheme in ("http", "https")
    }:
        return True
    if (
        header("sec-fetch-mode") == "navigate"
    ):  # a person followed a link: the page that had it cannot read the answer
        return False
    return (header("sec-fetch-site") or "none").lower() not in OWN_SITES
