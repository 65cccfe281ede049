"""A plug-in is a wheel: once installed, its kind of release and its command are dpfy's, and it is
imported by what needs it alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "toy-counts"
version = "1.0"

[project.entry-points."dpfy.claims"]
laplace-count = "toy_counts.release:LaplaceCount"
torn-count = "toy_counts.nowhere:TornCount"
misnamed-count = "toy_counts.release:LaplaceCount"
training = "toy_counts.command:count"

[project.entry-points."dpfy.commands"]
count = "toy_counts.command:count"
"audit.count" = "toy_counts.command:count"
account = "toy_counts.command:count"
torn = "toy_counts.nowhere:torn"

[tool.setuptools]
packages = ["toy_counts"]
"""
SAYS = "import sys\nprint('imported', __name__, file=sys.stderr)\n"
COMMAND = '''
from pathlib import Path


def count(folder: Path, people: int = 37) -> None:
    """Count the people."""
    from dpfy.runs.run import Run
    from toy_counts import release

    release.run(Run(folder), lambda: people, release.LaplaceCount(2.0))
    print(folder)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of the toy plug-in is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    package = source / "toy_counts"
    package.mkdir()
    (source / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("")
    (package / "release.py").write_text(Path(__file__).with_name("count.py").read_text())
    (package / "command.py").write_text(SAYS + COMMAND)
    (package / "other.py").write_text(SAYS)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-index", "--no-deps"]
    wheel = [*pip, "wheel", *alone, "--no-build-isolation", "-w", str(source), str(source)]
    subprocess.run(wheel, check=True, capture_output=True, text=True)
    made = next(source.glob("*.whl"))
    install = [*pip, "install", *alone, "--target", str(site), str(made)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    return site


def python(site: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
    """A new process, with the plug-in installed or without."""
    places = [os.environ.get("PYTHONPATH", ""), "" if site is None else str(site)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    return subprocess.run(
        [sys.executable, "-P", *words], env=environment, capture_output=True, text=True
    )


def dpfy(site: Path | None, *words: str) -> subprocess.CompletedProcess[str]:
    return python(site, "-m", "dpfy", *words)


def test_command_claim_report_and_verification(plugin: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    made = dpfy(plugin, "count", str(run), "--people", "40")
    assert (made.returncode, made.stdout.strip()) == (0, str(run))
    checked = dpfy(plugin, "verify", str(run), "--json")
    assert checked.returncode == 0, checked.stdout
    assert "imported" not in checked.stderr  # verification needs the claim, not the command
    card = json.loads((run / "privacy.json").read_text())
    assert card["sections"][0]["kind"] == "laplace-count"
    (run / "report.html").unlink()
    assert dpfy(plugin, "report", str(run)).returncode == 0
    assert "A count" in (run / "report.html").read_text()
    unknown = dpfy(None, "verify", str(run))
    assert unknown.returncode == 1
    assert "install the plug-in that made it" in unknown.stdout + unknown.stderr
    (run / "count.json").write_text('{"count": 40.0}')
    assert dpfy(plugin, "verify", str(run)).returncode == 1


def test_a_command_in_a_group(plugin: Path, tmp_path: Path) -> None:
    assert dpfy(plugin, "audit", "count", str(tmp_path / "run")).returncode == 0
    assert dpfy(plugin, "verify", str(tmp_path / "run")).returncode == 0


def test_help_lists_commands_without_importing_them(plugin: Path) -> None:
    whole = dpfy(plugin, "--help")
    assert "From toy-counts." in whole.stdout
    assert "imported" not in whole.stderr
    own = dpfy(plugin, "count", "--help")
    assert "Count the people." in own.stdout
    assert "--people" in own.stdout


def test_a_command_of_dpfy_is_not_replaced(plugin: Path) -> None:
    asked = dpfy(plugin, "account", "--help")
    assert "imported" not in asked.stderr
    assert "--noise-multiplier" in asked.stdout


def test_a_plugin_that_cannot_be_imported_is_named_in_one_line(plugin: Path) -> None:
    torn = dpfy(plugin, "torn")
    assert torn.returncode == 2
    assert torn.stderr.count("\n") == 1
    assert "toy-counts" in torn.stderr
    assert "toy_counts.nowhere" in torn.stderr


KINDS = """
import sys
from dpfy.core.claim import kind_of
from dpfy.core.errors import Unsupported

for name in {names}:
    try:
        print(kind_of(name).__qualname__)
    except Unsupported as problem:
        print(problem)
print(*(m for m in sys.modules if m.startswith("toy_counts")))
"""


def test_a_name_imports_its_entry_point_and_nothing_else(plugin: Path) -> None:
    names = ["toy_counts.other", "toy_counts.other:SAYS", "os", "training", "query"]
    found = python(plugin, "-c", KINDS.format(names=names)).stdout.splitlines()
    assert [line.startswith("a release of kind") for line in found[:3]] == [True] * 3
    assert found[3:] == ["TrainingClaim", "StatisticClaim", ""]


def test_an_entry_point_must_fit_its_name(plugin: Path) -> None:
    names = ["misnamed-count", "torn-count", "laplace-count"]
    found = python(plugin, "-c", KINDS.format(names=names)).stdout.splitlines()
    assert "'misnamed-count' is not supported; its kind differs" in found[0]
    assert "toy-counts" in found[1]
    assert found[2] == "LaplaceCount"


def test_a_name_that_two_distributions_add_is_refused(plugin: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    info = again / "more_counts-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-counts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dpfy.claims]\nlaplace-count = more:Count\n")
    both = Path(f"{plugin}{os.pathsep}{again}")
    found = python(both, "-c", KINDS.format(names=["laplace-count"])).stdout.splitlines()
    assert "more-counts and toy-counts" in found[0]
    assert found[1] == ""
