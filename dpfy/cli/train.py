"""`dpfy train`: a private model from a configuration file and flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfy.cli import train_labels
from dpfy.cli.form import AskedJob, JobForm, flag, job
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell

CHOSEN = {"identity": "dp-sgd (independent noise)", "banded": "band-mf", "square-root": "sqrt"}
"""What `--mechanism` calls a strategy, where the names differ."""


@dataclass(frozen=True)
class TrainForm(JobForm):
    """`dpfy train`."""

    data_dir: str | None = flag("Folder with mnist/, ... (else $DPFY_DATA).", None, key="data.dir")
    protect: str | None = flag("records (default), or labels.", None)
    method: str | None = flag("How labels are released.", None)
    mechanism: str | None = flag(
        "dp-sgd, band-mf, blt, tree, ..., auto.", None, key="training.mechanism"
    )
    sampling: str | None = flag("poisson, random-allocation, ...", None, key="training.sampling")
    batch_size: float | None = flag(
        "Mean size of a batch (default: all).", None, key="training.batch_size"
    )
    epochs: float | None = flag("Expected passes over the data.", None, key="training.epochs")
    steps: int | None = flag("Noisy steps, instead of epochs.", None, key="training.steps")
    clip_norm: float | None = flag(
        "Largest gradient norm of an example.", None, key="training.clip_norm"
    )
    learning_rate: float | None = flag("Learning rate.", None, key="training.learning_rate")
    device: str | None = flag("cpu (default), cuda, ...", None, key="runtime.device")


@job(TrainForm)
def train(asked: AskedJob[TrainForm]) -> None:
    """Train a private model and leave a run folder that anyone can verify.

    Without arguments: 4,000 embedded MNIST images, epsilon 3, delta 1e-5. A table of your own
    needs a schema: dpfy init people.csv. Fields without a flag: --set.

    Example: dpfy train people.csv --schema people.toml --records 20000 --epsilon 3
    """
    form = asked.form
    if train_labels.chosen(form.protect, form.method, asked):
        train_labels.train_labels(asked, form.method)
        return
    from dpfy.report.card import section
    from dpfy.training import config as configuration

    given = asked.fields(configuration.SECTIONS)
    if asked.show and not asked.resume:
        raw = configuration.read_toml(asked.config) if asked.config else {}
        asked.tell(configuration.make(raw, given))
        return
    from dpfy.training import job, ready
    from dpfy.training.parallel.world import process_group

    folder, resume, shared, auto = asked.folder(), asked.resume, None, False
    with resumable(folder, "dpfy train"), process_group() as first:
        if resume and job.is_finished(folder) and not asked.show:
            outcome = job.finished(folder)
        else:
            if resume:
                job.require_run(folder)
            whole = (
                configuration.make(job.stored_config(folder), given)
                if resume and not asked.config
                else ready.job(asked.config, given)
            )
            if asked.show:
                asked.tell(whole)
                return
            shared, auto = whole.ledger.path, whole.training.mechanism == "auto"
            outcome = job.run(whole, folder, resume=resume, seed=asked.seed, progress=True)
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
    tell(summary, [*lines, f"check it: dpfy verify {folder}"], as_json=asked.as_json)


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
