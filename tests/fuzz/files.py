"""Mutated files: configurations, cards, ledgers, plans, metrics, checkpoints, data, audits; and the
verbs that read each.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commands import AUDITED, FOLDER
from harness import Case

OWN = "--out new"
IDX = '[data]\nkind = "idx"\npath = "images.idx"\nlabels_path = "labels.idx"\nclasses = 3\n'
REST = (
    '[model]\nname = "linear"\n[privacy]\nrecords = 24\nepsilon = 2.0\ndelta = '
    "1e-3\n[training]\nsteps = 2\nbatch_size = 10\n"
)
JOBS = {
    "idx.toml": IDX + REST,
    "npz.toml": '[data]\nkind = "npz"\npath = "arrays.npz"\nclasses = 2\nrange = [0.0, 90.0]\n'
    + REST,
    "parquet.toml": '[data]\nkind = "parquet"\npath = "table.parquet"\nschema = "schema.toml"\n'
    + REST,
    "gz.toml": '[data]\nkind = "csv"\npath = "data.csv.gz"\nschema = "schema.toml"\n' + REST,
    "text.toml": '[data]\nkind = "text"\npath = "text.txt"\nlength = 16\n'
    + REST.replace("24", "83"),
}
CARD_READERS = [
    "verify {run}",
    "report {run}",
    "report {run} --format md",
    "compare runs {run} other",
    "verify {run} --json",
]
TARGETS: dict[str, list[str]] = {
    "job.toml": [f"train job.toml {OWN}", f"train job.toml {OWN} --json"],
    "phases.toml": [
        "account --phases phases.toml --delta 1e-5",
        "account --phases phases.toml --delta 1e-5 --json",
    ],
    "schema.toml": [f"train job.toml {OWN}"],
    "data.csv": [f"train job.toml {OWN} --json", "predict run data.csv"],
    "data.csv.gz": [f"train gz.toml {OWN}"],
    "images.idx": [f"train idx.toml {OWN}"],
    "labels.idx": [f"train idx.toml {OWN} --json"],
    "arrays.npz": [f"train npz.toml {OWN}", "predict run arrays.npz --json"],
    "table.parquet": [f"train parquet.toml {OWN}"],
    "text.txt": [f"train text.toml {OWN}"],
    "card.json": [
        "verify card.json",
        "report card.json",
        "compare runs card.json other --json",
        "verify card.json --json",
    ],
    "people.jsonl": [
        "ledger show people.jsonl",
        "ledger show people.jsonl --delta 1e-6 --json",
        "ledger show people.jsonl --plot new.svg",
        "ledger show people.jsonl --json",
        f"train job.toml {OWN} --ledger people.jsonl --budget 9 --delta 1e-4 --json",
    ],
    "run/privacy.json": CARD_READERS,
    "run/plan.json": CARD_READERS,
    "run/ledger.jsonl": [
        *CARD_READERS,
        "ledger show run/ledger.jsonl",
        "ledger show run/ledger.jsonl --json",
    ],
    "run/metrics.jsonl": CARD_READERS,
    "run/config.toml": [*CARD_READERS[:2], "predict run arrays.npz"],
    "run/report.html": CARD_READERS[:1],
    "run/report.md": CARD_READERS[:1],
    "run/model.safetensors": [*CARD_READERS[:1], "predict run arrays.npz"],
    "audited/audit.json": [
        "verify audited",
        "report audited",
        "report audited --format md --json",
        "audit run audited --json",
    ],
    "audited/canaries.npz": ["audit run audited", "audit run audited --json", "verify audited"],
    "audited/model.safetensors": ["audit run audited", "verify audited"],
    "audited/plan.json": ["audit run audited --json"],
    "audited/config.toml": ["audit run audited --json"],
    "run/ledger.jsonl.head": CARD_READERS[:2],
    "people.jsonl.head": [
        f"train job.toml {OWN} --ledger people.jsonl --budget 9 --delta 1e-4",
        "verify people.jsonl --json",
        "ledger show people.jsonl",
        "ledger show people.jsonl --json",
    ],
    "other/signature.json": ["verify other", "verify other --key key.pem.pub --json"],
    "key.pem": ["sign run --key key.pem", "sign run --key key.pem --json"],
    "key.pem.pub": ["verify other --key key.pem.pub"],
    "unfinished/plan.json": ["train --resume --out unfinished --json"],
    "unfinished/ledger.jsonl": ["train --resume --out unfinished"],
    "unfinished/metrics.jsonl": ["train --resume --out unfinished"],
}
"""File to command lines. The files of an unfinished run's checkpoint are found in the sandbox."""
RESUME = ["train --resume --out unfinished", "train --resume --out unfinished --json"]
NUMBERS = ["1e999", "-1e999", "NaN", "Infinity", "-1", "0", "1e-320", "9" * 400, "9" * 5000, "0x" + "f" * 4000,
           "1e5000", "null", "true", '""', "[]",
           "{}", "1.5", "18446744073709551616", "1979-05-27", "inf", "nan"]  # fmt: skip
