"""dpfy: differentially private machine learning, from the first look at the data to the sentence under the released model."""

from __future__ import annotations

__version__ = "0.1.0"
