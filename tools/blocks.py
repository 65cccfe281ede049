"""Run the code blocks of the documentation as they are printed: `python tools/blocks.py
docs/accounting.md README.md`.

The Python and bash blocks of one page share a session: one namespace, one empty folder, in the
order of the page. A block that cannot run here says so to its reader, in a line before it: `*Not
run here: REASON.*` Anything else that is fenced (output, TOML, diagrams) says what it is (```text,
```toml). Blocks after the line `<!-- slow -->` take long and are left to `make docs`; `--quick`
runs the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = ("python", "bash")
SHOWN = ("text", "toml", "json", "html", "bibtex", "yaml", "mermaid")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})\s*(\S*)[^`\n]*$")
SKIP = re.compile(r"^\*Not run here: (.+)\*$")
SLOW = "<!-- slow -->"
TITLE = re.compile(r"#\s*([\w-]+\.(?:py|toml))\s*$")
"""A first line such as `# counts.py`: the block is a file of that name, for the blocks after it."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, its first line, why it is not run (empty:
    it is), and whether it takes long.
    """

    language: str
    text: str
    line: int
    reason: str = ""
    slow: bool = False

    @property
    def runs(self) -> bool:
        """Whether it is run, sooner or later."""
        return self.language in RUN and not self.reason


def pages() -> list[Path]:
    """Every page whose blocks are run."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text("utf-8").splitlines()
    opened: tuple[str, str, str, int, str] | None = None
    held: list[str] = []
    slow = False
    for number, line in enumerate(lines, start=1):
        match = FENCE.match(line)
        slow = slow or line.strip() == SLOW
        if opened is None and match:
            opened, held = (*match.groups(), number, _reason(lines, number)), []
        elif opened is not None and match and match[2].startswith(opened[1]) and not match[3]:
            text = "\n".join(row.removeprefix(opened[0]) for row in held) + "\n"
            found.append(Block(opened[2], text, opened[3], opened[4], slow))
            opened = None
        elif opened is not None:
            held.append(line)
    if opened is not None:
        raise ValueError(f"{page.name}: the block in line {opened[3]} is not closed")
    return found


def _reason(lines: list[str], number: int) -> str:
    """What the last line of text before the block in line `number` says about running it."""
    before = next((line.strip() for line in reversed(lines[: number - 1]) if line.strip()), "")
    match = SKIP.match(before)
    return match[1] if match else ""


def indented(page: Path) -> list[int]:
    """Lines at which code is marked by indentation alone: it would be run by nobody."""
    found, fence, quiet, listed = [], False, True, False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        if FENCE.match(line):
            fence = not fence
        elif not fence and quiet and not listed and re.match(r"^ {4}\S", line):
            found.append(number)
        listed = bool(re.match(r"^\s*([-*+]|\d+\.)\s", line)) or (
            listed and (not line.strip() or line.startswith(" "))
        )
        quiet = not line.strip()
    return found


def run(page: Path, quick: bool) -> None:
    """Run the blocks of a page, here and now, in the current folder; if `quick`, those before the
    mark alone.
    """
    space: dict[str, object] = {"__name__": "__main__"}
    sys.path.insert(0, os.getcwd())
    for block in blocks(page):
        if block.reason or (quick and block.slow):
            continue
        try:
            if title := TITLE.match(block.text.partition("\n")[0]):
                Path(title[1]).write_text(block.text)
            elif block.language in RUN:
                _run(block, space, page)
        except BaseException as problem:
            traceback.print_exc()
            raise SystemExit(
                f"{page.relative_to(ROOT)}: the block in line {block.line} failed: {problem}"
            ) from None


def _run(block: Block, space: dict[str, object], page: Path) -> None:
    if block.language == "python":
        padded = "\n" * block.line + block.text  # an error names the line of the page
        exec(compile(padded, str(page), "exec"), space)
        return
    ended = subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise RuntimeError(f"exit status {ended.returncode}")


def in_a_process_of_its_own(*pages: Path, quick: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pages in one fresh process, each in an empty folder of its own (but for the project's
    examples).
    """
    paths = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT)}
    environment = os.environ | {
        name: f"{path}{os.pathsep}{os.environ.get(name, '')}" for name, path in paths.items()
    }
    environment |= {"MPLBACKEND": "agg", "DPFY_DATA": ""}
    words = ["--here", *(["--quick"] if quick else []), *map(str, pages)]
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)


def here(pages: list[Path], quick: bool) -> None:
    """Run pages in this process, one after the other."""
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(ROOT / "examples", Path(folder) / "examples")
            os.chdir(folder)
            run(page, quick)
            os.chdir(ROOT)


def main(arguments: list[str]) -> int:
    """Run the pages that are named, or all; print how many blocks ran, and each that says why it
    does not.
    """
    quick, named = (
        "--quick" in arguments,
        [Path(word).resolve() for word in arguments if not word.startswith("--")],
    )
    if "--here" in arguments:
        here(named, quick)
        return 0
    failed, ran, reasons = 0, 0, []
    for page in named or pages():
        held = [
            block for block in blocks(page) if block.language in RUN and not (quick and block.slow)
        ]
        reasons += [
            f"{page.relative_to(ROOT)}:{block.line}: {block.reason}"
            for block in held
            if block.reason
        ]
        count = sum(block.runs for block in held)
        if not count:
            continue
        ended = in_a_process_of_its_own(page, quick=quick)
        failed += ended.returncode != 0
        ran += count
        print(
            f"{'FAILED' if ended.returncode else 'ok':7}{page.relative_to(ROOT)}: {count} blocks",
            flush=True,
        )
        if ended.returncode:
            print(ended.stdout[-3000:] + ended.stderr[-3000:], flush=True)
    print(f"{ran} blocks ran; {len(reasons)} did not, and say why:")
    print("\n".join(f"  {reason}" for reason in reasons))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
