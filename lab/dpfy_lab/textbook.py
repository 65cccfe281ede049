"""Formulas of the texts that dpfy reproduces, beside what its accountant says: conversions of Rényi
divergences, tails of the privacy loss, rules for noise, rates of excess risk.

They are for comparison. Nothing that is charged is computed here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dpfy import accounting
from dpfy.accounting import calibrate, gaussian, rdp
from dpfy.core import check, events
from dpfy.core.errors import DpfyError, InvalidInput
from dpfy.core.unit import Adjacency

ADD = Adjacency.ADD_OR_REMOVE_ONE


def plain_conversion(noise: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon by the plain conversion of Rényi divergences: the least of D + log(1 / delta) /
    (order - 1) over the orders (Mironov 2017, Proposition 3).
    """
    orders = np.asarray(rdp.ORDERS)
    values = rdp.divergences(events.poisson(noise, rate, steps), ADD)
    return float((values + math.log(1 / check.delta("delta", delta)) / (orders - 1)).min())


def conversions(noise: float, rate: float, steps: int, delta: float) -> list[dict[str, Any]]:
    """The rows of the guide's table 2, and the tight bound: epsilon of the same training."""
    event = events.poisson(noise, rate, steps)
    rows: list[dict[str, Any]] = []
    for name, words in (
        ("basic", "composition of (epsilon, delta)"),
        ("advanced", "strong composition"),
    ):
        try:
            epsilon: float | None = accounting.epsilon(event, delta, accountant=name)
        except DpfyError:
            epsilon = None
        rows.append({"bound": words, "epsilon": epsilon})
    plain = plain_conversion(noise, rate, steps, delta)
    rows.append({"bound": "Rényi, plain conversion", "epsilon": plain})
    for name, words in (("rdp", "Rényi, optimal conversion"), ("tight", "loss distribution")):
        rows.append({"bound": words, "epsilon": accounting.epsilon(event, delta, accountant=name)})
    return rows


def loss_tail(noise: float, rate: float, steps: int, epsilon: float) -> dict[str, float]:
    """The chance that the privacy loss exceeds epsilon, by Key Result 1 of the building-blocks text:
    at most delta(epsilon / 2) / (1 - e^(-epsilon / 2)). By Key Result 2 that chance is a delta for
    epsilon, of which `delta` is the least. Without sampling the exact chance is there too.
    """
    curve = accounting.curve(events.poisson(noise, rate, steps))
    half = check.epsilon("epsilon", epsilon) / 2
    found = {
        "epsilon": epsilon,
        "delta_of_half": curve.delta(half),
        "chance_at_most": min(1.0, curve.delta(half) / -math.expm1(-half)),
        "delta": curve.delta(epsilon),
    }
    if rate == 1:
        mu = math.sqrt(steps) / noise
        found["chance"] = 0.5 * math.erfc((epsilon / mu - mu / 2) / math.sqrt(2))
    return found


def noise_rules(epsilon: float, delta: float, rate: float, steps: int) -> list[dict[str, Any]]:
    """Noise multipliers for a training by the rules of the texts, and the epsilon that they really
    cost.

    Algorithm 1 of the study of DP-SGD and DP-FTRL has epsilon0 = epsilon / sqrt(T log(T / delta)),
    delta0 = delta / T and sigma = sqrt(2 log(2 / delta0)) / epsilon0, and uses no sampling. The
    other rules are for one release: here of all steps as one Gaussian, without sampling.
    """
    each = check.epsilon("epsilon", epsilon) / math.sqrt(steps * math.log(steps / delta))
    rows = [("algorithm 1", math.sqrt(2 * math.log(2 * steps / delta)) / each)]
    many = math.sqrt(check.integer("steps", steps))
    if epsilon < 1:
        rows.append(("classic", gaussian.sigma_classic(epsilon, delta) * many))
    rows.append(("Pei", gaussian.sigma_pei(epsilon, delta) * many))
    rows.append(("analytic", gaussian.sigma_analytic(epsilon, delta) * many))
    tight = calibrate.noise(lambda sigma: events.poisson(sigma, rate, steps), epsilon, delta)
    rows.append(("sampled, tight", tight))
    return [
        {
            "rule": name,
            "noise_multiplier": noise,
            "epsilon": accounting.epsilon(events.poisson(noise, rate, steps), delta),
        }
        for name, noise in rows
    ]


