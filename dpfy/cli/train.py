"""`dpfy train`: a private model from a configuration file and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli.answer import tell
from dpfy.cli.interrupt import resumable

DATA, MODEL, PRIVACY, TRAINING, RUNTIME, BUDGET = "Data", "Model", "Privacy", "Training", "Runtime", "Budget of the data set"


def _option(help_text: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, show_default=False)


def train(
    config: Annotated[Path | None, typer.Argument(help="Configuration (TOML). Flags win over it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: a new one under runs/).")] = None,
    resume: Annotated[bool, typer.Option(help="Resume the unfinished run in --out: same bits, no extra privacy cost.")] = False,
    data: Annotated[
        str | None, _option("embedded, digits, mnist, fashion-mnist, adult, idx, npz, csv...", DATA, "--data")
    ] = None,
    data_dir: Annotated[str | None, _option("Folder with mnist/, adult/, ... (else $DPFY_DATA).", DATA)] = None,
    records: Annotated[int | None, _option("Public number of training records, for data of your own.", DATA)] = None,
    test: Annotated[
        str | None,
        _option("What held-out records are: public, billed (noisy, paid for) or withheld (default for own files).", DATA),
    ] = None,
    test_noise: Annotated[float | None, _option("Noise of a billed evaluation, times what one record adds.", PRIVACY)] = None,
    model: Annotated[str | None, _option("scattering-linear, linear, mlp, lenet5, tanh-cnn.", MODEL)] = None,
    epsilon: Annotated[float | None, _option("Epsilon to reach (default 3).", PRIVACY)] = None,
    delta: Annotated[float | None, _option("Delta (default 1e-5); must be below 1/records.", PRIVACY)] = None,
    noise_multiplier: Annotated[
        float | None, _option("Fix the noise instead of epsilon; 0 trains without privacy.", PRIVACY)
    ] = None,
    adjacency: Annotated[str | None, _option("add-or-remove-one, replace-one or zero-out.", PRIVACY)] = None,
    accountant: Annotated[str | None, _option("How epsilon is computed.", PRIVACY)] = None,
    allow_large_delta: Annotated[bool | None, _option("Accept delta >= 1/records.", PRIVACY, "--allow-large-delta")] = None,
    mechanism: Annotated[str | None, _option("dp-sgd, band-mf, blt, tree, sqrt, dense or auto.", TRAINING)] = None,
    bands: Annotated[int | None, _option("Bands of band-mf (default: those with the least error).", TRAINING)] = None,
    noise_phases: Annotated[str | None, _option("Noise of equal phases of dp-sgd, relative: 2,1.5,1.", TRAINING)] = None,
    batch_size: Annotated[float | None, _option("Mean size of a Poisson batch (default: all records).", TRAINING)] = None,
    epochs: Annotated[float | None, _option("Expected passes over the data.", TRAINING)] = None,
    steps: Annotated[int | None, _option("Noisy steps (instead of epochs).", TRAINING)] = None,
    clip_norm: Annotated[float | None, _option("Largest gradient norm of one example.", TRAINING)] = None,
    optimizer: Annotated[str | None, _option("sgd, adam, adamw or ftrl.", TRAINING)] = None,
    learning_rate: Annotated[float | None, _option("Learning rate.", TRAINING)] = None,
    momentum: Annotated[float | None, _option("Momentum of sgd.", TRAINING)] = None,
    average: Annotated[float | None, _option("Decay of the weight average; 0 for none.", TRAINING)] = None,
    engine: Annotated[str | None, _option("auto, bookkeeping, batched or loop.", RUNTIME)] = None,
    max_physical_batch: Annotated[str | None, _option("Largest batch in memory at once: a number, or auto.", RUNTIME)] = None,
    device: Annotated[str | None, _option("cpu, cuda, ...", RUNTIME)] = None,
    graph: Annotated[bool | None, _option("Capture the step as CUDA graphs.", RUNTIME, "--graph")] = None,
    checkpoint_every: Annotated[float | None, _option("Seconds between checkpoints.", RUNTIME)] = None,
    insecure_seed: Annotated[int | None, _option("Fix all randomness, for tests: protects nothing.", RUNTIME)] = None,
    ledger: Annotated[str | None, _option("Ledger of the data set, shared by all runs on it.", BUDGET)] = None,
    budget_epsilon: Annotated[float | None, _option("Epsilon that all runs together may spend.", BUDGET)] = None,
    budget_delta: Annotated[float | None, _option("Delta of the budget (default: the run's).", BUDGET)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a private model and leave a run folder that anyone can verify.

    Without arguments: 4,000 embedded MNIST images, epsilon 3, delta 1e-5, a linear model on scattering features. The whole plan is
    written to the ledger before any data is read; a run that is killed can be resumed bit for bit with --resume.
    """
    flags = {
        "data.kind": data,
        "data.dir": data_dir,
        "data.test": test,
        "privacy.records": records,
        "privacy.test_noise": test_noise,
        "model.name": model,
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "privacy.noise_multiplier": noise_multiplier,
        "privacy.adjacency": adjacency,
        "privacy.accountant": accountant,
        "privacy.allow_large_delta": allow_large_delta,
        "training.mechanism": mechanism,
        "training.bands": bands,
        "training.noise_phases": _numbers("--noise-phases", noise_phases),
        "training.batch_size": batch_size,
        "training.epochs": epochs,
        "training.steps": steps,
        "training.clip_norm": clip_norm,
        "training.optimizer": optimizer,
        "training.learning_rate": learning_rate,
        "training.momentum": momentum,
        "training.average": average,
        "runtime.engine": engine,
        "runtime.max_physical_batch": _whole(max_physical_batch),
        "runtime.device": device,
        "runtime.graph": graph,
        "runtime.checkpoint_every": checkpoint_every,
        "ledger.path": ledger,
        "ledger.budget_epsilon": budget_epsilon,
        "ledger.budget_delta": budget_delta,
    }
    _train(config, out, flags, resume=resume, seed=insecure_seed, as_json=as_json)


