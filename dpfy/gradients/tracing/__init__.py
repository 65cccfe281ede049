"""Tracing: what a step did, from the autograd graph and the dispatcher: reports, batch axes,
untracked uses, mixing of examples.
"""
