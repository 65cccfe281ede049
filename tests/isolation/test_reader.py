"""Records that reach the rows of others before the model sees them: in collate functions and in
data sets, early, late and sometimes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.isolation import reader_cases
from tests.isolation.reader_cases import (
    ALONE,
    MIXED_ITEMS,
    MIXING,
    ORDINARY,
    Clock,
    Held,
    Plain,
    after,
    late,
    pair,
    plainly,
    read,
)
from torch import Tensor
from torch.utils.data import default_collate

import dpfy
from dpfy.core.errors import Unsupported
from dpfy.core.randomness import Randomness
from dpfy.data.batch import Draw, Look, leaves
from dpfy.data.reader import Reader
from dpfy.isolation import lines
from dpfy.isolation.dataset_copy import DatasetCopy
from dpfy.isolation.inspection import Inspected, Inspection, Mixing, secret_steps
from dpfy.isolation.items import same
from dpfy.isolation.lines import Lines

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

AT_ONCE = [
    name
    for name in MIXING
    if not name.startswith(("p ", "from ", "up to ", "own ", "padded,", "whole words, "))
]
RUNS = 4


@pytest.mark.parametrize("name", MIXING)
def test_a_collate_function_that_mixes_is_refused(name: str) -> None:
    found = [read(Plain(), MIXING[name](), secret=secret)[0] for secret in range(RUNS)]
    assert None not in found
    assert name not in AT_ONCE or found == [0] * RUNS


@pytest.mark.parametrize("name", late(0))
def test_a_collate_function_that_mixes_late_is_refused_within_200_steps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new line is followed at once, as long as following lines takes little of the time: here it
    may take all, for how fast the machine is must not matter.
    """
    start = 150
    if name == "a line":
        monkeypatch.setattr(lines, "SHARE", float("inf"))
    found = [
        read(Plain(), late(start)[name](), steps=start + 200, secret=secret)[0]
        for secret in range(5)
    ]
    assert all(step is not None and step >= start for step in found)
    assert name != "a line" or found == [start] * 5


@pytest.mark.slow
def test_late_and_occasional_mixing_is_refused_in_95_of_100_runs() -> None:
    for name, start in (
        ("no branch, p 0.25", 700),
        ("a line, p 0.25", 700),
        ("no branch, p 0.25", 0),
    ):
        found = [
            read(Plain(), late(start)[name](), steps=start + 200, secret=secret)[0]
            for secret in range(60)
        ]
        assert sum(step is not None for step in found) >= 0.95 * len(found), name


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_collate_function_is_accepted_and_checked(name: str) -> None:
    for secret in range(3):
        refused, inspected = read(Plain(), ORDINARY[name], steps=60, secret=secret)
        assert refused is None
        assert inspected.batches >= 8
        assert inspected.most > inspected.least


@pytest.mark.parametrize("name", MIXED_ITEMS)
def test_a_data_set_whose_items_mix_is_refused(name: str, tmp_path: Path) -> None:
    dataset = MIXED_ITEMS[name](tmp_path)
    assert None not in [read(dataset, secret=secret)[0] for secret in range(2)]


BLIND = ("computed", "itself by another number", "closing")
"""Data sets that hold no record where one can be replaced."""


@pytest.mark.parametrize("name", ALONE)
def test_a_data_set_of_single_records_is_accepted_and_left_as_it_was(
    name: str, tmp_path: Path
) -> None:
    dataset = ALONE[name](tmp_path)
    reader_cases.Closing.closed = False
    first = [item_of(dataset, index) for index in (0, 7, 299)]
    for secret in range(2):
        refused, inspected = read(dataset, secret=secret, steps=40)
        assert refused is None
        assert (inspected.unchecked if name in BLIND else inspected.items) >= 8
        assert not (inspected.items if name in BLIND else inspected.unchecked)
    assert all(
        same(old, item_of(dataset, index)) for old, index in zip(first, (0, 7, 299), strict=True)
    )
    assert not reader_cases.Closing.closed


def item_of(dataset: Any, index: int) -> Any:
    torch.manual_seed(0)
    reader_cases.random.seed(0)
    np.random.seed(0)
    return dataset[index]


def draw(rows: int, look: Look, step: int = 0) -> Draw:
    key = Randomness.for_tests(1).key("augmentation", step, 32)
    return Draw(np.random.default_rng(step).permutation(300)[:rows], 0, key, look)


@pytest.mark.parametrize("name", [*ORDINARY, *ALONE])
@pytest.mark.parametrize("views", [1, 3])
def test_a_check_changes_no_bit_of_a_batch_and_no_generator(
    name: str, views: int, tmp_path: Path
) -> None:
    dataset, collate = (
        (Plain(), ORDINARY[name]) if name in ORDINARY else (ALONE[name](tmp_path), None)
    )
    plain, checked = Reader(dataset, collate, views), Reader(dataset, collate, views)
    for step in range(4):
        torch.manual_seed(step)
        one = [t.clone() for t in leaves(plain.batch(draw(9, Look.NEVER, step)))]
        other = leaves(checked.batch(draw(9, Look.ALWAYS, step)))
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)
        )
        drawn = torch.rand(3)
        torch.manual_seed(step)
        assert torch.equal(drawn, torch.rand(3))


