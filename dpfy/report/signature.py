"""Signatures: who answers for a run, and what a witness saw of its ledger while it lasted. Ed25519,
by the cryptography package.

A signed file is ``{"signatures": [{"key": k, "signature": s}], "statement": {...}}``: each s is the
signature, by the key k, of the statement as canonical JSON, whose field `format` says what it is
about. `signature.json` in a run folder states the head of the ledger and the hash of the report;
through the end of the run in the ledger that is every file. A published head states a ledger's head
alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfy.core import storage
from dpfy.core.codec import canonical
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.core.storage import PRIVATE_MODE, PUBLIC_MODE, sha256_of, sync_folder, write_atomically
from dpfy.report import card as cards

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NAME = "signature.json"
CHECK = "signature"
RUN, HEAD = "dpfy-run-1", "dpfy-head-1"
HEX, SIGNATURE = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{128}")
MOST_KEY = 1 << 16


@dataclass(frozen=True)
class Signed:
    """A statement and who signed it: public keys and signatures, in hex."""

    name: str
    statement: dict[str, Any]
    signatures: dict[str, str]

    @property
    def head(self) -> str:
        """The head of the ledger that is given."""
        return str(self.statement["head"])

    def render(self) -> bytes:
        """The one textual form."""
        rows = [{"key": key, "signature": value} for key, value in sorted(self.signatures.items())]
        return (canonical({"signatures": rows, "statement": self.statement}) + "\n").encode()

    def check(self) -> None:
        """Raise `Corrupt` unless every signature is one of its key over this statement."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        for key, value in self.signatures.items():
            try:
                Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(
                    bytes.fromhex(value), _message(self.statement)
                )
            except (InvalidSignature, ValueError):
                raise Corrupt(
                    self.name, f"the signature of key {key[:16]} is not valid for what it states"
                ) from None


def new_key(path: Path) -> Path:
    """Make a key pair: the private key at `path`, for its owner's eyes only, and the public one at
    ``path.pub``, which is returned.

    Guarantees: neither file is ever overwritten; the private one never has a wider mode than 0600.
    """
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, public = Ed25519PrivateKey.generate(), path.with_name(path.name + ".pub")
    secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    shown = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    for file in (path, public):
        if os.path.lexists(file):
            raise InvalidInput(
                "--new-key", str(file), "is there already; a key is never overwritten"
            )
    _create("--new-key", path, secret, PRIVATE_MODE)
    _create("--new-key", public, shown, PUBLIC_MODE)
    return public


def sign_run(run: Path, key: Path) -> Signed:
    """Sign a finished run: its report and the head of its ledger. Signatures of others over the same
    stay beside it.
    """
    statement, held = _statement(run), None
    if os.path.lexists(run / NAME):
        held = _read(run / NAME, RUN)
    others = held.signatures if held is not None and held.statement == statement else {}
    signed = _signed(NAME, statement, key, others)
    signed.check()
    write_atomically(run / NAME, signed.render())
    return signed


def sign_head(ledger: Path, key: Path | None) -> Signed:
    """The head of a ledger, to be published or given to a witness while runs last; signed, if there
    is a key.
    """
    held = Ledger.read(ledger)
    stated = {
        "format": HEAD,
        "ledger": held.book.identity,
        "head": held.head,
        "entries": len(held.bodies),
    }
    return Signed(ledger.name, stated, {}) if key is None else _signed(ledger.name, stated, key, {})


def write_new(path: Path, signed: Signed) -> None:
    """Write a statement to a file that is not there yet."""
    _create("--out", path, signed.render(), PUBLIC_MODE)


def of_run(run: Path) -> Signed | None:
    """The signature of a run, None if there is none; `Corrupt` if it is not valid, or of something
    else than the run.
    """
    if not os.path.lexists(run / NAME):
        return None
    signed = _read(run / NAME, RUN)
    if signed.statement != _statement(run):
        raise Corrupt(
            NAME,
            "is the signature of another report or another state of the ledger; sign again what is "
            "there now",
        )
    signed.check()
    return signed


