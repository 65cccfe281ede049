"""Training on several processes: their group, and how each layout of a model spreads sums, noise
and gradients over them.
"""
