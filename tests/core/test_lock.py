"""Locks and processes that are forked: what one holds the other does not, and neither lets go of
the other's.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dpfy.core.errors import Busy
from dpfy.core.storage import hold


def test_a_block_from_before_a_fork_does_not_let_go_of_a_lock_of_the_fork(tmp_path: Path) -> None:
    """The fork's own lock gets the number of the handle that it inherited; then the inherited block
    ends, as a collection may end it.
    """
    for name in ("a", "b"):
        (tmp_path / name).touch()
    outer = hold(tmp_path / "a", "a")
    outer.__enter__()
    told, tell = os.pipe()
    go, begin = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        signal.alarm(30)  # a test that fails leaves nobody waiting
        try:
            with hold(tmp_path / "b", "b"):
                outer.__exit__(None, None, None)
                os.write(tell, b"x")
                os.read(go, 1)
            code = 0
        finally:
            os._exit(code)
    os.read(told, 1)
    with pytest.raises(Busy), hold(tmp_path / "b", "b"):
        pass
    os.write(begin, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    outer.__exit__(None, None, None)
    with hold(tmp_path / "a", "a"), hold(tmp_path / "b", "b"):
        pass
    for end in (told, tell, go, begin):
        os.close(end)
