"""What a data set has spent, for eyes: a table and a bar for a terminal, a picture as SVG."""

from __future__ import annotations

import math

from dpfy.report.charts import Axis, Series, chart
from dpfy.report.spending import LATER, NO_BUDGET, Allowance, Spending, SpendingFigure
from dpfy.report.words import down, up

BAR = 40
MOST_WHAT = 96
STYLE = (
    "<style>svg{background:#fdfcf9}text{font:13px system-ui,'DejaVu "
    "Sans',sans-serif;fill:#545d6b}.grid{stroke:#e2ded4}"
    ".line{fill:none;stroke-width:2.2}.line.a{stroke:#1f5c7a}.line.b{stroke:#8a4b08}.line.quiet{stroke:#a3121f;stroke-dasharray:5 "  # noqa: E501
    "4}"
    ".dot.a{fill:#1f5c7a}text.key.a{fill:#1f5c7a}text.key.b{fill:#8a4b08}text.key.quiet{fill:#a3121f}</style>"
)
COLUMNS = ("#", "when (UTC)", "run", "purpose", "state", "uses", "epsilon", "total", "what")


def table(spending: Spending) -> list[str]:
    """Every reservation in a line, then the reasons of missing figures, the total, each purpose,
    and the budget.
    """
    ledger = spending.ledger
    unit = f"one {ledger.unit.name}" + (
        f" of at most {ledger.unit.most_records} records" if ledger.unit.most_records > 1 else ""
    )
    count = len(spending.entries)
    lines = [
        f"{ledger.path.name}: {count} reservation{'' if count == 1 else 's'}; {unit}, "
        f"{ledger.adjacency.value}"
    ]
    rows = [
        (
            str(k),
            e.when,
            e.run,
            e.purpose,
            e.state,
            f"{e.permit.uses:,}",
            _shown(e.own),
            _shown(e.total),
            _cut(e.what),
        )
        for k, e in enumerate(spending.entries, start=1)
    ]
    lines += _aligned([COLUMNS, *rows]) if rows else []
    lines += [
        f"  {k}: no epsilon: {e.own.why}"
        for k, e in enumerate(spending.entries, start=1)
        if e.own.epsilon is None and e.own.why != LATER
    ]
    lines.append(_total(spending))
    if len(spending.purposes) > 1:
        lines += [f"  {purpose}: {_shown(figure)}" for purpose, figure in spending.purposes.items()]
    return [*lines, *budget(spending.allowance), *_more(spending.allowance, spending.total.epsilon)]


def _more(allowance: Allowance, alone: float | None) -> list[str]:
    """Why a budget counts more than an epsilon that was printed, where it does."""
    spent = allowance.spent.epsilon
    if spent is None or alone is None or not alone * (1 + 1e-3) < spent < math.inf:
        return []
    return [
        f"        {up(spent)} is more than {up(alone)}, the epsilon of a plan fixed in advance: the "
        f"budget must also hold when later runs are chosen by the results of earlier ones"
    ]


def charged(allowance: Allowance, epsilon: float, runs: int) -> list[str]:
    """For the end of a run of this epsilon, the last of so many: what is left of the budget of its
    data set, and why the figures of the budget are others than those that runs state.
    """
    held, spent, left = allowance.budget, allowance.spent.epsilon, allowance.left
    if held is None or spent is None or left is None:
        return []
    why = ""
    if runs > 1:
        why = f"; of {runs} runs the budget adds Rényi divergences, not what each of them states"
    elif spent > epsilon * (1 + 1e-3):
        why = (
            ", and the budget counts more, since it must also hold when later runs are chosen by "
            "the results of earlier ones"
        )
    return [
        f"budget of the data set: {up(spent)} of {held.epsilon:g} spent, {down(left)} left; "
        f"this run states {up(epsilon)}{why}"
    ]


