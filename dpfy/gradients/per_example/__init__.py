"""Per-example gradients that are never written out: what one use of a parameter adds to every
example's gradient, its norm and its clipped sum.
"""
