"""Architectures that train well under differential privacy, by name. Importing this package imports
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import exported_names as _exported_names

if TYPE_CHECKING:
    from dpfy.models.config import MODELS as MODELS
    from dpfy.models.config import ModelConfig as ModelConfig
    from dpfy.models.normalisation import Normalisation as Normalisation

__all__, __getattr__, __dir__ = _exported_names(__name__)
