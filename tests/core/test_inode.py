"""A file keeps its identity for life, and no copy of it has the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpfy.core.storage import identity_of, write_atomically


def test_it_stays_whatever_is_done_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "file"
    write_atomically(file, lambda own: own.encode())
    due = identity_of(file)
    assert file.read_text() == due
    (tmp_path / "a").rename(tmp_path / "b")
    file = (tmp_path / "b" / "file").rename(tmp_path / "b" / "other")
    file.chmod(0o600)
    os.utime(file, (0, 0))
    file.write_text("written over")
    os.link(file, tmp_path / "link")
    command = (
        "import sys; from pathlib import Path; from dpfy.core.storage import identity_of; "
        "print(identity_of(Path(sys.argv[1])))"
    )
    told = subprocess.run(
        [sys.executable, "-P", "-c", command, str(file)], capture_output=True, text=True, check=True
    ).stdout
    assert identity_of(file) == due == told.strip()


def test_a_copy_has_another(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("content")
    shutil.copy2(file, tmp_path / "copy")
    assert identity_of(tmp_path / "copy") != identity_of(file)


def test_a_file_with_the_inode_of_one_that_was_removed_has_another(tmp_path: Path) -> None:
    """File systems give numbers out again at once: a removed and restored file often has the one it
    had.
    """
    file, reused = tmp_path / "file", 0
    for _ in range(50):
        file.write_text("content")
        number, due = file.stat().st_ino, identity_of(file)
        file.unlink()
        time.sleep(0.02)  # clocks of file systems are coarse
        file.write_text("content")
        reused += file.stat().st_ino == number
        assert identity_of(file) != due
        file.unlink()
    if not reused:
        pytest.skip("this file system gave no number out again")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="link"):
        identity_of(tmp_path / "link")
