"""Where the pieces are coupled, once: a recipe is what will be done, a plan is a recipe with its
noise fixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import exported_names as _exported_names

if TYPE_CHECKING:
    from dpfy.plan.claim import ForeignBatches as ForeignBatches
    from dpfy.plan.correlated import bandmf as bandmf
    from dpfy.plan.correlated import blt as blt
    from dpfy.plan.correlated import dpftrl as dpftrl
    from dpfy.plan.recipe import with_stopping as with_stopping

__all__, __getattr__, __dir__ = _exported_names(__name__)
