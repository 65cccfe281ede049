"""Plants small mistakes in copies of the packages, one at a time, and looks whether the suite
notices: `make mutants`.

Each entry of the lists (*.toml) names a file, a piece of it, what it becomes, and what must notice:
tests (paths or ids of pytest), or "selftest" for `dpfy audit selftest`. A mistake that nothing
notices is a survivor, and survivors are a failure: then a test is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
PACKAGES = ("dpfy", "lab/dpfy_lab")
"""What is copied, and may have a mistake planted in it."""
LISTS = sorted(Path(__file__).parent.glob("*.toml"))
AREAS = (
    "sampling",
    "clipping",
    "noise",
    "ledger",
    "accounting",
    "verification",
    "training",
    "mechanisms",
    "statistics",
    "layers",
    "lazy",
    "loops",
    "isolation",
    "families",
    "shares",
    "federated",
    "labels",
    "local",
    "flower",
    "users",
    "prediction",
    "tuning",
    "synthetic",
    "estimators",
)
FLOWER = "tests/integrations/flower"
"""Tests that need Flower run in its environment: that of `make test-flower`, or the one whose
Python DPFY_FLOWER_PYTHON names.
"""
PATIENCE = 600
"""Seconds after which a mistake that makes the tests run for ever counts as noticed."""


@dataclass(frozen=True)
class Mutant:
    """One small mistake: where, what was there, what stands there now, and what must notice it."""

    name: str
    area: str
    file: str
    was: str
    becomes: str
    tests: tuple[str, ...]

    def planted(self, source: str) -> str:
        """The text of its file with the mistake in it."""
        if (found := source.count(self.was)) != 1:
            raise ValueError(
                f"{self.name}: {self.was!r} stands {found} times in {self.file}, must stand once"
            )
        return source.replace(self.was, self.becomes)


@dataclass(frozen=True)
class Outcome:
    """What became of a mistake: killed, survived, or broken (the tests could not be run with
    it).
    """

    mutant: Mutant
    state: str
    detail: str = ""


def mutants() -> list[Mutant]:
    """All of the lists."""
    rows = [row for file in LISTS for row in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**row | {"tests": tuple(row["tests"])}) for row in rows]


def python_of(tests: tuple[str, ...]) -> str:
    """The Python that has what these tests need; empty if there is none here."""
    if not any(test.startswith(FLOWER) for test in tests):
        return sys.executable
    found = Path(os.environ.get("DPFY_FLOWER_PYTHON", ROOT / ".venv-flower" / "bin" / "python"))
    return str(found) if found.is_file() else ""


def examine(mutant: Mutant | None, tests: tuple[str, ...], jobs: int = 1) -> tuple[int, str]:
    """Run `tests` on copies of the packages with the mistake planted (none: as they are, and as long
    as it takes); the exit status and the end of the output.
    """
    with tempfile.TemporaryDirectory(prefix="dpfy-mutant-") as folder:
        for package in PACKAGES:
            shutil.copytree(
                ROOT / package,
                Path(folder) / package,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        if mutant is not None:
            file = Path(folder) / mutant.file
            file.write_text(mutant.planted(file.read_text()))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(Path(folder) / "lab")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        python = python_of(tests)
        _require_copy(folder, environment, python)
        if tests == ("selftest",):
            command = [python, "-P", "-m", "dpfy", "audit", "selftest"]
        else:
            command = [python, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
            command += (
                ["-n", str(jobs), "--dist", "loadfile"]
                if jobs > 1 and python == sys.executable
                else []
            )
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=None if mutant is None else PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end after {PATIENCE} s"
        return done.returncode, (done.stdout + done.stderr)[-2000:]


def _require_copy(folder: str, environment: dict[str, str], python: str) -> None:
    """The copies, and not the project's own packages, are what gets imported: else every mistake
    would survive, or none.
    """
    command = [python, "-P", "-c", "import dpfy, dpfy_lab; print(dpfy.__file__, dpfy_lab.__file__)"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    found = done.stdout.split()
    if len(found) != len(PACKAGES) or not all(file.startswith(folder) for file in found):
        raise RuntimeError(f"the copies are not imported, but {' '.join(found) or done.stderr}")


def judged(mutant: Mutant) -> Outcome:
    """Killed if a test failed; an error before any test ran means that the entry itself is
    wrong.
    """
    status, output = examine(mutant, mutant.tests)
    state = {0: "survived", 1: "killed"}.get(status, "broken")
    print(f"{state}: {mutant.name}", file=sys.stderr, flush=True)
    return Outcome(mutant, state, "" if status == 1 else output)


def main() -> int:
    """Run the list; 0 if nothing survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names or areas that contain this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--known-good",
        action="store_true",
        help="the tests are known to pass without a mistake: do not run them so",
    )
    chosen, console = parser.parse_args(), Console(stderr=True)
    picked = [m for m in mutants() if chosen.only in m.name or chosen.only == m.area]
    if not picked:
        console.print(f"--only: got {chosen.only!r}; no mutant has such a name or area")
        return 2
    if away := [m.name for m in picked if not python_of(m.tests)]:
        console.print(
            f"left out, for their environment is not here (make test-flower): {', '.join(away)}",
            markup=False,
        )
        picked = [m for m in picked if m.name not in away]
    everything = sorted({test for m in picked for test in m.tests if test != "selftest"})
    for kind in {test.startswith(FLOWER) for test in everything}:
        some = tuple(test for test in everything if test.startswith(FLOWER) == kind)
        if not chosen.known_good and (status := examine(None, some, chosen.jobs))[0]:
            console.print(f"the tests fail without any mistake planted:\n{status[1]}", markup=False)
            return 2
    with ThreadPoolExecutor(chosen.jobs) as pool:
        outcomes = list(
            track(
                pool.map(judged, picked), total=len(picked), description="mistakes", console=console
            )
        )
    bad = [o for o in outcomes if o.state != "killed"]
    for outcome in bad:
        console.print(
            f"{outcome.state}: {outcome.mutant.name} ({outcome.mutant.file})\n{outcome.detail}",
            markup=False,
        )
    counts = {
        state: sum(o.state == state for o in outcomes) for state in ("killed", "survived", "broken")
    }
    if chosen.json:
        print(json.dumps(counts | {"mutants": {o.mutant.name: o.state for o in outcomes}}))
    else:
        print(", ".join(f"{count} {state}" for state, count in counts.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
