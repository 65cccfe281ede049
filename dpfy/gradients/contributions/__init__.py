"""Contributions: what one use of a parameter adds to every example's gradient, its norm and its
clipped sum, never written out.
"""
