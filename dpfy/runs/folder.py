"""The run folder: where a run's claims, ledger, secrets, checkpoints and results live, and in which
order they come to be.

    runs/x/  ledger.jsonl  config.toml  privacy.json  report.html  report.md  and what its claims
    name: plan.json, model.safetensors ...
             .dpfy-NAME  checkpoint/  secret.json (0600)  bound.json (0600) ...             gone
             when the run ends

The order is the safety: the figures of the report, then mark, configuration and what the claims write
down, secret, reservations, data. Claims that cannot be charged leave nothing; a crash between any
two leaves a folder that can be resumed; a folder without the mark is not touched.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dpfy.core import events, storage
from dpfy.core.claim import Claim, Reserved, agree, differences, stop_after
from dpfy.core.errors import Busy, Corrupt, DpfyError, InvalidInput, Unsupported
from dpfy.core.ledger import COPIED, Ledger, Permit, hold, require_place
from dpfy.core.randomness import Randomness, require_same_process
from dpfy.core.storage import PRIVATE_MODE, sha256_of, write_atomically
from dpfy.report import card, figures, forecast
from dpfy.runs.holder import HOLDER, Holder
from dpfy.runs.mark import HIDDEN, Mark, refuse_planted
from dpfy.runs.run import ABOUT, Run

CARD = card.NAME
LEDGER = "ledger.jsonl"
BOUND = "bound.json"
UNSAID = "not stated"
MOST_CALLED = 100
"""Characters of the name of a run folder in the ledger of the data set."""
ITSELF = ""
"""The key under which bound.json recognises itself: no name of a release is empty."""


def _truth(value: object) -> bool:
    """True or false; anything else is a `TypeError`."""
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


@dataclass
class Stage:
    """One claim of a run with its reservations: in the run's own ledger, and in the data set's
    where there is one.
    """

    reserved: Reserved
    permit: Permit
    shared: tuple[Ledger, Permit] | None = None

    @property
    def claim(self) -> Claim:
        """What is promised."""
        return self.reserved.claim


class RunFolder:
    """An opened run folder, held by this process alone until it is closed.

    Use it as a context: if the block fails before the first release, the reservations are given
    back and the folder is removed; if it is killed or interrupted, the folder stays, to be resumed
    by the same claims with ``resume=True``.

    Guarantees: on return every claim is reserved, durably, in every ledger, and its guarantee can
    be given: that of all claims together was computed before anything was written. The same secret
    never meets other data (:meth:`bind`). A copy of the folder, and one that was restored from a
    backup, is refused: its files are not those that this run made (:mod:`dpfy.core.storage`). So is a
    forked process.
    """

    identified = False
    """Whether the files of the folder know themselves: those that an earlier version began do
    not.
    """
    place: str | None = None
    """Recognises this folder in a ledger."""
    _holder: Holder | None = None

    def __init__(self, run: Run, *claims: Claim) -> None:
        agree(claims)
        self.run, self.claims = run, claims
        self.path = Path(run.path)
        self.secrets = self.path / HIDDEN
        self.stages: dict[str, Stage] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.in_use = self._over = False
        self._process = os.getpid()
        self._hold: AbstractContextManager[None] = nullcontext()
        self.mark, self.fresh = self._marked()
        try:
            self._take()
            self.fresh = not self.state.is_file()
            self._write_down()
            self.ledger = Ledger.open(
                self.path / LEDGER, unit=claims[0].unit, adjacency=claims[0].adjacency
            )
            self.id, self.randomness = self._secret()
            self._reserve()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    @property
    def state(self) -> Path:
        """The checkpoint file of work that takes many releases."""
        return self.secrets / "state.safetensors"

    @property
    def finished(self) -> bool:
        """Whether the report is written."""
        return (self.path / CARD).is_file()

    @property
    def begun(self) -> bool:
        """Whether releases may have been made. Without its secrets such a run must neither start
        again (its noise would meet other values) nor give its reservations back.
        """
        return self.has_begun() or self.has_begun(*self.stages)

    def has_begun(self, *names: str) -> bool:
        """Whether releases under any of these claims may have been made; without names, under any
        reservation of the folder.
        """
        if not (self.path / LEDGER).is_file():
            return False
        try:
            book = Ledger.read(self.path / LEDGER).book
        except Corrupt:
            return True  # what cannot be read may have begun
        stages = [self.stages[name] for name in names]
        entries = {stage.permit.entry for stage in stages} if names else book.begun
        return bool(entries & book.begun) or any(
            s.shared is not None and s.shared[1].entry in s.shared[0].book.begun for s in stages
        )

    def begin(self, name: str) -> Permit:
        """Write down, in every ledger and before the first release, that releases will be made:
        from now on they are charged permanently.

        The permit that allows them. Until then the run can be undone. Safe to call again.
        """
        self._require_here()
        stage = self.stage(name)
        if stage.permit.closed:
            if stage.shared is not None:
                ledger, permit = stage.shared
                stage.shared = ledger, ledger.begin(permit, self.place)
            stage.permit = self._covering(
                self.ledger.begin(stage.permit, self.place), stage.reserved
            )
        return stage.permit

    def settle(self, name: str, made: int) -> None:
        """End the releases under a claim that may end early: `made` are all that there will be, and
        are charged, in every ledger.

        Guarantees: the run's own ledger closes the permit, durably, before the data set's ledger
        takes anything off the charge; a crash in between leaves the charge of the whole claim there
        until the run is resumed, to end. What is charged covers all that was made. Does nothing
        where the claim cannot end so soon. Safe to repeat.
        """
        billed = stop_after(self.stage(name).claim.stops, made)
        if billed is None:
            return
        self.begin(name)
        stage = self.stage(name)
        stage.permit = self.ledger.settle(stage.permit, made=made, billed=billed)
        if stage.shared is not None:
            ledger, permit = stage.shared
            stage.shared = ledger, ledger.settle(permit, made=made, billed=billed)

    def bind(self, name: str, content: bytes) -> None:
        """Refuse another content than that of an attempt before a crash: the difference of two
        releases with one noise has none.

        Call before noise is made for what depends on the data, with all of it that the release
        depends on.
        """
        self._require_here()
        held, tag = self._bound(), self.randomness.tag(f"bound {name}", content)
        if name not in held:
            self._write_bound(held | {name: tag}, self.randomness)
        elif held[name] != tag:
            raise InvalidInput(
                f"resume {name}", "other data", "must be what the run had before it was stopped"
            )

    def _bound(self) -> dict[str, str]:
        """What releases are bound to so far."""
        file = self.secrets / BOUND
        if not file.is_file() and self.identified:
            raise Corrupt(
                f"{HIDDEN}/{BOUND}",
                "is missing: nobody can tell what releases were made of; start a new run",
            )
        held: dict[str, str] = (
            storage.parsed_json(BOUND, file.read_bytes()) if file.is_file() else {}
        )
        if held.pop(ITSELF, None) != (_of_file(self.randomness, file) if self.identified else None):
            rule = (
                "is a copy, or was restored from one, which may lack what was released since: "
                "start a new run"
            )
            raise Corrupt(f"{HIDDEN}/{BOUND}", rule)
        return held

    def _write_bound(self, held: Mapping[str, str], randomness: Randomness) -> None:
        def content(own: str) -> bytes:
            known = {ITSELF: randomness.tag("file", own.encode())} if self.identified else {}
            return json.dumps({**held, **known}).encode()

        write_atomically(self.secrets / BOUND, content, mode=PRIVATE_MODE)
        self.renew()

    def renew(self) -> None:
        """Tell other machines that the folder is in use, now and then; refused if one of them has
        taken it over.
        """
        if self._holder is not None:
            self._holder.renew()

    def _require_here(self) -> None:
        """Refuse a forked process, and one whose folder another machine has taken over."""
        require_same_process(self._process, f"run {self.path.name}")
        self.renew()

    def write(self, name: str, content: bytes) -> Path:
        """Put an artefact into the folder, whole or not at all. Its claim must have named it."""
        if not any(name in claim.artefacts for claim in self.claims):
            known = ", ".join(sorted({a for c in self.claims for a in c.artefacts}))
            raise InvalidInput(
                "artefact", name, f"must be named by a claim of this run: {known or 'none is'}"
            )
        write_atomically(self.path / name, content)
        return self.path / name

    def tell(self, name: str, **facts: Any) -> None:
        """Put figures into the section of the claim called `name`: what was released under it, or
        is public.
        """
        self.stage(name)
        self.told.setdefault(name, {}).update(facts)

    def finish(self, facts: Callable[[], card.Facts] | card.Facts) -> Path:
        """Write the report and its pages, write the end of the run with all hashes to the ledger,
        publish, erase the secrets.

        Guarantees: the report is written last, so a folder with a report is complete; until then the
        run can be resumed. The ledger holds one end of the run, with the hash of the report and of
        every file: a crash after it publishes that very report, whatever is asked then. Each step can
        be repeated after a crash.
        """
        self._require_here()
        self.ledger.refresh()
        if self.ledger.book.finish is None:
            self._require_no_end()
            for name in self.stages:
                self.begin(name)
            self.ledger.refresh()
            told = facts() if callable(facts) else facts
            told = replace(
                told,
                sections=self.told | dict(told.sections),
                public_data=told.public_data or self.run.public_data,
            )
            told = replace(told, provenance=self._about() | dict(told.provenance))
            made = card.build(self.path, told, self.ledger)
            files = card.write_pages(self.path, made) | card.hashes(self.path, self.ledger)
            write_atomically(self.secrets / CARD, card.render(made))
            first = next(iter(self.stages.values())).permit
            self.ledger.finish(
                first, steps=told.releases, card=sha256_of(self.secrets / CARD), files=files
            )
            self.ledger.refresh()
        if self.run.ledger is not None:
            end_shared(self.ledger, Path(self.run.ledger))
        publish(self.path)
        erase_secrets(self.path)
        return self.path

    def _about(self) -> dict[str, str]:
        """What the run is about, and the day on which it was reserved."""
        began = next(body["time"] for body in self.ledger.bodies if body["type"] == "reserve")
        return (
            dict.fromkeys(ABOUT[1:], UNSAID)
            | dict(self.run.about)
            | {"date": time.strftime("%Y-%m-%d", time.gmtime(began))}
        )

    def _require_no_end(self) -> None:
        """Refuse to end a run a second time: another folder may have ended it, from the same
        secret, as one that was put back can.
        """
        for stage in self.stages.values():
            if stage.shared is not None:
                ledger, permit = stage.shared
                ledger.refresh()
                if permit.entry in ledger.book.ended:
                    rule = (
                        f"{ledger.path.name} says that this run was completed: it is not completed "
                        f"again; start a new run"
                    )
                    raise InvalidInput("run", str(self.run.path), rule)

    def close(self) -> None:
        """Let other processes have the folder."""
        if self._holder is not None:
            self._holder.release()
            self._holder = None
        self._hold.__exit__(None, None, None)
        self._hold = nullcontext()

    def __enter__(self) -> Self:
        """Held until the block is left."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Let go; if the run failed before its first release, leave nothing behind. Safe to call
        again.

        A run that was killed or interrupted stays as it is, to be resumed. A fork of the process
        that holds it lets go of nothing.
        """
        if os.getpid() != self._process:
            return
        try:
            refused = isinstance(error, Exception) and not isinstance(error, Busy)
            if refused and self.fresh and not self._over and not self.begun:
                self.abandon()
        finally:
            self.close()

    def abandon(self) -> None:
        """Undo a run that released nothing: destroy its secret, then give back its reservations,
        then remove the folder.

        What this run did not make is left, and so is a folder that was there before.
        """
        require_same_process(self._process, f"run {self.path.name}")
        self._over = True
        self.mark.erase_secrets()
        for stage in self.stages.values():
            if stage.shared is not None:
                ledger, permit = stage.shared
                ledger.void(
                    permit, "the input was refused before the first step; nothing was released"
                )
        self.mark.clear(self._written())
        self.mark.remove_folder()

    def stage(self, name: str) -> Stage:
        """The claim called `name`, with its reservations."""
        if name not in self.stages:
            raise InvalidInput(
                "claim",
                name,
                f"nothing was reserved for it before the data was read ({', '.join(self.stages)})",
            )
        return self.stages[name]

    def _written(self) -> list[str]:
        """Files of this run's claims that may be there before the first release."""
        return [name for claim in self.claims for name in claim.artefacts]

    def _marked(self) -> tuple[Mark, bool]:
        """The mark of this run, and whether it is new: made in an empty folder, or found in a
        folder of ours. Others are refused.
        """
        given = str(self.run.path)
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise InvalidInput("run", given, "is a file, not a folder")
        try:
            if not self.path.is_dir() or not any(self.path.iterdir()):
                forecast.require(
                    [Reserved(claim, self.run.seed is not None) for claim in self.claims]
                )
                return Mark.make(self.path), True
        except DpfyError:
            raise
        except (OSError, ValueError) as problem:
            raise InvalidInput(
                "run",
                given,
                f"cannot be used as a folder ({getattr(problem, 'strerror', None) or problem})",
            ) from None
        mark = Mark.find(
            self.path
        )  # first: the mark of a run that ends now goes after its card is written
        if complete(self.run, *self.claims) or self.finished:
            raise InvalidInput("run", given, "already holds a finished run; choose another folder")
        if mark is None:
            raise InvalidInput(
                "run",
                given,
                "is not empty and holds no dpfy run that could go on; choose another folder",
            )
        refuse_planted(self.path)
        return mark, False

    @property
    def _never_began(self) -> bool:
        """Whether a crash stopped the run of this folder before it had a secret, or while it was
        given up: nothing was released.
        """
        return not (self.secrets / "secret.json").is_file() and not self.begun

    def _take(self) -> None:
        """Hold the marked folder for this process alone, by its mark, the last thing that goes; and
        remove what a crash has left half-written.
        """
        held = hold(self.mark.file, f"run {self.path.name}")
        held.__enter__()
        self._hold = held
        self.secrets.mkdir(exist_ok=True)
        os.chmod(self.secrets, 0o700)
        self._holder = Holder.take(self.secrets / HOLDER, f"run {self.path.name}")
        if self._never_began:
            self.mark.clear(self._written())
        else:
            self._agree()
        self.mark.erase_temporaries()

    def _agree(self) -> None:
        """Refuse to go on with another claim than those the folder holds, or unasked."""
        given = str(self.run.path)
        for claim in self.claims:
            for name, content in claim.files().items():
                if found := _apart(self.path / name, content):
                    raise InvalidInput(
                        "run",
                        given,
                        f"already holds a different {name.removesuffix('.json')} ({found})",
                    )
        if not self.run.resume:
            raise InvalidInput(
                "run",
                given,
                "holds an unfinished run; resume it (Run(path, resume=True), --resume) or choose "
                "another folder",
            )
        if (file := self.secrets / "secret.json").is_file():
            self._held_secret(file)

    def _write_down(self) -> None:
        """Configuration, and what the claims say about themselves. The last file of the last claim
        tells that all are there.
        """
        written = [
            (name, content) for claim in self.claims for name, content in claim.files().items()
        ]
        if written and (self.path / written[-1][0]).is_file():
            return
        if self.run.config is not None and not (self.path / "config.toml").is_file():
            public, private = self.run.config
            write_atomically(self.secrets / "config.toml", private.encode(), mode=PRIVATE_MODE)
            write_atomically(self.path / "config.toml", public.encode())
        for name, content in written:
            write_atomically(self.path / name, content)

    def _secret(self) -> tuple[str, Randomness]:
        """The secret of the run: a new one as long as its ledger holds no reservation, for what a
        lost ledger paid for is used up.
        """
        file = self.secrets / "secret.json"
        if not self.ledger.permits():
            fresh = (
                Randomness.from_os()
                if self.run.seed is None
                else Randomness.for_tests(self.run.seed)
            )
            self.identified = True
            self._write_bound({}, fresh)
            body = {"run": self.mark.run, "secret": fresh.secret.hex(), "fixed": fresh.fixed}
            write_atomically(
                file,
                lambda own: json.dumps(body | {"file": fresh.tag("file", own.encode())}).encode(),
                mode=PRIVATE_MODE,
            )
        elif not file.is_file():
            raise Corrupt(
                "checkpoint/secret.json", "is missing: the run cannot be resumed; start a new one"
            )
        held = self._held_secret(file)
        self.place = (
            held[1].tag("place", storage.identity_of(file).encode())[:32]
            if self.identified
            else None
        )
        return held

    def _held_secret(self, file: Path) -> tuple[str, Randomness]:
        try:
            held = json.loads(file.read_text())
            name, randomness = (
                held["run"],
                Randomness(bytes.fromhex(held["secret"]), _truth(held["fixed"])),
            )
            said = held.get("file")
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Corrupt(
                "checkpoint/secret.json", "is damaged: the run cannot be resumed; start a new one"
            ) from None
        if name != self.mark.run:
            raise Corrupt(
                "checkpoint/secret.json",
                "belongs to another run than the folder's mark; start a new one",
            )
        if said is not None and said != _of_file(randomness, file):
            raise Unsupported(
                f"going on with a run folder that was copied or restored ({self.path.name})", COPIED
            )
        self.identified = said is not None
        return name, randomness

    def _reserve(self) -> None:
        """The right to make every release of every claim: written to the data set's ledger (once a
        run) and to the run's own, in the order of the claims, before any data is read.
        """
        if extra := [
            p.name
            for p in self.ledger.permits()
            if p.claim and p.name not in {c.name for c in self.claims}
        ]:
            raise InvalidInput(
                f"resume {extra[0]}", None, "must be asked for, as in the run that is resumed"
            )
        for claim in self.claims:
            reserved, due = (
                Reserved(claim, self.randomness.fixed),
                claim.event,
            )  # asked for once: all books hold the same bill
            held = next((p for p in self.ledger.permits() if p.name == claim.name), None)
            if held is not None:  # before the data set's ledger is asked for anything
                self._covering(
                    held, replace(reserved, shared=Reserved.from_json(held.claim).shared)
                )
                require_place(self.ledger.book.places.get(held.entry), self.place, LEDGER)
            shared = self._reserve_shared(reserved, due, held)
            if shared is not None:
                reserved = replace(reserved, shared=(shared[0].book.identity, shared[1].entry))
            permit = held or self.ledger.reserve(
                claim.name, due, claim=reserved.to_json(), returnable=True
            )
            self.stages[claim.name] = Stage(reserved, self._covering(permit, reserved), shared)

    def _reserve_shared(
        self, reserved: Reserved, due: events.Event, held: Permit | None
    ) -> tuple[Ledger, Permit] | None:
        """The reservation in the data set's ledger; `held` is that in the run's own, if it was made
        before.
        """
        if self.run.ledger is None:
            return None
        ended = None if held is None else self.ledger.book.settled.get(held.entry)
        path, claim = Path(self.run.ledger), reserved.claim
        ledger = Ledger.open(
            path, unit=claim.unit, adjacency=claim.adjacency, budget=self.run.budget
        )
        name = f"{claim.name} {self.id}"
        for permit in ledger.permits():
            if permit.name == name and Reserved.from_json(permit.claim) == reserved:
                if (settled := ledger.book.settled.get(permit.entry)) not in (None, ended):
                    rule = (
                        f"{path.name} says that it ended after {settled[0]} releases, and is "
                        f"charged so"
                        if settled
                        else ""
                    )
                    raise InvalidInput(f"resume {claim.name}", "a run that goes on", rule)
                if permit.entry in ledger.book.ended:
                    rule = (
                        f"{path.name} says that this run was completed: it is not completed again; "
                        f"start a new run"
                    )
                    raise InvalidInput("run", str(self.run.path), rule)
                if held is None and permit.entry in ledger.book.begun:
                    raise Corrupt(
                        LEDGER,
                        f"was lost: {path.name} says that this run has started; start a new run",
                    )
                require_place(ledger.book.places.get(permit.entry), self.place, path.name)
                if permit.event != (due if settled is None else reserved.due(settled)):
                    raise Corrupt(path.name, "reserves another event than this run's")
                return ledger, permit
        budget = figures.budget_of(ledger)
        called = "".join(c if c.isprintable() else "?" for c in self.path.resolve().name)
        return ledger, ledger.reserve(
            name,
            due,
            budget=budget,
            claim=reserved.to_json(),
            returnable=True,
            run=called.strip()[:MOST_CALLED] or None,
        )

    def _covering(self, permit: Permit, reserved: Reserved) -> Permit:
        """A permit of this run; the ledger must hold the claim that the run makes."""
        if Reserved.from_json(permit.claim) != reserved:
            found = differences(permit.claim, reserved.to_json())
            rule = f"{LEDGER} reserves something else than this run asks for: {found[0]}"
            raise InvalidInput(f"resume {reserved.claim.name}", "another claim", rule)
        if permit.event != reserved.due(self.ledger.book.settled.get(permit.entry)):
            raise Corrupt(LEDGER, "reserves another event than this run's claim states now")
        return permit


