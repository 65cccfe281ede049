"""`dpfy plan tune`: what a search for settings would cost, by each way to pay for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.account import ADJACENCY
from dpfy.cli.compare import SVG, draw, priced
from dpfy.cli.output import require_writable, tell

PLANNED_STEPS = 10_000_000
"""The longest run whose search is priced."""


def plan(
    records: Annotated[int, typer.Option(help="Public number of records to train on.")],
    delta: Annotated[float, typer.Option(help="The delta of (epsilon, delta).")],
    batch_size: Annotated[float, typer.Option(help="Mean size of a batch.")],
    epochs: Annotated[
        float | None,
        typer.Option(show_default=False, help="Expected passes over the data in one trial."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(show_default=False, help="Noisy steps of one trial, instead of epochs."),
    ] = None,
    trials: Annotated[int, typer.Option(help="How many settings are tried (on average).")] = 20,
    epsilon: Annotated[
        float | None,
        typer.Option(
            show_default=False, help="What everything may cost: print the noise of each way to pay."
        ),
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            show_default=False, help="Noise of a trial instead: print what each way to pay costs."
        ),
    ] = None,
    sample: Annotated[
        float, typer.Option(help="Share of the records that a search on a subset sees.")
    ] = 0.25,
    adjacency: Annotated[str, ADJACENCY] = "add-or-remove-one",
    plot: Annotated[Path | None, typer.Option(help="Also draw the table as an SVG file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Say which way to pay for a search is cheapest: the noise of each way at one epsilon, or with
    --noise-multiplier what each way costs. No data is read.

    Example: dpfy plan tune --records 60000 --batch-size 2048 --epochs 20 --epsilon 3 --delta
    1e-5 --trials 20
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
        claimed = planning.printed(event, trials, delta, recipe.adjacency)
        if plot is not None:
            label = f"epsilon of {trials} trials at delta {delta:g}"
            draw(plot, [(one.name, one.epsilon) for one in found], label)
        told, lines = priced(found, claimed)
        tell({"delta": delta, "trials": trials} | told, lines, as_json=as_json)
        return
    assert epsilon is not None
    asked = planning.PrivacyTarget(epsilon, delta, recipe.adjacency)
    part = max(1, round(records * sample))
    small = dpsgd(part, batch_size * part / records, steps=recipe.steps, adjacency=recipe.adjacency)
    offers = planning.offers(recipe, asked, trials, sample=sample, small=small)
    if plot is not None:
        draw(
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
