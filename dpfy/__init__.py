"""dpfy: differentially private machine learning, from the first look at the data to the sentence
under the released model.

recipe = dpfy.dpsgd(records=60_000, batch_size=4096, epochs=40, clip_norm=1.0) plan =
recipe.calibrate(epsilon=3.0, delta=1e-5) result = dpfy.fit(model, train, loss="cross_entropy",
optimizer=optimizer, plan=plan, run="runs/mnist")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from dpfy.core.errors import BudgetExceeded, Busy, Corrupt, DpfyError, InvalidInput, Unsupported
    from dpfy.core.ledger import Ledger
    from dpfy.core.unit import Adjacency, Unit
    from dpfy.data.given import lazy
    from dpfy.data.owners import Users
    from dpfy.data.users import by_user
    from dpfy.gradients.engines.per_user import per_user, per_view
    from dpfy.gradients.layers.registered import register_layer
    from dpfy.gradients.model_report import inspect
    from dpfy.integrations.opacus import from_opacus
    from dpfy.models.normalisation import Normalisation
    from dpfy.models.repair import repair
    from dpfy.plan.auto import auto
    from dpfy.plan.claim import ForeignBatches
    from dpfy.plan.correlated import bandmf, blt, dpftrl
    from dpfy.plan.recipe import Plan, Recipe, dpsgd
    from dpfy.queries.plan import QueryTerms
    from dpfy.queries.run import query
    from dpfy.report.verify import verify
    from dpfy.synthetic.evolution.run import EvolutionOptions, evolve
    from dpfy.synthetic.images.run import ImageOptions, ImageTerms, synthesize_images
    from dpfy.synthetic.images.source import ImageSchema
    from dpfy.synthetic.plan import SynthesisOptions, SynthesisTerms
    from dpfy.synthetic.run import synthesize
    from dpfy.synthetic.text.run import TextOptions, TextTerms, synthesize_text
    from dpfy.training.evaluation import PrivateTest, PublicTest, WithheldTest
    from dpfy.training.fit import Result, fit
    from dpfy.training.load import load, save_pretrained
    from dpfy.training.loop import PrivateTraining
    from dpfy.training.metrics import Plateau
    from dpfy.training.normalise import private_batchnorm
    from dpfy.training.parallel.world import World
    from dpfy.training.per_record import per_record
    from dpfy.training.predict import predict
    from dpfy.training.run import Run, RunFolder
    from dpfy.training.runtime import Runtime
    from dpfy.training.update import Update

# Names are found when first used, so that `import dpfy` and the calculators never pay for torch.
_HOME = {
    "BudgetExceeded": "dpfy.core.errors",
    "Busy": "dpfy.core.errors",
    "Corrupt": "dpfy.core.errors",
    "DpfyError": "dpfy.core.errors",
    "InvalidInput": "dpfy.core.errors",
    "Unsupported": "dpfy.core.errors",
    "Ledger": "dpfy.core.ledger",
    "inspect": "dpfy.gradients.model_report",
    "register_layer": "dpfy.gradients.layers.registered",
    "lazy": "dpfy.data.given",
    "by_user": "dpfy.data.users",
    "Users": "dpfy.data.owners",
    "per_record": "dpfy.training.per_record",
    "per_user": "dpfy.gradients.engines.per_user",
    "per_view": "dpfy.gradients.engines.per_user",
    "Adjacency": "dpfy.core.unit",
    "Unit": "dpfy.core.unit",
    "repair": "dpfy.models.repair",
    "Normalisation": "dpfy.models.normalisation",
    "private_batchnorm": "dpfy.training.normalise",
    "from_opacus": "dpfy.integrations.opacus",
    "ForeignBatches": "dpfy.plan.claim",
    "Plan": "dpfy.plan.recipe",
    "Recipe": "dpfy.plan.recipe",
    "auto": "dpfy.plan.auto",
    "bandmf": "dpfy.plan.correlated",
    "blt": "dpfy.plan.correlated",
    "dpftrl": "dpfy.plan.correlated",
    "dpsgd": "dpfy.plan.recipe",
    "with_stopping": "dpfy.plan.recipe",
    "QueryTerms": "dpfy.queries.plan",
    "query": "dpfy.queries.run",
    "EvolutionOptions": "dpfy.synthetic.evolution.run",
    "evolve": "dpfy.synthetic.evolution.run",
    "ImageSchema": "dpfy.synthetic.images.source",
    "ImageOptions": "dpfy.synthetic.images.run",
    "ImageTerms": "dpfy.synthetic.images.run",
    "SynthesisOptions": "dpfy.synthetic.plan",
    "SynthesisTerms": "dpfy.synthetic.plan",
    "synthesize": "dpfy.synthetic.run",
    "synthesize_images": "dpfy.synthetic.images.run",
    "TextOptions": "dpfy.synthetic.text.run",
    "TextTerms": "dpfy.synthetic.text.run",
    "synthesize_text": "dpfy.synthetic.text.run",
    "verify": "dpfy.report.verify",
    "Plateau": "dpfy.training.metrics",
    "PublicTest": "dpfy.training.evaluation",
    "PrivateTest": "dpfy.training.evaluation",
    "WithheldTest": "dpfy.training.evaluation",
    "Result": "dpfy.training.fit",
    "fit": "dpfy.training.fit",
    "load": "dpfy.training.load",
    "predict": "dpfy.training.predict",
    "save_pretrained": "dpfy.training.load",
    "PrivateTraining": "dpfy.training.loop",
    "Run": "dpfy.training.run",
    "RunFolder": "dpfy.training.run",
    "Runtime": "dpfy.training.runtime",
    "Update": "dpfy.training.update",
    "World": "dpfy.training.parallel.world",
}

__all__ = [
    "Adjacency",
    "BudgetExceeded",
    "Busy",
    "Corrupt",
    "DpfyError",
    "EvolutionOptions",
    "ForeignBatches",
    "ImageOptions",
    "ImageSchema",
    "ImageTerms",
    "InvalidInput",
    "Ledger",
    "Normalisation",
    "Plan",
    "Plateau",
    "PrivateTest",
    "PrivateTraining",
    "PublicTest",
    "QueryTerms",
    "Recipe",
    "Result",
    "Run",
    "RunFolder",
    "Runtime",
    "SynthesisOptions",
    "SynthesisTerms",
    "TextOptions",
    "TextTerms",
    "Unit",
    "Unsupported",
    "Update",
    "Users",
    "WithheldTest",
    "World",
    "auto",
    "bandmf",
    "blt",
    "by_user",
    "dpftrl",
    "dpsgd",
    "evolve",
    "fit",
    "from_opacus",
    "inspect",
    "lazy",
    "load",
    "per_record",
    "per_user",
    "per_view",
    "predict",
    "private_batchnorm",
    "query",
    "register_layer",
    "repair",
    "save_pretrained",
    "synthesize",
    "synthesize_images",
    "synthesize_text",
    "verify",
    "with_stopping",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dpfy' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
