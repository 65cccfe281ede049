"""Synthetic images with labels: noisy moments in a public basis, a mixture of Gaussians for every
class, pictures drawn from it.
"""