def _apart(file: Path, due: bytes) -> str:
    """Where a file of a claim is not what the claim says: empty where it is."""
    try:
        text = storage.content(file.name, file, name=file.name)
    except InvalidInput as problem:
        raise Corrupt(file.name, problem.rule) from None
    if text == due:
        return ""
    mine, theirs = _leaves(storage.parsed_json(file.name, text)), _leaves(json.loads(due))
    keys = [k for k in sorted(mine | theirs) if mine.get(k) != theirs.get(k)]
    return f"{keys[0]}: {mine.get(keys[0])} there, {theirs.get(keys[0])} here" if keys else ""


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        k: v
        for key, value in data.items()
        for k, v in _leaves(value, f"{prefix}.{key}".lstrip(".")).items()
    }


def _of_file(randomness: Randomness, file: Path) -> str:
    """How a secret file recognises itself."""
    return randomness.tag("file", storage.identity_of(file).encode())


def erase_secrets(folder: Path) -> None:
    """End a finished run: destroy seed, noise state and checkpoints, then remove the mark. What is
    left is safe to publish.

    Guarantees: touches nothing in a folder without a mark, nor files that no run makes. Safe to
    call again.
    """
    if (mark := Mark.find(folder)) is not None:
        mark.erase_secrets()
        mark.remove()


