"""The run folder: where a run's plan, ledger, secrets, checkpoints and results live, and in which order they come to be.

    runs/x/  plan.json  config.toml  ledger.jsonl  metrics.jsonl  model.safetensors  privacy.json  report.html
             checkpoint/  lock  secret.json (0600)  state.safetensors (0600)         erased when the run ends

The order is the safety: secret, then reservation, then data. A crash between any two leaves a folder that can be resumed.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.core import check
from dpfy.core.errors import Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Budget, Ledger, Permit, hold
from dpfy.core.random import Randomness
from dpfy.core.storage import PRIVATE_MODE, erase, write_atomically
from dpfy.plan.recipe import Plan

TRAINING = "training"
BEGUN = "begun"


@dataclass(frozen=True)
class Run:
    """Where a run lives and what it may spend.

    `ledger` is the ledger of the data set, shared by all runs on it, with `budget` (created with it, or equal to what it has).
    `seed` fixes all randomness for tests: such a run protects nothing, and its card says so. A checkpoint is written whenever
    `checkpoint_every` seconds have passed; the bits released do not depend on it. `config` is the configuration as text, in the form
    to publish and in full (kept with the secrets until the run ends, so that it can be resumed without repeating it).
    """

    path: Path | str
    resume: bool = False
    ledger: Path | str | None = None
    budget: Budget | None = None
    seed: int | None = None
    checkpoint_every: float = 30.0
    config: tuple[str, str] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check.nonnegative("checkpoint_every", self.checkpoint_every)
        if self.budget is not None and self.ledger is None:
            raise InvalidInput("budget", self.budget.to_json(), "needs a ledger (--ledger PATH) to be kept in")


class RunFolder:
    """An opened run folder, held by this process alone until `close`."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.path = Path(run.path)
        self.shared: tuple[Ledger, Permit] | None = None
        self._refuse_or_resume()
        self.secrets = self.path / "checkpoint"
        self.secrets.mkdir(parents=True, exist_ok=True)
        os.chmod(self.secrets, 0o700)
        self._hold: AbstractContextManager[None] = hold(self.secrets / "lock", f"run {self.path.name}")
        self._hold.__enter__()
        self.fresh = not self.state.is_file()
        try:
            self._write_plan()
            self.id, self.randomness = self._secret()
            self.ledger = Ledger.open(self.path / "ledger.jsonl", unit=plan.recipe.unit, adjacency=plan.recipe.adjacency)
            self.permit = self._reserve()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def state(self) -> Path:
        """The checkpoint file."""
        return self.secrets / "state.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the card is written."""
        return (self.path / "privacy.json").is_file()

    @property
    def begun(self) -> bool:
        """Whether steps may have been made. Without its checkpoint such a run must neither start again (its noise would meet other
        gradients) nor give its reservation back."""
        file = self.path / "ledger.jsonl"
        return file.is_file() and any(
            b["type"] == BEGUN for b in Ledger.open(file, unit=self.plan.recipe.unit, adjacency=self.plan.recipe.adjacency).bodies
        )

    def note_begun(self) -> None:
        """Write down, before the first step, that steps will be made."""
        if not self.begun:
            self.ledger.note(BEGUN)

    def close(self) -> None:
        """Let other processes have the folder."""
        self._hold.__exit__(None, None, None)

    def __enter__(self) -> RunFolder:
        """Held until the block is left."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Let go; if the run never got as far as its first checkpoint because its input was refused, leave nothing behind."""
        if isinstance(error, DpfyError) and self.fresh and not self.state.is_file() and not self.begun:
            self.abandon()
        self.close()

    def abandon(self) -> None:
        """Undo a run that released nothing: destroy its secret, then give back its reservation, then remove the folder."""
        erase_secrets(self.path)
        if self.shared is not None:
            ledger, permit = self.shared
            ledger.void(permit, "the input was refused before the first step; nothing was released")
        for name in ("ledger.jsonl", "config.toml", "plan.json"):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _refuse_or_resume(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise InvalidInput("run", str(self.run.path), "is a file, not a folder")
        occupied = self.path.is_dir() and any(self.path.iterdir())
        if not occupied:
            return
        if not (self.path / "plan.json").is_file() and not _is_stub(self.path):
            raise InvalidInput("run", str(self.run.path), "is not empty and holds no dpfy run; choose another folder")
        if self.finished:
            raise InvalidInput("run", str(self.run.path), "already holds a finished run; choose another folder")
        if (self.path / "plan.json").is_file():
            held = load_plan(self.path)
            if held != self.plan:
                raise InvalidInput("run", str(self.run.path), f"already holds a different plan ({_difference(held, self.plan)})")
            if not self.run.resume:
                raise InvalidInput(
                    "run", str(self.run.path), "holds an unfinished run; resume it (--resume) or choose another folder"
                )

    def _write_plan(self) -> None:
        if not (self.path / "plan.json").is_file():
            if self.run.config is not None:
                public, private = self.run.config
                write_atomically(self.secrets / "config.toml", private.encode(), mode=PRIVATE_MODE)
                write_atomically(self.path / "config.toml", public.encode())
            write_atomically(self.path / "plan.json", (json.dumps(self.plan.to_json(), indent=1, sort_keys=True) + "\n").encode())

    def _secret(self) -> tuple[str, Randomness]:
        file = self.secrets / "secret.json"
        if not file.is_file():
            if (self.path / "ledger.jsonl").is_file() and Ledger.read(self.path / "ledger.jsonl").permits():
                raise Corrupt("checkpoint/secret.json", "is missing: the run cannot be resumed; start a new one")
            fresh = Randomness.from_os() if self.run.seed is None else Randomness.for_tests(self.run.seed)
            body = {"run": secrets.token_hex(8), "secret": fresh.secret.hex(), "fixed": fresh.fixed}
            write_atomically(file, json.dumps(body).encode(), mode=PRIVATE_MODE)
        try:
            held = json.loads(file.read_text())
            return held["run"], Randomness(bytes.fromhex(held["secret"]), held["fixed"])
        except (ValueError, KeyError, TypeError):
            raise Corrupt("checkpoint/secret.json", "is damaged: the run cannot be resumed; start a new one") from None

    def _reserve(self) -> Permit:
        """The right to run the whole plan: written to the data set's ledger (once a run) and to the run's own, before any data is read."""
        self.shared = self._reserve_shared()
        for permit in self.ledger.permits():
            if permit.name == TRAINING:
                return self._covering(permit)
        permit = self.ledger.reserve(TRAINING, self.plan.event)
        if self.shared is not None:
            self.ledger.note("shared-ledger", entry=self.shared[1].entry)
        return self._covering(permit)

    def _reserve_shared(self) -> tuple[Ledger, Permit] | None:
        if self.run.ledger is None:
            return None
        path, recipe = Path(self.run.ledger), self.plan.recipe
        ledger = Ledger.open(path, unit=recipe.unit, adjacency=recipe.adjacency, budget=self.run.budget)
        name = f"{TRAINING} {self.id}"
        for permit in ledger.permits():
            if permit.name == name and permit.event == self.plan.event:
                return ledger, permit
        budget = accounting.filters.from_json(ledger.terms) if ledger.terms else None
        return ledger, ledger.reserve(name, self.plan.event, budget=budget)

    def _covering(self, permit: Permit) -> Permit:
        if permit.event != self.plan.event:
            raise Corrupt("ledger.jsonl", "reserves another event than this plan's")
        return Permit(permit.name, permit.event, self.plan.recipe.steps, permit.entry)


def erase_secrets(folder: Path) -> None:
    """Destroy seed, noise state and checkpoints of a finished run: what is left is safe to publish. Safe to call again."""
    hidden = folder / "checkpoint"
    if hidden.is_dir():
        for file in sorted(hidden.iterdir(), key=lambda f: f.name == "lock"):
            erase(file)
        hidden.rmdir()


def load_plan(folder: Path) -> Plan:
    """The plan a run folder holds."""
    try:
        return Plan.from_json(json.loads((folder / "plan.json").read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise Corrupt("plan.json", f"is not a plan ({problem})") from None


def _is_stub(path: Path) -> bool:
    """A folder that a crash left before its plan was written: nothing in it but what RunFolder makes first."""
    return all(p.name in ("checkpoint", "config.toml") or p.name.startswith(".") for p in path.iterdir())


def _difference(held: Plan, asked: Plan) -> str:
    mine, theirs = _leaves(held.to_json()), _leaves(asked.to_json())
    keys = [k for k in sorted(mine | theirs) if mine.get(k) != theirs.get(k)]
    key = keys[0]
    return f"{key}: {mine.get(key)} there, {theirs.get(key)} here"


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {k: v for key, value in data.items() for k, v in _leaves(value, f"{prefix}.{key}".lstrip(".")).items()}
