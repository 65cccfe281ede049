"""Batch to bounded sum: clip rules, layer rules, engines and the model checker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import exported_names as _exported_names

if TYPE_CHECKING:
    from dpfy.gradients.engine import per_view as per_view

__all__, __getattr__, __dir__ = _exported_names(__name__)
