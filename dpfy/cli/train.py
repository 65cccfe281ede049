"""`dpfy train`: a private model from a configuration file and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from dpfy.cli import options, train_labels
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell

CHOSEN = {"identity": "dp-sgd (independent noise)", "banded": "band-mf", "square-root": "sqrt"}
"""What `--mechanism` calls a strategy, where the names differ."""


def train(
    data: options.Data = None,
    config: options.Config = None,
    data_dir: Annotated[str | None, option("Folder with mnist/, ... (else $DPFY_DATA).")] = None,
    schema: options.TableSchema = None,
    person: options.Person = None,
    at_most: options.AtMost = None,
    out: options.Out = None,
    resume: options.Resume = False,
    records: options.Records = None,
    model: options.Model = None,
    protect: Annotated[str | None, option("records (default), or labels.")] = None,
    method: Annotated[str | None, option("How labels are released.")] = None,
    epsilon: Annotated[float | None, option("Epsilon to reach (default 3; labels: 1).")] = None,
    delta: options.Delta = None,
    mechanism: Annotated[str | None, option("dp-sgd, band-mf, blt, tree, ..., auto.")] = None,
    sampling: Annotated[str | None, option("poisson, random-allocation, ...")] = None,
    batch_size: Annotated[float | None, option("Mean size of a batch (default: all).")] = None,
    epochs: Annotated[float | None, option("Expected passes over the data.")] = None,
    steps: Annotated[int | None, option("Noisy steps, instead of epochs.")] = None,
    clip_norm: Annotated[float | None, option("Largest gradient norm of an example.")] = None,
    learning_rate: Annotated[float | None, option("Learning rate.")] = None,
    device: Annotated[str | None, option("cpu (default), cuda, ...")] = None,
    ledger: options.JobLedger = None,
    budget: Annotated[float | None, option("Epsilon that all runs may spend.")] = None,
    assignments: options.Assignments = None,
    show_config: options.ShowConfig = False,
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Train a private model and leave a run folder that anyone can verify.

    Without arguments: 4,000 embedded MNIST images, epsilon 3, delta 1e-5. A table of your own: dpfy
    init people.csv, fill in the schema, then train on it. Flags win over a configuration; what has
    no flag is reached with --set (--show-config lists it).

    Example: dpfy train people.csv --schema people.toml --records 20000 --epsilon 3
    """
    flags = options.job_fields(locals())
    config, named = source(data, config)
    flags |= named
    run = _train
    if train_labels.chosen(protect, method, out, resume):
        run, flags = train_labels.train_labels, flags | {"labels.method": method}
    run(
        config,
        out,
        flags,
        assignments or [],
        resume=resume,
        show=show_config,
        seed=insecure_seed,
        as_json=as_json,
    )


def source(data: str | None, config: Path | None) -> tuple[Path | None, dict[str, Any]]:
    """The configuration, and the fields that say where the data are."""
    from dpfy.core.errors import InvalidInput
    from dpfy.data.config import KINDS

    if data is None:
        return config, {}
    if data.endswith(".toml"):
        if config is not None:
            raise InvalidInput("--config", str(config), "is given already as the first argument")
        return Path(data), {}
    named = data in KINDS or not (Path(data).suffix or Path(data).exists())
    return config, {"data.kind" if named else "data.path": data}


def _train(
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
    from dpfy.core import settings
    from dpfy.core.errors import InvalidInput
    from dpfy.report.card import section
    from dpfy.training import config as configuration

    given = settings.assigned(configuration.SECTIONS, words, flags)
    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    if show and not resume:
        whole = configuration.make(configuration.read_toml(config) if config else {}, given)
        tell(settings.as_json(whole), settings.commented(whole), as_json=as_json)
        return
    from dpfy.runs.run import fresh_path
    from dpfy.training import job, ready
    from dpfy.training.parallel.world import process_group

    folder, shared, auto = out or fresh_path(), None, False
    with resumable(folder, "dpfy train"), process_group() as first:
        if resume and job.is_finished(folder) and not show:
            outcome = job.finished(folder)
        else:
            if resume:
                job.require_run(folder)
            whole = (
                configuration.make(job.stored_config(folder), given)
                if resume and not config
                else ready.job(config, given)
            )
            if show:
                tell(settings.as_json(whole), settings.commented(whole), as_json=as_json)
                return
            shared, auto = whole.ledger.path, whole.training.mechanism == "auto"
            outcome = job.run(whole, folder, resume=resume, seed=seed, progress=True)
    if not first:
        return
    card = outcome.card | section(outcome.card, "training")
    lines = [
        card["statement"],
        f"{outcome.engine}; {card['steps_done']} steps in {outcome.seconds:.1f} s",
    ]
    if auto:
        made = card["mechanism"]
        lines.append(
            f"mechanism auto chose {CHOSEN.get(made['strategy'], made['strategy'])}, which has the "
            f"least error at this guarantee; {made['sampling_words']} (dpfy plan compare mechanisms)"
        )
    group = outcome.group()
    if group is not None:
        lines.append(
            f"for any {group['size']} units together: epsilon {group['epsilon']:.4g} at delta "
            f"{group['delta']:g}"
        )
    accuracy = card["utility"].get("test_accuracy")
    shown = "evaluation" if accuracy is None else f"accuracy on held-out data: {accuracy:.2%}"
    lines.insert(
        0,
        f"{shown}: {card['evaluation']['words']}"
        if accuracy is None
        else f"{shown} ({card['evaluation']['words']})",
    )
    files = (
        "model.safetensors",
        "report.html",
        "report.md",
        "privacy.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "config.toml",
    )
    lines += [f"  {folder / name}" for name in files if (folder / name).is_file()]
    lines += charged(card["guarantee"]["epsilon"], shared)
    summary = _summary(outcome.run, card, outcome.seconds) | (
        {} if group is None else {"group": group}
    )
    tell(summary, [*lines, f"check it: dpfy verify {folder}"], as_json=as_json)


def _summary(run: Path, card: dict[str, Any], seconds: float) -> dict[str, Any]:
    stated = card["guarantee"]
    return {
        "run": str(run),
        "epsilon": stated["epsilon"],
        "epsilon_lower": stated["epsilon_lower"],
        "delta": stated["delta"],
        "accountant": stated["accountant"],
        "adjacency": stated["adjacency"],
        "unit": stated["unit"],
        **{k: v for k, v in card["utility"].items() if k != "absent"},
        "evaluation": card["evaluation"]["test"],
        "steps": card["steps_done"],
        "noise_multiplier": card["mechanism"]["noise_multiplier"],
        "seconds": round(seconds, 3),
        "statement": card["statement"],
    }
