"""`dpfy report`, `dpfy report compare` and `dpfy verify` of a card, as functions that the command
line calls.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dpfy.cli import compare_runs, report, verify
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.report import html_page
from dpfy.report.words import up

sys.path.insert(0, str(Path(__file__).parent.parent / "report"))
import runs

app = typer.Typer()
app.command("report")(report.report)
app.command("runs")(compare_runs.runs)
app.command("verify")(verify.verify)


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    home = tmp_path_factory.mktemp("cli")
    return runs.dpsgd(home / "example"), runs.user_level(home / "user")


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "example")


def test_each_format(run):
    page = (run / "report.html").read_bytes()
    (run / "report.html").unlink()
    shown = call("report", run)
    assert shown.exit_code == 0
    assert shown.output.strip() == str(run / "report.html")
    assert (run / "report.html").read_bytes() == page
    shown = call("report", run, "--format", "md", "--json")
    assert json.loads(shown.output) == {
        "run": "example",
        "format": "md",
        "file": str(run / "report.md"),
    }
    shown = call("report", run, "--format", "json")
    assert shown.output == (run / "privacy.json").read_text()


def test_a_card_by_itself_has_a_page(run, tmp_path):
    (tmp_path / "alone").mkdir()
    card = shutil.copy(run / "privacy.json", tmp_path / "alone" / "privacy.json")
    assert call("report", card).exit_code == 0
    assert "Privacy report" in (tmp_path / "alone" / "report.html").read_text()


def test_bad_input_is_a_typed_error(run, tmp_path):
    assert isinstance(call("report", run, "--format", "pdf").exception, InvalidInput)
    assert isinstance(call("report", tmp_path / "nowhere").exception, InvalidInput)
    card = run / "privacy.json"
    card.write_text(card.read_text().replace("example", "company", 1))
    assert isinstance(call("report", run).exception, Corrupt)


def test_compare_refuses_to_rank_what_differs(finished, tmp_path):
    shown = call("runs", *finished, "--out", tmp_path / "page.html")
    assert shown.exit_code == 0
    assert "NOT RANKED: unit differs" in shown.output
    assert "how to convert" in shown.output
    assert "cannot be ranked" in (tmp_path / "page.html").read_text()
    answer = json.loads(call("runs", *finished, "--json").output)
    assert answer["ranked"] is False
    assert answer["reasons"][0]["what"] == "unit"


def test_verify_names_the_field_and_exits_1(run):
    assert call("verify", run / "privacy.json").exit_code == 0
    card = json.loads((run / "privacy.json").read_text())
    from dpfy.core.codec import digest
    from dpfy.report import card as cards

    card["guarantee"]["epsilon"] /= 2
    del card["digest"]
    (run / "privacy.json").write_bytes(cards.render(card | {"digest": digest(card)}))
    for place in (run, run / "privacy.json"):
        shown = call("verify", place)
        assert shown.exit_code == 1
        assert "guarantee.epsilon" in shown.output
        assert "NOT verified" in shown.output


def test_many_runs_are_verified_at_once(finished, tmp_path):
    """A line for each, and below it what failed; what is no run does not keep the others from being
    verified.
    """
    good, bad = finished[1], shutil.copytree(finished[0], tmp_path / "bad")
    (bad / "report.md").write_text("epsilon 0.1")
    (tmp_path / "stranger").mkdir()
    shown = call("verify", good, good)
    assert shown.exit_code == 0
    assert shown.output.splitlines() == ["user: verified (level: nothing)"] * 2 + [
        "2 of 2 verified"
    ]
    shown = call("verify", good, bad, tmp_path / "stranger")
    assert shown.exit_code == 1
    lines = shown.output.splitlines()
    assert lines[:2] == ["user: verified (level: nothing)", "bad: NOT verified"]
    assert "report.md" in lines[2]
    assert lines[2].startswith("  FAILED pages")
    assert lines[-2].startswith("stranger: NOT verified: run: got")
    assert lines[-1] == "1 of 3 verified"
    answer = json.loads(call("verify", good, bad, "--json").output)
    assert answer["verified"] is False
    assert [run["verified"] for run in answer["runs"]] == [True, False]
    assert isinstance(call("verify", good, bad, "--head", "0" * 64).exception, InvalidInput)


def test_a_second_bound_is_told_as_looser_and_consistent(run):
    (line,) = (
        line for line in call("verify", run).output.splitlines() if "second accountant" in line
    )
    assert "guarantee: looser bound " in line
    assert f", consistent with {up(stated(run))} (by rdp)" in line
    assert "stated)" not in line


def stated(run):
    return json.loads((run / "privacy.json").read_text())["guarantee"]["epsilon"]


def test_the_heading_says_model_data_date_and_author(run, tmp_path):
    card = json.loads((run / "privacy.json").read_text())
    said = card["provenance"]
    for name in ("report.html", "report.md"):
        above = (run / name).read_text().split("guarantee, item")[0].replace("\\", "")
        assert f"model: {said['model']}" in above
        assert f"date: {said['date']}" in above
        assert "not stated" not in above
    card["provenance"] |= {"author": "<b>Ann</b>", "data": "made-up"}
    assert "author: &lt;b&gt;Ann&lt;/b&gt;" in html_page.render(card)
    assert "data: made-up; date:" in html_page.render(card).split("<section")[0]


def test_explore_prints_its_address_and_serves_it():
    import subprocess
    import urllib.request

    code = "import typer; from dpfy.cli.explore import explore; typer.run(explore)"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, "--no-open", "--json"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            address = json.loads(server.stdout.readline())["address"]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address, timeout=600) as page:
                assert "Plan a private run" in page.read().decode()
        finally:
            server.terminate()


def test_explore_names_a_port_in_use():
    import socket

    from dpfy.cli import explore

    one = typer.Typer()
    one.command()(explore.explore)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        shown = CliRunner().invoke(one, ["--no-open", "--port", str(taken.getsockname()[1])])
    assert isinstance(shown.exception, InvalidInput)
    assert "--port" in str(shown.exception)


@pytest.mark.parametrize(
    "module",
    ["dpfy.report.server", "dpfy.report.compare", "dpfy.report.verify"],
)
def test_reading_a_card_needs_no_torch(module):
    import subprocess

    code = (
        f"import sys, {module}; sys.exit(' '.join(m for m in ('torch', 'dp_accounting', "
        f"'matplotlib') if m in sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True
        ).stderr.strip()
        == ""
    )
