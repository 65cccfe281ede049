"""How much of dpfy a private step and a call of `fit` pass through: files and functions, as Python's
profiler sees them.

    python tools/trace_step.py            # the numbers
    python tools/trace_step.py --files    # and the files, with how many functions of each

The step is a steady `training.step` of a linear model: after the first steps, at one at which
neither isolation nor contents are checked and no calls are monitored, the forward pass excluded.

A function is code with local variables of its own. Modules and class bodies, which run once where
something is imported for the first time, and comprehensions are none.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn
from torch.nn import functional

import dpfy

ROOT = Path(dpfy.__file__).parent
STEPS, STEADY = 400, 200
"""Steps of the traced run, and from which on they are traced: at most of these the isolation check
has nothing to do, as at most steps of any run.
"""

MOST_FILES, MOST_FUNCTIONS, MOST_FILES_OF_FIT = 25, 110, 85
"""What a step, and `fit`, may pass through."""


class Trace:
    """The functions of dpfy that were called while it was on, and how often."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()

    def __enter__(self) -> Trace:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            self.calls[frame.f_code] += 1

    @property
    def functions(self) -> list[str]:
        """Path and qualified name of each function."""
        return sorted(
            f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"
            for code in self.calls
            # modules and class bodies keep their names in a dictionary: they lack this flag
            if code.co_flags & inspect.CO_OPTIMIZED
            and (not code.co_name.startswith("<") or code.co_name == "<lambda>")
        )

    @property
    def files(self) -> Counter[str]:
        """Each file, and how many of its functions were called."""
        return Counter(function.partition(" ")[0] for function in self.functions)


def problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], dpfy.Plan]:
    """A linear model, its data and a plan."""
    torch.manual_seed(0)
    data = (torch.randn(2000, 20), torch.randint(0, 3, (2000,)))
    recipe = dpfy.dpsgd(records=2000, batch_size=64, steps=STEPS, clip_norm=1.0)
    return nn.Linear(20, 3), data, recipe.with_noise(1.0, delta=1e-5)


def steady_step(folder: Path) -> Trace:
    """The step that passes through the fewest functions, of those after `STEADY`: in the others
    something was checked.
    """
    model, data, plan = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    traces = []
    with dpfy.PrivateTraining(model, optimizer, data, plan, dpfy.Run(folder, seed=1)) as training:
        for x, y in training.batches():
            losses = functional.cross_entropy(model(x), y, reduction="none")
            if training.steps_done < STEADY:
                training.step(losses)
                continue
            trace = Trace()
            with trace:
                training.step(losses)
            traces.append(trace)
    return min(traces, key=lambda trace: len(trace.functions))


def whole_fit(folder: Path) -> Trace:
    """`dpfy.fit` of the same model, from the call to the finished folder."""
    model, data, plan = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    with trace:
        dpfy.fit(model, data, plan=plan, optimizer=optimizer, run=dpfy.Run(folder, seed=1))
    return trace


def main() -> int:
    """Print the numbers; 1 where one is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list the files")
    shown = parser.parse_args().files
    warnings.simplefilter("ignore")
    passed: list[bool] = []

    def tell(name: str, measure: Callable[[Path], Trace], files: int, functions: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trace = measure(Path(folder) / "run")
        gc.collect()
        print(f"{name}: {len(trace.files)} files (at most {files})", end="")
        print(
            f", {len(trace.functions)} functions" + (f" (at most {functions})" if functions else "")
        )
        for file, count in sorted(trace.files.items()) if shown else ():
            print(f"  {file}  {count}")
        passed.append(len(trace.files) <= files)
        passed.append(not functions or len(trace.functions) <= functions)

    tell("steady step", steady_step, MOST_FILES, MOST_FUNCTIONS)
    tell("fit", whole_fit, MOST_FILES_OF_FIT, 0)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
