"""The run folder: where a run's plan, ledger, secrets, checkpoints and results live, and in which order they come to be.

    runs/x/  plan.json  config.toml  ledger.jsonl  metrics.jsonl  model.safetensors  privacy.json  report.html
             .dpfy-NAME  checkpoint/  lock  secret.json (0600)  state.safetensors (0600)         gone when the run ends

The order is the safety: the figures of the card, then mark, configuration, plan, secret, reservation, data. A plan that cannot be billed
leaves nothing; a crash between any two leaves a folder that can be resumed; a folder without the mark is not touched.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpfy import accounting
from dpfy.core import check, reading
from dpfy.core.errors import Busy, Corrupt, DpfyError, InvalidInput
from dpfy.core.ledger import Budget, Ledger, Permit, hold
from dpfy.core.random import Randomness
from dpfy.core.storage import PRIVATE_MODE, sha256_of, write_atomically
from dpfy.plan.claim import Claim, ForeignBatches, differences, read_plan
from dpfy.plan.recipe import Plan
from dpfy.report import forecast
from dpfy.training import evaluation
from dpfy.training.mark import HIDDEN, Mark, refuse_planted

TRAINING, EVALUATION = "training", "evaluation"
CARD = "privacy.json"
LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Run:
    """Where a run lives and what it may spend.

    `ledger` is the ledger of the data set, shared by all runs on it, with `budget` (created with it, or equal to what it has).
    `seed` fixes all randomness for tests: such a run protects nothing, and its card says so. A checkpoint is written whenever
    `checkpoint_every` seconds have passed; the bits released do not depend on it. `config` is the configuration as text, in the form
    to publish and in full (kept with the secrets until the run ends, so that it can be resumed without repeating it). `batches` says
    how batches are formed if not by dpfy: such a run is billed without amplification, in every ledger. `evaluation` is the noise
    multiplier of a billed evaluation on private held-out records (`dpfy.fit`), reserved and billed beside the plan.
    """

    path: Path | str
    resume: bool = False
    ledger: Path | str | None = None
    budget: Budget | None = None
    seed: int | None = None
    checkpoint_every: float = 30.0
    config: tuple[str, str] | None = field(default=None, repr=False)
    batches: ForeignBatches | None = None
    evaluation: float | None = None

    def __post_init__(self) -> None:
        check.nonnegative("checkpoint_every", self.checkpoint_every)
        if self.evaluation is not None:
            evaluation.event(self.evaluation)
        if self.budget is not None and self.ledger is None:
            raise InvalidInput("budget", self.budget.to_json(), "needs a ledger (--ledger PATH) to be kept in")


class RunFolder:
    """An opened run folder, held by this process alone until `close`."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.run, self.plan = run, plan
        self.claim = Claim(plan, run.seed is not None, run.batches)
        self.path = Path(run.path)
        self.secrets = self.path / HIDDEN
        self.shared: tuple[Ledger, Permit] | None = None
        self._evaluation: list[tuple[Ledger, Permit]] = []
        self._over = self._noted = self.in_use = False
        self._hold: AbstractContextManager[None] = nullcontext()
        self.mark, self.fresh = self._marked()
        try:
            self._take()
            self.fresh = not self.state.is_file()
            self._write_plan()
            self.id, self.randomness = self._secret()
            self.claim = replace(self.claim, fixed_seed=self.randomness.fixed)
            self.ledger = Ledger.open(self.path / LEDGER, unit=plan.recipe.unit, adjacency=plan.recipe.adjacency)
            self.permit = self._reserve()
            self._reserve_evaluation()
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
        return (self.path / CARD).is_file()

    @property
    def begun(self) -> bool:
        """Whether steps may have been made. Without its checkpoint such a run must neither start again (its noise would meet other
        gradients) nor give its reservation back."""
        if not (self.path / LEDGER).is_file():
            return False
        try:
            own = bool(Ledger.read(self.path / LEDGER).book.begun)
        except Corrupt:
            return True  # what cannot be read may have begun
        return own or (self.shared is not None and self.shared[1].entry in self.shared[0].book.begun)

    def note_begun(self) -> None:
        """Write down, in every ledger and before the first release, that steps will be made: from now on they are billed for good.

        Until then the run can be undone.
        """
        if self._noted:
            return
        if self.shared is not None:
            ledger, permit = self.shared
            self.shared = ledger, ledger.begin(permit)
        self.permit = self._covering(self.ledger.begin(self.permit))
        self._noted = True

    def begin_evaluation(self) -> Permit:
        """The right to release the counts of the evaluation, once; from now on it is billed for good, in every ledger."""
        if not self._evaluation:
            raise InvalidInput("evaluation", None, "nothing was reserved for it before the data was read")
        return [ledger.begin(permit) for ledger, permit in self._evaluation][-1]

    def close(self) -> None:
        """Let other processes have the folder."""
        self._hold.__exit__(None, None, None)
        self._hold = nullcontext()

    def __enter__(self) -> RunFolder:
        """Held until the block is left."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Let go; if the run failed before its first step, leave nothing behind. Safe to call again.

        A run that was killed or interrupted stays as it is, to be resumed.
        """
        try:
            refused = isinstance(error, Exception) and not isinstance(error, Busy)
            if refused and self.fresh and not self._over and not self.begun:
                self.abandon()
        finally:
            self.close()

    def abandon(self) -> None:
        """Undo a run that released nothing: destroy its secret, then give back its reservation, then remove the folder.

        What this run did not make is left, and so is a folder that was there before.
        """
        self._over = True
        self.mark.erase_secrets()
        others = [(ledger, permit) for ledger, permit in self._evaluation if ledger is not self.ledger]
        for ledger, permit in [*([self.shared] if self.shared is not None else []), *others]:
            ledger.void(permit, "the input was refused before the first step; nothing was released")
        self.mark.clear()
        self.mark.remove_folder()

    def _marked(self) -> tuple[Mark, bool]:
        """The mark of this run, and whether it is new: made in an empty folder, or found in a folder of ours. Others are refused."""
        given = str(self.run.path)
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise InvalidInput("run", given, "is a file, not a folder")
        try:
            if not self.path.is_dir() or not any(self.path.iterdir()):
                self._foresee()
                return Mark.make(self.path), True
        except DpfyError:
            raise
        except (OSError, ValueError) as problem:
            raise InvalidInput(
                "run", given, f"cannot be used as a folder ({getattr(problem, 'strerror', None) or problem})"
            ) from None
        if complete(self.run, self.plan) or self.finished:
            raise InvalidInput("run", given, "already holds a finished run; choose another folder")
        mark = Mark.find(self.path)
        if mark is None:
            raise InvalidInput("run", given, "is not empty and holds no dpfy run that could go on; choose another folder")
        refuse_planted(self.path)
        return mark, False

    def _foresee(self) -> None:
        """Compute the figures of the card: what accounting refuses is refused while nothing is written and no step is made."""
        noise = self.run.evaluation
        forecast.require(self.claim, None if noise is None else evaluation.event(noise))

    @property
    def _never_began(self) -> bool:
        """Whether a crash stopped the run of this folder before it had a secret, or while it was given up: nothing was released."""
        return not (self.secrets / "secret.json").is_file() and not self.begun

    def _take(self) -> None:
        """Hold the marked folder for this process alone, and remove what a crash has left half-written."""
        self.secrets.mkdir(exist_ok=True)
        os.chmod(self.secrets, 0o700)
        held = hold(self.secrets / "lock", f"run {self.path.name}")
        held.__enter__()
        self._hold = held
        if not self.mark.file.is_file():
            raise Busy(f"run {self.path.name}: another process has just ended it; try again")
        if self._never_began:
            self.mark.clear()
        else:
            self._agree()
        self.mark.erase_temporaries()

    def _agree(self) -> None:
        """Refuse to go on with another plan than the one the folder holds, or unasked."""
        held, given = load_plan(self.path), str(self.run.path)
        if held != self.plan:
            raise InvalidInput("run", given, f"already holds a different plan ({_difference(held, self.plan)})")
        if not self.run.resume:
            raise InvalidInput("run", given, "holds an unfinished run; resume it (--resume) or choose another folder")
        if (file := self.secrets / "secret.json").is_file():
            self._held_secret(file)

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
            if (self.path / LEDGER).is_file() and Ledger.read(self.path / LEDGER).permits():
                raise Corrupt("checkpoint/secret.json", "is missing: the run cannot be resumed; start a new one")
            fresh = Randomness.from_os() if self.run.seed is None else Randomness.for_tests(self.run.seed)
            body = {"run": self.mark.run, "secret": fresh.secret.hex(), "fixed": fresh.fixed}
            write_atomically(file, json.dumps(body).encode(), mode=PRIVATE_MODE)
        return self._held_secret(file)

    def _held_secret(self, file: Path) -> tuple[str, Randomness]:
        try:
            held = json.loads(file.read_text())
            name, randomness = held["run"], Randomness(bytes.fromhex(held["secret"]), held["fixed"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Corrupt("checkpoint/secret.json", "is damaged: the run cannot be resumed; start a new one") from None
        if name != self.mark.run:
            raise Corrupt("checkpoint/secret.json", "belongs to another run than the folder's mark; start a new one")
        return name, randomness

    def _reserve(self) -> Permit:
        """The right to run the whole plan: written to the data set's ledger (once a run) and to the run's own, before any data is read."""
        self.shared = self._reserve_shared()
        if self.shared is not None:
            ledger, permit = self.shared
            self.claim = replace(self.claim, shared=(ledger.book.identity, permit.entry))
        for permit in self.ledger.permits():
            if permit.name == TRAINING:
                return self._covering(permit)
        return self._covering(self.ledger.reserve(TRAINING, self.claim.event, claim=self.claim.to_json(), returnable=True))

    def _reserve_shared(self) -> tuple[Ledger, Permit] | None:
        if self.run.ledger is None:
            return None
        path, recipe = Path(self.run.ledger), self.plan.recipe
        ledger = Ledger.open(path, unit=recipe.unit, adjacency=recipe.adjacency, budget=self.run.budget)
        name, claim = f"{TRAINING} {self.id}", self.claim.to_json()
        for permit in ledger.permits():
            if permit.name == name and permit.claim == claim:
                return ledger, permit
        return ledger, ledger.reserve(name, self.claim.event, budget=_budget(ledger), claim=claim, returnable=True)

    def _reserve_evaluation(self) -> None:
        """The right to release the counts of a billed evaluation: written, like the plan's, wherever this run is billed."""
        noise = self.run.evaluation
        if noise is None:
            if any(permit.name == EVALUATION for permit in self.ledger.permits()):
                raise InvalidInput("resume evaluation", None, "must be billed, as in the run that is resumed")
            return
        event, claim = evaluation.event(noise), {"test": evaluation.BILLED, "run": self.id, "noise_multiplier": noise}
        places = [(self.ledger, EVALUATION)]
        if self.shared is not None:
            places.insert(0, (self.shared[0], f"{EVALUATION} {self.id}"))
        for ledger, name in places:
            held = [permit for permit in ledger.permits() if permit.name == name]
            if held and held[0].claim != claim:
                raise InvalidInput("resume evaluation", noise, f"must have the noise it was reserved with: {held[0].claim}")
            budget = accounting.filters.from_json(ledger.terms) if ledger.terms else None
            permit = held[0] if held else ledger.reserve(name, event, budget=budget, claim=claim, returnable=True)
            self._evaluation.append((ledger, permit))

    def _covering(self, permit: Permit) -> Permit:
        """The permit of this run, for each of its steps; the ledger must hold the claim that the run makes."""
        if found := differences(permit.claim, self.claim.to_json()):
            raise Corrupt(LEDGER, f"reserves something else than this run asks for: {found[0]}")
        if permit.event != self.claim.event:
            raise Corrupt(LEDGER, "reserves another event than this plan's")
        return replace(permit, uses=self.plan.recipe.steps)


def _budget(ledger: Ledger) -> Budget | None:
    """The budget with which a ledger was created."""
    try:
        return None if ledger.terms is None else accounting.filters.from_json(ledger.terms)
    except (InvalidInput, KeyError, TypeError) as problem:
        raise Corrupt(ledger.path.name, f"holds a budget that cannot be read ({problem})") from None


def erase_secrets(folder: Path) -> None:
    """End a finished run: destroy seed, noise state and checkpoints, then remove the mark. What is left is safe to publish.

    Guarantees: touches nothing in a folder without a mark, nor files that no run makes. Safe to call again.
    """
    if (mark := Mark.find(folder)) is not None:
        mark.erase_secrets()
        mark.remove()


def complete(run: Run, plan: Plan) -> bool:
    """Whether `run` resumes a run of `plan` that is finished; what a crash after its end has left to do is done now."""
    path = Path(run.path)
    if not run.resume or not ended(path) or load_plan(path) != plan:
        return False
    finish_erasure(path)
    return True


def ended(path: Path) -> bool:
    """Whether the run in `path` ended: its card is there, or its ledger holds its end and a crash came before the card."""
    if (path / CARD).is_file():
        return True
    if Mark.find(path) is None or not (path / LEDGER).is_file():
        return False
    try:
        return Ledger.read(path / LEDGER).book.finish is not None
    except Corrupt:
        return False


def publish(path: Path) -> None:
    """Put the card that the ledger names into the folder of a run that ended. Safe to call again."""
    if (path / CARD).is_file():
        return
    staged, due = path / HIDDEN / CARD, Ledger.read(path / LEDGER).book.finish
    if due is None or not staged.is_file() or sha256_of(staged) != due["card"]:
        raise Corrupt(f"{HIDDEN}/{CARD}", "is not the card with which the ledger says that the run ended: it cannot be published")
    write_atomically(path / CARD, staged.read_bytes())


def finish_erasure(path: Path) -> None:
    """Bring a run that ended to its end after a crash: publish its card, and erase its secrets."""
    if Mark.find(path) is None:
        return
    refuse_planted(path)
    hidden = path / HIDDEN
    with hold(hidden / "lock", f"run {path.name}") if hidden.is_dir() else nullcontext():
        publish(path)
        erase_secrets(path)


def load_plan(folder: Path) -> Plan:
    """The plan a run folder holds."""
    try:
        text = reading.content("plan.json", folder / "plan.json", name="plan.json")
    except InvalidInput as problem:
        raise Corrupt("plan.json", problem.rule) from None
    return read_plan("plan.json", reading.parsed_json("plan.json", text))


def _difference(held: Plan, asked: Plan) -> str:
    mine, theirs = _leaves(held.to_json()), _leaves(asked.to_json())
    keys = [k for k in sorted(mine | theirs) if mine.get(k) != theirs.get(k)]
    key = keys[0]
    return f"{key}: {mine.get(key)} there, {theirs.get(key)} here"


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {k: v for key, value in data.items() for k, v in _leaves(value, f"{prefix}.{key}".lstrip(".")).items()}
