"""Mechanisms: one release each, with noise whose law is the given one to the last bit."""

from dpfy.mechanisms.choice import choose, permutation, permute_and_flip
from dpfy.mechanisms.exact import Bits, below, bernoulli, bernoulli_exp, coins, geometric, uniform
from dpfy.mechanisms.integers import gaussian, laplace

__all__ = [
    "Bits",
    "below",
    "bernoulli",
    "bernoulli_exp",
    "choose",
    "coins",
    "gaussian",
    "geometric",
    "laplace",
    "permutation",
    "permute_and_flip",
    "uniform",
]
