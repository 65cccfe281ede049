"""Label privacy: features are public, and each record's label is protected. Labels are noised once,
and training sees the answers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

if TYPE_CHECKING:
    from dpfy.labels.claim import METHODS
    from dpfy.labels.fitting import LabelFit, fit, load
    from dpfy.labels.kernel import KernelSettings
    from dpfy.labels.learners import KernelLearner, NetworkLearner
    from dpfy.labels.method import LabelMethod

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.labels.claim": "METHODS",
        "dpfy.labels.fitting": "LabelFit fit load",
        "dpfy.labels.kernel": "KernelSettings",
        "dpfy.labels.learners": "KernelLearner NetworkLearner",
        "dpfy.labels.method": "LabelMethod",
    },
)

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
