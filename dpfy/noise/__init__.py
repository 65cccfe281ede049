"""Bounded sum in, private value out: independent or correlated Gaussian noise, addressed by
step.
"""