VALUES: list[Any] = [None, True, -1, 0, 1, 1e-320, 1e308, 10**400, "", "x" * 10_000, "\x1b[2J", "\ud800", [], {}, [[[]]], {"kind": "float"},  # noqa: E501
                     {"kind": "float", "value": "inf"}, {"kind": "float", "value": []}, {"kind": "plan"},
                     {"kind": "nothing"}, "infinity", -5, 2**63, 1.5]  # fmt: skip

Change = Callable[[Path], None]


def bytes_changed(rng: random.Random, content: bytes) -> bytes:
    """Bytes flipped, cut, doubled, put in."""
    held = bytearray(content or b"x")
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        at, size = rng.randrange(len(held) + 1), rng.choice([1, 1, 4, 64, 1024])
        what = rng.randrange(6)
        if what == 0 and held:
            held[min(at, len(held) - 1)] ^= 1 << rng.randrange(8)
        elif what == 1:
            held[at : at + size] = rng.randbytes(size)
        elif what == 2:
            del held[at : at + size]
        elif what == 3:
            held[at:at] = held[max(0, at - size) : at]
        elif what == 4:
            held[at:at] = rng.choice(
                [
                    b"\0",
                    b"\xff\xfe",
                    b"\n\n",
                    b"\r\n",
                    b"[" * 3000,
                    b'{"a":' * 3000,
                    b"\x1b]0;x\x07",
                    b"\xed\xa0\x80",
                    b",",
                ]
            )
        else:
            held[at:] = b""
        held = held or bytearray(b"x")
    return bytes(held)


def text_changed(rng: random.Random, content: bytes) -> bytes:
    """Numbers, words and lines replaced, removed, doubled and exchanged."""
    text = content.decode("utf-8", "surrogateescape")
    for _ in range(rng.choice([1, 1, 2, 4])):
        numbers = list(re.finditer(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|\"[^\"\n]*\"", text))
        lines = text.splitlines(keepends=True)
        if numbers and rng.random() < 0.6:
            one = rng.choice(numbers)
            text = text[: one.start()] + rng.choice(NUMBERS) + text[one.end() :]
        elif lines:
            a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
            what = rng.randrange(4)
            if what == 0:
                lines[a], lines[b] = lines[b], lines[a]
            elif what == 1:
                lines.insert(a, lines[b])
            elif what == 2:
                del lines[a]
            else:
                lines[a] = lines[a].rstrip("\n") + rng.choice(
                    [
                        "=",
                        "\r\n",
                        " = " + "[" * 2000,
                        "\u2028\n",
                        "\0\n",
                        "  # x\n",
                        "x" * 70_000 + "\n",
                    ]
                )
            text = "".join(lines)
    return text.encode("utf-8", "surrogateescape")


def tree_changed(rng: random.Random, tree: Any) -> Any:
    """A JSON value with one node replaced, removed or renamed."""
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in (
            list(node)
            if isinstance(node, dict)
            else range(len(node))
            if isinstance(node, list)
            else ()
        ):
            spots.append((node, key))
            walk(node[key])

    walk(tree)
    if not spots:
        return rng.choice(VALUES)
    node, key = rng.choice(spots)
    what = rng.random()
    if what < 0.7:
        node[key] = rng.choice(VALUES)
    elif what < 0.85:
        del node[key]
    elif isinstance(node, dict):
        node[rng.choice(["extra", "kind", "\x1b[0m"])] = node.pop(key)
    else:
        node.append(rng.choice(VALUES))
    return tree


def json_changed(rng: random.Random, content: bytes, *, signed: bool) -> bytes:
    """A node of a JSON file changed, and its digest made to fit (a card) where `signed`."""
    try:
        tree = tree_changed(rng, json.loads(content))
        if signed and isinstance(tree, dict) and "digest" in tree:
            from dpfy.core.codec import digest
            from dpfy.report import card

            rest = {k: v for k, v in tree.items() if k != "digest"}
            return card.render(rest | {"digest": digest(rest)})
        return json.dumps(tree).encode()
    except (ValueError, TypeError, KeyError, RecursionError, UnicodeError):
        return text_changed(rng, content)


