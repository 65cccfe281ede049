"""Engines: per-unit losses to the bounded sum, by the loop, by one vectorised backward, or by
book-keeping.
"""