def budget(allowance: Allowance) -> list[str]:
    """What is left of the budget, with a bar."""
    held, spent, left = allowance.budget, allowance.spent.epsilon, allowance.left
    if held is None:
        return [f"no budget: {NO_BUDGET}"]
    if spent is None or left is None:
        return [
            f"budget: epsilon {held.epsilon:g} at delta {held.delta:g}; what is spent of it is "
            f"unknown: {allowance.spent.why}"
        ]
    words = (
        f"{up(spent)} of epsilon {held.epsilon:g} spent at delta {held.delta:g}, {down(left)} left"
    )
    aside = (
        f"; {held.approximation:g} of delta is set aside for releases that may fail with a small "
        f"probability, such as top()"
        if held.approximation
        else "; nothing of delta is set aside (approximation), so top(), range() and other "
        "releases that may fail with a small probability are refused"
    )
    why = f"(counted so that later runs may be chosen by the results of earlier ones{aside})"
    return [f"budget: [{bar(spent / held.epsilon)}] {words}", f"        {why}"]


def bar(share: float) -> str:
    """A share as a bar of characters; anything spent shows."""
    full = BAR if share >= 1 else math.ceil(BAR * share) if share > 0 else 0
    return "#" * full + "." * (BAR - full)


def _total(spending: Spending) -> str:
    total = spending.total
    if total.epsilon is None:
        return f"together: no epsilon at delta {spending.delta:g}: {total.why}"
    return (
        f"together: epsilon {up(total.epsilon)} at delta {spending.delta:g} (of "
        f"{spending.delta_of}), {total.accountant} accountant"
    )


def _shown(figure: SpendingFigure | None) -> str:
    return "" if figure is None else "?" if figure.epsilon is None else up(figure.epsilon)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_WHAT else text[: MOST_WHAT - 3] + "..."


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(COLUMNS) - 1)]
    right = {"#", "uses", "epsilon", "total"}
    return [
        "  ".join(
            [
                (c.rjust if COLUMNS[k] in right else c.ljust)(w)
                for k, (c, w) in enumerate(zip(row, widths, strict=False))
            ]
            + [row[-1]]
        )
        for row in rows
    ]


def picture(spending: Spending) -> bytes:
    """Epsilon of everything up to each reservation, with the line that the budget draws, as a file
    of its own.
    """
    counted = [e for e in spending.entries if e.state != "given back"]
    composed = [
        (k, e.total.epsilon)
        for k, e in enumerate(counted, start=1)
        if e.total is not None and _drawable(e.total)
    ]
    adaptive = [
        (k, e.adaptive.epsilon)
        for k, e in enumerate(counted, start=1)
        if e.adaptive is not None and _drawable(e.adaptive)
    ]
    held = spending.allowance.budget
    limit = None if held is None else held.epsilon
    other = "" if held is None or held.delta == spending.delta else f" at delta {held.delta:g}"
    across = Axis("reservations", 0, 4 * math.ceil((len(counted) + 1) / 4))
    values = [float(v or 0) for _, v in (*composed, *adaptive)]
    high = 1.4 * max([*values, limit or 0.0, 1e-9])  # room for the key
    upward = Axis(f"epsilon at delta {spending.delta:g}", 0, high)
    series = [Series(_steps(composed), "line", "a", "all so far, composed")]
    series.append(Series([(float(k), float(v or 0)) for k, v in composed], "dots", "a"))
    if adaptive:
        series.append(Series(_steps(adaptive), "line", "b", f"as the budget counts{other}"))
    if limit is not None:
        series.append(
            Series(
                [(across.low, limit), (across.high, limit)],
                "line",
                "quiet",
                f"budget {limit:g}{other}",
            )
        )
    title = f"Epsilon spent by the {len(counted)} reservations of {spending.ledger.path.name}"
    drawn = chart(title, series, across, upward)
    return (
        drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace(">", f">{STYLE}", 1)
        .encode("utf-8", "replace")
    )


def _drawable(figure: SpendingFigure) -> bool:
    return figure.epsilon is not None and math.isfinite(figure.epsilon)


def _steps(points: list[tuple[int, float | None]]) -> list[tuple[float, float]]:
    """A line that jumps at each reservation, from nothing on."""
    found, before = [(0.0, 0.0)], 0.0
    for k, value in points:
        found += [(float(k), before), (float(k), float(value or 0))]
        before = float(value or 0)
    return [*found, (found[-1][0] + 0.5, before)]
