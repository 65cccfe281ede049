"""Errors that cross from one process to another: the same type, the same line, the same fields."""

from __future__ import annotations

import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import pytest

from dpfy.core.errors import (
    BudgetExceeded,
    Busy,
    Corrupt,
    Internal,
    InvalidInput,
    Lost,
    MultipleErrors,
    Unsupported,
    raise_all,
)

ERRORS = [
    Internal("masses add up to one", "0.9"),
    InvalidInput("steps", 0, "must be positive"),
    Unsupported("this", "do that"),
    Corrupt("ledger.jsonl", "torn"),
    Lost("rank 1 is gone"),
    Busy("held"),
    BudgetExceeded("too much"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error):
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)


def test_a_value_that_cannot_be_sent_arrives_as_text():
    there = pickle.loads(pickle.dumps(InvalidInput("loss", lambda x: x, "must be a name")))
    assert (there.field, there.rule) == ("loss", "must be a name")
    assert "lambda" in there.value


def refuse() -> None:
    raise Internal("an upper bound is above a lower one", "it is not")


def test_a_pool_of_processes_outlives_an_error():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
        with pytest.raises(Internal, match="upper bound"):
            pool.submit(refuse).result()
        assert pool.submit(len, "ab").result() == 2


def test_a_problem_that_is_found_twice_is_told_once():
    one, other = InvalidInput("a", 1, "must be 2"), InvalidInput("b", 1, "must be 2")
    with pytest.raises(MultipleErrors) as found:
        raise_all([one, InvalidInput("a", 1, "must be 2"), other])
    assert [problem.field for problem in found.value.problems] == ["a", "b"]
    with pytest.raises(InvalidInput) as single:
        raise_all([one, InvalidInput("a", 1, "must be 2")])
    assert not isinstance(single.value, MultipleErrors)
