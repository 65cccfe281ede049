"""`dpfy plan compare users`: records drawn one by one or users drawn whole, calibrated to one guarantee
for users.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfy.cli import options
from dpfy.cli.account import Delta
from dpfy.cli.output import PICTURE, require_writable, save, tell

if TYPE_CHECKING:
    from dpfy.accounting.user_level import UserRoutes, UserSetting

WORDS = {"users": "users drawn whole (ULS)", "records": "records drawn one by one (ELS)"}
COLUMNS = (
    "records",
    "rate",
    "users a step",
    "noise ELS",
    "noise ULS",
    "std ELS",
    "std ULS",
    "even if",
)
WIDTHS = (8, 10, 14, 11, 11, 11, 11, 9)
HEAD = "".join(f"{name:>{width}}" for name, width in zip(COLUMNS, WIDTHS, strict=True)) + "  better"


def users(
    users: Annotated[int, typer.Option(help="Public number of users.")],
    max_contributions: Annotated[
        int, typer.Option(help="Most records of one user that may be used: a public bound.")
    ],
    batch_size: Annotated[
        float, typer.Option(help="Mean number of gradients of records in a step.")
    ],
    steps: Annotated[int, typer.Option(help="Noisy steps.")],
    epsilon: Annotated[
        float, typer.Option(help="Epsilon for one user that both are calibrated to.")
    ],
    delta: Delta,
    alike: Annotated[
        float,
        typer.Option(
            help="How alike a user's gradients are: cosine between them, 0 (nothing in common) to "
            "1 (copies)."
        ),
    ] = 0.0,
    records: Annotated[
        int | None,
        typer.Option(help="Public number of all records, where users own fewer than the bound."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the noise over the number of records of a user (SVG, PNG)."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compare records drawn one by one (ELS) with users drawn whole (ULS), at one guarantee for
    users and one number of gradients.

    Looks at no data. "std" is the noise left in the mean gradient of a step, in clip norms of a
    record; "even if" says how alike a user's records would have to be for both to leave the same:
    users win below.

    Example: dpfy plan compare users --users 1000 --max-contributions 4 --batch-size 100 --steps
    50 --epsilon 3 --delta 1e-5
    """
    from dpfy.accounting import user_level

    if plot is not None:
        require_writable("--plot", plot, PICTURE)
    setting = user_level.UserSetting(
        users, max_contributions, batch_size, steps, epsilon, delta, alike, records
    )
    rows, changes = user_level.compare(setting)
    if plot is not None:
        save("--plot", plot, _drawn(rows, setting, plot.suffix[1:].lower()))
    last = rows[-1]
    told: dict[str, Any] = {
        "users": users,
        "max_contributions": max_contributions,
        "batch_size": batch_size,
        "steps": steps,
    }
    told |= {"epsilon": epsilon, "delta": delta, "alike": alike, "better": last.better}
    told |= {"crossings": [{"from": each, "better": better} for each, better in changes]}
    lines = [
        HEAD,
        *map(_line, rows),
        f"with {last.each} records of a user: {WORDS[last.better]} leave less noise",
        _edges(changes),
    ]
    tell(told | {"routes": [row.to_json() for row in rows]}, lines, as_json=as_json)


def _line(row: UserRoutes) -> str:
    noise = f"{row.els_noise:>11.4f}{row.uls_noise:>11.4f}{row.els:>11.6f}{row.uls:>11.6f}{row.even:>9.3f}"
    return f"{row.each:>8}{row.rate:>10.5f}{row.cohort:>14.2f}{noise}  {row.better}"


def _edges(changes: list[tuple[int, str]]) -> str:
    told = [f"from {each} on {WORDS[better]}" for each, better in changes]
    return f"less noise by the most records of a user: {'; '.join(told)}"


def _drawn(rows: list[UserRoutes], setting: UserSetting, form: str) -> bytes:
    """The noise left in the mean gradient by both routes; for users a band from records without
    anything in common to copies.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    each = [row.each for row in rows]
    copies = [row.uls_noise / row.cohort for row in rows]
    apart = [value / row.mean**0.5 for value, row in zip(copies, rows, strict=True)]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(each, [row.els for row in rows], marker="o", label=WORDS["records"])
    axes.plot(
        each,
        [row.uls for row in rows],
        marker="s",
        label=f"{WORDS['users']}, alike {setting.alike:g}",
    )
    axes.fill_between(
        each, apart, copies, alpha=0.15, label="users, from nothing in common to copies"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("records of one user in play")
    axes.set_ylabel("noise in the mean gradient, in clip norms")
    axes.set_title(
        f"epsilon {setting.epsilon:g}, delta {setting.delta:g} for one user, "
        f"{setting.batch_size:g} gradients a step"
    )
    axes.legend()
    drawn = io.BytesIO()
    figure.savefig(drawn, format=form)
    pyplot.close(figure)
    return drawn.getvalue()
