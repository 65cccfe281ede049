"""Private synthetic tables: a public domain, noisy marginals, a distribution that agrees with them,
rows drawn from it.
"""
