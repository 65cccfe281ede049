"""The documentation site builds, holds every page, leads nowhere dead and fetches nothing;
generated pages are those of the code.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import links  # noqa: E402
import reference  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


def test_every_page_is_in_the_navigation(site: Path) -> None:
    front = links.Page.read(site / "index.html")
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix(".html"))
        for page in (ROOT / "docs").rglob("*.md")
    }
    listed = {link.partition("#")[0].removeprefix("./") for link in front.links}
    assert pages | {"api.html", "contributing.html", "changelog.html"} <= listed | {"index.html"}


def test_no_link_is_dead_and_nothing_is_fetched(site: Path) -> None:
    wrong, _ = links.check(site)
    assert wrong == []


def test_notes_of_the_test_runner_are_not_shown(site: Path) -> None:
    assert any("*Not run here" in page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    shown = [page.name for page in site.rglob("*.html") if "Not run here:" in page.read_text()]
    assert set(shown) <= {"contributing.html", "changelog.html"}  # they say what the note is


def test_the_search_index_holds_the_pages(site: Path) -> None:
    assert "dpfy init" in (site / "search" / "search_index.json").read_text()


def test_the_api_page_holds_every_public_name(site: Path) -> None:
    import dpfy

    text = (site / "api.html").read_text()
    assert [name for name in dpfy.__all__ if f"dpfy.{name}" not in text] == []
    assert "Guarantees" in text


def test_the_api_page_holds_every_public_name_of_every_family(site: Path) -> None:
    text = (site / "api.html").read_text()
    missing = [
        f"{family}.{name}"
        for family in reference.FAMILIES
        for name in importlib.import_module(family).__all__
        if callable(getattr(importlib.import_module(family), name))
        and f'id="{family}.{name}"'.lower().replace(".", "") not in text.lower().replace(".", "")
    ]
    assert missing == []


def test_the_configuration_page_is_that_of_the_code() -> None:
    assert reference.PAGE.read_text("utf-8") == reference.configuration(), (
        f"stale: {reference.AGAIN}"
    )


def test_the_configuration_page_names_every_key() -> None:
    import dataclasses

    from dpfy.training.config import SECTIONS

    text = reference.configuration()
    for name, kind in SECTIONS.items():
        assert f"### [{name}]" in text
        assert all(f"| `{item.name}` |" in text for item in dataclasses.fields(kind))


@pytest.mark.parametrize(
    ("html", "said"),
    [
        ('<a href="none.html">x</a>', "leads nowhere"),
        ('<a href="#nothing">x</a>', "names no place there"),
        ('<a href="other.html#nothing">x</a>', "names no place there"),
        ('<script src="https://cdn.example/x.js"></script>', "from outside"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "from outside"),
        ('<link rel="preconnect" href="https://fonts.example">', "from outside"),
        ('<img src="https://img.example/x.png">', "from outside"),
    ],
)
def test_dead_links_and_things_from_outside_are_found(tmp_path: Path, html: str, said: str) -> None:
    (tmp_path / "index.html").write_text(html)
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    wrong, _ = links.check(tmp_path)
    assert len(wrong) == 1
    assert said in wrong[0]


def test_living_links_are_not(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">x</a><a href="https://example.org">y</a><h1 id="a"></h1><a '
        'href="#a">z</a>'
    )
    (tmp_path / "other.html").write_text('<h1 id="here">x</h1>')
    assert links.check(tmp_path) == ([], ["https://example.org"])


@pytest.mark.slow
def test_wheel_and_sdist_are_whole(tmp_path: Path) -> None:
    import package

    found = package.check(tmp_path)
    assert found[0].endswith(".whl")
    assert found[1].endswith(".tar.gz")
