"""What was checked in a run, for its report, and the file that keeps it for a resumed run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dpfy.core.errors import Corrupt, Unsupported
from dpfy.core.storage import PRIVATE_MODE, write_atomically
from dpfy.isolation.run_fingerprint import RunFingerprint
from dpfy.plan.claim import NOT_CHECKED

WHOLE, PART = "checked by replay", NOT_CHECKED
"""How the sentence for the report begins."""

TEXTS = {"why", "constructed"}


@dataclass
class CheckSummary:
    """What was checked, for the report: steps recorded, steps run again with replaced records,
    steps proven instead, and the most records in one of both, steps looked at through the model,
    places of the code that call torch in steps that were not checked alone, and steps whose rows
    had another length.
    """

    recorded: int = 0
    replayed: int = 0
    proven: int = 0
    through_model: int = 0
    why: str = ""
    rows: int = 0
    unseen: int = 0
    elsewhere: int = 0
    padded: int = 0
    constructed: str = ""
    """How the loss of a record is computed without the other records, where that makes checks
    unnecessary.
    """

    @property
    def words(self) -> str:
        """For the report: what was looked at, and nothing more."""
        if self.constructed:
            return f"isolated by construction: {self.constructed}"
        found = []
        if self.replayed:
            found.append(
                f"at {self.replayed} steps, with up to {self.rows} rows, the operations from batch "
                f"to losses and gradients were run again "
                "with other records in some rows: no other example's part changed"
            )
        if self.proven:
            found.append(
                f"at {self.proven} steps each of these operations was read instead: none of them "
                f"brings examples together, whatever their values"
            )
        if self.unseen:
            found.append(
                f"{self.unseen} places in the code that call torch ran at steps that were not "
                f"checked alone"
            )
        if self.elsewhere:
            found.append(
                f"at {self.elsewhere} steps the losses came from tensors whose making was not seen "
                f"(by another thread, say)"
            )
        if self.padded:
            found.append(
                "the rows of a batch are as long as its longest record: whether losses depend on "
                "that length (a mean over the padding, say) was not checked"
            )
        if self.through_model:
            found.append(
                f"at {self.through_model} steps the model was run on changed inputs ({self.why}): "
                f"no other example changed; the losses "
                "were checked by their gradients alone"
            )
        if found:
            whole = not (self.elsewhere or self.through_model or self.padded)
            return f"{WHOLE if whole else PART}: {'; '.join(found)}"
        return "not checked for examples that mix: no step had a record to replace"


@dataclass(frozen=True)
class CheckFile:
    """The file of a run's secrets in which the fingerprint, a refusal and the summary are kept."""

    path: Path

    def store(self, fingerprint: str | None, refusal: str | None, summary: CheckSummary) -> None:
        """Replace what it holds."""
        content = {"fingerprint": fingerprint, "refusal": refusal, "checks": asdict(summary)}
        write_atomically(self.path, json.dumps(content).encode(), mode=PRIVATE_MODE)

    def restore(self) -> tuple[str | None, CheckSummary]:
        """The fingerprint and the summary of the process before; nothing for a run that begins.

        Raises:
            Corrupt: If the file is damaged.
            Unsupported: If the run was refused.
        """
        if not self.path.is_file():
            return None, CheckSummary()
        try:
            content = json.loads(self.path.read_bytes())
            fingerprint, refusal = content["fingerprint"], content["refusal"]
            summary = CheckSummary(**content["checks"])
            if not all(
                type(value) is (str if name in TEXTS else int)
                for name, value in asdict(summary).items()
            ):
                raise ValueError("counts")
            if not all(value is None or isinstance(value, str) for value in (fingerprint, refusal)):
                raise ValueError("texts")
            if fingerprint is not None:
                RunFingerprint.require_readable(fingerprint)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError):
            raise Corrupt(f"checkpoint/{self.path.name}", "is damaged: start a new run") from None
        if refusal is not None:
            raise Unsupported(f"a run that was refused ({refusal})", "start a new run")
        return fingerprint, summary
