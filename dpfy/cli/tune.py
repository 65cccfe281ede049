"""`dpfy tune`: a search for settings that pays its own price; `dpfy tune plan` says beforehand what
it would cost.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli.account import ADJACENCY
from dpfy.cli.interrupt import resumable
from dpfy.cli.output import require_writable, save, tell
from dpfy.cli.plugins import VerbGroup

SVG = {".svg": (b"<?xml",)}
PLANNED_STEPS = 10_000_000


class TuneVerbs(VerbGroup):
    """A verb of its own with another verb below it."""

    default = "run"
    default_alone = True


app = typer.Typer(
    cls=TuneVerbs,
    help="Search for the settings of a private training, within a budget for everything. dpfy tune "
    "[JOB.toml] searches; dpfy tune plan "
    "says what it would cost.",
)


def _option(help_text: str, *names: str, hidden: bool = False) -> Any:
    return typer.Option(*names, help=help_text, show_default=False, hidden=hidden)


@app.command()
def run(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Configuration of the job and of the search (TOML).", show_default=False
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=RANGE",
            help="A field to search, and where; repeat it.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, _option("Run folder (default: new, in runs/).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the search in --out.")
    ] = False,
    data: Annotated[str | None, _option("embedded, digits, mnist, csv, ...")] = None,
    model: Annotated[str | None, _option("scattering-linear, linear, mlp, ...")] = None,
    epsilon: Annotated[
        float | None, _option("What everything may cost together (default 3).")
    ] = None,
    delta: Annotated[float | None, _option("Delta (1e-5); below 1/records.")] = None,
    trials: Annotated[float | None, _option("Trials, on average (default 20).")] = None,
    route: Annotated[str | None, _option("public, random, composition, noisy-max, subset.")] = None,
    law: Annotated[str | None, _option("logarithmic, geometric, poisson (random number).")] = None,
    score: Annotated[str | None, _option("public, held-out or training records.")] = None,
    public: Annotated[
        str | None, _option("Public data to search on: a kind, or a job file.")
    ] = None,
    workers: Annotated[int | None, _option("Trials side by side.")] = None,
    ledger: Annotated[str | None, _option("Ledger of the data set, over all runs.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any field, as section.key; repeat it.",
            show_default=False,
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the configuration as TOML, and stop.")
    ] = False,
    insecure_seed: Annotated[
        int | None, _option("Fix all randomness, for tests: protects nothing.", hidden=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search for settings, and leave the best run in a folder whose card covers the search.

    dpfy tune --over "training.learning_rate=0.05..5 log" --over "training.batch_size=[512, 1024]"
    --epsilon 3 --trials 20

    Epsilon is for everything: the noise of each trial is calibrated so that all of them, and the
    choice, cost no more.

    A range is 0.05..5 (even), 0.05..5 log (even in the logarithm) or 1..8 whole; a list is [256,
    512]. What changes the bill (batch size, steps, epochs) must be a list. In a file: a section
    [search.training], with learning_rate = "0.05..5 log".

    By default a random number of trials is made, and only the best is released: nobody is told how
    many there were, nor anything about the others. On public data (--public) a search is free.
    Searches that look at earlier scores are paid by composition, from Python (Optuna, Ray).
    """
    from dpfy.core import settings
    from dpfy.core.errors import InvalidInput
    from dpfy.tuning import config as configuration

    flags = {
        "data.kind": data,
        "model.name": model,
        "privacy.epsilon": epsilon,
        "privacy.delta": delta,
        "ledger.path": ledger,
        "tune.trials": trials,
        "tune.route": route,
        "tune.law": law,
        "tune.score": score,
        "tune.public": public,
        "tune.workers": workers,
    }
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

    folder = out or fresh_path()
    if resume and jobs.is_finished(folder):
        found = job.finished(folder)
    else:
        whole = (
            job.stored(folder)
            if resume and config is None and not given and not over
            else configuration.read(config, given, over)
        )
        with resumable(folder, "dpfy tune"), _bar(whole.tune.trials) as progress:
            found = job.run(whole, folder, resume=resume, seed=seed, progress=progress)
    told = found.to_json()
    tell(told, _lines(found, told), as_json=as_json)


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
            what if made is None else f"{what}: {made} of {trials:g} trials, all of them billed"
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
        "trials.jsonl",
        "config.toml",
    )
    lines += [f"  {found.run / name}" for name in names if (found.run / name).is_file()]
    return [*lines, f"check it: dpfy verify {found.run}"]


def _counted(scored: dict[str, Any] | None) -> str:
    """What a noisy score counts, in words; nothing of a score of public records."""
    if scored is None:
        return ""
    return (
        f" (standard error {scored['standard_error']:.3g}): of about {scored['expected']} "
        f"{scored['counts']}"
    )


