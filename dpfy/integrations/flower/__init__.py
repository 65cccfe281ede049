"""Flower with private rounds: a strategy for the server, a mod for the clients.

    strategy = PrivateFedAvg(model, plan, "/srv/runs/x")      # server_app.py, instead of
    FedAvg(...) app = ClientApp(mods=[private_mod])                         # client_app.py

The mod needs no torch, so names are found when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfy.integrations.flower.mod import private_mod
    from dpfy.integrations.flower.replies import RoundReport
    from dpfy.integrations.flower.secure_client import secure_mod
    from dpfy.integrations.flower.strategy import PrivateFedAvg

_HOME = {
    "PrivateFedAvg": "dpfy.integrations.flower.strategy",
    "RoundReport": "dpfy.integrations.flower.replies",
    "private_mod": "dpfy.integrations.flower.mod",
    "secure_mod": "dpfy.integrations.flower.secure_client",
}

__all__ = ["PrivateFedAvg", "RoundReport", "private_mod", "secure_mod"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.integrations.flower' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
