"""Where the pieces are coupled, once: a recipe is what will be done, a plan is a recipe with its
noise fixed.
"""
