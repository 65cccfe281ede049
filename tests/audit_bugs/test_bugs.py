"""Every seeded bug is caught by the check that is named for it; the code as it is passes all
checks.
"""

from __future__ import annotations

import pytest
import torch

from dpfy.audit import checks, selftest
from dpfy.audit.bench import AS_SHIPPED
from dpfy.audit.bugs import BUGS
from dpfy.cli.whole_bench import WholeBench

LISTED = 27


@pytest.fixture(scope="module")
def bench():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield WholeBench()
    torch.set_num_threads(threads)


def test_there_are_enough_and_each_has_a_check():
    assert len(BUGS) >= LISTED
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {bug.caught_by for bug in BUGS} <= set(checks.CHECKS)


@pytest.mark.parametrize("name", checks.CHECKS)
def test_the_code_as_it_is_passes(bench, name):
    assert checks.run(name, bench, AS_SHIPPED) is None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_is_caught(bench, bug):
    row = selftest.examine(bench, bug, [bug.caught_by])
    assert row.good, f"{bug.words}: not caught by {bug.caught_by}"


def test_a_crash_is_not_a_catch(bench):
    """Only typed refusals count as caught: an accident in a check must surface."""

    class Broken:
        name = "batched"

        def __init__(self, real):
            self.real = real

        def attach(self, model):
            raise RuntimeError("an accident")

        def detach(self):
            self.real.detach()

    import dataclasses

    with pytest.raises(RuntimeError, match="an accident"):
        checks.run("sensitivity", bench, dataclasses.replace(AS_SHIPPED, engine=Broken))


@pytest.mark.slow
def test_full_matrix(bench):
    rows = selftest.run(bench, every=True)
    assert all(row.good for row in rows)
    assert rows[0].caught_by == []
