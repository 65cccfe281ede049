"""However a verb ends: an exit status, at most one line, and with --json one strict JSON object.
Never a traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dpfy import __version__
from dpfy.cli import account as verb
from dpfy.cli import app
from dpfy.cli.output import finite, one_line, printable
from dpfy.core.errors import InvalidInput

GOOD = ["account", "--noise-multiplier", "1", "--delta", "1e-5"]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        app.main([str(a) for a in arguments])
    shown = capsys.readouterr()
    return stop.value.code, shown.out, shown.err


def strict(text: str) -> dict:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    answer = json.loads(text, parse_constant=refuse)
    assert isinstance(answer, dict)
    return answer


FAULTS = [
    (OSError(28, "No space left on device", "x.svg"), "x.svg: No space left on device"),
    (PermissionError(13, "Permission denied"), "Permission denied"),
    (OverflowError(34, "Numerical result out of range"), "too large or too small"),
    (ZeroDivisionError("division by zero"), "too large or too small"),
    (MemoryError(), "not enough memory"),
    (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        "not enough memory",
    ),
    (RecursionError(), "nested too deeply"),
    (
        UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
        "cannot be read or written",
    ),
    (ValueError("of ours"), "internal error: ValueError: of ours"),
    (KeyError("k"), "internal error: KeyError"),
    (AssertionError(), "internal error: AssertionError"),
    (InvalidInput("field", "a\nb\x1b[2J", "rule\nof two lines"), "field: got"),
]


@pytest.mark.parametrize(
    ("problem", "words"), FAULTS, ids=lambda v: type(v).__name__ if isinstance(v, Exception) else ""
)
def test_every_fault_is_status_2_and_one_line(capsys, monkeypatch, problem, words):
    def fail(*_, **__):
        raise problem

    monkeypatch.setattr("dpfy.accounting.calculator.account", fail)
    status, out, err = call(capsys, *GOOD)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert "\x1b" not in err
    status, out, err = call(capsys, *GOOD, "--json")
    assert status == 2
    assert strict(out)["error"]["type"] == type(problem).__name__
    assert err.count("\n") == 1


def test_a_mistake_of_ours_can_be_traced(capsys, monkeypatch):
    def fail(*_, **__):
        raise KeyError("k")

    monkeypatch.setattr("dpfy.accounting.calculator.account", fail)
    monkeypatch.setenv("DPFY_DEBUG", "1")
    status, _, err = call(capsys, *GOOD)
    assert status == 2
    assert "Traceback" in err


def test_an_interruption_is_status_130_and_one_line(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dpfy.accounting.calculator.account", stop)
    status, out, err = call(capsys, *GOOD)
    assert (status, out) == (130, "")
    assert "interrupted" in err
    assert err.count("\n") == 1


def test_an_error_after_the_answer_adds_no_second_object(capsys, monkeypatch):
    before = verb.tell

    def tell_and_fail(*arguments, **named):
        before(*arguments, **named)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verb, "tell", tell_and_fail)
    status, out, _ = call(capsys, *GOOD, "--json")
    assert status == 2
    assert "epsilon" in strict(out)


def test_json_has_no_infinity():
    assert finite({"a": [float("inf"), float("nan"), -float("inf")], "b": {"c": 1.5}}) == {
        "a": ["infinity", None, "-infinity"],
        "b": {"c": 1.5},
    }


def test_text_cannot_move_the_cursor():
    assert printable("a\x1b[2Kb\x9bc\udcff\nd") == "a\\x1b[2Kb\\x9bc\\udcff\nd"
    assert one_line("a\nb\r\x07" + "x" * 1000).count("\n") == 0
    assert len(one_line("x" * 1000)) == 600


@pytest.mark.parametrize(
    "arguments",
    [
        ["--noise-multiplier", "1e308"],
        ["--noise-multiplier", "1e-320"],
        ["--noise-multiplier", "inf"],
        ["--noise-multiplier", "nan"],
        ["--noise-multiplier", "1", "--sampling-rate", "1e-320"],
        ["--noise-multiplier", "1", "--sampling-rate", "-0.5"],
        ["--noise-multiplier", "1", "--steps", "9" * 100],
        ["--noise-multiplier", "1", "--steps", "9" * 5000],
        [
            "--noise-multiplier",
            "1",
            "--records",
            "9" * 40,
            "--batch-size",
            "1",
            "--sampling",
            "without-replacement",
        ],
        ["--noise-multiplier", "1", "--delta", "1e-320"],
        ["--phases", "a" * 5000],
        ["--phases", "\udcff.toml"],
        ["--phases", "."],
        ["--phases", "/dev/full"],
    ],
)
def test_numbers_and_paths_out_of_range_are_refused_before_work(capsys, arguments):
    status, out, err = call(capsys, "plan", "account", "--delta", "1e-5", *arguments, "--json")
    assert status == 2
    assert strict(out)["error"]["type"] in ("InvalidInput", "BadParameter")
    assert err.count("\n") == 1


def test_a_pipe_is_not_waited_for(capsys, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert (
        "is a pipe"
        in call(capsys, "plan", "account", "--delta", "1e-5", "--phases", tmp_path / "pipe")[2]
    )


def test_deep_nesting_is_one_line(capsys, tmp_path):
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    for arguments in (["account", "--delta", "1e-5", "--phases"], ["train"]):
        status, _, err = call(capsys, *arguments, tmp_path / "deep.toml")
        assert status == 2
        assert "nested too deeply" in err


def test_plots_are_refused_before_the_work_and_spare_other_files(capsys, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the work began")

    monkeypatch.setattr("dpfy.accounting.calculator.bounds", never)
    (tmp_path / "mine.svg").write_text("my own notes")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "link.svg").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.svg")
    bad = [
        "mine.svg",
        "folder.svg",
        "link.svg",
        "pipe.svg",
        "no/such/folder.svg",
        "a" * 252 + ".svg",
        "plot.txt",
        "x\0.svg",
    ]
    for name in [*(tmp_path / name for name in bad), "/dev/full", "/dev/null"]:
        status, _, err = call(
            capsys,
            "plan",
            "compare",
            "bounds",
            "--noise-multiplier",
            1,
            "--delta",
            1e-5,
            "--plot",
            name,
        )
        assert status == 2, name
        assert "--plot" in err
        assert err.count("\n") == 1
    assert (tmp_path / "mine.svg").read_text() == "my own notes"
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "folder.svg",
        "link.svg",
        "mine.svg",
        "pipe.svg",
    ]


def test_an_earlier_plot_is_replaced(capsys, tmp_path):
    for _ in range(2):
        assert (
            call(
                capsys,
                "compare",
                "bounds",
                "--noise-multiplier",
                1,
                "--delta",
                1e-5,
                "--plot",
                tmp_path / "b.svg",
            )[0]
            == 0
        )
    assert [p.name for p in tmp_path.iterdir()] == ["b.svg"]


def test_version(capsys):
    assert call(capsys, "--version") == (0, f"{__version__}\n", "")


def test_help_shows_the_brackets_of_phases(capsys):
    assert "[[phase]]" in " ".join(call(capsys, "plan", "account", "--help")[1].split()).replace(
        "│ ", ""
    ).replace(" │", "")


@pytest.mark.parametrize(
    "arguments", [["inspect", "--model", "scattering-linear"], ["inspect", "--shape", "1x400x400"]]
)
def test_inspect_looks_at_every_model(capsys, arguments):
    status, out, _ = call(capsys, *arguments, "--json")
    assert status == 0
    assert strict(out)["problems"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "1x99999999x99999999"],
        ["--shape", "1x9223372036854775807x9223372036854775807"],
        ["--shape", "1x-1x28"],
        ["--shape", "999999999999999999999999999999x1", "--model", "linear"],
        ["--shape", "1x" + "9" * 400, "--model", "mlp"],
        ["--shape", "8", "--model", "linear", "--classes", "9223372036854775807"],
        ["--shape", "1x28x28x28x28x28x28x28x28x28x28"],
        ["--shape", "99999999999", "--model", "linear"],
        ["--shape", "99999999999", "--model", "mlp"],
        ["--classes", "99999999999999999999999"],
        ["--classes", "999999999999"],
        ["--batch-size", "9223372036854775808"],
    ],
)
def test_inspect_counts_before_it_allocates(capsys, arguments):
    status, out, err = call(capsys, "inspect", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "memory" not in err
    assert "internal" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bands", "4294967296"],
        ["--steps", "99999999999"],
        ["--canaries", "99999999999"],
        ["--canaries", "1"],
        ["--noise-multiplier", "1e-320"],
        ["--sampling-rate", "1e-320"],
    ],
)
def test_audit_mechanism_counts_before_it_allocates(capsys, arguments):
    status, out, err = call(capsys, "audit", "mechanism", *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "internal" not in err


def dpfy(*arguments: str, **named: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "dpfy", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=1200,
        **named,
    )  # type: ignore[call-overload]


def test_standard_output_that_takes_nothing():
    """A full disk and a closed pipe: exit status 2 and one line, also at the very end of the
    process.
    """
    for arguments in ([*GOOD], [*GOOD, "--json"], ["account", "--help"]):
        with open("/dev/full", "w") as full:
            found = dpfy(*arguments, stdout=full)
        assert found.returncode == 2
        assert found.stderr.count("\n") == 1, found.stderr
        assert "No space left" in found.stderr
    read, write = os.pipe()
    os.close(read)
    found = dpfy(*GOOD, stdout=write)
    os.close(write)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert "Broken pipe" in found.stderr


def test_no_standard_output_at_all():
    shell = f"exec {sys.executable} -P -m dpfy {' '.join(GOOD)} >&-"
    found = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=1200)
    assert "Traceback" not in found.stderr
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "privacy.noise_multiplier=1e12"], "is not supported"),
        (["--clip-norm", "1e300"], "must be at most 1e+09"),
    ],
)
def test_noise_that_no_lattice_holds_is_refused_before_the_first_step(
    capsys, tmp_path, flags, said
):
    small = [
        "--data",
        "digits",
        "--records",
        1438,
        "--model",
        "linear",
        "--delta",
        "1e-4",
        "--batch-size",
        30,
        "--steps",
        2,
    ]
    status, _, err = call(capsys, "train", *small, "--out", tmp_path / "run", *flags)
    assert status == 2
    assert said in err
    assert list(tmp_path.iterdir()) == []