def chain_changed(rng: random.Random, content: bytes) -> bytes:
    """A body of a ledger changed and the chain of hashes made to fit, as whoever holds the file can
    do.
    """
    from dpfy.core.codec import canonical

    try:
        entries = [json.loads(line) for line in content.splitlines()]
        bodies = tree_changed(rng, [entry["body"] for entry in entries])
        held, previous = b"", entries[0]["previous"]
        for body in bodies:
            head = hashlib.sha256((previous + canonical(body)).encode()).hexdigest()
            held += (canonical({"body": body, "hash": head, "previous": previous}) + "\n").encode()
            previous = head
        return held
    except (ValueError, TypeError, KeyError, RecursionError, UnicodeError, IndexError):
        return text_changed(rng, content)


def replaced(rng: random.Random, path: Path) -> str:
    """Something else in place of the file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    what = rng.choice(
        [
            "nothing",
            "empty",
            "folder",
            "pipe",
            "dangling",
            "loop",
            "link",
            "device",
            "deep",
            "deep json",
            "bomb",
            "zeros",
        ]
    )
    if what == "empty":
        path.write_bytes(b"")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what in ("dangling", "loop", "link", "device"):
        path.symlink_to(
            {
                "dangling": "nowhere",
                "loop": path.name,
                "link": "mine/notes.txt",
                "device": "/dev/zero",
            }[what]
        )
    elif what == "deep":
        path.write_bytes(b"a = " + b"[" * 100_000)
    elif what == "deep json":
        path.write_bytes(b'{"a":' * 100_000)
    elif what == "bomb":
        path.write_bytes(gzip.compress(bytes(400 << 20), 9))
    elif what == "zeros":
        path.write_bytes(bytes(1 << 20))
    return what


def mutate(rng: random.Random, path: Path) -> None:
    """Change the file at `path` in some way that fits it."""
    if not path.is_file() or path.is_symlink() or rng.random() < 0.12:
        replaced(rng, path)
        return
    content = path.read_bytes()
    if path.suffix == ".gz" and rng.random() < 0.5:
        path.write_bytes(gzip.compress(bytes_changed(rng, gzip.decompress(content))))
        return
    ways: list[Callable[[], bytes]] = [lambda: bytes_changed(rng, content)]
    if path.suffix in (".toml", ".csv", ".md", ".html", ".jsonl", ".json", ".head", ".pem", ".pub"):
        ways += [lambda: text_changed(rng, content)] * 2
    if path.suffix == ".json":
        ways += [
            lambda: json_changed(rng, content, signed=False),
            lambda: json_changed(rng, content, signed=True),
        ] * 2
    if path.name in ("ledger.jsonl", "people.jsonl"):
        ways += [lambda: chain_changed(rng, content)] * 3
        if rng.random() < 0.7:  # the mark beside it would tell at once
            path.with_name(f"{path.name}.head").unlink(missing_ok=True)
    path.write_bytes(rng.choice(ways)())


def cases(seed: int) -> Iterator[Case]:
    """Endless; the k-th case of a seed is always the same (given the same sandbox)."""
    number = 0
    names = sorted(TARGETS)
    while True:
        rng = random.Random(f"files {seed} {number}")
        number += 1
        if rng.random() < 0.15:
            name, words = "unfinished/checkpoint", rng.choice(RESUME)
        else:
            name = rng.choice(names)
            words = rng.choice(TARGETS[name])
        arguments = words.replace("{run}", "run").split()
        own = [
            f"{FOLDER}/{arguments[k + 1]}"
            for k, word in enumerate(arguments)
            if word in ("--out", "--plot")
        ]
        if arguments[0] == "report":
            place = arguments[1] if "." not in arguments[1] else ""
            own += [
                f"{FOLDER}/{place}/{form}".replace("//", "/")
                for form in ("report.html", "report.md")
            ]
        if arguments[:2] == ["audit", "run"]:
            own += [f"{FOLDER}/{arguments[2]}/{form}" for form in AUDITED]
        if arguments[0] == "sign":
            own.append(f"{FOLDER}/{arguments[1]}/signature.json")
        keeps = (
            (f"{FOLDER}/people.jsonl", f"{FOLDER}/people.jsonl.head")
            if "--ledger" in arguments
            else ()
        )
        keeps += (f"{FOLDER}/unfinished",) if "--resume" in arguments else ()
        yield Case(
            arguments, FOLDER, tuple(own), keeps, name, _change(name, rng.randrange(1 << 60))
        )


def _change(name: str, seed: int) -> Change:
    def change(folder: Path) -> None:
        rng = random.Random(seed)
        for job, text in JOBS.items():
            (folder / job).write_text(text)
        path = folder / name
        if path.is_dir() and not path.is_symlink() and name.endswith("checkpoint"):
            path = rng.choice(sorted(p for p in path.rglob("*") if p.is_file()) or [path])
        mutate(rng, path)

    return change
