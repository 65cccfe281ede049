"""Plan, model and data in; private model and run folder out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import exported_names as _exported_names

if TYPE_CHECKING:
    from dpfy.training.fit import Result as Result
    from dpfy.training.load import save_pretrained as save_pretrained
    from dpfy.training.metrics import Plateau as Plateau
    from dpfy.training.normalise import private_batchnorm as private_batchnorm
    from dpfy.training.parallel.world import World as World
    from dpfy.training.run import TrainingRun as TrainingRun
    from dpfy.training.step import Update as Update

__all__, __getattr__, __dir__ = _exported_names(__name__)
