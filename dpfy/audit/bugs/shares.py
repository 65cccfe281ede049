"""Mistakes of noise in shares: on clients that add it, on servers that count them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpfy.audit.bench import Bug

SHARES, SUMS, LENGTHS, SURVIVORS = (
    "shares of noise",
    "sums of vectors",
    "length of messages",
    "survivors",
)


class Scheme:
    """A scheme of which one function is another, given the real scheme and its arguments; the claim
    is the real one's.
    """

    def __init__(self, real: Any, **instead: Callable[..., Any]) -> None:
        self.real, self.instead = real, instead

    def __getattr__(self, name: str) -> Any:
        if name in self.instead:
            return lambda *given: self.instead[name](self.real, *given)
        return getattr(self.real, name)

    def encode(self, vector: Any, randomness: Any, client: int, round: int) -> Any:
        """The steps of the real one, one of them changed."""
        if "encode" in self.instead:
            return self.instead["encode"](self.real, vector, randomness, client, round)
        return self.wrapped(
            self.whole(vector, randomness, client, round) + self.drawn(randomness, client, round)
        )


def instead(**parts: Callable[..., Any]) -> Callable[[Any], Any]:
    """A seam that changes some functions of a scheme."""
    return lambda real: Scheme(real, **parts)


def quieter(factor: Callable[[Any], float]) -> Callable[[Any], Any]:
    """A seam that makes every share smaller."""
    return lambda real: dataclasses.replace(
        real, noise_multiplier=real.noise_multiplier * factor(real.shares)
    )


def forgotten(real: Any, vector: Any, randomness: Any, client: int, round: int) -> Any:
    """A client that came back after it was lost sends its vector without noise."""
    if client == 3:
        return real.wrapped(real.whole(vector, randomness, client, round))
    return real.encode(vector, randomness, client, round)


def unbounded(real: Any, vector: Any, randomness: Any, client: int, round: int) -> Any:
    """Rotated, scaled and rounded once, however long it is then; not clipped."""
    size = real.shares.dimension
    flat = np.nan_to_num(np.asarray(vector, np.float64), posinf=1e6, neginf=-1e6).reshape(-1)[:size]
    return np.rint(
        np.clip(real._rotation(round).forward(flat) / real.step, -(2.0**40), 2.0**40)
    ).astype(np.int64)


def rounded_away(real: Any, vector: Any, randomness: Any, client: int, round: int) -> Any:
    """Clipped, but rounded away from zero without a look at the length."""
    flat = np.nan_to_num(np.asarray(vector, np.float64), posinf=0.0, neginf=0.0).reshape(-1)
    flat = flat * min(1.0, real.clip / max(float(np.linalg.norm(flat)), 1e-300))
    rotated = real._rotation(round).forward(flat) / real.step
    return (np.sign(rotated) * np.ceil(np.abs(rotated))).astype(np.int64)


class AnyNumber:
    """An aggregator that sums however many are left."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def sum(self, messages: Any, *, bits: int, least: int, round: int) -> Any:
        """Without a look at `least`."""
        return self.real.sum(messages, bits=bits, least=1, round=round)


BUGS = (
    Bug("share-forgotten", "one client adds no noise", SHARES, scheme=instead(encode=forgotten)),
    Bug(
        "share-for-all",
        "shares are sized for all clients, and some of them drop out",
        SHARES,
        scheme=quieter(lambda shares: math.sqrt(shares.least / shares.clients)),
    ),
    Bug(
        "share-without-growth",
        "shares are sized for vectors before they are rounded, which makes them longer",
        SHARES,
        scheme=quieter(lambda shares: shares.scaled / math.sqrt(shares.squared)),
    ),
    Bug(
        "share-variance",
        "the variance of all is shared out as if it were a standard deviation",
        SHARES,
        scheme=quieter(lambda shares: 1 / math.sqrt(shares.least)),
    ),
    Bug(
        "share-in-common",
        "all clients draw their shares from one seed",
        SHARES,
        scheme=instead(
            drawn=lambda real, randomness, client, round: real.drawn(randomness, 0, round)
        ),
    ),
    Bug(
        "share-of-the-round-before",
        "a share is drawn once and used in every round",
        SHARES,
        scheme=instead(
            drawn=lambda real, randomness, client, round: real.drawn(randomness, client, 0)
        ),
    ),
    Bug(
        "sum-not-centred",
        "the server reads wrapped sums as they are: those below zero come out as large ones",
        SUMS,
        scheme=instead(
            decode=lambda real, total, round: real._rotation(round).inverse(
                total.astype(np.float64) * real.step
            )
        ),
    ),
    Bug(
        "sum-wraps-around",
        "sums are taken modulo too small a number",
        SUMS,
        scheme=lambda real: dataclasses.replace(
            real, shares=dataclasses.replace(real.shares, bits=7)
        ),
    ),
    Bug(
        "sum-not-rotated-back",
        "the rotation has no inverse on the server",
        SUMS,
        scheme=instead(
            decode=lambda real, total, round: (real.centred(total).astype(np.float64) * real.step)[
                : real.shares.dimension
            ]
        ),
    ),
    Bug(
        "message-unbounded",
        "a client rounds what it has and does not clip",
        LENGTHS,
        scheme=instead(whole=unbounded),
    ),
    Bug(
        "message-growth-not-charged",
        "rounding makes vectors longer than is billed, and nobody looks",
        LENGTHS,
        scheme=instead(whole=rounded_away),
    ),
    Bug(
        "round-with-too-few",
        "clients drop out with their noise, and the round is released",
        SURVIVORS,
        aggregator=AnyNumber,
    ),
)
