"""`dpfy train --protect labels`: features are public, labels are noised once, a model is trained on
the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def chosen(protect: str | None, method: str | None, out: Path | None, resume: bool) -> bool:
    """Whether labels are what is protected; a run that is resumed says so itself."""
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput

    if protect is None and resume and out is not None:
        from dpfy.labels import job

        return job.is_ours(out)
    labels = check.one_of("--protect", protect or "records", PROTECTED) == "labels"
    if method is not None and not labels:
        raise InvalidInput("--method", method, "goes with --protect labels")
    return labels


def train_labels(
    config: Path | None,
    out: Path | None,
    flags: dict[str, Any],
    words: list[str],
    *,
    resume: bool,
    show: bool,
    seed: int | None,
    as_json: bool,
) -> None:
    """As `dpfy train` does for whole records."""
    from dpfy.core import settings
    from dpfy.core.errors import InvalidInput
    from dpfy.labels import job

    for name, value in flags.items():
        if name not in FLAGS and name != "labels.method" and value is not None:
            rule = (
                "goes with whole records (--protect records); with labels say method, epsilon, "
                "delta, records, data, path, ledger"
            )
            raise InvalidInput("--" + name.partition(".")[2].replace("_", "-"), value, rule)
    given = settings.assigned(
        job.SECTIONS,
        words,
        {FLAGS.get(name, name): value for name, value in flags.items() if value is not None},
    )
    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    whole = job.make(config or (job.stored(out) if resume and out is not None else None), given)
    if show:
        tell(settings.as_json(whole), settings.commented(whole), as_json=as_json)
        return
    from dpfy.runs.run import fresh_path

    folder = out or fresh_path()
    with resumable(folder, "dpfy train"):
        made, seconds = job.run(whole, folder, resume=resume, seed=seed)
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
    tell(told, lines, as_json=as_json)


def _told(run: Path, card: dict[str, Any], seconds: float) -> dict[str, Any]:
    from dpfy.labels.fitting import section

    stated, mine = card["guarantee"], section(card)
    found = {"run": str(run)} | {
        k: stated[k] for k in ("epsilon", "delta", "accountant", "adjacency", "unit")
    }
    found |= {key: mine[key] for key in ("method", "stages", "test_accuracy") if key in mine}
    return found | {"seconds": round(seconds, 3), "statement": card["statement"]}
