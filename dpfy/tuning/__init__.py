"""Searches for settings that pay their own price: what may be tried on private data, what it costs,
and the one trial that is released.
"""