def _whole(text: str | None) -> int | str | None:
    """A number where the text is one."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 30 else text


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers with commas between them."""
    from dpfy.core.errors import InvalidInput

    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(name, text, "must be numbers with commas between them, such as 2,1.5,1") from None


def _train(
    config: Path | None, out: Path | None, flags: dict[str, Any], *, resume: bool, seed: int | None, as_json: bool
) -> None:
    from dpfy.core.errors import InvalidInput
    from dpfy.training import config as configuration
    from dpfy.training import job
    from dpfy.training.state import fresh_path

    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the run to resume")
    folder = out or fresh_path()
    with resumable(folder, "dpfy train"):
        if resume and job.is_finished(folder):
            outcome = job.finished(folder)
        else:
            if resume:
                job.require_run(folder)
            raw = configuration.read_toml(config) if config else job.stored_config(folder) if resume else {}
            outcome = job.run(configuration.make(raw, flags), folder, resume=resume, seed=seed, progress=True)
    card = outcome.card
    lines = [card["statement"], f"{outcome.engine}; {card['steps_done']} steps in {outcome.seconds:.1f} s"]
    accuracy = card["utility"].get("test_accuracy")
    shown = "evaluation" if accuracy is None else f"accuracy on held-out data: {accuracy:.2%}"
    lines.insert(0, f"{shown}: {card['evaluation']['words']}" if accuracy is None else f"{shown} ({card['evaluation']['words']})")
    files = ("model.safetensors", "report.html", "report.md", "privacy.json", "ledger.jsonl", "metrics.jsonl", "config.toml")
    lines += [f"  {folder / name}" for name in files if (folder / name).is_file()]
    tell(_summary(outcome.run, card, outcome.seconds), [*lines, f"check it: dpfy verify {folder}"], as_json=as_json)


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
