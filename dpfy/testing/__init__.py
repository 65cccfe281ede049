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

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

if TYPE_CHECKING:
    from dpfy.testing.accountants import check_accountant
    from dpfy.testing.clips import check_clip
    from dpfy.testing.contract import ContractBroken
    from dpfy.testing.engines import check_engine
    from dpfy.testing.releases import check_claim, check_release
    from dpfy.testing.samplers import check_sampler
    from dpfy.testing.strategies import check_strategy

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.testing.accountants": "check_accountant",
        "dpfy.testing.clips": "check_clip",
        "dpfy.testing.contract": "ContractBroken",
        "dpfy.testing.engines": "check_engine",
        "dpfy.testing.releases": "check_claim check_release",
        "dpfy.testing.samplers": "check_sampler",
        "dpfy.testing.strategies": "check_strategy",
    },
)

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
