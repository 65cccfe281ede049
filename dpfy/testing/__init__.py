"""Public contract suites: they check your own sampler, noise strategy, accountant, clip rule, engine
or kind of release against the interface that dpfy relies on.

Each suite is one function in plain Python; no test runner is needed. It returns None, or raises
:class:`ContractBroken`, an `AssertionError` that names the property and the setting. All randomness
is seeded, so a suite that passes once always passes. `thorough=True` runs more settings and more
trials.

Example:
    >>> from dpfy.sampling.samplers import PoissonSampler
    >>> from dpfy.testing import check_sampler
    >>> check_sampler(PoissonSampler(0.1))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpfy.testing.accountants import check_accountant
    from dpfy.testing.clips import check_clip
    from dpfy.testing.contract import ContractBroken
    from dpfy.testing.engines import check_engine
    from dpfy.testing.releases import check_claim, check_release
    from dpfy.testing.samplers import check_sampler
    from dpfy.testing.strategies import check_strategy

# Names are found when first used, so that a check of an accountant does not import torch.
_HOME = {
    "ContractBroken": "dpfy.testing.contract",
    "check_accountant": "dpfy.testing.accountants",
    "check_claim": "dpfy.testing.releases",
    "check_clip": "dpfy.testing.clips",
    "check_engine": "dpfy.testing.engines",
    "check_release": "dpfy.testing.releases",
    "check_sampler": "dpfy.testing.samplers",
    "check_strategy": "dpfy.testing.strategies",
}

__all__ = [
    "ContractBroken",
    "check_accountant",
    "check_claim",
    "check_clip",
    "check_engine",
    "check_release",
    "check_sampler",
    "check_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
