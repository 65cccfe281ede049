"""Label privacy: features are public, and each record's label is protected. Labels are noised once,
and training sees the answers alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfy.labels.claim import METHODS
    from dpfy.labels.fitting import LabelFit, fit, load
    from dpfy.labels.kernel import KernelSettings
    from dpfy.labels.learners import KernelLearner, NetworkLearner
    from dpfy.labels.method import LabelMethod

# Names are found when first used: the claim, which verification reads, must not pay for torch.
_HOME = {
    "METHODS": "dpfy.labels.claim",
    "LabelFit": "dpfy.labels.fitting",
    "KernelLearner": "dpfy.labels.learners",
    "KernelSettings": "dpfy.labels.kernel",
    "LabelMethod": "dpfy.labels.method",
    "NetworkLearner": "dpfy.labels.learners",
    "fit": "dpfy.labels.fitting",
    "load": "dpfy.labels.fitting",
}

__all__ = [
    "METHODS",
    "KernelLearner",
    "KernelSettings",
    "LabelFit",
    "LabelMethod",
    "NetworkLearner",
    "fit",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.labels' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