def complete(run: Run, *claims: Claim) -> bool:
    """Whether `run` resumes a run of these claims that is finished; what a crash after its end has
    left to do is done now.
    """
    path = Path(run.path)
    if not run.resume or not ended(path) or held_claims(path) != list(claims):
        return False
    finish_erasure(path, run.ledger)
    return True


def held_claims(path: Path) -> Sequence[Claim]:
    """The claims that the ledger of a run folder holds."""
    return [
        Reserved.from_json(p.claim).claim for p in Ledger.read(path / LEDGER).permits() if p.claim
    ]


def ended(path: Path) -> bool:
    """Whether the run in `path` ended: its report is there, or its ledger holds its end and a crash
    came before the report.
    """
    if (path / CARD).is_file():
        return True
    if Mark.find(path) is None or not (path / LEDGER).is_file():
        return False
    try:
        return Ledger.read(path / LEDGER).book.finish is not None
    except Corrupt:
        return False


def publish(path: Path) -> None:
    """Put the report that the ledger names into the folder of a run that ended. Safe to call
    again.
    """
    if (path / CARD).is_file():
        return
    staged, due = path / HIDDEN / CARD, Ledger.read(path / LEDGER).book.finish
    if due is None or not staged.is_file() or sha256_of(staged) != due["card"]:
        raise Corrupt(
            f"{HIDDEN}/{CARD}",
            "is not the report with which the ledger says that the run ended: it cannot be published",
        )
    write_atomically(path / CARD, staged.read_bytes())


def end_shared(own: Ledger, path: Path) -> None:
    """Write the end of the run whose ledger is `own` into that of its data set, if that paid for
    it. Safe to repeat.

    Guarantees: a run that a data set's ledger paid for is completed once; a second end, with
    another report, is refused.
    """
    paid = [
        shared
        for p in own.permits()
        if p.claim and (shared := Reserved.from_json(p.claim).shared) is not None
    ]
    if paid and own.book.finish is not None:
        ledger = Ledger.read(path)
        for identity, entry in paid:
            if identity == ledger.book.identity:
                ledger.end(entry, own.book.finish["card"])


def finish_erasure(path: Path, ledger: Path | str | None = None) -> None:
    """Bring a run that ended to its end after a crash: write it into the data set's `ledger`,
    publish its report, erase its secrets.
    """
    if (mark := Mark.find(path)) is None:
        return
    refuse_planted(path)
    with hold(mark.file, f"run {path.name}"):
        if ledger is not None:
            end_shared(Ledger.read(path / LEDGER), Path(ledger))
        publish(path)
        erase_secrets(path)


__all__ = [
    "RunFolder",
    "Stage",
    "complete",
    "ended",
    "erase_secrets",
    "finish_erasure",
    "held_claims",
    "publish",
]
