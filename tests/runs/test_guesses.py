"""The 36 guesses of newcomers: at least 30 work, and the rest are told the right call in a line."""

from __future__ import annotations

import warnings

import pytest
from tests.runs.guesses import GUESSES, SETUP

import dpfy


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("guesses")


@pytest.fixture(scope="module")
def names(place):
    held: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        exec(SETUP, held)
    return held


def test_there_are_enough_of_them():
    assert len(GUESSES) == 36
    assert sum(told is None for _, told in GUESSES.values()) >= 30


@pytest.mark.parametrize("guess", GUESSES)
def test_a_guess(guess, names, place, monkeypatch):
    monkeypatch.chdir(place)
    code, told = GUESSES[guess]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if told is None:
            exec(code, dict(names))
            return
        with pytest.raises((AttributeError, dpfy.DpfyError)) as refused:
            exec(code, dict(names))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
