"""`dpfy tune`: a search for settings within a budget for everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dpfy.cli.form import AskedJob, JobForm, flag, job
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import charged, tell


@dataclass(frozen=True)
class TuneForm(JobForm):
    """`dpfy tune`."""

    over: list[str] | None = flag(  # noqa: RUF009
        "A field to search, and where; repeat it.", None, metavar="KEY=RANGE"
    )
    trials: float | None = flag("Trials, on average (default 20).", None, key="tune.trials")
    route: str | None = flag(
        "public, random, composition, noisy-max, subset.", None, key="tune.route"
    )
    law: str | None = flag("logarithmic, geometric, poisson (random number).", None, key="tune.law")
    score: str | None = flag("public, held-out or training records.", None, key="tune.score")
    public: str | None = flag(
        "Public data to search on: a kind, or a job file.", None, key="tune.public"
    )
    workers: int | None = flag("Trials side by side.", None, key="tune.workers")


@job(TuneForm)
def tune(asked: AskedJob[TuneForm]) -> None:
    r"""Search for settings, and leave the best run in a folder whose report covers the search.

    Epsilon is for everything: the noise of each trial is calibrated so that all of them, and the
    choice, cost no more. A range is 0.05..5 (even), 0.05..5 log (even in the logarithm) or 1..8
    whole; a list is \[256, 512]. What changes the cost (batch size, steps, epochs) must be a list.

    By default a random number of trials is made, and only the best is released: nobody learns how
    many there were, nor anything about the others. On public data (--public) a search is free.

    Example: dpfy tune --over "training.learning_rate=0.05..5 log" --epsilon 3 --trials 5
    """
    from dpfy.training import job as jobs
    from dpfy.tuning import config as configuration
    from dpfy.tuning import job

    given, over = asked.fields(configuration.SECTIONS), _ranges(asked.form.over or [])
    if asked.show:
        text = configuration.read(asked.config, given, over).to_toml(publish=False)
        tell({"config": text}, text, as_json=asked.as_json)
        return
    folder, resume, shared = asked.folder(), asked.resume, None
    if resume and jobs.is_finished(folder):
        found = job.finished(folder)
    else:
        whole = (
            job.stored(folder)
            if resume and asked.config is None and not given and not over
            else configuration.read(asked.config, given, over)
        )
        shared = whole.job.ledger.path
        with resumable(folder, "dpfy tune"), _bar(whole.tune.trials) as progress:
            found = job.run(whole, folder, resume=resume, seed=asked.seed, progress=progress)
    told = found.to_json()
    left = [] if shared is None else charged(told["epsilon"], shared)
    tell(told, [*_lines(found, told), *left], as_json=asked.as_json)


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
