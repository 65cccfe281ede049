"""Every code block of the documentation runs as it is printed; what cannot run says why to its
reader.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import blocks

PAGES = blocks.pages()
COLUMNS = 100
MOST_NOT_RUN = 13
"""Blocks that say why they are not run. A new one is a decision: raise the number with it."""


def named(page: Path) -> str:
    return str(page.relative_to(blocks.ROOT))


QUICK = [
    page for page in PAGES if any(block.runs and not block.slow for block in blocks.blocks(page))
]
SLOW = [page for page in PAGES if any(block.runs and block.slow for block in blocks.blocks(page))]


def test_quick_blocks_run_as_printed() -> None:
    """In one process, since most of the time goes into importing torch; `make docs` gives each page
    one of its own.
    """
    ended = blocks.in_a_process_of_its_own(*QUICK, quick=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW, ids=named)
def test_all_blocks_run_as_printed(page: Path) -> None:
    ended = blocks.in_a_process_of_its_own(page)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_block_says_what_it_is(page: Path) -> None:
    kinds = {block.language for block in blocks.blocks(page)}
    assert kinds <= {*blocks.RUN, *blocks.SHOWN}, "python and bash are run; name what is only shown"
    assert blocks.indented(page) == [], "fence it: code by indentation is run by nobody"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_blocks_fit_the_page(page: Path) -> None:
    """Output and diagrams too, but on the page of decisions: nobody copies from it."""
    left = [
        f"{named(page)}:{block.line}"
        for block in blocks.blocks(page)
        if page.name != "decisions.md" or block.language in blocks.RUN
        if any(len(line) > COLUMNS for line in block.text.splitlines())
    ]
    assert left == []


def test_few_blocks_are_not_run() -> None:
    left = [
        f"{named(page)}: {block.reason}"
        for page in PAGES
        for block in blocks.blocks(page)
        if block.reason
    ]
    assert len(left) <= MOST_NOT_RUN, left


def page_of(folder: Path, text: str) -> Path:
    (folder / "page.md").write_text(text)
    return folder / "page.md"


def test_a_page_is_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        "toml\n# x.toml\na = 1",
        "python\nb = 2",
        "bash\ngrep -q 'a = 1' x.toml && echo 3 > c",
        "python\nassert (b, open('c').read()) == (2, '3\\n')",
    ]
    text = "".join(f"```{part}\n```\n" for part in parts)
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks.run(page_of(tmp_path, text), quick=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x\n\n```python\nassert False\n```\n", "line 3 failed"),
        ("```bash\nfalse; true\n```\n", "line 1 failed"),
        ("```bash\nfalse | true\n```\n", "line 1 failed"),
        ("```python\nraise SystemExit(0)\n```\n", "line 1 failed"),
    ],
)
def test_a_block_that_fails_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    said: str,
) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=said):
        blocks.run(page_of(tmp_path, text), quick=False)


def test_what_is_not_run_says_so_to_the_reader(tmp_path: Path) -> None:
    page = page_of(
        tmp_path,
        "*Not run here: it costs money.*\n\n```bash\nfalse\n```\n\n<!-- Not run here: no "
        "-->\n```bash\nfalse\n```\n",
    )
    assert [block.reason for block in blocks.blocks(page)] == ["it costs money.", ""], (
        "a reason that nobody sees does not count"
    )


def test_indented_code_is_found(tmp_path: Path) -> None:
    text = (
        "text\n\n    dpfy train\n\n- item\n\n    more of it\n\nend\n\n```text\n\n    inside\n```\n"
    )
    assert blocks.indented(page_of(tmp_path, text)) == [3]
