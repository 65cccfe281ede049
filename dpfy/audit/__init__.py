"""Lower bounds on epsilon measured from outside: estimators, attacks, deterministic checks, and the
bugs they must catch.
"""
