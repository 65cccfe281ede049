"""`dpfy train --protect labels`: features are public, labels are noised once, a model is trained on
the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfy.cli.form import AskedJob
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell

PROTECTED = ("records", "labels")
FLAGS = {
    "data.kind": "data.kind",
    "data.path": "data.path",
    "privacy.records": "labels.records",
    "privacy.epsilon": "labels.epsilon",
    "privacy.delta": "labels.delta",
    "ledger.path": "ledger.path",
    "ledger.budget_epsilon": "ledger.budget_epsilon",
}
"""Which flags of `dpfy train` say something here, and what."""


def chosen(protect: str | None, method: str | None, asked: AskedJob[Any]) -> bool:
    """Whether labels are what is protected; a run that is resumed says so itself."""
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput

    if protect is None and asked.resume:
        from dpfy.labels import job

        return job.is_ours(asked.folder())
    labels = check.one_of("--protect", protect or "records", PROTECTED) == "labels"
    if method is not None and not labels:
        raise InvalidInput("--method", method, "goes with --protect labels")
    return labels


def train_labels(asked: AskedJob[Any], method: str | None) -> None:
    """As `dpfy train` does for whole records."""
    from dpfy.core import settings
    from dpfy.core.errors import InvalidInput
    from dpfy.labels import job

    flags = asked.flags()
    for name, value in flags.items():
        if name not in FLAGS:
            rule = (
                "goes with whole records (--protect records); with labels say method, epsilon, "
                "delta, records, data, path, ledger"
            )
            raise InvalidInput("--" + name.partition(".")[2].replace("_", "-"), value, rule)
    mine = {FLAGS[name]: value for name, value in flags.items()} | {"labels.method": method}
    given = settings.assigned(job.SECTIONS, asked.words, mine)
    folder = asked.folder()
    whole = job.make(asked.config or (job.stored(folder) if asked.resume else None), given)
    if asked.show:
        asked.tell(whole)
        return
    with resumable(folder, "dpfy train"):
        made, seconds = job.run(whole, folder, resume=asked.resume, seed=asked.seed)
    told = _told(folder, made.report, seconds)
    shown = (
        f"accuracy on held-out data: {told['test_accuracy']:.2%}"
        if "test_accuracy" in told
        else "held-out data: withheld"
    )
    lines = [
        shown,
        told["statement"],
        f"only labels are protected, by {told['method']}; features are public",
        f"check it: dpfy verify {folder}",
        *charged(told["epsilon"], whole.ledger.path),
    ]
    tell(told, lines, as_json=asked.as_json)


def _told(run: Path, card: dict[str, Any], seconds: float) -> dict[str, Any]:
    from dpfy.labels.fitting import section

    stated, mine = card["guarantee"], section(card)
    found = {"run": str(run)} | {
        k: stated[k] for k in ("epsilon", "delta", "accountant", "adjacency", "unit")
    }
    found |= {key: mine[key] for key in ("method", "stages", "test_accuracy") if key in mine}
    return found | {"seconds": round(seconds, 3), "statement": card["statement"]}
