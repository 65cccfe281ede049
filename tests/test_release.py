"""What belongs to a release agrees with the project: versions, requirements, workflows; and what is
packed twice has the same bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
OTHER_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base", "duckdb": "python-duckdb"}
"""What conda calls a package of PyPI."""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """tools/release.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())


def test_every_place_names_the_same_version() -> None:
    import dpfy

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {
        "dpfy": dpfy.__version__,
        "lab": LAB["version"],
        "citation": str(citation["version"]),
        "conda": recipe()["context"]["version"],
    }
    assert versions == dict.fromkeys(versions, PROJECT["version"])
    assert f"dpfy=={PROJECT['version']}" in LAB["dependencies"]
    assert re.search(
        rf"^## {re.escape(PROJECT['version'])}", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def test_the_conda_recipe_requires_what_the_project_requires(release: ModuleType) -> None:
    wanted = {
        f"{OTHER_NAMES.get(name, name)} {rule}"
        for name, rule, group in release.requirements(PROJECT)
        if group == "required"
    }
    wanted.add(f"python {PROJECT['requires-python']}")
    assert set(recipe()["requirements"]["run"]) == wanted
    assert f"dpfy = {PROJECT['scripts']['dpfy']}" in recipe()["build"]["python"]["entry_points"]


def test_every_requirement_has_a_tested_version(release: ModuleType) -> None:
    """An unpinned torch takes gigabytes of CUDA packages; the others follow for the same reason."""
    separate = {"flwr", "ray", "pyspark"}  # they have environments of their own
    missing = {
        name
        for name, _, group in release.requirements(PROJECT)
        if name not in release.tested_versions() and name not in separate
    }
    assert missing == set()


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=str)
def test_workflows_run_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90, name
        commands = " && ".join(step.get("run", "") for step in job["steps"])
        assert set(re.findall(r"make ([a-z-]+)", commands)) <= targets, name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step


def test_tests_run_on_every_supported_python_and_system() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    matrix = jobs["suite"]["strategy"]["matrix"]
    systems = {*matrix["os"], *(one["os"] for one in matrix["include"])}
    assert systems == {"ubuntu-latest", "macos-latest", "windows-latest"}
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert matrix["python"][0] == PROJECT["requires-python"].removeprefix(">=")
    assert "gpu" in jobs["gpu"]["runs-on"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=str
)
def test_issue_templates_ask_for_something(path: Path) -> None:
    template = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= template.keys()
    identifiers = [field["id"] for field in template["body"] if field["type"] != "markdown"]
    assert len(set(identifiers)) == len(identifiers) > 0


def sdist(folder: Path, order: list[str]) -> Path:
    """An sdist as a build writes it: times, owners and order as they happen to be."""
    folder.mkdir()
    for name in order:
        (folder / name).write_text(f"text of {name}")
    path = folder / "x-1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in order:
            archive.add(folder / name, f"x-1/{name}")
    return path


def test_an_sdist_packed_twice_has_the_same_bytes(release: ModuleType, tmp_path: Path) -> None:
    first, second = sdist(tmp_path / "1", ["a", "b"]), sdist(tmp_path / "2", ["b", "a"])
    os.utime(tmp_path / "2" / "a", (time.time() - 9e6,) * 2)
    assert first.read_bytes() != second.read_bytes()
    for path in (first, second):
        release.repack_sdist(path, 1_700_000_000)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        assert archive.getnames() == ["x-1/a", "x-1/b"]
        member = archive.extractfile("x-1/a")
        assert member is not None
        assert member.read() == b"text of a"
    assert int.from_bytes(first.read_bytes()[4:8], "little") == 1_700_000_000
    assert gzip.decompress(first.read_bytes())


def test_a_wheel_packed_twice_has_the_same_bytes(release: ModuleType, tmp_path: Path) -> None:
    paths = []
    for mode, names in ((0o100600, ["x.py", "y.py"]), (0o100664, ["y.py", "x.py"])):
        paths.append(tmp_path / f"{len(paths)}.whl")
        with zipfile.ZipFile(paths[-1], "w") as wheel:
            for name in [*names, "x-1.dist-info/RECORD"]:
                info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
                info.external_attr = mode << 16
                wheel.writestr(info, name * 100)
    for path in paths:
        release.repack_wheel(path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert zipfile.ZipFile(paths[0]).namelist() == ["x.py", "y.py", "x-1.dist-info/RECORD"]
    assert zipfile.ZipFile(paths[0]).testzip() is None


def test_the_bill_of_materials_names_everything(release: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / f"dpfy-{PROJECT['version']}-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    bom = release.sbom([wheel], 1_700_000_000)
    assert bom == release.sbom([wheel], 1_700_000_000)
    parts = {part["name"]: part for part in bom["components"]}
    for project in (PROJECT, LAB):
        assert {name for name, *_ in release.requirements(project)} <= parts.keys()
    assert parts["dpfy"]["hashes"][0]["content"] == hashlib.sha256(b"a wheel").hexdigest()
    assert parts["dpfy"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    pinned = release.tested_versions()["torch"]
    assert parts["torch"]["version"] == pinned
    assert parts["torch"]["scope"] == "required"
    assert parts["optuna"]["scope"] == "optional"
    depends = {entry["ref"]: entry["dependsOn"] for entry in bom["dependencies"]}
    assert f"pkg:pypi/torch@{pinned}" in depends[parts["dpfy"]["bom-ref"]]
    references = {part["bom-ref"] for part in bom["components"]}
    assert set().union(*depends.values()) <= references
    json.dumps(bom)


def test_hashes_are_checked_and_signed(release: ModuleType, tmp_path: Path) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from dpfy.report.signature import new_key

    file = tmp_path / "a.whl"
    file.write_bytes(b"content")
    sums = release.write_sums(tmp_path, [file])
    assert sums.read_text() == f"{hashlib.sha256(b'content').hexdigest()}  a.whl\n"
    new_key(tmp_path / "key.pem")
    signature = release.sign(sums, tmp_path / "key.pem")
    secret = load_pem_private_key((tmp_path / "key.pem").read_bytes(), None)
    assert isinstance(secret, Ed25519PrivateKey)
    signed = base64.b64decode(signature.read_bytes())
    secret.public_key().verify(signed, sums.read_bytes())
    with pytest.raises(InvalidSignature):
        secret.public_key().verify(signed, sums.read_bytes() + b"x")


@pytest.mark.slow
def test_two_releases_have_the_same_bytes(tmp_path: Path) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "release.py")]
    for name in ("first", "second"):
        subprocess.run([*tool, str(tmp_path / name)], check=True, capture_output=True)
    first = {file.name: file.read_bytes() for file in (tmp_path / "first").iterdir()}
    assert first == {file.name: file.read_bytes() for file in (tmp_path / "second").iterdir()}
    assert {"sbom.json", "SHA256SUMS"} < first.keys()
    assert len(first) == 6
