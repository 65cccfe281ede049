"""dpfy: differentially private machine learning, from the first look at the data to the sentence
under the released model.

    people = dpfy.Dataset("people.csv", schema="people.toml", ledger="people.jsonl",
                          budget=dpfy.Budget(8, 1e-6))
    answers = dpfy.query(people, "mean(age), count() by job", epsilon=0.5)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpfy.core.plugins import exported_names as _exported_names

__version__ = "0.2.0"

# The one list of public names: type checkers read it as it is, and `_exported_names` makes
# `__all__` of it and imports a name when it is first used.
if TYPE_CHECKING:
    from dpfy import audit as audit
    from dpfy.core.errors import BudgetExceeded as BudgetExceeded
    from dpfy.core.errors import DpfyError as DpfyError
    from dpfy.core.errors import InvalidInput as InvalidInput
    from dpfy.core.errors import Unsupported as Unsupported
    from dpfy.core.ledger import Ledger as Ledger
    from dpfy.core.unit import Adjacency as Adjacency
    from dpfy.core.unit import Person as Person
    from dpfy.core.unit import Unit as Unit
    from dpfy.data.given import lazy as lazy
    from dpfy.data.owners import Users as Users
    from dpfy.data.users import by_user as by_user
    from dpfy.gradients.engine import per_user as per_user
    from dpfy.gradients.model_report import inspect as inspect
    from dpfy.integrations.opacus import from_opacus as from_opacus
    from dpfy.models.repair import repair as repair
    from dpfy.plan.auto import auto as auto
    from dpfy.plan.recipe import Plan as Plan
    from dpfy.plan.recipe import Recipe as Recipe
    from dpfy.plan.recipe import dpsgd as dpsgd
    from dpfy.prediction.session import serve as serve
    from dpfy.queries.run import query as query
    from dpfy.report.verify import verify as verify
    from dpfy.runs.dataset import Budget as Budget
    from dpfy.runs.dataset import Dataset as Dataset
    from dpfy.runs.kinds import load as load
    from dpfy.runs.kinds import predict as predict
    from dpfy.runs.kinds import sign as sign
    from dpfy.runs.released import Released as Released
    from dpfy.runs.run import Run as Run
    from dpfy.synthetic.evolution import evolve as evolve
    from dpfy.synthetic.run import synthesize as synthesize
    from dpfy.synthetic.text.tokens import Texts as Texts
    from dpfy.tables.columns import Category as Category
    from dpfy.tables.columns import Date as Date
    from dpfy.tables.columns import Label as Label
    from dpfy.tables.columns import Number as Number
    from dpfy.tables.columns import Text as Text
    from dpfy.tables.schema import Schema as Schema
    from dpfy.training.evaluation import PrivateTest as PrivateTest
    from dpfy.training.evaluation import PublicTest as PublicTest
    from dpfy.training.evaluation import WithheldTest as WithheldTest
    from dpfy.training.fit import fit as fit
    from dpfy.training.loop import PrivateTraining as PrivateTraining
    from dpfy.training.per_record import per_record as per_record
    from dpfy.training.runtime import Runtime as Runtime
    from dpfy.tuning.fits import tune as tune

# Of the levels below, reachable in the same way; each is documented with its family.
if TYPE_CHECKING:
    from dpfy.core.errors import Busy as Busy
    from dpfy.core.errors import Corrupt as Corrupt
    from dpfy.gradients.engine import per_view as per_view
    from dpfy.gradients.layers.registered import register_layer as register_layer
    from dpfy.models.normalisation import Normalisation as Normalisation
    from dpfy.plan.claim import ForeignBatches as ForeignBatches
    from dpfy.plan.correlated import bandmf as bandmf
    from dpfy.plan.correlated import blt as blt
    from dpfy.plan.correlated import dpftrl as dpftrl
    from dpfy.plan.recipe import with_stopping as with_stopping
    from dpfy.training.fit import Result as Result
    from dpfy.training.load import save_pretrained as save_pretrained
    from dpfy.training.metrics import Plateau as Plateau
    from dpfy.training.normalise import private_batchnorm as private_batchnorm
    from dpfy.training.parallel.world import World as World
    from dpfy.training.run import TrainingRun as TrainingRun
    from dpfy.training.update import Update as Update

__all__, __getattr__, __dir__ = _exported_names(__name__)