def test_a_collate_function_that_mixes_what_the_data_set_left_behind_is_refused() -> None:
    """Called again it finds nothing left behind: only the batch that goes out is mixed."""
    waiting: list[Tensor] = []

    def item(_: Any, index: int) -> Any:
        waiting.append(reader_cases.X[index])
        return {"x": reader_cases.X[index].clone(), "label": 0}

    def collate(items: list[Any]) -> Any:
        x, y = plainly(items)
        x = x + sum(waiting)
        waiting.clear()
        return x, y

    assert read(reader_cases.Computed(item), collate)[0] == 0


def test_what_fails_on_changed_inputs_is_counted_and_no_error() -> None:
    def picky(items: list[Any]) -> Any:
        if len({int(item["x"][0] * 1e6) for item in items}) < len(items):
            raise KeyError("the same record twice")
        return plainly(items)

    refused, inspected = read(Plain(), picky, steps=20)
    assert refused is None
    assert inspected.batches == 0
    assert inspected.unchecked
    assert "could not be checked" in inspected.words


def test_a_hugging_face_data_set_is_read_once_and_its_collate_function_is_checked() -> None:
    import datasets

    from dpfy.data.given import as_source

    held = datasets.Dataset.from_dict(
        {"x": reader_cases.X.tolist(), "label": reader_cases.Y.tolist()}
    )
    source: Any = as_source(held)
    reads: list[int] = []
    many = source.dataset.many
    source.dataset.many = lambda indices: reads.append(len(indices)) or many(indices)
    reader = source._reader
    for step in range(5):
        assert reader.read(draw(9, Look.ALWAYS, step)).inspected == Inspected()
    assert reads == [9] * 5
    with pytest.raises(Mixing):
        Reader(source.dataset, lambda items: default_collate(items)["x"].cumsum(0), 1).read(
            draw(9, Look.ALWAYS)
        )


def test_a_data_set_that_makes_whole_batches_is_checked() -> None:
    class Whole:
        def __init__(self, mixes: bool) -> None:
            self.mixes = mixes

        def __len__(self) -> int:
            return reader_cases.N

        def rows(self, indices: list[int]) -> Tensor:
            x = reader_cases.X[indices]
            return x - x.mean(0) if self.mixes else x

    class Listed(Whole):
        rows = None  # type: ignore[assignment]

        def many(self, indices: list[int]) -> list[Tensor]:
            return list(Whole.rows(self, indices))

    del Listed.rows
    Listed.rows = property(lambda self: (_ for _ in ()).throw(AttributeError))  # type: ignore[assignment]
    for kind in (Whole, Listed):
        assert Reader(kind(mixes=False), None, 1).read(draw(9, Look.ALWAYS)).inspected.batches == 1
        with pytest.raises(Mixing):
            Reader(kind(mixes=True), None, 1).read(draw(9, Look.ALWAYS))


def test_a_copy_shares_no_container_with_the_data_set_and_replaces_what_is_asked() -> None:
    held = Held(pair, cache={}, pair=(reader_cases.X, [1, 2]))
    copied = DatasetCopy(held, {("y",): [9] * reader_cases.N})
    assert set(copied.tables) == {("x",), ("y",), ("pair", 0)}
    assert copied.dataset.y == [9] * reader_cases.N
    assert copied.dataset.cache is not held.cache
    assert copied.dataset.x is held.x
    assert type(held) is Held
    assert isinstance(copied.dataset, Held)


def test_new_lines_are_found_at_the_place_where_they_ran() -> None:
    lines = Lines()
    lines._began -= 1e3  # there is time

    def code(odd: bool) -> int:
        if odd:
            return 1
        return 0

    def run(*odd: bool) -> bool:
        with lines.followed():
            for lines.at, value in enumerate(odd):
                code(value)
        return lines.new

    assert [run(False), run(False), run(False, False, True), run(True, False)] == [
        False,
        False,
        True,
        False,
    ]
    assert lines.where == 2
    assert sys.gettrace() is None


def test_lines_that_take_too_long_are_not_followed() -> None:
    lines = Lines()
    lines._events, lines._blocks = 10**9, 9
    with lines.followed():
        assert sys.gettrace() is None
    lines._began -= 1e7
    with lines.followed():
        assert sys.gettrace() is not None