def private_mean(
    records: int, sample: int, most: float, epsilon: float, delta: float
) -> dict[str, float]:
    """Noise on a private mean of values in [0, most]: of all records, and of a Poisson sample of
    `sample` expected ones. A sample has a sensitivity records / sample times as large, and needs a
    smaller noise multiplier.
    """
    rate = check.integer("sample", sample) / check.integer("records", records)
    if rate > 1:
        raise InvalidInput("sample", sample, f"must be at most the records ({records})")
    check.positive("most", most)
    whole = gaussian.sigma_analytic(epsilon, delta)
    part = calibrate.noise(lambda sigma: events.poisson(sigma, rate, 1), epsilon, delta)
    return {
        "noise_multiplier": whole,
        "stddev": most / records * whole,
        "sampled_noise_multiplier": part,
        "sampled_stddev": most / sample * part,
        "price": records * part / (sample * whole),
    }


def excess_risk(records: int, dimension: int, epsilon: float) -> dict[str, dict[str, float]]:
    """The rates of the guide, section 4.2.1, without constants and logarithms. For strongly convex
    population risk the guide prints sqrt(p); the theorem has p.
    """
    n, p = check.integer("records", records), check.integer("dimension", dimension)
    one = math.sqrt(p) / (check.epsilon("epsilon", epsilon) * n)
    return {
        "convex": {"empirical": one, "population": 1 / math.sqrt(n) + one},
        "strongly convex": {"empirical": one**2, "population": 1 / n + one**2},
    }


def scaled(
    noise: float, batch: float, factor: float, records: int, steps: int, delta: float
) -> list[dict[str, float]]:
    """The guide's scaling law: batch and noise times the same factor leave the noise per example,
    and for large batches the accuracy; what they cost.
    """
    rows = []
    for k in (1.0, check.positive("factor", factor)):
        if k * batch > records:
            raise InvalidInput("factor", factor, f"makes batches larger than {records} records")
        event = events.poisson(noise * k, batch * k / records, steps)
        rows.append(
            {
                "noise_multiplier": noise * k,
                "batch_size": batch * k,
                "noise_per_example": noise / batch,
                "epsilon": accounting.epsilon(event, delta),
            }
        )
    return rows


def norms(
    dimension: int, epsilon: float, delta: float, rate: float, steps: int, spread: float
) -> dict[str, float]:
    """L1 clipping with Laplace noise against L2 clipping with Gaussian noise, at one guarantee.

    `spread` is the L1 norm of a typical gradient over its L2 norm, from 1 (one coordinate) to the
    root of the dimension (all alike); both clip norms are those of such a gradient of L2 norm one.
    Noise is told as standard deviations of a coordinate.
    """
    check.integer("dimension", dimension)
    if not 1 <= spread <= math.sqrt(dimension) * (1 + 1e-9):
        raise InvalidInput("spread", spread, "must lie between 1 and the root of the dimension")

    def laplace(scale: float) -> events.Event:
        one = events.Laplace(scale)
        return events.Repeated(one if rate == 1 else events.PoissonSampled(rate, one), steps)

    scale = calibrate.noise(laplace, epsilon, delta)
    sigma = calibrate.noise(lambda s: events.poisson(s, rate, steps), epsilon, delta)
    return {
        "laplace_scale": scale,
        "laplace_stddev": math.sqrt(2) * scale * spread,
        "gaussian_stddev": sigma,
        "ratio": math.sqrt(2) * scale * spread / sigma,
        "equal_at_spread": sigma / (math.sqrt(2) * scale),
    }
