"""dpfy: differentially private machine learning, from the first look at the data to the sentence
under the released model.

recipe = dpfy.dpsgd(records=60_000, batch_size=4096, epochs=40, clip_norm=1.0) plan =
recipe.calibrate(epsilon=3.0, delta=1e-5) result = dpfy.fit(model, train, loss="cross_entropy",
optimizer=optimizer, plan=plan, run="runs/mnist")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import lazy_names as _lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from dpfy.core.errors import BudgetExceeded, Busy, Corrupt, DpfyError, InvalidInput, Unsupported
    from dpfy.core.ledger import Ledger
    from dpfy.core.unit import Adjacency, Person, Unit
    from dpfy.data.given import lazy
    from dpfy.data.owners import Users
    from dpfy.data.users import by_user
    from dpfy.gradients.engine import per_user, per_view
    from dpfy.gradients.layers.registered import register_layer
    from dpfy.gradients.model_report import inspect
    from dpfy.integrations.opacus import from_opacus
    from dpfy.models.normalisation import Normalisation
    from dpfy.models.repair import repair
    from dpfy.plan.auto import auto
    from dpfy.plan.claim import ForeignBatches
    from dpfy.plan.correlated import bandmf, blt, dpftrl
    from dpfy.plan.recipe import Plan, Recipe, dpsgd, with_stopping
    from dpfy.queries.plan import QueryTerms
    from dpfy.queries.run import query
    from dpfy.report.verify import verify
    from dpfy.runs.run import Run
    from dpfy.synthetic.evolution import EvolutionOptions, evolve
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
    from dpfy.training.run import TrainingRun
    from dpfy.training.runtime import Runtime
    from dpfy.training.update import Update

__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "dpfy.core.errors": "BudgetExceeded Busy Corrupt DpfyError InvalidInput Unsupported",
        "dpfy.core.ledger": "Ledger",
        "dpfy.core.unit": "Adjacency Person Unit",
        "dpfy.data.given": "lazy",
        "dpfy.data.owners": "Users",
        "dpfy.data.users": "by_user",
        "dpfy.gradients.engine": "per_user per_view",
        "dpfy.gradients.layers.registered": "register_layer",
        "dpfy.gradients.model_report": "inspect",
        "dpfy.integrations.opacus": "from_opacus",
        "dpfy.models.normalisation": "Normalisation",
        "dpfy.models.repair": "repair",
        "dpfy.plan.auto": "auto",
        "dpfy.plan.claim": "ForeignBatches",
        "dpfy.plan.correlated": "bandmf blt dpftrl",
        "dpfy.plan.recipe": "Plan Recipe dpsgd with_stopping",
        "dpfy.queries.plan": "QueryTerms",
        "dpfy.queries.run": "query",
        "dpfy.report.verify": "verify",
        "dpfy.synthetic.evolution": "EvolutionOptions evolve",
        "dpfy.synthetic.plan": "SynthesisOptions SynthesisTerms",
        "dpfy.synthetic.run": "synthesize",
        "dpfy.synthetic.text.run": "TextOptions TextTerms synthesize_text",
        "dpfy.training.evaluation": "PrivateTest PublicTest WithheldTest",
        "dpfy.training.fit": "Result fit",
        "dpfy.training.load": "load save_pretrained",
        "dpfy.training.loop": "PrivateTraining",
        "dpfy.training.metrics": "Plateau",
        "dpfy.training.normalise": "private_batchnorm",
        "dpfy.training.parallel.world": "World",
        "dpfy.training.per_record": "per_record",
        "dpfy.training.predict": "predict",
        "dpfy.runs.run": "Run",
        "dpfy.training.run": "TrainingRun",
        "dpfy.training.runtime": "Runtime",
        "dpfy.training.update": "Update",
    },
)

__all__ = [
    "Adjacency",
    "BudgetExceeded",
    "Busy",
    "Corrupt",
    "DpfyError",
    "EvolutionOptions",
    "ForeignBatches",
    "InvalidInput",
    "Ledger",
    "Normalisation",
    "Person",
    "Plan",
    "Plateau",
    "PrivateTest",
    "PrivateTraining",
    "PublicTest",
    "QueryTerms",
    "Recipe",
    "Result",
    "Run",
    "Runtime",
    "SynthesisOptions",
    "SynthesisTerms",
    "TextOptions",
    "TextTerms",
    "TrainingRun",
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
    "synthesize_text",
    "verify",
    "with_stopping",
]
