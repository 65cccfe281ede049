"""`dpfy tune`: a search for settings within a budget for everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.interrupt import resumable
from dpfy.cli.options import option
from dpfy.cli.output import charged, tell
from dpfy.cli.train import source


def tune(
    data: options.Data = None,
    config: options.Config = None,
    schema: options.TableSchema = None,
    person: options.Person = None,
    at_most: options.AtMost = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=RANGE",
            help="A field to search, and where; repeat it.",
            show_default=False,
        ),
    ] = None,
    out: options.Out = None,
    resume: options.Resume = False,
    records: options.Records = None,
    model: options.Model = None,
    epsilon: Annotated[
        float | None, option("What everything may cost together (default 3).")
    ] = None,
    delta: options.Delta = None,
    trials: Annotated[float | None, option("Trials, on average (default 20).")] = None,
    route: Annotated[str | None, option("public, random, composition, noisy-max, subset.")] = None,
    law: Annotated[str | None, option("logarithmic, geometric, poisson (random number).")] = None,
    score: Annotated[str | None, option("public, held-out or training records.")] = None,
    public: Annotated[
        str | None, option("Public data to search on: a kind, or a job file.")
    ] = None,
    workers: Annotated[int | None, option("Trials side by side.")] = None,
    ledger: options.JobLedger = None,
    assignments: options.Assignments = None,
    show_config: options.ShowConfig = False,
    insecure_seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Search for settings, and leave the best run in a folder whose report covers the search.

    dpfy tune --over "training.learning_rate=0.05..5 log" --over "training.batch_size=[512, 1024]"
    --epsilon 3 --trials 20

    Epsilon is for everything: the noise of each trial is calibrated so that all of them, and the
    choice, cost no more.

    A range is 0.05..5 (even), 0.05..5 log (even in the logarithm) or 1..8 whole; a list is [256,
    512]. What changes the charge (batch size, steps, epochs) must be a list. In a file: a section
    [search.training], with learning_rate = "0.05..5 log".

    By default a random number of trials is made, and only the best is released: nobody learns how
    many there were, nor anything about the others. On public data (--public) a search is free.
    Searches that look at earlier scores are paid by composition, from Python (Optuna, Ray).
    """
    from dpfy.core import settings
    from dpfy.core.errors import InvalidInput
    from dpfy.tuning import config as configuration

    flags = options.job_fields(locals())
    config, named = source(data, config)
    flags |= named
    given, searched = (
        settings.assigned(configuration.SECTIONS, assignments or [], flags),
        _ranges(over or []),
    )
    if resume and out is None:
        raise InvalidInput("--resume", True, "needs --out, the folder of the search to resume")
    if show_config:
        whole = configuration.read(config, given, searched)
        tell(
            {"config": whole.to_toml(publish=False)}, whole.to_toml(publish=False), as_json=as_json
        )
        return
    _search(config, given, searched, out, resume, insecure_seed, as_json)


def _search(
    config: Path | None,
    given: dict[str, Any],
    over: dict[str, str],
    out: Path | None,
    resume: bool,
    seed: int | None,
    as_json: bool,
) -> None:
    from dpfy.runs.run import fresh_path
    from dpfy.training import job as jobs
    from dpfy.tuning import config as configuration
    from dpfy.tuning import job

    folder, shared = out or fresh_path(), None
    if resume and jobs.is_finished(folder):
        found = job.finished(folder)
    else:
        whole = (
            job.stored(folder)
            if resume and config is None and not given and not over
            else configuration.read(config, given, over)
        )
        shared = whole.job.ledger.path
        with resumable(folder, "dpfy tune"), _bar(whole.tune.trials) as progress:
            found = job.run(whole, folder, resume=resume, seed=seed, progress=progress)
    told = found.to_json()
    left = [] if shared is None else charged(told["epsilon"], shared)
    tell(told, [*_lines(found, told), *left], as_json=as_json)


def _ranges(words: list[str]) -> dict[str, str]:
    """``training.learning_rate=0.05..5 log`` by name."""
    from dpfy.core.errors import InvalidInput

    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text.strip() or name.strip() in found:
            raise InvalidInput(
                "--over",
                word,
                "must be a field and a range, each field once: training.learning_rate=0.05..5 log",
            )
        found[name.strip()] = text.strip()
    return found


@contextmanager
def _bar(trials: float) -> Iterator[Any]:
    """What is being done, on standard error; how many trials are made only where that is no
    secret.
    """
    from rich.console import Console

    with Console(stderr=True).status("planning") as shown:
        yield lambda what, made: shown.update(
            what if made is None else f"{what}: {made} of {trials:g} trials, all of them charged"
        )


def _lines(found: Any, told: dict[str, Any]) -> list[str]:
    settings = found.settings or {}
    lines = [f"{name} = {value}" for name, value in settings.items()] or [
        "no trial was made: the number that was drawn is 0"
    ]
    if isinstance(told["score"], int | float):
        lines.append(f"score {told['score']:.4g}{_counted(told.get('scored'))}")
    if "test_accuracy" in told:
        lines.append(
            f"accuracy on test records that no trial was scored on: {told['test_accuracy']:.2%}"
        )
    lines.append(told["statement"])
    if told["bill"]:
        lines.append(
            f"training alone: epsilon {told['training_alone']:.4g}. {told['bill']['words']}"
        )
    names = (
        "model.safetensors",
        "report.html",
        "report.md",
        "privacy.json",
        "ledger.jsonl",
        "search.json",
        "search.toml",
        "trials.jsonl",
        "config.toml",
    )
    lines += [f"  {found.run / name}" for name in names if (found.run / name).is_file()]
    return [*lines, f"check it: dpfy verify {found.run}"]


def _counted(scored: dict[str, Any] | None) -> str:
    """What a noisy score counts, as a phrase; nothing of a score of public records."""
    if scored is None:
        return ""
    return (
        f" (standard error {scored['standard_error']:.3g}): of about {scored['expected']} "
        f"{scored['counts']}"
    )
