"""A forger who knows every format: changes bodies, card and files, and makes all digests, hashes
and chains fit again.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpfy.core.codec import canonical, digest
from dpfy.core.ledger import HashChain, mark_of
from dpfy.report import card as cards

Body = dict[str, Any]


def bodies_of(path: Path) -> list[Body]:
    """The bodies of a ledger's lines."""
    return [json.loads(line)["body"] for line in path.read_bytes().splitlines()]


def write_chain(path: Path, bodies: list[Any]) -> str:
    """A ledger of these bodies, whatever they say, with hashes and mark that fit; its head."""
    chain = HashChain()
    text = b"".join(chain.add(body) for body in bodies)
    path.write_bytes(text)
    mark = {"entries": len(bodies), "head": chain.head, "length": len(text)}
    mark_of(path).write_text(canonical(mark) + "\n")
    return chain.head


def rechain(path: Path, change: Callable[[list[Body]], object]) -> None:
    """Change the bodies of a ledger in place and write the chain that fits them."""
    bodies = bodies_of(path)
    change(bodies)
    write_chain(path, bodies)


def card_of(run: Path) -> dict[str, Any]:
    """The card of a run."""
    read: dict[str, Any] = json.loads((run / cards.NAME).read_text())
    return read


def put(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set a leaf, which must have had another value."""
    for key in path[:-1]:
        tree = tree[key]
    assert tree[path[-1]] != value
    tree[path[-1]] = value


def reseal(run: Path, card: dict[str, Any]) -> None:
    """Write an edited card with the digest that fits; the ledger is left alone."""
    content = {k: v for k, v in copy.deepcopy(card).items() if k != "digest"}
    (run / cards.NAME).write_bytes(cards.render(content | {"digest": digest(content)}))


def conform(
    run: Path, card: dict[str, Any], change: Callable[[list[Body]], object] = lambda bodies: None
) -> None:
    """Write an edited card, and a changed ledger whose end names that card and all files as they
    are now.
    """
    ledger = run / "ledger.jsonl"
    bodies = bodies_of(ledger)
    change(bodies)
    hashes = {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest() for name in bodies[-1]["files"]
    }
    before = {"head": write_chain(ledger, bodies[:-1]), "entries": len(bodies) - 1}
    reseal(
        run,
        card | {"ledger": before, "files": {n: h for n, h in hashes.items() if n in _names(card)}},
    )
    bodies[-1] |= {
        "card": hashlib.sha256((run / cards.NAME).read_bytes()).hexdigest(),
        "files": hashes,
    }
    write_chain(ledger, bodies)


def _names(card: dict[str, Any]) -> set[str]:
    """The files a card states, if it still states any."""
    return set(card["files"]) if isinstance(card.get("files"), dict) else set()
