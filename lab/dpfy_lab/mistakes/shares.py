"""Mistakes of noise in shares: on clients that add it, on servers that count them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpfy_lab.checks.shares import LENGTHS, NOISE, SUMS, SURVIVORS
from dpfy_lab.selftest.mistake import mistake

HOME = "dpfy.federated.shares"
SCHEME = f"{HOME}.scheme.SharingScheme"
DRAWN, WHOLE, DECODE = f"{SCHEME}.drawn", f"{SCHEME}.whole", f"{SCHEME}.decode"


@mistake("share-forgotten", "one client adds no noise", NOISE, f"{SCHEME}.encode")
def _(real: Any, self: Any, vector: Any, randomness: Any, client: int, round: int) -> Any:
    # It came back after it was lost.
    if client == 3:
        return self.wrapped(self.whole(vector, randomness, client, round))
    return real(self, vector, randomness, client, round)


def smaller(factor: Callable[[Any], float]) -> Callable[..., Any]:
    """Shares whose deviation is multiplied."""

    def drawn(real: Any, self: Any, *given: Any) -> Any:
        noise = self.noise_multiplier * factor(self.shares)
        return real(replace(self, noise_multiplier=noise), *given)

    return drawn


mistake(
    "share-for-all", "shares are sized for all clients, and some of them drop out", NOISE, DRAWN
)(smaller(lambda shares: math.sqrt(shares.least / shares.clients)))
mistake(
    "share-without-growth",
    "shares are sized for vectors before they are rounded, which makes them longer",
    NOISE,
    DRAWN,
)(smaller(lambda shares: shares.scaled / math.sqrt(shares.squared)))
mistake(
    "share-variance",
    "the variance of all is shared out as if it were a standard deviation",
    NOISE,
    DRAWN,
)(smaller(lambda shares: 1 / math.sqrt(shares.least)))


@mistake("share-in-common", "all clients draw their shares from one seed", NOISE, DRAWN)
def _(real: Any, self: Any, randomness: Any, client: int, round: int) -> Any:
    return real(self, randomness, 0, round)


@mistake("share-of-the-round-before", "a share is drawn once and used in every round", NOISE, DRAWN)
def _(real: Any, self: Any, randomness: Any, client: int, round: int) -> Any:
    return real(self, randomness, client, 0)


@mistake(
    "sum-not-centred",
    "the server reads wrapped sums as they are: those below zero come out as large ones",
    SUMS,
    DECODE,
)
def _(real: Any, self: Any, total: Any, round: int) -> Any:
    return self._rotation(round).inverse(total.astype(np.float64) * self.step)


@mistake("sum-wraps-around", "sums are taken modulo too small a number", SUMS, f"{SCHEME}.bits")
def _(real: Any, self: Any) -> int:
    return 7


@mistake("sum-not-rotated-back", "the rotation has no inverse on the server", SUMS, DECODE)
def _(real: Any, self: Any, total: Any, round: int) -> Any:
    return (self.centred(total).astype(np.float64) * self.step)[: self.shares.dimension]


@mistake("message-unbounded", "a client rounds what it has and does not clip", LENGTHS, WHOLE)
def _(real: Any, self: Any, vector: Any, randomness: Any, client: int, round: int) -> Any:
    flat = np.nan_to_num(np.asarray(vector, np.float64), posinf=1e6, neginf=-1e6).reshape(-1)
    rotated = self._rotation(round).forward(flat[: self.shares.dimension]) / self.step
    return np.rint(np.clip(rotated, -(2.0**40), 2.0**40)).astype(np.int64)


@mistake(
    "message-growth-not-charged",
    "rounding makes vectors longer than is charged, and nobody looks",
    LENGTHS,
    WHOLE,
)
def _(real: Any, self: Any, vector: Any, randomness: Any, client: int, round: int) -> Any:
    flat = np.nan_to_num(np.asarray(vector, np.float64), posinf=0.0, neginf=0.0).reshape(-1)
    flat = flat * min(1.0, self.clip / max(float(np.linalg.norm(flat)), 1e-300))
    rotated = self._rotation(round).forward(flat) / self.step
    return (np.sign(rotated) * np.ceil(np.abs(rotated))).astype(np.int64)


@mistake(
    "round-with-too-few",
    "clients drop out with their noise, and the round is released",
    SURVIVORS,
    f"{HOME}.aggregator.TrustedSum.sum",
)
def _(real: Any, self: Any, messages: Any, *, bits: int, least: int, round: int) -> Any:
    return real(self, messages, bits=bits, least=1, round=round)
