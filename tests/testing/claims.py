"""One claim of every kind of release, with typical settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpfy.core import events, plugins
from dpfy.core.claim import Claim


def _training(kind: type[Any]) -> Claim:
    import dpfy

    plan = dpfy.dpsgd(300, 60, steps=6).with_noise(2.0, delta=1e-3)
    return kind(plan)


def _tuning(kind: type[Any]) -> Claim:
    import dpfy
    from dpfy.tuning.claim import CalibratedSearch, SearchRoute

    plan = dpfy.dpsgd(300, 60, steps=6).with_noise(2.0, delta=1e-3)
    paid = CalibratedSearch(SearchRoute("random", 5.0, 0.0), (plan,), (), None)
    return kind(paid, {"rate": "0.1..1"})


def _fit(kind: type[Any]) -> Claim:
    from dpfy.estimators.claim import ReleaseRound

    rounds = (
        ReleaseRound("counts", events.Laplace(4.0), 1.0, 2),
        ReleaseRound("sums", events.Gaussian(3.0), 1.5),
    )
    return kind("NaiveBayes", "a domain", (("alpha", "1"),), rounds)


def _fit_tuning(kind: type[Any]) -> Claim:
    from dpfy.estimators.claim import FitClaim
    from dpfy.tuning.claim import SearchRoute

    return kind(SearchRoute("random", 5.0, 0.0), (_fit(FitClaim),), None, {"alpha": "0.1..1"})


def _protocol() -> Any:
    from dpfy.local.frequencies import KaryResponse

    return KaryResponse(1.0, 4)


def _terms(kind: str) -> dict[str, Any]:
    made: dict[str, dict[str, Any]] = {
        "answers": {"rule": "gaussian", "sigma": 6.0},
        "student": {"rule": "gaussian", "sigma": 12.0},
    }
    return made[kind] | {"classes": 4, "voters": 30, "queries": 50, "answers": 50}


MAKE: dict[str, Callable[[type[Any]], Claim]] = {
    "answers": lambda kind: kind(**_terms("answers"), delta=1e-6),
    "student": lambda kind: kind(**_terms("student"), delta=1e-6),
    "vote-bill": lambda kind: kind.of(
        plugins.find(plugins.CLAIMS, "answers")("gaussian", 2, 40, 30, 30, sigma=30.0, delta=1e-5)
    ),
    "evaluation": lambda kind: kind(3.0),
    "evolution": lambda kind: kind(2, 1000, 3, 2.0),
    "fit": _fit,
    "fit-tuning": _fit_tuning,
    "generated-text": lambda kind: kind(10, 20, "bytes"),
    "generated-rows": lambda kind: kind("a domain", 100, 4, 16),
    "teacher-votes": lambda kind: kind(3.0, "a domain", 5, 4, 10, 100),
    "image-synthesis": lambda kind: kind(6, 5, 3, 5, 4, 2.0),
    "label-responses": lambda kind: kind("rr", 3, epsilon=1.0, delta=0.0, records=9),
    "label-sums": lambda kind: kind("projection", 3, noise_multiplier=2.0, delta=1e-6, records=90),
    "local": lambda kind: kind("colour", _protocol()),
    "shuffled": lambda kind: kind("colour", _protocol(), shuffler="mix", records=600, delta=1e-6),
    "metric-text": lambda kind: kind(1.0, "euclidean", "0" * 64, 50, 3),
    "moments": lambda kind: kind(2.0),
    "normalisation": lambda kind: kind(4.0, 3),
    "public-tuning": lambda kind: kind(
        {"rate": "0.1..1"}, 5, "fashion-mnist", delta=1e-5, records=100
    ),
    "query": lambda kind: kind("count()", "a domain", "laplace", 2.0, 1.0),
    "synthesis": lambda kind: kind("a method", "a domain", "pairs", 3.0, 20, 4, 0.2),
    "training": _training,
    "tuning": _tuning,
    "vocabulary": lambda kind: kind(4000, 20, 3.0, (200, 200), delta=1e-6, records=500),
}
