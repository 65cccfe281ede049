"""The corpora of this folder against the isolation check: ordinary programs are accepted, programs that mix
are refused, and both are what they say.

`python -m tests.isolation.test_corpus [ordinary|mixing|moves] [runs] [part of a name]` prints a
table.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.isolation import cases, mixing, ordinary
from tests.isolation.cases import EVERY, REFUSED, STEPS, Case, Moves, Now, Outcome
from tests.isolation.known import ACCEPTED, ACCEPTED_LATE, REFUSED_ORDINARY, STATED, UNSHOWN

import dpfy

pytestmark = [pytest.mark.filterwarnings("ignore")]

RUNS, REFUSED_OF_RUNS = 20, 17
"""Of so many runs so many must be refused: with probability 0.95 each, fewer are in one test of
400.
"""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampled(names: list[str], each: int, known: set[str]) -> list[object]:
    """All names as parameters; all but each so-manieth are slow; those that are `known` to fail may
    fail.
    """
    found = []
    for place, name in enumerate(names):
        marks = [] if place % each == 0 else [pytest.mark.slow]
        marks += [pytest.mark.xfail(strict=False, reason="not yet")] if name in known else []
        found.append(pytest.param(name, marks=marks, id=name))
    return found


def required(case: Case) -> Now:
    """When the program mixes at every step of its own batches."""
    return next((now for now in case.when if now.least), EVERY)


def accepted(case: Case, outcome: Outcome, path: Path) -> None:
    assert not outcome.refused, f"step {outcome.step}: {outcome.said}"
    card = json.loads((path / "run" / "privacy.json").read_text())
    assert "run again with other records" in json.dumps(card)
    assert all(finding.holds for finding in dpfy.verify(path / "run"))


ALL_ORDINARY, ALL_MIXING = list(ordinary.CASES), list(mixing.CASES)
AT_ONCE = [
    name
    for name, case in mixing.CASES.items()
    if any(now == EVERY or now.least for now in case.when)
]
LATER = {
    f"{name} | {now}": (case, now)
    for name, case in mixing.CASES.items()
    for now in case.when
    if now.start or now.chance < 1
}


def test_there_are_enough_cases() -> None:
    own = [name for name in ALL_MIXING if not name.startswith(("model: ", "loss: "))]
    assert len(ALL_ORDINARY) >= 120
    assert len(own) >= 120
    assert len(AT_ONCE) >= 120
    assert {now.start / STEPS for case in mixing.CASES.values() for now in case.when} >= {
        0,
        0.25,
        0.5,
        0.75,
        0.9,
    }
    assert {now.chance for case in mixing.CASES.values() for now in case.when} >= {0.1, 0.25, 0.5}
    assert {now.least for case in mixing.CASES.values() for now in case.when} >= {32, 64, 128}


@pytest.mark.parametrize("name", sampled(ALL_ORDINARY, 8, REFUSED_ORDINARY))
def test_ordinary_programs_are_accepted(name: str, tmp_path: Path) -> None:
    accepted(ordinary.CASES[name], cases.train(ordinary.CASES[name], tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("name", sampled(ALL_ORDINARY, 1, REFUSED_ORDINARY))
def test_ordinary_programs_are_accepted_whatever_the_seed(
    name: str, seed: int, tmp_path: Path
) -> None:
    accepted(
        ordinary.CASES[name],
        cases.train(ordinary.CASES[name], tmp_path, seed=seed, steps=20),
        tmp_path,
    )


@pytest.mark.parametrize(
    "name", sampled([n for n in ALL_ORDINARY if ordinary.CASES[n].fit], 40, REFUSED_ORDINARY)
)
def test_ordinary_programs_are_accepted_in_one_call(name: str, tmp_path: Path) -> None:
    outcome = cases.train(ordinary.CASES[name], tmp_path, one_call=True)
    assert not outcome.refused, outcome.said


@pytest.mark.parametrize("name", sorted(STATED))
def test_where_nothing_can_be_replayed_the_report_says_so_first(name: str, tmp_path: Path) -> None:
    case = mixing.CASES[name]
    outcome = cases.train(case, tmp_path, now=required(case))
    assert not outcome.refused
    card = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert card["warnings"][0].startswith(
        "Whether examples mix was not checked by replay at all steps"
    )
    page = (tmp_path / "run" / "report.md").read_text()
    assert page.index("not checked by replay") < page.index("## The guarantee, item by item")


@pytest.mark.parametrize(
    "name", sampled([name for name in AT_ONCE if name not in STATED], 3, ACCEPTED)
)
def test_programs_that_mix_at_every_step_are_refused_before_anything_is_released(
    name: str, tmp_path: Path
) -> None:
    case = mixing.CASES[name]
    outcome = cases.train(case, tmp_path, now=required(case))
    assert outcome.refused
    assert REFUSED.search(outcome.said), outcome.said
    assert outcome.step in ((0, 1) if is_of_several_steps(name) else (0,)), outcome
    assert not (tmp_path / "run" / "privacy.json").exists()


def is_of_several_steps(name: str) -> bool:
    """Whether one step alone cannot show it: what one leaves to the next."""
    return name.startswith("kept")


@pytest.mark.parametrize(
    "name", sampled([n for n in AT_ONCE if mixing.CASES[n].fit and n not in STATED], 25, ACCEPTED)
)
def test_programs_that_mix_are_refused_in_one_call(name: str, tmp_path: Path) -> None:
    case = mixing.CASES[name]
    assert cases.train(case, tmp_path, now=required(case), one_call=True).refused
    assert not (tmp_path / "run" / "privacy.json").exists()


@pytest.mark.parametrize("name", sampled(list(LATER), 12, ACCEPTED_LATE))
def test_late_and_occasional_mixing_is_refused(name: str, tmp_path: Path) -> None:
    case, now = LATER[name]
    assert now.chance < 0.25 or cases.train(case, tmp_path, now=now, steps=STEPS, seed=11).refused


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sampled([n for n, (_, now) in LATER.items() if now.chance >= 0.25], 1, ACCEPTED_LATE)
)
def test_late_and_occasional_mixing_is_refused_nearly_always(name: str, tmp_path: Path) -> None:
    case, now = LATER[name]
    refused = [
        cases.train(case, tmp_path / str(seed), now=now, steps=STEPS, seed=seed).refused
        for seed in range(RUNS)
    ]
    assert sum(refused) >= REFUSED_OF_RUNS


@pytest.mark.parametrize(
    "name", sampled(ALL_ORDINARY, 16, {"gradient penalty of each input", *REFUSED_ORDINARY})
)
def test_in_ordinary_programs_a_record_moves_its_own_part_alone(name: str) -> None:
    found = cases.moves(ordinary.CASES[name])
    assert found.apart, found


@pytest.mark.parametrize("name", sampled([n for n in ALL_MIXING if n not in UNSHOWN], 10, set()))
def test_in_programs_that_mix_a_record_moves_more(name: str) -> None:
    found = shown(mixing.CASES[name])
    assert found.mixes, found


def shown(case: Case) -> Moves:
    """How far a record moves the sums of a program that mixes, looked for longer where it is hard
    to see.
    """
    found = cases.moves(case, now=required(case))
    if not found.mixes:  # a threshold that few records cross
        found = cases.moves(case, now=required(case), tried=24, steps=3)
    # the engine looks at its first backward passes, and makes those that mix one example at a time
    if not found.mixes:
        found = cases.moves(case, now=Now(start=2), tried=12, steps=3)
    return found


def table(kind: str, runs: int, part: str) -> None:
    """Print how each case ended: refused in how many of the runs, at which steps, and what was said
    first.
    """
    rows: list[tuple[str, Case, Now, int]] = []
    if kind == "ordinary":
        rows = [(name, case, EVERY, 14) for name, case in ordinary.CASES.items()]
    elif kind == "at-once":
        rows = [(name, mixing.CASES[name], required(mixing.CASES[name]), 14) for name in AT_ONCE]
    elif kind == "later":
        rows = [(name, case, now, STEPS) for name, (case, now) in LATER.items()]
    else:
        for name, case in (ordinary.CASES | mixing.CASES).items():
            if part in name:
                print(name, shown(case) if case.when else cases.moves(case), flush=True)
        return
    print("| case | refused | at steps | said |\n|---|---|---|---|")
    for name, case, now, steps in rows:
        if part not in name:
            continue
        found = []
        for seed in range(1, runs + 1):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found.append(cases.train(case, Path(folder), now=now, seed=seed, steps=steps))
                except Exception as error:
                    found.append(Outcome(-1, f"{type(error).__name__}: {error}", 0.0))
        refused = [o for o in found if o.refused]
        said = refused[0].said.splitlines()[0][:110] if refused else ""
        name = name.replace("|", "/")
        print(
            f"| {name} | {len(refused)} of {runs} | {', '.join(str(o.step) for o in refused[:8])} "
            f"| {said} |",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = [*sys.argv[1:], *["at-once", "1", ""][len(sys.argv) - 1 :]]
    table(words[0], int(words[1]), words[2])
