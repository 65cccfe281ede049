"""Build wheel and sdist of dpfy and of dpfy-lab, and see that they are whole:
`python tools/package.py [FOLDER]`, by default into dist/.

The wheel of dpfy is installed into a new environment, whose other packages are those of this one,
and asked for its version, an epsilon and what it carries; then that of dpfy-lab, and asked for its
commands. A wheel made from an sdist must hold the same files.
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
    "entry_points.txt",
    "tables/schemas/adult.toml",
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
    "lab/pyproject.toml",
    "lab/dpfy_lab/__init__.py",
    "Makefile",
    "mkdocs.yml",
)
LAB_SDIST = ("README.md", "pyproject.toml", "dpfy_lab/__init__.py")
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


def package_files(package: Path) -> set[str]:
    """Every file of a package that a user needs: all but compiled leftovers."""
    return {
        str(p.relative_to(package.parent))
        for p in package.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }


def held(wheel: Path, package: str) -> set[str]:
    """The files of the package in a wheel."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{package}/")}


def whole(source: Path, package: Path, needed: tuple[str, ...], out: Path) -> tuple[Path, Path]:
    """Wheel and sdist of the distribution in `source`, once they are seen to be whole.

    Args:
        source: The distribution as a clean clone has it.
        package: Its package here.
        needed: Files that the sdist must have.
        out: Where both are built.
    """
    wheel, sdist = built("wheel", source, out), built("sdist", source, out)
    if missing := package_files(package) - held(wheel, package.name):
        raise SystemExit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory() as work:
        with tarfile.open(sdist) as archive:
            archive.extractall(work, filter="data")
        inside = Path(work) / sdist.name.removesuffix(".tar.gz")
        if lacking := {name for name in needed if not (inside / name).is_file()}:
            raise SystemExit(f"{sdist.name} lacks {', '.join(sorted(lacking))}")
        again = built("wheel", inside, Path(work))
        if held(again, package.name) != held(wheel, package.name):
            raise SystemExit(f"a wheel made from {sdist.name} holds other files")
    return wheel, sdist


def environment(folder: Path) -> tuple[Path, Path]:
    """A new environment that borrows the packages of this one: its Python and where it has its own
    packages.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next((folder / "lib").iterdir()) / "site-packages"
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin" / "python", packages


def install(wheel: Path, packages: Path) -> None:
    """Install a wheel, and nothing that it depends on."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index", "--target", str(packages), str(wheel)]
    subprocess.run([*pip, *alone], check=True, capture_output=True)


def asked(python: Path, *words: str) -> str:
    """What the installed program answers, somewhere else than in the project."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [str(python), *words], cwd="/", env=clean, capture_output=True, text=True
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout.strip()


def require_inside(folder: Path, python: Path, package: str) -> None:
    """The new environment has a package of its own, and not the one of this environment."""
    where = asked(python, "-c", f"import {package}; print({package}.__file__)")
    if not where.startswith(str(folder.resolve())):
        raise SystemExit(f"the new environment found {package} in {where}")


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
        wheel, sdist = whole(clean, ROOT / "dpfy", WITH_SDIST, out)
        lab, lab_sdist = whole(clean / "lab", ROOT / "lab" / "dpfy_lab", LAB_SDIST, out)
        python, packages = environment(Path(work) / "venv")
        install(wheel, packages)
        require_inside(Path(work), python, "dpfy")
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
        install(lab, packages)
        require_inside(Path(work), python, "dpfy_lab")
        if "guide" not in (studies := asked(python, "-m", "dpfy", "reproduce", "--list")):
            raise SystemExit(f"dpfy reproduce lists other studies:\n{studies}")
        names = [each.name for each in (wheel, sdist, lab, lab_sdist)]
        return [*names, f"version {version}", epsilon]


def main(arguments: list[str]) -> int:
    """Build, check, and say what was seen."""
    out = Path(arguments[0]) if arguments else ROOT / "dist"
    out.mkdir(parents=True, exist_ok=True)
    print("\n".join(check(out)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
