"""What tools call an epoch: as many steps of a plan as draw the number of its records once, on
average.
"""

from __future__ import annotations

from dpfy.plan.recipe import Recipe


def steps_each(recipe: Recipe) -> int:
    """Steps in an epoch, at most all of them."""
    return min(recipe.steps, max(1, round(recipe.records / recipe.expected_batch)))
