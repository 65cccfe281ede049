"""Models by other people under the private step: which are accepted, how exact they are, and what
they cost.

    python benchmarks/zoo.py                         # every family that is installed, on this CPU
    python benchmarks/zoo.py --only Swin T5 --exact  # exactness alone, in float64 at tiny sizes
    python benchmarks/zoo.py --write docs/models.md  # the page of the documentation

Each family runs in a process of its own, so that a crash is one line of the table. Exactness is the
distance to the reference loop, relative to its length, with a bound that clips about half of the
examples and with one that clips none. Time is CPU seconds of one thread: private steps (forward,
backward, clipped sum) over plain ones, in turns, the median ratio. "path" names parameters whose
gradients were sent through the graph example by example.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn
from zoo_families import FAMILIES, losses_of

import dpfy
from dpfy.core.errors import DpfyError
from dpfy.gradients.clip import FlatClip
from dpfy.gradients.engines.bookkeeping import BookkeepingEngine
from dpfy.gradients.engines.loop import LoopEngine
from dpfy.gradients.step_cost import step_cost

TOLERANCE = 1e-9
"""How far the sum in float64 may be from that of the reference loop."""

Inputs = dict[str, Tensor]


def prepared(name: str, size: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model, with BatchNorm repaired and dropout off."""
    model, inputs = FAMILIES[name](size)
    model = (
        dpfy.repair(model)
        if any("BatchNorm" in type(m).__name__ for m in model.modules())
        else model
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0
        if type(module).__name__ == "DropPath":
            module.drop_prob = 0.0
    return model.to(dtype).train(), inputs


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Numbers in this type."""
    return {k: t.to(dtype) if t.is_floating_point() else t for k, t in inputs.items()}


def run(model: nn.Module, inputs: Inputs) -> Tensor:
    """One loss an example."""
    given = (inputs["x"],) if list(inputs) == ["x"] else ()
    return losses_of(model(*given, **({} if given else inputs)))


def exactness(name: str, batches: tuple[int, ...] = (3, 3, 2)) -> tuple[float, str]:
    """The largest relative distance to the reference loop, and what ran example by example."""
    torch.manual_seed(1)
    model, inputs = prepared(name, "tiny", torch.float64)
    oracle, worst, path = copy.deepcopy(model), 0.0, ""
    fast, slow = BookkeepingEngine(), LoopEngine()
    fast.attach(model)
    slow.attach(oracle)
    for batch in batches:
        given = cast(inputs(batch), torch.float64)
        whole = math.sqrt(_square(slow.bounded_sum(run(oracle, given), FlatClip(1e12)).value))
        for bound in (whole / batch / 2, 1e12):
            right = slow.bounded_sum(run(oracle, given), FlatClip(bound)).value
            found = fast.bounded_sum(run(model, given), FlatClip(bound)).value
            gap = math.sqrt(
                _square({k: found[k] - right[k] for k in right}) / max(_square(right), 1e-300)
            )
            worst = max(worst, gap)
        path = ", ".join(sorted(fast.per_example_parameters))
    return worst, path


def _square(grads: dict[str, Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in grads.values())


def cost(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Time and memory of the private step over the plain one, in float32."""
    model, inputs = prepared(name, "usual", torch.float32)
    given, engine = inputs(batch), BookkeepingEngine()

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *tensors: Tensor) -> Any:
            named = dict(zip(given, tensors, strict=True))
            return self.inner(*named.values()) if list(named) == ["x"] else self.inner(**named)

    torch.set_num_threads(1)
    found = step_cost(Called(), tuple(given.values()), losses_of, rounds, engine)
    return {"time": found.time_ratio, "memory": found.memory_ratio, "plain_ms": found.plain_ms}


def one(name: str, exact: bool, batch: int, rounds: int) -> dict[str, Any]:
    """The row of one family."""
    row: dict[str, Any] = {"family": name, "accepted": True}
    try:
        start = time.process_time()
        row["error"], row["path"] = exactness(name)
        row["seconds"] = round(time.process_time() - start, 2)
        if not exact:
            row |= cost(name, batch, rounds)
    except DpfyError as error:
        row |= {"accepted": False, "why": str(error)}
    except Exception as error:  # a row of the table, whatever it is
        row |= {
            "accepted": False,
            "why": f"{type(error).__name__}: {str(error)[:200]}",
            "broken": True,
        }
    return row


def line(row: dict[str, Any]) -> str:
    """The row in words."""
    if not row["accepted"]:
        return f"| {row['family']} | no | {row['why'][:160]} | | | |"
    ratios = [f"{row[k]:.2f}" if row.get(k) is not None else "" for k in ("time", "memory")]
    path = row["path"] if len(row["path"]) < 60 else f"{row['path'].count(',') + 1} parameters"
    return f"| {row['family']} | yes | {path or 'all by rule'} | {row['error']:.0e} | {' | '.join(ratios)} |"


HEAD = "| family | accepted | example by example | distance | time | memory |\n|---|---|---|---|---|---|"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="families whose name contains one of these"
    )
    parser.add_argument("--exact", action="store_true", help="exactness alone")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=300, help="seconds a family may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--write", type=Path, help="write the table into this page")
    options = parser.parse_args()
    if options.child:
        warnings.simplefilter("ignore")
        print("ROW " + json.dumps(one(options.child, options.exact, options.batch, options.rounds)))
        return 0
    names = [n for n in FAMILIES if not options.only or any(part in n for part in options.only)]
    rows = []
    print(HEAD, flush=True)
    for name in names:
        command = [sys.executable, __file__, "--child", name, "--batch", str(options.batch)]
        command += ["--rounds", str(options.rounds), *["--exact"] * options.exact]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
            found = [each for each in done.stdout.splitlines() if each.startswith("ROW ")]
            row = (
                json.loads(found[-1][4:])
                if found
                else {
                    "family": name,
                    "accepted": False,
                    "broken": True,
                    "why": f"ended with {done.returncode}: {done.stderr[-150:]}",
                }
            )
        except subprocess.TimeoutExpired:
            row = {
                "family": name,
                "accepted": False,
                "broken": True,
                "why": f"more than {options.limit} s",
            }
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    if options.write:
        write(options.write, rows)
    wrong = [row for row in rows if row.get("broken") or row.get("error", 0.0) > TOLERANCE]
    slow = [row for row in rows if row.get("time", 0.0) > 2]
    print(
        f"\n{len(rows)} families, {sum(r['accepted'] for r in rows)} accepted, {len(wrong)} broken or inexact, "
        f"{len(slow)} above twice the plain step"
    )
    return int(bool(wrong))


MARK = "<!-- table -->"


def write(page: Path, rows: list[dict[str, Any]]) -> None:
    """Put the table after the mark of the page; what could not be built or run is left out."""
    rows = [row for row in rows if not row.get("broken")]
    before = page.read_text().split(MARK)[0]
    page.write_text(before + MARK + "\n\n" + "\n".join([HEAD, *map(line, rows)]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
