"""Flower with private rounds: a strategy for the server, a mod for the clients.

    strategy = PrivateFedAvg(model, plan, "/srv/runs/x")      # server_app.py, instead of
    FedAvg(...) app = ClientApp(mods=[private_mod])                         # client_app.py

The mod needs no torch, so names are found when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

if TYPE_CHECKING:
    from dpfy.integrations.flower.mods import private_mod
    from dpfy.integrations.flower.replies import RoundReport
    from dpfy.integrations.flower.secure_client import secure_mod
    from dpfy.integrations.flower.strategy import PrivateFedAvg

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.integrations.flower.mods": "private_mod",
        "dpfy.integrations.flower.replies": "RoundReport",
        "dpfy.integrations.flower.secure_client": "secure_mod",
        "dpfy.integrations.flower.strategy": "PrivateFedAvg",
    },
)

__all__ = ["PrivateFedAvg", "RoundReport", "private_mod", "secure_mod"]
