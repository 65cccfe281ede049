"""Records and where they come from: loaders that learn nothing from the data. Ranges, categories
and classes are public input.

Importing this package imports no torch; :mod:`dpfy.data.records` and :mod:`dpfy.data.source` do.
"""

from dpfy.data.config import KINDS, DataConfig

__all__ = ["KINDS", "DataConfig"]