@pytest.mark.parametrize("steps", [1, 7, 9, 64, 200, 1000, 1001])
def test_secret_steps_are_at_least_eight_and_two_in_200(steps: int) -> None:
    for seed in range(5):
        due = sorted(secret_steps(steps, np.random.default_rng(seed)))
        assert 0 <= due[0] <= due[-1] < steps
        assert len(due) >= min(8, steps // 2 + 1)
        assert all(
            sum(start <= step < start + 200 for step in due) >= 2 for start in range(0, steps - 199)
        )
    assert len({secret_steps(1000, np.random.default_rng(seed)) for seed in range(5)}) == 5


def test_checks_stay_within_their_share_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that each look moves by a millisecond: after the first checks, no more than the
    least tries beyond the share.
    """
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("dpfy.isolation.inspection.time.perf_counter", clock)
    inspection, made = Inspection(), []
    for step in range(400):
        now[0] += 0.02
        if inspection.due(9, step % 40 == 0):
            inspection.check(9, lambda: made.append(sum(1 for _ in inspection.tries())) or 1, [])
    assert made[:2] == [16] * 2
    assert set(made[2:]) <= set(range(2, 13))
    assert inspection.spent < 0.015 * now[0] + 2 * 0.03


def test_what_was_checked_is_said_in_one_sentence() -> None:
    one, two = Inspected(2, 7, 3, 9, 1, 4, 0), Inspected(1, 1, 5, 20, 0, 0, 1)
    assert one.joined(two) == Inspected(3, 8, 3, 20, 1, 4, 1)
    assert one.joined(Inspected()) == one
    assert Inspected().words == ""
    assert one.joined(two).words == (
        "3 batches of 3 to 20 records were collated again with other records in their place (8 "
        "times): the rows of the records that "
        "stayed did not change; 1 items of the data set were read again with all other records "
        "replaced (4 times): they did not change; "
        "1 batches or items of the data set could not be checked for mixing"
    )


# --- in a run
# -----------------------------------------------------------------------------------------------------------------------------  # noqa: E501


class Late:
    """Mixes from its call number `start` on."""

    def __init__(self, start: int) -> None:
        self.start, self.calls = start, 0

    def __call__(self, items: list[Any]) -> Any:
        self.calls += 1
        x, y = plainly(items)
        if self.calls > self.start:
            x = x - x.mean(0)
        return x, y


def train(data: Any, path: Path, *, resume: bool = False, again: bool = False) -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Linear(reader_cases.WIDTH, 3)
    plan = dpfy.dpsgd(reader_cases.N, 24, steps=60, clip_norm=1.0).with_noise(1.0, delta=1e-3)
    run = dpfy.Run(path, seed=5, resume=resume, checkpoint_every=0.0)
    with dpfy.PrivateTraining(
        net, torch.optim.SGD(net.parameters(), lr=0.1), data, plan, run
    ) as training:
        try:
            for Clock.step, (x, y) in enumerate(training.batches()):
                training.step(torch.nn.functional.cross_entropy(net(x), y, reduction="none"))
        except Unsupported:
            if not again:
                raise
            next(training.batches())
    return training


@pytest.mark.parametrize("workers", [0, 2])
def test_a_refusal_in_the_middle_is_typed_final_and_kept(workers: int, tmp_path: Path) -> None:
    data = dpfy.lazy(Plain(), collate=Late(150), workers=workers, prefetch=1)
    with pytest.raises(Unsupported, match="a collate function") as caught:
        train(data, tmp_path / "run", again=True)
    assert "\n" not in str(caught.value)
    with pytest.raises(Unsupported, match="a run that was refused"):
        train(dpfy.lazy(Plain(), collate=plainly), tmp_path / "run", resume=True)


def test_a_refusal_at_the_first_batch_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="a data set whose items are made of several records"):
        train(Held(reader_cases.with_another), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint" / "watch.json").exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_counts_what_was_checked(workers: int, tmp_path: Path) -> None:
    training = train(
        dpfy.lazy(Held(pair), collate=default_collate, workers=workers), tmp_path / "run"
    )
    inspected = training.drawing.inspected
    assert inspected == training.records.inspected
    assert inspected.batches >= 8
    assert inspected.items >= 8
    assert not inspected.unchecked


def test_records_in_memory_have_nothing_to_check(tmp_path: Path) -> None:
    assert (
        train((reader_cases.X, reader_cases.Y), tmp_path / "run").drawing.inspected == Inspected()
    )


def test_a_run_checks_batches_at_secret_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Look] = []
    kept = Reader.read
    monkeypatch.setattr(
        Reader, "read", lambda self, draw: looks.append(draw.look) or kept(self, draw)
    )
    train(dpfy.lazy(Plain(), collate=plainly), tmp_path / "run")
    assert looks.count(Look.ALWAYS) >= 8
    assert looks.count(Look.IF_NEW) >= 40


def test_a_condition_that_only_the_loop_knows(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="changes the row of another"):
        train(dpfy.lazy(Plain(), collate=after(lambda items: Clock.step >= 40)), tmp_path / "run")
