"""Build wheel and sdist, and see that they are whole: `python tools/package.py [FOLDER]`, by
default into dist/.

The wheel is installed into a new environment, whose other packages are those of this one, and asked
for its version, an epsilon and what it carries. A wheel made from the sdist must hold the same
files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARRIED = (
    "py.typed",
    "data/schemas/adult.toml",
    "report/templates/report.html.j2",
    "report/schema/privacy-card-2.json",
)
WITH_SDIST = (
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "docs/index.md",
    "examples/job.toml",
    "tests/test_imports.py",
    "Makefile",
    "mkdocs.yml",
)
BUILD = "from setuptools import build_meta; import sys; print(build_meta.build_{what}(sys.argv[1]))"


def built(what: str, source: Path, out: Path) -> Path:
    """The wheel or the sdist of the project in `source`."""
    ended = subprocess.run(
        [sys.executable, "-c", BUILD.format(what=what), str(out.resolve())],
        cwd=source,
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise SystemExit(f"{what} could not be built:\n{ended.stderr[-2000:]}")
    return out / ended.stdout.strip().splitlines()[-1]


def package_files() -> set[str]:
    """Every file of the package that a user needs: all but compiled leftovers."""
    return {
        str(p.relative_to(ROOT))
        for p in (ROOT / "dpfy").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def held(wheel: Path) -> set[str]:
    """The files of the package in a wheel."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("dpfy/")}


def installed(wheel: Path, folder: Path) -> Path:
    """The program `dpfy` of the wheel, installed into a new environment that borrows all other
    packages from this one.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next((folder / "lib").iterdir()) / "site-packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "--target", str(packages), str(wheel)], check=True, capture_output=True)
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python"


def asked(python: Path, *words: str) -> str:
    """What the installed program answers, somewhere else than in the project."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [str(python), *words], cwd="/", env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout.strip()


def _copied(to: Path) -> None:
    """The files that git knows or would take, as in a clean clone."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in (
        subprocess.run(listed, cwd=ROOT, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    ):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def check(out: Path) -> list[str]:
    """Build into `out` and return what was seen; anything that is missing ends the program."""
    with tempfile.TemporaryDirectory() as work:
        clean = Path(work) / "source"
        _copied(clean)
        wheel, sdist = built("wheel", clean, out), built("sdist", clean, out)
        if missing := package_files() - held(wheel):
            raise SystemExit(f"the wheel lacks {', '.join(sorted(missing))}")
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
            inside = Path(work) / sdist.name.removesuffix(".tar.gz")
        if missing := {name for name in WITH_SDIST if not (inside / name).is_file()}:
            raise SystemExit(f"the sdist lacks {', '.join(sorted(missing))}")
        if held(built("wheel", inside, Path(work))) != held(wheel):
            raise SystemExit("a wheel made from the sdist holds other files")
        python = installed(wheel, Path(work) / "venv")
        where = asked(python, "-c", "import dpfy; print(dpfy.__file__)")
        if not where.startswith(str(Path(work).resolve())):
            raise SystemExit(f"the new environment found dpfy in {where}")
        for name in CARRIED:
            asked(
                python,
                "-c",
                f"from importlib.resources import files; "
                f"files('dpfy').joinpath({name!r}).read_bytes()",
            )
        version = asked(python, "-m", "dpfy", "--version")
        epsilon = asked(
            python,
            "-m",
            "dpfy",
            "account",
            "--noise-multiplier",
            "1",
            "--sampling-rate",
            "0.01",
            "--steps",
            "100",
            "--delta",
            "1e-5",
        )
        return [wheel.name, sdist.name, f"version {version}", epsilon]


def main(arguments: list[str]) -> int:
    """Build, check, and say what was seen."""
    out = Path(arguments[0]) if arguments else ROOT / "dist"
    out.mkdir(parents=True, exist_ok=True)
    print("\n".join(check(out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
