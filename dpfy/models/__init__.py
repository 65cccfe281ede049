"""Architectures that train well under differential privacy, by name. Importing this package imports
no torch.
"""

from dpfy.models.config import MODELS, ModelConfig

__all__ = ["MODELS", "ModelConfig"]
