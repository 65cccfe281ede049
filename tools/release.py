"""Make a release: `python tools/release.py [FOLDER] [--key KEY.pem]`, by default into dist/.

Builds wheel and sdist of dpfy and of dpfy-lab with the checks of tools/package.py, and writes beside
them what a reader of the release needs:

- `sbom.json`: a software bill of materials (CycloneDX 1.6) with both packages, the packages that
  they require, and the versions that the project is tested with;
- `SHA256SUMS`: the hash of every file;
- `SHA256SUMS.sig`: an Ed25519 signature of it, where a key of `dpfy sign --new-key` is given.

Two releases of the same commit have identical bytes: every time stamp is that of the commit, or
SOURCE_DATE_EPOCH, and files are packed in the order of their names.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import uuid
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import package

ROOT = package.ROOT
EARLIEST = 315532800
"""1 January 1980: ZIP files know no earlier time."""

PROJECTS = ("pyproject.toml", "lab/pyproject.toml")


def epoch() -> int:
    """The time that every file of the release has: SOURCE_DATE_EPOCH, or that of the commit."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return max(EARLIEST, int(given))
    log = ["git", "log", "-1", "--format=%ct"]
    ended = subprocess.run(log, cwd=ROOT, capture_output=True, text=True)
    return max(EARLIEST, int(ended.stdout)) if ended.returncode == 0 else EARLIEST


def repack_sdist(sdist: Path, when: int) -> None:
    """Write an sdist again, with one time, one owner and one order."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid = when, 0, 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=when) as compressed:
        compressed.write(packed.getvalue())


def repack_wheel(wheel: Path) -> None:
    """Write a wheel again, as small as it can be, with one order and one set of permissions."""
    with zipfile.ZipFile(wheel) as old:
        files = [(info, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        # The record of a wheel comes last, as pip and the specification have it.
        for info, content in sorted(
            files, key=lambda one: ("dist-info" in one[0].filename, one[0].filename)
        ):
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            new.writestr(info, content, compresslevel=9)


def requirements(project: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Name, rule and group (`required`, or an extra) of everything that a project asks for."""
    groups = {"required": project.get("dependencies", [])}
    groups.update(project.get("optional-dependencies", {}))
    for group, lines in groups.items():
        for line in lines:
            name = re.match(r"[A-Za-z0-9._-]+", line)
            assert name is not None, line
            yield name[0].lower(), line[len(name[0]) :], group


def tested_versions() -> dict[str, str]:
    """The versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.lower(): version for name, version in pairs}


def sbom(files: list[Path], when: int) -> dict[str, Any]:
    """A CycloneDX document of the release.

    Args:
        files: The built distributions.
        when: Seconds since 1970.
    """
    tested, parts, depends = tested_versions(), {}, []
    for path in PROJECTS:
        project = tomllib.loads((ROOT / path).read_text())["project"]
        name, version = project["name"], project["version"]
        own = f"pkg:pypi/{name}@{version}"
        hashes = [
            {"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}
            for file in files
            if file.suffix == ".whl" and file.name.startswith(f"{name.replace('-', '_')}-")
        ]
        parts[own] = {
            "type": "library", "bom-ref": own, "name": name, "version": version, "purl": own,
            "licenses": [{"license": {"id": project["license"]}}], "hashes": hashes,
        }  # fmt: skip
        needs = set()
        for other, rule, group in requirements(project):
            fixed = tested.get(other) or (version if other == "dpfy" else None)
            ref = f"pkg:pypi/{other}" + (f"@{fixed}" if fixed else "")
            if group == "required":
                needs.add(ref)
            part = {
                "type": "library", "bom-ref": ref, "name": other, "purl": ref,
                "scope": "required" if group == "required" else "optional",
                "properties": [{"name": "dpfy:rule", "value": rule or "any"}],
            }  # fmt: skip
            if fixed:
                part["version"] = fixed
            if ref not in parts or (group == "required" and "hashes" not in parts[ref]):
                parts[ref] = part
        depends.append({"ref": own, "dependsOn": sorted(needs)})
    content = sorted(parts.values(), key=lambda part: str(part["bom-ref"]))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "serialNumber": f"urn:uuid:{serial}",
        "metadata": {"timestamp": datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
        "components": content,
        "dependencies": depends,
    }  # fmt: skip


def write_sums(folder: Path, files: list[Path]) -> Path:
    """Write the hashes of the files, in the form that `sha256sum --check` reads."""
    sums = folder / "SHA256SUMS"
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files)
    ]
    sums.write_text("".join(lines))
    return sums


def sign(sums: Path, key: Path) -> Path:
    """Sign the hashes with a private key in PEM form; Ed25519 signatures are deterministic."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    secret = load_pem_private_key(key.read_bytes(), None)
    if not isinstance(secret, Ed25519PrivateKey):
        raise SystemExit(f"{key.name}: must be an Ed25519 key, as `dpfy sign --new-key` makes")
    signature = sums.with_name(f"{sums.name}.sig")
    signature.write_bytes(base64.b64encode(secret.sign(sums.read_bytes())) + b"\n")
    return signature


def release(out: Path, key: Path | None) -> list[str]:
    """Build everything into `out`, and return the lines to print."""
    when = epoch()
    os.environ["SOURCE_DATE_EPOCH"] = str(when)
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        if old.suffix in (".whl", ".gz"):
            old.unlink()
    seen = package.check(out)
    files = sorted(file for file in out.iterdir() if file.suffix in (".whl", ".gz"))
    for file in files:
        repack_wheel(file) if file.suffix == ".whl" else repack_sdist(file, when)
    bom = out / "sbom.json"
    bom.write_text(json.dumps(sbom(files, when), indent=2, sort_keys=True) + "\n")
    sums = write_sums(out, [*files, bom])
    if key is not None:
        sign(sums, key)
    return [*seen[len(files) :], *sums.read_text().splitlines()]


def main() -> int:
    """Make the release, and print what was made."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    options.add_argument("--key", type=Path, help="an Ed25519 private key in PEM form")
    given = options.parse_args()
    print("\n".join(release(given.folder, given.key)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
