"""The options that mean the same in every command, and what a command does with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def option(help_text: str, *names: str, hidden: bool = False) -> Any:
    """An option whose default is not shown."""
    return typer.Option(*names, help=help_text, show_default=False, hidden=hidden)


SchemaFile = Annotated[str, option("Public schema of the columns (TOML), or adult.", "--schema")]
Out = Annotated[Path | None, option("Run folder (default: new, in runs/).", "--out")]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run in --out."),
]
Person = Annotated[str | None, option("Column with the person that a row belongs to.", "--person")]
AtMost = Annotated[int | None, option("Most rows of one person that are used.", "--at-most")]
Seed = Annotated[
    int | None,
    option("Fix all randomness, for tests: protects nothing.", "--insecure-seed", hidden=True),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any field, as section.key; repeat it.",
        show_default=False,
    ),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print all fields as TOML, and stop.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


Data = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help="A file (.csv, .parquet, .npz), embedded, mnist, cifar10, ..., or a "
        "configuration (.toml).",
        show_default=False,
    ),
]
Config = Annotated[Path | None, option("Configuration (TOML), where DATA is none.", "--config")]
TableSchema = Annotated[str | None, option("Public schema of a table (TOML).", "--schema")]
Records = Annotated[
    str | None, option("Public number to train on, less those held out.", "--records")
]
Model = Annotated[str | None, option("scattering-linear, linear, mlp, ...", "--model")]
Delta = Annotated[float | None, option("Delta (1e-5); below 1/records.", "--delta")]
JobLedger = Annotated[
    str | None, option("Ledger of the data set, over all its releases.", "--ledger")
]
JOB = {
    "data_dir": "data.dir",
    "schema": "data.schema",
    "person": "data.user",
    "at_most": "data.most_records",
    "records": "privacy.records",
    "model": "model.name",
    "epsilon": "privacy.epsilon",
    "delta": "privacy.delta",
    "mechanism": "training.mechanism",
    "sampling": "training.sampling",
    "batch_size": "training.batch_size",
    "epochs": "training.epochs",
    "steps": "training.steps",
    "clip_norm": "training.clip_norm",
    "learning_rate": "training.learning_rate",
    "device": "runtime.device",
    "ledger": "ledger.path",
    "budget": "ledger.budget_epsilon",
    "trials": "tune.trials",
    "route": "tune.route",
    "law": "tune.law",
    "score": "tune.score",
    "public": "tune.public",
    "workers": "tune.workers",
}
"""The fields of a configuration that are flags."""


def job_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that the flags of a command give, and where its data are."""
    found = {key: given[name] for name, key in JOB.items() if name in given}
    text = found.get("privacy.records")
    if isinstance(text, str) and text.isdecimal() and len(text) < 19:
        found["privacy.records"] = int(text)  # any other text is the configuration's to judge
    return found


def run_folder(out: Path | None, resume: bool) -> Path:
    """The folder of a run: a new one, or with `resume` one that holds a run.

    Raises:
        InvalidInput: There is nothing to resume.
    """
    from dpfy.core.errors import InvalidInput
    from dpfy.runs.folder import ended
    from dpfy.runs.mark import Mark
    from dpfy.runs.run import fresh_path

    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    out = out or fresh_path()
    if resume and Mark.find(out) is None and not ended(out):
        raise InvalidInput(
            "--resume", str(out), "holds no run to resume; leave --resume out to start one"
        )
    return out
