"""The contract of accounting, over random settings of every event and sampling in the table.

More steps, less delta and less noise never cost less; an upper bound is never below a lower one,
nor below what the two distributions of one step give when they are integrated directly; and no
accountant is below the certified lower bound.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import laws
from random_settings import KINDS, setting
from table_events import EVENTS

from dpfy import accounting
from dpfy.accounting.rules import TABLE
from dpfy.core import events as ev
from dpfy.core.errors import Unsupported
from dpfy.core.unit import Adjacency


@pytest.fixture(scope="module")
def obeyed(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, int], Future[None]]]:
    """The chunks that were asked for, each checked by another process, as many at a time as there
    are cores.
    """
    mine = [
        item
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    asked = [(item.callspec.params["law"], item.callspec.params["chunk"]) for item in mine]  # type: ignore[attr-defined]
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("forkserver"))
    yield {one: pool.submit(laws.check_chunk, *one) for one in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    ("law", "chunk"),
    [*(("settings", chunk) for chunk in range(20)), *(("mixtures", chunk) for chunk in range(2))],
)
def test_random_settings_obey_the_laws(
    law: str, chunk: int, obeyed: dict[tuple[str, int], Future[None]]
) -> None:
    obeyed[law, chunk].result()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "chunk"),
    [
        *(("settings", chunk) for chunk in range(20, 220)),
        *(("mixtures", chunk) for chunk in range(2, 42)),
    ],
)
def test_many_random_settings_obey_the_laws(
    law: str, chunk: int, obeyed: dict[tuple[str, int], Future[None]]
) -> None:
    obeyed[law, chunk].result()


def test_less_discrete_gaussian_noise_can_cost_less() -> None:
    """Which is why no law is asked of it there: whole numbers enter the tail one by one as it
    widens. Both bounds say so.
    """
    one, other = (
        accounting.curve(
            ev.Repeated(ev.PoissonSampled(0.0016890346466804879, ev.DiscreteGaussian(sigma)), 5)
        )
        for sigma in (0.9174606761640925, 0.9358098896873744)
    )
    less, more = one.epsilon(1.26334e-12), other.epsilon_lower(1.26334e-12)
    assert more is not None
    assert less < 0.84 < 1.08 < more


def test_every_event_with_a_pair_is_drawn() -> None:
    """A new event with a pair must come with settings here; the laws of every other one are in
    `test_rows.py`.
    """
    drawn = {type(leaf) for name in KINDS for leaf in _nodes(setting(0, name).make(1.0))}
    assert drawn == {
        type(event)
        for event in EVENTS
        if any(_has_pair(event, adjacency) for adjacency in Adjacency)
    }


def _has_pair(event: ev.Event, adjacency: Adjacency) -> bool:
    try:
        TABLE[type(event)].pair(event, adjacency)
    except Unsupported:
        return False
    return True


def _nodes(event: ev.Event) -> list[ev.Event]:
    inner = getattr(event, "event", None)
    return [event, *(_nodes(inner) if inner is not None else [])]
