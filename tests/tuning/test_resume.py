"""Killed at any moment, a search is resumed to the same selection, bit for bit; and nothing but
that ever leaves its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dpfy
from dpfy.core.errors import Corrupt, InvalidInput
from dpfy.core.ledger import Ledger
from dpfy.runs.run import Run
from dpfy.tuning import outcome
from dpfy.tuning import search as searches
from dpfy.tuning.run import Execution, tune

sys.path.insert(0, str(Path(__file__).parent))
import toy


@pytest.fixture(scope="module")
def spawn():
    """Start a search in a child of a process that has imported everything and knows all figures;
    its exit status.
    """
    command = [sys.executable, str(Path(__file__).parent / "deaths.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def start(path: Path, options=None, death=None, tally=None) -> int:
            asked = {
                "path": str(path),
                "options": options or {},
                "death": death,
                "tally": tally and str(tally),
            }
            print(json.dumps(asked), file=server.stdin, flush=True)
            return int(server.stdout.readline())

        yield start
        server.stdin.close()


@pytest.fixture(scope="module")
def reference(spawn, tmp_path_factory):
    """The uninterrupted search: what it released, and how many calls it made."""
    place = tmp_path_factory.mktemp("whole")
    assert spawn(place / "run", tally=place / "calls.json") == 0
    return released(place / "run"), json.loads((place / "calls.json").read_text())


def released(path: Path) -> dict[str, str]:
    """What a finished search leaves, but for what holds the day and random names."""
    names = ("model.safetensors", "search.json", "metrics.jsonl")
    found = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in names
        if (path / name).is_file()
    }
    card = json.loads((path / "privacy.json").read_text())
    return found | {
        "settings": card["sections"][0]["settings"],
        "score": card["sections"][0]["score"],
    }


def _dies(spawn, path, reference, moment: int) -> None:
    wanted, _ = reference
    died = spawn(path, death=moment)
    if (path / "ledger.jsonl").is_file() and (path / "checkpoint" / "trials").exists():
        ledger = Ledger.read(path / "ledger.jsonl")
        assert ledger.book.begun, "a trial was made before the search was charged permanently"
    if died:
        assert spawn(path) == 0
    assert released(path) == wanted
    assert not (path / "checkpoint").exists()
    assert not [p for p in path.iterdir() if p.name.startswith(".")]


def test_killed_at_some_moments_it_resumes_to_the_same_selection(tmp_path, spawn, reference):
    for moment in random.Random(5).sample(range(1, reference[1]), 6):
        _dies(spawn, tmp_path / str(moment), reference, moment)
    assert all(f.holds for f in dpfy.verify(tmp_path / str(moment)))


@pytest.mark.slow
def test_killed_at_every_moment_it_resumes_to_the_same_selection(tmp_path, spawn, reference):
    for moment in range(1, reference[1] + 1):
        _dies(spawn, tmp_path / str(moment), reference, moment)


@pytest.mark.parametrize(
    "more",
    [
        {"route": "composition", "trials": 3},
        {"route": "noisy-max", "score": "held-out", "trials": 3},
        {"route": "subset"},
    ],
)
def test_other_routes_resume_to_the_same_selection(tmp_path, spawn, more):
    assert spawn(tmp_path / "whole", more, tally=tmp_path / "calls.json") == 0
    calls = json.loads((tmp_path / "calls.json").read_text())
    for share in (0.6,):
        path = tmp_path / f"killed-{share}"
        assert spawn(path, more, death=int(calls * share)) == 137
        assert spawn(path, more) == 0
        assert released(path) == released(tmp_path / "whole")


@pytest.mark.slow
def test_kill_minus_nine_with_processes_side_by_side(tmp_path):
    """The real signal, with two workers under way; they end with the search, and the resumed one
    selects what one process alone selects.
    """
    options = {"workers": 2, "trials": 6, "seed": 11}
    command = [sys.executable, str(Path(__file__).parent / "toy.py"), str(tmp_path / "killed")]
    child = subprocess.Popen(
        [*command, json.dumps(options)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    trials = tmp_path / "killed" / "checkpoint" / "trials"
    while child.poll() is None and not (trials.is_dir() and any(trials.iterdir())):
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(1.5)  # workers look for their parent twice a second
    resumed = subprocess.run(
        [*command, json.dumps(options | {"resume": (tmp_path / "killed").exists()})],
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    toy.search(tmp_path / "whole", trials=6, seed=11)
    assert released(tmp_path / "killed")["settings"] == released(tmp_path / "whole")["settings"]
    assert (
        released(tmp_path / "killed")["model.safetensors"]
        == released(tmp_path / "whole")["model.safetensors"]
    )


def test_while_it_lasts_everything_of_trials_is_for_its_owner_alone(tmp_path):
    seen = []

    def objective(trial):
        found = toy.objective(trial)
        secret = tmp_path / "run" / "checkpoint"
        for path in (secret, *secret.rglob("*")):
            seen.append((path.name, path.is_dir(), stat.S_IMODE(path.stat().st_mode)))
        return found

    tune(objective, toy.SPACE, toy.recipe, toy.terms(), Run(tmp_path / "run", seed=3))
    folders = [(name, mode) for name, is_folder, mode in seen if is_folder]
    assert folders
    assert all(mode == 0o700 for _, mode in folders)
    inside = {
        name: mode for name, is_folder, mode in seen if not is_folder and name not in ("lock",)
    }
    assert {"model.safetensors", "told.json", "state.safetensors", "metrics.jsonl"} <= set(inside)
    assert all(mode == 0o600 for mode in inside.values()), inside


def test_nothing_but_the_selected_trial_leaves_the_folder(tmp_path, capfd, caplog, recwarn):
    """Folder, standard output and error, logs and warnings are searched for scores and settings of
    the others and for their number.
    """
    seen = []

    def objective(trial):
        score = toy.objective(trial)
        seen.append((trial.settings["rate"], score))
        return score

    began = int(time.time())
    found = tune(
        objective, toy.SPACE, toy.recipe, toy.terms(trials=9), Run(tmp_path / "run", seed=29)
    )
    assert len(seen) > 3
    print(json.dumps(found.to_json()))
    text = "".join(
        file.read_bytes().decode("latin-1")
        for file in (tmp_path / "run").rglob("*")
        if file.is_file()
    )
    out = capfd.readouterr()
    text += out.out + out.err + caplog.text + "".join(str(w.message) for w in recwarn)
    best = max(score for _, score in seen)
    assert repr(best) in text
    for rate, score in seen:
        if score != best:
            assert repr(rate) not in text
            assert repr(score) not in text
    counts = re.findall(rf"\b{len(seen)} (?:trials|runs|candidates)", text)
    assert not counts
    assert not re.search(r'"(?:seconds|elapsed|duration|trials_made|number_of_trials)"', text)
    times = {
        int(os.stat(path).st_mtime) for path in (tmp_path / "run", *(tmp_path / "run").iterdir())
    }
    assert len(times) == 1
    assert began - 2 <= times.pop() <= began + 60
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "ledger.jsonl", "ledger.jsonl.head", "model.safetensors", "privacy.json", "report.html", "report.md", "search.json",  # noqa: E501
    ]  # fmt: skip


def test_a_trial_is_noted_on_the_disk_before_it_is_erased_and_all_are_erased_before_one_is_published(
    tmp_path, monkeypatch
):
    synced, erased, left = dict[int, int](), list[str](), list[list[str]]()
    sync, erase, publish = os.fsync, searches.erase_folder, outcome.publish
    log = tmp_path / "run" / "checkpoint" / "scores.jsonl"

    def noted(handle):
        sync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def checked(folder, **how):
        on_disk = log.read_bytes()[: synced.get(log.stat().st_ino, 0)]
        assert int(folder.name) in [json.loads(line)["trial"] for line in on_disk.splitlines()]
        erased.append(folder.name)
        erase(folder, **how)

    def published(*arguments):
        left.append(sorted(p.name for p in (tmp_path / "run" / "checkpoint" / "trials").iterdir()))
        publish(*arguments)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(searches, "erase_folder", checked)
    monkeypatch.setattr(outcome, "publish", published)
    toy.search(tmp_path / "run", trials=6, route="composition")
    assert len(left[0]) == 1
    assert sorted([*erased, *left[0]]) == [f"{n:06d}" for n in range(6)]

    def full(folder, **how):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(searches, "erase_folder", full)
    with pytest.raises(OSError, match="No space"):
        toy.search(tmp_path / "full", trials=3, route="composition")


@pytest.mark.slow
def test_processes_side_by_side_select_what_one_process_selects(tmp_path):
    one = toy.search(tmp_path / "one", trials=6, seed=12)
    two = toy.search(
        tmp_path / "two", trials=6, seed=12, work=Execution(workers=2, scaled=toy.scaled)
    )
    assert one.settings == two.settings
    assert released(tmp_path / "one") == released(tmp_path / "two")


@pytest.mark.parametrize(
    "more",
    [
        {"trials": 5},
        {"epsilon": 5.0},
        {"space": {"rate": "0.1..5 log", "clip": [1.0]}},
        {"score": "training"},
    ],
)
def test_a_search_is_not_resumed_as_another(tmp_path, spawn, reference, more):
    assert spawn(tmp_path / "run", death=reference[1] // 2) == 137
    if (
        "epsilon" in more
    ):  # the noise is in the claim: what was asked for is kept, whatever is said now
        assert (
            toy.search(tmp_path / "run", resume=True, **more).report["guarantee"]["epsilon"] <= 4.0
        )
        return
    with pytest.raises(InvalidInput, match="resume"):
        toy.search(tmp_path / "run", resume=True, **more)
    with pytest.raises(InvalidInput, match="unfinished"):
        toy.search(tmp_path / "run")


def test_a_finished_search_is_given_back_and_not_made_again(tmp_path):
    first = toy.search(tmp_path / "run")
    again = toy.search(tmp_path / "run", resume=True)
    assert again.to_json() == first.to_json()


def test_a_search_that_lost_its_scores_is_refused(tmp_path, monkeypatch):
    """Its trials would be made again, with the noise that they had, by whatever code there is
    now.
    """

    def killed(self, handle, number, row):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(searches.Search, "_note", killed)
        with pytest.raises(KeyboardInterrupt):
            toy.search(tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "scores.jsonl").unlink()
    with pytest.raises(Corrupt, match=r"scores\.jsonl: is missing"):
        toy.search(tmp_path / "run", resume=True)
