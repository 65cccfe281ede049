"""Mechanisms: one release each, with noise whose law is the stated one to the last bit."""

from dpfy.mechanisms.bits import Bits
from dpfy.mechanisms.exact import below, bernoulli, bernoulli_exp, choose, geometric, permutation, permute_and_flip
from dpfy.mechanisms.integers import gaussian, laplace

__all__ = [
    "Bits",
    "below",
    "bernoulli",
    "bernoulli_exp",
    "choose",
    "gaussian",
    "geometric",
    "laplace",
    "permutation",
    "permute_and_flip",
]
