"""Without dpfy-lab, its commands say in one line what to install."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator

import pytest

from dpfy.cli.app import main
from dpfy.core import plugins
from dpfy.core.errors import InvalidInput, Unsupported
from dpfy.prediction.claim import AnswersClaim


@pytest.fixture
def without_lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plug-in is installed."""
    plugins._installed.cache_clear()
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **_: importlib.metadata.EntryPoints()
    )
    yield
    plugins._installed.cache_clear()


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("without_lab")
@pytest.mark.parametrize(
    "words",
    [("reproduce", "guide", "--fast"), ("audit", "selftest"), ("synthesize", "images", "digits")],
)
def test_a_command_of_the_lab_says_what_to_install(words, capsys) -> None:
    assert run(*words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "pip install dpfy-lab" in said.err
    assert run(*words, "--json") == 2
    assert "pip install dpfy-lab" in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.usefixtures("without_lab")
def test_help_lists_what_is_installed(capsys) -> None:
    assert run("--help") == 0
    assert "reproduce" not in capsys.readouterr().out
    assert run("audit", "--help") == 0
    assert "selftest" not in capsys.readouterr().out


def test_the_lab_is_installed(capsys) -> None:
    assert run("--help") == 0
    assert "From dpfy-lab." in capsys.readouterr().out


def test_a_misspelt_command_is_an_error(capsys) -> None:
    assert run("audit", "selftset") == 2
    assert "'selftset'; is neither a command nor" in capsys.readouterr().err


@pytest.mark.usefixtures("without_lab")
def test_a_method_of_the_lab_says_what_to_install(capsys, tmp_path) -> None:
    table = tmp_path / "people.csv"
    table.write_text("age\n3\n")
    for method, said in (("dp-gan", "pip install dpfy-lab"), ("gan", "must be one of")):
        asked = ("--schema", "adult", "--epsilon", "1", "--method", method)
        assert run("synthesize", str(table), *asked, "--out", str(tmp_path / "run")) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("without_lab")
def test_a_rule_of_the_lab_says_what_to_install() -> None:
    with pytest.raises(Unsupported, match="pip install dpfy-lab"):
        AnswersClaim("laplace", 3, 50, 10, 10, epsilon=1.0)
    with pytest.raises(InvalidInput, match="gaussian, confident"):
        AnswersClaim("loudest", 3, 50, 10, 10)