@app.command()
def plan(
    records: Annotated[int, typer.Option(help="Public number of records to train on.")],
    delta: Annotated[float, typer.Option(help="The delta of (epsilon, delta).")],
    batch_size: Annotated[float, typer.Option(help="Mean size of a batch.")],
    epochs: Annotated[float | None, _option("Expected passes over the data in one trial.")] = None,
    steps: Annotated[int | None, _option("Noisy steps of one trial, instead of epochs.")] = None,
    trials: Annotated[int, typer.Option(help="How many settings are tried (on average).")] = 20,
    epsilon: Annotated[
        float | None, _option("What everything may cost: print the noise of each way to pay.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, _option("Noise of a trial instead: print what each way to pay costs.")
    ] = None,
    sample: Annotated[
        float, typer.Option(help="Share of the records that a search on a subset sees.")
    ] = 0.25,
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    plot: Annotated[Path | None, typer.Option(help="Also draw the table as an SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which way to pay for a search is cheapest. No data is read.

    dpfy tune plan --records 60000 --batch-size 2048 --epochs 20 --epsilon 3 --delta 1e-5 --trials
    20

    dpfy tune plan --records 1000000 --batch-size 5000 --epochs 1 --noise-multiplier 1 --delta 1e-6
    --trials 100
    """
    from dpfy.core import check
    from dpfy.core.errors import InvalidInput
    from dpfy.core.unit import Adjacency
    from dpfy.plan.recipe import dpsgd
    from dpfy.tuning import planning

    if (epsilon is None) == (noise_multiplier is None):
        raise InvalidInput(
            "--epsilon", epsilon, "give epsilon, or the noise multiplier of a trial: one of them"
        )
    if plot is not None:
        require_writable("--plot", plot, SVG)
    check.integer("--trials", trials, least=2, most=100_000)
    check.inside_unit("--sample", sample)
    recipe = dpsgd(
        records, batch_size, epochs=epochs, steps=steps, adjacency=Adjacency.parse(adjacency)
    )
    check.integer("steps", recipe.steps, most=PLANNED_STEPS)
    if noise_multiplier is not None:
        event = recipe.event(
            check.positive(
                "--noise-multiplier", check.noise_multiplier("--noise-multiplier", noise_multiplier)
            )
        )
        found = planning.totals(event, trials, delta, recipe.adjacency)
        rows = [{"route": one.name, "epsilon": one.epsilon, "note": one.note} for one in found]
        lines = [f"{one.name:<42} {one.epsilon:>10.4f}  {one.note}" for one in found]
        claimed = planning.printed(event, trials, delta, recipe.adjacency)
        lines += ["", f"{claimed.name:<42} {claimed.figure:>10.4f}  {claimed.note}"]
        if plot is not None:
            _draw(
                plot,
                [(one.name, one.epsilon) for one in found],
                f"epsilon of {trials} trials at delta {delta:g}",
            )
        answer = {
            "delta": delta,
            "trials": trials,
            "cheapest": found[0].name,
            "routes": rows,
            "not_a_guarantee": claimed.to_json(),
        }
        tell(answer, lines, as_json=as_json)
        return
    assert epsilon is not None
    asked = planning.PrivacyTarget(epsilon, delta, recipe.adjacency)
    part = max(1, round(records * sample))
    small = dpsgd(part, batch_size * part / records, steps=recipe.steps, adjacency=recipe.adjacency)
    offers = planning.offers(recipe, asked, trials, sample=sample, small=small)
    if plot is not None:
        _draw(
            plot,
            [(f"{o.route} {o.law}".strip(), o.noise_ratio) for o in offers],
            "noise, in that of a run without a search",
        )
    private = [o for o in offers if o.route not in ("public", "none")]
    told = {
        "epsilon": epsilon,
        "delta": delta,
        "trials": trials,
        "offers": [o.to_json() for o in offers],
        "warning": planning.warning(offers),
    }
    tell(
        told | {"cheapest": f"{private[0].route} {private[0].law}".strip() if private else None},
        _table(offers, told["warning"]),
        as_json=as_json,
    )


def _table(offers: list[Any], warning: Any) -> list[str]:
    head = (
        f"{'':<22} {'noise':>8} {'times':>6} {'alone':>7} {'best tenth':>10} {'few':>6} {'many':>6}"
    )
    rows = []
    for o in offers:
        figures = (
            f"{o.noise_multiplier:>8.4g} {o.noise_ratio:>6.2f} {o.training_alone:>7.3f} "
            f"{o.tenth:>10.0%} {o.few:>6.0%} {o.many:>6}"
        )
        rows.append(f"{(o.route + ' ' + o.law).strip():<22} {figures}  {o.note}")
    words = [
        "noise: of a trial; times: that of a run without a search; alone: epsilon of the released "
        "run by itself",
        "best tenth: chance that a trial has settings among the best tenth of the space; few: "
        "chance of fewer than half of the trials",
        "many: trials that are not exceeded in 99 of 100 searches",
    ]
    return [head, *rows, *words, *([f"warning: {warning}"] if warning else [])]


def _draw(path: Path, rows: list[tuple[str, float]], label: str) -> None:
    """Horizontal bars, one a row."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [(name, value) for name, value in rows if math.isfinite(value)]
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(rows) + 1), layout="constrained")
    bars = axes.barh([name for name, _ in rows], [value for _, value in rows])
    axes.bar_label(bars, fmt="%.4g", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.margins(x=0.15)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    pyplot.close(figure)
    save("--plot", path, drawn.getvalue())
