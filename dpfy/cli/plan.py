"""`dpfy plan`: the calculators. None of them reads data."""

from __future__ import annotations

from dpfy.cli import (
    account,
    calibrate,
    compare,
    compare_estimators,
    compare_local,
    compare_mechanisms,
    compare_users,
    explore,
    tune_plan,
)
from dpfy.cli.plugins import group

app = group(
    """Plan before you touch data: what does this noise cost, how much noise is needed, which method
    is best?

    Example: dpfy plan account --noise-multiplier 1 --sampling-rate 0.005 --steps 200 --delta
    1e-6""",
    short="Calculators that read no data: account, calibrate, explore, compare, tune.",
)
app.command("account")(account.account)
app.command("calibrate")(calibrate.calibrate)
app.command("explore")(explore.explore)
app.command("tune")(tune_plan.plan)
compare.app.command("mechanisms")(compare_mechanisms.mechanisms)
compare.app.command("local")(compare_local.local)
compare.app.command("users")(compare_users.users)
compare.app.command("estimators")(compare_estimators.estimators)
app.add_typer(compare.app, name="compare")