def published(head: str) -> Signed:
    """A head that was published: its 64 hexadecimal digits, or the file that holds it with
    signatures, which are not checked here.
    """
    if HEX.fullmatch(head):
        return Signed("--head", {"head": head}, {})
    if not Path(head).is_file():
        raise InvalidInput(
            "--head", head, "must be 64 hexadecimal digits, or the file that dpfy sign --head wrote"
        )
    return _read(Path(head), HEAD)


def judged(run: Signed | None, head: Signed | None, signers: Mapping[str, str]) -> tuple[bool, str]:
    """Whether each of these public keys signed the run or its published head; without keys, what
    signatures there are.
    """
    if head is not None:
        head.check()
    held = {
        key: signed.name
        for signed in (head, run)
        if signed is not None
        for key in signed.signatures
    }
    for name, key in signers.items():
        if key not in held:
            return False, f"there is no signature by {name}" + (
                "" if run else f": {NAME} is missing"
            )
    if signers:
        return True, ", ".join(f"{held[key]} by {name}" for name, key in signers.items())
    whose = ", ".join(key[:16] for key in sorted(held))
    return (
        True,
        f"valid for key {whose}; whose key that is, only --key can tell"
        if held
        else "nobody signed (dpfy sign)",
    )


def _statement(run: Path) -> dict[str, Any]:
    ledger = Ledger.read(run / "ledger.jsonl")
    card = {"card": sha256_of(run / cards.NAME)}
    return {
        "format": RUN,
        "ledger": ledger.book.identity,
        "head": ledger.head,
        "entries": len(ledger.bodies),
    } | card


def _signed(name: str, statement: dict[str, Any], key: Path, others: dict[str, str]) -> Signed:
    secret = _private(key)
    return Signed(
        name,
        statement,
        others
        | {secret.public_key().public_bytes_raw().hex(): secret.sign(_message(statement)).hex()},
    )


def _message(statement: dict[str, Any]) -> bytes:
    return canonical(statement).encode()


def _read(file: Path, form: str) -> Signed:
    try:
        raw = storage.content("signature", file, most=MOST_KEY)
        read = storage.parsed_json(file.name, raw)
        signatures = {row["key"]: row["signature"] for row in read["signatures"]}
        hashes = [*signatures, read["statement"]["head"]]
        if read["statement"]["format"] != form or not all(HEX.fullmatch(text) for text in hashes):
            raise TypeError
        if not all(SIGNATURE.fullmatch(text) for text in signatures.values()):
            raise TypeError
        signed = Signed(file.name, dict(read["statement"]), signatures)
        if signed.render() != raw or (form == RUN and not signatures):
            raise ValueError
    except InvalidInput as problem:
        raise Corrupt(file.name, problem.rule) from None
    except (Corrupt, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise Corrupt(file.name, f"is not a signature of the form {form}") from None
    return signed


def _private(file: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content = storage.content("--key", file, most=MOST_KEY)
    if stat.S_IMODE(os.stat(file).st_mode) & 0o077:
        raise InvalidInput(
            "--key",
            str(file),
            "can be read by others than its owner; chmod 600 it, or make a new one (--new-key)",
        )
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidInput(
            "--key",
            str(file),
            "must be a private Ed25519 key in PEM form, without a password (--new-key makes one)",
        )
    return key


def public(file: Path) -> str:
    """The public key in a PEM file, in hex."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    content = storage.content("--key", file, most=MOST_KEY)
    try:
        key = load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise InvalidInput("--key", str(file), "must be a public Ed25519 key in PEM form")
    return key.public_bytes_raw().hex()


def _create(field: str, path: Path, content: bytes, mode: int) -> None:
    try:
        handle = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode
        )
    except OSError as problem:
        raise InvalidInput(field, str(path), storage.why(problem, "cannot be written")) from None
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, mode)
        file.write(content)
        file.flush()
        os.fsync(handle)
    sync_folder(path.parent)
